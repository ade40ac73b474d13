"""Ranks: what they hand back, and that whatever they do ends as one clear outcome of that run alone."""

import contextlib
import ctypes
import enum
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from autograder.lab import ranks
from autograder.lab.findings import Finding
from autograder.lab.ranks import PerRank, Run, RunFailed

HERE = [str(Path(__file__).parent)]
pytestmark = pytest.mark.usefixtures("nothing_remains")


def run(fn: Callable, world_size: int, *args: object, **settings: object) -> Run:
    return ranks.run(fn, world_size, *args, roots=HERE, **settings)


def failure(fn: Callable, world_size: int, *args: object, **settings: object) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        run(fn, world_size, *args, **settings)
    return caught.value


def add_up(context: ranks.rank_files.RankContext) -> float:
    tensor = torch.tensor(context.rank + 1.0)
    dist.all_reduce(tensor)
    return tensor.item()


@contextlib.contextmanager
def next_run_is_normal() -> Iterator[None]:
    yield
    assert run(add_up, 2).values == [3.0, 3.0]


# ------------------------------------------------------------------------------------------------ what comes back


def test_returns_are_per_rank() -> None:
    def body(context, shared, own):
        return context.rank, context.world_size, shared + own, {"device": context.device, 3: None}

    result = run(body, 3, 10, PerRank([1, 2, 3]))
    assert result.outcome == "done"
    assert result.values == [[r, 3, 11 + r, {"device": "cpu", "3": None}] for r in range(3)]


def test_arguments_travel_with_the_globals_they_use() -> None:
    def body(context, tensor, function):
        return function(tensor), OFFSET

    tensor = torch.arange(6.0)[::2]
    values = run(body, 1, tensor, lambda t: t + OFFSET).values[0]
    assert torch.equal(values[0], tensor + OFFSET)
    assert values[1] == OFFSET


OFFSET = 7


def test_a_wrong_number_of_ranks_or_arguments_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        ranks.run(add_up, 0)
    with pytest.raises(ValueError, match="one item for each of the 3 ranks"):
        ranks.run(add_up, 3, PerRank([1, 2]))


def test_output_is_captured_per_rank_and_capped() -> None:
    def body(context):
        print("hello from", context.rank)
        print("and to stderr", file=sys.stderr)
        os.write(1, b"and unbuffered\n")
        if context.rank == 1:
            print("x" * 100_000)

    result = run(body, 2)
    assert result.output[0] == "hello from 0\nand to stderr\nand unbuffered\n"
    assert result.output[1].startswith("hello from 1\n")
    assert len(result.output[1]) == 64 * 1024
    assert result.dropped == [0, len("hello from 1\nand to stderr\nand unbuffered\n") + 100_001 - 64 * 1024]


STATE: list[int] = []


def test_every_run_starts_fresh() -> None:
    def body(context):
        seen = len(STATE), os.environ.get("LEFT_OVER"), torch.initial_seed(), hasattr(torch, "left_over"), Path.cwd()
        STATE.append(1)
        os.environ["LEFT_OVER"] = "1"
        torch.manual_seed(1)
        torch.left_over = True
        os.chdir("/")
        return [*seen[:-1], str(seen[-1])]

    first, second = run(body, 2), run(body, 2)
    assert first.values == second.values
    assert STATE == []


class Custom:
    pass


class Color(enum.IntEnum):
    RED = 1


class Subclass(torch.Tensor):
    pass


