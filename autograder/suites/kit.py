"""What all suites share: describing a module, saying what a check found, comparing values and traffic.

A suite is a pytest file with a `MODULE` and functions marked with `check`. Each check gets the fixture `ranks`, which
runs a function on ranks with the student's file loaded there, and compares what comes back here, in the driver.

What runs on ranks uses nothing of this file: a function and the classes of its arguments travel with what they use in
their own file, and anything else of the suites would be imported in every rank, pytest with it.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from autograder.lab.findings import Finding
from autograder.lab.ledger import Event
from autograder.lab.ranks import OPTIMIZERS, Only, PerRank, Run

P2P_ONLY = Only(frozenset({"send", "recv"}), "build it from send, recv, isend, irecv and batch_isend_irecv")


@dataclass(frozen=True)
class Problem:
    """One problem of a module.

    Args:
        name: as in the student's file and in `-k`.
        points: of the module's 100; shared among the problem's checks by their weights.
        title: one line.
        section: heading in the module's lecture.
    """

    name: str
    points: float
    title: str
    section: str


@dataclass(frozen=True)
class Module:
    """One module of the course: what is handed in and what it is worth.

    Args:
        name: the folder's name, "01_collectives".
        title: one line.
        files: the student's files that are taken, the module's own .py first.
        problems: in the order of the worksheet; their points add up to 100.
        waiting: heading in the lecture that helps with a deadlock, where there is one.
        refuse: which operators are not allowed (see `Only`).
        refused_names: full names of classes and functions that are not allowed -> what to do instead.
        preload: names of modules that the ranks need, see `ranks.run`.
        timeout: seconds for one run on ranks.
    """

    name: str
    title: str
    files: Sequence[str]
    problems: Sequence[Problem]
    waiting: str = ""
    refuse: Callable[[str, str], str | None] | None = None
    refused_names: Mapping[str, str] = field(default_factory=dict)
    preload: Sequence[str] = OPTIMIZERS
    timeout: float = 10.0

    def problem(self, name: str) -> Problem:
        return next(p for p in self.problems if p.name == name)


def check(problem: str, title: str, weight: float = 1.0, section: str | None = None) -> Callable:
    """Mark a pytest function as a check of a problem.

    Args:
        problem: its name.
        title: what must be true, as a sentence: it heads the message when it is not.
        weight: share of the problem's points.
        section: heading in the lecture that helps, where it is not the problem's.
    """
    return pytest.mark.check(problem, title, weight, section)


class CheckFailed(Finding):
    """A check's expectation that does not hold."""


def fail(
    *,
    expected: str,
    found: str,
    case: str | None = None,
    line: Event | str | None = None,
    perhaps: str | None = None,
    status: str = "failed",
) -> None:
    """End a check: say what was expected and found, on which line of the student's, and the likely misconception."""
    if isinstance(line, Event):
        line = line.line
    facts = [
        ("case", case),
        ("expected", expected),
        ("found", found),
        ("your line", line),
        ("perhaps", perhaps),
    ]
    raise CheckFailed(status, "", [(label, text) for label, text in facts if text])


# --------------------------------------------------------------------------------------------------------- inputs


