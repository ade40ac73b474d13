"""The agent: a process that has imported torch and does nothing but fork ranks, watch them and end them.

It never runs an operator, a thread or student code, so that forking from it is safe and quick. The driver starts it as
`python -m autograder.lab.agent FD` and talks to it over a socket, one JSON object a line: a job in, a verdict out.
When the socket closes, everything ends.
"""

import contextlib
import gc
import importlib
import io
import json
import mmap
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from autograder.lab import rank, recorder

KEEP_OUTPUT = 64 * 1024  # bytes of each rank's output that are kept; the rest is read, counted and dropped
TICK = 0.005  # seconds between two looks at the ranks


def serve(connection: socket.socket) -> None:
    """Run the jobs that arrive on the socket, one after the other, until it closes."""
    torch.save([0], io.BytesIO())  # what the first call only looks up is then there in every rank
    _freeze()
    with contextlib.suppress(OSError, AttributeError):
        rank.LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of ranks come back to us (Linux)
    lines = connection.makefile("r")
    connection.sendall(b'{"ready": true}\n')
    for line in lines:
        job = Job(json.loads(line), connection)
        _preload(job.job["preload"])
        verdict = job.run()
        if verdict["outcome"] == "cancelled":  # nobody listens any more, nor tidies up
            shutil.rmtree(job.folder, ignore_errors=True)
            return
        connection.sendall(json.dumps(verdict).encode() + b"\n")


