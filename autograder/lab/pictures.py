"""The drawings of the lectures. Each function returns a matplotlib Figure, as wide as a notebook page.

One convention throughout: colour says which rank a piece came from, a striped piece is a sum over the ranks
whose colours it shows, a dashed outline is memory that holds nothing of interest yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from autograder.lab.palette import FAINT, INK, KIND, RANK, TEXT, WIDTH, tint

matplotlib.rcParams["svg.hashsalt"] = "pictures"  # the same picture is the same SVG, byte for byte

Piece = tuple[frozenset[int], str]  # the ranks whose numbers are summed in it, and its label
EMPTY: Piece = (frozenset(), "")


# Parts ------------------------------------------------------------------------------------------------------


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty drawing of width x height units, one unit as long in x as in y; the y axis points down."""
    figure = Figure(figsize=(WIDTH, WIDTH * height / width))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return figure, ax


def _text(ax: Axes, x: float, y: float, text: str, **style: object) -> None:
    ax.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": TEXT, "color": INK, **style})


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    look = {"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0, **style}
    ax.annotate("", xy=end, xytext=start, arrowprops=look)


def _box(ax: Axes, x: float, y: float, width: float, height: float, text: str = "", fill: str = "white") -> None:
    shape = "round,pad=0,rounding_size=0.12"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=fill, ec=INK, lw=0.9))
    _text(ax, x + width / 2, y + height / 2, text)


def _piece(ax: Axes, x: float, y: float, piece: Piece, bold: bool = False) -> None:
    """A unit square at (x, y) with one vertical stripe for each rank that is summed in it."""
    ranks, label = sorted(piece[0]), piece[1]
    if not ranks:
        ax.add_patch(Rectangle((x, y), 1, 1, fc="white", ec=FAINT, ls=(0, (2, 2)), lw=0.9))
        return
    for i, rank in enumerate(ranks):
        colour = tint(RANK[rank % len(RANK)])
        ax.add_patch(Rectangle((x + i / len(ranks), y), 1 / len(ranks), 1, fc=colour, ec="none"))
    ax.add_patch(Rectangle((x, y), 1, 1, fc="none", ec=INK, lw=2.2 if bold else 0.8, zorder=3 if bold else 2))
    _text(ax, x + 0.5, y + 0.5, label)


# Machines ---------------------------------------------------------------------------------------------------


def hierarchy() -> Figure:
    """Two nodes of four GPUs: what joins a GPU to its memory, to its neighbours and to the other node."""
    figure, ax = _canvas(20, 10.4)
    thick = {"arrowstyle": "<|-|>", "lw": 2.4}
    thin = {"arrowstyle": "<|-|>", "lw": 1}
    for node, left in enumerate((0.3, 10.3)):
        _box(ax, left, 0.3, 9.4, 7.6, fill="#F7F7F7")
        _text(ax, left + 0.3, 0.75, f"node {node}", ha="left", weight="bold")
        _box(ax, left + 0.4, 1.15, 8.6, 0.8, "NVLink and NVSwitch", fill=tint(KIND["collective"]))
        for gpu in range(4):
            x = left + 0.4 + 2.2 * gpu
            _arrow(ax, (x + 1, 1.95), (x + 1, 2.75), **thick)
            _box(ax, x, 2.75, 2, 1.9, fill=tint(RANK[4 * node + gpu], 0.35))
            _text(ax, x + 1, 3.15, f"GPU {gpu}")
            _box(ax, x + 0.25, 3.6, 1.5, 0.8, "HBM")
            _arrow(ax, (x + 1, 4.65), (x + 1, 5.25), **thin)
        _box(ax, left + 0.4, 5.25, 8.6, 0.7, "PCIe", fill=tint(KIND["wait"]))
        for x, label in ((left + 0.4, "CPU and its memory"), (left + 4.9, "network cards")):
            _arrow(ax, (x + 2.05, 5.95), (x + 2.05, 6.6), **thin)
            _box(ax, x, 6.6, 4.1, 0.9, label)
        _arrow(ax, (left + 6.95, 7.5), (left + 6.95, 9.1), **thin)
    _box(ax, 0.3, 9.1, 19.4, 0.9, "InfiniBand, or Ethernet with RoCE", fill=tint(KIND["recv"]))
    return figure


