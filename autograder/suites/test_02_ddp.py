"""The public checks of module 02: data-parallel training.

Most of them give a model on every rank a small program (see `Case`) and play the same program in the driver, in
float64 and without communication, for what the gradients must be. The models are such that a check chooses each
gradient, and the order in which backward computes them. That a gradient is sent while backward goes on is seen from the
order of events.
"""

import copy
import importlib
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autograder.lab import gpt
from autograder.lab.ledger import Event
from autograder.lab.ranks import PerRank, Run, RunFailed
from autograder.suites.kit import (
    Expect,
    Module,
    Problem,
    check,
    difference,
    expect_nothing_left,
    fail,
    numbers_agree,
    one_thread,
    timeline,
)

MODULE = Module(
    "02_ddp",
    "Data-parallel training",
    files=["ddp.py"],
    problems=[
        Problem("shard_batch", 8, "Cut the batch", "The batch"),
        Problem("broadcast_module", 12, "Equal replicas", "What is replicated"),
        Problem("naive_sync", 12, "One all-reduce for each gradient", "One message for each gradient"),
        Problem("flat_sync", 12, "One all-reduce for all gradients", "One message for all"),
        Problem("weighted_sync", 12, "Uneven batches", "Why the average, and when not"),
        Problem("overlapped", 16, "Send while backward computes", "Overlap"),
        Problem("bucketed", 18, "Send in buckets", "Buckets"),
        Problem("train_ddp", 10, "The training run on many ranks", "The run"),
    ],
    refused_names={
        "torch.nn.parallel.DistributedDataParallel": "it is what this module builds; hooks on the parameters and "
        "all_reduce are enough",
    },
)

# ------------------------------------------------------------------------------------------------------- the models


class Terms(nn.Module):
    """Parameters p_i. Called with pairs (i, x_i), it adds up the sums of p_i * x_i in the order given.

    So the gradient of p_i is x_i (times `scale`), and the last one that is used gets its gradient first.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)

    def forward(self, used: list[tuple[int, Tensor]], scale: float = 1.0) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, x in used:
            total = total + (self.weights[i] * x).sum().double() * scale
        return total


class Losses(nn.Module):
    """A GPT whose forward returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


class Checkpointed(nn.Module):
    """Two checkpointed layers that share a weight; with `reentrant` None, not checkpointed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in (self.first, self.second):
            if self.reentrant is None:
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.reentrant)
        return x.square().sum()


def draw(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: str = "") -> Tensor:
    """Whole numbers from 1 to 99; "transposed" or "column": not contiguous."""
    if layout == "transposed":
        return draw(rng, shape[::-1], dtype).t()
    if layout == "column":
        return draw(rng, (*shape, 2), dtype)[..., 0]
    return torch.randint(1, 100, shape, generator=rng).to(dtype)


def terms(rng: torch.Generator, sizes: list[int], dtype: torch.dtype = torch.float32) -> Terms:
    return Terms([nn.Parameter(draw(rng, (n,), dtype)) for n in sizes])


def inputs(rng: torch.Generator, model: Terms, order: list[int] | None = None) -> tuple:
    """Arguments of `Terms.forward`: an x for each parameter, or for these, in this order."""
    used = range(len(model.weights)) if order is None else order
    return ([(i, draw(rng, tuple(model.weights[i].shape), model.weights[i].dtype)) for i in used],)


# -------------------------------------------------------------------------------------------------------- the cases


@dataclass
class Case:
    """A model on every rank, and what happens to it there.

    A program is a list of steps, of the same kinds on every rank:

        ("gradients", [tensor or None, ...])   set them by hand
        ("call", function, *arguments)         average them with one of the functions
        ("step", *inputs)                      forward and backward; without inputs, neither
        ("local", *inputs)                     the same in no_sync
        ("finish",)                            finish_gradient_synchronization()
        ("finish in no_sync",)
        ("zero", set_to_none)                  zero_grad
        ("look",)                              hand the gradients back

    Args:
        name: shown in messages.
        models: item r is the model of rank r of the group.
        programs: and its program.
        arguments: of the wrapper, besides the module.
        perhaps: the likely reason where a gradient is wrong.
        terms: sets the tolerance, see `Expect`.
        played: the model that the driver plays the case with; that of the first rank by default.
    """

    name: str
    models: list[nn.Module]
    programs: list[list[tuple]]
    arguments: tuple = ()
    perhaps: str | None = None
    terms: int = 12
    played: nn.Module | None = None


def run_cases(context, wrapper: str | None, cases: list[tuple] | None, members: list[int] | None) -> list | None:
    """On a rank: go through the cases' programs, with a mark for each gradient that is computed."""
    group = context.group(members) if members else None
    if cases is None:
        return None
    seen = []
    for name, model, arguments, program in cases:
        context.case(name)
        for i, p in enumerate(model.parameters()):
            if p.requires_grad:
                p.register_hook(lambda gradient, i=i: context.mark(f"gradient {i}"))
        ddp = getattr(context.student, wrapper)(model, *arguments, group=group) if wrapper else model
        values = [p.detach().clone() for p in model.parameters()]
        seen.append([])
        for kind, *rest in program:
            if kind == "gradients":
                for p, gradient in zip(model.parameters(), rest[0], strict=True):
                    p.grad = gradient
            elif kind == "call":
                getattr(context.student, rest[0])(model, *rest[1:], group=group)
            elif kind in ("step", "local"):
                with ddp.no_sync() if kind == "local" else context.span("step"), context.span(kind):
                    if rest:
                        loss = ddp(*rest)
                        with context.span("backward"):
                            loss.backward()
            elif kind == "finish":
                with context.span("finish"):
                    ddp.finish_gradient_synchronization()
            elif kind == "finish in no_sync":
                with ddp.no_sync(), context.span("local"):
                    ddp.finish_gradient_synchronization()
            elif kind == "zero":
                model.zero_grad(set_to_none=rest[0])
            elif kind == "look":
                gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                kept = [torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True)]
                seen[-1].append([gradients, kept])
    return seen


Look = list[list[tuple]]  # of one rank's gradients: (what it must be or None, what it was locally, may be None)


