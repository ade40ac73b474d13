"""The one look of the course: lectures, timelines and reports all draw with these colours (Okabe and Ito, 2008)."""

# Rank r always has colour RANK[r % 8], whatever is drawn.
RANK = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C7A00", "#666666"]

# What an operation does, in timelines and ledgers.
KIND = {
    "send": "#0072B2",
    "recv": "#56B4E9",
    "collective": "#E69F00",
    "compute": "#009E73",
    "wait": "#D9D9D9",
    "error": "#D55E00",
}

# What bytes are, in charts of memory. No rank's colour: a part is not a rank.
PART = {
    "parameters": "#332288",
    "weights": "#332288",
    "fp32 copy": "#88AADD",
    "gradients": "#882255",
    "optimizer state": "#117733",
    "first moment": "#117733",
    "second moment": "#88C299",
    "activations": "#AA9955",
    "saved activations": "#AA9955",
}

# Collectives, in charts of what is sent: those that sum are blue, those that spread are yellow.
OP = {
    "reduce_scatter": KIND["send"],
    "reduce": KIND["recv"],
    "all_gather": KIND["collective"],
    "broadcast": "#F3CF7A",
    "all_reduce": "#666666",  # both
}

STAGE = {"plain": "#222222", "stage 1": "#5C3A21", "stage 2": "#A0673A", "stage 3": "#C9A27A"}  # of ZeRO, as lines

INK = "#222222"  # text and outlines
FAINT = "#BBBBBB"  # grids, idle areas, everything that should recede

WIDTH = 7.5  # inches: a notebook page
TEXT = 9.5  # points: the smallest text in a lecture's picture


def tint(colour: str, strength: float = 0.5) -> tuple[float, ...]:
    """The colour mixed with white, so that dark text can be read on it."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(1 - strength * (1 - part) for part in rgb)