def test_odd_objects_become_plain_ones() -> None:
    def body(context):
        big = torch.arange(1_000_000)
        return {
            "custom": Custom(),
            "class": Custom,
            "module": torch.nn.Linear(2, 2),
            "tuple": (1, (2.5, "x")),
            "numpy": [np.float64(0.5), np.int32(3), np.bool_(True)],
            "array": np.ones(2),
            "enum": Color.RED,
            "set": {1},
            "function": lambda: None,
            "dtype": torch.bfloat16,
            "nan": float("nan"),
        } | {
            "subclass": torch.ones(2).as_subclass(Subclass),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "view": big[10:12],
            "strided": big[:10:3],
            "transposed": torch.arange(6).reshape(2, 3).t(),
            "expanded": torch.ones(1).expand(3),
            "bfloat16": torch.ones(2, dtype=torch.bfloat16),
            "empty": torch.ones(0, 3),
            "sparse": torch.eye(2).to_sparse(),
            "meta": torch.ones(2, device="meta"),
        }

    value = run(body, 1).values[0]
    unexpected = {k: v["__unexpected__"] for k, v in value.items() if isinstance(v, dict)}
    assert set(unexpected) == {"custom", "class", "module", "array", "enum", "set", "function", "sparse", "meta"}
    assert unexpected["module"] == "torch.nn.modules.linear.Linear"
    assert unexpected["array"] == "numpy.ndarray"
    assert value["tuple"] == [1, [2.5, "x"]]
    assert value["numpy"] == [0.5, 3, True]
    assert [type(v) for v in value["numpy"]] == [float, int, bool]
    assert value["dtype"] is torch.bfloat16
    assert value["nan"] != value["nan"]
    tensors = {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in tensors.values())
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors.values())
    assert {k: t.tolist() for k, t in tensors.items()} == {
        "subclass": [1, 1],
        "parameter": [1, 1],
        "view": [10, 11],
        "strided": [0, 3, 6, 9],
        "transposed": [[0, 3], [1, 4], [2, 5]],
        "expanded": [1, 1, 1],
        "bfloat16": [1, 1],
        "empty": [],
    }


def test_a_return_value_without_end_is_refused() -> None:
    def circle(context):
        items = []
        items.append(items)
        return items

    def huge(context):
        return torch.zeros(2**26 + 1)

    assert "nested more than 50 deep" in failure(circle, 1).title
    assert "larger than 256 MiB" in failure(huge, 1).title


# ----------------------------------------------------------------------------------------------------- deadlocks


def two_sends(context):
    tensor = torch.ones(1)
    dist.send(tensor, 1 - context.rank)
    dist.recv(tensor, 1 - context.rank)


def two_receives(context):
    dist.irecv(torch.ones(1), 1 - context.rank).wait()


def ring_of_sends(context):
    tensor = torch.ones(1)
    dist.send(tensor, (context.rank + 1) % context.world_size)
    dist.recv(tensor, (context.rank - 1) % context.world_size)


def forgotten_collective(context):
    if context.rank != 1:
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def last_collective_forgotten(context):
    if context.rank != 1:
        dist.all_reduce(torch.ones(1))


def different_collectives(context):
    tensor = torch.ones(4)
    dist.broadcast(tensor, 0) if context.rank == 0 else dist.all_reduce(tensor)
    dist.barrier()


def returned(context):
    if context.rank == 0:
        dist.recv(torch.ones(1), 1)


def wrong_peer(context):
    if context.rank == 0:
        dist.send(torch.ones(1), 1)
    if context.rank == 1:
        dist.recv(torch.ones(1), 2)
    if context.rank == 2:
        dist.recv(torch.ones(1), 0)


def wrong_tag(context):
    tensor = torch.ones(1)
    dist.send(tensor, 1, tag=3) if context.rank == 0 else dist.recv(tensor, 0, tag=4)


def group_not_made_by_all(context):
    if context.rank == 0:
        dist.new_group([0, 1])


def group_not_passed_on(context):
    context.group([1, 2])
    if context.rank:
        dist.all_reduce(torch.ones(1))


def on_a_thread(context):
    thread = threading.Thread(target=dist.recv, args=(torch.ones(1), 1 - context.rank))
    thread.start()
    thread.join()


