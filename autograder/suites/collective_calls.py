"""Module 01's collectives, called and judged: inputs for each, what every argument must hold afterwards, and what is
said where it does not."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from autograder.lab.ledger import Event
from autograder.lab.ranks import Run
from autograder.suites.kit import (
    KINDS,
    Expect,
    as_is,
    difference,
    dtype_name,
    expect_nothing_left,
    fail,
    hand_out,
    laid_out,
)

# What a values check runs through: dtype and shape of one rank's tensor (of one chunk, where there are chunks).
SHAPES = [
    (torch.float32, (4,)),
    (torch.float64, (7,)),
    (torch.bfloat16, (3, 5)),
    (torch.int64, (1,)),
    (torch.float32, (0,)),
    (torch.float32, (2, 3, 2)),
]
ANY_SHAPE = ("broadcast", "reduce", "ring_all_reduce", "recursive_doubling_all_reduce")  # a single number too
WORLD_SIZES = (2, 3, 5, 1)  # 4 ranks are in the checks of traffic
TREES = ("broadcast", "reduce", "recursive_doubling_all_reduce")  # on 4 ranks, another form from every root


@dataclass
class Call:
    """One call of a collective on p ranks: what each rank passes, and what its arguments must hold afterwards.

    Args:
        name: shown in messages.
        arguments: item r is the list of positional arguments of rank r, without the group.
        expect: item r goes with them: an `Expect`, a list of `Expect`s for a list of tensors, or None.
        receives: item r is the least number of elements that others must send to rank r, whatever the algorithm.
        dtype: of all tensors, in messages too.
        kept: positions of arguments that are only read, on every rank.
    """

    name: str
    arguments: list[list]
    expect: list[list]
    receives: list[int]
    dtype: torch.dtype
    kept: set[int] = field(default_factory=set)


def run_calls(
    context, function: str, names: list[str], calls: list[list] | None, members: list[int] | None
) -> list | None:
    """On a rank: make the calls one after the other, and hand back the arguments as they are afterwards."""
    group = context.group(members) if members else None
    if calls is None:  # this rank is outside the group
        return None
    after = []
    for name, arguments in zip(names, calls, strict=True):
        context.case(name)
        passed = [list(a) if isinstance(a, list) else a for a in arguments]
        returned = getattr(context.student, function)(*arguments, group)
        replaced = any(
            len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True))
            for a, b in zip(arguments, passed, strict=True)
            if isinstance(a, list)
        )
        after.append([returned, replaced, *passed])
    return after


class Draw:
    """Random tensors of one dtype, shape and layout."""

    def __init__(self, rng: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...], layout: str = "") -> None:
        self.rng, self.dtype, self.shape, self.layout = rng, dtype, shape, layout

    def __call__(self, rows: int = 1, length: int | None = None) -> torch.Tensor:
        """One tensor; with `rows`, that many times as long in the first dimension; with `length`, exactly so long."""
        shape = self.shape
        if shape:
            shape = (shape[0] * rows if length is None else length, *shape[1:])
        if self.dtype == torch.float32 and len(shape) == 1:  # short and easy to read in a message
            values = torch.randint(-9, 10, shape, generator=self.rng).to(self.dtype)
        elif self.dtype.is_floating_point:
            values = torch.randn(shape, generator=self.rng, dtype=torch.float64).to(self.dtype)
        else:  # too large for a float64 to hold exactly
            values = torch.randint(-(2**58), 2**58, shape, generator=self.rng).to(self.dtype)
        return laid_out(values, self.layout)

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)} of shape {list(self.shape)}"
        return f"{text}, {self.layout} (not contiguous)" if self.layout else text


def total(tensors: list[torch.Tensor]) -> Expect:
    """The sum of tensors, computed in float64 (int64 for integers), with the rounding that any order may have."""
    wide = [t.double() if t.dtype.is_floating_point else t for t in tensors]
    magnitude = float(sum(t.abs() for t in wide).max()) if wide[0].numel() else 0.0
    return Expect(sum(wide), tensors[0].dtype, terms=len(tensors), magnitude=magnitude)


def rows(expect: Expect, first: int, count: int) -> Expect:
    return Expect(expect.values[first : first + count], expect.dtype, expect.terms, expect.magnitude)


def _all_but(root: int, tensors: list, count: int) -> list[int]:
    return [0 if i == root else count for i in range(len(tensors))]


def _only(root: int, tensors: list, count: int) -> list[int]:
    return [count if i == root else 0 for i in range(len(tensors))]


def broadcast_call(draw: Draw, members: list[int], root: int) -> Call:
    tensors = [draw() for _ in members]
    return Call(
        f"{draw}, src={members[root]}",
        [[t, members[root]] for t in tensors],
        [[as_is(tensors[root]), None] for _ in members],
        _all_but(root, tensors, tensors[root].numel()),
        draw.dtype,
    )


def scatter_call(draw: Draw, members: list[int], root: int) -> Call:
    chunks = [draw() for _ in members]
    arguments = [[draw(), None if i % 2 else [], members[root]] for i, _ in enumerate(members)]
    expect = [[as_is(chunk), None, None] for chunk in chunks]
    arguments[root][1], expect[root][1] = chunks, [as_is(c) for c in chunks]
    receives = _all_but(root, chunks, chunks[root].numel())
    return Call(f"{draw}, src={members[root]}", arguments, expect, receives, draw.dtype, kept={1})


def gather_call(draw: Draw, members: list[int], root: int) -> Call:
    chunks = [draw() for _ in members]
    arguments = [[chunk, None if i % 2 else [], members[root]] for i, chunk in enumerate(chunks)]
    expect = [[as_is(chunk), None, None] for chunk in chunks]
    arguments[root][1], expect[root][1] = [draw() for _ in members], [as_is(c) for c in chunks]
    receives = _only(root, chunks, (len(chunks) - 1) * chunks[root].numel())
    return Call(f"{draw}, dst={members[root]}", arguments, expect, receives, draw.dtype, kept={0})


def reduce_call(draw: Draw, members: list[int], root: int) -> Call:
    tensors = [draw() for _ in members]
    expect = [[as_is(t), None] for t in tensors]
    expect[root][0] = total(tensors)
    receives = _only(root, tensors, tensors[root].numel() if len(tensors) > 1 else 0)
    return Call(f"{draw}, dst={members[root]}", [[t, members[root]] for t in tensors], expect, receives, draw.dtype)


def all_gather_call(draw: Draw, members: list[int], root: int) -> Call:
    chunks = [draw() for _ in members]
    whole = Expect(torch.cat(chunks), draw.dtype, terms=0)
    arguments = [[draw(len(members)), c] for c in chunks]
    receives = [(len(chunks) - 1) * chunks[0].numel()] * len(chunks)
    return Call(str(draw), arguments, [[whole, as_is(c)] for c in chunks], receives, draw.dtype, kept={1})


def reduce_scatter_call(draw: Draw, members: list[int], root: int) -> Call:
    summands = [draw(len(members)) for _ in members]
    whole, m = total(summands), draw.shape[0]
    expect = [[rows(whole, r * m, m), as_is(s)] for r, s in enumerate(summands)]
    receives = [summands[0].numel() // len(summands) if len(summands) > 1 else 0] * len(summands)
    return Call(str(draw), [[draw(), s] for s in summands], expect, receives, draw.dtype, kept={1})


def all_reduce_call(draw: Draw, members: list[int], root: int) -> Call:
    tensors = [draw() for _ in members]
    receives = [tensors[0].numel() if len(tensors) > 1 else 0] * len(tensors)
    return Call(str(draw), [[t] for t in tensors], [[total(tensors)] for _ in members], receives, draw.dtype)


def all_to_all_call(draw: Draw, members: list[int], root: int) -> Call:
    """Tensor lengths differ from pair to pair; a part of them is empty, but none where the layout would not show."""
    p = len(members)
    least, most = (2, 5) if draw.layout else (0, 4)
    lengths = torch.randint(least, most, (p, p), generator=draw.rng) * min(draw.shape[0], 1)
    table = [[draw(length=int(lengths[i, j])) for j in range(p)] for i in range(p)]
    arguments = [[[draw(length=int(lengths[i, r])) for i in range(p)], table[r]] for r in range(p)]
    expect = [[[as_is(table[i][r]) for i in range(p)], [as_is(t) for t in table[r]]] for r in range(p)]
    receives = [sum(table[i][r].numel() for i in range(p) if i != r) for r in range(p)]
    name = f"{dtype_name(draw.dtype)}, lengths {lengths.tolist()}"
    name += f", {draw.layout} (not contiguous)" if draw.layout else ""
    return Call(name, arguments, expect, receives, draw.dtype, kept={1})


CALLS: dict[str, Callable[[Draw, list[int], int], Call]] = {
    "broadcast": broadcast_call,
    "scatter": scatter_call,
    "gather": gather_call,
    "reduce": reduce_call,
    "ring_all_gather": all_gather_call,
    "ring_reduce_scatter": reduce_scatter_call,
    "ring_all_reduce": all_reduce_call,
    "all_to_all": all_to_all_call,
    "recursive_doubling_all_reduce": all_reduce_call,
}


def make(ranks: Callable, function: str, calls: list[Call], world_size: int, members: list[int] | None = None) -> Run:
    """Run the calls on ranks, compare what every argument holds afterwards, and hand back the run for more."""
    places = members or list(range(world_size))
    inputs = [[call.arguments[i] for call in calls] for i in range(len(places))]
    before = [[_flat(call.arguments[i]) for call in calls] for i in range(len(places))]
    before = [[[t.clone() for t in flat] for flat in mine] for mine in before]
    run = ranks(
        run_calls, world_size, function, [c.name for c in calls], hand_out(inputs, members, world_size), members
    )
    expect_nothing_left(run)
    for number, call in enumerate(calls):
        for i, rank in enumerate(places):
            events = [e for e in run.in_case(number) if e.rank == rank]
            expect_dtype(call, events)
            compare(function, call, number, rank, i, run, before[i][number], ranks.definition(function))
            expect_received(call, i, events, ranks.definition(function))
    return run


def expect_dtype(call: Call, events: list[Event]) -> None:
    """All messages are in the dtype of the tensors."""
    dtype = dtype_name(call.dtype)
    for e in events:
        if e.numel and e.dtype != dtype:
            fail(
                case=call.name,
                expected=f"messages of {dtype}, as the tensors are",
                found=f"a message of {e.dtype} (rank {e.rank}, {e})",
                line=e,
                perhaps="a buffer lacks the tensor's dtype: use torch.empty_like(tensor) or tensor.new_zeros(n)",
            )


def expect_received(call: Call, i: int, events: list[Event], definition: str) -> None:
    """What a rank needs from others has come by recv, whatever the values are."""
    elements = sum(e.numel for e in events if e.op == "recv")
    if elements < call.receives[i]:
        fail(
            status="failed" if elements else "forbidden",
            case=call.name,
            expected=f"rank {i} of the group receives at least {call.receives[i]} elements by recv or irecv",
            found=f"the right values, but {elements} elements received",
            line=definition,
            perhaps="the values took another way than send and recv, which is refused here",
        )


def _flat(arguments: list) -> list[torch.Tensor]:
    found = []
    for a in arguments:
        found += a if isinstance(a, list) else [a] if isinstance(a, torch.Tensor) else []
    return found


def compare(function: str, call: Call, number: int, rank: int, i: int, run: Run, before: list, definition: str) -> None:
    """One rank's arguments after one call, against what they must be."""
    returned, replaced, *after = run.values[rank][number]
    where = f"on rank {rank}"
    if returned is not None and not (isinstance(returned, torch.Tensor) and returned.numel() == 0):
        what = KINDS.get(type(returned), "a tensor" if isinstance(returned, torch.Tensor) else "something")
        fail(
            case=call.name,
            expected="the result in the tensors that were passed, and nothing returned",
            found=f"{what} is returned {where}",
            line=definition,
            perhaps="the result is in a new tensor; copy it into the one that was passed"
            if isinstance(returned, torch.Tensor)
            else None,
        )
    names = ARGUMENT_NAMES[function]
    at = 0  # position in `before`, which holds all tensors of the arguments one after the other
    for position, expect in enumerate(call.expect[i]):
        several = isinstance(expect, list)
        for k, one in enumerate(expect if several else [expect]):
            if one is None:
                continue
            found = after[position][k] if several else after[position]
            wrong = difference(found, one)
            if wrong:
                label = f"{names[position]}[{k}]" if several else names[position]
                events = [e for e in run.in_case(number) if e.rank == rank]
                if replaced and position not in call.kept:
                    why = "an entry of the list was replaced by another tensor; copy_ into the one that is there"
                elif call.receives[i] and not any(e.op == "recv" and e.numel for e in events):
                    why = f"rank {rank} received no message"
                else:
                    why = misconception(function, call, position, i, one, found, before[at], run)
                fail(
                    case=call.name,
                    expected=f"{label} {where}: {wrong[0]}",
                    found=wrong[1],
                    line=f"{events[-1].line}   (the last message of rank {rank})" if events else definition,
                    perhaps=why,
                )
            at += 1
    if replaced:
        fail(
            case=call.name,
            expected=f"the lists that were passed {where}, with the same tensors in them",
            found="a list that is longer or shorter, or holds other tensors",
            line=definition,
            perhaps="an entry of the list was replaced by another tensor; copy_ into the one that is there",
        )