def ranks(nodes: int = 2, per_node: int = 4) -> Figure:
    """Who is called what: rank, local rank, node rank and world size."""
    wide = 2.5 * per_node + 0.5
    figure, ax = _canvas(nodes * (wide + 0.5) + 0.5, 5)
    for node in range(nodes):
        left = 0.5 + node * (wide + 0.5)
        _box(ax, left, 0.3, wide, 3.5, fill="#F7F7F7")
        _text(ax, left + 0.3, 0.85, f"node rank {node}", ha="left", weight="bold")
        for local in range(per_node):
            rank = node * per_node + local
            x = left + 0.3 + 2.5 * local
            _box(ax, x, 1.4, 2.4, 2.1, fill=tint(RANK[rank % len(RANK)], 0.35))
            _text(ax, x + 1.2, 1.95, f"rank {rank}", weight="bold")
            _text(ax, x + 1.2, 2.8, f"local\nrank {local}")
    _text(ax, 0.5, 4.4, f"world size {nodes * per_node}, local world size {per_node}", ha="left")
    return figure


def batch_shards(p: int = 4) -> Figure:
    """Data parallelism: the batch is cut into blocks of rows, the model is copied, the gradients are averaged."""
    figure, ax = _canvas(20, 2 * p + 1.3)
    bottom = 1 + 2 * p
    for x, title in ((1.7, "batch"), (6.1, "shard"), (10.7, "model"), (14.6, "gradient"), (18.4, "average")):
        _text(ax, x, 0.45, title, weight="bold")
    for r in range(p):
        y, colour = 1 + 2 * r, RANK[r % len(RANK)]
        for row in range(2):  # two samples for each rank
            ax.add_patch(Rectangle((0.3, y + row), 2.8, 1, fc=tint(colour), ec=INK, lw=0.8))
            ax.add_patch(Rectangle((4.7, y + 0.2 + 0.8 * row), 2.8, 0.8, fc=tint(colour), ec=INK, lw=0.8))
        _arrow(ax, (3.2, y + 1), (4.5, y + 1))
        _text(ax, 6.1, y + 0.6, f"rank {r}")
        _arrow(ax, (7.6, y + 1), (8.9, y + 1))
        _box(ax, 9.1, y + 0.2, 3.2, 1.6, "$\\theta$, all of it", fill="#F7F7F7")
        _arrow(ax, (12.4, y + 1), (13.7, y + 1))
        _piece(ax, 14.1, y + 0.5, (frozenset([r]), f"$g_{r}$"))
        _arrow(ax, (15.2, y + 1), (16.1, y + 1))
        _arrow(ax, (17, y + 1), (17.8, y + 1))
        _piece(ax, 17.9, y + 0.5, (frozenset(range(p)), "$g$"))
    _box(ax, 16.2, 1.1, 0.8, bottom - 1.2, fill=tint(KIND["collective"]))
    ax.text(16.6, (1 + bottom) / 2, "all-reduce", rotation=90, ha="center", va="center", fontsize=TEXT, color=INK)
    return figure


