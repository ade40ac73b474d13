"""Module 02's functions, called and judged.

Most checks give a model on every rank a small program (see `Case`) and play the same program in the driver, in float64
and without communication, for what the gradients must be. The models are such that a check chooses each gradient, and
the order in which backward computes them. That a gradient is sent while backward goes on is seen from the order of
events. What is asked of the three averages is in ddp_averages, of both wrappers in ddp_wrappers; the training run is in
ddp_training.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autograder.lab.ledger import Event
from autograder.lab.ranks import Run
from autograder.suites.kit import (
    Expect,
    as_is,
    difference,
    draw_int,
    expect_nothing_left,
    fail,
    hand_out,
    laid_out,
    one_thread,
    timeline,
)

# ----------------------------------------------------------------------------------------------------------- the models


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
    """Whole numbers from 1 to 99; see `laid_out` for the layouts."""
    return laid_out(torch.randint(1, 100, shape, generator=rng).to(dtype), layout)


def terms(rng: torch.Generator, sizes: list[int], dtype: torch.dtype = torch.float32) -> Terms:
    return Terms([nn.Parameter(draw(rng, (n,), dtype)) for n in sizes])


def mixed(rng: torch.Generator, last: tuple[int, ...] = ()) -> Terms:
    """Parameters of three dtypes, one in two places, one frozen, one a matrix, the last one a number."""
    shapes = [((11,), torch.float32), ((3, 5), torch.float64), ((12,), torch.bfloat16), ((4, 4), torch.float32)]
    parameters = [nn.Parameter(draw(rng, shape, dtype)) for shape, dtype in shapes]
    frozen = nn.Parameter(draw(rng, (14,)), requires_grad=False)
    return Terms([*parameters, frozen, parameters[0], nn.Parameter(draw(rng, last, torch.float64))])


def strided_terms(rng: torch.Generator) -> Terms:
    """Parameters that are not contiguous."""
    transposed = nn.Parameter(draw(rng, (3, 4), layout="transposed"))
    return Terms([transposed, nn.Parameter(draw(rng, (5,), layout="strided"))])


def inputs(rng: torch.Generator, model: Terms, order: list[int] | None = None) -> tuple:
    """Arguments of `Terms.forward`: an x for each parameter, or for these, in this order."""
    used = range(len(model.weights)) if order is None else order
    return ([(i, draw(rng, tuple(model.weights[i].shape), model.weights[i].dtype)) for i in used],)


def everything(rng: torch.Generator) -> nn.Module:
    """Parameters and buffers of every sort."""
    model = nn.Module()
    model.embedding = nn.Parameter(draw(rng, (7, 3)))
    model.short = nn.Parameter(draw(rng, (11,), torch.bfloat16))
    model.head = nn.ParameterDict({"tied": model.embedding, "own": nn.Parameter(draw(rng, (5,)))})
    model.frozen = nn.Parameter(draw(rng, (13,)), requires_grad=False)
    model.norm = nn.BatchNorm1d(4)
    model.norm.running_mean.copy_(draw(rng, (4,)))
    model.norm.num_batches_tracked.fill_(draw_int(rng, 1, 100))
    model.register_buffer("mask", draw(rng, (6,)) > 50)
    model.register_buffer("scratch", draw(rng, (10,), torch.float64), persistent=False)
    return model


def everything_strided(rng: torch.Generator) -> nn.Module:
    """Parameters and a buffer that are not contiguous."""
    model = nn.Module()
    model.transposed = nn.Parameter(draw(rng, (3, 4), layout="transposed"))
    model.column = nn.Parameter(draw(rng, (5,), layout="strided"))
    model.register_buffer("rows", draw(rng, (6,), torch.float64, layout="strided"))
    return model


# ------------------------------------------------------------------------------------------------------------ the cases


@dataclass
class Case:
    """A model on every rank, and what happens to it there.

    A program is a list of steps, of the same kinds on every rank:

        ("gradients", [tensor or None, ...])   set them by hand
        ("call", function, *arguments)         average them with one of the functions
        ("step", *inputs)                      forward and backward; without inputs, neither; a dict: by keyword
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


def called(model: nn.Module, arguments: list) -> Tensor:
    """Call a model with the arguments of a step, of which a dict holds those by keyword."""
    named = {name: value for each in arguments if isinstance(each, dict) for name, value in each.items()}
    return model(*[each for each in arguments if not isinstance(each, dict)], **named)


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
                        loss = called(ddp, rest)
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


def _average(gradients: list[Tensor | None], counts: list[int]) -> Tensor:
    some = next(g for g in gradients if g is not None)
    parts = [n * g for g, n in zip(gradients, counts, strict=True) if g is not None and n]
    return sum(parts, torch.zeros_like(some)) / sum(counts)


def _double(value: object) -> object:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(map(_double, value)) if isinstance(value, list | tuple) else value


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
                called(replica, _double(rest)).backward()
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

    if bool(parameter.any()) and is_(parameter):
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


def run_programs(
    ranks: Callable, cases: list[Case], world_size: int, wrapper: str | None = None, members: list[int] | None = None
) -> Run:
    """Run the cases on ranks, see `run_cases`."""
    own = [
        [(c.name, c.models[i], c.arguments, c.programs[i]) for c in cases]
        for i in range(len(members or range(world_size)))
    ]
    return ranks(run_cases, world_size, wrapper, hand_out(own, members, world_size), members)


