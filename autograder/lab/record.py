"""What a run on ranks gave, read from the files that the ranks left.

They were written next to student code, so nothing in them is trusted: sizes are capped, and nothing is unpickled.
"""

import json
import os
import stat
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autograder.lab import ledger
from autograder.lab import rank as rank_files
from autograder.lab.findings import Finding
from autograder.lab.ledger import Event

MAX_LOG = 64 * 2**20  # bytes of one rank's log


@dataclass
class Run:
    """What a run on ranks gave.

    Attributes:
        values: return value of each rank (tensors, numbers, text, and lists and dicts of those; tuples become lists).
        events: all events of all ranks, rank by rank, each rank's in order.
        output: what each rank printed (stdout and stderr together, at most 64 KiB), and `dropped` how many bytes more.
        left: what a rank left behind when its function returned: threads, child processes.
        duration: seconds from the request to the verdict.
    """

    world_size: int
    outcome: str
    values: list
    events: list[Event]
    output: list[str]
    dropped: list[int]
    states: list[int]
    errors: list[dict]
    exits: dict[int, str]
    stacks: list[str]
    left: list[str]
    duration: float
    timeout: float
    stall: float
    roots: list[str]
    notes: list[str] = field(default_factory=list)

    def of(self, rank: int, *ops: str) -> list[Event]:
        """The events of one rank, of these operators (all without any)."""
        return [e for e in self.events if e.rank == rank and (not ops or e.op in ops)]

    def in_case(self, number: int) -> list[Event]:
        """The messages and collectives between the marks of the case with this number (from 0) and the next."""
        chosen = []
        for rank in range(self.world_size):
            seen = -1
            for e in self.of(rank):
                seen += e.op == "case"
                if seen == number and (e.is_message or e.is_collective):
                    chosen.append(e)
        return chosen

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent."""
        return sum(e.sent for e in self.of(rank) if not e.raised)

    def unwaited(self) -> list[Event]:
        """Asynchronous operations that the caller never waited for."""
        return [
            e for e in self.events if e.is_async and e.api and e.end is not None and e.done is None and not e.raised
        ]


class RunFailed(Finding):
    """A run that did not return on every rank. `run` is what is known of it."""

    def __init__(self, status: str, title: str, facts: list[tuple[str, str]], run: Run) -> None:
        super().__init__(status, title, facts)
        self.run = run


def read(verdict: dict, job: dict, folder: Path, duration: float) -> Run:
    """Collect the files of a job that the agent has ended with this verdict."""
    n = job["world_size"]
    events, errors, values, stacks, left, notes = [], [], [None] * n, [], list(verdict["left"]), []
    outcome = verdict["outcome"]
    for r in range(n):
        try:
            log = _read_file(folder / rank_files.LOG.format(r), MAX_LOG).decode(errors="replace")
            if outcome != "done":
                log = log[: log.rfind("\n") + 1]  # a killed rank may have been writing a line
            events += ledger.read_log(log, r)
            error, own_left = _read_outcome(folder / rank_files.OUTCOME.format(r))
            errors.append(error)
            left += [f"{item} of rank {r}" for item in own_left]
            if outcome == "done":
                values[r] = _read_result(folder / rank_files.RESULT.format(r))
        except ValueError as error:
            outcome = "tampered"
            errors[r:] = [{}]
            notes.append(f"rank {r}: {error}")
        stacks.append(_read_file(folder / rank_files.STACK.format(r), 2**16).decode(errors="replace"))
    if any(e.refused for e in events) and outcome in ("done", "failed", "crashed", "deadlock", "timeout"):
        outcome = "forbidden"  # also where the code went on after the refusal
    return Run(
        n, outcome, values, events, verdict["output"], verdict["dropped"], verdict["states"], errors,
        {int(r): text for r, text in verdict["exits"].items()}, stacks, left, duration, job["timeout"], job["stall"],
        job["roots"], notes,
    )  # fmt: skip


def _read_outcome(path: Path) -> tuple[dict, list[str]]:
    """A rank's error, {} without one, and what it left behind. Raises ValueError where it is not what `rank` writes."""
    try:
        told = json.loads(_read_file(path, 2**20) or b"{}")
        error = {}
        if "type" in told:
            frames = [(str(name), int(line), str(code)) for name, line, code in told["frames"]]
            error = {"type": str(told["type"]), "message": str(told["message"]), "frames": frames}
            error |= {key: told.get(key) is True for key in ("forbidden", "not_implemented")}
        return error, [str(item) for item in told.get("left", [])]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path.name} is not what a rank writes") from None


def _read_result(path: Path) -> object:
    """A rank's return value. Raises ValueError where it is not what `rank` writes."""
    cap = rank_files.MAX_RESULT + 100 * rank_files.MAX_ITEMS
    try:
        if not _is_plain_file(path, cap):
            raise ValueError("not a file of its size")
        with zipfile.ZipFile(path) as archive:
            if sum(item.file_size for item in archive.infolist()) > cap:
                raise ValueError("too large")
        value = torch.load(path, weights_only=True, map_location="cpu")
        if not _is_plain(value):
            raise ValueError("not plain")
        return value
    except Exception:  # whatever a reader of hostile bytes may raise
        raise ValueError(f"{path.name} is not what a rank writes") from None


def _is_plain(value: object) -> bool:
    """Whether a value is made of what ranks hand back, with tensors that are no larger than their bytes."""
    if type(value) is torch.Tensor:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            return False
        return value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(k) is str and _is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def _is_plain_file(path: Path, cap: int) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size <= cap


def _read_file(path: Path, cap: int) -> bytes:
    """The bytes of a small regular file; none where there is no file.

    Raises:
        ValueError: there is something else, or it is larger than `cap`.
    """
    if not os.path.lexists(path):
        return b""
    if not _is_plain_file(path, cap):
        raise ValueError(f"{path.name} is not what a rank writes")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
