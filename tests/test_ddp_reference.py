"""The reference of module 02 does what PyTorch's own DistributedDataParallel does, on the same model and data."""

import copy
from pathlib import Path

import pytest
import torch

from autograder.lab import gpt, ranks

FILE = Path(__file__).parents[1] / "solutions/02_ddp/ddp.py"
PYTORCH = "DistributedDataParallel"
STEPS, ROWS, LENGTH, VOCAB = 10, 3, 8, 32  # rows: of each rank


def ten_steps(context, wrapper: str, arguments: tuple, model: torch.nn.Module, tokens: torch.Tensor) -> dict:
    """On a rank: AdamW on this rank's rows, under one of the wrappers; the first gradients and the last parameters."""
    model = copy.deepcopy(model)
    home = torch.nn.parallel if wrapper == PYTORCH else context.student
    ddp = getattr(home, wrapper)(model, *arguments)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    gradients = None
    for batch in tokens:
        mine = batch[context.rank * ROWS : (context.rank + 1) * ROWS]
        logits = ddp(mine[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if wrapper != PYTORCH:
            ddp.finish_gradient_synchronization()
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return {"gradients": gradients, "parameters": list(model.parameters())}


def both(context, wrapper: str, arguments: tuple, model: torch.nn.Module, tokens: torch.Tensor) -> list:
    return [ten_steps(context, PYTORCH, (), model, tokens), ten_steps(context, wrapper, arguments, model, tokens)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("wrapper", "arguments"), [("OverlappedDDP", ()), ("BucketedDDP", (0.01,))])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_and_ten_steps_equal_pytorchs(world_size: int, wrapper: str, arguments: tuple, tied: bool) -> None:
    torch.manual_seed(0)
    models = [gpt.tiny(vocab_size=VOCAB, context_length=LENGTH, tied=tied) for _ in range(world_size)]
    tokens = torch.randint(0, VOCAB, (STEPS, world_size * ROWS, LENGTH + 1))
    run = ranks.run(both, world_size, wrapper, arguments, ranks.PerRank(models), tokens, student=FILE)
    for rank in range(world_size):
        torchs, ours = run.values[rank]
        for what in ("gradients", "parameters"):
            for one, other in zip(ours[what], torchs[what], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
        for one, other in zip(ours["parameters"], run.values[0][1]["parameters"], strict=True):
            assert torch.equal(one, other), "the replicas are equal bit for bit"
