"""The ledger: each operator under any name, with its bytes, peers and lines; and what is computed from it."""

import contextlib
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from torch.distributed import all_reduce as renamed
from torch.nn.parallel import DistributedDataParallel

from autograder.lab import diagnosis, ledger, ranks, recorder
from autograder.lab.ledger import Event
from autograder.lab.ranks import Only, Run, RunFailed

HERE = [str(Path(__file__).parent)]
P = 3  # ranks; each tensor of a case is N float32
N = 4
S = 4 * N  # bytes of such a tensor


def run(fn: Callable, world_size: int, *args: object, **settings: object) -> Run:
    return ranks.run(fn, world_size, *args, roots=HERE, **settings)


def one(n: int = N) -> torch.Tensor:
    return torch.ones(n)


def each(n: int = N) -> list[torch.Tensor]:
    return [torch.ones(n) for _ in range(P)]


# ------------------------------------------------------------------------------------------------ every collective
# What rank 1 of 3 records: (call, [(op, bytes of the full tensor, bytes sent, peer, async)]).

ALL_REDUCE = [("all_reduce", S, round(2 * (P - 1) / P * S), None, False)]
ALL_GATHER = [("all_gather", P * S, (P - 1) * S, None, False)]
REDUCE_SCATTER = [("reduce_scatter", P * S, (P - 1) * S, None, False)]
ALL_TO_ALL = [("all_to_all", P * S, (P - 1) * S, None, False)]


def asynchronous(events: list[tuple]) -> list[tuple]:
    return [(*event[:-1], True) for event in events]


def coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(one())
        dist.all_reduce(one(N))


def uneven(rank: int) -> None:
    dist.all_to_all_single(torch.ones(P * (rank + 1), 2), torch.ones(6, 2), [rank + 1] * P, [1, 2, 3])


CASES: dict[str, tuple[Callable, list[tuple] | None]] = {
    "all_reduce": (lambda r: dist.all_reduce(one()), ALL_REDUCE),
    "all_reduce_async": (lambda r: dist.all_reduce(one(), async_op=True).wait(), asynchronous(ALL_REDUCE)),
    "all_reduce_coalesced": (
        lambda r: dist.all_reduce_coalesced([one(), one(2)]),
        [("all_reduce", S + 8, 32, None, False)],
    ),
    "coalescing": (lambda r: coalesced(), [("all_reduce", 2 * S, round(4 / 3 * 2 * S), None, False)]),
    "broadcast": (lambda r: dist.broadcast(one(), 1), [("broadcast", S, S, 1, False)]),
    "reduce": (lambda r: dist.reduce(one(), 2), [("reduce", S, S, 2, False)]),
    "scatter from me": (
        lambda r: dist.scatter(one(), each() if r == 1 else None, 1),
        [("scatter", P * S, (P - 1) * S, 1, False)],
    ),
    "scatter from 0": (
        lambda r: dist.scatter(one(), each() if r == 0 else None, 0),
        [("scatter", P * S, 0, 0, False)],
    ),
    "gather to me": (lambda r: dist.gather(one(), each() if r == 1 else None, 1), [("gather", P * S, 0, 1, False)]),
    "gather to 2": (lambda r: dist.gather(one(), each() if r == 2 else None, 2), [("gather", P * S, S, 2, False)]),
    "all_gather": (lambda r: dist.all_gather(each(), one()), ALL_GATHER),
    "all_gather_into_tensor": (lambda r: dist.all_gather_into_tensor(one(P * N), one()), ALL_GATHER),
    "all_gather_single": (lambda r: single("all_gather")(one(P * N), one()), ALL_GATHER),
    "_all_gather_base": (lambda r: dist._all_gather_base(one(P * N), one()), ALL_GATHER),
    "all_gather_coalesced": (lambda r: dist.all_gather_coalesced([[one()] for _ in range(P)], [one()]), ALL_GATHER),
    "reduce_scatter": (lambda r: dist.reduce_scatter(one(), each()), REDUCE_SCATTER),
    "reduce_scatter_tensor": (lambda r: dist.reduce_scatter_tensor(one(), one(P * N)), REDUCE_SCATTER),
    "reduce_scatter_single": (lambda r: single("reduce_scatter")(one(), one(P * N)), REDUCE_SCATTER),
    "_reduce_scatter_base": (lambda r: dist._reduce_scatter_base(one(), one(P * N)), REDUCE_SCATTER),
    "all_to_all": (lambda r: dist.all_to_all(each(), each()), ALL_TO_ALL),
    "all_to_all_single": (lambda r: dist.all_to_all_single(one(P * N), one(P * N)), ALL_TO_ALL),
    "all_to_all_single uneven": (uneven, [("all_to_all", 48, 48 - 2 * 8, None, False)]),
    "barrier": (lambda r: dist.barrier(), [("barrier", 0, 0, None, False)]),
    "monitored_barrier": (lambda r: dist.monitored_barrier(), [("barrier", 0, 0, None, False)]),
    "all_gather_object": (lambda r: dist.all_gather_object([None] * P, r), ["all_gather", "all_gather"]),
    "gather_object": (lambda r: dist.gather_object(r, [None] * P if r == 0 else None), ["all_gather", "gather"]),
    "broadcast_object_list": (lambda r: dist.broadcast_object_list([r]), ["broadcast", "broadcast"]),
    "scatter_object_list": (lambda r: dist.scatter_object_list([None], [1, 2, 3]), ["broadcast", "scatter", "scatter"]),
    "functional all_reduce": (lambda r: functional.all_reduce(one(), "sum", WORLD()) + 1, asynchronous(ALL_REDUCE)),
    "functional all_gather": (
        lambda r: functional.all_gather_tensor(one(), 0, WORLD()) + 1,
        asynchronous(ALL_GATHER),
    ),
    "functional reduce_scatter": (
        lambda r: functional.reduce_scatter_tensor(one(P * N), "sum", 0, WORLD()) + 1,
        asynchronous(REDUCE_SCATTER),
    ),
    "functional all_to_all": (
        lambda r: functional.all_to_all_single(one(P * N), None, None, WORLD()) + 1,
        asynchronous(ALL_TO_ALL),
    ),
    "functional broadcast": (
        lambda r: functional.broadcast(one(), 1, WORLD()) + 1,
        asynchronous([("broadcast", S, S, 1, False)]),
    ),
    "method of the group": (lambda r: dist.group.WORLD.allreduce([one()]).wait(), asynchronous(ALL_REDUCE)),
    "another name": (lambda r: renamed(one()), ALL_REDUCE),
    "the module's own": (lambda r: c10d.all_reduce(one()), ALL_REDUCE),
    "on a thread": (lambda r: on_thread(lambda: dist.all_reduce(one())), ALL_REDUCE),
}


