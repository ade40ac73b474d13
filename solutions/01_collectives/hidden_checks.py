"""Checks that students do not see: `autograder check --hidden` adds them to the public ones of each problem."""

import torch

from autograder.suites.collective_calls import CALLS, Draw, make
from autograder.suites.kit import check
from autograder.suites.test_01_collectives import MODULE

__all__ = ["MODULE"]


def some_group(rng, size: int) -> list[int]:
    return sorted(torch.randperm(6, generator=rng)[:size].tolist())


def expect_any_group(ranks, rng, function: str) -> None:
    """Right on 6 ranks for sizes that were not announced, and in a random group of three of them."""
    everyone, group = list(range(6)), some_group(rng, 3)
    draws = [Draw(rng, torch.float64, (int(torch.randint(1, 40, (1,), generator=rng)),)) for _ in range(2)]
    make(ranks, function, [CALLS[function](draw, everyone, i + 2) for i, draw in enumerate(draws)], 6)
    make(ranks, function, [CALLS[function](draw, group, i) for i, draw in enumerate(draws)], 6, group)


@check("broadcast", "other sizes and groups")
def test_broadcast_hidden(ranks, rng):
    expect_any_group(ranks, rng, "broadcast")


@check("scatter_gather", "other sizes and groups")
def test_scatter_gather_hidden(ranks, rng):
    expect_any_group(ranks, rng, "scatter")
    expect_any_group(ranks, rng, "gather")


@check("reduce", "other sizes and groups")
def test_reduce_hidden(ranks, rng):
    expect_any_group(ranks, rng, "reduce")


@check("ring_all_gather", "other sizes and groups")
def test_ring_all_gather_hidden(ranks, rng):
    expect_any_group(ranks, rng, "ring_all_gather")


@check("ring_reduce_scatter", "other sizes and groups")
def test_ring_reduce_scatter_hidden(ranks, rng):
    expect_any_group(ranks, rng, "ring_reduce_scatter")


@check("ring_all_reduce", "other sizes and groups")
def test_ring_all_reduce_hidden(ranks, rng):
    expect_any_group(ranks, rng, "ring_all_reduce")


@check("all_to_all", "other sizes and groups")
def test_all_to_all_hidden(ranks, rng):
    expect_any_group(ranks, rng, "all_to_all")


@check("recursive_doubling_all_reduce", "other sizes and groups")
def test_recursive_doubling_hidden(ranks, rng):
    expect_any_group(ranks, rng, "recursive_doubling_all_reduce")
