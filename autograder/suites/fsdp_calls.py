"""Module 04's classes, called and judged: programs that are played with the models of fsdp_models on ranks and, in
float64 on one device, here; and what is said where the two differ."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autograder.lab.findings import Finding
from autograder.lab.ledger import Event
from autograder.lab.live import LiveTensors
from autograder.lab.ranks import PerRank, Run
from autograder.suites.fsdp_models import ROOT, Chain, watched
from autograder.suites.kit import Expect, difference, expect_nothing_left, fail, one_thread, timeline

# --------------------------------------------------------------------------------------------------------- the cases


@dataclass
class Case:
    """A model on every rank, wrapped in FSDP, and what happens to it there.

    A program is a list of steps, of the same kinds on every rank:

        ("step", x, {...})      forward and backward of the mean square of its output; the rest are keyword arguments
        ("forward", x, {...})   forward only; "backward" is of all since the last one together
        ("backward",)
        ("forget",)             no backward comes for them
        ("eval", x, {...})      forward under no_grad
        ("update",)             SGD's step, and zero_grad
        ("clip", max_norm)
        ("save",)               full_state_dict
        ("load", state)         load_full_state_dict
        ("refused", state)      the same, and which error that is
        ("look",)               the shards and their gradients
        ("rest",)               bytes that are held

    Args:
        name: shown in messages.
        models: item r is the model of rank r of the group.
        programs: and its program.
        settings: of FSDP.
        perhaps: the likely reason where a value is wrong.
        lr, decay: of SGD.
        terms: sets the tolerance, see `Expect`.
        measured: whether live bytes are counted in forward and backward.
        checkpointed: whether checkpoint_units comes first.
    """

    name: str
    models: list[nn.Module]
    programs: list[list[tuple]]
    settings: dict = field(default_factory=dict)
    perhaps: str | None = None
    lr: float = 0.5
    decay: float = 0.0
    terms: int = 20_000
    measured: bool = False
    checkpointed: bool = False


def repeated(rng: torch.Generator, world_size: int, program: list[tuple], dtype: torch.dtype = torch.float64,
             width: int = 5) -> list[list[tuple]]:  # fmt: skip
    """For each rank the same program, with inputs of its own in every step that has any."""

    def own(step: tuple) -> tuple:
        if step[0] not in ("step", "forward", "eval"):
            return step
        x = torch.randn(4 if width == 5 else 1, width, generator=rng, dtype=torch.float64).to(dtype)
        return (step[0], x, step[1] if len(step) > 1 else {})

    return [[own(step) for step in program] for _ in range(world_size)]


def as_input(x: Tensor, options: dict) -> tuple[Tensor, dict]:
    """The model's input and its keyword arguments; with the option "asked" the input's own gradient is asked for."""
    own = {key: value for key, value in options.items() if key != "asked"}
    return (x.clone().requires_grad_() if "asked" in options else x), own


class Player:
    """On a rank: goes through the programs."""

    def __init__(self, context, group, name, model, settings, optimizer, measured, checkpointed) -> None:
        self.context, self.seen, self.measured = context, [], measured
        model.layers.train()
        if checkpointed:
            context.student.checkpoint_units(model, list(model.layers))
        for module in watched(model):
            module.be_watched(self.watch)
        self.shapes = {m.index: {k: p.shape for k, p in m.named_parameters(recurse=False)} for m in watched(model)}
        self.live = LiveTensors([*model.parameters(), *model.buffers()])
        with self.live if measured else contextlib.nullcontext():
            self.fsdp = context.student.FSDP(model, list(model.layers), group=group, **settings)
        lr, decay = optimizer
        self.shards = list(self.fsdp.parameters())
        self.optimizer = torch.optim.SGD(self.shards, lr=lr, weight_decay=decay) if self.shards else None
        self.losses: list[Tensor] = []

    def watch(self, kind: str, index: int, tensors: dict[str, Tensor]) -> None:
        self.context.mark(f"{kind} {index}")
        if kind == "forward":
            self.expect_gathered(index, tensors)
        held = self.live.settled() if self.measured else 0
        kept = {} if self.measured or kind == "backward" else {k: t.detach().clone() for k, t in tensors.items()}
        self.now["seen"].append([kind, index, kept, held])

    def expect_gathered(self, index: int, tensors: dict[str, Tensor]) -> None:
        """Stop here, with a sentence: to compute with memory that was freed would end the process."""
        for name, shape in self.shapes[index].items():
            p = tensors[name]
            if p.shape != shape or p.untyped_storage().nbytes() < p.nbytes:
                raise RuntimeError(f"{name_of(index, name)} is not gathered when the forward of its unit starts")

    def go_through(self, program: list[tuple]) -> list[dict]:
        with self.live if self.measured else contextlib.nullcontext():
            return [self.do(*step) for step in program]

    def do(self, kind: str, *rest: object) -> dict:
        self.now = {"seen": []}
        with self.context.span(kind):
            getattr(self, kind)(*rest)
        return self.now

    def step(self, x: Tensor, options: dict) -> None:
        self.forward(x, options)
        self.backward()
        if "input" in self.now:
            self.now["input"] = self.now["input"].grad

    def forward(self, x: Tensor, options: dict) -> None:
        x, options = as_input(x, options)
        if x.requires_grad:
            self.now["input"] = x
        y = self.fsdp(x, **options)["y"]
        self.now["y"] = y.detach().clone()
        self.losses.append(y.float().square().mean() if y.dtype == torch.bfloat16 else y.square().mean())

    def backward(self) -> None:
        losses, self.losses = self.losses, []
        sum(losses).backward()

    def forget(self) -> None:
        self.losses = []

    def eval(self, x: Tensor, options: dict) -> None:
        with torch.no_grad():
            self.forward(x, options)
        self.losses.pop()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        self.now["norm"] = self.fsdp.clip_grad_norm_(max_norm)

    def save(self) -> None:
        self.now["state"] = self.fsdp.full_state_dict()

    def load(self, state: dict) -> None:
        given = {name: t.clone() for name, t in state.items()}
        self.fsdp.load_full_state_dict(given)
        for t in given.values():
            t.zero_()  # it is the caller's, who goes on with it

    def refused(self, state: dict) -> None:
        try:
            self.fsdp.load_full_state_dict(state)
            self.now["refused"] = "no error"
        except ValueError:
            self.now["refused"] = "ValueError"
        except LookupError as error:
            self.now["refused"] = f"a {type(error).__name__}"

    def look(self) -> None:
        self.now["names"] = [name for name, _ in self.fsdp.named_parameters()]
        self.now["shards"] = [
            [p.detach().clone(), None if p.grad is None else p.grad.clone()] for p in self.fsdp.parameters()
        ]

    def rest(self) -> None:
        self.now["held"] = self.live.settled()


def play_cases(context, cases: list[tuple] | None, members: list[int] | None) -> list | None:
    """On a rank: wrap each case's model and go through its program."""
    group = context.group(members) if members else None
    if cases is None:
        return None
    results = []
    for name, model, program, *settings in cases:
        context.case(name)
        player = Player(context, group, name, model, *settings)
        results.append(player.go_through(program) if player.shards else None)
    return results


