"""The plots of the lectures, with axes that carry their units. Each function returns a matplotlib Figure, as wide as a
notebook page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from autograder.lab import costs
from autograder.lab.palette import FAINT, INK, KIND, OP, PART, RANK, STAGE, TEXT, WIDTH, tint

matplotlib.rcParams["svg.hashsalt"] = "pictures"  # the same picture is the same SVG, byte for byte

# Numbers ----------------------------------------------------------------------------------------------------


def _size(nbytes: float, _: object = None) -> str:
    """4000000 -> 4 MB"""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.3g} B"


def _duration(seconds: float, _: object = None) -> str:
    """0.004 -> 4 ms"""
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


def _plain(ax: Axes, x: object = None, y: object = None) -> None:
    """The look of every plot: faint grid, no box, text of one size, axes that carry units."""
    ax.grid(True, color=FAINT, lw=0.5, alpha=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=TEXT, which="both", colors=INK)
    ax.minorticks_off()
    for axis, form in ((ax.xaxis, x), (ax.yaxis, y)):
        axis.label.set_size(TEXT + 0.5)
        if form:
            axis.set_major_formatter(FuncFormatter(form))


def bandwidths(links: Sequence[costs.Link] = costs.LINKS) -> Figure:
    """Bars, on a logarithmic scale: what flows through each link in one direction."""
    figure = Figure(figsize=(WIDTH, 0.36 * len(links) + 0.75), layout="constrained")
    ax = figure.subplots()
    names, values = [link.name for link in links], [link.bandwidth for link in links]
    ax.barh(names, values, color=[tint(KIND["send"] if v >= 1e11 else KIND["collective"], 0.7) for v in values])
    for row, value in enumerate(values):
        ax.text(value * 1.15, row, f"{_size(value)}/s", va="center", fontsize=TEXT, color=INK)
    ax.set(xscale="log", xlim=(5e7, 5e14), xlabel="bytes per second, one direction")
    ax.invert_yaxis()
    _plain(ax, x=_size)
    ax.yaxis.grid(False)
    return figure


def alpha_beta(
    alpha: float,
    bandwidth: float,
    sizes: Sequence[float] | None = None,
    seconds: Sequence[float] | None = None,
) -> Figure:
    """T = alpha + bytes / bandwidth, its two limits and their crossing; measured points where given."""
    crossing = alpha * bandwidth
    x = np.geomspace(min(sizes), max(sizes), 100) if sizes else crossing * np.geomspace(1e-3, 1e3, 100)
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    ax = figure.subplots()
    ax.plot(x, alpha + x / bandwidth, color=RANK[0], lw=2, label="alpha + bytes / bandwidth")
    ax.plot(x, np.full_like(x, alpha), color=RANK[1], ls="--", label=f"alpha = {_duration(alpha)}")
    ax.plot(x, x / bandwidth, color=RANK[2], ls="--", label=f"bytes / bandwidth, {_size(bandwidth)}/s")
    if sizes:
        ax.plot(sizes, seconds, "o", color=INK, ms=5, label="measured (median)")
    ax.axvline(crossing, color=FAINT, lw=1)
    low = 0.35 * min(alpha, *(seconds or [alpha]))
    ax.annotate(f" equal at {_size(crossing)}", (crossing, low * 1.2), fontsize=TEXT, color=INK)
    ax.set(xscale="log", yscale="log", xlabel="message size", ylabel="time", ylim=(low, None))
    _plain(ax, _size, _duration)
    ax.legend(fontsize=TEXT, frameon=False)
    return figure


def curves(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    log: str = "xy",
    units: tuple[str, str] = ("", ""),
    legend_above: bool = False,
    steps: bool = False,
    marks: Mapping[float, str] | None = None,
) -> Figure:
    """Named lines over x. `log` names the logarithmic axes; a unit is "bytes", "seconds" or none.

    With `steps` the values are points, joined by steps: each holds until the next. `marks` are named places on x.
    """
    forms = {"": lambda value, _: f"{value:g}", "bytes": _size, "seconds": _duration}
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    ax = figure.subplots()
    for i, (name, y) in enumerate(series.items()):
        look = {"marker": "o", "ms": 4, "lw": 1.2, "drawstyle": "steps-post"} if steps else {"lw": 2}
        ax.plot(x, y, color=STAGE.get(name, RANK[i % len(RANK)]), label=name, **look)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    for axis, scale in (("x", ax.set_xscale), ("y", ax.set_yscale)):
        if axis in log:
            scale("log")
    if steps:
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])
    for place, name in (marks or {}).items():
        ax.axvline(place, color=INK, lw=0.8, ls=(0, (3, 2)))
        ax.text(place, ax.get_ylim()[1], f" {name}", va="top", fontsize=TEXT, color=INK)
    _plain(ax, forms[units[0]], forms[units[1]])
    if legend_above:
        figure.legend(fontsize=TEXT, frameon=False, loc="outside upper center", ncols=2)
    else:
        ax.legend(fontsize=TEXT, frameon=False)
    return figure


def stacked(rows: Mapping[str, Mapping[str, float]], xlabel: str, unit: str = "bytes", totals: bool = True) -> Figure:
    """Horizontal bars, each made of named parts; a part has the same colour in every bar.

    The names in `palette.PART` and `palette.OP` have their own colours; others take the ranks', in order.

    Args:
        rows: for each bar its name and its parts, with their sizes.
        xlabel: of the axis.
        unit: "bytes", "seconds" or "" for plain numbers.
        totals: whether the sum stands at the end of each bar.
    """
    form = {"": lambda value, _=None: f"{value:g}", "bytes": _size, "seconds": _duration}[unit]
    figure = Figure(figsize=(WIDTH, 0.42 * len(rows) + 1.15), layout="constrained")
    ax = figure.subplots()
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    ends = dict.fromkeys(rows, 0.0)
    colours = PART | OP
    for i, name in enumerate(names):
        colour = tint(colours.get(name, RANK[i % len(RANK)]), 0.75)
        sizes = [parts.get(name, 0.0) for parts in rows.values()]
        ax.barh(list(rows), sizes, left=list(ends.values()), color=colour, label=name, height=0.66)
        ends = {row: end + size for (row, end), size in zip(ends.items(), sizes, strict=True)}
    if totals:
        for row, end in enumerate(ends.values()):
            ax.text(end, row, f" {form(end)}", va="center", fontsize=TEXT, color=INK)
    ax.set(xlabel=xlabel, xlim=(0, max(ends.values()) * (1.13 if totals else 1.0)))
    ax.invert_yaxis()
    _plain(ax, form)
    ax.yaxis.grid(False)
    figure.legend(fontsize=TEXT, frameon=False, loc="outside upper center", ncols=len(names))
    return figure


# Time -------------------------------------------------------------------------------------------------------

Moments = tuple[Sequence[float], Sequence[tuple[float, float]], float]


def backwards(steps: Mapping[str, Moments]) -> Figure:
    """Backward passes one under the other: when gradients were computed, when messages were under way, and the tail.

    Args:
        steps: title -> (when each gradient was there, start and end of each message, end of the last wait), in
            milliseconds from the start of backward.
    """
    figure = Figure(figsize=(WIDTH, 1.05 * len(steps) + 0.9), layout="constrained")
    ax = figure.subplots()
    longest = max(end for _, _, end in steps.values())
    for i, (title, (gradients, messages, end)) in enumerate(steps.items()):
        y, last = 3.2 * i, max(gradients)
        ax.text(0, y - 0.12, title, fontsize=TEXT, color=INK, va="bottom")
        ax.broken_barh([(0, last)], (y, 0.9), color=tint(KIND["compute"]), linewidth=0)
        ax.vlines(gradients, y, y + 0.9, color=KIND["compute"], lw=0.8)
        bars = [(start, max(stop - start, longest / 500)) for start, stop in messages]
        look = {"facecolor": tint(KIND["collective"], 0.6), "edgecolor": KIND["collective"], "linewidth": 0.5}
        ax.broken_barh(bars, (y + 1, 0.9), alpha=0.6, **look)
        ax.add_patch(Rectangle((last, y), end - last, 1.9, fc=KIND["wait"], ec="none", alpha=0.6, zorder=0))
        ax.text(end + longest / 100, y + 0.95, f"tail {_duration((end - last) / 1e3)}", fontsize=TEXT, va="center")
    _plain(ax)
    ax.set(
        xlim=(0, 1.17 * longest), ylim=(3.2 * len(steps) - 0.9, -1), xlabel="milliseconds from the start of backward"
    )
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    words = {"compute": "gradients", "collective": "messages under way", "wait": "tail"}
    handles = [Rectangle((0, 0), 1, 1, color=tint(KIND[k], 0.7)) for k in words]
    figure.legend(
        handles, list(words.values()), loc="outside lower center", ncols=len(words), frameon=False, fontsize=TEXT
    )
    return figure


def unit_events(events: Sequence[tuple[str, int]], units: int, titles: Sequence[str] | None = None) -> Figure:
    """The order of events of a step under FSDP: one row for each unit, one column for each event; no clock.

    A bar runs from a unit's all-gather to where it is freed; there it ends in a dark edge.

    Args:
        events: in order, each a kind and its unit: "gather", "forward", "backward", "scatter", or "free". A "free"
            has no column: it lies between two.
        units: how many there are.
        titles: of the rows.
    """
    figure = Figure(figsize=(WIDTH, 0.42 * units + 1.0), layout="constrained")
    ax = figure.subplots()
    look = {
        "gather": ("collective", "\u2193"), "forward": ("compute", "F"), "backward": ("compute", "B"),
        "scatter": ("send", "\u2191"),
    }  # fmt: skip
    columns = [(kind, unit) for kind, unit in events if kind != "free"]
    since: dict[int, int] = {}
    held = []
    x = 0
    for kind, unit in events:
        if kind == "free":
            if unit in since:
                held.append((unit, since.pop(unit), x))
            continue
        if kind == "gather":
            since.setdefault(unit, x)
        x += 1
    for unit, start, end in held:
        ax.broken_barh([(start, end - start - 0.06)], (unit - 0.42, 0.84), color=tint(KIND["wait"], 0.8), linewidth=0)
        ax.plot([end - 0.06] * 2, [unit - 0.42, unit + 0.42], color=INK, lw=2, solid_capstyle="butt", clip_on=False)
    for unit, start in since.items():  # never freed
        ax.broken_barh([(start, x - start)], (unit - 0.42, 0.84), color=tint(KIND["wait"], 0.8), linewidth=0)
    for x, (kind, unit) in enumerate(columns):
        colour, letter = look[kind]
        ax.add_patch(Rectangle((x + 0.1, unit - 0.3), 0.76, 0.6, fc=tint(KIND[colour], 0.7), ec="none"))
        ax.text(x + 0.48, unit, letter, ha="center", va="center", fontsize=TEXT, color=INK)
    ax.set(xlim=(0, len(columns)), ylim=(units - 0.4, -0.6), xlabel="events, in order")
    ax.set_yticks(range(units), titles or [f"unit {i}" for i in range(units)])
    ax.tick_params(labelsize=TEXT, colors=INK, left=False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    words = {"gather": "all-gather", "forward": "forward, backward", "scatter": "reduce-scatter"}
    handles = [Rectangle((0, 0), 1, 1, color=tint(KIND[look[k][0]], 0.7)) for k in words]
    handles += [Rectangle((0, 0), 1, 1, color=tint(KIND["wait"], 0.8)), Line2D([], [], color=INK, lw=2)]
    names = [*words.values(), "gathered", "freed"]
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=TEXT)
    return figure


def link_and_device(plans: Mapping[str, Sequence[tuple[str, float, float, str]]]) -> Figure:
    """Plans one under the other: what the device computes and what the link carries, over milliseconds.

    A label that has no room in its bar stands above it, or under it where it is the link's.

    Args:
        plans: title -> bars, each a kind ("compute", "collective" or "send"), start and end in ms, and its label.
    """
    figure = Figure(figsize=(WIDTH, 1.35 * len(plans) + 0.9), layout="constrained")
    ax = figure.subplots()
    longest = max(end for bars in plans.values() for _, _, end, _ in bars)
    for row, (title, bars) in enumerate(plans.items()):
        y = 4.1 * row
        ax.text(0, y - 0.6, title, fontsize=TEXT, color=INK, va="bottom")
        free = {True: 0.0, False: 0.0}  # where the next label beside its bar may begin: above, below
        for kind, start, end, label in sorted(bars, key=lambda bar: bar[1]):
            own = kind == "compute"
            lane = y if own else y + 1
            ax.add_patch(Rectangle((start, lane), end - start, 0.9, fc=tint(KIND[kind], 0.65), ec="white", lw=0.8))
            wide = longest / 80 * len(label)
            middle, height = (start + end) / 2, lane + 0.45
            if end - start < 1.2 * wide:
                middle, height = max(middle, free[own] + wide / 2), y - 0.28 if own else y + 2.22
                free[own] = middle + 0.7 * wide
            ax.text(middle, height, label, ha="center", va="center", fontsize=TEXT - 1, color=INK)
        last = max(end for _, _, end, _ in bars)
        ax.text(last + longest / 100, y + 0.95, _duration(last / 1e3), fontsize=TEXT, va="center", color=INK)
    _plain(ax)
    ax.set(xlim=(0, 1.1 * longest), ylim=(4.1 * len(plans) - 1.4, -1.4), xlabel="milliseconds")
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    words = {"compute": "device computes", "collective": "link: all-gather", "send": "link: reduce-scatter"}
    handles = [Rectangle((0, 0), 1, 1, color=tint(KIND[k], 0.65)) for k in words]
    figure.legend(handles, list(words.values()), loc="outside lower center", ncols=3, frameon=False, fontsize=TEXT)
    return figure
