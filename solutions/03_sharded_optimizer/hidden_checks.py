"""Checks that students do not see: `autograder check --hidden` adds them to the public ones of each problem."""

import torch

from autograder.suites.kit import check, fail
from autograder.suites.sharded_optimizer_calls import Case, gradients, steps
from autograder.suites.sharded_optimizer_judging import Batch, expect_ledger, expect_owners, make, make_all
from autograder.suites.test_03_sharded_optimizer import (
    ADAMW,
    AMSGRAD,
    INTERLEAVED,
    MODULE,
    SGD,
    resumed,
    schedule_cases,
    state_case,
    tensors,
)

__all__ = ["MODULE"]


def some_shapes(rng: torch.Generator, count: int) -> list[tuple[int, ...]]:
    return [(n,) for n in torch.randint(0, 30, (count,), generator=rng).tolist()]


def missing_at_random(rng: torch.Generator, p: int, count: int) -> dict[int, list[int]]:
    """For each rank some parameters that it has no gradient for."""
    return {r: torch.randperm(count, generator=rng)[: count // 2].tolist() for r in range(p)}


def expect_any(ranks, rng, wrapper: str) -> None:
    """Other sizes, on 5 ranks and in a random group of 3 of 6; gradients are missing at random."""
    batches = []
    for p, members in ((5, None), (6, sorted(torch.randperm(6, generator=rng)[:3].tolist()))):
        n = len(members or range(p))
        batches.append(Batch([], p, members))
        for kind in (ADAMW, SGD, AMSGRAD):
            start = tensors(rng, some_shapes(rng, 7))
            program = [("step", gradients(rng, start, n, missing_at_random(rng, n, 7))) for _ in range(3)]
            name = f"{kind['optimizer']}, gradients missing at random, {n} ranks"
            batches[-1].cases.append(Case(name, start, [*program, *steps(rng, start, n, 1)], **kind))
    make_all(ranks, batches, wrapper)


@check("partition", "other sizes")
def test_partition_hidden(ranks, rng):
    calls = [(torch.randint(0, 10**9, (60,), generator=rng).tolist(), p) for p in (1, 7, 16)]
    calls.append(([7, 6, 5, 4, 3, 2, 1, 0], 6))
    for (numels, p), found in zip(calls, expect_owners(ranks, calls), strict=True):
        shares = [sum(n for n, r in zip(numels, found, strict=True) if r == rank) for rank in range(p)]
        if 3 * max(shares) > 4 * (sum(numels) / p + max(numels)):  # the best possible is not above this sum
            fail(
                case=f"{len(numels)} parameters on {p} ranks",
                expected="a largest share of at most 4/3 of the best possible",
                found=f"shares of {shares}",
                line=ranks.definition("partition_parameters"),
            )


@check("sharded_optimizer", "other sizes and groups, gradients missing at random")
def test_sharded_optimizer_hidden(ranks, rng):
    expect_any(ranks, rng, "ShardedOptimizer")


@check("schedules_and_groups", "schedulers on three ranks, with a group that is added later")
def test_schedules_and_groups_hidden(ranks, rng):
    make(ranks, schedule_cases(rng, 3), 3)
    start = tensors(rng)
    program = [
        ("step", gradients(rng, start, 2, {r: [5] for r in range(2)})), ("add", [5], {"lr": 0.2}),
        ("schedule", "ExponentialLR", {"gamma": 0.5}), ("step", gradients(rng, start, 2)), ("advance",),
        *steps(rng, start, 2, 2),
    ]  # fmt: skip
    groups = [(INTERLEAVED[0][0], INTERLEAVED[0][1]), ([1, 3], {})]
    make(ranks, [Case("a group added before a scheduler is made", start, program, groups=groups, **SGD)], 2)


@check("state_dict", "from four ranks to five")
def test_state_dict_hidden(ranks, rng):
    cases = [state_case(rng, 4, kind, [("save",), ("look",)]) for kind in (SGD, AMSGRAD)]
    run = make(ranks, cases, 4)
    pairs = [
        resumed(case, "saved on 4 ranks, loaded on 5", looks, steps(rng, case.tensors, 5, 2))
        for case, looks in zip(cases, run.values[3], strict=True)
    ]
    make(ranks, [later for later, _ in pairs], 5, wanted=[single for _, single in pairs])


@check("zero2", "other sizes and groups, gradients missing at random")
def test_zero2_hidden(ranks, rng):
    expect_any(ranks, rng, "ZeroOptimizer")


@check("ledger", "another model")
def test_ledger_hidden(ranks):
    expect_ledger(ranks, [([70e9, 512, stage], {}, n, None) for stage, n in enumerate(
        (1120e9, 280e9 + 840e9 / 512, 140e9 + 980e9 / 512, 1120e9 / 512))])  # fmt: skip
