"""Checks that students do not see: `autograder check --hidden` adds them to the public ones of each problem."""

import torch

from autograder.suites.ddp_averages import averaged, some_gradients, weighted
from autograder.suites.ddp_calls import Case, draw, everything, expect_broadcast, expect_shards, inputs, make, terms
from autograder.suites.ddp_training import (
    Training,
    draw_settings,
    expect_losses,
    random_tokens,
    run_training,
    small_gpt,
)
from autograder.suites.ddp_wrappers import CAP, expect_buckets, expect_sent_in_backward, fill, mb, steps
from autograder.suites.kit import check, draw_int, reference_run
from autograder.suites.test_02_ddp import MODULE

__all__ = ["MODULE"]


def some_sizes(rng: torch.Generator, count: int) -> list[int]:
    """Different numbers of elements, each larger than the number of gradients."""
    return (20 + torch.randperm(60, generator=rng)[:count]).tolist()


def uses(rng: torch.Generator, count: int, ranks: int) -> list[list[int]]:
    """For each rank, the parameters that it uses, in its order: some, and not the same ones."""
    found = []
    for _ in range(ranks):
        order = torch.randperm(count, generator=rng).tolist()
        found.append(order[: draw_int(rng, 1, count + 1)])
    return found


def expect_any_use(ranks, rng, wrapper: str) -> None:
    """Each rank uses some of the parameters in an order of its own; micro-batches before and a second step after."""
    sizes = some_sizes(rng, 7)
    models = [terms(rng, sizes) for _ in range(4)]
    programs = []
    for m, first, second in zip(models, uses(rng, 7, 4), uses(rng, 7, 4), strict=True):
        programs.append([
            ("local", *inputs(rng, m, second)), ("step", *inputs(rng, m, first)), ("finish",), ("look",),
            ("zero", False), ("step", *inputs(rng, m, second)), ("finish",), ("look",),
        ])  # fmt: skip
    case = Case("each rank uses some parameters, in its own order", models, programs, CAP[wrapper])
    make(ranks, [case], 4, wrapper)


@check("shard_batch", "other sizes")
def test_shard_batch_hidden(ranks, rng):
    expect_shards(ranks, [("21 rows", {"a": draw(rng, (21, 2)), "b": draw(rng, (14,), torch.bool)}, 7)])


@check("broadcast_module", "other groups")
def test_broadcast_module_hidden(ranks, rng):
    expect_broadcast(ranks, [everything(rng) for _ in range(3)], [4, None], members=[0, 2, 4])


@check("naive_sync", "gradients missing at random")
def test_naive_sync_hidden(ranks, rng):
    expect_missing_at_random(ranks, rng, "average_gradients")


@check("flat_sync", "gradients missing at random")
def test_flat_sync_hidden(ranks, rng):
    expect_missing_at_random(ranks, rng, "average_gradients_flat")


def expect_missing_at_random(ranks, rng, function: str) -> None:
    sizes = some_sizes(rng, 5)
    models = [terms(rng, sizes) for _ in range(4)]
    gradients = [some_gradients(rng, m) for m in models]
    for mine, used in zip(gradients, uses(rng, 5, 4), strict=True):
        for i in set(range(5)) - set(used):
            mine[i] = None
    make(ranks, [averaged(function, "gradients missing at random", models, gradients)], 4)


@check("weighted_sync", "other numbers of samples")
def test_weighted_sync_hidden(ranks, rng):
    counts = torch.randint(0, 1000, (4,), generator=rng).tolist()
    make(ranks, [weighted(rng, [*counts, 1], "five ranks")], 5)


@check("overlapped", "each rank uses some parameters, in its own order")
def test_overlapped_hidden(ranks, rng):
    expect_any_use(ranks, rng, "OverlappedDDP")


@check("bucketed", "each rank uses some parameters, in its own order; other sizes and caps")
def test_bucketed_hidden(ranks, rng):
    expect_any_use(ranks, rng, "BucketedDDP")
    sizes = some_sizes(rng, 9)
    models = [terms(rng, sizes) for _ in range(3)]
    cap = mb(draw_int(rng, 80, 200))
    case = Case("random sizes and a random cap", models, steps(rng, models), (cap,))
    run = make(ranks, [case], 3, "BucketedDDP")
    expect_buckets(run, case, 0, fill(sizes, cap), sizes, "float32")
    expect_sent_in_backward(run, case, fill(sizes, cap), sizes)


@check("train_ddp", "six ranks")
def test_train_ddp_hidden(ranks, rng):
    tokens, config = random_tokens(rng), draw_settings(rng, 4)
    models = [small_gpt(rng) for _ in range(6)]
    wanted = reference_run(models[0], tokens, config)["losses"]
    expect_losses(ranks, run_training(ranks, models, tokens, Training(config)), wanted, list(range(6)), "6 ranks")
