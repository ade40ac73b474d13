"""Why a run failed, in a student's words: from the events and errors of a `Run` to a status, a title and facts."""

import dataclasses
import linecache
import re
from itertools import zip_longest

from autograder.lab import ledger, recorder
from autograder.lab.ledger import Event
from autograder.lab.record import Run
from autograder.lab.sources import file_name, is_library

SIGNALS = {
    "SIGSEGV": "a crash in compiled code (SIGSEGV), often memory that was freed or is not there",
    "SIGKILL": "killed (SIGKILL): by the code itself, or by the machine because it ran out of memory",
    "SIGABRT": "aborted by a library (SIGABRT)",
}
PRINTED = 5  # lines of a rank's output that are shown


def explain(run: Run) -> tuple[str, str, list[tuple[str, str]]]:
    """Status, title and facts of a run that did not return on every rank."""
    status, title, facts = _EXPLAIN[run.outcome](run)
    case = _case(run)
    if case:
        facts.insert(0, ("case", case))
    shown = printed(run)
    if shown and status in ("failed", "crashed", "timeout", "deadlock"):
        facts.append(("printed", shown))
    return status, title, facts


# ------------------------------------------------------------------------------------------------ one per outcome


def _failed(run: Run) -> tuple[str, str, list]:
    """A rank raised. Of several, the lowest; one that only lost its connection to another comes last."""
    raised = [r for r in range(run.world_size) if run.errors[r]]
    if not raised:
        return "crashed", "a rank failed without saying why", []
    r = min(raised, key=lambda r: (_lost_connection(run.errors[r]["message"]), r))
    error = run.errors[r]
    if error["not_implemented"]:
        return "not_implemented", "not implemented yet", []
    where = f"rank {r}" if run.world_size > 1 else "the code"
    frames = [_frame_text(frame) for frame in error["frames"]]
    facts = [("your line", frames[-1])] if frames else []
    if error["forbidden"]:
        return "forbidden", error["message"], facts
    kind, message = error["type"], _shorter(error["message"])
    title = f"{where} raised {kind}: {message.splitlines()[0][:200] if message else ''}".rstrip(": ")
    if _lost_connection(message):
        title = f"{where} lost its connection to another rank"
    if kind == "SystemExit":
        title = f"{where} called sys.exit({'' if message == 'None' else message[:200]})"
    callers = [frame for frame in dict.fromkeys(frames[-2::-1]) if frame != frames[-1]]
    if callers:
        facts.append(("called from", "\n".join(callers[:4])))
    facts += _perhaps(_why_raised(run, r, kind, message))
    return "failed", title, facts


def _crashed(run: Run) -> tuple[str, str, list]:
    r, how = min(run.exits.items())
    line = _stack_line(run, r) or _line(_last_call(run, r))
    facts = [("your line", line)] if line else []
    if how.startswith("exit code"):
        title = f"rank {r} ended its process ({how}) before the function returned"
        return (
            "crashed",
            title,
            [*facts, ("perhaps", "os._exit ends the whole process; return from the function instead")],
        )
    if how == "SIGABRT" and "EnforceNotMet" in run.output[r]:
        title = f"rank {r} was ended by gloo: a message was larger than the tensor that was to receive it"
        return "crashed", title, facts + _perhaps(mismatch(run.events))
    return "crashed", f"rank {r} died: {SIGNALS.get(how, how)}", facts + _perhaps(mismatch(run.events))


