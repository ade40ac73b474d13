"""What the checks of module 04 expect of a run: shards, the order of events, live bytes, norms and states."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from autograder.lab.ranks import PerRank, Run
from autograder.suites.fsdp_calls import Case, Played, listed, marks, of_unit, on_ranks, shard_all, step_events
from autograder.suites.fsdp_models import ROOT, drawing, unit_parts, unit_sizes
from autograder.suites.kit import Expect, difference, dtype_name, expect_nothing_left, fail

SMALL = 64  # bytes of scalars that do not count
AGAIN = "a unit is gathered more often than asked: what is there, or on its way, is not gathered again; no hook twice"


def shards(total: int, world_size: int) -> int:
    """Elements of one rank's shard."""
    return math.ceil(total / world_size)


def flat_cases(rng: torch.Generator) -> list[tuple[str, list[Tensor], list[int]]]:
    draw, draw32, draw16 = (drawing(rng, d) for d in (torch.float64, torch.float32, torch.bfloat16))
    return [
        ("one matrix of 3 by 5", [draw32(3, 5)], [0]),
        ("five parameters, one a number, one empty", [draw(7), draw(2, 3), draw(), draw(0, 2), draw(4)], [*range(5)]),
        ("a parameter given twice", [draw32(4), draw32(7)], [0, 1, 0]),
        ("fewer elements than ranks", [draw16(1)], [0]),
        ("a transposed parameter", [draw(4, 3).t(), draw(2)], [0, 1]),
        ("bfloat16", [draw16(9), draw16(3, 3)], [0, 1]),
    ]  # fmt: skip


def expect_flat(ranks: Callable, rng: torch.Generator, world_size: int, members: list[int] | None = None) -> Run:
    """The shard, the gathered values and the bytes of every case."""
    cases = flat_cases(rng)
    places = members or list(range(world_size))
    n = len(places)
    own = PerRank(cases if r in places else None for r in range(world_size))
    run = on_ranks(ranks, "FlatShard", shard_all, world_size, own, members)
    where = ranks.definition("FlatShard")
    for number, (name, tensors, _) in enumerate(cases):
        flat = torch.cat([t.flatten() for t in tensors])
        length, dtype = shards(len(flat), n), tensors[0].dtype
        case = f"{name}: {len(flat)} elements on {n} ranks" + (f", a group of ranks {members}" if members else "")
        padded = torch.cat([flat, flat.new_zeros(n * length - len(flat))])
        for i, rank in enumerate(places):
            is_parameter, kept, _, storages = run.values[rank][number]
            if not is_parameter:
                fail(case=case, expected="shard is an nn.Parameter", found="it is not one", line=where,
                     perhaps="an optimizer is made from the shards")  # fmt: skip
            wrong = difference(kept[0], Expect(padded[i * length : (i + 1) * length], dtype, 0))
            if wrong:
                fail(
                    case=case,
                    expected=f"shard of rank {rank}: {wrong[0]}",
                    found=wrong[1],
                    line=where,
                    perhaps="rank r has the r-th of N equal parts of the parameters, one after the other; a rank that "
                    "ends early has zeros there",
                )
            for k, tensor in enumerate([*tensors, *(2 * t for t in tensors)]):
                wrong = difference(kept[1 + k], Expect(tensor, dtype, 0))
                if wrong:
                    again = k >= len(tensors)
                    fail(
                        case=case,
                        expected=f"parameter {k % len(tensors)} on rank {rank} after unshard"
                        f"{', twice what it was, as shard is' if again else ''}: {wrong[0]}",
                        found=wrong[1],
                        line=where,
                        perhaps="remember the shapes at construction: a parameter whose memory is gone may have lost "
                        "its own"
                        if wrong[1].startswith("shape")
                        else "unshard gathers what shard holds now; what was gathered before is old"
                        if again
                        else None,
                    )
            if storages > 1:
                fail(
                    case=case,
                    expected="after unshard, all parameters are views of one flat buffer",
                    found=f"they are in {storages} storages",
                    line=where,
                    perhaps="p.data = part.view(p.shape) makes a view; clone, contiguous and copy_ make another tensor",
                )
    expect_nothing_left(run)
    return run


