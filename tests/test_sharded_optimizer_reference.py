"""The reference of module 03 does what the plain optimizers do, and what PyTorch's own ZeroRedundancyOptimizer does."""

from pathlib import Path

import pytest
import torch

from autograder.lab import gpt, memory, ranks

FILE = Path(__file__).parents[1] / "solutions/03_sharded_optimizer/sharded_optimizer.py"
PRELOAD = (*ranks.OPTIMIZERS, "torch.distributed.optim")
STEPS, ROWS, LENGTH, VOCAB = 20, 2, 8, 32  # rows: of each rank
KINDS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
}


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return gpt.tiny(layers=1, width=16, vocab_size=VOCAB, context_length=LENGTH, tied=True)


def twenty_steps(context, which: str, name: str, options: dict, tokens: torch.Tensor) -> dict:
    """On a rank: the same model trained with one of the optimizers; "plain" sees the whole batch on every rank."""
    model, cls = build(), getattr(torch.optim, name)
    if which == "plain":
        optimizer = cls(model.parameters(), **options)
    elif which == "torch":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), cls, **options)
    else:
        optimizer = getattr(context.student, which)(model.parameters(), cls, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for batch in tokens:
        mine = batch if which == "plain" else batch[context.rank * ROWS : (context.rank + 1) * ROWS]
        optimizer.zero_grad()
        model.loss(mine[:, :-1], mine[:, 1:]).backward()
        if which == "torch":  # it leaves the averaging to DistributedDataParallel
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)
        optimizer.step()
        scheduler.step()
    return {"parameters": list(model.parameters()), "state": memory.optimizer_state_bytes()}


def all_four(context, name: str, options: dict, tokens: torch.Tensor) -> dict:
    kinds = ("plain", "torch", "ShardedOptimizer", "ZeroOptimizer")
    return {which: twenty_steps(context, which, name, options, tokens) for which in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_twenty_steps_equal_the_plain_optimizer_and_pytorchs(name: str, world_size: int) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (STEPS, world_size * ROWS, LENGTH + 1))
    run = ranks.run(all_four, world_size, name, KINDS[name], tokens, student=FILE, preload=PRELOAD, timeout=60)
    for value in run.values:
        for which in ("torch", "ShardedOptimizer", "ZeroOptimizer"):
            pairs = zip(value[which]["parameters"], value["plain"]["parameters"], strict=True)
            for i, (one, other) in enumerate(pairs):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10, msg=f"{which}, parameter {i}")
                assert torch.equal(one, run.values[0][which]["parameters"][i]), f"{which}: replicas are equal"


def state_bytes(context, which: str) -> int:
    """On a rank: bytes of AdamW's state after a step on every parameter."""
    model = build()
    cls = getattr(context.student, which)
    optimizer = cls(model.parameters(), torch.optim.AdamW)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return memory.optimizer_state_bytes()


@pytest.mark.parametrize("which", ["ShardedOptimizer", "ZeroOptimizer"])
def test_state_is_divided(which: str) -> None:
    whole = sum(2 * p.nbytes for p in build().parameters())
    found = ranks.run(state_bytes, 4, which, student=FILE).values
    assert sum(found) == pytest.approx(whole, rel=0.02)
    assert max(found) < whole / 3