def tcp_and_rdma() -> Figure:
    """The stations a byte passes between two GPUs: through both CPUs, or past them."""
    figure, ax = _canvas(20, 5.7)
    labels = ["GPU\nmemory", "CPU\nmemory", "socket buffer\nin the kernel", "ring buffer\nof the card"]
    widths = [1.9, 1.9, 2.6, 2.2]
    boxes = [(0.2 + sum(widths[:i]) + 0.3 * i, widths[i], labels[i]) for i in range(4)]
    boxes += [(20 - x - width, width, label) for x, width, label in boxes[::-1]]  # the other side, mirrored
    rows = ((1.0, "TCP: the CPUs copy and pack", range(8)), (3.9, "RDMA: the cards do it", (0, 3, 4, 7)))
    for y, title, used in rows:
        _text(ax, 0.2, y - 0.45, title, ha="left", weight="bold")
        for i in used:
            x, width, label = boxes[i]
            _box(ax, x, y, width, 1.5, label, fill=tint(KIND["error"], 0.3) if i in (1, 2, 5, 6) else "white")
        for here, there in itertools.pairwise(used):
            start, end = boxes[here][0] + boxes[here][1], boxes[there][0]
            _arrow(ax, (start, y + 0.75), (end, y + 0.75), mutation_scale=8)
    return figure


# Data -------------------------------------------------------------------------------------------------------


def window(text: str, start: int, length: int) -> Figure:
    """A stretch of tokens, one window of it, and the targets: the same window one further."""
    figure, ax = _canvas(max(len(text), 20) + 5, 6.4)
    left = 4.4
    rows = ((1.1, "tokens", 0, len(text)), (3.1, "x", start, length), (4.4, "y", start + 1, length))
    for y, name, first, count in rows:
        _text(ax, left - 0.4, y + 0.5, name, ha="right", weight="bold")
        for i in range(first, first + count):
            inside = name == "tokens" and start <= i <= start + length
            colour = {"x": RANK[0], "y": RANK[1]}.get(name, KIND["wait"] if inside else "#FFFFFF")
            ax.add_patch(Rectangle((left + i, y), 1, 1, fc=tint(colour, 0.4), ec=INK if inside else FAINT, lw=0.8))
            shown = {" ": "\u2423", "\n": "\u21b5"}.get(text[i], text[i])
            _text(ax, left + i + 0.5, y + 0.5, shown, family="monospace")
    _text(ax, left + start + 0.5, 0.6, "start")
    _text(ax, left + start, 5.9, "y[t] is what follows x[t]", ha="left")
    return figure


# Collectives ------------------------------------------------------------------------------------------------


def primitive(op: str, p: int = 4) -> Figure:
    """Before and after a collective: one row of pieces for each rank."""

    def piece(ranks: Iterable[int], k: int) -> Piece:
        return frozenset(ranks), str(k)

    everyone, pieces = range(p), range(p)
    own = [[piece([r], k) for k in pieces] for r in everyone]
    nothing = [[EMPTY] * p for _ in everyone]
    total = [piece(everyone, k) for k in pieces]
    shards = [[piece([r], k) if r == k else EMPTY for k in pieces] for r in everyone]
    before, after = {
        "broadcast": ([own[0], *nothing[1:]], [own[0]] * p),
        "scatter": (
            [own[0], *nothing[1:]],
            [[piece([0], k) if r == k else EMPTY for k in pieces] for r in everyone],
        ),
        "gather": (shards, [[piece([k], k) for k in pieces], *shards[1:]]),
        "reduce": (own, [total, *own[1:]]),
        "all_gather": (shards, [[piece([k], k) for k in pieces]] * p),
        "reduce_scatter": (own, [[total[k] if r == k else EMPTY for k in pieces] for r in everyone]),
        "all_reduce": (own, [total] * p),
        "all_to_all": (own, [[piece([k], r) for k in pieces] for r in everyone]),
    }[op]
    left, right = 3.2, p + 8.4
    figure, ax = _canvas(right + p + 1.2, 1.3 * p + 1.2)
    for x, title in ((left, "before"), (right, "after")):
        _text(ax, x + p / 2, 0.45, title)
    for r in everyone:
        y = 0.9 + 1.3 * r
        _text(ax, left - 0.4, y + 0.5, f"rank {r}", ha="right")
        for k in pieces:
            _piece(ax, left + k, y, before[r][k])
            _piece(ax, right + k, y, after[r][k])
    middle = 0.9 + 0.65 * p
    _arrow(ax, (left + p + 0.6, middle), (right - 0.6, middle), lw=1.6)
    _text(ax, (left + p + right) / 2, middle - 0.5, op, weight="bold")
    return figure