def expect_gradients(
    ranks: Callable, run: Run, cases: list[Case], wrapper: str | None = None, members: list[int] | None = None
) -> None:
    """Every gradient that is looked at is what it must be, and nothing is left over."""
    for number, case in enumerate(cases):
        with one_thread():
            looks = play(case)
        for i, rank in enumerate(members or range(run.world_size)):
            for n, wanted in enumerate(looks[i]):
                compare(ranks, run, case, number, rank, wanted, run.values[rank][number][n], wrapper)
    expect_nothing_left(run)


def make(
    ranks: Callable, cases: list[Case], world_size: int, wrapper: str | None = None, members: list[int] | None = None
) -> Run:
    """Run the cases on ranks, compare every gradient that is looked at, and hand back the run for more."""
    run = run_programs(ranks, cases, world_size, wrapper, members)
    expect_gradients(ranks, run, cases, wrapper, members)
    return run


# ------------------------------------------------------------------------------------------------------------ the order


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


def sent_in_step(run: Run, rank: int, number: int, gradients: int) -> list[Event]:
    """The all_reduces of the gradients from the first step of a case on."""
    events = timeline(run, rank, number)
    begin = spans(events, "step")[0].order
    return reductions([e for e in events if e.order > begin], gradients)


def numels(model: nn.Module) -> list[int]:
    """Elements of each gradient, in the order of registration."""
    return [p.numel() for p in model.parameters() if p.requires_grad]


def carried(events: list[Event]) -> list[tuple[int, str]]:
    """The elements and the dtype of each message."""
    return [(e.numel, e.dtype) for e in events]


def listed(messages: list[tuple[int, str]]) -> str:
    """Sizes in words: "5, 7 elements of float32"."""
    if not messages:
        return "nothing"
    dtypes = dict.fromkeys(dtype for _, dtype in messages)
    text = [f"{', '.join(str(n) for n, d in messages[:40] if d == dtype)} elements of {dtype}" for dtype in dtypes]
    return "; ".join(text)


def expect_messages(run: Run, case: Case, wanted: list[tuple[int, str]], rule: str) -> None:
    """Exactly these all_reduces on each rank, as (elements, dtype), in any order, and nothing else but a small message.

    The case is the only one of the run.
    """
    for rank in range(run.world_size):
        events = [e for e in run.of(rank) if e.is_collective]
        found = reductions(events, len(numels(case.models[0])))
        other = [e for e in events if e.op not in ("all_reduce", "barrier") and e.nbytes > 64]
        extra = Counter(carried(found)) - Counter(wanted)
        if Counter(carried(found)) == Counter(wanted) and not other:
            continue
        wrong = next((e for e in found if (e.numel, e.dtype) in extra), found[-1] if found else None)
        told, perhaps = f"{len(found)}: {listed(carried(found))}", None
        if other:
            wrong, told = other[0], f"also {len(other)} {other[0].op} of {other[0].numel} elements"
        elif len(found) == 1 < len(wanted):
            perhaps = "all gradients in one message: their dtype is then the widest of them, for all"
        elif len(found) > len(wanted) and sum(e.numel for e in found) == sum(n for n, _ in wanted):
            perhaps = "the right elements in too many messages: those of one dtype go together"
        elif len(found) > len(wanted):
            perhaps = "a message more than there must be: is a parameter sent twice, or one that needs no gradient?"
        fail(
            case=case.name,
            expected=f"{rule}; rank {rank}: {len(wanted)}: {listed(wanted)}",
            found=told,
            line=wrong,
            perhaps=perhaps,
        )


# ---------------------------------------------------------------------------------------------------------- shard_batch


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


def expect_shards(ranks: Callable, batches: list[tuple[str, object, int]]) -> None:
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
                wrong = difference(got, as_is(tensor[rank * size : (rank + 1) * size]))
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


# ----------------------------------------------------------------------------------------------------- broadcast_module


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
    has = [p.requires_grad for p in parameters]
    for src in sources:
        context.case(f"src={src}" + (f", group of ranks {members}" if members else ""))
        with torch.no_grad():
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)
        context.student.broadcast_module(model, src, group)
        state = {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
        same = [id(p) for p in parameters] == [id(p) for p in model.parameters()]
        kept = all(
            (p.grad is not None and bool((p.grad == 1).all())) == had for p, had in zip(parameters, has, strict=True)
        )
        seen.append([state, same, kept, [p.requires_grad for p in model.parameters()]])
    return seen


def expect_broadcast(
    ranks: Callable,
    models: list[nn.Module],
    sources: list[int | None],
    members: list[int] | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Run:
    """Every rank of the group has the values of each source in turn, of the tensors with these names."""
    places = members or list(range(len(models)))
    world_size = max(members) + 2 if members else len(models)
    run = ranks(broadcast, world_size, hand_out(models, members, world_size), members, sources)
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
                    perhaps="an optimizer that was made before still holds the old ones; copy the values in place"
                    if not same
                    else "frozen parameters stay frozen: torch.no_grad() is enough to copy into them",
                )
            if not kept:
                fail(case=case, expected="gradients are left alone", found="a gradient changed or is gone", line=line)
            for name in filter(only, state):
                wrong = difference(found.get(name), as_is(state[name]))
                if wrong:
                    perhaps = None
                    if not state[name].is_contiguous():
                        perhaps = "this tensor is not contiguous: send a contiguous copy, and copy what arrives back"
                    elif name not in dict(source.named_parameters()):
                        perhaps = "a buffer is part of the model, too"
                    elif not state[name].requires_grad:
                        perhaps = "a frozen parameter takes part in forward, so it must be the same everywhere"
                    elif not calls and len(models) > 1:
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