ARGUMENT_NAMES = {
    "broadcast": ["tensor", "src"],
    "scatter": ["tensor", "scatter_list", "src"],
    "gather": ["tensor", "gather_list", "dst"],
    "reduce": ["tensor", "dst"],
    "ring_all_gather": ["output", "tensor"],
    "ring_reduce_scatter": ["output", "tensor"],
    "ring_all_reduce": ["tensor"],
    "all_to_all": ["outputs", "inputs"],
    "recursive_doubling_all_reduce": ["tensor"],
}
WHICH_PART = {  # what a wrong sum has often come from
    "reduce": "a summand is missing or was added twice; was a receive buffer used again before it was read?",
    "ring_reduce_scatter": "which chunk leaves first? rank r begins with its chunk r - 1 and adds its own part to each "
    "chunk that arrives before it passes it on; the last to arrive is chunk r",
    "ring_all_reduce": "follow one chunk: for p - 1 steps each rank adds its own part to it, for p - 1 steps the "
    "finished chunk is copied; in between, which rank holds which finished chunk?",
    "recursive_doubling_all_reduce": "both partners send the sum they held before the round, and add once; if p is no "
    "power of two, the ranks left over hand in their tensor first and get the result at the end",
}
SUMS = ("reduce", "ring_reduce_scatter", "ring_all_reduce", "recursive_doubling_all_reduce")