DEADLOCKS = [
    (
        two_sends,
        2,
        ["waits in send to 1", "its 1st message", "dist.send(tensor, 1 - context.rank)"],
        "both send before",
    ),
    (two_receives, 2, ["waits in recv from 1", "dist.irecv("], "none has sent"),
    (ring_of_sends, 3, ["rank 2", "waits in send to 0"], "every rank sends before it receives"),
    (forgotten_collective, 3, ["rank 1: barrier (test_ranks.py:", "rank 0: all_reduce of 1 float32"], "same order"),
    (last_collective_forgotten, 3, ["has returned", "no further call"], "rank 1 returned without the call that rank 0"),
    (
        different_collectives,
        2,
        ["waits in broadcast from 0", "in collective call 1"],
        "the same calls in the same order",
    ),
    (returned, 2, ["waits in recv from 1", "has returned"], "never sends what rank 0 waits for"),
    (wrong_peer, 3, ["waits in recv from 2", "waits in send to 1"], "is the peer right?"),
    (wrong_tag, 2, ["dist.send(tensor, 1, tag=3)"], "the tags differ: rank 0 has 3"),
    (group_not_made_by_all, 2, ["waits in new_group", "dist.new_group([0, 1])"], "every rank must call new_group"),
    (group_not_passed_on, 3, ["waits in all_reduce"], "its group is [1, 2]: is `group` passed on?"),
    (on_a_thread, 2, ["waits in recv from 0"], "none has sent"),
]


@pytest.mark.parametrize(("fn", "world_size", "shown", "advice"), DEADLOCKS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_deadlock_is_told_with_its_reason(fn: Callable, world_size: int, shown: list[str], advice: str) -> None:
    with next_run_is_normal():
        found = failure(fn, world_size, stall=1.0)
        assert found.status == "deadlock"
        assert all(text in str(found) for text in shown), str(found)
        assert advice in found.fact("perhaps")


def test_a_deadlock_is_found_within_five_seconds() -> None:
    run(add_up, 1)  # the agent is there
    found = failure(two_sends, 2)
    assert found.title == "no rank could go on for 2.0 s"
    assert 2 < found.run.duration < 5


# ------------------------------------------------------------------------------------------------ no false deadlock


@pytest.mark.slow
def test_computing_and_sleeping_are_not_deadlocks() -> None:
    def body(context):
        tensor = torch.ones(1)
        for pause in (compute, lambda: time.sleep(3)):
            if context.rank == 0:
                pause()
                dist.send(tensor, 1)
                compute()
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0)
                compute()
                dist.send(tensor, 0)

    def compute():
        until = time.process_time() + 1.5
        while time.process_time() < until:
            pass

    assert run(body, 2, stall=1.0).outcome == "done"


@pytest.mark.slow
def test_a_busy_machine_is_not_a_deadlock() -> None:
    def body(context):
        tensor = torch.zeros(1)
        for _ in range(500):
            if context.rank:
                dist.recv(tensor, context.rank - 1)
            tensor += 1
            dist.send(tensor, (context.rank + 1) % context.world_size)
            if context.rank == 0:
                dist.recv(tensor, context.world_size - 1)
        return tensor.item()

    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        assert run(body, 4).values[0] == 2000
    finally:
        for process in busy:
            process.kill()
            process.wait()


# --------------------------------------------------------------------------------------------------- other endings


def endless_loop(context):
    while True:
        pass


def endless_sleep(context):
    time.sleep(1e6)


def endless_polling(context):
    work = dist.irecv(torch.ones(1), 1 - context.rank)
    while not work.is_completed():
        pass


def one_raises(context):
    if context.rank == 1:
        one_raises_here([1, 2])
    dist.barrier()


def one_raises_here(items):
    return items[7]


def not_implemented(context):
    raise NotImplementedError("not implemented yet")


def asks_what_torch_has_not(context):
    return torch.ones(1, device="meta").tolist()


def calls_sys_exit(context):
    if context.rank == 1:
        sys.exit(3)
    dist.barrier()


def calls_os_exit(context):
    if context.rank == 1:
        os._exit(0)
    dist.barrier()


def becomes_another_program(context):
    os.execv("/bin/true", ["true"])


def segmentation_fault(context):
    if context.rank == 1:
        ctypes.string_at(0)
    dist.barrier()


