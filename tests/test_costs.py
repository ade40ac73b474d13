"""The cost model against published figures, hand-computed cases, and the algorithms played round by round."""

import math

import pytest

from autograder.lab import costs
from autograder.lab.costs import bytes_sent, collective_time, effective_bandwidth, fit_alpha_beta

ELEMENTS = 100 * 1024**2  # fp32: 419,430,400 bytes
PUBLISHED = {  # p = 4: (milliseconds, printed "GB/s") of ranks 0 to 3. The GPU is not named.
    "all_reduce": (4 * ELEMENTS, [(1.60, 366), (1.50, 390), (1.38, 426), (1.38, 425)]),
    "reduce_scatter": (4 * 4 * ELEMENTS, [(2.61, 450), (2.47, 475), (2.39, 490), (2.39, 490)]),
}


@pytest.mark.parametrize("op", PUBLISHED)
def test_published_run_is_in_gib_per_second(op):
    nbytes, rows = PUBLISHED[op]
    for milliseconds, printed in rows:
        # Both columns are rounded: the bandwidth lies between those of the longest and shortest such time.
        slow, fast = (
            effective_bandwidth(op, nbytes, 4, (milliseconds + half_digit) * 1e-3) / costs.GIB
            for half_digit in (0.005, -0.005)
        )
        assert slow - 0.5 <= printed <= fast + 0.5
        assert effective_bandwidth(op, nbytes, 4, milliseconds * 1e-3) / costs.GB > printed * 1.06


def test_published_run_in_round_numbers():
    assert 4 * ELEMENTS == 419_430_400
    assert bytes_sent("all_reduce", 419_430_400, 4) == 629_145_600
    assert 4 * bytes_sent("all_reduce", 419_430_400, 4) == 2 * 419_430_400 * 3  # 2 s (p-1) over all ranks
    assert effective_bandwidth("all_reduce", 419_430_400, 4, 1.60e-3) / costs.GIB == pytest.approx(366.2, abs=0.05)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("broadcast", 1),
        ("reduce", 1),
        ("scatter", 3 / 4),
        ("gather", 1 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("all_reduce", 3 / 2),
    ],
)
def test_bytes_sent(op, factor):
    assert bytes_sent(op, 1000, 4) == factor * 1000
    assert bytes_sent(op, 1000, 1) == 0
    assert bytes_sent(op, 0, 4) == 0


@pytest.mark.parametrize("p", range(2, 20))
def test_ring_times_without_latency(p):
    size, bandwidth = 3e9, 5e10
    once = (p - 1) / p * size / bandwidth
    assert collective_time("reduce_scatter", size, p, 0, bandwidth, "ring") == pytest.approx(once)
    assert collective_time("all_gather", size, p, 0, bandwidth, "ring") == pytest.approx(once)
    assert collective_time("all_reduce", size, p, 0, bandwidth, "ring") == pytest.approx(2 * once)


def test_all_reduce_is_reduce_scatter_then_all_gather():
    link = (7e-6, 3e9)
    parts = sum(collective_time(op, 1e6, 6, *link, "ring") for op in ("reduce_scatter", "all_gather"))
    assert collective_time("all_reduce", 1e6, 6, *link, "ring") == pytest.approx(parts)


@pytest.mark.parametrize("p", range(1, 40))
def test_rounds(p):
    def rounds(op, algorithm):
        return collective_time(op, 0, p, 1, 1, algorithm)

    log = math.ceil(math.log2(p))
    assert rounds("all_reduce", "ring") == 2 * (p - 1)
    for op in ("broadcast", "reduce", "scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"):
        assert rounds(op, "ring") == p - 1
    assert rounds("broadcast", "tree") == rounds("reduce", "tree") == log
    assert rounds("all_reduce", "tree") == 2 * log
    assert rounds("all_gather", "recursive_doubling") == log
    doubling = rounds("all_reduce", "recursive_doubling")
    assert doubling == (log if p == 2**log else math.floor(math.log2(p)) + 2)


