"""Run a function on ranks: `run(fn, world_size, *args)`.

The driver (this process) never runs student code and never unpickles what a rank wrote. It sends the function and the
arguments to the ranks; it reads back tensors and plain values (`torch.load(weights_only=True)`) and a log of events.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autograder.lab import agent_client, diagnosis, record, travel
from autograder.lab import rank as rank_files
from autograder.lab.record import Run, RunFailed
from autograder.lab.recorder import Only

__all__ = ["Only", "PerRank", "Run", "RunFailed", "run"]

STALL = 2.0  # seconds without any progress while all ranks wait: a deadlock
TIMEOUT = 20.0  # seconds of computing for one rank
OPTIMIZERS = ("torch._dynamo",)  # imported by the first step of an optimizer, in 2 s
MEMORY = 4 * 2**30  # bytes of address space that a rank may add to what it starts with


class PerRank(list):
    """An argument of which rank r receives item r only."""


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
    preload: Sequence[str] = OPTIMIZERS,
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
        preload: names of modules that the ranks would otherwise each import for themselves.
        check: raise `RunFailed` unless every rank returned and no call was refused.

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
            (folder / rank_files.ARGS.format(r)).write_bytes(travel.pack(sent, fn))
        job = {
            "folder": str(folder), "world_size": world_size, "backend": backend, "timeout": timeout, "stall": stall,
            "memory_limit": memory_limit if backend != "nccl" else None, "student": str(student) if student else None,
            "roots": roots, "preload": list(preload),
        }  # fmt: skip
        verdict = _ask(job)
        result = record.read(verdict, job, folder, time.monotonic() - begin)
    finally:
        _remove(folder)
    if check and result.outcome != "done":
        raise RunFailed(*diagnosis.explain(result), result)
    return result


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
    untouched = (Path(job["folder"]) / rank_files.ARGS.format(0)).exists()
    return {
        "outcome": "no agent" if untouched else "lost", "states": [0] * n, "exits": {}, "left": [],
        "output": [""] * n, "dropped": [0] * n,
    }  # fmt: skip


def _remove(folder: Path) -> None:
    """Remove a job's folder, also where its permissions were taken away."""
    if folder.is_dir() and not folder.is_symlink():
        folder.chmod(0o700)
        for parent, names, _ in os.walk(folder):
            for path in (Path(parent, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
