"""The timeline: what each rank did and when, as a picture and as a trace file for ui.perfetto.dev."""

import io
from collections import defaultdict

from autograder.lab import ledger, palette
from autograder.lab.ledger import Event

BAR = 0.8  # height of a bar in a lane of height 1
DARK = {palette.KIND[kind] for kind in ("send", "compute", "error")}  # bars that are written on in white


def _kind(event: Event) -> str:
    if event.op == "span":
        return "compute"
    return event.op if event.is_message else "collective"


def _finish(event: Event) -> float:
    """When an event was over, as far as the rank knows: its wait ended, or the call returned."""
    return max(t for t in (event.start, event.end, event.done) if t is not None)


def _lanes(events: list[Event]) -> dict[int, int]:
    """A lane within the rank for each event (by its index), so that operations under way together do not overlap."""
    free: list[float] = []
    lane_of = {}
    for event in events:
        lane = next((i for i, until in enumerate(free) if until <= event.start), len(free))
        free[lane:] = [_finish(event), *free[lane + 1 :]]
        lane_of[event.index] = lane
    return lane_of


def figure(events: list[Event], title: str = ""):
    """Draw a run: one row per rank, time from left to right.

    A bar is an operation from its call to its end; its grey part is the time in which the rank only waited for it. One
    that never ended goes on to the edge. A line joins a message's sending to its arrival. Green bars are spans of
    computation.

    Args:
        events: of one `Run` (`run.events`).
        title: of the picture.

    Returns:
        A matplotlib Figure, as wide as a notebook page.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [e for e in events if e.op not in ("case", "new_group") and not e.raised]
    ranks = sorted({e.rank for e in shown}) or [0]
    zero = min((e.start for e in shown), default=0.0)
    ms = lambda t: (t - zero) * 1e3  # noqa: E731
    base, place, y = {}, {}, 0
    for rank in ranks:
        mine = [e for e in shown if e.rank == rank]
        lanes = _lanes(mine)
        base[rank] = (y, max(lanes.values(), default=0) + 1)
        for e in mine:
            place[rank, e.index] = y + lanes[e.index]
        y += base[rank][1] + 0.5

    plot = Figure(figsize=(palette.WIDTH, 0.7 + 0.28 * y), layout="constrained")
    axes = plot.add_subplot()
    width = max((ms(_finish(e)) for e in shown), default=1.0) or 1.0
    for e in shown:
        lane, color = place[e.rank, e.index], palette.KIND["error" if e.is_open else _kind(e)]
        length = 1.02 * width - ms(e.start) if e.is_open else max(ms(_finish(e)) - ms(e.start), width / 200)
        axes.broken_barh([(ms(e.start), length)], (lane, BAR), color=color, linewidth=0)
        if e.wait is not None and e.done is not None:
            axes.broken_barh(
                [(ms(e.wait), ms(e.done) - ms(e.wait))], (lane, BAR), color=palette.KIND["wait"], linewidth=0
            )
            axes.broken_barh([(ms(e.start), length)], (lane, BAR), facecolor="none", edgecolor=color, linewidth=0.8)
        if length > width / 14:
            # On the bar's longer part, the coloured or the grey.
            left, right, ink = ms(e.start), ms(e.start) + length, "white" if color in DARK else palette.INK
            if e.wait is not None and e.done is not None:
                if ms(e.wait) - left < ms(e.done) - ms(e.wait):
                    left, right, ink = ms(e.wait), ms(e.done), palette.INK
                else:
                    right = ms(e.wait)
            axes.text(
                (left + right) / 2, lane + BAR / 2, e.api if e.op == "span" else str(e),
                color=ink, ha="center", va="center", fontsize=8, clip_on=True,
            )  # fmt: skip
    for send, recv in ledger.match_messages(shown)[0]:
        tail, head = (send.rank, send.index), (recv.rank, recv.index)
        axes.plot(
            [ms(send.start), ms(_finish(recv))], [place[tail] + BAR / 2, place[head] + BAR / 2],
            color=palette.INK, linewidth=0.7, alpha=0.6, marker="o", markersize=2,
        )  # fmt: skip
    axes.set_yticks([base[r][0] + base[r][1] / 2 - 0.1 for r in ranks], [f"rank {r}" for r in ranks])
    for tick, rank in zip(axes.get_yticklabels(), ranks, strict=True):
        tick.set_color(palette.RANK[rank % len(palette.RANK)])
        tick.set_fontweight("bold")
    axes.set_ylim(y, -0.3)
    axes.set_xlim(0, width * 1.02)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    kinds = {"error" if e.is_open else _kind(e) for e in shown}
    kinds |= {"wait"} if any(e.done is not None and e.wait is not None for e in shown) else set()
    words = {"wait": "waiting for it", "error": "never ended"}
    handles = [Patch(color=c, label=words.get(k, k)) for k, c in palette.KIND.items() if k in kinds]
    if handles:
        plot.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    return plot


def svg(events: list[Event], title: str = "") -> str:
    """The picture of `figure` as SVG text, the same for the same events."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "timeline", "svg.fonttype": "none"}):
        figure(events, title).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def perfetto(events: list[Event]) -> dict:
    """The run in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open: a process per rank.

    Times are in microseconds. Messages are joined by flow arrows.
    """
    out = []
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for e in events:
        if e.op not in ("case", "new_group"):
            by_rank[e.rank].append(e)
    lanes = {rank: _lanes(mine) for rank, mine in by_rank.items()}
    for rank, mine in by_rank.items():
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for e in mine:
            name = e.api if e.op == "span" else str(e)
            details = {
                "bytes": e.nbytes,
                "elements": e.numel,
                "dtype": e.dtype,
                "line": e.where,
                "code": e.code,
            }
            where = {"pid": rank, "tid": lanes[rank][e.index]}
            out.append(
                {"ph": "X", "name": name, "cat": _kind(e), **where, "ts": e.start * 1e6,
                 "dur": (_finish(e) - e.start) * 1e6, "args": details}
            )  # fmt: skip
            if e.wait is not None and e.done is not None:
                out.append(
                    {"ph": "X", "name": f"wait for {name}", "cat": "wait", **where, "ts": e.wait * 1e6,
                     "dur": (e.done - e.wait) * 1e6}
                )  # fmt: skip
    for number, (send, recv) in enumerate(ledger.match_messages(events)[0]):
        for phase, e, time in (("s", send, send.start), ("f", recv, _finish(recv))):
            flow = {"pid": e.rank, "tid": lanes[e.rank][e.index], "ts": time * 1e6}
            out.append({"ph": phase, "bp": "e", "name": "message", "cat": "message", "id": number, **flow})
    return {"traceEvents": out, "displayTimeUnit": "ms"}
