"""Run a function on ranks: `run(fn, world_size, *args)`.

The driver (this process) never runs student code and never unpickles what a rank wrote. It sends the function and the
arguments to the ranks; it reads back tensors and plain values (`torch.load(weights_only=True)`) and a log of events.
"""

import json
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle
import torch

from autograder.lab import agent_client, ledger
from autograder.lab import rank as rank_files
from autograder.lab.findings import Finding
from autograder.lab.ledger import Event

MAX_LOG = 64 * 2**20  # bytes of one rank's log
STALL = 2.0  # seconds without any progress while all ranks wait: a deadlock
TIMEOUT = 20.0  # seconds of computing for one rank
MEMORY = 4 * 2**30  # bytes of address space that a rank may add to what it starts with


class PerRank(list):
    """An argument of which rank r receives item r only."""


@dataclass(frozen=True)
class Only:
    """The communication operators that are allowed; any other raises `ledger.Forbidden` in the rank.

    Args:
        allowed: operator names without prefix.
        advice: what to use instead, appended to the message.
    """

    allowed: frozenset[str]
    advice: str

    def __call__(self, op: str, api: str) -> str | None:
        if op in self.allowed:
            return None
        return f"{api or op} is refused here: {self.advice}"


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
                if seen == number and e.op not in ("case", "span"):
                    chosen.append(e)
        return chosen

    def sent(self, rank: int) -> int:
        """Bytes that a rank sent."""
        return sum(e.sent for e in self.of(rank))

    def unwaited(self) -> list[Event]:
        """Asynchronous operations that the caller never waited for."""
        return [e for e in self.events if e.is_async and e.api and e.end is not None and e.done is None]


class RunFailed(Finding):
    """A run that did not return on every rank. `run` is what is known of it."""

    def __init__(self, status: str, title: str, facts: list[tuple[str, str]], run: Run) -> None:
        super().__init__(status, title, facts)
        self.run = run


def run(
    fn: Callable,
    world_size: int,
    *args: object,
    backend: str = "gloo",
    timeout: float = TIMEOUT,
    stall: float = STALL,
    memory_limit: int | None = MEMORY,
    student: Path | None = None,
    roots: Sequence[str] = (),
    refuse: Callable[[str, str], str | None] | None = None,
    refused_names: Mapping[str, str] | None = None,
    check: bool = True,
) -> Run:
    """Run `fn(rank_context, *args)` on fresh ranks and return what they gave.

    Args:
        fn: a function; it travels to the ranks by value, with the globals it uses.
        world_size: number of ranks, at least 1.
        args: handed to every rank; of a `PerRank`, each rank gets its own item.
        backend: "gloo" or "nccl".
        timeout: seconds of computing after which a rank is in an endless loop; three times as long by the clock.
        stall: seconds without progress, while every unfinished rank waits in communication, that make a deadlock.
        memory_limit: bytes of address space that a rank may add; None for no limit (always none under NCCL).
        student: file that `rank_context.student` loads.
        roots: path prefixes of files whose lines are reported as the caller's; the student's folder is added.
        refuse: see `Only`.
        refused_names: full names of classes and functions that must not be called -> what to do instead.
        check: raise `RunFailed` unless every rank returned.

    Raises:
        RunFailed: with status failed, not_implemented, forbidden, crashed, deadlock, timeout or infrastructure.
        ValueError: world_size or a `PerRank` of the wrong length.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if any(isinstance(a, PerRank) and len(a) != world_size for a in args):
        raise ValueError(f"a PerRank argument needs one item for each of the {world_size} ranks")
    begin = time.monotonic()
    roots = [*roots, *([str(Path(student).parent)] if student else [])]
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        for r in range(world_size):
            own = [a[r] if isinstance(a, PerRank) else a for a in args]
            sent = fn, own, refuse, dict(refused_names or {}), roots
            (folder / rank_files.ARGS.format(r)).write_bytes(_pickle(sent, fn))
        job = {
            "folder": str(folder), "world_size": world_size, "backend": backend, "timeout": timeout, "stall": stall,
            "memory_limit": memory_limit if backend != "nccl" else None, "student": str(student) if student else None,
            "roots": roots,
        }  # fmt: skip
        verdict = _ask(job)
        result = _read(verdict, job, folder, time.monotonic() - begin)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if check and result.outcome != "done":
        from autograder.lab import diagnosis

        raise RunFailed(*diagnosis.explain(result), result)
    return result


def _pickle(value: object, fn: Callable) -> bytes:
    """Pickle by value what `fn` refers to in its own module, so that a rank need not import a suite or a notebook."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or module.__name__.startswith("autograder.lab"):
        return cloudpickle.dumps(value)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(value)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _ask(job: dict) -> dict:
    """Run a job on the agent. An agent that is killed meanwhile is replaced by a new one, once."""
    for attempt in range(2):
        try:
            verdict = agent_client.request(job, 3 * job["timeout"] + job["stall"] + 30)
        except BaseException:  # Ctrl-C: hang up, and the agent ends its ranks
            agent_client.stop()
            raise
        if verdict is not None:
            return verdict
        agent_client.stop()
        if attempt == 0 and not (Path(job["folder"]) / rank_files.ARGS.format(0)).exists():
            break  # the ranks have taken their arguments: the run itself ended the agent
    n = job["world_size"]
    return {
        "outcome": "lost", "states": [0] * n, "exits": {}, "left": [], "output": [""] * n, "dropped": [0] * n,
    }  # fmt: skip


def _read(verdict: dict, job: dict, folder: Path, duration: float) -> Run:
    """Collect the files of a job. They were written next to student code: size-capped, checked, never unpickled."""
    n = job["world_size"]
    events, errors, values, stacks, left, notes = [], [], [], [], list(verdict["left"]), []
    outcome = verdict["outcome"]
    for r in range(n):
        log = _read_file(folder / rank_files.LOG.format(r), MAX_LOG).decode(errors="replace")
        if outcome != "done":
            log = log[: log.rfind("\n") + 1]  # a killed rank may have been writing a line
        try:
            events += ledger.read_log(log, r)
        except ValueError as error:
            outcome, notes = "tampered", [str(error)]
        try:
            told = json.loads(_read_file(folder / rank_files.OUTCOME.format(r), 2**20) or b"{}")
            told = told if isinstance(told, dict) else {}
        except ValueError:
            told = {}
        errors.append(told if "type" in told else {})
        left += [f"{item} of rank {r}" for item in told.get("left", [])]
        stacks.append(_read_file(folder / rank_files.STACK.format(r), 2**16).decode(errors="replace"))
        values.append(None)
        if outcome == "done":
            try:
                path = folder / rank_files.RESULT.format(r)
                if _is_plain_file(path, 2 * rank_files.MAX_RESULT):
                    values[-1] = torch.load(path, weights_only=True, map_location="cpu")
            except Exception as error:
                outcome, notes = (
                    "tampered",
                    [f"the result of rank {r} cannot be read: {type(error).__name__}"],
                )
    return Run(
        n, outcome, values, events, verdict["output"], verdict["dropped"], verdict["states"], errors,
        {int(r): text for r, text in verdict["exits"].items()}, stacks, left, duration, job["timeout"], job["stall"],
        job["roots"], notes,
    )  # fmt: skip


def _is_plain_file(path: Path, cap: int) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size <= cap


def _read_file(path: Path, cap: int) -> bytes:
    return path.read_bytes() if _is_plain_file(path, cap) else b""