@pytest.mark.parametrize("p", range(2, 34))
def test_binomial_scatter_as_played(p):
    """Each holder of a range of pieces sends away its upper part, whole rounds before small ones."""
    alpha, bandwidth, size = 1.0, 1.0, 12.0 * p
    ready, span = {0: 0.0}, {0: p}
    step = 1 << ((p - 1).bit_length() - 1)
    while step:
        for rank in [r for r in list(ready) if r + step < p and span[r] > step]:
            pieces = span[rank] - step
            ready[rank] += alpha + pieces * size / p / bandwidth
            span[rank] = step
            ready[rank + step], span[rank + step] = ready[rank], pieces
        step //= 2
    assert max(ready.values()) == pytest.approx(collective_time("scatter", size, p, alpha, bandwidth, "tree"))


@pytest.mark.parametrize("op", costs.OPS)
@pytest.mark.parametrize("algorithm", costs.ALGORITHMS)
def test_every_pair_answers_or_says_why_not(op, algorithm):
    refused = op == "all_to_all" and algorithm == "tree"
    refused |= algorithm == "recursive_doubling" and op not in ("all_gather", "reduce_scatter", "all_reduce")
    if refused:
        with pytest.raises(ValueError, match="table of collective_time"):
            collective_time(op, 1e6, 4, 1e-6, 1e9, algorithm)
    else:
        assert collective_time(op, 1e6, 4, 1e-6, 1e9, algorithm) > 0
        assert collective_time(op, 1e6, 1, 1e-6, 1e9, algorithm) == 0


def test_small_messages_want_few_rounds_and_large_ones_few_bytes():
    def fastest(size):
        return min(costs.ALGORITHMS, key=lambda a: collective_time("all_reduce", size, 16, 1e-5, 1e10, a))

    assert fastest(8) == "recursive_doubling"
    assert fastest(1e9) == "ring"


def test_fit_recovers_exact_and_noisy_lines():
    sizes = [4 * 2**k for k in range(0, 24, 2)]
    exact = [2e-5 + s / 3e9 for s in sizes]
    assert fit_alpha_beta(sizes, exact) == pytest.approx((2e-5, 3e9))
    noisy = [t * (1.1 if k % 2 else 0.9) for k, t in enumerate(exact)]
    assert fit_alpha_beta(sizes, noisy) == pytest.approx((2e-5, 3e9), rel=0.15)


def test_links():
    assert costs.NVLINK5.bandwidth / costs.INFINIBAND.bandwidth == pytest.approx(18)  # like for like; 36 as printed
    assert costs.INFINIBAND.bandwidth == pytest.approx(400e9 / 8)
    assert costs.ETHERNET.bandwidth * 8 == pytest.approx(1.6e9)
    ordered = [link.bandwidth for link in costs.LINKS]
    assert ordered == sorted(ordered, reverse=True)
    for link in costs.LINKS:
        assert link.time(0) == link.latency
        assert link.time(link.crossing) == pytest.approx(2 * link.latency)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bytes_sent("allreduce", 8, 2), "unknown operation 'allreduce'"),
        (lambda: bytes_sent("all_reduce", -1, 2), "nbytes"),
        (lambda: bytes_sent("all_reduce", 8, 0), "p must be"),
        (lambda: bytes_sent("all_reduce", 8, 2.5), "p must be"),
        (lambda: effective_bandwidth("all_reduce", 8, 2, 0), "seconds"),
        (lambda: collective_time("all_reduce", 8, 2, -1, 1, "ring"), "alpha"),
        (lambda: collective_time("all_reduce", 8, 2, 0, 0, "ring"), "bandwidth"),
        (lambda: collective_time("all_reduce", 8, 2, 0, 1, "star"), "unknown algorithm 'star'"),
        (lambda: fit_alpha_beta([8, 8], [1, 1]), "two different"),
        (lambda: fit_alpha_beta([8, 16], [1]), "equal length"),
        (lambda: fit_alpha_beta([8, 16], [1, 0]), "positive"),
        (lambda: fit_alpha_beta([8, 16], [2, 1]), "do not grow"),
    ],
)
def test_errors_say_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=says):
        call()
