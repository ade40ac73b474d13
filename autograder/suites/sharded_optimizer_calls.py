"""Module 03's optimizers, played and judged: one program for the student's optimizer on ranks and for the plain one on
averaged gradients, and what is said where the two differ."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from autograder.lab import memory
from autograder.lab.ranks import PerRank, Run
from autograder.suites.kit import Expect, difference, expect_nothing_left, fail

# ------------------------------------------------------------------------------------------------------------ cases


@dataclass
class Case:
    """An optimizer on every rank of a group, and what happens to it there.

    A program is a list of steps. Gradients are given for each rank: item r is a list with one gradient, or None, for
    each parameter.

        ("step", gradients)              put them into `.grad`, then step()
        ("closure", gradients, losses)   step(closure): the closure puts them there and returns the rank's loss
        ("set", group, options)          change options in param_groups
        ("schedule", name, options)      make a scheduler of torch.optim.lr_scheduler
        ("advance",)                     its step()
        ("add", positions, options)      add_param_group
        ("zero",)                        zero_grad()
        ("save",)                        hand state_dict() back
        ("load", state)                  load_state_dict
        ("again",)                       make another optimizer, and have it load what the last "save" gave on this rank
        ("plain",)                       go on with the plain optimizer, loaded with what the last "save" gave
        ("look",)                        hand the parameters back

    Args:
        name: shown in messages.
        tensors: initial values of the parameters.
        program: see above.
        optimizer: name of a class in torch.optim.
        options: its keyword arguments.
        groups: for each group the positions of its parameters and its options; one group of all by default.
        given: how the parameters are passed: "list", "generator", "dicts", "generators in dicts" or "tensors in dicts".
        frozen: positions of parameters that require no gradient.
        perhaps: the likely reason where a parameter is wrong.
    """

    name: str
    tensors: list[Tensor]
    program: list[tuple]
    optimizer: str = "AdamW"
    options: dict = field(default_factory=lambda: {"lr": 0.1})
    groups: list[tuple[list[int], dict]] | None = None
    given: str = "list"
    frozen: frozenset[int] = frozenset()
    perhaps: str | None = None

    def of(self, rank: int) -> "Case":
        """What one rank of the group gets."""
        return self._with(lambda step: (step[0], *(part[rank] for part in step[1:])))

    def averaged(self, zeros: bool) -> "Case":
        """What one device would do: the averages of the gradients, in float64.

        Args:
            zeros: whether a gradient that no rank has counts as zeros.
        """
        case = self._with(lambda step: (step[0], self._averages(step[1], zeros), *(part[0] for part in step[2:])))
        return replace(case, tensors=[t.double() for t in self.tensors])

    def _averages(self, gradients: list[list[Tensor | None]], zeros: bool) -> list[Tensor | None]:
        averages = []
        for i, of_parameter in enumerate(zip(*gradients, strict=True)):
            some = [g.double() for g in of_parameter if g is not None]
            none = torch.zeros_like(self.tensors[i], dtype=torch.float64) if zeros and i not in self.frozen else None
            averages.append(sum(some) / len(gradients) if some else none)
        return averages

    def _with(self, change: Callable[[tuple], tuple]) -> "Case":
        """With every step that has gradients changed."""
        return replace(self, program=[change(s) if s[0] in ("step", "closure") else s for s in self.program])


def values(
    rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, layout: str = ""
) -> Tensor:
    """Numbers of either sign between 0.5 and 1.5 in size; "transposed" or "column": not contiguous."""
    if layout == "transposed":
        return values(rng, shape[::-1], dtype).t()
    if layout == "column":
        return values(rng, (*shape, 2), dtype)[..., 0]
    signs = torch.randint(0, 2, shape, generator=rng) * 2 - 1
    return (signs * (0.5 + torch.rand(shape, generator=rng, dtype=torch.float64))).to(dtype)


def gradients(rng: torch.Generator, tensors: list[Tensor], p: int, absent: dict[int, list[int]] | None = None) -> list:
    """For each of p ranks a gradient for each parameter, of the same signs on all ranks, so that none is averaged away.

    Args:
        absent: rank -> positions of the parameters for which it has none.
    """
    signs = [values(rng, tuple(t.shape)).sign() for t in tensors]
    return [
        [
            None if i in (absent or {}).get(r, []) else (sign * values(rng, tuple(t.shape)).abs()).to(t.dtype)
            for i, (t, sign) in enumerate(zip(tensors, signs, strict=True))
        ]
        for r in range(p)
    ]


def steps(rng: torch.Generator, tensors: list[Tensor], p: int, count: int = 3, **absent: dict) -> list[tuple]:
    """Some steps with gradients on all ranks, and a look."""
    return [*[("step", gradients(rng, tensors, p, **absent)) for _ in range(count)], ("look",)]


# --------------------------------------------------------------------------------------------------------- on a rank


def play(context, wrapper: str | None, cases: list | None, members: list[int] | None) -> list | None:
    """On a rank: go through the programs. Without a `wrapper` with the plain optimizer, and no student's code."""
    group = context.group(members) if members else None
    if cases is None:
        return None
    looks = []
    for case in cases:
        context.case(case["name"])
        looks.append(play_case(context, wrapper, group, case))
    return looks