def ring(op: str, p: int = 4) -> Figure:
    """A ring reduce-scatter or all-gather, one panel per step; thick outlines: what travels next."""
    reduce = op == "reduce_scatter"
    held = [[{r} if reduce or r == k else set() for k in range(p)] for r in range(p)]
    pitch, left = p + 1.7, 3.0
    figure, ax = _canvas(left + p * pitch - 1.2, 1.7 * p + 2.3)
    for step in range(p):
        x0 = left + step * pitch
        _text(ax, x0 + p / 2, 0.5, "start" if step == 0 else f"after step {step}")
        # To be summed a chunk sets out from its owner's right neighbour, to be spread from its owner.
        leaving = {(k + step + (1 if reduce else 0)) % p: k for k in range(p)}
        for r in range(p):
            y = 1.8 + 1.7 * r
            if step == 0:
                _text(ax, left - 0.4, y + 0.5, f"rank {r}", ha="right")
            for k in range(p):
                _piece(
                    ax,
                    x0 + k,
                    y,
                    (frozenset(held[r][k]), str(k)),
                    bold=leaving[r] == k and (reduce or step < p - 1),
                )
        if step == p - 1:
            break
        for r, k in leaving.items():
            y, x = 1.8 + 1.7 * r, x0 + k + 0.5
            _arrow(ax, (x, y + 1), (x, y + 1.7), mutation_scale=9)
            if r == p - 1:  # the ring closes: in again at the top
                _arrow(ax, (x, 1.1), (x, 1.8), mutation_scale=9)
        arrived = {((r + 1) % p, k): held[r][k] for r, k in leaving.items()}
        for (r, k), ranks_in_it in arrived.items():
            held[r][k] = held[r][k] | ranks_in_it
    return figure


def _rounds(start: list[set[int]], plan: list[list[tuple[int, int]]], add: bool) -> Figure:
    """Rounds from top to bottom: what every rank holds, and arrows from sender to receiver in between."""
    p, across, down, left = len(start), 2.0, 2.3, 3.4
    held = [set(h) for h in start]
    figure, ax = _canvas(left + across * max(p, 8), down * (len(plan) + 1) + 0.4)
    for row in range(len(plan) + 1):
        y = 0.9 + down * row
        _text(ax, 0.2, y + 0.5, "start" if row == 0 else f"after round {row}", ha="left")
        for r in range(p):
            x = left + across * r
            if row == 0:
                _text(ax, x + 0.5, 0.4, f"rank {r}")
            _piece(ax, x, y, (frozenset(held[r]), ""))
        if row < len(plan):
            for sender, receiver in plan[row]:
                ends = (left + across * sender + 0.5, y + 1), (left + across * receiver + 0.5, y + down)
                _arrow(ax, *ends, color=RANK[sender % len(RANK)], mutation_scale=10)
            sent = {receiver: held[sender] for sender, receiver in plan[row]}
            held = [(held[r] | sent[r] if add else sent[r]) if r in sent else held[r] for r in range(p)]
    return figure


def tree(op: str = "broadcast", p: int = 8, root: int = 0) -> Figure:
    """A binomial tree: a broadcast doubles the number of holders each round; a reduce runs it backwards."""
    hops = [1 << i for i in range((p - 1).bit_length())]
    plan = [[((r + root) % p, (r + hop + root) % p) for r in range(hop) if r + hop < p] for hop in hops]
    if op == "broadcast":
        return _rounds([{r} if r == root else set() for r in range(p)], plan, add=False)
    return _rounds([{r} for r in range(p)], [[(b, a) for a, b in turn] for turn in plan[::-1]], add=True)


