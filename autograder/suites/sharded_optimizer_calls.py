"""Module 03's optimizers, played: one program for the student's optimizer on ranks, and for the plain one on averaged
gradients. What runs on ranks is here."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autograder.lab import memory
from autograder.lab.live import LiveTensors

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
        ("unfreeze", positions)          have parameters require a gradient from now on
        ("zero",)                        zero_grad()
        ("save",)                        hand state_dict() back
        ("load", state)                  load_state_dict
        ("refused", state)               the same, and which error that is
        ("again",)                       make another optimizer, and have it load what the last "save" gave on this rank
        ("back",)                        have the same optimizer load it
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
    own = copy.deepcopy(case["tensors"])  # other cases may start from the same ones; unlike clone it keeps the strides
    parameters = [nn.Parameter(t, requires_grad=i not in case["frozen"]) for i, t in enumerate(own)]
    plain = getattr(torch.optim, case["optimizer"])

    def make(wrapper: str | None) -> torch.optim.Optimizer:
        given = arrange(parameters, case["groups"], case["given"])
        if wrapper is None:
            return plain(given, **case["options"])
        return getattr(context.student, wrapper)(given, plain, group=group, **case["options"])

    def put(gradients: list[Tensor | None]) -> None:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = copy.deepcopy(gradient)

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
        elif kind == "unfreeze":
            for i in rest[0]:
                parameters[i].requires_grad_()
        elif kind == "zero":
            optimizer.zero_grad()
            found.append({"left": [None if p.grad is None else float(p.grad.abs().sum()) for p in parameters]})
        elif kind == "save":
            with context.span("state_dict"):
                saved = optimizer.state_dict()
            found.append({"saved": packed(saved)})
        elif kind in ("load", "back"):
            given = rest[0] if kind == "load" else saved
            entries = list(given["state"]) if kind == "load" else []
            optimizer.load_state_dict(given)
            if kind == "load" and list(given["state"]) != entries:
                raise RuntimeError("load_state_dict has taken entries out of the state that it was given")
        elif kind == "refused":
            try:
                optimizer.load_state_dict(rest[0])
                found.append({"refused": "no error"})
            except ValueError:
                found.append({"refused": "ValueError"})
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
        entries = [[number, dict(each)] for number, each in state["state"].items()]
        if any(type(number) is not int for number, _ in entries):
            return f"state with the keys {[number for number, _ in entries]!r}, which are not ints"
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
    given = [each for each in tree_leaves((parameters, rounds, state)) if isinstance(each, Tensor)]
    with LiveTensors(given) as live:
        held = {"before": live.nbytes()}
        optimizer = getattr(context.student, wrapper)(parameters, torch.optim.Adam, **options)
        held["made"] = live.settled()
        if state is not None:
            optimizer.load_state_dict(state)
        for gradients in rounds:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
        held["stepped"] = live.settled()
        held["gradients"] = memory.storage_bytes(p.grad for p in parameters if p.grad is not None)
        for p in parameters:
            p.grad = None
        held["kept"] = live.settled()
    held["state"] = memory.optimizer_state_bytes()
    return held


def train(context, wrapper: str | None, model: nn.Module, tokens: Tensor) -> dict:
    """On a rank: some steps of a GPT on this rank's rows; without a wrapper on all of them, by the plain optimizer."""
    context.case("a GPT with tied embeddings")
    options = {"lr": 0.01, "weight_decay": 0.1}
    if wrapper is None:
        optimizer, rows = torch.optim.AdamW(model.parameters(), **options), slice(None)
    else:
        optimizer = getattr(context.student, wrapper)(model.parameters(), torch.optim.AdamW, **options)
        size = tokens.shape[1] // context.world_size
        rows = slice(context.rank * size, (context.rank + 1) * size)
    for batch in tokens:
        optimizer.zero_grad()
        model.loss(batch[rows, :-1], batch[rows, 1:]).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def play_two(context, wrapper: str | None, first: dict, second: dict) -> list:
    """On a rank: two optimizers by turns, each on parameters of its own."""
    context.case("two optimizers by turns")
    made = []
    for case in (first, second):
        parameters = [nn.Parameter(t) for t in case["tensors"]]
        plain = getattr(torch.optim, case["optimizer"])
        if wrapper is None:
            made.append((parameters, plain(parameters, **case["options"]), case))
        else:
            made.append((parameters, getattr(context.student, wrapper)(parameters, plain, **case["options"]), case))
    for turn in range(2):
        for parameters, optimizer, case in made:
            for p, gradient in zip(parameters, case["program"][turn][1], strict=True):
                p.grad = gradient
            optimizer.step()
    kinds = [isinstance(optimizer, torch.optim.Optimizer) for _, optimizer, _ in made]
    return [kinds, *[[p.detach() for p in parameters] for parameters, _, _ in made]]


def owners(context, calls: list[tuple]) -> list:
    """On a rank: each partition twice, and whether the list is as it was."""
    seen = []
    for numels, world_size in calls:
        context.case(f"partition_parameters({numels}, {world_size})")
        mine = list(numels)
        first = context.student.partition_parameters(mine, world_size)
        second = context.student.partition_parameters(list(numels), world_size)
        seen.append([list(first), list(second), mine == numels])
    return seen


def call_ledger(context, table: list[tuple]) -> list:
    """On a rank: one number, or the name of the error, for each row."""
    results = []
    for arguments, options in table:
        context.case(f"model_state_bytes{tuple(arguments)}")
        try:
            results.append(context.student.model_state_bytes(*arguments, **options))
        except (ValueError, LookupError, ArithmeticError) as error:
            results.append(type(error).__name__)
    return results