def draw_int(rng: torch.Generator, low: int, high: int) -> int:
    """A number from low to high - 1."""
    return int(torch.randint(low, high, (1,), generator=rng))


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory that is not contiguous: "strided", with a gap after each, or "transposed"."""
    if layout == "strided":
        return torch.stack([values, torch.zeros_like(values)], dim=-1)[..., 0]
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    return values


def hand_out(items: Sequence, members: list[int] | None, world_size: int) -> PerRank:
    """Item i for the i-th rank of a group, None for ranks outside; without members, item r for rank r."""
    places = members or list(range(world_size))
    return PerRank(items[places.index(r)] if r in places else None for r in range(world_size))


# --------------------------------------------------------------------------------------------------------- values


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks do: on small tensors several only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def dtype_name(dtype: torch.dtype) -> str:
    """As in events and messages: "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Expect:
    """What one rank should hand back for one case.

    Args:
        values: the tensor, computed in float64 or int64 by one process.
        dtype: the dtype asked for.
        terms: how many numbers were added up for one element: sets the tolerance.
        magnitude: largest sum of absolute values behind an element; the values' own by default.
    """

    values: torch.Tensor
    dtype: torch.dtype
    terms: int = 1
    magnitude: float | None = None

    @property
    def tolerance(self) -> float:
        """Largest rounding error that adding `terms` numbers in any order can make."""
        if not self.dtype.is_floating_point:
            return 0.0
        size = self.magnitude
        if size is None:
            size = float(self.values.abs().max()) if self.values.numel() else 0.0
        return self.terms * torch.finfo(self.dtype).eps * size


def as_is(tensor: torch.Tensor) -> Expect:
    """The values that a tensor has now, exactly."""
    return Expect(tensor.detach().clone(), tensor.dtype, terms=0)


def difference(found: object, expect: Expect) -> tuple[str, str] | None:
    """(expected, found) in words where a value is not what it should be; None where it is."""
    wanted = expect.values
    shape = list(wanted.shape)
    if not isinstance(found, torch.Tensor):
        return f"a tensor of shape {shape}", _what(found)
    if list(found.shape) != shape:
        return f"shape {shape}", f"shape {list(found.shape)}"
    if found.dtype != expect.dtype:
        return f"dtype {dtype_name(expect.dtype)}", f"dtype {dtype_name(found.dtype)}"
    exact = not expect.dtype.is_floating_point
    got = found if exact else found.double()
    ref = wanted.to(expect.dtype) if exact else wanted.double()
    wrong = (got != ref) if exact else ~((got - ref).abs() <= expect.tolerance)
    if not bool(wrong.any()):
        return None
    if wanted.numel() <= 8:
        digits = 6 if _numbers(ref) != _numbers(got) else 17
        return _numbers(ref, digits), _numbers(got, digits)
    at = tuple(int(i) for i in wrong.nonzero()[0])
    where = at[0] if len(at) == 1 else at
    digits = 9 if _number(ref[at]) != _number(got[at]) else 17
    return (
        f"{_number(ref[at], digits)} at element {where}",
        f"{_number(got[at], digits)} ({int(wrong.sum())} of {wanted.numel()} elements are wrong)",
    )


KINDS = {str: "text", int: "an int", float: "a float", bool: "a bool", list: "a tuple or list", dict: "a dict"}