def misconception(
    function: str,
    call: Call,
    position: int,
    i: int,
    expect: Expect,
    found: object,
    before: torch.Tensor,
    run: Run,
) -> str | None:
    """What a student may have thought, from how a value is wrong."""
    if not isinstance(found, torch.Tensor) or found.shape != before.shape or found.dtype != before.dtype:
        return None
    unchanged = bool(torch.equal(found, before))
    if (expect.terms == 0 and position in call.kept) or (function == "reduce" and expect.terms == 0):
        return "this tensor is only read; add up in a copy of it"
    if unchanged and "not contiguous" in call.name:
        return "the values arrived in a contiguous copy, which was not copied back into the tensor that was passed"
    if unchanged:
        return (
            "nothing was put into the tensor: assigning to the name only makes it mean another tensor; use copy_ or +="
        )
    for other, theirs in enumerate(call.expect):
        one = theirs[position]
        if other != i and isinstance(one, Expect) and not difference(found, one) and difference(found, expect):
            return f"this is what rank {other} of the group should hold"
    if function in SUMS and expect.values.numel() and found.dtype.is_floating_point:
        ratio = found.double().flatten()[0] / expect.values.double().flatten()[0]
        for whole in (2, 3, 4, run.world_size, 1 / run.world_size):
            if whole != 1 and abs(ratio - whole) < 1e-3:
                happened = "something was added more than once" if whole > 1 else "a sum is asked for, not an average"
                return f"it is {whole:g} times the sum: {happened}"
        return WHICH_PART.get(function, "a summand is missing or was added twice")
    if function == "ring_all_gather":
        return "which chunk arrives in which step? in step s, rank r receives the chunk of rank r - s - 1"
    return None
