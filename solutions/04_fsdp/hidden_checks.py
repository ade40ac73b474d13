"""Checks that students do not see: `autograder check --hidden` adds them to the public ones of each problem."""

import torch

from autograder.suites.fsdp_calls import Case, Played, judge, make, play, repeated
from autograder.suites.fsdp_models import Chain, drawing
from autograder.suites.kit import check, expect_nothing_left
from autograder.suites.test_04_fsdp import (
    AHEAD,
    BF16,
    EVAL,
    MODULE,
    STEP,
    TWO_STEPS,
    UPDATE,
    chain32,
    expect_flat,
    expect_state,
    one_case,
    state_model,
)

__all__ = ["MODULE"]


def random_chain(rng: torch.Generator) -> Chain:
    """Three to five units of sizes that nobody has seen."""
    count = int(torch.randint(3, 6, (), generator=rng))
    return Chain(drawing(rng), 5, torch.randint(1, 15, (count,), generator=rng).tolist())


def same_size(rng: torch.Generator, world_size: int, name: str, program: list, **fields) -> Case:
    """A random chain, of the same sizes on each rank."""
    first = random_chain(rng)
    hidden = [len(layer.up) for layer in first.layers]
    models = [first, *[Chain(drawing(rng), 5, hidden) for _ in range(world_size - 1)]]
    return Case(name, models, repeated(rng, world_size, program), **fields)


@check("flat_shard", "five ranks")
def test_flat_shard_hidden(ranks, rng):
    expect_flat(ranks, rng, 5)


@check("forward_backward", "random sizes on three ranks, with and without freeing")
def test_forward_backward_hidden(ranks, rng):
    cases = [
        same_size(rng, 3, f"random sizes, {settings}", TWO_STEPS, settings=settings)
        for settings in ({}, {"reshard_after_forward": False})
    ]
    make(ranks, cases, 3)


@check("gradients", "some parameters frozen at random, micro-batches, weight decay")
def test_gradients_hidden(ranks, rng):
    case = same_size(rng, 2, "frozen at random", [STEP, STEP, UPDATE, EVAL, STEP, UPDATE, EVAL], decay=0.1)
    names = [name for name, _ in case.models[0].named_parameters()]
    chosen = {name for name in names if float(torch.rand((), generator=rng)) < 0.3} - {"head"}
    for model in case.models:
        for name, p in model.named_parameters():
            p.requires_grad_(name not in chosen)
    make(ranks, [case], 2)


@check("prefetch", "units in a random order")
def test_prefetch_hidden(ranks, rng):
    order = torch.randint(0, 3, (4,), generator=rng).tolist()
    program = [("step", {"order": order}), UPDATE, ("eval", {"order": order}), STEP, UPDATE, EVAL]
    make(ranks, [one_case(rng, 3, f"units in the order {order}", program, settings=AHEAD)], 3)


@check("mixed_precision", "without freeing, on three ranks")
def test_mixed_precision_hidden(ranks, rng):
    settings = BF16 | {"reshard_after_forward": False}
    make(ranks, [one_case(rng, 3, "two forwards", [EVAL, STEP, EVAL], chain32, settings=settings)], 3)


@check("clip_and_save", "a state of two ranks goes on on four")
def test_clip_and_save_hidden(ranks, rng):
    first = one_case(rng, 2, "a step on two ranks", [STEP, UPDATE, ("save",)], state_model)
    state = make(ranks, [first], 2).values[1][0][2]["state"]
    program = [("load", state), STEP, ("clip", 0.1), UPDATE, ("save",), EVAL]
    case = one_case(rng, 4, "the state of two ranks, loaded on four", program, state_model)
    run = make(ranks, [case], 4)
    for rank in range(4):
        expect_state(ranks, case, run.values[rank][0][4]["state"], Played(case).steps[4].state, rank, "the state")


@check("checkpointing", "checkpointed units, accumulated and clipped, on three ranks")
def test_checkpointing_hidden(ranks, rng):
    program = [STEP, STEP, ("clip", 0.1), UPDATE, EVAL]
    cases = [one_case(rng, 3, "checkpointed units", program, settings=AHEAD, checkpointed=True)]
    run = play(ranks, cases, 3)
    judge(ranks, run, cases)
    expect_nothing_left(run)
