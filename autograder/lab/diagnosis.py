"""Why a run failed, in a student's words: from the events and errors of a `Run` to a status, a title and facts."""

from itertools import zip_longest

from autograder.lab import ledger
from autograder.lab.ledger import Event
from autograder.lab.ranks import Run

SIGNALS = {
    "SIGSEGV": "a crash in compiled code (SIGSEGV), often memory that was freed or is not there",
    "SIGKILL": "killed (SIGKILL): by the code itself, or by the machine because it ran out of memory",
    "SIGABRT": "aborted by a library (SIGABRT)",
}
PRINTED = 5  # lines of a rank's output that are shown


def explain(run: Run) -> tuple[str, str, list[tuple[str, str]]]:
    """Status, title and facts of a run that did not return on every rank."""
    refused = run.refused
    if refused:
        status, title, line = "forbidden", refused.refused, _line(refused)
        facts = [("your line", line)] if line else []
        case = next((e.api for e in reversed(run.of(refused.rank, "case")) if e.index < refused.index), None)
    else:
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
    """A rank raised. With several, the one that got least far in its calls is the cause, then the lowest rank."""
    raised = [r for r in range(run.world_size) if run.errors[r]]
    if not raised:
        return "crashed", "a rank failed without saying why", []
    r = raised[0]
    error = run.errors[r]
    where = f"rank {r}" if run.world_size > 1 else "the code"
    frames = [tuple(f) for f in error.get("frames", [])]
    line = _frame_text(frames[-1]) if frames else ""
    facts = [("your line", line)] if line else []
    if error.get("not_implemented"):
        return "not_implemented", "not implemented yet", []
    if error.get("forbidden"):
        return "forbidden", str(error["message"]), facts
    kind, message = str(error.get("type")), str(error.get("message"))
    title = f"{where} raised {kind}: {message.splitlines()[0][:200] if message else ''}".rstrip(": ")
    if kind == "SystemExit":
        title = f"{where} called sys.exit({message})"
    facts = [("your line", line)] if line else []
    if len(frames) > 1:
        facts.append(("called from", "\n".join(_frame_text(f) for f in frames[-2::-1][:4])))
    facts += _perhaps(_why_raised(run, r, kind, message))
    return "failed", title, facts


def _crashed(run: Run) -> tuple[str, str, list]:
    r, how = min(run.exits.items())
    facts = []
    stack = _stack_line(run, r)
    last = _last_call(run, r)
    if how.startswith("exit code"):
        title = f"rank {r} ended its process ({how}) before the function returned"
        advice = "os._exit ends the whole process; return from the function instead"
    else:
        title = f"rank {r} died: {SIGNALS.get(how, how)}"
        advice = _mismatch(run)
    if stack or last:
        facts.append(("your line", stack or _line(last)))
    return "crashed", title, facts + _perhaps(advice)