def play(case: Case) -> list[list[list[tuple[Expect | None, list, bool]]]]:
    """Play a case here, in float64: for each rank and each look, for each gradient what it must be (None where there
    is none), what each rank had before it was averaged, and whether None is as good as zeros."""
    replicas = [copy.deepcopy(case.played or case.models[0]).double() for _ in case.models]
    dtypes = [p.dtype for p in case.models[0].parameters()]
    parameters = [list(replica.parameters()) for replica in replicas]
    before = [[None] * len(replicas) for _ in dtypes]
    empty = [False] * len(dtypes)
    looks: list[list] = [[] for _ in replicas]
    due = True
    for steps in zip(*case.programs, strict=True):
        kind = steps[0][0]
        for mine, replica, (_, *rest) in zip(parameters, replicas, steps, strict=True):
            if kind == "gradients":
                for p, gradient in zip(mine, rest[0], strict=True):
                    p.grad = None if gradient is None else gradient.double()
            elif kind in ("step", "local") and rest:
                replica(*_double(rest)).backward()
            elif kind == "zero":
                replica.zero_grad(set_to_none=rest[0])
        due = {"step": True, "local": False}.get(kind, due)
        if kind == "call" or (kind == "finish" and due):
            counts = [step[2] if len(step) > 2 else 1 for step in steps]
            for i, same in enumerate(zip(*parameters, strict=True)):
                before[i] = [p.grad for p in same]
                empty[i] = not same[0].requires_grad or all(g is None for g in before[i])
                if not empty[i]:
                    average = _average(before[i], counts)
                    for p in same:
                        p.grad = average.clone()
        if kind == "look":
            for mine, found in zip(parameters, looks, strict=True):
                found.append([])
                for p, dtype, local, none in zip(mine, dtypes, before, empty, strict=True):
                    size = max(
                        [float(g.nan_to_num().abs().max()) for g in [*local, p.grad] if g is not None], default=0.0
                    )
                    wanted = None if p.grad is None else Expect(p.grad.clone(), dtype, case.terms, size)
                    optional = none and p.requires_grad
                    if optional and wanted is None:
                        wanted = Expect(torch.zeros_like(p), dtype, 0)
                    found[-1].append((wanted, list(local), optional))
    return looks


def _average(gradients: list[Tensor | None], counts: list[int]) -> Tensor:
    some = next(g for g in gradients if g is not None)
    parts = [n * g for g, n in zip(gradients, counts, strict=True) if g is not None and n]
    return sum(parts, torch.zeros_like(some)) / sum(counts)


def _double(value: object) -> object:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(map(_double, value)) if isinstance(value, list | tuple) else value


def make(
    ranks: Callable, cases: list[Case], world_size: int, wrapper: str | None = None, members: list[int] | None = None
) -> Run:
    """Run the cases on ranks, compare every gradient that is looked at, and hand back the run for more."""
    places = members or list(range(world_size))
    own: list = [None] * world_size
    for i, rank in enumerate(places):
        own[rank] = [(c.name, c.models[i], c.arguments, c.programs[i]) for c in cases]
    run = ranks(run_cases, world_size, wrapper, PerRank(own), members)
    for number, case in enumerate(cases):
        with one_thread():
            looks = play(case)
        for i, rank in enumerate(places):
            for n, wanted in enumerate(looks[i]):
                compare(ranks, run, case, number, rank, wanted, run.values[rank][number][n], wrapper)
    expect_nothing_left(run)
    return run


def compare(
    ranks: Callable, run: Run, case: Case, number: int, rank: int, wanted: list, found: list, wrapper: str | None
) -> None:
    """The gradients that one rank has at one look, against what they must be, and its parameters, as they were."""
    function = wrapper or next(step[1] for step in case.programs[0] if step[0] == "call")
    calls = [e for e in run.in_case(number) if e.rank == rank and e.is_collective]
    line = calls[-1] if calls else ranks.definition(function)
    for (name, p), (expect, local, optional), got, kept in zip(
        case.models[0].named_parameters(), wanted, *found, strict=True
    ):
        if not kept:
            fail(
                case=case.name,
                expected="parameters are as they were: the optimizer changes them, nothing else",
                found=f"{name} on rank {rank} has other values",
                line=line,
                perhaps="a hook is handed the parameter; what is to be averaged is its gradient, p.grad",
            )
        if got is None and (expect is None or optional):
            continue
        if expect is None:
            fail(
                case=case.name,
                expected=f"gradient of {name} on rank {rank}: None, as this parameter requires no gradient",
                found="a tensor",
                line=line,
                perhaps="a frozen parameter was given a gradient; an optimizer with weight decay then changes it",
            )
        wrong = difference(got, expect)
        if wrong:
            fail(
                case=case.name,
                expected=f"gradient of {name} on rank {rank}: {wrong[0]}",
                found=wrong[1],
                line=line,
                perhaps=misconception(got, expect, local, p.detach().double(), run.world_size) or case.perhaps,
            )


def misconception(
    found: object, expect: Expect, local: list[Tensor | None], parameter: Tensor, world_size: int
) -> str | None:
    """What a student may have thought, from how an averaged gradient is wrong."""
    p, has = len(local), sum(g is not None for g in local)
    if found is None:
        return "a rank without this gradient takes part all the same, with zeros, and gets the average like the others"
    if not isinstance(found, Tensor) or found.shape != expect.values.shape or found.dtype != expect.dtype:
        return None
    if bool(found.isnan().any()):
        return "0 * nan is nan: a rank without samples must not use its gradients at all"

    def is_(values: Tensor) -> bool:
        return bool(torch.allclose(found.double(), values, rtol=1e-2 if expect.dtype.itemsize < 4 else 1e-5))

    if is_(parameter):
        return "this is the parameter itself; its gradient is p.grad"
    if p > 1 and is_(expect.values * p):
        return f"it is the sum over the {p} ranks; the average is asked for"
    if p != world_size and is_(expect.values * p / world_size):
        return f"divided by the {world_size} ranks of the default group; this group has {p}"
    if 0 < has < p and is_(expect.values * p / has):
        return "divided by the number of ranks that have this gradient; a rank without it counts, with zero"
    if p > 1 and is_(expect.values / p):
        return "divided twice by the number of ranks"
    if p > 1 and any(g is not None and is_(g) for g in local):
        return "this is one rank's own gradient: was a copy averaged and not put back, or not all of it?"
    return None


# --------------------------------------------------------------------------------------------------------- the order


def within(order: int | None, spans: list[Event]) -> bool:
    """Whether a moment lies inside one of these spans."""
    return order is not None and any(s.order < order < (s.done_order or s.order) for s in spans)


def spans(events: list[Event], text: str) -> list[Event]:
    return [e for e in events if e.op == "span" and e.api == text]


def reductions(events: list[Event], gradients: int) -> list[Event]:
    """The all_reduces, without one of at most an element for each gradient, by which ranks may agree who has which.

    The gradients themselves must have more elements.
    """
    found = [e for e in events if e.op == "all_reduce"]
    tiny = next((e for e in found if e.numel <= gradients), None)
    return [e for e in found if e is not tiny]


def numels(model: nn.Module) -> list[int]:
    """Elements of each gradient, in the order of registration."""
    return [p.numel() for p in model.parameters() if p.requires_grad]


def expect_messages(run: Run, case: Case, number: int, rank: int, wanted: list[tuple[int, str]], rule: str) -> None:
    """Exactly these all_reduces, as (elements, dtype), in any order, and nothing else but one small message."""
    events = [e for e in run.in_case(number) if e.rank == rank and e.is_collective]
    other = [e for e in events if e.op not in ("all_reduce", "barrier") and e.nbytes > 64]
    found = reductions(events, len(numels(case.models[0])))
    missing = Counter(wanted) - Counter((e.numel, e.dtype) for e in found)
    extra = Counter((e.numel, e.dtype) for e in found) - Counter(wanted)
    if not missing and not extra and not other:
        return
    wrong = other[0] if other else next((e for e in found if (e.numel, e.dtype) in extra), found[-1] if found else None)
    if other:
        told, perhaps = f"also {len(other)} {other[0].op} of {other[0].numel} elements", None
    else:
        told = f"{len(found)}: {_listed([(e.numel, e.dtype) for e in found])}"
        perhaps = None
        if len(found) == 1 < len(wanted):
            perhaps = "all gradients in one message: their dtype is then the widest of them, for all"
        elif len(found) > len(wanted):
            perhaps = "a message more than there must be: is a parameter sent twice, or one that needs no gradient?"
    fail(
        case=case.name,
        expected=f"{rule}; rank {rank}: {len(wanted)}: {_listed(wanted)}",
        found=told,
        line=wrong,
        perhaps=perhaps,
    )


