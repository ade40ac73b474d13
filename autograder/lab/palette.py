"""The one colour code of the course: lectures, timelines and reports all draw with it (Okabe and Ito, 2008)."""

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

INK = "#222222"  # text and outlines
FAINT = "#BBBBBB"  # grids, idle areas, everything that should recede
