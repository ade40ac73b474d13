"""What all suites share: describing a module, saying what a check found, comparing values and traffic.

A suite is a pytest file with a `MODULE` and functions marked with `check`. Each check gets the fixture `ranks`, which
runs a function on ranks with the student's file loaded there, and compares what comes back here, in the driver.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from autograder.lab.findings import Finding
from autograder.lab.ledger import Event
from autograder.lab.ranks import OPTIMIZERS, Only, Run

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


def difference(found: object, expect: Expect) -> tuple[str, str] | None:
    """(expected, found) in words where a value is not what it should be; None where it is."""
    wanted = expect.values
    shape, dtype = list(wanted.shape), str(expect.dtype).removeprefix("torch.")
    if not isinstance(found, torch.Tensor):
        return f"a tensor of shape {shape}", _what(found)
    if list(found.shape) != shape:
        return f"shape {shape}", f"shape {list(found.shape)}"
    if found.dtype != expect.dtype:
        return f"dtype {dtype}", f"dtype {str(found.dtype).removeprefix('torch.')}"
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
    return [e for e in events if e.rank == rank and e.op == op and e.numel > 0]


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
    if isinstance(wanted, tuple):
        if not isinstance(found, list) or len(found) != len(wanted):
            return f"a tuple of {len(wanted)} numbers", _what(found)
        for f, w in zip(found, wanted, strict=True):
            if numbers_agree(f, w, rtol):
                return ", ".join(f"{x:.9g}" for x in wanted), ", ".join(_what(x) for x in found)
        return None
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if wanted == "ValueError":
        return None if found == "ValueError" else ("a ValueError", _what(found))
    if isinstance(found, bool) or not isinstance(found, int | float):
        return f"the number {wanted:.9g}", "a ValueError" if found == "ValueError" else _what(found)
    if abs(found - wanted) <= rtol * abs(wanted):
        return None
    return f"{wanted:.9g}", f"{found:.9g}"