def single(name: str) -> Callable:
    """`all_gather_single` of torch 2.13, which was `all_gather_into_tensor` before."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
    return getattr(dist, f"{name}_single", getattr(dist, old))


def WORLD() -> dist.ProcessGroup:  # noqa: N802
    return dist.group.WORLD


def on_thread(work: Callable) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture(scope="module")
def all_cases() -> Run:
    def body(context, cases):
        warnings.simplefilter("ignore")
        for name, call in cases.items():
            context.case(name)
            call(context.rank)

    return run(body, P, {name: call for name, (call, _) in CASES.items()}, timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_collective(all_cases: Run, name: str) -> None:
    expected = CASES[name][1]
    events = [e for e in all_cases.in_case(list(CASES).index(name)) if e.rank == 1]
    assert [e.op for e in events] == [x if isinstance(x, str) else x[0] for x in expected]
    for event, wanted in zip(events, expected, strict=True):
        assert event.group == (0, 1, 2)
        assert event.where.startswith("test_ledger.py:")
        assert event.code
        assert event.end is not None
        if not isinstance(wanted, str):
            assert (event.op, event.nbytes, event.sent, event.peer, event.is_async) == wanted
        if event.op != "barrier":
            assert event.numel * (event.nbytes // event.numel) == event.nbytes
            assert event.dtype in ("float32", "int64", "uint8")
            assert event.done is not None
    assert not [e for e in all_cases.unwaited() if e in events]


def test_each_collective_of_torch_is_covered() -> None:
    """A new release of PyTorch may bring new names; each must be in the list above, or be known not to matter."""
    words = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "barrier")
    names = {n for n in c10d.__all__ if any(w in n for w in words) and n.islower() and n != "reduce_op"}
    assert names <= {n.split()[0] for n in CASES}


def test_ddp_is_seen() -> None:
    def body(context):
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        context.case("backward")
        model(torch.ones(2, 3)).sum().backward()

    result = run(body, 2)
    (event,) = [e for e in result.in_case(0) if e.rank == 0]
    assert (event.op, event.nbytes, event.sent) == ("all_reduce", 12 * 4, 12 * 4)
    assert event.code == "model(torch.ones(2, 3)).sum().backward()"


@pytest.mark.slow
def test_fully_shard_and_dtensor_are_seen() -> None:
    def body(context):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (context.world_size,))
        model = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=mesh)
        context.case("fully_shard")
        model(torch.ones(2, 4)).sum().backward()
        context.case("DTensor")
        sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        sharded.redistribute(mesh, [Replicate()]).to_local()

    result = run(body, 2, timeout=60)
    sharded = [(e.op, e.nbytes, e.sent) for e in result.in_case(0) if e.rank == 0]
    assert sharded == [("all_gather", 64, 32), ("reduce_scatter", 64, 32)]
    dtensor = [(e.op, e.nbytes, e.done is not None) for e in result.in_case(1) if e.rank == 0]
    assert dtensor == [("scatter", 64, True), ("all_gather", 64, True)]


def test_a_collective_of_an_autograd_hook_has_the_hook_s_line() -> None:
    def body(context):
        weight = torch.ones(3, requires_grad=True)
        weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        (weight * 2).sum().backward()

    (event,) = run(body, 2).of(0)
    assert event.op == "all_reduce"
    assert "lambda p: dist.all_reduce(p.grad)" in event.code


# -------------------------------------------------------------------------------------------------------- messages


def batch(*ops: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv(list(ops)):
        work.wait()


def test_messages_by_every_api() -> None:
    def body(context):
        group = context.group([1, 3])
        other = 4 - context.rank
        if group is None:
            return
        apis = [
            lambda send, t: dist.send(t, other, group) if send else dist.recv(t, other, group),
            lambda send, t: (dist.isend(t, other, group) if send else dist.irecv(t, other, group)).wait(),
            lambda send, t: [
                w.wait()
                for w in dist.batch_isend_irecv([dist.P2POp(dist.isend if send else dist.irecv, t, other, group)])
            ],
            lambda send, t: (
                dist.send(t, group=group, group_dst=context.rank == 1, tag=7)
                if send
                else dist.recv(t, group=group, group_src=int(context.rank == 1), tag=7)
            ),
        ]
        for call in apis:
            call(context.rank == 1, torch.ones(5, dtype=torch.int16))

    result = run(body, 4)
    found = [[(e.op, e.api, e.peer, e.is_async, e.tag) for e in result.of(r, "send", "recv")] for r in (1, 3)]
    apis = [("", False, 0), ("i", True, 0), ("batch", True, 0), ("", False, 7)]
    for rank, op in ((0, "send"), (1, "recv")):
        peer = (3, 1)[rank]
        names = [op if kind == "" else "i" + op if kind == "i" else "batch_isend_irecv" for kind, _, _ in apis]
        assert found[rank] == [(op, n, peer, a, tag) for n, (_, a, tag) in zip(names, apis, strict=True)]
    for event in result.of(1, "send"):
        assert (event.nbytes, event.sent, event.numel, event.dtype, event.group) == (10, 10, 5, "int16", (1, 3))
    assert all(e.sent == 0 for e in result.of(3))
    pairs, alone = ledger.match_messages(result.events)
    assert len(pairs) == 4
    assert alone == []


def test_a_receive_from_any_rank_takes_the_message_nobody_else_takes() -> None:
    def body(context):
        if context.rank:
            dist.send(torch.ones(1), 0)
        else:
            dist.recv(torch.ones(1))
            dist.recv(torch.ones(1))

    result = run(body, 3)
    assert [str(e) for e in result.of(0)] == ["recv from any rank"] * 2
    pairs, alone = ledger.match_messages(result.events)
    assert sorted(send.rank for send, _ in pairs) == [1, 2]
    assert alone == []


def test_waits() -> None:
    def body(context):
        def message():
            return dist.isend(one(), 1) if context.rank == 0 else dist.irecv(one(), 0)

        message().wait()
        work = dist.all_reduce(one(), async_op=True)
        while not work.is_completed():
            pass
        kept = message()
        dist.all_reduce(one(), async_op=True).get_future().wait()
        dist.all_reduce(one())
        dist.barrier()
        return kept is not None

    result = run(body, 2)
    first, polled, never, future, blocking, barrier = result.of(0)
    assert first.wait_order < first.done_order < polled.order < polled.done_order < never.order
    assert (never.wait, never.done) == (None, None)
    assert future.is_async
    assert future.done_order < blocking.order < barrier.order
    assert not blocking.is_async
    assert blocking.done is not None
    assert [e.index for e in result.unwaited()] == [never.index] * 2


def test_a_tensor_that_is_used_before_its_message_was_waited_for() -> None:
    def body(context):
        other, both = 1 - context.rank, torch.zeros(2 * N)
        sending, receiving = dist.isend(one(), other), dist.irecv(both[:N], other)
        both[N:].add_(1)  # the other half
        torch.empty_like(both)
        both[:N].view(2, 2)
        torch.empty(0).set_(both)
        torch.nn.Parameter(torch.empty(0)).data = both
        used = both[:N] + 1  # early
        receiving.wait()
        sending.wait()
        mean = one()
        work = dist.all_reduce(mean, async_op=True)
        mean /= 2  # early
        work.wait()
        root = one()
        work = dist.broadcast(root, 0, async_op=True)
        root.sum()  # early, but on rank 0 nothing arrives
        work.wait()
        return used

    result = run(body, 2)
    early = [[event.early.partition("   ")[2] for event in result.of(rank)] for rank in (0, 1)]
    assert early[0] == ["", "used = both[:N] + 1  # early", "mean /= 2  # early", ""]
    assert early[1] == [*early[0][:3], "root.sum()  # early, but on rank 0 nothing arrives"]


def test_a_call_that_raised_is_neither_sent_nor_under_way() -> None:
    def body(context):
        if context.rank == 0:
            with contextlib.suppress(RuntimeError):
                dist.isend(torch.ones(8)[::2], 1)  # gloo refuses it
            dist.send(one(), 1)
        else:
            dist.recv(one(), 0)

    result = run(body, 2)
    refused, sent = result.of(0, "send")
    assert (refused.raised, refused.is_open, sent.raised) == (True, False, False)
    assert result.sent(0) == S
    assert result.unwaited() == []
    assert ledger.rounds(result.events) == 1


def test_a_call_in_a_thread_without_own_lines_has_the_line_that_started_it() -> None:
    def body(context):
        thread = threading.Thread(target=dist.all_reduce, args=(one(),))
        thread.start()
        thread.join()

    for event in run(body, 2).events:
        assert event.code == "thread.start()"


def test_spans_and_cases_are_in_the_order_of_events() -> None:
    def body(context):
        context.case("first")
        with context.span("forward"):
            dist.barrier()
        context.case("second")
        dist.barrier()
        dist.barrier()

    result = run(body, 2)
    assert [e.op for e in result.of(0)] == ["case", "span", "barrier", "case", "barrier", "barrier"]
    span, barrier = result.of(0, "span", "barrier")[:2]
    assert span.order < barrier.order < barrier.done_order < span.done_order
    assert [(e.rank, e.op) for e in result.in_case(1)] == [(r, "barrier") for r in (0, 0, 1, 1)]


def test_too_many_calls_are_an_error() -> None:
    def body(context):
        while True:
            dist.barrier()

    assert recorder.MAX_EVENTS == 100_000

    def limited(context):
        recorder.MAX_EVENTS = 10
        body(context)

    with pytest.raises(RunFailed) as caught:
        run(limited, 1)
    assert "more than 10 messages and collectives in one run" in caught.value.title


# ----------------------------------------------------------------------------------------- what is computed from it


def message_pairs(body: Callable, world_size: int) -> int:
    return ledger.rounds(run(body, world_size).events)


def chain(context):
    if context.rank:
        dist.recv(one(), context.rank - 1)
    if context.rank < context.world_size - 1:
        dist.send(one(), context.rank + 1)


def star(context):
    if context.rank:
        dist.recv(one(), 0)
    else:
        for to in range(1, context.world_size):
            dist.send(one(), to)


def star_at_once(context):
    if context.rank:
        dist.recv(one(), 0)
    else:
        for work in [dist.isend(one(), to) for to in range(1, context.world_size)]:
            work.wait()


def star_inwards(context):
    if context.rank:
        dist.send(one(), 0)
    else:
        for work in [dist.irecv(one(), source) for source in range(1, context.world_size)]:
            work.wait()


def binomial(context):
    reach = 1
    while reach < context.world_size:
        if context.rank < reach and context.rank + reach < context.world_size:
            dist.send(one(), context.rank + reach)
        elif reach <= context.rank < 2 * reach:
            dist.recv(one(), context.rank - reach)
        reach *= 2


def exchange(context):
    works = [dist.isend(one(), context.rank ^ 1), dist.irecv(one(), context.rank ^ 1)]
    for work in works:
        work.wait()


def one_after_the_other(context):
    if context.rank == 0:
        dist.send(one(), 1)
        dist.recv(one(), 1)
    else:
        dist.recv(one(), 0)
        dist.send(one(), 0)


def ring(context):
    p = context.world_size
    for _ in range(p - 1):
        works = [dist.isend(one(), (context.rank + 1) % p), dist.irecv(one(), (context.rank - 1) % p)]
        for work in works:
            work.wait()


@pytest.mark.parametrize(
    ("body", "world_size", "rounds"),
    [
        (chain, 5, 4),
        (star, 5, 4),
        (star_at_once, 5, 4),
        (star_inwards, 5, 4),
        (binomial, 8, 3),
        (binomial, 5, 3),
        (exchange, 2, 1),
        (exchange, 4, 1),
        (one_after_the_other, 2, 2),
        (ring, 4, 3),
    ],
)
def test_rounds(body: Callable, world_size: int, rounds: int) -> None:
    assert message_pairs(body, world_size) == rounds


def test_no_messages_are_no_rounds() -> None:
    assert ledger.rounds([]) == 0


def event(rank: int, index: int, op: str, **fields: object) -> Event:
    values = {
        "api": op, "nbytes": S, "numel": N, "dtype": "float32", "group": (0, 1, 2), "peer": None, "is_async": False,
        "sent": 0, "tag": 0, "where": f"a.py:{index + 1}", "code": "", "start": 0.0, "order": 2 * index, "end": 0.0,
    }  # fmt: skip
    return Event(rank, index, op, **(values | fields))


def test_messages_match_in_order_by_peer_group_and_tag() -> None:
    events = [
        event(0, 0, "send", peer=1, numel=1),
        event(0, 1, "send", peer=1, numel=2),
        event(0, 2, "send", peer=1, tag=5, numel=3),
        event(0, 3, "send", peer=1, group=(0, 1), numel=4),
        event(1, 0, "recv", peer=0, tag=5, numel=3),
        event(1, 1, "recv", peer=0, group=(0, 1), numel=4),
        event(1, 2, "recv", peer=0, numel=1),
        event(1, 3, "recv", peer=2, numel=9),
    ]
    pairs, alone = ledger.match_messages(events)
    assert [(s.numel, r.numel) for s, r in pairs] == [(1, 1), (3, 3), (4, 4)]
    assert [e.numel for e in alone] == [2, 9]


def test_first_difference_of_the_collective_calls() -> None:
    same = [event(r, 0, "all_reduce") for r in range(3)]
    assert diagnosis.first_difference(same) is None
    assert diagnosis.first_difference([*same, event(1, 1, "barrier", dtype="")]) == (
        "in collective call 2:\nrank 0: no further call\nrank 1: barrier (a.py:2)\nrank 2: no further call"
    )
    sizes = [event(r, 0, "all_reduce", numel=4 + r // 2) for r in range(3)]
    assert "rank 2: all_reduce of 5 float32 (a.py:1)" in diagnosis.first_difference(sizes)
    roots = [event(r, 0, "broadcast", peer=r // 2) for r in range(3)]
    assert "rank 2: broadcast from 1" in diagnosis.first_difference(roots)
    uneven = [event(r, 0, "all_to_all", numel=r) for r in range(3)]
    assert diagnosis.first_difference(uneven) is None


def test_calls_in_different_groups_are_no_difference() -> None:
    rows = [event(r, 0, "all_reduce", group=(0, 1)) for r in (0, 1)] + [
        event(r, 0, "all_gather", group=(2, 3)) for r in (2, 3)
    ]
    columns = [event(r, 1, "barrier", group=(0, 2)) for r in (0, 2)]
    assert diagnosis.first_difference(rows + columns) is None
    assert diagnosis.first_difference([*rows, *columns[:1]]).startswith("in collective call 1 of group [0, 2]:")


def test_ends_of_different_sizes_are_told() -> None:
    events = [event(0, 0, "send", peer=1), event(1, 0, "recv", peer=0, nbytes=8, numel=2)]
    assert diagnosis.mismatch(events) == "rank 0 sends 4 elements (a.py:1), rank 1 receives 2 elements (a.py:1)"
    events = [event(0, 0, "send", peer=1), event(1, 0, "recv", peer=0, nbytes=32, dtype="float64")]
    assert diagnosis.mismatch(events) == "rank 0 sends 4 float32 (a.py:1), rank 1 receives 4 float64 (a.py:1)"
    assert diagnosis.mismatch([event(0, 0, "all_reduce"), *[event(r, 0, "barrier") for r in (1, 2)]]) is not None
    assert diagnosis.mismatch([event(0, 0, "all_reduce")]) is None


OP = ["op", 0, "send", "send", 4, 1, "float32", [0, 1], 1, False, 4, 0, "a.py:1", "", 0.5]


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "[]",
        "{}",
        "3",
        "null",
        '"op"',
        '["op"]',
        '["unknown", 0]',
        '["end", 7, 0.0]',
        '["end", 0]',
        '["end", 0, "soon"]',
        '["end", 0, 1e999, 2]' * 2,
        "[" * 100_000,
        json.dumps(OP[:-1]),
        json.dumps(["op", "x", *OP[2:]]),
        json.dumps([*OP[:7], 5, *OP[8:]]),
        json.dumps(["op", float("inf"), *OP[2:]]),
        "[" + "9" * 10_000 + "]",
    ],
)
def test_a_log_of_garbage_is_a_value_error(line: str) -> None:
    assert ledger.read_log("", 0) == []
    assert len(ledger.read_log(json.dumps(OP) + "\n", 0)) == 1
    with pytest.raises(ValueError, match="line 2 of the log of rank 0 is not a log line"):
        ledger.read_log(json.dumps(OP) + "\n" + line + "\n", 0)


# --------------------------------------------------------------------------------------------------------- refusal

ONLY_MESSAGES = Only(frozenset({"send", "recv"}), "build it from messages")


def through_the_group(context):
    dist.group.WORLD.allreduce([one()]).wait()


def through_functional(context):
    functional.all_reduce(one(), "sum", dist.group.WORLD)


def through_torch_ops(context):
    import torch

    torch.ops._c10d_functional.all_reduce(one(), "sum", dist.group.WORLD.group_name)


def through_a_thread(context):
    on_thread(lambda: dist.all_reduce(one()))


def through_ddp(context):
    DistributedDataParallel(torch.nn.Linear(2, 2))


def through_an_object(context):
    dist.all_gather_object([None] * context.world_size, 3)


REFUSED = [
    (lambda context: dist.all_reduce(one()), "all_reduce"),
    (lambda context: renamed(one()), "all_reduce"),
    (lambda context: c10d.all_reduce(one()), "all_reduce"),
    (through_the_group, "all_reduce"),
    (through_functional, "all_reduce"),
    (through_torch_ops, "all_reduce"),
    (through_a_thread, "all_reduce"),
    (through_ddp, "_verify_param_shape_across_processes"),
    (through_an_object, "all_gather_object"),
]


@pytest.mark.parametrize(("call", "name"), REFUSED)
@pytest.mark.parametrize("swallow", [False, True])
def test_a_refused_operator_is_reported_under_any_name(call: Callable, name: str, swallow: bool) -> None:
    def body(context, swallow):
        try:
            call(context)
        except BaseException:
            if not swallow:
                raise
        return 1

    with pytest.raises(RunFailed) as caught:
        run(body, 2, swallow, refuse=ONLY_MESSAGES)
    assert caught.value.status == "forbidden"
    assert caught.value.title == f"{name} is refused here: build it from messages"
    assert caught.value.fact("your line").startswith("test_ledger.py:")
    assert [e.refused for e in caught.value.run.events if e.refused]


def test_a_swallowed_refusal_counts_also_where_the_run_then_hangs() -> None:
    def body(context):
        if context.rank == 0:
            with contextlib.suppress(Exception):
                dist.all_reduce(one())
        dist.recv(one(), 1 - context.rank)

    with pytest.raises(RunFailed) as caught:
        run(body, 2, refuse=ONLY_MESSAGES, stall=0.5)
    assert caught.value.status == "forbidden"


def test_what_is_allowed_is_not_refused() -> None:
    def body(context):
        context.group([0, 1])
        exchange(context)

    assert run(body, 2, refuse=ONLY_MESSAGES).outcome == "done"
