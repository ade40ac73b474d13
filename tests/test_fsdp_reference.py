"""The reference of module 04 does what plain DDP and PyTorch's own fully_shard do, on the same model and data."""

from pathlib import Path

import pytest
import torch

from autograder.lab import gpt, ranks

FILE = Path(__file__).parents[1] / "solutions/04_fsdp/fsdp.py"
STEPS, ROWS, LENGTH, VOCAB = 10, 2, 8, 32  # rows: of each rank
PRELOAD = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh", "torch.utils.checkpoint")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor all of it."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def whole(fsdp: torch.nn.Module, parts: dict) -> list[torch.Tensor]:
    """One tensor for each parameter of the module, from each shard's part of it."""
    found = {}
    for flat in fsdp._flat_shards():
        own = flat.shard.detach().clone()
        with torch.no_grad():
            flat.shard.copy_(parts[flat.shard])
        found.update(zip(flat.params, [v.clone() for v in flat.gather_values()], strict=True))
        with torch.no_grad():
            flat.shard.copy_(own)
    return [found[p] for p in fsdp.module.parameters()]


def ten_steps(context, way: str, settings: dict, tied: bool, tokens: torch.Tensor) -> dict:
    """On a rank: AdamW with clipping on this rank's rows; losses, norms, last parameters and second moments."""
    torch.manual_seed(0)
    model = gpt.tiny(vocab_size=VOCAB, context_length=LENGTH, tied=tied)
    called, blocks = model, list(model.blocks)
    if way == "DDP":
        called = torch.nn.parallel.DistributedDataParallel(model)
    elif way == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        if settings.pop("checkpointed", False):
            context.student.checkpoint_units(model, blocks)
        called = context.student.FSDP(model, blocks, **settings)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    losses, norms = [], []
    for batch in tokens:
        optimizer.zero_grad()
        mine = batch[context.rank * ROWS : (context.rank + 1) * ROWS]
        for micro_batch in mine.chunk(2):
            logits = called(micro_batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch[:, 1:].flatten()) / 2
            loss.backward()
        losses.append(loss.item())
        if way == "reference":
            norms.append(called.clip_grad_norm_(0.5).item())
        else:
            norms.append(full(torch.nn.utils.clip_grad_norm_(called.parameters(), 0.5)).item())
        optimizer.step()
    moments = {p: s["exp_avg_sq"] for p, s in optimizer.state.items()}
    if way == "reference":
        shards = {flat.shard: flat.shard.detach() for flat in called._flat_shards()}
        parameters, squares = whole(called, shards), whole(called, moments)
    else:
        parameters = [full(p) for p in model.parameters()]
        squares = [full(moments[p]) for p in called.parameters()]
    return {"losses": losses, "norms": norms, "parameters": parameters, "moments": squares}


def all_ways(context, ways: list[tuple[str, dict]], tied: bool, tokens: torch.Tensor) -> list[dict]:
    return [ten_steps(context, way, dict(settings), tied, tokens) for way, settings in ways]


WAYS = [
    ("DDP", {}),
    ("fully_shard", {}),
    ("reference", {}),
    ("reference", {"reshard_after_forward": False}),
    ("reference", {"prefetch": True, "checkpointed": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_steps_equal_ddp_and_pytorchs(world_size: int) -> None:
    """Metrics, parameters and optimizer state; two micro-batches a step; with three and four ranks a tied head."""
    tied = world_size > 2
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (STEPS, world_size * ROWS, LENGTH + 1))
    run = ranks.run(all_ways, world_size, WAYS, tied, tokens, student=FILE, preload=PRELOAD, timeout=120)
    for rank in range(world_size):
        ddp, *others = run.values[rank]
        for (way, settings), found in zip(WAYS[1:], others, strict=True):
            for what in ("losses", "norms"):
                assert found[what] == pytest.approx(ddp[what], rel=1e-9), (way, settings, what)
            for what in ("parameters", "moments"):
                for one, other in zip(found[what], ddp[what], strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