def play_case(context, wrapper: str | None, group: object, case: dict) -> list:
    """The looks, saved states and what steps returned, in the order of the program."""
    parameters = [nn.Parameter(t, requires_grad=i not in case["frozen"]) for i, t in enumerate(case["tensors"])]
    plain = getattr(torch.optim, case["optimizer"])

    def make(wrapper: str | None) -> torch.optim.Optimizer:
        given = arrange(parameters, case["groups"], case["given"])
        if wrapper is None:
            return plain(given, **case["options"])
        return getattr(context.student, wrapper)(given, plain, group=group, **case["options"])

    def put(gradients: list[Tensor | None]) -> None:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = None if gradient is None else gradient.clone(memory_format=torch.preserve_format)

    optimizer, scheduler, saved, found = make(wrapper), None, None, []
    for kind, *rest in case["program"]:
        if kind == "step":
            put(rest[0])
            returned = optimizer.step()
            found += [{"returned": returned}] if returned is not None else []
        elif kind == "closure":
            calls = []

            def closure(optimizer: object = optimizer, rest: list = rest, calls: list = calls) -> Tensor:
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                put(rest[0])
                return rest[1]

            returned = optimizer.step(closure)
            found.append({"closure": [calls, returned]})
        elif kind == "set":
            optimizer.param_groups[rest[0]].update(rest[1])
        elif kind == "schedule":
            scheduler = getattr(torch.optim.lr_scheduler, rest[0])(optimizer, **rest[1])
        elif kind == "advance":
            scheduler.step()
        elif kind == "add":
            optimizer.add_param_group({"params": [parameters[i] for i in rest[0]], **rest[1]})
        elif kind == "zero":
            optimizer.zero_grad()
            found.append({"left": [None if p.grad is None else float(p.grad.abs().sum()) for p in parameters]})
        elif kind == "save":
            saved = optimizer.state_dict()
            found.append({"saved": packed(saved)})
        elif kind == "load":
            optimizer.load_state_dict(rest[0])
        elif kind in ("again", "plain"):
            optimizer = make(wrapper if kind == "again" else None)
            optimizer.load_state_dict(saved)
        elif kind == "look":
            options = [
                {key: v for key, v in g.items() if type(v) in (int, float, bool, tuple)} for g in optimizer.param_groups
            ]
            sizes = [len(g["params"]) for g in optimizer.param_groups]
            found.append({"parameters": [p.detach().clone() for p in parameters], "options": options, "sizes": sizes})
    return found


def arrange(parameters: list[Tensor], groups: list | None, given: str) -> object:
    """The parameters in the form in which an optimizer gets them."""
    if groups is None:
        return iter(parameters) if given == "generator" else list(parameters)
    dicts = [{"params": [parameters[i] for i in positions], **options} for positions, options in groups]
    for each in dicts:
        if given == "generators in dicts":
            each["params"] = iter(each["params"])
        elif given == "tensors in dicts" and len(each["params"]) == 1:
            each["params"] = each["params"][0]
    return iter(dicts) if given == "generators in dicts" else dicts


def packed(state: object) -> dict | str:
    """A state dict in a form that survives the way to the driver: numbers as keys do not."""
    try:
        entries = [[int(number), dict(each)] for number, each in state["state"].items()]
        return {"state": entries, "param_groups": [dict(g) for g in state["param_groups"]]}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def unpacked(saved: dict) -> dict:
    """The state dict again, in the driver."""
    groups = [
        {key: tuple(v) if isinstance(v, list) and key != "params" else v for key, v in group.items()}
        for group in saved["param_groups"]
    ]
    return {"state": dict(copy.deepcopy(saved["state"])), "param_groups": groups}


