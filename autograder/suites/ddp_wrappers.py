"""What module 02 asks of both wrappers, OverlappedDDP and BucketedDDP: see `ddp_calls` for how they are called."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from autograder.lab import gpt
from autograder.lab.ranks import Run
from autograder.suites.ddp_calls import (
    Case,
    Checkpointed,
    Losses,
    Terms,
    everything,
    expect_gradients,
    inputs,
    make,
    mixed,
    numels,
    reductions,
    run_programs,
    sent_in_step,
    spans,
    strided_terms,
    terms,
    within,
)
from autograder.suites.kit import as_is, difference, draw_int, fail, hand_out, timeline

CAP = {"OverlappedDDP": (), "BucketedDDP": (0.0001,)}  # 104 bytes: 26 numbers of float32

# --------------------------------------------------------------------------------------------------------- construction


def built(context, wrapper: str, model: nn.Module | None, arguments: tuple, members: list[int] | None) -> dict | None:
    """On a rank: construct the wrapper, and tell what the module holds then."""
    group = context.group(members) if members else None
    if model is None:
        return None
    before = list(model.parameters())
    ddp = getattr(context.student, wrapper)(model, *arguments, group=group)
    return {
        "state": dict([*model.named_parameters(), *model.named_buffers()]),
        "same": [id(p) for p in before] == [id(p) for p in ddp.parameters()],
    }


def expect_construction(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """Built on ranks 1 and 2 of three: the module is that of the group's first rank."""
    members = [1, 2]
    models = [everything(rng), everything(rng)]
    run = ranks(built, 3, wrapper, hand_out(models, members, 3), CAP[wrapper], members)
    source = models[0]
    for rank in members:
        for name, tensor in [*source.named_parameters(), *source.named_buffers()]:
            wrong = difference(run.values[rank]["state"].get(name), as_is(tensor))
            if wrong:
                fail(
                    case=f"construction on a group of ranks {members}",
                    expected=f"{name} on rank {rank}: {wrong[0]}",
                    found=wrong[1],
                    line=ranks.definition(wrapper),
                    perhaps="construction gives all ranks the module of the group's first one: broadcast_module",
                )
        if not run.values[rank]["same"]:
            fail(
                case=f"construction on a group of ranks {members}",
                expected="parameters() of the wrapper are those of the module",
                found="others, or another number of them",
                line=ranks.definition(wrapper),
                perhaps="keep the module as an attribute, so that nn.Module registers it",
            )


# ------------------------------------------------------------------------------------------------------------ gradients

SIZES = [11, 12, 13, 14, 15, 16]  # all different, and larger than the number of gradients


def steps(rng: torch.Generator, models: list[Terms], orders: list[list[int] | None] | None = None) -> list[list[tuple]]:
    """The plain program on each rank: one step in which backward computes gradients from the last to the first."""
    orders = orders or [None] * len(models)
    return [[("step", *inputs(rng, m, o)), ("finish",), ("look",)] for m, o in zip(models, orders, strict=True)]