def expect_flat_bytes(ranks: Callable, run: Run, rng_cases: list, world_size: int) -> None:
    for number, (name, tensors, _) in enumerate(rng_cases):
        total = sum(t.numel() for t in tensors)
        size, length = tensors[0].element_size(), shards(total, world_size)
        for rank in range(world_size):
            held = run.values[rank][number][2]
            limits = [length, length + world_size * length, length, length + world_size * length, length]
            words = ["after construction", "after unshard", "after reshard", "after the second unshard", "at the end"]
            for found, limit, word in zip(held, limits, words, strict=True):
                if found <= limit * size + SMALL * (number == 1):
                    continue
                full = limit == length and found >= total * size
                fail(
                    case=f"{name}: {total} elements of {size} bytes on {world_size} ranks",
                    expected=f"rank {rank} holds {limit * size} bytes {word}",
                    found=f"{found} bytes",
                    line=ranks.definition("FlatShard"),
                    perhaps="a slice of the full tensor is a view and keeps all of it: clone it; and take the "
                    "parameters' own memory from them (p.data)"
                    if full
                    else "is the full buffer there twice?",
                )


def kept(case: Case) -> bool:
    """Whether its units stay gathered from forward to backward."""
    return not case.settings.get("reshard_after_forward", True)


def expect_traffic(ranks: Callable, run: Run, case: Case, number: int, step: int = 0) -> None:
    """A step of a float64 model sends 3(N-1)/N·S bytes, or 2(N-1)/N·S; the root may stay gathered in any case."""
    n, sizes, times = run.world_size, unit_sizes(case.models[0]), 2 if kept(case) else 3
    most = times * sum(n * shards(numel, n) for numel in sizes.values()) * 8 * (n - 1) // n + SMALL
    least = (times * sum(numel for i, numel in sizes.items() if i != ROOT) + 2 * sizes[ROOT]) * 8 * (n - 1) // n
    for rank in range(n):
        events = step_events(run, rank, number, step=step)
        found = sum(e.sent for e in events)
        if least <= found <= most:
            continue
        big = [e for e in events if e.is_collective]
        reduced = [e for e in big if e.op == "all_reduce" and e.nbytes > SMALL]
        gathers = [e for e in big if e.op == "all_gather"]
        again = gathers if len(gathers) > (times - 1) * len(sizes) else []
        fail(
            case=in_step(case, step),
            expected=f"rank {rank} sends about {times}(N-1)/N·S = "
            f"{times * sum(sizes.values()) * 8 * (n - 1) / n:.0f} bytes (N = {n}, S = {sum(sizes.values()) * 8})",
            found=f"{found} bytes: {listed(big)}",
            line=(reduced or again or big or [ranks.definition("FSDP")])[-1],
            perhaps="an all_reduce is a reduce_scatter and an all_gather: half of what it sends is thrown away here"
            if reduced
            else AGAIN
            if again
            else None,
        )


def in_step(case: Case, step: int) -> str:
    """The case, and which of its steps it is where it is not the first."""
    return f"{case.name}, in step {step + 1}" if step else case.name