def _listed(messages: list[tuple[int, str]]) -> str:
    """Sizes in words: "5, 7 elements of float32"."""
    if not messages:
        return "nothing"
    dtypes = dict.fromkeys(dtype for _, dtype in messages)
    text = [f"{', '.join(str(n) for n, d in messages[:40] if d == dtype)} elements of {dtype}" for dtype in dtypes]
    return "; ".join(text)


# -------------------------------------------------------------------------------------------------------- shard_batch


def shard_all(context, batches: list) -> list:
    """On a rank: every part of every batch, its kind, and the text of a ValueError."""
    seen = []
    for name, batch, world_size in batches:
        context.case(f"{name}, {world_size} parts")
        parts = []
        for rank in range(world_size):
            try:
                part = context.student.shard_batch(batch, rank, world_size)
                parts.append([type(part).__name__, part])
            except ValueError as error:
                parts.append(["ValueError", str(error)])
        seen.append(parts)
    return seen


def check_shards(ranks: Callable, batches: list[tuple[str, object, int]]) -> None:
    """Each batch, with a name and the number of parts, is cut as it should be."""
    run = ranks(shard_all, 1, batches)
    where = ranks.definition("shard_batch")
    for (name, batch, world_size), parts in zip(batches, run.values[0], strict=True):
        for rank, (kind, part) in enumerate(parts):
            case = f"{name}, rank {rank} of {world_size}"
            if kind != type(batch).__name__:
                told = f"ValueError: {part}" if kind == "ValueError" else f"a {kind}"
                fail(case=case, expected=f"a {type(batch).__name__}", found=told, line=where)
            whole = batch if isinstance(batch, dict) else dict(enumerate(batch if kind != "Tensor" else [batch]))
            mine = part if isinstance(part, dict) else dict(enumerate(part if kind != "Tensor" else [part]))
            if list(map(str, whole)) != list(map(str, mine)):
                fail(case=case, expected=f"the entries {list(whole)}", found=f"{list(mine)}", line=where)
            for (key, tensor), got in zip(whole.items(), mine.values(), strict=True):
                size = len(tensor) // world_size
                wrong = difference(got, Expect(tensor[rank * size : (rank + 1) * size], tensor.dtype, 0))
                if wrong:
                    rows = isinstance(got, Tensor) and got.ndim and size > 1 < world_size
                    strided = rows and got.shape == tensor[rank::world_size].shape
                    strided = strided and bool((got == tensor[rank::world_size]).all())
                    fail(
                        case=case if kind == "Tensor" else f"{case}, entry {key!r}",
                        expected=wrong[0],
                        found=wrong[1],
                        line=where,
                        perhaps="these are every world_size-th row; a rank's rows follow each other"
                        if strided
                        else None,
                    )
    if any(e.is_collective or e.is_message for e in run.events):
        fail(expected="nothing is sent", found="communication", line=next(e for e in run.events if e.op != "case"))


@check("shard_batch", "rank r has the r-th block of rows", weight=3)
def test_shard_batch_tensor(ranks, rng):
    batches = []
    for p in (2, 3, 4, 1):
        b = p * int(torch.randint(2, 5, (), generator=rng))
        for shape, dtype in (((b,), torch.float32), ((b, 3), torch.int64), ((p, 2, 2), torch.float64)):
            batches.append((f"shape {list(shape)}", draw(rng, shape, dtype), p))
    check_shards(ranks, batches)


@check("shard_batch", "a tuple, list or dict comes back as one, of parts", weight=2)
def test_shard_batch_kinds(ranks, rng):
    x, y = draw(rng, (6, 4), torch.int64), draw(rng, (6,))
    batches = [("a tuple", (x, y), 3), ("a list", [x, y, x], 3), ("a dict", {"tokens": x, "weights": y}, 2)]
    check_shards(ranks, batches)


@check("shard_batch", "a batch that does not divide is a ValueError that says why", weight=2)
def test_shard_batch_uneven(ranks, rng):
    x = draw(rng, (7, 4))
    batches = [("7 rows", x, 4), ("2 rows", draw(rng, (2,)), 4), ("a dict, 7 rows", {"x": x}, 4)]
    run = ranks(shard_all, 1, batches)
    for (name, _, _), parts in zip(batches, run.values[0], strict=True):
        for rank, (kind, text) in enumerate(parts):
            rows = "7" if "7" in name else "2"
            if kind != "ValueError":
                fail(
                    case=f"{name}, rank {rank} of 4",
                    expected="a ValueError",
                    found=f"a {kind}",
                    line=ranks.definition("shard_batch"),
                    perhaps="rows that are left over would be trained on by nobody, and averages would be wrong",
                )
            if rows not in text or "4" not in text:
                fail(
                    case=f"{name}, rank {rank} of 4",
                    expected=f"a message with both numbers, {rows} and 4",
                    found=repr(text[:200]),
                    line=ranks.definition("shard_batch"),
                )


# --------------------------------------------------------------------------------------------------- broadcast_module