def hold(context, wrapper: str, tensors: list, rounds: list, options: dict, state: dict | None) -> dict:
    """On a rank: what it holds before it has an optimizer, with one, after steps, and without the gradients."""
    context.case("what a rank holds")
    parameters = [nn.Parameter(t) for t in tensors]
    held = {"before": memory.live_bytes()}
    optimizer = getattr(context.student, wrapper)(parameters, torch.optim.Adam, **options)
    held["made"] = memory.live_bytes()
    if state is not None:
        optimizer.load_state_dict(state)
    for gradients in rounds:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    held["stepped"] = memory.live_bytes()
    held["gradients"] = memory.storage_bytes(p.grad for p in parameters if p.grad is not None)
    for p in parameters:
        p.grad = None
    held["kept"] = memory.live_bytes()
    held["state"] = memory.optimizer_state_bytes()
    return held


# ------------------------------------------------------------------------------------------------------------- judging


def sent(case: Case) -> dict:
    """A case as it travels to a rank."""
    return {name: getattr(case, name) for name in
            ("name", "tensors", "frozen", "optimizer", "options", "groups", "given", "program")}  # fmt: skip


def reference(ranks: Callable, cases: list[Case]) -> list[list[dict]]:
    """What the plain optimizer gives, on a rank that never loads the student's file."""
    return ranks(play, 1, None, [sent(c) for c in cases], None).values[0]


def make(
    ranks: Callable,
    cases: list[Case],
    p: int,
    wrapper: str = "ShardedOptimizer",
    members: list[int] | None = None,
    wanted: list[Case] | None = None,
) -> Run:
    """Play the cases on p ranks (a group of them, if there are `members`), compare all looks, and hand back the run.

    Args:
        wanted: what one device would do; by default the same programs with averaged gradients.
    """
    places = members or list(range(p))
    own: list = [None] * p
    for i, rank in enumerate(places):
        own[rank] = [sent(c.of(i)) for c in cases]
    run = ranks(play, p, wrapper, PerRank(own), members)
    wanted = wanted or [c.averaged(zeros=wrapper == "ZeroOptimizer") for c in cases]
    references = reference(ranks, wanted)
    for number, (case, single) in enumerate(zip(cases, references, strict=True)):
        for i, rank in enumerate(places):
            verdict = Verdict(ranks, run, wrapper, case, number, rank, i, len(places))
            verdict.compare(single, run.values[places[0]][number])
    expect_nothing_left(run)
    return run