def kills_itself(context):
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def kills_the_other(context):
    if context.rank == 1:
        others = [p for p in psutil.Process(os.getppid()).children() if p.pid != os.getpid()]
        others[0].kill()
    dist.barrier()


def kills_the_agent(context):
    if context.rank == 1:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1e6)
        os.kill(os.getppid(), signal.SIGKILL)
    dist.barrier()


def one_large_tensor(context):
    torch.ones(2**33)


def many_objects(context):
    items = []
    while True:
        items.append(object())


def many_bytes(context):
    items = []
    while True:
        items.append(bytearray(1000))


def closes_stdout(context):
    sys.stdout.close()
    print("hello")


def closes_descriptor_1(context):
    os.close(1)
    print("hello")


def recursion(context):
    return recursion(context) + 1


class Silent(Exception):
    def __str__(self) -> str:
        raise SystemExit


def error_that_cannot_be_printed(context):
    raise Silent


def larger_than_the_receive(context):
    if context.rank == 0:
        dist.send(torch.ones(8), 1)
    else:
        dist.recv(torch.ones(4), 0)


def collectives_of_two_sizes(context):
    dist.all_reduce(torch.ones(4 + 4 * context.rank))
    dist.barrier()


def destroys_its_group(context):
    if context.rank == 0:
        dist.destroy_process_group()
        time.sleep(1e6)
    dist.recv(torch.ones(1), 0)


def not_contiguous(context):
    dist.send(torch.ones(3, 3).t(), 1 - context.rank)


def no_such_rank(context):
    dist.send(torch.ones(3), 7)


def to_itself(context):
    dist.send(torch.ones(3), context.rank)


