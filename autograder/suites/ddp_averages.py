"""What module 02 asks of the three functions that average gradients after backward: see `ddp_calls` for how they are
called."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from autograder.lab.ranks import Run
from autograder.suites.ddp_calls import Case, draw, make, mixed, strided_terms, terms
from autograder.suites.kit import dtype_name


def averaged(function: str, name: str, models: list[nn.Module], gradients: list[list], *extra: list) -> Case:
    """A case in which these gradients (one list per rank) are averaged by a function. `extra`: an argument per rank."""
    programs = [
        [("gradients", mine), ("call", function, *[e[r] for e in extra]), ("look",)] for r, mine in enumerate(gradients)
    ]
    return Case(name, models, programs)


def some_gradients(rng: torch.Generator, model: nn.Module) -> list[Tensor | None]:
    return [draw(rng, tuple(p.shape), p.dtype) if p.requires_grad else None for p in model.parameters()]


def counts_for(function: str, p: int) -> list[list[int]]:
    """The extra argument of the weighted average: the same number on all ranks, so that it is the plain average."""
    return [[3] * p] if function == "average_gradients_weighted" else []


def expect_averages(
    ranks: Callable, rng: torch.Generator, function: str, world_sizes: tuple[int, ...] = (2, 3, 4, 1)
) -> None:
    """Right for several dtypes, a tied and a frozen parameter."""
    for p in world_sizes:
        models = [mixed(rng) for _ in range(p)]
        case = averaged(
            function, "a model with three dtypes, a tied and a frozen parameter", models,
            [some_gradients(rng, m) for m in models], *counts_for(function, p),
        )  # fmt: skip
        make(ranks, [case], p)


def expect_missing(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """A gradient that is missing counts as zero, and every rank gets the average."""
    cases = []
    for name, absent in (
        ("weights.1 is unused on rank 0", {0: [1]}),
        ("weights.0 and weights.2 are unused on ranks 1 and 2", {1: [0, 2], 2: [0, 2]}),
        ("weights.2 is unused on all ranks", {0: [2], 1: [2], 2: [2]}),
        ("rank 1 has no gradient at all", {1: [0, 1, 2]}),
    ):
        models = [terms(rng, [7, 8, 9]) for _ in range(3)]
        gradients = [some_gradients(rng, m) for m in models]
        for rank, places in absent.items():
            for i in places:
                gradients[rank][i] = None
        cases.append(averaged(function, name, models, gradients, *counts_for(function, 3)))
    make(ranks, cases, 3)


def expect_strided_averages(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """A gradient of a transposed parameter is transposed, too; on one rank it is not."""
    models = [strided_terms(rng) for _ in range(2)]
    gradients = [
        [draw(rng, (3, 4), layout="transposed"), draw(rng, (5,), layout="strided")],
        [draw(rng, (3, 4)), draw(rng, (5,), layout="strided")],
    ]
    case = averaged(function, "gradients that are not contiguous", models, gradients, *counts_for(function, 2))
    case.perhaps = "a tensor that is not contiguous: all_reduce a contiguous copy, and copy the result back"
    make(ranks, [case], 2)


def expect_group_averages(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """In a group of ranks 1 and 3 of four, the average is over two."""
    models = [terms(rng, [7, 8]) for _ in range(2)]
    gradients = [some_gradients(rng, m) for m in models]
    case = averaged(function, "a group of ranks [1, 3]", models, gradients, *counts_for(function, 2))
    make(ranks, [case], 4, members=[1, 3])


def one_average(ranks: Callable, rng: torch.Generator, function: str, *extra: list) -> tuple[Run, Case]:
    models = [mixed(rng, last=(13,)) for _ in range(3)]
    gradients = [some_gradients(rng, m) for m in models]
    case = averaged(function, "a model with three dtypes, a tied and a frozen parameter", models, gradients, *extra)
    return make(ranks, [case], 3), case


def in_dtypes(model: nn.Module) -> list[tuple[int, str]]:
    return [(p.numel(), dtype_name(p.dtype)) for p in model.parameters() if p.requires_grad]


def by_dtype(messages: list[tuple[int, str]]) -> Counter:
    """The elements of each dtype together, of messages as (elements, dtype)."""
    found: Counter = Counter()
    for numel, dtype in messages:
        found[dtype] += numel
    return found


def weighted(rng: torch.Generator, counts: list[int], name: str, dtype: torch.dtype = torch.float32) -> Case:
    models = [terms(rng, [7, 8], dtype) for _ in counts]
    gradients = [some_gradients(rng, m) for m in models]
    case = averaged("average_gradients_weighted", f"{name}: {counts} samples", models, gradients, counts)
    case.perhaps = (
        "each rank's gradient counts as many times as it has samples; the average of averages is another number"
    )
    return case