def _deadlock(run: Run) -> tuple[str, str, list]:
    groups = list(dict.fromkeys(e.group for e in run.events if e.op == "new_group"))
    run = _in_earliest_case(run)
    rows = []
    for r in range(run.world_size):
        event = _blocked_in(run, r)
        if run.states[r] == recorder.DONE:
            rows.append(("has returned", "", "", ""))
        elif event is None:
            rows.append(("waits outside any message", _stack_line(run, r), "", ""))
        else:
            outer = event.via[-1] if event.via else _line(event)  # the own line that is not in a helper
            where, _, code = outer.partition("   ")
            rows.append((f"waits in {event}", where, _count(run, event), code))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    facts = [
        (f"rank {r}", "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        for r, row in enumerate(rows)
    ]
    difference = first_difference(run.events)
    if difference:
        facts.append(("they differ", difference))
    return "deadlock", f"no rank could go on for {run.stall:.1f} s", facts + _perhaps(_why_blocked(run, groups))


def _in_earliest_case(run: Run) -> Run:
    """The run as far as the case that somebody is stuck in: a rank that is in a later one has returned from it."""
    cases = [len(run.of(r, "case")) for r in range(run.world_size)]
    earliest = min((n for r, n in enumerate(cases) if run.states[r] != recorder.DONE), default=0)
    if not earliest:
        return run
    states = [recorder.DONE if cases[r] > earliest else state for r, state in enumerate(run.states)]
    return dataclasses.replace(run, states=states, events=run.in_case(earliest - 1))


def _timeout(run: Run) -> tuple[str, str, list]:
    if recorder.STARTING in run.states:  # no line of the caller's has run there yet
        r = run.states.index(recorder.STARTING)
        return "infrastructure", f"rank {r} had not joined the others after {3 * run.timeout:.0f} s", []
    running = [r for r in range(run.world_size) if run.states[r] == recorder.RUNNING]
    facts = []
    for r in running[:4]:
        line = _stack_line(run, r) or _line(_last_call(run, r))
        if line:
            facts.append(("your line" if len(running) == 1 else f"rank {r}", line))
    who = "the code was" if run.world_size == 1 else "ranks were"
    if len(running) == 1 < run.world_size:
        who = f"rank {running[0]} was"
    advice = "a loop that never ends, or a sleep"
    if not running:
        advice = "far too many or too large messages; or a loop around is_completed(), where gloo needs wait()"
    pending = [e for e in run.unwaited() if e.rank in running]
    if pending and len(running) < run.world_size:
        advice += "; or PyTorch itself waits for another rank inside this line"
    return "timeout", f"{who} still running after {run.timeout:g} s", facts + _perhaps(advice)


def _forbidden(run: Run) -> tuple[str, str, list]:
    event = next(e for e in run.events if e.refused)
    case = next((e.api for e in reversed(run.of(event.rank, "case")) if e.index < event.index), None)
    facts = [("case", case)] if case and not _case(run) else []  # the rank may have gone on and returned
    return "forbidden", event.refused, facts + ([("your line", _line(event))] if event.where else [])


def _lost(run: Run) -> tuple[str, str, list]:
    return (
        "crashed",
        "the process that starts the ranks was ended while this ran",
        [("perhaps", "the code ends processes that it did not start, or used up the machine's memory")],
    )


def _no_agent(run: Run) -> tuple[str, str, list]:
    return "infrastructure", "the process that starts the ranks could not be started, or was ended by the machine", []


def _tampered(run: Run) -> tuple[str, str, list]:
    advice = "the code writes files or file descriptors that are not its own"
    return "crashed", "what a rank handed back is not readable", [("found", "\n".join(run.notes)), ("perhaps", advice)]


def _cancelled(run: Run) -> tuple[str, str, list]:
    return "infrastructure", "the run was cancelled", []


_EXPLAIN = {
    "failed": _failed,
    "crashed": _crashed,
    "deadlock": _deadlock,
    "timeout": _timeout,
    "forbidden": _forbidden,
    "lost": _lost,
    "no agent": _no_agent,
    "tampered": _tampered,
    "cancelled": _cancelled,
}


# ---------------------------------------------------------------------------------------------------- the reasons


def _why_raised(run: Run, r: int, kind: str, message: str) -> str | None:
    if kind == "SystemExit":
        return "return from the function instead: the process is not yours to end"
    if "contiguous" in message:
        return "gloo's send and recv take contiguous tensors: send t.contiguous(), receive into a new tensor and copy_"
    if kind == "MemoryError" or "can't allocate memory" in message:
        return "more memory was asked for than a rank may have"
    if _lost_connection(message):
        return "the rank at the other end had closed its connections: it destroyed the process group, or ended"
    if "same as the rank of the current process" in message:
        return (
            "the other end is this rank itself: what a rank has for itself is copied, not sent; and in a subgroup, "
            "dst and src are still global ranks"
        )
    if message.startswith("Weights only load failed"):
        return (
            "save tensors, numbers, text, tuples, lists and dicts only; a numpy array (in numpy's random state) is none"
        )
    if "is not part of group" in message:
        return (
            "src and dst are global ranks; a rank's number in a subgroup goes into group_src, group_dst, or through "
            "dist.get_global_rank"
        )
    if "attempting to assign a gradient with dtype" in message:
        return "a gradient has the dtype of its parameter; one flat tensor has one dtype, so each dtype needs its own"
    if "can't optimize a non-leaf Tensor" in message:
        return (
            "torch.optim takes parameters themselves, or detached tensors: not what an operator has made of them, and "
            "not the rows of one (a group's params may be a single tensor)"
        )
    if kind == "RecursionError":
        return "the function calls itself without an end"
    return mismatch(run.events)


def mismatch(events: list[Event]) -> str | None:
    """The first message or collective whose ends do not fit each other; None where all fit."""
    for send, recv in ledger.match_messages(events)[0]:
        if send.nbytes != recv.nbytes:
            what = [f"{e.numel} {'elements' if send.dtype == recv.dtype else e.dtype}" for e in (send, recv)]
            return (
                f"rank {send.rank} sends {what[0]} ({send.where}), rank {recv.rank} receives {what[1]} ({recv.where})"
            )
    return next((f"the calls differ {text}" for missing, text in _differences(events) if not missing), None)


def _why_blocked(run: Run, groups: list[tuple[int, ...]]) -> str | None:
    blocked = {r: e for r in range(run.world_size) if (e := _blocked_in(run, r))}
    returned = [r for r in range(run.world_size) if run.states[r] == recorder.DONE]
    messages = {r: e for r, e in blocked.items() if e.is_message}
    if any(e.op == "new_group" for e in blocked.values()):
        return "every rank must call new_group, also one outside the group, and all in the same order"
    if blocked and len(messages) == len(blocked):
        return _why_messages_blocked(run, messages, returned)
    if returned and blocked:
        r = min(blocked)
        theirs = blocked[r].group
        own = next((g for g in groups if r in g and set(g) < set(theirs) and not set(g) & set(returned)), None)
        if own:
            return f"rank {r} waits for all ranks of {list(theirs)}, its group is {list(own)}: is `group` passed on?"
        return f"rank {returned[0]} returned without the call that rank {r} waits in: every rank must make it"
    if messages:
        return "some ranks are in a collective and others in a message: the ranks do not run the same sequence of calls"
    if blocked and len({e.op for e in blocked.values()}) > 1:
        return (
            "every rank of the group must make the same calls in the same order; is one inside an `if` that does not "
            "hold on all of them?"
        )
    return None


def _why_messages_blocked(run: Run, messages: dict[int, Event], returned: list[int]) -> str:
    alone = ledger.match_messages(run.events)[1]
    for e in (e for e in alone if e.is_open):
        for other in (o for o in alone if o.rank == e.peer and o.op != e.op):
            if other.peer == e.rank and other.tag != e.tag:
                ends = [f"rank {o.rank} has {o.tag} ({o.where})" for o in (e, other)]
                return f"the tags differ: {', '.join(ends)}"
            if other.peer == e.rank and other.group != e.group:
                return f"the groups differ: rank {e.rank} uses {list(e.group)}, rank {other.rank} {list(other.group)}"
    partners = all(e.peer in messages for e in messages.values())
    if partners and all(e.op == "send" for e in messages.values()):
        who = "both send" if len(messages) == 2 else "every rank sends"
        what = "before either receives" if len(messages) == 2 else "before it receives"
        return f"{who} {what}; post the receive first (irecv), or batch the two"
    if partners and all(e.op == "recv" for e in alone):  # else something was sent that nobody receives
        return "every rank waits to receive and none has sent; somebody has to send first"
    for e in alone:
        other = next((o for o in alone if o.rank == e.peer and o.op != e.op and o.is_open), None)
        if other is not None and other.peer != e.rank:
            ends = [f"rank {o.rank}: {o} ({o.where})" for o in (e, other)]
            return f"{', but '.join(ends)}: is the peer right?"
    for r, e in messages.items():
        if e.peer in returned:
            verb = "receives" if e.op == "send" else "sends"
            return f"rank {e.peer} has returned and never {verb} what rank {r} waits for; is the peer right?"
    if sizes := mismatch(run.events):
        return sizes
    return "each rank waits for one that waits itself; follow from rank to rank in the table to see the circle"


def first_difference(events: list[Event]) -> str | None:
    """Where the sequences of collective calls of a group's ranks first differ, or None where they do not.

    A rank that calls something else tells more than one that makes no further call: that one may be blocked elsewhere.
    """
    found = sorted(_differences(events), key=lambda pair: pair[0])
    return found[0][1] if found else None


def _differences(events: list[Event]) -> list[tuple[bool, str]]:
    """For each group whose ranks' calls differ: whether a rank makes no further call there, and the text."""
    calls = [e for e in events if e.is_collective or e.op == "new_group"]
    everybody = sorted({r for e in calls for r in e.group})
    found = []
    for group in dict.fromkeys(e.group if e.is_collective else tuple(everybody) for e in calls):
        mine = [[e for e in calls if e.rank == r and (e.op == "new_group" or e.group == group)] for r in group]
        for number, row in enumerate(zip_longest(*mine), 1):
            if len({_kind(call) for call in row}) > 1:
                name = "" if list(group) == everybody else f" of group {list(group)}"
                lines = [
                    f"rank {r}: {_call_text(call)}" if call else f"rank {r}: no further call"
                    for r, call in zip(group, row, strict=True)
                ]
                found.append((None in row, "\n".join([f"in collective call {number}{name}:", *lines[:8]])))
                break
    return found


def _kind(call: Event | None) -> tuple | None:
    """What must be the same on all ranks of a group."""
    if call is None:
        return None
    size = None if call.op == "all_to_all" else (call.numel, call.dtype)
    return call.op, call.group, call.peer, size


def _call_text(call: Event) -> str:
    if call.op == "new_group":
        return f"new_group({list(call.group)}) ({call.where})"
    return f"{call} of {call.numel} {call.dtype} ({call.where})" if call.dtype else f"{call} ({call.where})"


# ------------------------------------------------------------------------------------------------------- wordings


def _lost_connection(message: str) -> bool:
    return "Connection closed by peer" in message or "Connection reset" in message


def _shorter(message: str) -> str:
    """A message without the `[/path/to/pair.cc:553]` of PyTorch and gloo; of tensors' options the dtype."""
    message = re.sub(r"TensorOptions\(dtype=([^,]*),.*?memory_format=\(nullopt\)\)", r"\1", message)
    return re.sub(r"^(\[[^\]]*\.(cc|cpp|h):\d+\] ?)+(err == 0\. )?", "", message)


def _perhaps(text: str | None) -> list[tuple[str, str]]:
    return [("perhaps", text)] if text else []


def _blocked_in(run: Run, r: int) -> Event | None:
    """The operation an unfinished rank waits in: the last one that is still open."""
    if run.states[r] == recorder.DONE:
        return None
    return next((e for e in reversed(run.of(r)) if e.op not in ledger.MARKS and e.is_open), None)


def _last_call(run: Run, r: int) -> Event | None:
    return next((e for e in reversed(run.of(r)) if e.op not in ledger.MARKS), None)


def _count(run: Run, event: Event) -> str:
    if event.op == "new_group":
        return ""
    if not event.is_message:
        nth = [e.index for e in run.of(event.rank) if e.is_collective].index(event.index) + 1
        return f"its {_ordinal(nth)} collective call"
    begin = max((e.index for e in run.of(event.rank, "case")), default=-1)
    nth = [e.index for e in run.of(event.rank, "send", "recv") if e.index > begin].index(event.index) + 1
    return f"its {_ordinal(nth)} message"


def _ordinal(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def _line(event: Event | None) -> str:
    return event.line if event else ""


def _frame_text(frame: tuple) -> str:
    name, line, code = frame
    return f"{name}:{line}   {code}".rstrip()


def _stack_line(run: Run, r: int) -> str:
    """The innermost line of the student's own file in a faulthandler dump (innermost first there)."""
    for line in run.stacks[r].splitlines():
        found = re.match(r'\s*File "(.*)", line (\d+) in (.*)', line)
        if found and found[1].startswith(tuple(run.roots) or "") and not is_library(found[1]):
            code = linecache.getline(found[1], int(found[2])).strip()[:160]
            return _frame_text((file_name(found[1], found[3]), int(found[2]), code))
    return ""


def _case(run: Run) -> str | None:
    """The case that was being tried: the earliest one that an unfinished or failed rank was in."""
    cases = []
    for r in range(run.world_size):
        mine = run.of(r, "case")
        if mine and run.states[r] != recorder.DONE:
            cases.append((len(mine), mine[-1].api))
    return min(cases)[1] if cases else None


def _is_gloo(line: str) -> bool:
    """Part of what a process prints when gloo ends it; the report says it in plainer words."""
    return "gloo::EnforceNotMet" in line or "[enforce fail at" in line


def printed(run: Run) -> str:
    """The end of what one rank printed: of one that raised or died, if that printed anything, or the lowest rank."""
    for r in sorted(range(run.world_size), key=lambda r: not (run.errors[r] or r in run.exits)):
        lines = [line for line in run.output[r].splitlines() if line.strip() and not _is_gloo(line)]
        if not lines:
            continue
        which = f"the last {PRINTED} of {len(lines)} lines" if len(lines) > PRINTED else ""
        if run.dropped[r]:
            which = f"which printed {run.dropped[r] / 2**20:.1f} MiB more than is kept"
        who = f"rank {r}" if run.world_size > 1 else ""
        head = ", ".join(filter(None, (who, which)))
        return "\n".join(([f"{head}:"] if head else []) + [line[:200] for line in lines[-PRINTED:]])
    return ""