def _preload(names: list[str]) -> None:
    """Import what each rank would otherwise import for itself."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        importlib.import_module(name)
    if missing:
        _freeze()


def _freeze() -> None:
    """Let ranks share the pages of all there is, instead of copying them when their garbage collector runs."""
    gc.collect()
    gc.freeze()


class Job:
    """One run: fork the ranks, watch them until there is a verdict, end them and all they left."""

    def __init__(self, job: dict, connection: socket.socket) -> None:
        self.job, self.connection = job, connection
        self.n = job["world_size"]
        self.memory = mmap.mmap(-1, max(self.n * recorder.STATUS_SIZE, mmap.PAGESIZE))
        self.pids: list[int] = []
        self.pipes: dict[int, int] = {}  # read end -> rank
        self.output = [bytearray() for _ in range(self.n)]
        self.dropped = [0] * self.n
        self.ended: dict[int, int] = {}  # rank -> wait status
        self.folder = Path(job["folder"])

    def run(self) -> dict:
        try:
            self._fork()
            outcome = self._watch()
            states = [self._status(r)[0] for r in range(self.n)]
            left = self._left_behind()
        finally:
            self._end_all()
        return {
            "outcome": outcome,
            "states": states,
            "exits": {str(r): _exit_text(status) for r, status in self.ended.items()},
            "left": left,
            "output": [bytes(o).decode(errors="replace") for o in self.output],
            "dropped": self.dropped,
        }

    def _fork(self) -> None:
        self.job["clock0"] = time.monotonic()
        for r in range(self.n):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    rank.main(self.job, r, self.memory, write)
                finally:
                    os._exit(70)
            os.close(write)
            os.set_blocking(read, False)
            self.pids.append(pid)
            self.pipes[read] = r

    def _status(self, r: int) -> tuple[int, int]:
        """The state of a rank, and how far it has come."""
        at = r * recorder.STATUS_SIZE
        progress, state = divmod(
            int.from_bytes(self.memory[at : at + recorder.STATUS_SIZE], sys.byteorder), recorder.STATES
        )
        return state, progress

    def _watch(self) -> str:
        """Wait for a verdict: done, failed, crashed, deadlock, timeout or cancelled."""
        begin = looked = still_since = time.monotonic()
        last_progress, cpu_then = None, 0.0
        while True:
            if self._drain(TICK):
                return "cancelled"
            now = time.monotonic()
            states = [self._status(r) for r in range(self.n)]
            for r, pid in enumerate(self.pids):
                if r not in self.ended:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        self.ended[r] = status
            if self.ended:
                return "crashed"
            if any(state == recorder.FAILED for state, _ in states):
                return "failed"
            if all(state == recorder.DONE for state, _ in states):
                return "done"
            if now - begin > self.job["timeout"] and self._overdue(now - begin):
                self._take_stacks()
                return "timeout"

            # A deadlock: every unfinished rank waits, nothing moves, no rank computes, and we ourselves ran on time.
            progress = [count for _, count in states]
            waiting = all(state in (recorder.WAITING, recorder.DONE) for state, _ in states)
            if not waiting or progress != last_progress or now - looked > 0.5:
                last_progress, still_since, cpu_then = progress, now, self._cpu_seconds() if waiting else 0.0
            elif now - still_since > self.job["stall"]:
                cpu = self._cpu_seconds()
                if cpu - cpu_then < 0.1 * self.job["stall"]:
                    self._take_stacks()
                    if progress == [self._status(r)[1] for r in range(self.n)]:  # nothing moved meanwhile either
                        return "deadlock"
                still_since, cpu_then = now, cpu
            looked = now

    def _overdue(self, elapsed: float) -> bool:
        """Whether a rank has computed for longer than the time limit, or the clock says three times as much.

        A loop without end computes; ranks that only wait for their turn on a busy machine do not.
        """
        return elapsed > 3 * self.job["timeout"] or self._cpu_seconds(max) > self.job["timeout"]

    def _drain(self, timeout: float) -> bool:
        """Read what ranks print. True when the driver has hung up."""
        ready, _, _ = select.select([*self.pipes, self.connection], [], [], timeout)
        for fd in ready:
            if fd is self.connection:
                return True
            with contextlib.suppress(BlockingIOError):
                data = os.read(fd, 1 << 20)
                if not data:
                    os.close(fd)
                    del self.pipes[fd]
                    continue
                r = self.pipes[fd]
                room = KEEP_OUTPUT - len(self.output[r])
                self.output[r] += data[: max(room, 0)]
                self.dropped[r] += max(len(data) - max(room, 0), 0)
        return False

    def _cpu_seconds(self, combine: Callable = sum) -> float:
        seconds = [0.0]
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                seconds.append(times.user + times.system)
        return combine(seconds)

    def _take_stacks(self) -> None:
        """Ask each unfinished rank for its stack: faulthandler writes it even while the rank is blocked in C++."""
        asked = [r for r in range(self.n) if self._status(r)[0] in (recorder.RUNNING, recorder.WAITING)]
        files = [self.folder / rank.STACK.format(r) for r in asked]
        for r, file in zip(asked, files, strict=True):
            with contextlib.suppress(OSError):
                os.truncate(file, 0)
                os.kill(self.pids[r], signal.SIGUSR1)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            self._drain(TICK)
            if all(f.exists() and f.stat().st_size for f in files):
                return

    def _left_behind(self) -> list[str]:
        """Child processes that ranks have started and not ended: what two looks in a row agree on.

        One look can miss some: a child that ends while we look may have started another a moment before.
        """
        own = psutil.Process().cmdline()
        seen = None
        for _ in range(20):
            last, seen = seen, {}
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    ended = process.status() == psutil.STATUS_ZOMBIE
                    seen[process.pid] = None if ended else process.cmdline()
            if seen == last and [] not in seen.values():  # one without a command is just ending
                break
        commands = [command for pid, command in seen.items() if command is not None and pid not in self.pids]
        return [
            "child process made by os.fork or multiprocessing"
            if command == own
            else f"child process '{' '.join(command)[:80] or 'without a command'}'"
            for command in commands
        ]

    def _end_all(self) -> None:
        """Kill the ranks and, for as long as any is left, every process below us."""
        living = [pid for r, pid in enumerate(self.pids) if r not in self.ended]
        for pid in living:  # all stand still first: a rank would log that its connection to a killed one broke
            os.kill(pid, signal.SIGSTOP)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        while children := psutil.Process().children(recursive=True):
            for process in children:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.001)
        self._drain(0)
        for fd in self.pipes:
            os.close(fd)
        self.memory.close()


def _exit_text(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; it then hangs up
    with contextlib.suppress(ConnectionError):  # the driver has ended, perhaps before we were ready
        serve(socket.socket(fileno=int(sys.argv[1])))