def expect_wrapped_averages(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """Right for gradients that the check chooses, several dtypes, two steps, further arguments."""
    for p in (3, 4, 1):
        models = [mixed(rng) for _ in range(p)]
        programs = []
        for m in models:
            first, second = inputs(rng, m), inputs(rng, m)
            programs.append([
                ("step", *first), ("finish",), ("look",),
                ("zero", True), ("step", *second, 5.0), ("finish",), ("look",),
                ("zero", True), ("step", *second, {"scale": 3.0}), ("finish",), ("look",),
            ])  # fmt: skip
        case = Case("three steps, three dtypes, a tied and a frozen parameter", models, programs, CAP[wrapper])
        make(ranks, [case], p, wrapper)


def expect_gpt(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """A GPT whose head is tied to its embedding gets the gradients of the whole batch."""
    torch.manual_seed(draw_int(rng, 1, 100))
    models = [Losses(gpt.tiny(tied=True, layers=1, width=16, vocab_size=32)) for _ in range(2)]
    tokens = torch.randint(0, 32, (4, 9), generator=rng)
    programs = [
        [("step", tokens[2 * r : 2 * r + 2, :-1], tokens[2 * r : 2 * r + 2, 1:]), ("finish",), ("look",)]
        for r in (0, 1)
    ]
    arguments = (0.01,) if CAP[wrapper] else ()
    make(ranks, [Case("a GPT with a tied head", models, programs, arguments, terms=10_000)], 2, wrapper)


def expect_unused(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """Parameters that backward does not reach, on one rank, on all, on no rank the same; a rank without a batch."""
    cases = []
    for name, orders in (
        ("weights.2 is unused on rank 1", [None, [0, 1, 3], None]),
        ("weights.1 is unused on all ranks", [[0, 2, 3]] * 3),
        ("weights.3, the first to be sent, is unused on rank 0", [[0, 1, 2], None, None]),
        ("each rank uses one parameter, rank 2 none", [[0], [3], []]),
    ):
        models = [terms(rng, SIZES[:4]) for _ in range(3)]
        programs = []
        for m, order in zip(models, orders, strict=True):
            twice = [inputs(rng, m, order) if order != [] else () for _ in range(2)]
            programs.append([
                ("step", *twice[0]), ("finish",), ("look",),
                ("zero", True), ("step", *twice[1]), ("finish",), ("look",),
            ])  # fmt: skip
        perhaps = "a parameter that backward does not reach never calls its hook; finish must send it, as zeros"
        cases.append(Case(name, models, programs, CAP[wrapper], perhaps))
    make(ranks, cases, 3, wrapper)


def expect_any_order(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """Ranks compute their gradients in different orders: of one size, so that a mix-up shows in the values only."""
    cases = []
    for name, sizes in (("of equal size", [12] * 4), ("of different sizes", SIZES[:4])):
        models = [terms(rng, sizes) for _ in range(3)]
        orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]
        perhaps = "sent as they become ready, the messages of different ranks do not belong together: choose one order"
        title = f"gradients {name} become ready in another order on each rank"
        cases.append(Case(title, models, steps(rng, models, orders), CAP[wrapper], perhaps))
    make(ranks, cases, 3, wrapper)


def expect_two_backwards(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """A second backward before finish, and gradients that were zeros and not None."""
    models = [terms(rng, SIZES[:4]) for _ in range(3)]
    programs = []
    for m in models:
        x = [inputs(rng, m) for _ in range(3)]
        programs.append([
            ("step", *x[0]), ("step", *x[1]), ("finish",), ("look",), ("zero", False), ("step", *x[2]), ("finish",),
            ("look",),
        ])  # fmt: skip
    perhaps = "the second backward adds to p.grad while or after its first value is sent; average the sum of both"
    cases = [Case("two backwards in a step, then zeros", models, programs, CAP[wrapper], perhaps)]
    models = [terms(rng, SIZES[:4]) for _ in range(3)]
    programs = [
        [("step", *inputs(rng, m, [0, 1, 3])), ("step", *inputs(rng, m, [0, 1, 3])), ("finish",), ("look",)]
        for m in models
    ]
    cases.append(Case("two backwards in a step, weights.2 unused", models, programs, CAP[wrapper], perhaps))
    make(ranks, cases, 3, wrapper)


def expect_checkpointing(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """A weight that two checkpointed layers share: with reentrant checkpoints it is ready twice in one backward."""
    cases = []
    for reentrant in (False, True):
        models = [Checkpointed(reentrant).double() for _ in range(2)]
        played = copy.deepcopy(models[0])
        played.reentrant = None
        x = [torch.randn(3, 5, generator=rng, dtype=torch.float64) for _ in models]
        perhaps = "a gradient that has been sent is added to once more: by the other place where the weight is used"
        name = f"two checkpointed layers with one weight, use_reentrant={reentrant}"
        programs = [[("step", mine), ("finish",), ("look",)] for mine in x]
        cases.append(Case(name, models, programs, CAP[wrapper], perhaps, terms=1000, played=played))
    make(ranks, cases, 2, wrapper)


def expect_strided_wrapped(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    models = [strided_terms(rng) for _ in range(2)]
    perhaps = "a tensor that is not contiguous: send a contiguous copy, and copy the result back"
    make(ranks, [Case("transposed parameters", models, steps(rng, models), CAP[wrapper], perhaps)], 2, wrapper)


def expect_group_wrapped(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    models = [terms(rng, SIZES[:3]) for _ in range(2)]
    make(ranks, [Case("a group of ranks [1, 3]", models, steps(rng, models), CAP[wrapper])], 4, wrapper, [1, 3])


# -------------------------------------------------------------------------------------------------------------- no_sync


def expect_accumulation(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """Nothing is sent in no_sync, finish does nothing then, and the sum over the micro-batches is averaged once."""
    models = [terms(rng, SIZES[:4]) for _ in range(2)]
    programs = []
    for m in models:
        x = [inputs(rng, m) for _ in range(5)]
        programs.append([
            ("local", *x[0]), ("finish",), ("look",), ("local", *x[1]), ("finish in no_sync",),
            ("step", *x[2]), ("finish",), ("look",),
            ("zero", False), ("local", *x[3]), ("step", *x[4]), ("finish",), ("look",),
        ])  # fmt: skip
    perhaps = "what is averaged is the sum in p.grad after the last micro-batch, not what that micro-batch adds"
    case = Case("micro-batches in no_sync, then one outside", models, programs, CAP[wrapper], perhaps)
    run = run_programs(ranks, [case], 2, wrapper)
    for rank in (0, 1):
        events = timeline(run, rank, 0)
        quiet, finishes = spans(events, "local"), spans(events, "finish")
        for e in events:
            if not e.is_collective:
                continue
            if within(e.order, quiet) or within(e.order, finishes[:1]):
                place = "in no_sync" if within(e.order, quiet) else "in finish, after a backward in no_sync"
                fail(
                    case=case.name,
                    expected="nothing is sent before the micro-batch outside no_sync",
                    found=f"rank {rank}: {e} of {e.numel} elements {place}",
                    line=e,
                    perhaps="the hook must look at the flag itself; asking it in finish only is too late"
                    if within(e.order, quiet)
                    else "finish is a no-op where forward and backward ran in no_sync: remember it beyond the context",
                )
    expect_gradients(ranks, run, [case], wrapper)
    for rank in (0, 1):
        sent = reductions([e for e in timeline(run, rank, 0) if e.is_collective], 4)
        total, once = sum(e.numel for e in sent), sum(SIZES[:4])
        if total > 2 * once + 8:
            fail(
                case=case.name,
                expected=f"the gradients are sent once for each of the two finished steps: {2 * once} elements",
                found=f"{total} elements (rank {rank})",
                line=sent[-1],
            )


# -------------------------------------------------------------------------------------------------------------- overlap


def expect_no_waiting(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """No operation is waited for while backward runs."""
    models = [terms(rng, SIZES) for _ in range(2)]
    case = Case("one step", models, steps(rng, models), CAP[wrapper])
    run = make(ranks, [case], 2, wrapper)
    for rank in range(run.world_size):
        events = timeline(run, rank, 0)
        backward = spans(events, "backward")
        for e in events:
            if e.is_collective and within(e.wait_order, backward):
                fail(
                    case=case.name,
                    expected="nothing is waited for in backward",
                    found=f"rank {rank} waits for {e} of {e.numel} elements there",
                    line=e,
                    perhaps="the hook must come back at once: async_op=True, keep the work, wait in finish",
                )


def expect_sent_in_backward(run: Run, case: Case, buckets: list[list[int]], sizes: list[int]) -> None:
    """Each bucket (places of gradients, in the order of sending) is sent as soon as it and those before are complete.

    That is before the next gradient is computed. The last one may be sent in finish.
    """
    for rank in range(run.world_size):
        events = timeline(run, rank, 0)
        marks = [e for e in events if e.op == "span" and e.api.startswith("gradient ")]
        place = {int(e.api.removeprefix("gradient ")): n for n, e in enumerate(marks)}
        sent = reductions(events, len(sizes))
        backward = spans(events, "backward")[0]
        complete = -1
        for bucket, e in zip(buckets[:-1], sent, strict=False):
            complete = max(complete, *(place[i] for i in bucket))
            latest = marks[complete + 1].order if complete + 1 < len(marks) else backward.done_order
            if marks[complete].order < e.order < latest:
                continue
            what = "the gradient" if len(bucket) == 1 else f"the bucket of {len(bucket)} gradients"
            late = sum(1 for other in sent if other.order > backward.done_order)
            computed = sum(1 for m in marks if m.order < e.order)
            after = "after backward" if e.order > backward.done_order else f"after {computed} gradients are computed"
            perhaps = None
            if late == len(sent):
                perhaps = "the hooks only collect, and finish sends"
            elif e.order > marks[complete].order:
                perhaps = (
                    "is it sent when the next gradient comes? then it waits for a computation that it could overlap"
                )
            fail(
                case=case.name,
                expected=f"the all_reduce of {what} ({sum(sizes[i] for i in bucket)} elements) as soon as it is there: "
                f"after {complete + 1} of {len(marks)} gradients are computed, before the next one is",
                found=f"{after} (rank {rank}); {late} of {len(sent)} all_reduces come after backward",
                line=e,
                perhaps=perhaps,
            )


# -------------------------------------------------------------------------------------------------------------- buckets


def fill(sizes: list[int], cap_mb: float, itemsize: int = 4) -> list[list[int]]:
    """The buckets, as places of gradients in the order of registration, filled from the last one on."""
    buckets: list[list[int]] = []
    held = float("inf")
    for i in reversed(range(len(sizes))):
        if held + sizes[i] * itemsize > cap_mb * 2**20:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += sizes[i] * itemsize
    return buckets


def mb(numbers: float) -> float:
    """So many numbers of float32 in MB of 2^20 bytes, exactly."""
    return numbers * 4 / 2**20


def expect_buckets(
    run: Run, case: Case, number: int, buckets: list[list[int]], sizes: list[int], dtype: str, steps: int = 1
) -> None:
    """The all_reduces of the steps carry these buckets, in this order; those of other dtypes may be in between."""
    wanted = [sum(sizes[i] for i in bucket) for bucket in buckets] * steps
    for rank in range(run.world_size):
        sent = sent_in_step(run, rank, number, len(numels(case.models[0])))
        found = [e for e in sent if e.dtype == dtype]
        if [e.numel for e in found] == wanted:
            continue
        sums = [e.numel for e in found]
        at = next(
            (k for k, (a, b) in enumerate(zip(sums, wanted, strict=False)) if a != b), min(len(sums), len(wanted))
        )
        perhaps = None
        size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        cap = case.arguments[0]

        def filled(places: list[int], cap: float, size: int = size) -> list[int]:
            return [sum(sizes[places[i]] for i in b) for b in fill([sizes[i] for i in places], cap, size)]

        forward, backward = list(range(len(sizes)))[::-1], list(range(len(sizes)))
        if sums in (filled(forward, cap), filled(forward, cap)[::-1]):
            perhaps = "filled in the order of registration; backward comes from the other end"
        elif sums in (filled(backward, cap - 1 / 2**20), filled(backward, cap * 1e6 / 2**20)):
            perhaps = "a bucket may be full to the last byte, and 1 MB is 2^20 bytes here"
        elif sorted(sums) == sorted(wanted):
            perhaps = "the right buckets in another order; all ranks send them in the order in which they were filled"
        elif any(n * size > cap * 2**20 and n not in sizes for n in sums):
            perhaps = "a bucket exceeds the cap: the gradient that would do so opens the next one; count bytes"
        fail(
            case=case.name,
            expected=f"buckets of {wanted} elements of {dtype}, in this order{', in two steps' * (steps == 2)}",
            found=f"{sums} (rank {rank})",
            line=found[min(at, len(found) - 1)] if found else None,
            perhaps=perhaps,
        )