def shard_all(context, cases: list[tuple[str, list[Tensor], list[int]]], members: list[int] | None) -> list | None:
    """On a rank: shard the tensors of each case (those at these places), then gather and free them, twice."""
    group = context.group(members) if members else None
    if cases is None:
        return None
    results = []
    for name, tensors, places in cases:
        context.case(name)
        params = [nn.Parameter(t.clone(memory_format=torch.preserve_format)) for t in tensors]
        kept: list[Tensor] = []
        held: list[int] = []
        with LiveTensors(params) as live:
            flat = context.student.FlatShard([params[i] for i in places], group)
            held.append(live.settled())
            kept.append(flat.shard.detach().clone())
            for factor in (1, 2):
                with torch.no_grad():
                    flat.shard.mul_(factor)
                with context.span("unshard"):
                    flat.unshard()
                held.append(live.settled() - sum(t.nbytes for t in kept))
                kept += [p.detach().clone() for p in params]
                storages = len({p.untyped_storage().data_ptr() for p in params if p.numel()})
                flat.reshard()
                held.append(live.settled() - sum(t.nbytes for t in kept))
        results.append([isinstance(flat.shard, nn.Parameter), kept, held, storages])
    return results


def shard_mixed(context, tensors: list[Tensor]) -> str:
    """On a rank: what becomes of parameters of several dtypes."""
    context.case("parameters of several dtypes")
    try:
        context.student.FlatShard([nn.Parameter(t) for t in tensors], None)
    except ValueError:
        return "ValueError"
    return "no error"