def expect_order(ranks: Callable, run: Run, case: Case, number: int, step: int = 0) -> None:
    """Each unit is gathered before its forward and again before its backward, then its gradients are scattered."""
    keep = kept(case)
    n, sizes = run.world_size, unit_sizes(case.models[0])
    asked = ["all_gather", "forward", *([] if keep else ["all_gather"]), "backward", "reduce_scatter"]
    for rank in range(n):
        events = step_events(run, rank, number, step=step)
        for i in range(len(sizes) - 1):
            numel = sizes[i]
            moments = [marks(events, f"{kind} {i}")[0] for kind in ("forward", "backward")]
            gathers = [e for e in events if of_unit(e, "all_gather", numel, n)]
            scatters = [e for e in events if of_unit(e, "reduce_scatter", numel, n)]
            others = [e for e in events if of_unit(e, "all_reduce", numel, n)]
            own = sorted([*gathers, *scatters, *others, *moments], key=lambda e: e.order)
            if [e.api.split()[0] if e in moments else e.op for e in own] != asked:
                fail(
                    case=in_step(case, step),
                    expected=f"unit {i} ({numel} elements), in order: {', '.join(asked)}",
                    found=f"{listed(own)} (rank {rank})",
                    line=(others or gathers[2:] or scatters or gathers or [ranks.definition("FSDP")])[-1],
                    perhaps=why_not_in_order(len(gathers), len(scatters), keep),
                )
            for e, moment in zip(gathers, moments, strict=False):
                if e.done_order is None or e.done_order > moment.order:
                    fail(
                        case=in_step(case, step),
                        expected="a unit's all_gather is waited for before it computes",
                        found=f"unit {i} on rank {rank} computes first",
                        line=e,
                    )


def why_not_in_order(gathers: int, scatters: int, keep: bool) -> str | None:
    """The likely reason, from how many collectives a unit had in a step."""
    if not gathers and not scatters:
        return "this unit is not sharded at all, or not as one: parameters of a unit travel together"
    if gathers > 2:
        return AGAIN
    if gathers == 1 and not keep:
        return (
            "freed after forward, a unit must come back before its backward; to stay gathered is what "
            "reshard_after_forward=False asks for"
        )
    if gathers == 2 and keep:
        return "with reshard_after_forward=False a unit stays gathered from forward to backward"
    if scatters != 1:
        return "gradients are reduced with one reduce_scatter for each unit; an all_reduce sends twice as much"
    return "a unit's backward is over when the gradients of its inputs are there: not before, not much later"


def expect_bounded(ranks: Callable, run: Run, case: Case, number: int, most: int = 1) -> None:
    """In the second step of a program "rest", "step", "rest", "step", no more is held than `most` units allow.

    Frozen units have no gradients: there parameters are counted alone.
    """
    sizes = unit_sizes(case.models[0])
    gradients = any(p.requires_grad for p in case.models[0].layers.parameters())
    unit, root = 4 * sizes[0], 4 * sizes[ROOT]
    for rank in range(run.world_size):
        _, _, rest, step, *_ = run.values[rank][number]
        for kind, i, _, held in step["seen"]:
            if i == ROOT:
                continue
            extra = (held - rest["held"] - root) / unit
            backward = kind == "backward" and gradients
            limit = 2 * most if backward else most
            if extra <= limit + (0.9 if backward else 0.5):  # activations, and the reduced shard of a gradient
                continue
            count = {1: "one unit", 2: "two units"}[most]
            rule = f"besides shards and the root's unit, {count} of parameters" + (
                f" and {count} of gradients" if backward else ""
            )
            perhaps = "what was gathered is not freed: as long as anything holds the full buffer, its bytes stay"
            if backward and not any((h - rest["held"] - root) / unit > most + 0.5 for k, _, _, h in step["seen"]
                                    if k == "forward"):  # fmt: skip
                perhaps = (
                    "a unit's full gradients, or what was gathered for its backward, are still held when the backward "
                    "of another one starts: reduce, free and forget them as soon as the unit is done"
                )
            fail(
                case=case.name,
                expected=f"{rule}: {limit * unit} bytes when unit {i} starts its {kind} (a unit has {unit})",
                found=f"{extra:.1f} units, {held - rest['held']} bytes (rank {rank})",
                line=ranks.definition("FSDP"),
                perhaps=perhaps,
            )


