"""The driver's end of the agent: start it, send it a job, read the verdict.

Imports nothing heavy, so that the agent can be importing torch while its caller does the same.
"""

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import uuid

MARK = "AUTOGRADER_AGENT"  # environment variable: tells an agent's processes from all others


class _Agent:
    """The local agent process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.mark = uuid.uuid4().hex
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment[MARK] = self.mark
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the student's file is compiled once, not in every rank
        # All ranks are on this machine: do not depend on its host name or its network.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Huge pages for the heap (glibc): a fork copies page tables, and there are far fewer of them then.
        environment.setdefault("PYTHONMALLOC", "malloc")
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=134217728")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autograder.lab.agent", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.socket, self.lines, self.ready = ours, ours.makefile("rb"), False

    def request(self, job: dict, timeout: float) -> dict | None:
        """Send a job and wait for its verdict; None when the agent died or did not answer."""
        try:
            if not self.ready:
                self.lines.readline()
                self.ready = True
            self.socket.sendall(json.dumps(job).encode() + b"\n")
            readable, _, _ = select.select([self.socket], [], [], timeout)
            line = self.lines.readline() if readable else b""
            return json.loads(line) if line else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        self.lines.close()
        self.socket.close()  # the agent reads the end of its jobs, ends its ranks and then itself
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode != 0:
            self._sweep()

    def _sweep(self) -> None:
        """End what an agent that was killed could not end itself."""
        import psutil

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark:
                    process.kill()


_agent: _Agent | None = None


def start() -> None:
    """Start the local agent ahead of the first run, so that it imports torch while the caller does something else."""
    global _agent
    if _agent is not None and _agent.process.poll() is not None:
        stop()
    if _agent is None:
        _agent = _Agent()


def stop() -> None:
    """End the local agent; with it end all ranks."""
    global _agent
    if _agent is not None:
        _agent.close()
        _agent = None


atexit.register(stop)


def request(job: dict, timeout: float) -> dict | None:
    """Run a job on the agent, which is started if need be; None when it died meanwhile or gave no verdict in time."""
    start()
    return _agent.request(job, timeout)