def foreign_unit(context, model: Chain, other: Chain) -> list[str]:
    """On a rank: what FSDP and checkpoint_units make of a unit that belongs to another model."""
    results = []
    for what in (context.student.FSDP, context.student.checkpoint_units):
        try:
            what(model, [model.layers[0], other.layers[1]])
            results.append("no error")
        except ValueError:
            results.append("a ValueError")
        except (TypeError, LookupError, AttributeError) as error:
            results.append(f"a {type(error).__name__}")
    return results


def checkpointed_bytes(context, cases: list[tuple]) -> list[list[int]]:
    """On a rank: bytes that a forward leaves behind, and the most in backward; without checkpointing and with it."""
    results: list[list[int]] = [[] for _ in cases]
    for checkpointed in (False, True):
        for number, (name, model, batch, attribute) in enumerate(cases):
            context.case(name)
            if checkpointed:
                context.student.checkpoint_units(model, list(getattr(model, attribute)))
            with LiveTensors([*model.parameters(), *model.buffers(), batch], peak=True) as live:
                before = live.nbytes()
                loss = model(batch).sum()
                left = live.nbytes() - before
                live.reset_peak()
                loss.backward()
                results[number] += [left, live.peak() - before]
            model.zero_grad()
    return results


def checkpointed_gradients(context, cases: list[tuple]) -> list:
    """On a rank: output and gradients of a plain model, without checkpointing and with it, from the same seed."""
    results = []
    for name, model, batch, options in cases:
        context.case(name)
        names = list(model.state_dict())
        same = [id(p) for p in model.parameters()]
        results.append([])
        for checkpointed in (False, True):
            if checkpointed:
                context.student.checkpoint_units(model, list(model.layers))
            torch.manual_seed(0)
            y = model(batch, **options)["y"]
            y.square().mean().backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            results[-1].append([y.detach().clone(), gradients, torch.rand(3)])
        kept = names == list(model.state_dict()) and same == [id(p) for p in model.parameters()]
        results[-1].append(kept)
    return results


# ------------------------------------------------------------------------------------------------ what must come out


