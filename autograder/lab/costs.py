"""What communication costs: T = alpha + bytes / bandwidth, the links, and what each collective sends.

Units everywhere: bytes, seconds, bytes per second. GB and TB are 10^9 and 10^12 bytes; GiB is 2^30.
A bandwidth is what flows in one direction; a note says where the published figure counts both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GB, TB, GIB = 1e9, 1e12, 2**30

OPS = (
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
)
ALGORITHMS = ("ring", "tree", "recursive_doubling")


@dataclass(frozen=True)
class Link:
    """A place where bytes move.

    Attributes:
        name: what it is called.
        bandwidth: bytes per second in one direction.
        latency: seconds before the first byte arrives; an order of magnitude where `source` names none.
        published: the figure as it is usually printed, with its unit.
        source: where the figures come from.
        note: what the printed figure counts, and what the link is good for.
    """

    name: str
    bandwidth: float
    latency: float
    published: str
    source: str
    note: str

    def time(self, nbytes: float) -> float:
        """Seconds for one message of `nbytes` bytes: latency + nbytes / bandwidth."""
        return message_time(nbytes, self.latency, self.bandwidth)

    @property
    def crossing(self) -> float:
        """The message size, in bytes, whose transfer takes as long as the latency: latency x bandwidth."""
        return self.latency * self.bandwidth


_NCCL = "latency of a hop in NCCL's cost model (ring, LL protocol)"

SHARED_MEMORY = Link(
    name="shared memory / L1",
    bandwidth=36 * TB,
    latency=2e-8,
    published="about 36 TB/s",
    source="computed: 32 banks x 4 bytes per clock and SM, 148 SMs, 1.9 GHz; latency about 30 clocks",
    note="an estimate, all SMs of a B200 together; inside one SM, 228 KiB: for tiles, partial sums, fusion",
)
HBM = Link(
    name="HBM3e (B200)",
    bandwidth=8 * TB,
    latency=6e-7,
    published="8 TB/s",
    source="NVIDIA B200 data sheet, 2024; latency an order of magnitude",
    note="reads and writes together; the main ledger of a kernel on one GPU",
)
NVLINK5 = Link(
    name="NVLink 5 / NVSwitch (B200)",
    bandwidth=0.9 * TB,
    latency=6e-7,
    published="1.8 TB/s",
    source=f"NVIDIA B200 data sheet, 2024; {_NCCL}",
    note="the printed figure adds both directions, 0.9 TB/s each; for frequent, tensor-parallel exchanges",
)
PCIE5 = Link(
    name="PCIe 5.0 x16",
    bandwidth=63 * GB,
    latency=1e-6,
    published="63 GB/s",
    source=f"PCI-SIG: 32 GT/s x 16 lanes x 128/130 / 8 bits; {_NCCL}",
    note="one direction; the way from a GPU to its CPU and, on many machines, to its network card",
)
INFINIBAND = Link(
    name="InfiniBand NDR",
    bandwidth=0.05 * TB,
    latency=2.7e-6,
    published="400 Gb/s",
    source=f"InfiniBand Trade Association, NDR 4x: 400 Gb/s / 8 bits; {_NCCL}",
    note="one direction, one port per GPU; fit for exchanges that are large and rare",
)
ROCE = Link(
    name="Ethernet 400 Gb/s with RoCE",
    bandwidth=0.05 * TB,
    latency=2.7e-6,
    published="400 Gb/s",
    source=f"IEEE 802.3bs; the network Llama 3 405B was trained on (Meta, 2024); {_NCCL}",
    note="one direction, one port per GPU; RDMA over Ethernet, as fast as InfiniBand of the same rate",
)
ETHERNET = Link(
    name="Ethernet, traditional",
    bandwidth=200e6,
    latency=5e-5,
    published="200 MB/s",
    source="a traditional office or cloud network (1.6 Gb/s); latency of TCP an order of magnitude",
    note="one direction, shared by a machine; the slow end of the scale, not what GPU clusters have today",
)

# From near to far. The further a byte goes from the arithmetic unit, the dearer it is.
LINKS = (SHARED_MEMORY, HBM, NVLINK5, PCIE5, INFINIBAND, ROCE, ETHERNET)


def message_time(nbytes: float, alpha: float, bandwidth: float) -> float:
    """Seconds for one message: T = alpha + nbytes / bandwidth.

    Args:
        nbytes: size of the message, bytes.
        alpha: latency, seconds.
        bandwidth: bytes per second.
    """
    _check_size(nbytes)
    _check_link(alpha, bandwidth)
    return alpha + nbytes / bandwidth


def bytes_sent(op: str, nbytes: float, p: int) -> float:
    """Bytes that one rank sends in a collective: under the ring algorithm, where there is one.

    Let S = `nbytes`. Where the ranks differ it is one that sends most: any but the last in the chain of a
    broadcast or reduce, the root of a scatter, any but the root of a gather.

        broadcast, reduce                                 S
        all_gather, reduce_scatter, all_to_all, scatter   S (p-1)/p
        all_reduce                                        2 S (p-1)/p   a reduce-scatter, then an all-gather
        gather                                            S/p

    Args:
        op: one of `OPS`, without prefix.
        nbytes: bytes of the full, unsharded tensor: the output of an all_gather, one rank's input of a
            reduce_scatter, all the pieces that one rank holds in an all_to_all.
        p: number of ranks.

    Returns:
        bytes; 0 for p = 1.
    """
    _check_op(op)
    _check_size(nbytes)
    _check_ranks(p)
    if p == 1:
        return 0.0
    if op in ("broadcast", "reduce"):
        return float(nbytes)
    if op == "gather":
        return nbytes / p
    all_but_one = nbytes * (p - 1) / p
    return 2 * all_but_one if op == "all_reduce" else all_but_one


def effective_bandwidth(op: str, nbytes: float, p: int, seconds: float) -> float:
    """Bytes per second that one rank sent: `bytes_sent(op, nbytes, p) / seconds`.

    The ranks work at the same time, so `seconds` is the time of one collective, not a sum over ranks.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    return bytes_sent(op, nbytes, p) / seconds


