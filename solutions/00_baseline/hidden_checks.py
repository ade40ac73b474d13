"""Checks that students do not see: `autograder check --hidden` adds them to the public ones of each problem."""

import io
import tempfile
from pathlib import Path

import numpy as np
import torch

from autograder.lab.gpt import tiny
from autograder.suites.baseline_calls import (
    GENERATORS,
    batches,
    distinct_tokens,
    draw_schedule,
    draw_settings,
    expect_batch,
    expect_losses,
    expect_rates,
    expect_seeded,
    text,
)
from autograder.suites.checkpoint_calls import fresh, practised, rebuilt
from autograder.suites.kit import as_is, check, difference, draw_int, fail, numbers_agree
from autograder.suites.test_00_baseline import MODULE

__all__ = ["MODULE"]


@check("get_batch", "other sizes, from a memory-mapped file")
def test_get_batch_hidden(ranks, rng):
    def from_file(context, tokens: np.ndarray, calls: list[dict]) -> list:
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/tokens.npy", tokens)
            return batches(context, np.load(f"{folder}/tokens.npy", mmap_mode="r"), calls)

    for dtype in (np.uint16, np.int64, np.uint32):
        length = draw_int(rng, 50, 500)
        tokens = distinct_tokens(rng, length, dtype)
        calls = [{"batch_size": draw_int(rng, 1, 9), "context_length": draw_int(rng, 1, length)} for _ in range(6)]
        for call, found in zip(calls, ranks(from_file, 1, tokens, calls).values[0], strict=True):
            expect_batch(found, call, tokens, ranks.definition("get_batch"))


@check("seed_everything", "other seeds and ranks")
def test_seed_hidden(ranks, rng):
    expect_seeded(ranks, [(draw_int(rng, 0, 2**40), draw_int(rng, 0, 2000)) for _ in range(6)], list(GENERATORS))


@check("cosine_lr", "other schedules, far into them")
def test_lr_hidden(ranks, rng):
    rows = []
    for _ in range(8):
        schedule = draw_schedule(rng, cycle_mult=draw_int(rng, 100, 300) / 100)
        rows += [(draw_int(rng, 0, 3000), schedule) for _ in range(20)]
    expect_rates(ranks, rows)


@check("checkpoint", "another optimizer, in a file between other things")
def test_checkpoint_hidden(ranks, rng):
    def between(context, states: dict, momenta: list[torch.Tensor]) -> list:
        """SGD with momentum, saved to a file that has been written to before and is written to afterwards."""
        model, _ = rebuilt(states, context.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for p, momentum in zip(model.parameters(), momenta, strict=True):
            optimizer.state[p]["momentum_buffer"] = momentum
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            context.student.save_checkpoint(model, optimizer, 12, path)
            context.student.save_checkpoint(model, optimizer, 34, path)
            with path.open("rb") as file:
                model, _ = fresh(states, context.device)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                iteration = context.student.load_checkpoint(file, model, optimizer)
        return [iteration, [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]]

    states = practised(rng, [2, 6, 6, 3])
    momenta = [
        torch.randn(t.shape, generator=rng, dtype=t.dtype)
        for n, t in states["model"].items()
        if n.endswith(("weight", "bias"))
    ]
    iteration, found = ranks(between, 1, states, momenta).values[0]
    facts = {"case": "SGD with momentum, saved twice to a path, loaded from the open file"}
    wrong = numbers_agree(iteration, 34)
    if wrong:
        fail(expected=f"iteration {wrong[0]}", found=wrong[1], line=ranks.definition("load_checkpoint"), **facts)
    for number, (momentum, got) in enumerate(zip(momenta, found, strict=True)):
        wrong = difference(got, as_is(momentum))
        if wrong:
            fail(
                expected=f"momentum of parameter {number}: {wrong[0]}",
                found=wrong[1],
                line=ranks.definition("load_checkpoint"),
                **facts,
            )


@check("train", "tied weights, resumed again and again, from a file object, and after the end")
def test_train_hidden(ranks, rng):
    def in_pieces(context, tokens: np.ndarray, settings: dict, stops: list[int]) -> list:
        torch.manual_seed(5)
        start = tiny(tied=True).state_dict()
        model = tiny(tied=True)
        model.load_state_dict(start)
        config = context.student.TrainConfig
        whole = context.student.train(model, tokens, config(**settings))
        with tempfile.TemporaryDirectory() as folder:
            path, pieces, resume = f"{folder}/run.pt", [], None
            for steps in stops:
                model = tiny(tied=True)
                model.load_state_dict(start)
                own = config(**settings | {"steps": steps, "checkpoint_path": path, "checkpoint_interval": 100})
                pieces += context.student.train(model, tokens, own, resume=resume)
                resume = io.BytesIO(Path(path).read_bytes())
        return [whole, pieces]

    settings, tokens = draw_settings(rng, steps=9, context_length=draw_int(rng, 2, 32)), text(rng)
    whole, pieces = ranks(in_pieces, 1, tokens, settings, [2, 3, 7, 7, 9]).values[0]
    expect_losses(whole, settings, ranks.definition("train"))
    if pieces != whole:
        fail(
            case="9 steps of a model with tied weights, stopped after 2, 3 and 7, and once resumed with nothing to do",
            expected=f"the losses of the uninterrupted run, {whole}",
            found=str(pieces),
            line=ranks.definition("train"),
        )