def recursive_doubling(p: int = 8) -> Figure:
    """An all-reduce in which partners at distance 1, 2, 4, ... exchange whole sums."""
    core = 1 << (p.bit_length() - 1)  # the largest power of two that fits
    extra = [(r, r - core) for r in range(core, p)]
    plan = [[(r, r ^ (1 << i)) for r in range(core)] for i in range(core.bit_length() - 1)]
    if extra:
        plan = [extra, *plan, [(b, a) for a, b in extra]]
    return _rounds([{r} for r in range(p)], plan, add=True)


# Model state ------------------------------------------------------------------------------------------------


def stages(p: int = 4) -> Figure:
    """What each rank holds under plain data parallelism and the three stages of ZeRO; dashed: held by another rank.

    Colours are those of the ranks, sizes are not to scale.
    """
    kinds = ("parameters", "gradients", "state")
    held = {"plain": (), "stage 1": kinds[2:], "stage 2": kinds[1:], "stage 3": kinds}
    pitch, left = 3 * 1.5 + 0.7, 2.2
    figure, ax = _canvas(left + len(held) * pitch, p * 1.35 + 4.1)
    _text(ax, left, p * 1.35 + 3.75, "one colour for each rank; sizes are not to scale", ha="left")
    for column, (title, divided) in enumerate(held.items()):
        x0 = left + column * pitch
        _text(ax, x0 + 2.15, 0.45, title, weight="bold")
        for k, kind in enumerate(kinds):
            x = x0 + 1.5 * k
            for r in range(p):
                y = 1 + 1.35 * r
                if column == k == 0:
                    _text(ax, left - 0.3, y + 0.5, f"rank {r}", ha="right")
                for part in range(p):
                    mine = kind not in divided or part == r
                    colour = tint(RANK[r % len(RANK)]) if mine else "white"
                    style = {"ec": INK, "lw": 0.6} if mine else {"ec": FAINT, "lw": 0.6, "ls": (0, (2, 2))}
                    ax.add_patch(Rectangle((x, y + part / p), 1.25, 1 / p, fc=colour, **style))
            turned = {"rotation": 90, "ha": "center", "va": "top", "fontsize": TEXT, "color": INK}
            ax.text(x + 0.62, 1 + 1.35 * p, kind, **turned)
    return figure


def flat_buffer(sizes: Mapping[str, int], p: int = 4) -> Figure:
    """Parameters one after the other in a flat buffer, and the cuts that divide it among p ranks.

    Args:
        sizes: name of each parameter -> its elements.
        p: number of ranks; the buffer is padded to a multiple of it.
    """
    total = sum(sizes.values())
    shard = -(-total // p)
    left, wide = 2.9, 17.0
    unit = wide / (p * shard)
    figure, ax = _canvas(left + wide + 0.2, 4.4)
    start = 0
    for name, n in [*sizes.items(), ("padding", p * shard - total)]:
        style = (
            {"fc": "#F7F7F7", "ec": INK, "lw": 0.8}
            if name != "padding"
            else {"fc": "white", "ec": FAINT, "hatch": "///"}
        )
        if n:
            ax.add_patch(Rectangle((left + start * unit, 0.9), n * unit, 1, **style))
        if n and name != "padding":
            _text(ax, left + (start + n / 2) * unit, 1.4, name)
        start += n
    for r in range(p):
        x = left + r * shard * unit
        ax.add_patch(Rectangle((x, 2.6), shard * unit, 1, fc=tint(RANK[r % len(RANK)]), ec=INK, lw=0.8))
        _text(ax, x + shard * unit / 2, 3.1, f"rank {r}: {shard} elements")
        if r:
            ax.plot([x, x], [0.6, 3.9], color=INK, lw=1, ls=(0, (3, 2)))
    for y, label in ((1.4, "parameters"), (3.1, "shards")):
        _text(ax, left - 0.3, y, label, ha="right", weight="bold")
    return figure