class Everything(nn.Module):
    """Parameters and buffers of every sort."""

    def __init__(self, rng: torch.Generator, contiguous: bool = True) -> None:
        super().__init__()
        if not contiguous:
            self.transposed = nn.Parameter(draw(rng, (3, 4), layout="transposed"))
            self.column = nn.Parameter(draw(rng, (5,), layout="column"))
            self.register_buffer("rows", draw(rng, (6,), torch.float64, layout="column"))
            return
        self.embedding = nn.Parameter(draw(rng, (7, 3)))
        self.short = nn.Parameter(draw(rng, (11,), torch.bfloat16))
        self.head = nn.ParameterDict({"tied": self.embedding, "own": nn.Parameter(draw(rng, (5,)))})
        self.frozen = nn.Parameter(draw(rng, (13,)), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.copy_(draw(rng, (4,)))
        self.norm.num_batches_tracked.fill_(int(draw(rng, ())))
        self.register_buffer("mask", draw(rng, (6,)) > 50)
        self.register_buffer("scratch", draw(rng, (10,), torch.float64), persistent=False)


def broadcast(context, model: nn.Module | None, members: list[int] | None, sources: list[int | None]) -> list | None:
    """On a rank: broadcast from each source in turn; before each, the rank's values are its own again."""
    group = context.group(members) if members else None
    if model is None:
        return None
    seen = []
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    own = [t.detach().clone() for t in tensors]
    for p in parameters:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    for src in sources:
        context.case(f"src={src}" + (f", group of ranks {members}" if members else ""))
        with torch.no_grad():
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)
        context.student.broadcast_module(model, src, group)
        state = {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
        same = [id(p) for p in parameters] == [id(p) for p in model.parameters()]
        kept = all(p.grad is None or bool((p.grad == 1).all()) for p in model.parameters())
        seen.append([state, same, kept, [p.requires_grad for p in model.parameters()]])
    return seen


def expect_broadcast(
    ranks: Callable,
    models: list[nn.Module],
    sources: list[int | None],
    members: list[int] | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Run:
    p = len(models)
    places = members or list(range(p))
    own = [models[places.index(r)] if r in places else None for r in range(max(places) + 2 if members else p)]
    run = ranks(broadcast, len(own), PerRank(own), members, sources)
    where = ranks.definition("broadcast_module")
    for number, src in enumerate(sources):
        source = models[0 if src is None else places.index(src)]
        state = dict([*source.named_parameters(), *source.named_buffers()])
        for rank in places:
            found, same, kept, requires = run.values[rank][number]
            case = f"src={src}" + (f", group of ranks {members}" if members else "")
            calls = [e for e in run.in_case(number) if e.rank == rank and e.is_collective]
            line = calls[-1] if calls else where
            if not same or requires != [q.requires_grad for q in source.parameters()]:
                fail(
                    case=case,
                    expected="the parameters of before, with new values",
                    found="other parameters" if not same else "requires_grad changed",
                    line=line,
                    perhaps="an optimizer that was made before still holds the old ones; copy the values in place",
                )
            if not kept:
                fail(case=case, expected="gradients are left alone", found="a gradient changed", line=line)
            for name in filter(only, state):
                wrong = difference(found.get(name), Expect(state[name].detach(), state[name].dtype, 0))
                if wrong:
                    perhaps = None
                    if not state[name].is_contiguous():
                        perhaps = "this tensor is not contiguous: send a contiguous copy, and copy what arrives back"
                    elif name not in dict(source.named_parameters()):
                        perhaps = "a buffer is part of the model, too"
                    elif not state[name].requires_grad:
                        perhaps = "a frozen parameter takes part in forward, so it must be the same everywhere"
                    elif not calls and p > 1:
                        perhaps = "nothing was sent"
                    elif members:
                        perhaps = "src is a global rank; None is the first rank of the group, not rank 0"
                    fail(
                        case=case,
                        expected=f"{name} on rank {rank}: {wrong[0]}",
                        found=wrong[1],
                        line=line,
                        perhaps=perhaps,
                    )
    expect_nothing_left(run)
    return run


@check("broadcast_module", "all ranks have the source's parameters, of every dtype", weight=3)
def test_broadcast_module_parameters(ranks, rng):
    for p in (3, 4, 1):
        models = [Everything(rng) for _ in range(p)]
        for model in models:
            model.frozen.requires_grad_(True)
        names = set(dict(models[0].named_parameters()))
        expect_broadcast(ranks, models, [None, p - 1], only=lambda name, names=names: name in names)


@check("broadcast_module", "frozen parameters and buffers are part of the model", weight=3)
def test_broadcast_module_frozen(ranks, rng):
    expect_broadcast(ranks, [Everything(rng) for _ in range(3)], [None, 1])


@check("broadcast_module", "tensors that are not contiguous", weight=2)
def test_broadcast_module_strided(ranks, rng):
    expect_broadcast(ranks, [Everything(rng, contiguous=False) for _ in range(3)], [None, 2])


@check("broadcast_module", "src is a global rank, and by default the first of the group", weight=2)
def test_broadcast_module_subgroup(ranks, rng):
    expect_broadcast(ranks, [Everything(rng) for _ in range(2)], [None, 3, 1], members=[1, 3])


@check("broadcast_module", "each tensor is sent once, in its own dtype", weight=2)
def test_broadcast_module_traffic(ranks, rng):
    models = [Everything(rng) for _ in range(3)]
    run = expect_broadcast(ranks, models, [None])
    tensors = [*models[0].parameters(), *models[0].buffers()]
    wanted = sum(t.nbytes for t in tensors)
    for rank in range(3):
        calls = [e for e in run.of(rank) if e.is_collective]
        found = sum(e.nbytes for e in calls)
        if found == wanted:
            continue
        shared = models[0].embedding.nbytes
        fail(
            expected=f"{wanted} bytes in all: each of {len(tensors)} parameters and buffers once",
            found=f"{found} bytes in {len(calls)} messages (rank {rank})",
            line=max(calls, key=lambda e: e.nbytes) if calls else ranks.definition("broadcast_module"),
            perhaps="state_dict() names the shared parameter twice; parameters() and buffers() name it once"
            if found > wanted and (found - wanted) % shared <= 72
            else None,
        )


# ----------------------------------------------------------------------------------------- averages, after backward


def averaged(
    rng: torch.Generator, function: str, name: str, models: list[nn.Module], gradients: list[list], *extra: list
) -> Case:
    """A case in which these gradients (one list per rank) are averaged by a function. `extra`: an argument per rank."""
    programs = [
        [("gradients", mine), ("call", function, *[e[r] for e in extra]), ("look",)] for r, mine in enumerate(gradients)
    ]
    return Case(name, models, programs)


def some_gradients(rng: torch.Generator, model: nn.Module) -> list[Tensor | None]:
    return [draw(rng, tuple(p.shape), p.dtype) if p.requires_grad else None for p in model.parameters()]


def mixed(rng: torch.Generator, last: tuple[int, ...] = ()) -> Terms:
    """Parameters of three dtypes, one in two places, one frozen, one a matrix, the last one a number."""
    shapes = [((11,), torch.float32), ((3, 5), torch.float64), ((12,), torch.bfloat16), ((4, 4), torch.float32)]
    parameters = [nn.Parameter(draw(rng, shape, dtype)) for shape, dtype in shapes]
    frozen = nn.Parameter(draw(rng, (14,)), requires_grad=False)
    return Terms([*parameters, frozen, parameters[0], nn.Parameter(draw(rng, last, torch.float64))])


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
            rng, function, "a model with three dtypes, a tied and a frozen parameter", models,
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
        cases.append(averaged(rng, function, name, models, gradients, *counts_for(function, 3)))
    make(ranks, cases, 3)


def expect_strided_averages(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """A gradient of a transposed parameter is transposed, too; on one rank it is not."""

    def model() -> Terms:
        return Terms(
            [nn.Parameter(draw(rng, (3, 4), layout="transposed")), nn.Parameter(draw(rng, (5,), layout="column"))]
        )

    models = [model() for _ in range(2)]
    gradients = [
        [draw(rng, (3, 4), layout="transposed"), draw(rng, (5,), layout="column")],
        [draw(rng, (3, 4)), draw(rng, (5,), layout="column")],
    ]
    case = averaged(rng, function, "gradients that are not contiguous", models, gradients, *counts_for(function, 2))
    case.perhaps = "a tensor that is not contiguous: all_reduce a contiguous copy, and copy the result back"
    make(ranks, [case], 2)


def expect_group_averages(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """In a group of ranks 1 and 3 of four, the average is over two."""
    models = [terms(rng, [7, 8]) for _ in range(2)]
    gradients = [some_gradients(rng, m) for m in models]
    case = averaged(rng, function, "a group of ranks [1, 3]", models, gradients, *counts_for(function, 2))
    make(ranks, [case], 4, members=[1, 3])


@check("naive_sync", "every rank has the average of the gradients", weight=3)
def test_naive_sync_values(ranks, rng):
    expect_averages(ranks, rng, "average_gradients")


@check("naive_sync", "a gradient that a rank has not is zero there, and averaged", weight=3)
def test_naive_sync_missing(ranks, rng):
    expect_missing(ranks, rng, "average_gradients")


@check("naive_sync", "gradients that are not contiguous", weight=1)
def test_naive_sync_strided(ranks, rng):
    expect_strided_averages(ranks, rng, "average_gradients")


@check("naive_sync", "in a group the average is over the group", weight=2)
def test_naive_sync_subgroup(ranks, rng):
    expect_group_averages(ranks, rng, "average_gradients")


def one_average(ranks: Callable, rng: torch.Generator, function: str, *extra: list) -> tuple[Run, Case]:
    models = [mixed(rng, last=(13,)) for _ in range(3)]
    gradients = [some_gradients(rng, m) for m in models]
    case = averaged(
        rng, function, "a model with three dtypes, a tied and a frozen parameter", models, gradients, *extra
    )
    return make(ranks, [case], 3), case


def in_dtypes(model: nn.Module) -> list[tuple[int, str]]:
    return [(p.numel(), str(p.dtype).removeprefix("torch.")) for p in model.parameters() if p.requires_grad]


@check("naive_sync", "one all_reduce for each gradient, of its size", weight=3)
def test_naive_sync_traffic(ranks, rng):
    run, case = one_average(ranks, rng, "average_gradients")
    for rank in range(3):
        expect_messages(run, case, 0, rank, in_dtypes(case.models[0]), "one all_reduce for each gradient")


@check("flat_sync", "every rank has the average of the gradients", weight=3)
def test_flat_sync_values(ranks, rng):
    expect_averages(ranks, rng, "average_gradients_flat", (3, 4, 1))


@check("flat_sync", "a gradient that a rank has not is zero there, and averaged", weight=3)
def test_flat_sync_missing(ranks, rng):
    expect_missing(ranks, rng, "average_gradients_flat")


@check("flat_sync", "gradients that are not contiguous", weight=1)
def test_flat_sync_strided(ranks, rng):
    expect_strided_averages(ranks, rng, "average_gradients_flat")


@check("flat_sync", "in a group the average is over the group", weight=2)
def test_flat_sync_subgroup(ranks, rng):
    expect_group_averages(ranks, rng, "average_gradients_flat")


@check("flat_sync", "one all_reduce for each dtype", weight=3)
def test_flat_sync_traffic(ranks, rng):
    run, case = one_average(ranks, rng, "average_gradients_flat")
    sizes: Counter = Counter()
    for numel, dtype in in_dtypes(case.models[0]):
        sizes[dtype] += numel
    wanted = [(numel, dtype) for dtype, numel in sizes.items()]
    for rank in range(3):
        expect_messages(run, case, 0, rank, wanted, "one all_reduce for each dtype")


def weighted(rng: torch.Generator, counts: list[int], name: str, dtype: torch.dtype = torch.float32) -> Case:
    models = [terms(rng, [7, 8], dtype) for _ in counts]
    gradients = [some_gradients(rng, m) for m in models]
    case = averaged(rng, "average_gradients_weighted", f"{name}: {counts} samples", models, gradients, counts)
    case.perhaps = (
        "each rank's gradient counts as many times as it has samples; the average of averages is another number"
    )
    return case


@check("weighted_sync", "the gradient of the mean over all samples", weight=4)
def test_weighted_sync_values(ranks, rng):
    for p in (2, 3, 4, 1):
        counts = torch.randint(1, 9, (p,), generator=rng)
        counts[0] += 10
        make(ranks, [weighted(rng, counts.tolist(), "uneven batches"), weighted(rng, [2] * p, "even batches")], p)


@check("weighted_sync", "a rank without samples adds nothing", weight=3)
def test_weighted_sync_empty(ranks, rng):
    cases = []
    for number, what in enumerate(("no gradients", "nan", "zeros", "gradients left from before")):
        case = weighted(rng, [[3, 0, 5], [0, 4, 0]][number % 2], f"{what} on a rank without samples")
        for program in case.programs:
            if program[1][2] == 0:
                fill = {"nan": torch.nan, "zeros": 0.0}.get(what)
                kept = [None if what == "no gradients" else torch.full_like(g, fill or 0.0) for g in program[0][1]]
                program[0] = ("gradients", program[0][1] if what.startswith("gradients") else kept)
        cases.append(case)
    make(ranks, cases, 3)


@check("weighted_sync", "large numbers of samples, small dtypes", weight=1)
def test_weighted_sync_large(ranks, rng):
    cases = [
        weighted(rng, [40_000, 30_000, 1000], "float16", torch.float16),
        weighted(rng, [257, 3, 514], "bfloat16", torch.bfloat16),
    ]
    for case in cases:
        case.perhaps = (
            "neither n·g nor the total need fit into the dtype of the gradients: multiply by n / total, a plain number"
        )
    make(ranks, cases, 3)


@check("weighted_sync", "missing and frozen gradients, several dtypes, and not contiguous", weight=2)
def test_weighted_sync_missing(ranks, rng):
    expect_averages(ranks, rng, "average_gradients_weighted", (3,))
    expect_missing(ranks, rng, "average_gradients_weighted")
    expect_strided_averages(ranks, rng, "average_gradients_weighted")


@check("weighted_sync", "in a group the mean is over the group's samples", weight=1)
def test_weighted_sync_subgroup(ranks, rng):
    make(ranks, [weighted(rng, [5, 2], "a group of ranks [1, 3]")], 4, members=[1, 3])


@check("weighted_sync", "gradients travel once, the numbers of samples in one small message", weight=2)
def test_weighted_sync_traffic(ranks, rng):
    run, case = one_average(ranks, rng, "average_gradients_weighted", [4, 1, 2])
    wanted: Counter = Counter()
    for numel, dtype in in_dtypes(case.models[0]):
        wanted[dtype] += numel
    for rank in range(3):
        calls = [e for e in run.of(rank) if e.is_collective]
        found: Counter = Counter()
        for e in calls:
            found[e.dtype] += e.numel
        # The numbers of samples are told in any dtype, by all_reduce or all_gather; a mask of the gradients likewise.
        small = sum((found - wanted).values())
        if small > 3 * 3 + 6 or wanted - found:
            fail(
                case=case.name,
                expected=f"rank {rank}: {_listed([(n, d) for d, n in wanted.items()])}, and a few for the samples",
                found=f"{len(calls)} messages: {_listed([(n, d) for d, n in found.items()])}",
                line=max(calls, key=lambda e: e.nbytes) if calls else ranks.definition("average_gradients_weighted"),
            )


# ---------------------------------------------------------------------------------------------- both wrappers

CAP = {"OverlappedDDP": (), "BucketedDDP": (0.0001,)}  # 104 bytes: 26 numbers of float32


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
    models = [None, Everything(rng), Everything(rng)]
    run = ranks(built, 3, wrapper, PerRank(models), CAP[wrapper], members)
    source = models[1]
    for rank in members:
        for name, tensor in [*source.named_parameters(), *source.named_buffers()]:
            wrong = difference(run.values[rank]["state"].get(name), Expect(tensor.detach(), tensor.dtype, 0))
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


def steps(rng: torch.Generator, models: list[Terms], orders: list[list[int] | None] | None = None) -> list[list[tuple]]:
    """The plain program on each rank: one step in which backward computes gradients from the last to the first."""
    orders = orders or [None] * len(models)
    return [[("step", *inputs(rng, m, o)), ("finish",), ("look",)] for m, o in zip(models, orders, strict=True)]


SIZES = [11, 12, 13, 14, 15, 16]  # all different, and larger than the number of gradients


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
            ])  # fmt: skip
        case = Case("two steps, three dtypes, a tied and a frozen parameter", models, programs, CAP[wrapper])
        make(ranks, [case], p, wrapper)


def expect_gpt(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    """A GPT whose head is tied to its embedding gets the gradients of the whole batch."""
    torch.manual_seed(int(draw(rng, ())))
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
    run = ranks(
        run_cases, 2, wrapper, PerRank([[(case.name, models[r], CAP[wrapper], programs[r])] for r in (0, 1)]), None
    )
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
    looks = play(case)
    for rank in (0, 1):
        for n, wanted in enumerate(looks[rank]):
            compare(ranks, run, case, 0, rank, wanted, run.values[rank][0][n], wrapper)
    expect_nothing_left(run)
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
    make(ranks, [Case("two backwards in a step, then zeros", models, programs, CAP[wrapper], perhaps)], 3, wrapper)


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
    def model() -> Terms:
        return Terms(
            [nn.Parameter(draw(rng, (4, 3), layout="transposed")), nn.Parameter(draw(rng, (5,), layout="column"))]
        )

    models = [model() for _ in range(2)]
    perhaps = "a tensor that is not contiguous: send a contiguous copy, and copy the result back"
    make(ranks, [Case("transposed parameters", models, steps(rng, models), CAP[wrapper], perhaps)], 2, wrapper)


def expect_group_wrapped(ranks: Callable, rng: torch.Generator, wrapper: str) -> None:
    models = [terms(rng, SIZES[:3]) for _ in range(2)]
    make(ranks, [Case("a group of ranks [1, 3]", models, steps(rng, models), CAP[wrapper])], 4, wrapper, [1, 3])


def expect_no_waiting(run: Run, case: Case) -> None:
    """No operation is waited for while backward runs."""
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


# ---------------------------------------------------------------------------------------------------------- overlapped


@check("overlapped", "construction makes the replicas equal", weight=1)
def test_overlapped_construction(ranks, rng):
    expect_construction(ranks, rng, "OverlappedDDP")


@check("overlapped", "every rank has the average of the gradients", weight=3)
def test_overlapped_values(ranks, rng):
    expect_wrapped_averages(ranks, rng, "OverlappedDDP")
    expect_gpt(ranks, rng, "OverlappedDDP")


@check("overlapped", "gradients travel while backward still computes", weight=4)
def test_overlapped_order(ranks, rng):
    models = [terms(rng, SIZES) for _ in range(3)]
    case = Case("gradients become ready from the last to the first", models, steps(rng, models))
    run = make(ranks, [case], 3, "OverlappedDDP")
    wanted = [(n, "float32") for n in SIZES]
    for rank in range(3):
        events = timeline(run, rank, 0)
        start = spans(events, "step")[0].order
        found = reductions([e for e in events if e.order > start], len(SIZES))
        if Counter((e.numel, e.dtype) for e in found) != Counter(wanted):
            fail(
                case=case.name,
                expected=f"one all_reduce for each gradient; rank {rank}: {len(wanted)}: {_listed(wanted)}",
                found=f"{len(found)}: {_listed([(e.numel, e.dtype) for e in found])}",
                line=found[-1] if found else ranks.definition("OverlappedDDP"),
            )
    expect_sent_in_backward(run, case, [[i] for i in reversed(range(len(SIZES)))], SIZES)


@check("overlapped", "nothing is waited for in backward", weight=2)
def test_overlapped_waiting(ranks, rng):
    models = [terms(rng, SIZES) for _ in range(2)]
    case = Case("one step", models, steps(rng, models))
    expect_no_waiting(make(ranks, [case], 2, "OverlappedDDP"), case)


@check("overlapped", "micro-batches in no_sync are accumulated, and averaged once", weight=3)
def test_overlapped_no_sync(ranks, rng):
    expect_accumulation(ranks, rng, "OverlappedDDP")


@check("overlapped", "unused parameters, on one rank or on all", weight=3)
def test_overlapped_unused(ranks, rng):
    expect_unused(ranks, rng, "OverlappedDDP")


@check("overlapped", "gradients in another order on each rank", weight=2)
def test_overlapped_any_order(ranks, rng):
    expect_any_order(ranks, rng, "OverlappedDDP")


@check("overlapped", "a second backward, and gradients that start from zeros", weight=2)
def test_overlapped_two_backwards(ranks, rng):
    expect_two_backwards(ranks, rng, "OverlappedDDP")


@check("overlapped", "checkpointed layers that share a weight", weight=1)
def test_overlapped_checkpointing(ranks, rng):
    expect_checkpointing(ranks, rng, "OverlappedDDP")


@check("overlapped", "a group of some of the ranks; parameters that are not contiguous", weight=2)
def test_overlapped_subgroup(ranks, rng):
    expect_group_wrapped(ranks, rng, "OverlappedDDP")
    expect_strided_wrapped(ranks, rng, "OverlappedDDP")


# ------------------------------------------------------------------------------------------------------------ bucketed


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


def mb(numbers: float, itemsize: int = 4) -> float:
    """So many numbers in MB of 2^20 bytes, exactly."""
    return numbers * itemsize / 2**20


def expect_buckets(run: Run, case: Case, number: int, buckets: list[list[int]], sizes: list[int], dtype: str) -> None:
    """The all_reduces of one step carry these buckets, in this order; those of other dtypes may be in between."""
    wanted = [sum(sizes[i] for i in bucket) for bucket in buckets]
    for rank in range(run.world_size):
        events = timeline(run, rank, number)
        start = spans(events, "step")[0].order
        sent = reductions([e for e in events if e.order > start], len(numels(case.models[0])))
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
            expected=f"buckets of {wanted} elements of {dtype}, in this order",
            found=f"{sums} (rank {rank})",
            line=found[min(at, len(found) - 1)] if found else None,
            perhaps=perhaps,
        )


@check("bucketed", "construction makes the replicas equal", weight=1)
def test_bucketed_construction(ranks, rng):
    expect_construction(ranks, rng, "BucketedDDP")


@check("bucketed", "every rank has the average of the gradients", weight=3)
def test_bucketed_values(ranks, rng):
    expect_wrapped_averages(ranks, rng, "BucketedDDP")
    expect_gpt(ranks, rng, "BucketedDDP")


@check("bucketed", "buckets are filled up to the cap, from the last parameter on", weight=4)
def test_bucketed_composition(ranks, rng):
    rows = [
        ([10, 20, 30, 12, 18, 11], mb(41), "a cap of 41 numbers: one bucket is full to the last byte"),
        ([10, 20, 30, 12, 18, 11], mb(40.5), "a cap of 40.5 numbers"),
        ([11, 12, 50, 13, 14], mb(30), "one gradient is larger than the cap"),
        ([11, 12, 13], mb(11), "a cap of one gradient"),
        ([11, 12, 13, 14], 25, "a cap of 25 MB"),
        ([40_000, 100_000, 150_000, 112_144], 1.0, "a cap of 1 MB, exactly full"),
    ]
    cases = []
    for sizes, cap, name in rows:
        models = [terms(rng, sizes) for _ in range(2)]
        cases.append(Case(name, models, steps(rng, models), (cap,)))
    run = make(ranks, cases, 2, "BucketedDDP")
    for number, ((sizes, cap, _), case) in enumerate(zip(rows, cases, strict=True)):
        expect_buckets(run, case, number, fill(sizes, cap), sizes, "float32")


@check("bucketed", "a bucket holds one dtype", weight=2)
def test_bucketed_dtypes(ranks, rng):
    kinds = [torch.float32, torch.float64, torch.bfloat16]
    sizes = [12, 13, 14, 15, 16, 17, 18, 19, 20]

    def model() -> Terms:
        return Terms([nn.Parameter(draw(rng, (n,), kinds[i % 3])) for i, n in enumerate(sizes)])

    models = [model() for _ in range(2)]
    case = Case("three dtypes by turns, a cap of 150 bytes", models, steps(rng, models), (150 / 2**20,))
    run = make(ranks, [case], 2, "BucketedDDP")
    for k, dtype in enumerate(kinds):
        mine = sizes[k::3]
        buckets = fill(mine, 150 / 2**20, dtype.itemsize)
        expect_buckets(run, case, 0, buckets, mine, str(dtype).removeprefix("torch."))


@check("bucketed", "each bucket is sent as soon as it and those before it are complete", weight=3)
def test_bucketed_order(ranks, rng):
    sizes, cap = [11, 12, 13, 14, 15, 16, 17, 18], mb(36)
    for name, order in (
        ("gradients become ready from the last to the first", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("the second bucket is complete before the first", [0, 1, 6, 7, 2, 3, 4, 5]),
    ):
        models = [terms(rng, sizes) for _ in range(2)]
        case = Case(name, models, steps(rng, models, [order, order]), (cap,))
        run = make(ranks, [case], 2, "BucketedDDP")
        buckets = fill(sizes, cap)
        expect_buckets(run, case, 0, buckets, sizes, "float32")
        expect_sent_in_backward(run, case, buckets, sizes)


@check("bucketed", "nothing is waited for in backward", weight=1)
def test_bucketed_waiting(ranks, rng):
    models = [terms(rng, SIZES) for _ in range(2)]
    case = Case("one step", models, steps(rng, models), CAP["BucketedDDP"])
    expect_no_waiting(make(ranks, [case], 2, "BucketedDDP"), case)


@check("bucketed", "micro-batches in no_sync are accumulated, and averaged once", weight=2)
def test_bucketed_no_sync(ranks, rng):
    expect_accumulation(ranks, rng, "BucketedDDP")


@check("bucketed", "unused parameters, on one rank or on all", weight=3)
def test_bucketed_unused(ranks, rng):
    expect_unused(ranks, rng, "BucketedDDP")


@check("bucketed", "the buckets are the same on every rank, whatever is ready first", weight=2)
def test_bucketed_any_order(ranks, rng):
    expect_any_order(ranks, rng, "BucketedDDP")


@check("bucketed", "a second backward, and gradients that start from zeros", weight=2)
def test_bucketed_two_backwards(ranks, rng):
    expect_two_backwards(ranks, rng, "BucketedDDP")


@check("bucketed", "checkpointed layers that share a weight", weight=1)
def test_bucketed_checkpointing(ranks, rng):
    expect_checkpointing(ranks, rng, "BucketedDDP")


@check("bucketed", "a group of some of the ranks; parameters that are not contiguous", weight=2)
def test_bucketed_subgroup(ranks, rng):
    expect_group_wrapped(ranks, rng, "BucketedDDP")
    expect_strided_wrapped(ranks, rng, "BucketedDDP")


# ----------------------------------------------------------------------------------------------------------- train_ddp

B, T, VOCAB = 12, 8, 32


@dataclass
class Training:
    """A run of `train_ddp`: what every rank passes, but for where its checkpoint is.

    Args:
        config: fields of `TrainConfig`.
        resume: what is in the checkpoint to go on from.
        single: run module 00's `train` in place of `train_ddp`.
    """

    config: dict
    resume: Tensor | None = None
    single: bool = False


def train(context, model: nn.Module, tokens: np.ndarray, run: Training, members: list[int] | None) -> dict | None:
    """On a rank: one training run. Tells the losses, the batches that the model saw, and the checkpoint's bytes."""
    group = context.group(members) if members else None
    if model is None:
        return None
    student = context.student  # from here on the student's other modules can be imported
    baseline = importlib.import_module("baseline")
    folder = Path(tempfile.mkdtemp(prefix="train-"))
    path = folder / "checkpoint.pt"
    source = None
    if run.resume is not None:
        source = folder / "source.pt"
        source.write_bytes(run.resume.numpy().tobytes())
    batches = []

    def watch(module: nn.Module, arguments: tuple) -> None:
        batches.append(arguments[0].detach().clone())

    model.register_forward_pre_hook(watch)
    config = baseline.TrainConfig(**run.config, checkpoint_path=path)
    if run.single:
        losses = baseline.train(model, tokens, config, resume=source)
    else:
        losses = student.train_ddp(model, tokens, config, resume=source, **({"group": group} if members else {}))
    saved = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) if path.exists() else None
    return {"losses": losses, "batches": batches, "saved": saved, "weights": list(model.parameters())}


def run_training(
    ranks: Callable, models: list[nn.Module], tokens: np.ndarray, run: Training, members: list[int] | None = None
) -> Run:
    own = models
    if members:
        own = [models[members.index(r)] if r in members else None for r in range(max(members) + 1)]
    try:
        return ranks(train, len(own), PerRank(own), tokens, run, members)
    except RunFailed as failure:
        frames = [f for error in failure.run.errors for f in error.get("frames", [])[-1:]]
        if failure.status == "not_implemented" and any(f[0] != MODULE.files[0] for f in frames):
            name, number, function, _ = next(f for f in frames if f[0] != MODULE.files[0])
            fail(expected="your module 00, which train_ddp builds on", found=f"{function} is not implemented yet",
                 line=f"{name}:{number}")  # fmt: skip
        raise


def small_gpt(rng: torch.Generator) -> nn.Module:
    torch.manual_seed(int(torch.randint(0, 10**6, (), generator=rng)))
    return gpt.tiny(layers=1, width=16, vocab_size=VOCAB, context_length=T)


def settings(rng: torch.Generator, steps: int) -> dict:
    seed = int(torch.randint(0, 1000, (), generator=rng))
    return {
        "steps": steps, "batch_size": B, "context_length": T, "max_lr": 0.01, "min_lr": 0.001, "warmup_steps": 2,
        "cycle_steps": 3, "seed": seed, "checkpoint_interval": 2,
    }  # fmt: skip


def reference_run(model: nn.Module, tokens: np.ndarray, config: dict) -> tuple[list[float], list[Tensor]]:
    """Module 00's run on one device, as its docstring specifies it: losses and global batches."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses, batches = [], []
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        for step in range(config["steps"]):
            starts = torch.randint(0, len(tokens) - T, (B,)).tolist()
            windows = torch.tensor(np.stack([tokens[s : s + T + 1] for s in starts]).astype(np.int64))
            loss = model.loss(windows[:, :-1], windows[:, 1:])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():  # AdamW, by hand: torch.optim takes seconds to import here
                for p, g, m, v in zip(parameters, gradients, means, squares, strict=True):
                    m.lerp_(g, 1 - 0.9)
                    v.lerp_(g * g, 1 - 0.999)
                    mean, square = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                    p -= _rate(step, config) * (0.1 * p + mean / (square.sqrt() + 1e-8))
            losses.append(loss.item())
            batches.append(windows[:, :-1])
    return losses, batches


def _rate(step: int, config: dict) -> float:
    low, high, warmup = config["min_lr"], config["max_lr"], config["warmup_steps"]
    if step < warmup:
        return high * step / warmup
    t = (step - warmup) % config["cycle_steps"]
    return low + (high - low) * (1 + float(np.cos(np.pi * t / config["cycle_steps"]))) / 2


def expect_losses(ranks: Callable, run: Run, wanted: list[float], places: list[int], case: str) -> None:
    """These losses on every rank."""
    everybody = [run.values[rank]["losses"] for rank in places]
    for rank, found in zip(places, everybody, strict=True):
        wrong = numbers_agree(found, tuple(wanted), rtol=1e-7)
        if not wrong:
            continue
        step = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if abs(a - b) > 1e-7 * b), 0)
        perhaps = "the gradients are not averaged, or the learning rate is not that of the step"
        if len(found) != len(wanted):
            perhaps = (
                "one for each step that is left: is there a checkpoint after the last step, and is it told from where?"
            )
        elif step == 0 and any(other != found for other in everybody):
            perhaps = "each rank tells the loss of its own rows; the mean over the ranks is asked for"
        elif step == 0:
            perhaps = "do all ranks start from the first rank's weights, or the checkpoint's, and draw the same batch?"
        fail(
            case=case,
            expected=f"losses on rank {rank}: {wrong[0]}",
            found=wrong[1],
            line=ranks.definition("train_ddp"),
            perhaps=perhaps,
        )


def random_tokens(rng: torch.Generator) -> np.ndarray:
    return torch.randint(0, VOCAB, (500,), generator=rng).numpy().astype(np.uint16)


@check("train_ddp", "the losses are those of one device on the global batch", weight=4)
def test_train_ddp_losses(ranks, rng):
    tokens, config, first = random_tokens(rng), settings(rng, 5), small_gpt(rng)
    wanted, _ = reference_run(first, tokens, config)
    for p in (2, 4, 1):
        models = [first] + [small_gpt(rng) for _ in range(p - 1)]
        run = run_training(ranks, models, tokens, Training(config))
        expect_losses(ranks, run, wanted, list(range(p)), f"{p} ranks, 5 steps")


@check("train_ddp", "each rank computes on its own rows of the global batch", weight=2)
def test_train_ddp_rows(ranks, rng):
    tokens, config, p = random_tokens(rng), settings(rng, 2), 3
    models = [small_gpt(rng) for _ in range(p)]
    _, batches = reference_run(models[0], tokens, config)
    run = run_training(ranks, models, tokens, Training(config))
    for rank in range(p):
        seen = run.values[rank]["batches"]
        for step, whole in enumerate(batches):
            rows = whole[rank * B // p : (rank + 1) * B // p]
            got = seen[step] if step < len(seen) else None
            wrong = difference(got, Expect(rows, torch.int64, 0))
            if wrong:
                perhaps = None
                if isinstance(got, Tensor) and list(got.shape) == list(whole.shape):
                    perhaps = "every rank computes on the whole batch: nothing is gained by having more ranks"
                elif isinstance(got, Tensor) and got.shape == rows.shape:
                    perhaps = (
                        "every rank draws the same global batch, from the same random numbers, and takes its rows of it"
                    )
                fail(
                    case=f"step {step} on {p} ranks, a global batch of {B}",
                    expected=f"rank {rank} computes on rows {rank * B // p} to {(rank + 1) * B // p - 1}: {wrong[0]}",
                    found=wrong[1],
                    line=ranks.definition("train_ddp"),
                    perhaps=perhaps,
                )


@check("train_ddp", "one rank saves, and the run goes on exactly on another number of ranks", weight=3)
def test_train_ddp_resume(ranks, rng):
    tokens, whole = random_tokens(rng), settings(rng, 6)
    models = [small_gpt(rng) for _ in range(2)]
    wanted, _ = reference_run(models[0], tokens, whole)
    first = run_training(ranks, models, tokens, Training(whole | {"steps": 3, "checkpoint_interval": 2}))
    saved = [v["saved"] for v in first.values]
    where = ranks.definition("train_ddp")
    if saved[0] is None:
        fail(case="3 steps on 2 ranks", expected="a checkpoint at checkpoint_path", found="none on rank 0", line=where)
    if saved[1] is not None:
        fail(
            case="3 steps on 2 ranks",
            expected="rank 0 alone saves",
            found="rank 1 saves, too",
            line=where,
            perhaps="the ranks have one disk: two that write to one path spoil the file",
        )
    for p in (3, 1):
        run = run_training(ranks, [small_gpt(rng) for _ in range(p)], tokens, Training(whole, saved[0]))
        expect_losses(ranks, run, wanted[3:], list(range(p)), f"saved by 2 ranks after 3 of 6 steps, resumed on {p}")
    alone = run_training(ranks, [small_gpt(rng)], tokens, Training(whole, saved[0], single=True))
    expect_losses(ranks, alone, wanted[3:], [0], "saved by 2 ranks after 3 of 6 steps, resumed by module 00's train")


@check("train_ddp", "in a group, its first rank is the one that counts", weight=1)
def test_train_ddp_subgroup(ranks, rng):
    tokens, config = random_tokens(rng), settings(rng, 3)
    models = [small_gpt(rng) for _ in range(2)]
    wanted, _ = reference_run(models[0], tokens, config)
    run = run_training(ranks, models, tokens, Training(config), members=[1, 2])
    expect_losses(ranks, run, wanted, [1, 2], "a group of ranks [1, 2]")
    if run.values[1]["saved"] is None or run.values[2]["saved"] is not None:
        fail(
            case="a group of ranks [1, 2]",
            expected="rank 1, the group's first, saves the checkpoint",
            found=f"saved by {[r for r in (1, 2) if run.values[r]['saved'] is not None] or 'nobody'}",
            line=ranks.definition("train_ddp"),
        )
