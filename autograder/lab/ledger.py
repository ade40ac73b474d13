"""The ledger: every message and collective of every rank, with bytes, peers, order and the line that asked for it.

The `recorder` in each rank writes it; here, in the driver, it is read: `read_log` makes `Event`s of a log, and
`match_messages` and `rounds` say how they belong together.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

MARKS = ("span", "case")


@dataclass
class Event:
    """One operator that one rank issued, or one mark that a check set.

    Times are seconds since the run began, on one clock for all ranks. They are for pictures: what came first is told by
    `index` and the `order` numbers, never by time.
    """

    rank: int
    index: int
    op: str  # "send", "recv", "all_reduce", ..., "new_group"; "span" and "case" for marks
    api: str  # what the caller called: "isend", "batch_isend_irecv", "all_gather_object", ...; a mark's text
    nbytes: int  # of the full, unsharded tensor
    numel: int
    dtype: str
    group: tuple[int, ...]  # global ranks
    peer: int | None  # global rank of the other end, or of the root
    is_async: bool
    sent: int  # bytes this rank sent: the message itself, or its share under the ring algorithm
    tag: int
    where: str  # "collectives.py:88"
    code: str  # that line
    start: float
    order: int  # position in the rank's log: which of two moments of one rank came first
    end: float | None = None  # the operator returned (its work may go on)
    wait: float | None = None  # the rank began to wait for its work
    wait_order: int | None = None
    done: float | None = None  # that wait, or a mark's span, ended
    done_order: int | None = None
    via: tuple[str, ...] = ()  # the caller's own lines that led there, innermost first
    changed: bool = False  # what was sent had other values when it was waited for
    refused: str | None = None  # why it is not allowed: it was not carried out
    raised: bool = False  # the call ended with an error

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def is_collective(self) -> bool:
        return not self.is_message and self.op not in ("new_group", *MARKS)

    @property
    def is_open(self) -> bool:
        """Issued and neither returned nor waited for to the end: what a blocked rank is blocked in."""
        return self.end is None or (self.wait is not None and self.done is None)

    @property
    def line(self) -> str:
        """The caller's line as it is shown, after the own lines that led there; "" where it is not known."""
        return "\n".join([*reversed(self.via), f"{self.where}   {self.code}".rstrip()]) if self.where else ""

    def __str__(self) -> str:
        if self.op == "send":
            return f"send to {self.peer}"
        if self.op == "recv":
            return f"recv from {'any rank' if self.peer is None else self.peer}"
        if self.op in ("broadcast", "scatter"):
            return f"{self.op} from {self.peer}"
        if self.op in ("reduce", "gather"):
            return f"{self.op} to {self.peer}"
        return self.op


def read_log(log: str, rank: int) -> list[Event]:
    """The events of one rank. The log was written in a process that ran student code, so nothing in it is trusted.

    Raises:
        ValueError: a line is not what `Log` writes.
    """
    events: dict[int, Event] = {}
    for order, line in enumerate(log.splitlines()):
        try:
            kind, index, *rest = json.loads(line)
            if kind == "op":
                op, api, nbytes, numel, dtype, group, peer, is_async, sent, tag, where, code, start = rest
                events[int(index)] = Event(
                    rank, int(index), str(op), str(api), int(nbytes), int(numel), str(dtype),
                    tuple(int(r) for r in group), None if peer is None else int(peer), bool(is_async), int(sent),
                    int(tag), str(where), str(code), float(start), order,
                )  # fmt: skip
            elif kind in MARKS:
                text, now = str(rest[0]), float(rest[1])
                events[int(index)] = Event(
                    rank, int(index), kind, text, 0, 0, "", (), None, False, 0, 0, "", "", now, order, now
                )  # fmt: skip
            elif kind == "end":
                events[int(index)].end = float(rest[0])
            elif kind == "wait":
                events[int(index)].wait, events[int(index)].wait_order = float(rest[0]), order
            elif kind == "done":
                events[int(index)].done, events[int(index)].done_order = float(rest[0]), order
            elif kind == "via":
                events[int(index)].via = tuple(str(line) for line in rest[0])
            elif kind == "changed":
                events[int(index)].changed = True
            elif kind == "raised":
                events[int(index)].raised, events[int(index)].end = True, float(rest[0])
            elif kind == "forbidden":
                events[int(index)].refused = str(rest[0])
            else:
                raise ValueError(kind)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
            raise ValueError(f"line {order + 1} of the log of rank {rank} is not a log line: {error}") from None
    return [events[index] for index in sorted(events)]


