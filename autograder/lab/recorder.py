"""The recorder: in a rank, it sees every message and collective, and every wait for one.

It is a `TorchDispatchMode`, so that it sees each `c10d` operator whatever name it was imported by: calls from autograd
hooks, from subgroups and from PyTorch's own wrappers too. It appends to the rank's log, one JSON list a line, so that
the log is complete up to the moment a rank is killed. In the driver, `ledger.read_log` makes `Event`s of it.
"""

import ctypes
import functools
import itertools
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

from autograder.lab import costs
from autograder.lab.sources import DISTRIBUTED, is_library, position

STARTING, RUNNING, WAITING, DONE, FAILED = range(5)
STATES = 8  # a rank's status in memory shared with the agent: its progress count times this, plus its state
STATUS_SIZE = 8  # bytes: one number, written at once, so that no reader finds half of it
MAX_EVENTS = 100_000
MAX_WATCHED = 2**20  # bytes of a message that is compared with itself when its sender has waited for it

OPERATORS = {
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
    "gather_": "gather",
    "reduce_": "reduce",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    # functional collectives (`_c10d_functional`), which DTensor uses
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Forbidden(Exception):
    """Raised in a rank by a call that the problem does not allow."""


@dataclass(frozen=True)
class Only:
    """The communication operators that are allowed; any other raises `Forbidden` in the rank.

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


class Log:
    """A rank's log file and its status in shared memory. Written by the rank only."""

    def __init__(self, fd: int, memory: mmap.mmap, rank: int, clock0: float) -> None:
        self.fd, self.status, self.rank, self.clock0 = fd, memoryview(memory).cast("Q"), rank, clock0
        self.progress = 0
        self.waiting: set[int] = set()  # threads that wait
        self.muted = False

    def mute(self) -> None:
        """In a copy of the process that the function's own code forked: its calls are not this rank's."""
        self.muted = True

    def state(self, state: int) -> None:
        self.progress += 1
        if not self.muted:
            self.status[self.rank] = self.progress * STATES + state

    def wait(self) -> None:
        """This thread begins to wait; the rank waits while any of its threads does."""
        self.waiting.add(threading.get_ident())
        self.state(WAITING)

    def go_on(self) -> None:
        self.waiting.discard(threading.get_ident())
        self.state(WAITING if self.waiting else RUNNING)

    def now(self) -> float:
        return round(time.monotonic() - self.clock0, 7)

    def write(self, kind: str, *fields: object) -> None:
        if not self.muted:
            os.write(self.fd, (json.dumps([kind, *fields]) + "\n").encode())

    def moment(self, kind: str, index: int) -> None:
        """Write that an event "raised" or came to its "end", "wait" or "done": three of four lines, so without json."""
        if not self.muted:
            os.write(self.fd, b'["%s", %d, %.7f]\n' % (kind.encode(), index, time.monotonic() - self.clock0))


class Recorder(TorchDispatchMode):
    """Records every communication operator issued while it is active, and every wait for one.

    Args:
        log: where to.
        roots: path prefixes of the files whose line is "the caller's line".
        refuse: given an operator's name and the API's, why it is not allowed here, or None.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a rank, and to tell the compiler so imports all of it: 2 s in every rank

    def __init__(self, log: Log, roots: tuple[str, ...] = (), refuse: Callable | None = None) -> None:
        super().__init__()
        self.log, self.roots, self.refuse = log, roots, refuse
        self._next = itertools.count()
        self._thread = threading.local()  # where the caller's code started this thread
        self.works: dict[int, tuple[object, int]] = {}  # id of a pending Work -> (the Work, its event's index)
        self.watched: dict[int | None, tuple[torch.Tensor, bytes]] = {}  # a sent tensor and its values then
        self.functional: dict[int, int] = {}  # storage of a functional collective's result -> event index
        self.arriving: dict[int, list[tuple[int, int]]] = {}  # event index -> addresses that its messages are put at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__module__.startswith("torch.distributed.") for t in types):
            return NotImplemented  # a DTensor, say: its own handler runs first, and we see the operators that it issues
        if self.arriving and _uses_values(func):
            self._note_early_use(args, kwargs)
        if func.namespace not in NAMESPACES:
            return func(*args, **(kwargs or {}))
        name, op, arguments = _schema(func)
        if name == "wait_tensor":
            index = self.functional.pop(args[0].untyped_storage().data_ptr(), None)
            return self._waiting(index, lambda: func(*args, **(kwargs or {})))
        if op is None:
            return func(*args, **(kwargs or {}))

        named = dict(zip(arguments, args, strict=False)) | (kwargs or {})
        where, code, calls, via = self._caller()
        api = calls[-1] if calls else ""
        index = self._index()
        nbytes, numel, dtype, ranks, peer, is_async, sent = _describe(func.namespace, op, calls, named)
        tag = named.get("tag") if isinstance(named.get("tag"), int) else 0
        now = self.log.now()
        self.log.write(
            "op", index, op, api, nbytes, numel, dtype, ranks, peer, is_async, sent, tag, where, code, now
        )  # fmt: skip
        if via:
            self.log.write("via", index, via)
        reason = self.refuse(op, api) if self.refuse else None
        if reason:
            self.log.write("forbidden", index, reason)
            raise Forbidden(reason)

        self.log.wait()
        ended = "raised"
        try:
            out = func(*args, **(kwargs or {}))
            ended = "end"
        finally:
            self.log.go_on()
            self.log.moment(ended, index)
        if func.namespace == "c10d":
            work = out[-1] if isinstance(out, tuple | list) and len(out) else out
            if isinstance(work, torch.ScriptObject):
                # While this Python object lives, the caller's Work is the same object, so its id identifies it.
                work = Work.unbox(work)
                self.works[id(work)] = (work, index)
                message = named["tensors"][0] if op == "send" else None
                if message is not None and message.is_cpu and 0 < nbytes <= MAX_WATCHED:
                    self.watched[index] = (message, _bytes(message))
                if is_async and api:
                    me = dist.get_rank()
                    self.arriving[index] = [span for t in _filled(op, named, peer == me) if (span := _span(t))]
        elif isinstance(out, torch.Tensor):
            self.functional[out.untyped_storage().data_ptr()] = index
        return out

    def _waiting(self, index: int | None, wait: Callable) -> object:
        if index is not None:
            self.log.moment("wait", index)
        self.log.wait()
        message, copy = self.watched.pop(index, (None, None))
        changed = message is not None and _bytes(message) != copy
        self.arriving.pop(index, None)  # gloo's own wait may copy the result into place
        try:
            return wait()
        finally:
            self.log.go_on()
            if index is not None:
                self.log.moment("done", index)
            if changed:
                self.log.write("changed", index)

    def _note_early_use(self, *trees: object) -> None:
        """Write which messages are still under way into the tensors that an operator uses: each once."""
        for tensor in _all_tensors(trees):
            span = _span(tensor)
            for index in [i for i, spans in self.arriving.items() if span and any(_overlap(span, s) for s in spans)]:
                del self.arriving[index]
                where, code, _, _ = self._caller()
                self.log.write("early", index, f"{where}   {code}")

    def _index(self) -> int:
        index = next(self._next)
        if index >= MAX_EVENTS:
            raise RuntimeError(f"more than {MAX_EVENTS:,} messages and collectives in one run")
        return index

    def _caller(self) -> tuple[str, str, list[str], list[str]]:
        """The innermost frame of the caller's own files: file:line, its text, and the APIs in between, outermost last.

        The last item are up to two own lines that called it. Without a frame in `roots`, the innermost is taken that is
        outside torch and the standard library.
        """
        frame, calls, fallback = sys._getframe(2), [], None
        while frame is not None:
            path = frame.f_code.co_filename
            library = is_library(path)
            if not library and path.startswith(self.roots):
                break
            if library:
                name = frame.f_code.co_name
                if fallback is None and DISTRIBUTED in path and name != "wrapper":
                    calls.append(name)
            elif fallback is None:
                fallback = frame
            frame = frame.f_back
        if frame is None and hasattr(self._thread, "started"):
            return *self._thread.started, calls, []  # nothing of the caller's runs in this thread: who started it?
        frame = frame or fallback
        if frame is None:
            return "", "", calls, []
        via, outer = [], frame.f_back if frame is not fallback else None
        while outer is not None and len(via) < 2:
            path = outer.f_code.co_filename
            if path.startswith(self.roots) and not is_library(path):
                via.append("   ".join(position(outer)))
            outer = outer.f_back
        return *position(frame), calls, via

    def mark(self, kind: str, text: str) -> int:
        """Write a mark into the same sequence and return its index: a "case" of a check, or a "span" of work."""
        index = self._index()
        self.log.write(kind, index, text, self.log.now())
        return index

    def install(self) -> None:
        """Make waiting visible, also in other threads and inside `new_group`, for the rest of this process."""
        recorder, wait, is_completed, get_future = self, Work.wait, Work.is_completed, Work.get_future

        def recorded_wait(work: Work, *args: object, **kwargs: object) -> object:
            known = recorder.works.pop(id(work), None)
            return recorder._waiting(known and known[1], lambda: wait(work, *args, **kwargs))

        def recorded_is_completed(work: Work) -> bool:
            recorder.log.progress -= 1  # polling is not progress: a loop around it counts as waiting
            recorder.log.state(WAITING)
            if is_completed(work):
                recorder.log.go_on()
                known = recorder.works.pop(id(work), None)
                if known:
                    recorder._waiting(known[1], lambda: None)
                return True
            return False

        def recorded_get_future(work: Work) -> object:
            known = recorder.works.pop(id(work), None)
            if known:  # from here on the future is what is waited for
                recorder._waiting(known[1], lambda: None)
            return get_future(work)

        Work.wait, Work.is_completed, Work.get_future = (
            recorded_wait,
            recorded_is_completed,
            recorded_get_future,
        )
        future_wait, c10d, start = torch._C.Future.wait, dist.distributed_c10d, threading.Thread.start
        new_group = c10d._new_process_group_helper

        def recorded_new_group(size: int, rank: int, ranks: list[int], *args: object, **kwargs: object) -> object:
            if not ranks:  # the default group: who waits there waits for a rank that has not started yet
                return new_group(size, rank, ranks, *args, **kwargs)
            where, code, calls, _ = recorder._caller()
            index, now = recorder._index(), recorder.log.now()
            fields = ("new_group", calls[-1], 0, 0, "", list(ranks), None, False, 0, 0, where, code, now)
            recorder.log.write("op", index, *fields)
            group = recorder._waiting(None, lambda: new_group(size, rank, ranks, *args, **kwargs))
            recorder.log.moment("end", index)
            return group

        def recorded_start(thread: threading.Thread) -> None:
            run, (where, code, *_) = thread.run, recorder._caller()

            def recorded_run() -> None:
                recorder._thread.started = where, code
                with _OnThread(recorder):
                    run()

            thread.run = recorded_run
            start(thread)

        torch._C.Future.wait = lambda future: recorder._waiting(None, lambda: future_wait(future))
        c10d._new_process_group_helper = recorded_new_group
        threading.Thread.start = recorded_start


class _OnThread(TorchDispatchMode):
    """The recorder in another thread: a dispatch mode acts only in the thread that enters it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.recorder.__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def _schema(func: object) -> tuple[str, str | None, list[str]]:
    """An operator's own name, ours for it (None: not one that is recorded), and the names of its arguments."""
    name = func._schema.name.split("::")[1]
    return name, OPERATORS.get(name) or OPERATORS.get(name.rstrip("_")), [a.name for a in func._schema.arguments]


@functools.cache
def _uses_values(func: object) -> bool:
    """Whether an operator reads or writes what is in its tensors: not one that shares them, or asks for the shape."""
    name = func._schema.name.split("::")[1]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not views and name != "set_" and not name.endswith("_like") and not name.startswith("new_")


def _bytes(tensor: torch.Tensor) -> bytes:
    """The values of a contiguous tensor in the CPU's memory (gloo sends no other), without an operator."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _describe(namespace: str, op: str, calls: list[str], named: dict) -> tuple:
    """Bytes, elements, dtype, group, peer, async or not, and bytes sent, from an operator's arguments by name."""
    group = named.get("process_group")
    if group is not None:
        group = dist.ProcessGroup.unbox(group)
    else:
        group = dist.distributed_c10d._resolve_process_group(named["group_name"])
    ranks = list(dist.get_process_group_ranks(group))
    me, p = dist.get_rank(group), len(ranks)

    inputs, outputs, both = [], [], _tensors(named, "tensor")
    if not both:
        inputs, outputs = _tensors(named, "input"), _tensors(named, "output")
        both = inputs or outputs
    if op == "barrier":
        both = []
    # "The full tensor" is the side that no rank has only a shard of.
    if op in ("all_gather", "gather"):
        part = inputs or _tensors(named, "input_list")
        numel, nbytes = p * _numel(part), p * _nbytes(part)
    elif op in ("reduce_scatter", "all_to_all"):
        numel, nbytes = _numel(inputs), _nbytes(inputs)
    elif op == "scatter":
        numel, nbytes = p * _numel(outputs), p * _nbytes(outputs)
    else:
        numel, nbytes = _numel(both), _nbytes(both)
    dtype = str((both or inputs or outputs)[0].dtype).removeprefix("torch.") if (both or inputs or outputs) else ""

    at = next((named[k] for k in ("dst", "src", "root_rank") if isinstance(named.get(k), int)), None)
    if at is not None and not 0 <= at < p:
        raise ValueError(f"there is no rank {at} in a group of {p}")  # gloo would crash
    peer = None if at is None else ranks[at]
    # "wait" after the call is the caller's own for isend, irecv and batches; `dist.send` waits itself.
    blocking = "send" in calls or "recv" in calls or "wait_all_ranks" in named
    is_async = not blocking and bool(named.get("async_op", True))
    if namespace != "c10d":
        is_async = True

    if op == "send":
        sent = nbytes
    elif op in ("recv", "barrier"):
        sent = 0
    elif op == "scatter":
        sent = nbytes - nbytes // p if me == at else 0
    elif op == "gather":
        sent = 0 if me == at else nbytes // p
    elif op == "all_to_all":
        sent = nbytes - _own_part(named, inputs, me, p)
    else:
        sent = round(costs.bytes_sent(op, nbytes, p))
    return nbytes, numel, dtype, ranks, peer, is_async, sent


def _own_part(named: dict, inputs: list[torch.Tensor], me: int, p: int) -> int:
    """Bytes of an all-to-all's input that stay on this rank."""
    if len(inputs) == p and "input_tensors" in named:
        return _nbytes(inputs[me : me + 1])
    sizes = named.get("input_split_sizes")
    if not sizes:
        return _nbytes(inputs) // p
    row = inputs[0][:1].numel() * inputs[0].element_size() if inputs[0].ndim else inputs[0].element_size()
    return int(sizes[me]) * row


def _tensors(named: dict, prefix: str) -> list[torch.Tensor]:
    """All tensors in the arguments whose name begins so, nested lists flattened."""
    return _all_tensors([v for k, v in named.items() if k.startswith(prefix)])


def _all_tensors(trees: Iterable[object]) -> list[torch.Tensor]:
    """All tensors in these, nested lists and dicts flattened."""
    found: list[torch.Tensor] = []
    stack = list(trees)
    while stack:
        value = stack.pop(0)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            stack = list(value) + stack
        elif isinstance(value, dict):
            stack = list(value.values()) + stack
    return found


def _filled(op: str, named: dict, is_root: bool) -> list[torch.Tensor]:
    """The tensors that hold something new when the operator is done, on the root or another rank."""
    if op in ("recv", "all_reduce") or (op == "broadcast" and not is_root) or (op == "reduce" and is_root):
        return _tensors(named, "tensor") or _tensors(named, "input")
    return _tensors(named, "output")


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses of a contiguous tensor's values; None where there are none or they do not lie together."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout != torch.strided:
        return None
    if tensor.is_meta or not tensor.numel() or not tensor.is_contiguous():
        return None
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