def _what(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict) and "__unexpected__" in value:
        return f"an object of {value['__unexpected__']}"
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {list(value.shape)}"
    if type(value) in (int, float):
        return f"{value:.9g}"
    text = repr(value)
    kind = KINDS.get(type(value), type(value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def _number(value: torch.Tensor, digits: int = 9) -> str:
    return f"{value.item():.{digits}g}" if value.dtype.is_floating_point else str(value.item())


def _numbers(tensor: torch.Tensor, digits: int = 6) -> str:
    if tensor.ndim > 1:
        return str(tensor.tolist())
    return "[" + ", ".join(_number(v, digits) for v in tensor.flatten()) + "]"


# -------------------------------------------------------------------------------------------------------- traffic


def expect_nothing_left(run: Run) -> None:
    """Every operation was waited for, and no thread or process was left running."""
    for event in run.events:
        if event.changed:
            fail(
                expected="a tensor keeps its values until its isend has been waited for",
                found=f"rank {event.rank} changed what it was sending ({event})",
                line=event,
                perhaps="wait for the isend first, or send a copy (clone) of what changes meanwhile",
            )
        if event.early:
            fail(
                expected="a tensor that is received into is not used before its message has been waited for",
                found=f"rank {event.rank} uses it while this is under way: {event} ({event.where})",
                line=event.early,
                perhaps="call .wait() first; without it, the values are there on one day and not on another",
            )
    for event in run.unwaited():
        fail(
            expected="everything that was started is waited for",
            found=f"rank {event.rank} starts and never waits for: {event}",
            line=event,
            perhaps="the work that isend, irecv, batch_isend_irecv and async_op=True return was dropped; "
            "call .wait() on each",
        )
    if run.left:
        fail(expected="nothing left running", found="; ".join(run.left))


def messages(events: Iterable[Event], rank: int, op: str = "send") -> list[Event]:
    """The sends (or receives) of one rank that carry anything."""
    return [e for e in events if e.rank == rank and e.op == op and e.numel > 0 and not e.raised]


def timeline(run: Run, rank: int, number: int) -> list[Event]:
    """All that one rank did in one case, marks too, in order."""
    chosen, seen = [], -1
    for e in run.of(rank):
        seen += e.op == "case"
        if seen == number:
            chosen.append(e)
    return sorted(chosen, key=lambda e: e.order)


# --------------------------------------------------------------------------------------------------- plain numbers


def numbers_agree(found: object, wanted: object, rtol: float = 1e-6) -> tuple[str, str] | None:
    """(expected, found) in words where a number, a tuple of numbers or a "ValueError" is not as wanted."""
    raised = f"a {found}" if isinstance(found, str) and found.endswith("Error") else None
    if isinstance(wanted, tuple):
        if not isinstance(found, list) or len(found) != len(wanted):
            return f"a tuple of {len(wanted)} numbers", raised or _what(found)
        for f, w in zip(found, wanted, strict=True):
            if numbers_agree(f, w, rtol):
                return ", ".join(f"{x:.9g}" for x in wanted), ", ".join(_what(x) for x in found)
        return None
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if wanted == "ValueError":
        return None if found == "ValueError" else ("a ValueError", raised or _what(found))
    if isinstance(found, bool) or not isinstance(found, int | float):
        return f"the number {wanted:.9g}", raised or _what(found)
    if abs(found - wanted) <= rtol * abs(wanted):
        return None
    return f"{wanted:.9g}", f"{found:.9g}"


# ------------------------------------------------------------------------------------------- module 00's training run

SCHEDULE = ("max_lr", "min_lr", "warmup_steps", "cycle_steps", "cycle_mult")


def learning_rate(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cycle_steps: int, cycle_mult: float = 1.0
) -> float:
    """The learning rate of a step, by the formula in the docstring of `cosine_lr`."""
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    begin, length = warmup_steps, cycle_steps
    while step >= begin + length:
        begin, length = begin + length, round(cycle_mult * length)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * (step - begin) / length)) / 2


@one_thread()
def reference_run(model: nn.Module, tokens: np.ndarray, config: dict) -> dict:
    """The run on one device that the docstring of module 00's `train` specifies, made here with a copy of the model.

    AdamW is written out: torch.optim takes seconds to import.

    Returns:
        "losses", "lrs" (learning rates) and "batches" (the x of `get_batch`), each one item a step.
    """
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    generator = torch.Generator().manual_seed(config["seed"])
    context_length = config["context_length"]
    found = {"losses": [], "lrs": [], "batches": []}
    for step in range(config["steps"]):
        starts = torch.randint(0, len(tokens) - context_length, (config["batch_size"],), generator=generator)
        windows = torch.stack([torch.from_numpy(tokens[s : s + context_length + 1].astype(np.int64)) for s in starts])
        loss = model.loss(windows[:, :-1], windows[:, 1:])
        lr = learning_rate(step, **{name: config[name] for name in SCHEDULE})
        with torch.no_grad():
            for p, g, m, v in zip(parameters, torch.autograd.grad(loss, parameters), means, squares, strict=True):
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.001)
                p.mul_(1 - lr * config["weight_decay"])
                p.sub_(lr * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
        found["losses"].append(loss.item())
        found["lrs"].append(lr)
        found["batches"].append(windows[:, :-1])
    return found