class Verdict:
    """One rank's part of one case, against what it must be.

    Args:
        ranks: the fixture.
        run: on the student's ranks.
        wrapper: the class.
        case: with its `number`.
        rank: global, and `i` in the group of `p`.
    """

    def __init__(
        self, ranks: Callable, run: Run, wrapper: str, case: Case, number: int, rank: int, i: int, p: int
    ) -> None:
        self.ranks, self.run, self.wrapper, self.case = ranks, run, wrapper, case
        self.number, self.rank, self.i, self.p = number, rank, i, p
        self.line = ranks.definition(wrapper)

    def compare(self, single: list[dict], first: list[dict]) -> None:
        """All that the rank handed back: with what one device gives, and with the group's first rank."""
        found = self.run.values[self.rank][self.number]
        for k, wanted in enumerate(single):
            kind = next(iter(wanted))
            got = found[k] if k < len(found) else {}
            if kind not in got:
                self.fail(expected="step() without a closure returns None", found="something else")
            if kind == "parameters":
                self.compare_parameters(k, wanted, got, first[k])
            elif kind == "closure":
                self.compare_closure(got["closure"])
            elif kind == "left" and any(got["left"]):
                self.fail(
                    expected=f"zero_grad clears the gradients of all parameters (rank {self.rank})",
                    found=f"those of parameters {[i for i, size in enumerate(got['left']) if size]} are left",
                    perhaps="the inner optimizer knows only the parameters that this rank owns; the others' gradients "
                    "would be added to for ever",
                )

    def compare_parameters(self, k: int, wanted: dict, got: dict, first: dict) -> None:
        for i, (tensor, value) in enumerate(zip(self.case.tensors, wanted["parameters"], strict=True)):
            size = float(value.abs().max()) + 1 if value.numel() else 1.0
            mine = got["parameters"][i]
            wrong = difference(mine, Expect(value, tensor.dtype, 64 if tensor.dtype.itemsize > 2 else 4, size))
            if wrong:
                self.fail(
                    expected=f"parameter {i} on rank {self.rank}, as the plain optimizer has it: {wrong[0]}",
                    found=wrong[1],
                    perhaps=self.misconception(k, i, mine) or self.case.perhaps,
                )
            if not torch.equal(mine, first["parameters"][i]):
                self.fail(
                    expected=f"the same parameter {i} on all ranks, bit for bit",
                    found=f"rank {self.rank} has another one, by rounding",
                    perhaps="the owner's parameter is what all ranks have to take over; who computes it for himself "
                    "may round in another way",
                )
        for group, (options, mine) in enumerate(zip(wanted["options"], got["options"], strict=False)):
            for key, value in options.items():
                have = tuple(mine[key]) if isinstance(mine.get(key), list) else mine.get(key)
                if have != (tuple(value) if isinstance(value, list) else value):
                    self.fail(
                        expected=f"param_groups[{group}][{key!r}] is {value}, as in the plain optimizer",
                        found=f"{have}",
                        perhaps="param_groups has all options, those that the inner optimizer fills in too: pass its "
                        "`defaults` to Optimizer.__init__",
                    )
        if wanted["sizes"] != got["sizes"]:
            self.fail(
                expected=f"param_groups with {wanted['sizes']} parameters",
                found=f"{got['sizes']}",
                perhaps="a generator can be gone through only once: was it used up before Optimizer got it?"
                if "generator" in self.case.given
                else "param_groups of the wrapper has all parameters, whoever owns them",
            )

    def compare_closure(self, got: list) -> None:
        calls, returned = got
        loss = next(step[2] for step in self.case.program if step[0] == "closure")[self.i]
        if len(calls) != 1:
            self.fail(
                expected=f"the closure is called once on every rank (rank {self.rank})",
                found=f"{len(calls)} calls",
                perhaps="a rank that owns nothing computes a part of the gradient all the same" if not calls else None,
            )
        if not calls[0]:
            self.fail(
                expected="the closure runs with gradients enabled",
                found="without: its backward fails",
                perhaps="step runs in no_grad; open torch.enable_grad() around the closure",
            )
        wrong = difference(returned, Expect(loss, loss.dtype, 0))
        if wrong:
            self.fail(
                expected=f"step returns the closure's loss (rank {self.rank}): {wrong[0]}",
                found=wrong[1],
                perhaps="step ends without returning the loss, as it may well on a rank that owns nothing"
                if returned is None
                else None,
            )

    def misconception(self, k: int, i: int, found: object) -> str | None:
        """What would have given this parameter: other readings of the program, played by the plain optimizer."""
        suspects = list(self.suspects())
        if not isinstance(found, Tensor) or not suspects:
            return None
        played = reference(self.ranks, [case for _, case in suspects])
        for (text, _), looks in zip(suspects, played, strict=True):
            value = looks[k]["parameters"][i]
            if found.shape == value.shape and torch.allclose(found.double(), value, rtol=1e-5, atol=1e-7):
                return text
        return None

    def suspects(self) -> Iterator[tuple[str, Case]]:
        """Wrong readings of the case, each with what is thought in it."""
        case, zeros = self.case, self.wrapper == "ZeroOptimizer"
        right = case.averaged(zeros)
        kinds = {step[0] for step in case.program}
        if kinds & {"save", "load", "again", "plain"}:
            return

        def scaled(case: Case, factor: float) -> Case:
            return case._with(lambda s: (s[0], [None if g is None else g.double() * factor for g in s[1]], *s[2:]))

        if "closure" not in kinds:
            yield (
                "nothing has updated this parameter here: has its owner's new value been sent to all, in place?",
                replace(right, program=[s for s in right.program if s[0] != "step"]),
            )
        if self.p > 1:
            yield f"the gradients are added up over {self.p} ranks; their average is asked for", scaled(right, self.p)
            own = replace(case.of(self.i), tensors=right.tensors)
            yield "this rank's own gradients, not the average", scaled(own, 1)
            yield "divided twice by the number of ranks", scaled(right, 1 / self.p)
        if self.run.world_size != self.p:
            yield (
                f"divided by the {self.run.world_size} ranks of the default group; this group has {self.p}",
                scaled(right, self.p / self.run.world_size),
            )
        if kinds & {"set", "advance"}:
            yield (
                "what is set in the wrapper's param_groups, by a scheduler for instance, never reaches the inner "
                "optimizer, which does the work: they have different dicts",
                replace(right, program=[s for s in right.program if s[0] not in ("set", "advance")]),
            )
        if case.groups and any(options for _, options in case.groups):
            yield (
                "the groups' own options are lost on the way to the inner optimizer",
                replace(right, groups=[(positions, {}) for positions, _ in case.groups]),
            )
        if not zeros:
            yield (
                "a parameter that no rank has a gradient for is given zeros, and weight decay or momentum moves it",
                case.averaged(zeros=True),
            )

    def fail(self, *, expected: str, found: str, perhaps: str | None = None) -> None:
        events = [e for e in self.run.in_case(self.number) if e.rank == self.rank]
        line = events[-1] if events else self.line
        fail(case=self.case.name, expected=expected, found=found, line=line, perhaps=perhaps)