def match_messages(events: Iterable[Event]) -> tuple[list[tuple[Event, Event]], list[Event]]:
    """Pairs each send with its receive: per (from, to, group, tag) in order, as gloo and NCCL do.

    Returns:
        The pairs, and the sends and receives that have no other end.
    """
    sends: dict[tuple, list[Event]] = defaultdict(list)
    recvs: dict[tuple, list[Event]] = defaultdict(list)
    anys: list[Event] = []
    for e in events:
        if e.op == "send":
            sends[(e.rank, e.peer, e.group, e.tag)].append(e)
        elif e.op == "recv" and e.peer is None:
            anys.append(e)
        elif e.op == "recv":
            recvs[(e.peer, e.rank, e.group, e.tag)].append(e)
    pairs, alone = [], []
    for key in sends.keys() | recvs.keys():
        s, r = sends[key], recvs[key]
        pairs += zip(s, r, strict=False)
        alone += s[len(r) :] + r[len(s) :]
    for e in anys:  # a receive from any source takes a send that nobody else takes
        taker = next((s for s in alone if s.op == "send" and s.peer == e.rank and s.group == e.group), None)
        if taker:
            alone.remove(taker)
            pairs.append((taker, e))
        else:
            alone.append(e)
    order = lambda e: (e.rank, e.index)  # noqa: E731
    return sorted(pairs, key=lambda pair: order(pair[0])), sorted(alone, key=order)


def rounds(events: Iterable[Event]) -> int:
    """Length of the longest path of messages, in rounds.

    In one round a rank can send one message and receive one (both at once). A message leaves when its sender has
    reached it in program order, so messages that are posted together still leave one a round. This is the number that
    T = rounds * (alpha + bytes / bandwidth) counts.
    """
    events = [e for e in events if e.is_message and not e.raised]
    receive_of = {id(s): r for s, r in match_messages(events)[0]}
    send_of = {id(r): s for s, r in match_messages(events)[0]}
    # Each rank's program: it posts a message, and at some later point (at once, if the call blocks) has waited for it.
    program: dict[int, list[tuple[int, str, Event]]] = defaultdict(list)
    for e in events:
        program[e.rank].append((e.order, "post", e))
        if e.done_order is not None:
            program[e.rank].append((e.done_order, "wait", e))
    for steps in program.values():
        steps.sort(key=lambda step: step[0])
    clock = dict.fromkeys(program, 0)
    send_port, recv_port = dict.fromkeys(program, 0), dict.fromkeys(program, 0)
    arrival: dict[int, int] = {}  # id of a send -> round after which its message has arrived
    finish: dict[int, int] = {}  # id of an event -> round after which it is complete
    posted: dict[int, int] = {}

    def settle(recv: Event) -> None:
        send = send_of.get(id(recv))
        if send is not None and id(send) in arrival and id(recv) in posted and id(recv) not in finish:
            port = recv_port[recv.rank] = max(posted[id(recv)], recv_port[recv.rank]) + 1
            finish[id(recv)] = max(port, arrival[id(send)])
            recv_port[recv.rank] = finish[id(recv)]

    moved = True
    while moved:
        moved = False
        for rank, steps in program.items():
            while steps:
                _, what, e = steps[0]
                if what == "post" and e.op == "send":
                    send_port[rank] = max(clock[rank], send_port[rank]) + 1
                    arrival[id(e)] = finish[id(e)] = send_port[rank]
                    if id(e) in receive_of:
                        settle(receive_of[id(e)])
                elif what == "post":
                    posted[id(e)] = clock[rank]
                    settle(e)
                elif id(e) in finish:
                    clock[rank] = max(clock[rank], finish[id(e)])
                elif id(e) in send_of:
                    break  # waits for a message whose sender has not got there yet
                steps.pop(0)
                moved = True
    return max(finish.values(), default=0)