@dataclass
class Wanted:
    """What a step must show: outputs of each rank, the weights that are seen, and the weights of before."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    seen: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)
    before: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    norm: float = 0.0
    state: dict[str, Tensor] = field(default_factory=dict)


class Played:
    """A case on one device, in float64, for all ranks."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, copy.deepcopy(case.models[0]).double()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.losses: list[Tensor] = []
        self.gradients = [torch.zeros_like(p) for p in self.parameters]
        self.steps: list[Wanted] = []
        last: dict[tuple[int, str], Tensor] = {}
        with one_thread():
            for steps in zip(*case.programs, strict=True):
                now = Wanted(before=dict(last))
                self.play(now, steps)
                last |= {(i, name): t for i, tensors in now.seen for name, t in tensors.items()}
                self.steps.append(now)

    def play(self, now: Wanted, steps: Sequence[tuple]) -> None:
        kind, *rest = steps[0]
        if kind in ("step", "forward", "eval"):
            with torch.set_grad_enabled(kind != "eval"):
                for step in steps:
                    self.forward(now, step[1], step[2])
        if kind == "forget":
            self.losses = []
        if kind in ("step", "backward"):
            total = sum(self.losses) / len(steps)
            found = torch.autograd.grad(total, [*self.parameters, *now.inputs], allow_unused=True)
            found, now.inputs = found[: len(self.parameters)], [g * len(steps) for g in found[len(self.parameters) :]]
            self.gradients = [g if f is None else g + f for g, f in zip(self.gradients, found, strict=True)]
            self.losses = []
        if kind == "update":
            with torch.no_grad():
                for p, g in zip(self.parameters, self.gradients, strict=True):
                    p -= self.case.lr * (g + self.case.decay * p)
            self.gradients = [torch.zeros_like(p) for p in self.parameters]
        if kind == "clip":
            now.norm = float(torch.cat([g.flatten() for g in self.gradients]).norm())
            scale = min(1.0, rest[0] / (now.norm + 1e-6))
            self.gradients = [g * scale for g in self.gradients]
        if kind == "save":
            now.state = {name: t.clone() for name, t in self.model.state_dict().items()}
        if kind == "load":
            self.model.load_state_dict(rest[0])

    def forward(self, now: Wanted, x: Tensor, options: dict) -> None:
        first = not now.outputs
        for module in watched(self.model):
            module.be_watched(functools.partial(self.watch, now) if first else None)
        x, options = as_input(x.double(), options)
        if x.requires_grad:
            now.inputs.append(x)
        y = self.model(x, **options)["y"]
        now.outputs.append(y.detach())
        self.losses.append(y.square().mean())

    def watch(self, now: Wanted, kind: str, index: int, tensors: dict[str, Tensor]) -> None:
        if kind == "forward":
            kept = {name: t.detach().clone() for name, t in tensors.items() if name != "x" and " " not in name}
            now.seen.append((index, kept))


def on_ranks(ranks: Callable, of: str, fn: Callable, *args: object) -> Run:
    """Run a function on ranks that uses this class; of freed memory that was used, say what that most likely is."""
    try:
        return ranks(fn, *args, of=of)
    except Finding as failure:
        if "SIGSEGV" in failure.title or "storage of size 0" in failure.title:
            perhaps = (
                "a parameter was used whose memory is freed: is its unit gathered at that moment, in backward too?"
            )
            failure.facts.append(("perhaps", perhaps))
        raise


def play(ranks: Callable, cases: list[Case], world_size: int, members: list[int] | None = None) -> Run:
    """Play the cases on ranks."""
    places = members or list(range(world_size))
    own: list = [None] * world_size
    for i, rank in enumerate(places):
        own[rank] = [
            (c.name, c.models[i], c.programs[i], c.settings, (c.lr, c.decay), c.measured, c.checkpointed) for c in cases
        ]
    try:
        run = on_ranks(ranks, "FSDP", play_cases, world_size, PerRank(own), members)
    except Finding as failure:
        if failure.status in ("failed", "crashed"):
            hint = next((c.perhaps for c in cases if c.name == failure.fact("case")), None)
            perhaps = "; ".join(filter(None, [failure.fact("perhaps"), hint])).replace("?;", "?")
            failure.facts = [fact for fact in failure.facts if fact[0] != "perhaps"]
            failure.facts += [("perhaps", perhaps)] if perhaps else []
        raise
    for rank in places:
        for case, found in zip(cases, run.values[rank], strict=True):
            if found is None:
                fail(
                    case=case.name,
                    expected="parameters() of the FSDP object are the shards of all units",
                    found=f"there are none (rank {rank})",
                    line=ranks.definition("FSDP"),
                    perhaps="is any unit sharded? print which parameters each one gets",
                )
    return run


