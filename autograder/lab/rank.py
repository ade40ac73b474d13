"""One rank: a forked process that runs a function with the recorder on, then waits to be ended by the agent.

Nothing of this module runs in the driver. What a rank hands back is files in the job's folder: its log, its outcome
as JSON, and its return value as tensors and plain values that `torch.load(weights_only=True)` reads.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.random  # numpy would import it at its first use: in every rank
import torch
import torch.distributed as dist

from autograder.lab import travel
from autograder.lab.recorder import DONE, FAILED, RUNNING, Forbidden, Log, Recorder
from autograder.lab.sources import file_name, is_library

LIBC = ctypes.CDLL(None)
MAX_RESULT = 256 * 2**20  # bytes of one rank's return value
MAX_DEPTH = 50
MAX_ITEMS = 1_000_000  # tensors, numbers, lists, ... in it
SPARE = 32 * 2**20  # bytes of address space that are kept for reporting that the others are used up
STACK = "stack-{}.txt"
LOG = "log-{}.jsonl"
OUTCOME = "outcome-{}.json"
RESULT = "result-{}.pt"
ARGS = "args-{}.pkl"


class RankContext:
    """What a function run by `ranks.run` gets as its first argument.

    Attributes:
        rank, world_size: of this process in the default group.
        device: where this rank's tensors live: "cpu", or its own GPU under NCCL.
    """

    def __init__(self, rank: int, world_size: int, device: str, recorder: Recorder, student: str | None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._recorder, self._student_file, self._student = recorder, student, None

    @property
    def student(self) -> types.ModuleType:
        """The student's module, loaded on first use, in this process only."""
        if self._student is None:
            if self._student_file is None:
                raise ValueError("this run was started without a student's file")
            self._student = load_module(Path(self._student_file))
        return self._student

    def case(self, text: str) -> None:
        """Say which case of a check begins; a failure then names it."""
        self._recorder.mark("case", text)

    @contextlib.contextmanager
    def span(self, text: str) -> Iterator[None]:
        """Mark a piece of work (a layer's forward, say) in the order of events and in the timeline."""
        index = self._recorder.mark("span", text)
        try:
            yield
        finally:
            self._recorder.log.moment("done", index)

    def mark(self, text: str) -> None:
        """Mark a moment in the order of events, such as "the gradient of x is computed"."""
        self._recorder.mark("span", text)

    def group(self, ranks: list[int]) -> dist.ProcessGroup | None:
        """A subgroup of these global ranks. Every rank calls it; a rank outside gets None."""
        group = dist.new_group(ranks)
        return None if group == dist.GroupMember.NON_GROUP_MEMBER else group


def refuse_names(names: dict[str, str]) -> None:
    """Make classes and functions raise `Forbidden` when they are called, however they are imported later.

    Args:
        names: full name -> what to do instead.
    """
    for name, advice in names.items():
        owner, _, last = name.rpartition(".")
        target = getattr(importlib.import_module(owner), last)

        def refuse(*args: object, _reason: str = f"{last} is refused here: {advice}", **kwargs: object) -> None:
            raise Forbidden(_reason)

        if isinstance(target, type):
            target.__init__ = refuse
            continue
        # In its own package, by its own name: to go through all of torch, name by name, takes 0.1 s in every rank.
        package = ".".join(owner.split(".")[:2])
        for module in [m for n, m in sys.modules.items() if n.startswith(package)]:
            if vars(module).get(last) is target:
                setattr(module, last, refuse)


def import_from(folder: Path) -> None:
    """Let the files in a module's folder be imported by their names, and those of the other modules beside it."""
    for each in [*sorted(folder.parent.glob("[0-9][0-9]_*")), folder]:
        if str(each) not in sys.path:
            sys.path.insert(0, str(each))