def _deadlock(run: Run) -> tuple[str, str, list]:
    rows = []
    for r in range(run.world_size):
        event = _blocked_in(run, r)
        if run.states[r] == ledger.DONE:
            rows.append((f"rank {r}", "has returned", "", ""))
        elif event is None:
            rows.append((f"rank {r}", "waits outside any message", "", ""))
        else:
            rows.append((f"rank {r}", f"waits in {event}", event.where, _count(run, event)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    facts = [
        (
            row[0],
            "  ".join(cell.ljust(w) for cell, w in zip(row[1:3], widths[1:], strict=True)) + "  " + row[3],
        )
        for row in rows
    ]
    facts = [(label, text.rstrip()) for label, text in facts]
    difference = first_difference(run.events, run.world_size)
    if difference:
        facts.append(("they differ", difference))
    facts += _perhaps(_why_blocked(run))
    return "deadlock", f"no rank could go on for {run.stall:.1f} s", facts


def _timeout(run: Run) -> tuple[str, str, list]:
    running = [r for r in range(run.world_size) if run.states[r] == ledger.RUNNING]
    facts = []
    for r in running[:4]:
        line = _stack_line(run, r) or _line(_last_call(run, r))
        if line:
            facts.append(("your line" if len(running) == 1 else f"rank {r}", line))
    who = f"rank {running[0]} was" if len(running) == 1 else "ranks were"
    advice = "a loop whose end condition never becomes true" if running else "far too many or too large messages"
    return "timeout", f"{who} still running after {run.timeout:.0f} s", facts + _perhaps(advice)


def _lost(run: Run) -> tuple[str, str, list]:
    return (
        "crashed",
        "the process that starts the ranks was ended while this ran",
        [("perhaps", "the code ends processes that it did not start, or used up the machine's memory")],
    )


def _tampered(run: Run) -> tuple[str, str, list]:
    return "crashed", "what a rank handed back is not readable", [("found", "; ".join(run.notes))]


def _cancelled(run: Run) -> tuple[str, str, list]:
    return "infrastructure", "the run was cancelled", []


_EXPLAIN = {
    "failed": _failed,
    "crashed": _crashed,
    "deadlock": _deadlock,
    "timeout": _timeout,
    "lost": _lost,
    "tampered": _tampered,
    "cancelled": _cancelled,
}


# ---------------------------------------------------------------------------------------------------- the reasons


def _why_raised(run: Run, r: int, kind: str, message: str) -> str | None:
    if "contiguous" in message:
        return "gloo's send and recv take contiguous tensors: send t.contiguous(), receive into a new tensor and copy_"
    if kind in ("MemoryError", "RuntimeError") and ("memory" in message or "alloc" in message):
        return "more memory was asked for than a rank may have"
    if "Connection closed by peer" in message or "Connection reset" in message:
        return "the other rank had already ended"
    if "should not be the same as the rank of the current process" in message:
        return "a rank keeps its own part with a copy; only the parts of others travel"
    return _mismatch(run)


def _mismatch(run: Run) -> str | None:
    """The first message whose two ends do not fit each other."""
    for send, recv in ledger.match_messages(run.events)[0]:
        if send.nbytes != recv.nbytes:
            what = "elements" if send.dtype == recv.dtype else f"elements of {send.dtype}"
            return (
                f"rank {send.rank} sends {send.numel} {what} ({send.where}), "
                f"rank {recv.rank} receives {recv.numel} of {recv.dtype} ({recv.where})"
            )
    return None


def _why_blocked(run: Run) -> str | None:
    blocked = {r: e for r in range(run.world_size) if (e := _blocked_in(run, r))}
    returned = [r for r in range(run.world_size) if run.states[r] == ledger.DONE]
    messages = {r: e for r, e in blocked.items() if e.is_message}
    if blocked and len(messages) == len(blocked):
        partners = all(e.peer in blocked for e in messages.values())
        alone = ledger.match_messages(run.events)[1]
        if partners and all(e.op == "send" for e in messages.values()):
            if len(messages) == 2:
                return "both send before either receives; post the receive first (irecv), or batch the two"
            return "every rank sends before it receives; post the receive first (irecv), or batch the two"
        if partners and all(e.op == "recv" for e in alone):
            return "every rank waits to receive and none has sent; somebody has to send first"
        for r, e in messages.items():
            if e.peer in returned:
                verb = "receives" if e.op == "send" else "sends"
                return f"rank {e.peer} has returned and never {verb} what rank {r} waits for"
        for e in alone:
            other = next((o for o in alone if o.rank == e.peer and o.op != e.op and e.is_open), None)
            if other is not None and other.peer != e.rank:
                ends = [f"rank {o.rank}: {o} ({o.where})" for o in (e, other)]
                return f"{', but '.join(ends)}: is the peer right?"
        sizes = _mismatch(run)
        if sizes:
            return sizes
        return "follow the arrows: each rank waits for one that waits itself"
    if returned and blocked:
        return (
            f"rank {returned[0]} returned without the call that rank {min(blocked)} waits in: every rank must make it"
        )
    if messages and blocked:
        return "some ranks are in a collective and others in a message: the ranks do not run the same sequence of calls"
    return None


def first_difference(events: list[Event], world_size: int) -> str | None:
    """Where the ranks' sequences of collective calls first differ, or None where they do not."""
    sequences = [[e for e in events if e.rank == r and e.is_collective] for r in range(world_size)]
    for number, calls in enumerate(zip_longest(*sequences), 1):
        kinds = {(c.op, c.group, c.numel, c.dtype) if c else None for c in calls}
        if len(kinds) > 1:
            seen = "\n".join(
                f"rank {r}: {c} of {c.numel} {c.dtype} ({c.where})" if c else f"rank {r}: no further call"
                for r, c in enumerate(calls)
            )
            return f"in collective call {number}:\n{seen}"
    return None


# ------------------------------------------------------------------------------------------------------- wordings


def _perhaps(text: str | None) -> list[tuple[str, str]]:
    return [("perhaps", text)] if text else []


def _blocked_in(run: Run, r: int) -> Event | None:
    """The operation an unfinished rank waits in: the last one that is still open."""
    if run.states[r] == ledger.DONE:
        return None
    return next((e for e in reversed(run.of(r)) if e.op not in ("case", "span") and e.is_open), None)


def _last_call(run: Run, r: int) -> Event | None:
    return next((e for e in reversed(run.of(r)) if e.op not in ("case", "span")), None)


def _count(run: Run, event: Event) -> str:
    if not event.is_message:
        nth = [e for e in run.of(event.rank) if e.is_collective].index(event) + 1
        return f"its {_ordinal(nth)} collective call"
    begin = max((e.index for e in run.of(event.rank, "case")), default=-1)
    nth = [e.index for e in run.of(event.rank, "send", "recv") if e.index > begin].index(event.index) + 1
    return f"its {_ordinal(nth)} message"


def _ordinal(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def _line(event: Event | None) -> str:
    return f"{event.where}   {event.code}".rstrip() if event and event.where else ""


def _frame_text(frame: tuple) -> str:
    name, line, _, code = frame
    return f"{name}:{line}   {code}".rstrip()


def _stack_line(run: Run, r: int) -> str:
    """The innermost line of the student's own file in a faulthandler dump (innermost first there)."""
    import linecache
    from pathlib import Path

    for line in run.stacks[r].splitlines():
        parts = line.strip().split('"')
        if len(parts) == 3 and parts[1].startswith(tuple(run.roots)):
            number = parts[2].split("line ")[1].split(" ")[0]
            code = linecache.getline(parts[1], int(number)).strip() if number.isdigit() else ""
            return f"{Path(parts[1]).name}:{number}   {code}".rstrip()
    return ""


def _case(run: Run) -> str | None:
    """The case that was being tried: the earliest one that an unfinished or failed rank was in."""
    cases = []
    for r in range(run.world_size):
        mine = run.of(r, "case")
        if mine and run.states[r] != ledger.DONE:
            cases.append((len(mine), mine[-1].api))
    return min(cases)[1] if cases else None


def printed(run: Run) -> str:
    """The end of what one rank printed: of one that raised, if that printed anything, or the lowest that did."""
    for r in sorted(range(run.world_size), key=lambda r: (not run.errors[r], r)):
        lines = [line for line in run.output[r].splitlines() if line.strip()]
        if not lines:
            continue
        which = f"the last {PRINTED} of {len(lines)} lines" if len(lines) > PRINTED else ""
        if run.dropped[r]:
            which = f"which printed {run.dropped[r] / 2**20:.1f} MiB more than is kept"
        who = f"rank {r}" if run.world_size > 1 else ""
        head = ", ".join(filter(None, (who, which)))
        return "\n".join(([f"{head}:"] if head else []) + [line[:200] for line in lines[-PRINTED:]])
    return ""