def judge(ranks: Callable, run: Run, cases: list[Case], members: list[int] | None = None) -> None:
    """Compare the weights and outputs of every forward of the cases, the first ones of this run."""
    for number, case in enumerate(cases):
        wanted = Played(case).steps
        for i, rank in enumerate(members or range(run.world_size)):
            for step, found in enumerate(run.values[rank][number]):
                compare_step(ranks, run, case, number, (i, rank), step, wanted[step], found)


def make(ranks: Callable, cases: list[Case], world_size: int, members: list[int] | None = None) -> Run:
    """Play the cases, compare what they show, and hand back the run for more."""
    run = play(ranks, cases, world_size, members)
    judge(ranks, run, cases, members)
    expect_nothing_left(run)
    return run


def name_of(index: int, name: str) -> str:
    """As `named_parameters` of the model calls it."""
    return name if index == ROOT else f"layers.{index}.{name}"


def compare_step(ranks: Callable, run: Run, case: Case, number: int, place: tuple[int, int], step: int, wanted: Wanted,
                 found: dict) -> None:  # fmt: skip
    """Weights and output of one forward on one rank, against what they must be."""
    i, rank = place
    kind = case.programs[i][step][0]
    ahead = [s[0] for s in case.programs[i][:step]]
    if kind not in ("step", "forward", "eval"):
        return
    after = f"in the {kind} that comes after {', '.join(ahead[-4:])}" if ahead else f"in the first {kind}"
    calls = [e for e in run.in_case(number) if e.rank == rank and e.is_collective]
    reductions = [e for e in calls if e.op in ("reduce_scatter", "all_reduce")]
    line = (reductions if "update" in ahead and reductions else [ranks.definition("FSDP")])[-1]
    seen = [(index, kept) for what, index, kept, _ in found["seen"] if what == "forward"]
    for (index, tensors), (_, got) in zip(wanted.seen, seen, strict=False):
        for name, value in tensors.items():
            wrong = difference(got.get(name), expect(case, value, computed_in(case, index, name)))
            if wrong:
                before = wanted.before.get((index, name))
                why = never_reduced(case, calls, index, ahead) or misconception(
                    got.get(name), value, before, len(case.models), name
                )
                fail(
                    case=case.name,
                    expected=f"{name_of(index, name)} on rank {rank} {after}: {wrong[0]}",
                    found=wrong[1],
                    line=line,
                    perhaps="; ".join(filter(None, [why, case.perhaps])),
                )
    wrong = difference(found["y"], expect(case, wanted.outputs[i], computed_in(case, ROOT, "head")))
    if wrong:
        fail(
            case=case.name,
            expected=f"output on rank {rank} {after}: {wrong[0]}",
            found=wrong[1],
            line=line,
            perhaps=case.perhaps or "the weights are right at the start of the forward: what changes them meanwhile?",
        )
    if wanted.inputs:
        wrong = difference(found["input"], expect(case, wanted.inputs[i], wanted.inputs[i].dtype))
        if wrong:
            fail(
                case=case.name,
                expected=f"the gradient of the model's input on rank {rank} {after}: {wrong[0]}",
                found=wrong[1],
                line=ranks.definition("FSDP"),
                perhaps="FSDP may be a part of a larger model: gradients go through it to its inputs",
            )


def computed_in(case: Case, index: int, name: str) -> torch.dtype:
    """The dtype in which a layer must see one of its tensors."""
    module = case.models[0] if index == ROOT else case.models[0].layers[index]
    tensor = getattr(module, name)
    return case.settings.get("param_dtype") or tensor.dtype if isinstance(tensor, nn.Parameter) else tensor.dtype


def expect(case: Case, value: Tensor, dtype: torch.dtype) -> Expect:
    """With the rounding of a few layers and steps."""
    return Expect(value, dtype, 16 if dtype == torch.bfloat16 else case.terms, float(value.abs().max()) + 0.1)