def expect_ahead(
    ranks: Callable, run: Run, case: Case, number: int, kind: str, *, of: str = "step", step: int = 0
) -> None:
    """In a step `of` this kind, the next unit's all_gather comes before this one computes, and no wait for it does."""
    parts = unit_parts(case.models[0])
    units, n = len(parts), run.world_size
    for rank in range(n):
        events = step_events(run, rank, number, of, step)
        places = [(i, i + 1 if kind == "forward" else i - 1) for i in range(units)]
        for i, other, (dtype, numel) in [
            (*p, part) for p in places if 0 <= p[1] < units for part in parts[p[1]].items()
        ]:
            start, begin = marks(events, f"{kind} {i}")[0], marks(events, f"{kind} {other}")[0]
            since = marks(events, f"forward {units - 1}")[0].order if kind == "backward" else -1
            gathers = [
                e for e in events
                if of_unit(e, "all_gather", numel, n) and e.dtype == dtype_name(dtype) and since < e.order < begin.order
            ]  # fmt: skip
            early = [e for e in gathers if e.order < start.order]
            word = "next" if kind == "forward" else "previous"
            if not early:
                fail(
                    case=f"{in_step(case, step)}, under no_grad" if of == "eval" else in_step(case, step),
                    expected=f"the all_gather of unit {other}, the {word} one, before the {kind} of unit {i} starts"
                    + (f" (its {numel} elements of {dtype_name(dtype)})" if len(parts[other]) > 1 else ""),
                    found=f"{listed([e for e in events if e in gathers or e in (start, begin)])} (rank {rank})",
                    line=gathers[-1] if gathers else ranks.definition("FSDP"),
                    perhaps="issue it where unit i is waited for: later, there is less to hide behind",
                )
            if early[-1].done_order is not None and early[-1].done_order < start.order:
                fail(
                    case=f"{in_step(case, step)}, under no_grad" if of == "eval" else in_step(case, step),
                    expected=f"the all_gather of unit {other} is under way while unit {i} computes its {kind}",
                    found=f"it is waited for before (rank {rank})",
                    line=early[-1],
                    perhaps="async_op=True, keep the work, and wait for it when unit "
                    f"{other} starts: a blocking call hides nothing",
                )


def expect_norm(ranks: Callable, run: Run, case: Case, number: int, step: int) -> None:
    """What a "clip" returns is the norm of the whole gradient, on every rank."""
    wanted = Played(case).steps[step].norm
    for rank in range(run.world_size):
        found = run.values[rank][number][step]["norm"]
        told = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
        if isinstance(told, float) and abs(told - wanted) <= 1e-6 * wanted:
            continue
        fail(
            case=case.name,
            expected=f"the norm of the whole gradient, {wanted:.9g}, on rank {rank} of {run.world_size}",
            found=f"{told:.9g}" if isinstance(told, float) else f"{told}",
            line=ranks.definition("FSDP"),
            perhaps="each rank has a part of the gradients: add the squares up over the ranks, then take the root",
        )


def expect_state(ranks: Callable, case: Case, found: dict, wanted: dict, rank: int, what: str) -> None:
    where = ranks.definition("FSDP")
    found = found if isinstance(found, dict) else {}
    if sorted(found) != sorted(wanted):
        missing = sorted(set(wanted) - set(found))
        more = sorted(set(found) - set(wanted))
        fail(
            case=case.name,
            expected=f"the names of the plain module's state_dict ({what})",
            found=f"missing: {', '.join(missing[:5]) or 'nothing'}; too many: {', '.join(more[:5]) or 'nothing'} "
            f"(rank {rank})",
            line=where,
            perhaps="state_dict() of the module names tied weights by each of their names, and buffers that are saved",
        )
    dtypes = {name: t.dtype for name, t in case.models[0].state_dict().items()}
    for name, value in wanted.items():
        wrong = difference(found[name], Expect(value, dtypes[name], case.terms, float(value.abs().max()) + 0.1))
        if wrong:
            fail(case=case.name, expected=f"{name} in {what} on rank {rank}: {wrong[0]}", found=wrong[1], line=where)