def collective_time(op: str, nbytes: float, p: int, alpha: float, bandwidth: float, algorithm: str = "ring") -> float:
    """Seconds of a collective among p equal ranks, when each may send one message and receive one at a time.

    Let S = `nbytes`, a = `alpha`, W = `bandwidth`, L = ceil(log2 p), f = (p-1)/p. Arithmetic is free.

        op                           ring                  tree (binomial)         recursive_doubling
        broadcast, reduce            (p-1) (a + S/W)       L (a + S/W)             -
        scatter, gather              (p-1) (a + S/(pW))    L a + f S/W             -
        all_gather, reduce_scatter   (p-1) (a + S/(pW))    2L a + (L + f) S/W      L a + f S/W
        all_reduce                   2(p-1) (a + S/(pW))   2L (a + S/W)            K (a + S/W)
        all_to_all                   (p-1) (a + S/(pW))    -                       -

    Under the ring a broadcast or reduce hands the whole tensor from rank to rank. A tree does an "all"
    operation as one towards a root and one away from it. K, the rounds of recursive doubling on whole
    tensors, is log2 p where p is a power of two; else floor(log2 p) + 2, as the ranks left over hand their
    tensor to a partner first and get the result at the end.

    Args:
        op: one of `OPS`.
        nbytes: bytes of the full, unsharded tensor.
        p: number of ranks.
        alpha: latency of a message, seconds.
        bandwidth: bytes per second, one direction.
        algorithm: one of `ALGORITHMS`.

    Returns:
        seconds; 0 for p = 1.

    Raises:
        ValueError: for an unknown name, an impossible value, or a pair that the table leaves empty.
    """
    _check_op(op)
    _check_size(nbytes)
    _check_ranks(p)
    _check_link(alpha, bandwidth)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: one of {', '.join(ALGORITHMS)}")
    latencies, volume = _rounds_and_bytes(op, nbytes, int(p), algorithm)
    return latencies * alpha + volume / bandwidth


def _rounds_and_bytes(op: str, nbytes: float, p: int, algorithm: str) -> tuple[int, float]:
    """Rounds, and bytes sent one after the other on the longest path."""
    rounds = (p - 1).bit_length()  # ceil(log2 p), exactly
    shares = nbytes * (p - 1) / p

    if algorithm == "ring":
        if op in ("broadcast", "reduce"):
            return p - 1, (p - 1) * nbytes
        laps = 2 if op == "all_reduce" else 1
        return laps * (p - 1), laps * shares

    if algorithm == "tree":
        if op in ("broadcast", "reduce"):
            return rounds, rounds * nbytes
        if op in ("scatter", "gather"):
            return rounds, shares
        if op in ("all_gather", "reduce_scatter"):
            return 2 * rounds, rounds * nbytes + shares
        if op == "all_reduce":
            return 2 * rounds, 2 * rounds * nbytes

    if algorithm == "recursive_doubling":
        if op in ("all_gather", "reduce_scatter"):
            return rounds, shares
        if op == "all_reduce":
            power_of_two = p & (p - 1) == 0
            steps = rounds if power_of_two else p.bit_length() + 1  # floor(log2 p) + 2
            return steps, steps * nbytes

    raise ValueError(f"{op} has no {algorithm} algorithm here: see the table of collective_time")


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth from measured times: the line T = alpha + nbytes / bandwidth nearest to them.

    Least squares on the relative error (T_model - T) / T, so that a message of a microsecond counts as much
    as one of a second; a plain fit would let the largest messages alone decide and leave alpha to
    chance.

    Args:
        nbytes: message sizes, bytes, at least two of them different.
        seconds: the time of each, positive.

    Returns:
        (alpha in seconds, bandwidth in bytes per second).

    Raises:
        ValueError: for too few points, times that are not positive, or times that do not grow with the size.
    """
    size, time = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    if size.ndim != 1 or size.shape != time.shape:
        raise ValueError(f"nbytes and seconds must be two lists of equal length, got {size.shape} and {time.shape}")
    if len(np.unique(size)) < 2:
        raise ValueError("a line needs at least two different message sizes")
    if not (np.isfinite(size).all() and (size >= 0).all() and np.isfinite(time).all() and (time > 0).all()):
        raise ValueError("sizes must be at least 0 and times positive, all of them finite")

    scale = size.max()  # keeps the two columns alike in size
    columns = np.stack([1 / time, size / scale / time], axis=1)
    (alpha, slope), *_ = np.linalg.lstsq(columns, np.ones_like(time), rcond=None)
    if slope <= 0:
        raise ValueError("the times do not grow with the size: no bandwidth can be fitted")
    return float(alpha), float(scale / slope)


def _check_op(op: str) -> None:
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}: one of {', '.join(OPS)}")


def _check_size(nbytes: float) -> None:
    if not (nbytes >= 0 and math.isfinite(nbytes)):
        raise ValueError(f"nbytes must be at least 0, got {nbytes}")


def _check_ranks(p: int) -> None:
    if p != int(p) or p < 1:
        raise ValueError(f"p must be a whole number of ranks, at least 1, got {p}")


def _check_link(alpha: float, bandwidth: float) -> None:
    if not alpha >= 0:
        raise ValueError(f"alpha must be at least 0 seconds, got {alpha}")
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}")