def never_reduced(case: Case, calls: list[Event], index: int, ahead: list[str]) -> str | None:
    """Said where a unit should have been reduced by now, and has not been."""
    if "update" not in ahead or not any(e.op == "reduce_scatter" for e in calls):
        return None
    module, others = case.models[0], [p for layer in case.models[0].layers for p in layer.parameters()]
    own = list(module.layers[index].parameters()) if index != ROOT else [
        p for p in module.parameters() if all(p is not other for other in others)
    ]  # fmt: skip
    if any(not p.requires_grad for p in own) or len({p.dtype for p in own}) > 1:
        return None
    numel = sum(p.numel() for p in own)
    if any(of_unit(e, "reduce_scatter", numel, len(case.models)) for e in calls):
        return None
    which = "the root's unit" if index == ROOT else f"unit {index}"
    return (
        f"no reduce_scatter of {which}, {numel} elements, was made: where a unit's inputs need no gradient, only the "
        "end of backward tells that it is done"
    )


def misconception(found: object, wanted: Tensor, before: Tensor | None, ranks: int, name: str) -> str | None:
    """What a student may have thought, from how a weight is wrong."""
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return None
    if name == "offset" and found.dtype == torch.bfloat16:
        return "buffers keep their dtype: only parameters and inputs are cast"
    got = found.double()
    if bool(got.isnan().any()):
        return "numbers that nobody has written: is the buffer filled before the computation starts?"
    if before is None:
        if name == "offset":
            return "buffers are part of the model, too: take the first rank's"
        return "is it the weight of the group's first rank, and in its place? views begin where the one before ends"
    moved, asked = got - before, wanted - before
    if bool((asked.abs() > 0).any()):
        k = float((moved * asked).sum() / asked.square().sum())
        alike = bool(torch.allclose(moved, k * asked, rtol=1e-3, atol=1e-3 * float(asked.abs().max())))
        if alike and ranks > 1 and abs(k - ranks) < 0.01:
            return f"it moved {ranks} times as far as it should: gradients are added up, the average is asked for"
        if alike and ranks > 1 and abs(k - 1 / ranks) < 0.01:
            return "it moved too little: is the gradient divided twice by the number of ranks?"
        if alike and abs(k) < 0.01:
            return "it has not moved: an old value is still gathered, or its shard is not what the optimizer updates"
        still = (moved.abs() <= 1e-9 * (1 + before.abs())) & (asked.abs() > 1e-6)
        if 0 < int(still.sum()) < still.numel():
            return f"{int(still.sum())} of its elements have not moved: those of which rank?"
    elif bool((moved.abs() > 0).any()):
        return "it should not move: it is frozen, or nothing was updated"
    return None


# ----------------------------------------------------------------------------------------------------------- events


def of_unit(e: Event, op: str, numel: int, world_size: int) -> bool:
    """Whether an event is a collective of this kind over one whole unit, padded."""
    return e.op == op and numel <= e.numel < numel + world_size


def marks(events: Iterable[Event], text: str) -> list[Event]:
    """The moments at which a layer's computation started: "forward 0", "backward 2"."""
    return [e for e in events if e.op == "span" and e.api == text]


def step_events(run: Run, rank: int, number: int, kind: str = "step", step: int = 0) -> list[Event]:
    """All that a rank did in a step of this kind of a case, the first by default, marks too, in order."""
    events = timeline(run, rank, number)
    span = [e for e in events if e.op == "span" and e.api == kind][step]
    return [e for e in events if span.order < e.order < (span.done_order or float("inf"))]


def listed(events: Iterable[Event]) -> str:
    """In words: "all_gather of 84, forward 0, ..."."""
    told = [e.api if e.op == "span" else f"{e.op} of {e.numel}" for e in events if e.op == "span" or e.is_collective]
    return ", ".join(told[:24]) + (", ..." if len(told) > 24 else "")