SMALL = {"memory_limit": 2**28}
SHORT = {"timeout": 0.5}
ENDINGS = [
    (endless_loop, 1, "timeout", "the code was still running", {"your line": "test_ranks.py:"}, SHORT),
    (endless_sleep, 2, "timeout", "ranks were still running", {"rank 1": "time.sleep(1e6)"}, SHORT),
    (endless_polling, 2, "timeout", "ranks were still running", {}, SHORT),
    (
        one_raises, 3, "failed", "rank 1 raised IndexError: list index out of range",
        {"your line": "return items[7]", "called from": "one_raises_here([1, 2])"}, {},
    ),
    (not_implemented, 2, "not_implemented", "not implemented yet", {}, {}),
    (asks_what_torch_has_not, 1, "failed", "raised NotImplementedError: Cannot copy out of meta", {}, {}),
    (calls_sys_exit, 2, "failed", "rank 1 called sys.exit(3)", {"your line": "sys.exit(3)"}, {}),
    (calls_os_exit, 2, "crashed", "rank 1 ended its process (exit code 0)", {"perhaps": "return from the"}, {}),
    (becomes_another_program, 1, "crashed", "rank 0 ended its process (exit code 0)", {}, {}),
    (segmentation_fault, 2, "crashed", "rank 1 died: a crash in comp", {"your line": "ctypes.string_at(0)"}, {}),
    (kills_itself, 2, "crashed", "rank 1 died: killed (SIGKILL)", {}, {}),
    (kills_the_other, 2, "crashed", "rank 0 died: killed (SIGKILL)", {}, {}),
    (kills_the_agent, 2, "crashed", "the process that starts the ranks was ended", {"perhaps": "did not start"}, {}),
    (one_large_tensor, 1, "failed", "RuntimeError: DefaultCPUAllocator", {"perhaps": "more memory was asked"}, SMALL),
    (many_objects, 1, "failed", "the code raised MemoryError", {"perhaps": "more memory was asked"}, SMALL),
    (many_bytes, 1, "failed", "the code raised MemoryError", {"perhaps": "more memory was asked"}, SMALL),
    (closes_stdout, 1, "failed", "ValueError: I/O operation on closed file", {"your line": 'print("hello")'}, {}),
    (closes_descriptor_1, 1, "failed", "Bad file descriptor", {"your line": 'print("hello")'}, {}),
    (recursion, 1, "failed", "RecursionError", {"your line": "return recursion(context) + 1"}, {}),
    (error_that_cannot_be_printed, 1, "failed", "Silent: (its message could not be printed)", {}, {}),
    (
        larger_than_the_receive, 2, "crashed", "a message was larger than the tensor that was to receive it",
        {"your line": "dist.recv(torch.ones(4), 0)", "perhaps": "rank 0 sends 8 elements (test_ranks.py:"}, {},
    ),
    (
        collectives_of_two_sizes, 2, "crashed", "a message was larger than the tensor that was to receive it",
        {"perhaps": "rank 1: all_reduce of 8 float32"}, {},
    ),
    (destroys_its_group, 2, "failed", "rank 1 lost its connection", {"perhaps": "destroyed the process group"}, {}),
    (not_contiguous, 2, "failed", "has to be contiguous", {"perhaps": "t.contiguous()"}, {}),
    (no_such_rank, 2, "failed", "there is no rank 7 in a group of 2", {"your line": "dist.send("}, {}),
    (to_itself, 2, "failed", "Invalid destination rank", {"perhaps": "is copied, not sent"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "world_size", "status", "title", "facts", "settings"), ENDINGS, ids=[e[0].__name__ for e in ENDINGS]
)
def test_whatever_a_rank_does_ends_this_run_only(
    fn: Callable, world_size: int, status: str, title: str, facts: dict[str, str], settings: dict
) -> None:
    with next_run_is_normal():
        found = failure(fn, world_size, **settings)
        assert found.status == status, str(found)
        assert title in found.title
        for label, text in facts.items():
            assert text in (found.fact(label) or ""), str(found)
        assert "gloo/transport" not in str(found)


def test_a_lot_of_output_is_read_and_dropped() -> None:
    def body(context):
        line = "x" * (2**20 - 1)
        for _ in range(1024):
            print(line)
        return 5

    result = run(body, 1)
    assert result.values == [5]
    assert result.dropped == [2**30 - 64 * 1024]


def test_without_stdout_and_stderr_ranks_go_on() -> None:
    def body(context):
        os.close(1)
        os.close(2)
        dist.barrier()
        return context.rank

    assert run(body, 2).values == [0, 1]


def test_a_second_copy_of_a_rank_is_ended() -> None:
    def body(context):
        os.fork()
        return os.getpid()

    result = run(body, 1)
    assert result.outcome == "done"
    assert type(result.values[0]) is int


def test_a_call_of_a_forked_child_is_not_the_rank_s() -> None:
    def body(context):
        child = os.fork()
        if child == 0:
            context.case("in the child")
            os._exit(0)
        os.waitpid(child, 0)

    result = run(body, 1)
    assert result.events == []
    assert result.left == []


def leaves_a_thread(context):
    threading.Thread(target=time.sleep, args=(1e6,), name="mine").start()


def leaves_a_program(context):
    subprocess.Popen(["sleep", "98765"])


def leaves_a_daemon(context):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1e6)
        os._exit(0)


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (leaves_a_thread, "thread 'mine' of rank 0"),
        (leaves_a_program, "child process 'sleep 98765'"),
        (leaves_a_daemon, "child process made by os.fork or multiprocessing"),
    ],
)
def test_what_is_left_behind_is_told_and_ended(fn: Callable, left: str) -> None:
    with next_run_is_normal():
        assert left in run(fn, 1).left


def test_temporary_files_of_a_rank_go_with_it(own_temp: Path) -> None:
    def body(context):
        return tempfile.mkdtemp()

    assert run(body, 1).values[0].startswith(str(own_temp))


# ------------------------------------------------------------------------------------------------------ tampering
# Rank 0 waits until rank 1 has handed back its files, and then writes there what rank 1 would not.


class Evil:
    def __reduce__(self):
        return os.system, ("touch " + os.environ["EVIL"],)


def pickle_for_result(path: Path) -> None:
    path.write_bytes(pickle.dumps(Evil()))


def zipped_pickle_for_result(path: Path) -> None:
    torch.save(Evil(), path)


def symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sparse_file(path: Path) -> None:
    os.truncate(path, 10 * 2**30)


def nothing(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    path.chmod(0)


def huge_view(path: Path) -> None:
    torch.save(torch.zeros(1).expand(10**12), path)


def zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(12):
            archive.writestr(f"archive/data/{number}", bytes(2**25))


def odd_values(path: Path) -> None:
    torch.save({"sparse": torch.eye(2).to_sparse(), 3: 4}, path)


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00garbage\n" * 10)


def deep_json(path: Path) -> None:
    path.write_text("[" * 100_000)


def wrong_json(path: Path) -> None:
    path.write_text(json.dumps({"type": "E", "message": "m", "frames": 3, "left": 4}))


def wrong_event(path: Path) -> None:
    path.write_text(json.dumps(["end", 10**6, 0.0]) + "\n")


TAMPERING = [
    *[("result-1.pt", f) for f in (pickle_for_result, zipped_pickle_for_result, symlink, fifo, sparse_file, nothing)],
    *[("result-1.pt", f) for f in (folder, huge_view, zip_bomb, odd_values, garbage)],
    *[("outcome-1.json", f) for f in (symlink, fifo, sparse_file, deep_json, wrong_json, garbage)],
    *[("log-1.jsonl", f) for f in (symlink, fifo, sparse_file, garbage, deep_json, wrong_event)],
]


@pytest.mark.parametrize(("name", "write"), TAMPERING, ids=[f"{n}-{f.__name__}" for n, f in TAMPERING])
def test_files_that_a_rank_would_not_write_are_refused(
    name: str, write: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = tmp_path / "evil"
    monkeypatch.setenv("EVIL", str(evil))

    def body(context, evil):
        os.environ["EVIL"] = evil
        if context.rank == 0:
            log = next(p for p in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if p.endswith("log-0.jsonl"))
            path = Path(log).parent / name
            while not (path.parent / "outcome-1.json").exists():
                time.sleep(0.01)
            time.sleep(0.05)
            write(path)

    found = failure(body, 2, str(evil))
    assert found.status == "crashed"
    assert found.title == "what a rank handed back is not readable"
    assert name.split("-")[0] in found.fact("found")
    assert not evil.exists()


def test_a_folder_that_was_locked_is_removed_all_the_same() -> None:
    def body(context):
        folder = Path(tempfile.gettempdir())
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        (folder / "inner").chmod(0)
        (folder / "elsewhere").symlink_to("/etc")
        folder.chmod(0o100)

    run(body, 1, check=False)


# --------------------------------------------------------------------------------------------- the driver goes away

DRIVER = """
import os, sys, tempfile, time
from pathlib import Path
from autograder.lab import ranks

def body(context, folder):
    Path(folder, f"pid-{context.rank}").write_text(str(os.getpid()))
    time.sleep(1e6)

tempfile.tempdir = sys.argv[2]
ranks.run(body, 2, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_without_the_driver_everything_ends(number: signal.Signals, tmp_path: Path) -> None:
    temp = tmp_path / "driver's"
    temp.mkdir()
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(
        [sys.executable, script, tmp_path, temp], stderr=subprocess.PIPE, text=True, env=os.environ | path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in a shell's background ignore it
    )  # fmt: skip
    files = [tmp_path / f"pid-{r}" for r in range(2)]
    wait_for(lambda: all(f.exists() and f.read_text() for f in files) or driver.poll() is not None)
    driver.send_signal(number)
    errors = driver.communicate(timeout=180)[1]  # returns when the agent, which has the same stderr, has ended too
    wait_for(lambda: not any(psutil.pid_exists(int(f.read_text())) for f in files))
    wait_for(lambda: not list(temp.iterdir()))
    assert driver.returncode == -number
    assert "BrokenPipe" not in errors


def wait_for(condition: Callable[[], bool], seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_agent_that_cannot_start_is_nobody_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.agent_client.stop()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        found = failure(add_up, 1)
    assert isinstance(found, Finding)
    assert found.status == "infrastructure"