def load_module(path: Path) -> types.ModuleType:
    """Import a file by path, see `import_from`."""
    import_from(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main(job: dict, rank: int, memory: mmap.mmap, output_fd: int) -> None:
    """Runs in the fork and never returns: the process is ended by the agent, or by itself with `os._exit`."""
    folder = Path(job["folder"])
    log, spare, me = None, None, os.getpid()
    try:
        _become_a_rank(folder, rank, output_fd, job["memory_limit"])
        log_fd = os.open(folder / LOG.format(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        log = Log(log_fd, memory, rank, job["clock0"])
        fn, args, refuse, refused_names, roots = _take_arguments(folder, rank)
        os.register_at_fork(after_in_child=log.mute)
        recorder = Recorder(log, tuple(roots), refuse)
        recorder.install()
        refuse_names(refused_names)
        device = _join_group(job, rank, folder)
        log.state(RUNNING)
        context = RankContext(rank, job["world_size"], device, recorder, job["student"])
        threads = set(threading.enumerate())
        spare = mmap.mmap(-1, SPARE)  # address space only: nothing is written there
        with recorder:
            value = fn(context, *_to(args, device))
        if os.getpid() != me:  # the function forked, and this copy of the rank came back from it too
            os._exit(0)
        left = [f"thread {t.name!r}" for t in threading.enumerate() if t not in threads and t.is_alive()]
        _save(value, folder / RESULT.format(rank))
        _write_json(folder / OUTCOME.format(rank), {"left": left})
        log.state(DONE)
    except BaseException as error:
        full = _is_full()
        del spare
        if os.getpid() != me or log is None:
            os._exit(1)
        described = _describe_error(error, job)
        if full and isinstance(error, SystemError):  # of C code that had no room left for an exception either
            described |= {"type": "MemoryError", "message": ""}
        _write_json(folder / OUTCOME.format(rank), described)
        if "onnection" in described["message"]:
            time.sleep(0.2)  # the rank that closed the connection did so by dying: let that be seen first
        log.state(FAILED)
    # Stay: a rank that exits closes its connections, and the others would see an error instead of a missing message.
    while True:
        time.sleep(3600)


def _become_a_rank(folder: Path, rank: int, output_fd: int, memory_limit: int | None) -> None:
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: do not outlive the agent (Linux)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(source, target)
    os.closerange(3, 1024)  # the agent's own connections are none of a rank's business
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit:
        with contextlib.suppress(OSError, ValueError):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory_limit,) * 2)
    stack = os.open(folder / STACK.format(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    random.seed()
    np.random.seed()
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)  # what a rank leaves there goes with the job


def _take_arguments(folder: Path, rank: int) -> tuple:
    """Unpickle what the driver sent (trusted: it flows into the rank only) and remove it before student code runs."""
    path = folder / ARGS.format(rank)
    payload = path.read_bytes()
    path.unlink()
    return travel.unpack(payload)


def _join_group(job: dict, rank: int, folder: Path) -> str:
    device = "cpu"
    if job["backend"] == "nccl":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), job["world_size"])
    dist.init_process_group(job["backend"], store=store, rank=rank, world_size=job["world_size"])
    return device


def _to(value: object, device: str) -> object:
    if device == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_to(v, device) for v in value)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    return value


class _Plain:
    """Turns a return value into tensors and plain values; anything else becomes the text of what it is."""

    def __init__(self) -> None:
        self.bytes = self.items = 0

    def __call__(self, value: object, depth: int = 0) -> object:
        self.items += 1
        if depth > MAX_DEPTH or self.items > MAX_ITEMS:
            raise ValueError(f"the return value is nested more than {MAX_DEPTH} deep or has over {MAX_ITEMS:,} parts")
        if isinstance(value, torch.Tensor) and _is_strided(value):
            self.bytes += value.numel() * value.element_size()
            if self.bytes > MAX_RESULT:
                raise ValueError(f"the return value is larger than {MAX_RESULT // 2**20} MiB")
            return value.detach().cpu().as_subclass(torch.Tensor).clone()
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or type(value) in (bool, int, float, torch.dtype):
            return value
        if isinstance(value, str):
            return str(value)[:100_000]
        if isinstance(value, list | tuple):
            return [self(v, depth + 1) for v in value]
        if isinstance(value, dict):
            return {str(k): self(v, depth + 1) for k, v in value.items()}
        return {"__unexpected__": f"{type(value).__module__}.{type(value).__qualname__}"}


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether it holds its own numbers: not sparse, quantized or on "meta", and not a wrapper such as a DTensor."""
    wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta or wrapper)


def _save(value: object, path: Path) -> None:
    torch.save(_Plain()(value), path)


def _is_full() -> bool:
    """Whether the address space that a rank may use is used up."""
    try:
        mmap.mmap(-1, SPARE).close()
        return False
    except (OSError, MemoryError):
        return True


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value))


def _describe_error(error: BaseException, job: dict) -> dict:
    """Type, message and the student's part of the traceback."""
    while error.__context__ is not None and isinstance(error, MemoryError):
        error = error.__context__  # leaving the recorder ran out of memory once more: the first time tells more
    own = [
        f for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith(tuple(job["roots"]) or "") and not is_library(f.filename)
    ]  # fmt: skip
    try:
        message = str(error)[:4000]
    except BaseException:
        message = "(its message could not be printed)"
    described = {
        "type": type(error).__name__,
        "message": message,
        "frames": [[file_name(f.filename, f.name), f.lineno, (f.line or "").strip()[:160]] for f in own[-20:]],
        "forbidden": isinstance(error, Forbidden),
        # torch has NotImplementedErrors of its own, which are mistakes
        "not_implemented": isinstance(error, NotImplementedError) and message in ("", "not implemented yet"),
    }
    if isinstance(error, SyntaxError) and error.filename and error.filename.startswith(tuple(job["roots"])):
        described["frames"] = [[Path(error.filename).name, error.lineno or 0, (error.text or "").strip()[:160]]]
        described["message"] = str(error.msg)
    return described
