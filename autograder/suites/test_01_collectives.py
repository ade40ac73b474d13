"""The public checks of module 01: collectives built from messages between two ranks."""

import math
from collections.abc import Callable

import numpy as np
import torch

from autograder.lab import ledger
from autograder.lab.findings import Finding
from autograder.lab.ranks import Run
from autograder.suites.collective_calls import ANY_SHAPE, CALLS, SHAPES, TREES, WORLD_SIZES, Call, Draw, make
from autograder.suites.kit import P2P_ONLY, Module, Problem, check, draw_int, fail, messages, numbers_agree

MODULE = Module(
    "01_collectives",
    "Collectives from messages between two ranks",
    files=["collectives.py"],
    problems=[
        Problem("broadcast", 10, "Broadcast along a tree", "Broadcast"),
        Problem("scatter_gather", 10, "Scatter and gather", "Scatter and gather"),
        Problem("reduce", 10, "Reduce to one rank", "Reduce"),
        Problem("ring_all_gather", 12, "All-gather around a ring", "Ring all-gather"),
        Problem("ring_reduce_scatter", 12, "Reduce-scatter around a ring", "Ring reduce-scatter"),
        Problem("ring_all_reduce", 14, "All-reduce around a ring", "Ring all-reduce"),
        Problem("all_to_all", 10, "All-to-all with uneven sizes", "All-to-all"),
        Problem("recursive_doubling_all_reduce", 12, "All-reduce in few rounds", "Recursive doubling"),
        Problem("accounting", 10, "What a collective costs", "Accounting"),
    ],
    waiting="Sends that wait for each other",
    preload=(),
    refuse=P2P_ONLY,
)

# ------------------------------------------------------------------------------------- what all collectives are asked


def expect_values(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """Right on 1 to 5 ranks, in several dtypes and shapes, from every root."""
    for p in (*WORLD_SIZES, 4) if function in TREES else WORLD_SIZES:
        members = list(range(p))
        shapes = SHAPES + [(torch.float64, ())] * (function in ANY_SHAPE)
        calls = [
            CALLS[function](Draw(rng, dtype, shape), members, (p - 1 + i) % p)
            for i, (dtype, shape) in enumerate(shapes if p == 3 else shapes[:3])  # all of them on one number of ranks
        ]
        make(ranks, function, calls, p)


def expect_strided(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """Right for tensors that are not contiguous: every other element of a vector, a transposed matrix."""
    members = [0, 1, 2]
    draws = [Draw(rng, torch.float64, (5,), "strided"), Draw(rng, torch.float32, (3, 4), "transposed")]
    make(ranks, function, [CALLS[function](draw, members, 2) for draw in draws], 3)


def expect_subgroup(ranks: Callable, rng: torch.Generator, function: str) -> None:
    """Right in a group of ranks 1, 3 and 4 of five, from each of them."""
    members = [1, 3, 4]
    calls = [CALLS[function](Draw(rng, torch.float64, (6,)), members, root) for root in range(3)]
    for root, call in zip(members, calls, strict=True):
        call.name += f", group of ranks {members}" if "=" in call.name else f", group of ranks {members} ({root})"
    try:
        make(ranks, function, calls, 5, members)
    except Finding as finding:
        finding.facts.append(("the group", f"global ranks {members} are its ranks 0, 1, 2: {GROUP_ADVICE}"))
        raise


GROUP_ADVICE = "compute neighbours with dist.get_rank(group), send to dist.get_global_rank(group, neighbour)"


def one_call(
    ranks: Callable, rng: torch.Generator, function: str, p: int, shape: tuple[int, ...], root: int = 0
) -> tuple[Run, Call]:
    """One float32 call whose values are right, for a look at its traffic."""
    call = CALLS[function](Draw(rng, torch.float32, shape), list(range(p)), root)
    return make(ranks, function, [call], p), call


def log2_ceil(p: int) -> int:
    return (p - 1).bit_length()


# ----------------------------------------------------------------------------------------------------- broadcast


@check("broadcast", "every rank ends with the source's tensor", weight=4)
def test_broadcast_values(ranks, rng):
    expect_values(ranks, rng, "broadcast")


@check("broadcast", "a tensor that is not contiguous is filled in place", weight=1, section="Strided tensors")
def test_broadcast_strided(ranks, rng):
    expect_strided(ranks, rng, "broadcast")


@check("broadcast", "src is a global rank, in a subgroup too", weight=1, section="Groups")
def test_broadcast_subgroup(ranks, rng):
    expect_subgroup(ranks, rng, "broadcast")


@check("broadcast", "p-1 messages, in at most log2 p rounds", weight=4)
def test_broadcast_tree(ranks, rng):
    for p, root in ((4, 0), (5, 3)):
        run, call = one_call(ranks, rng, "broadcast", p, (6,), root)
        sends = [e for r in range(p) for e in messages(run.events, r)]
        if len(sends) != p - 1 or any(e.numel != 6 for e in sends):
            fail(
                case=call.name,
                expected=f"{p - 1} messages of the whole tensor: each rank but the source gets it once",
                found=f"{len(sends)} messages of {sorted({e.numel for e in sends})} elements",
                line=sends[-1] if sends else None,
            )
        expect_rounds(run, call, log2_ceil(p), "every rank that has the tensor should pass it on in every round")


def expect_rounds(run: Run, call: Call, most: int, advice: str) -> None:
    found = ledger.rounds(run.events)
    if found > most:
        busiest = max(range(run.world_size), key=lambda r: len(messages(run.events, r)))
        sent = messages(run.events, busiest)
        fail(
            case=call.name,
            expected=f"at most {most} rounds on {run.world_size} ranks",
            found=f"{found} rounds on the longest path; rank {busiest} alone sends {len(sent)} messages",
            line=sent[-1],
            perhaps=advice,
        )


# ------------------------------------------------------------------------------------------------ scatter, gather


@check("scatter_gather", "scatter gives each rank its own tensor of the list", weight=3)
def test_scatter_values(ranks, rng):
    expect_values(ranks, rng, "scatter")


@check("scatter_gather", "gather collects the tensors of all ranks on dst", weight=3)
def test_gather_values(ranks, rng):
    expect_values(ranks, rng, "gather")


@check("scatter_gather", "scatter: tensors that are not contiguous, and a subgroup", weight=1)
def test_scatter_strided(ranks, rng):
    expect_strided(ranks, rng, "scatter")
    expect_subgroup(ranks, rng, "scatter")


@check("scatter_gather", "gather: tensors that are not contiguous, and a subgroup", weight=1)
def test_gather_strided(ranks, rng):
    expect_strided(ranks, rng, "gather")
    expect_subgroup(ranks, rng, "gather")


@check("scatter_gather", "only src sends, one chunk to each other rank", weight=1)
def test_scatter_traffic(ranks, rng):
    run, call = one_call(ranks, rng, "scatter", 4, (6,), 2)
    expect_sends(run, call, {(2, to): [6] for to in (0, 1, 3)}, "src sends each chunk to its owner")


@check("scatter_gather", "each rank but dst sends once, to dst", weight=1)
def test_gather_traffic(ranks, rng):
    run, call = one_call(ranks, rng, "gather", 4, (6,), 2)
    expect_sends(run, call, {(r, 2): [6] for r in (0, 1, 3)}, "each rank sends its tensor to dst")


def expect_sends(run: Run, call: Call, wanted: dict[tuple[int, int], int | list[int]], rule: str) -> None:
    """Exactly this traffic: (from, to) -> elements in all, or a list with the elements of each message."""
    found: dict[tuple[int, int], list] = {}
    for rank in range(run.world_size):
        for e in messages(run.events, rank):
            found.setdefault((e.rank, e.peer), []).append(e)
    for pair in wanted.keys() | found.keys():
        asked, sizes = wanted.get(pair, []), [e.numel for e in found.get(pair, [])]
        if (sizes if isinstance(asked, list) else sum(sizes)) != asked:
            fail(
                case=call.name,
                expected=f"{_sizes(asked)} from rank {pair[0]} to rank {pair[1]}: {rule}",
                found=_sizes(sizes),
                line=found[pair][-1] if pair in found else None,
            )


def _sizes(sizes: int | list[int]) -> str:
    if isinstance(sizes, int):
        return f"{sizes} elements"
    if not sizes:
        return "no message"
    return f"{len(sizes)} message{'s' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} elements"


# -------------------------------------------------------------------------------------------------------- reduce


@check("reduce", "dst ends with the sum, the other ranks' tensors are as they were", weight=5)
def test_reduce_values(ranks, rng):
    expect_values(ranks, rng, "reduce")


@check("reduce", "a tensor that is not contiguous is summed in place", weight=1, section="Strided tensors")
def test_reduce_strided(ranks, rng):
    expect_strided(ranks, rng, "reduce")


@check("reduce", "dst is a global rank, in a subgroup too", weight=1, section="Groups")
def test_reduce_subgroup(ranks, rng):
    expect_subgroup(ranks, rng, "reduce")


@check("reduce", "dst receives at most log2 p tensors", weight=3)
def test_reduce_traffic(ranks, rng):
    for p, root in ((4, 1), (5, 0)):
        run, call = one_call(ranks, rng, "reduce", p, (6,), root)
        arriving = messages(run.events, root, "recv")
        elements = sum(e.numel for e in arriving)
        if elements > 6 * log2_ceil(p):
            fail(
                case=call.name,
                expected=f"at most {log2_ceil(p)} tensors received by rank {root}, of {p} ranks",
                found=f"{elements / 6:g} tensors in {len(arriving)} messages",
                line=arriving[-1],
                perhaps="every rank sends straight to dst, which then does all the adding; let others add up first",
            )


# --------------------------------------------------------------------------------------------------------- rings


def expect_ring(run: Run, call: Call) -> None:
    """Everything that a rank sends goes to its right neighbour."""
    p = run.world_size
    for rank in range(p):
        for e in messages(run.events, rank):
            if e.peer != (rank + 1) % p:
                fail(
                    case=call.name,
                    expected=f"rank {rank} sends to rank {(rank + 1) % p} only, its right neighbour",
                    found=f"a message to rank {e.peer}",
                    line=e,
                    perhaps="the ring runs to rank (rank + 1) mod p; the left neighbour is received from",
                )


def expect_ring_steps(run: Run, call: Call, n: int) -> None:
    """Each rank sends (p-1)·n elements, in as many messages as it likes."""
    p = run.world_size
    for rank in range(p):
        sent = messages(run.events, rank)
        elements = sum(e.numel for e in sent)
        if elements == (p - 1) * n:
            continue
        whole = sent and all(e.numel == p * n for e in sent)
        fail(
            case=call.name,
            expected=f"rank {rank} sends {p - 1} chunks of {n} elements, {(p - 1) * n} in all (p = {p})",
            found=f"{elements} elements in {len(sent)} messages",
            line=sent[-1] if sent else None,
            perhaps="the whole tensor travels in every step; only one chunk of it is new to the neighbour"
            if whole
            else None,
        )


@check("ring_all_gather", "every rank ends with all chunks in order, and its own as it was", weight=4)
def test_ring_all_gather_values(ranks, rng):
    expect_values(ranks, rng, "ring_all_gather")


@check("ring_all_gather", "tensors that are not contiguous", weight=2, section="Strided tensors")
def test_ring_all_gather_strided(ranks, rng):
    expect_strided(ranks, rng, "ring_all_gather")


@check("ring_all_gather", "neighbours are neighbours in the group", weight=2, section="Groups")
def test_ring_all_gather_subgroup(ranks, rng):
    expect_subgroup(ranks, rng, "ring_all_gather")


@check("ring_all_gather", "p-1 steps of one chunk, to the right neighbour only", weight=4)
def test_ring_all_gather_traffic(ranks, rng):
    run, call = one_call(ranks, rng, "ring_all_gather", 4, (6,))
    expect_ring(run, call)
    expect_ring_steps(run, call, 6)


@check("ring_reduce_scatter", "each rank ends with its chunk of the sum, and its input as it was", weight=4)
def test_ring_reduce_scatter_values(ranks, rng):
    expect_values(ranks, rng, "ring_reduce_scatter")


@check("ring_reduce_scatter", "tensors that are not contiguous", weight=2, section="Strided tensors")
def test_ring_reduce_scatter_strided(ranks, rng):
    expect_strided(ranks, rng, "ring_reduce_scatter")


@check("ring_reduce_scatter", "neighbours are neighbours in the group", weight=2, section="Groups")
def test_ring_reduce_scatter_subgroup(ranks, rng):
    expect_subgroup(ranks, rng, "ring_reduce_scatter")


@check("ring_reduce_scatter", "p-1 steps of one chunk, to the right neighbour only", weight=4)
def test_ring_reduce_scatter_traffic(ranks, rng):
    run, call = one_call(ranks, rng, "ring_reduce_scatter", 4, (6,))
    expect_ring(run, call)
    expect_ring_steps(run, call, 6)


@check("ring_all_reduce", "every rank ends with the sum, for any number of elements", weight=4)
def test_ring_all_reduce_values(ranks, rng):
    expect_values(ranks, rng, "ring_all_reduce")


@check("ring_all_reduce", "a tensor that is not contiguous is summed in place", weight=2, section="Strided tensors")
def test_ring_all_reduce_strided(ranks, rng):
    expect_strided(ranks, rng, "ring_all_reduce")


@check("ring_all_reduce", "neighbours are neighbours in the group", weight=2, section="Groups")
def test_ring_all_reduce_subgroup(ranks, rng):
    expect_subgroup(ranks, rng, "ring_all_reduce")


@check(
    "ring_all_reduce",
    "at most 2(p-1)/p of the tensor's bytes per rank, to the right neighbour only",
    weight=6,
)
def test_ring_all_reduce_traffic(ranks, rng):
    for p, shape in ((4, (1000,)), (4, (3, 500)), (5, (1003,))):
        run, call = one_call(ranks, rng, "ring_all_reduce", p, shape)
        expect_ring(run, call)
        n = math.prod(shape)
        padding = p - 1 if n % p else 0  # elements a step
        for rank in range(p):
            sent, limit = run.sent(rank), 2 * (p - 1) * 4 * (n / p + padding)
            if sent > limit:
                biggest = max(messages(run.events, rank), key=lambda e: e.nbytes)
                whole = biggest.numel == n
                fail(
                    case=call.name,
                    expected=f"rank {rank} sends about 2(p-1)/p · {4 * n} = {8 * n * (p - 1) / p:.0f} bytes (p = {p})",
                    found=f"{sent} bytes, {sent / (4 * n):.2f} times the tensor; the largest message has "
                    f"{biggest.numel} of {n} elements",
                    line=biggest,
                    perhaps="the whole tensor travels in every step; cut it into p chunks and send one a step"
                    if whole
                    else "p chunks of all elements together, not of rows; each travels p-1 times, and p-1 times again",
                )


# ---------------------------------------------------------------------------------------------------- all-to-all


@check("all_to_all", "outputs[i] is what rank i had for this rank", weight=4)
def test_all_to_all_values(ranks, rng):
    expect_values(ranks, rng, "all_to_all")


@check("all_to_all", "tensors that are not contiguous", weight=1, section="Strided tensors")
def test_all_to_all_strided(ranks, rng):
    expect_strided(ranks, rng, "all_to_all")


@check("all_to_all", "the lists are in the order of the group's ranks", weight=1, section="Groups")
def test_all_to_all_subgroup(ranks, rng):
    expect_subgroup(ranks, rng, "all_to_all")


@check("all_to_all", "each rank sends only what leaves it, straight to where it belongs", weight=4)
def test_all_to_all_traffic(ranks, rng):
    for p in (4, 3):
        run, call = one_call(ranks, rng, "all_to_all", p, (4,))
        wanted = {
            (i, j): call.arguments[i][1][j].numel()
            for i in range(p)
            for j in range(p)
            if i != j and call.arguments[i][1][j].numel()
        }
        expect_sends(run, call, wanted, "inputs[j] of rank i goes to rank j, in as many messages as you like")


# -------------------------------------------------------------------------------------------- recursive doubling


@check(
    "recursive_doubling_all_reduce",
    "every rank ends with the sum, whether or not p is a power of two",
    weight=4,
)
def test_recursive_doubling_values(ranks, rng):
    expect_values(ranks, rng, "recursive_doubling_all_reduce")


@check(
    "recursive_doubling_all_reduce",
    "a tensor that is not contiguous is summed in place",
    weight=2,
    section="Strided tensors",
)
def test_recursive_doubling_strided(ranks, rng):
    expect_strided(ranks, rng, "recursive_doubling_all_reduce")


@check("recursive_doubling_all_reduce", "partners are found by their rank in the group", weight=2, section="Groups")
def test_recursive_doubling_subgroup(ranks, rng):
    expect_subgroup(ranks, rng, "recursive_doubling_all_reduce")


@check("recursive_doubling_all_reduce", "at most log2 p + 2 rounds", weight=4)
def test_recursive_doubling_rounds(ranks, rng):
    for p in (8, 5):
        run, call = one_call(ranks, rng, "recursive_doubling_all_reduce", p, (6,))
        levels = p.bit_length() - 1
        for rank in range(p):
            sent = messages(run.events, rank)
            if sum(e.numel for e in sent) > 6 * (levels + 1):
                fail(
                    case=call.name,
                    expected=f"rank {rank} sends at most {levels + 1} tensors: one a round",
                    found=f"{sum(e.numel for e in sent) / 6:g} tensors in {len(sent)} messages",
                    line=sent[-1],
                    perhaps="add up what arrives and pass on the sum, not all that was gathered",
                )
        advice = (
            "in each round, exchange with one partner, twice as far as before, and in both directions at once: start "
            "isend and irecv, then wait; a reduce followed by a broadcast takes twice the rounds"
        )
        expect_rounds(run, call, levels + 2, advice)


# ---------------------------------------------------------------------------------------------------- accounting


def call_text(function: str, arguments: list) -> str:
    """The call as it is shown: of a long list, the beginning and the end."""
    shown = []
    for a in arguments:
        items = [f"{x:.4g}" if isinstance(x, float) else repr(x) for x in (a if isinstance(a, list) else [a])]
        if len(items) > 4:
            items = [*items[:2], "...", items[-1]]
        shown.append(f"[{', '.join(items)}]" if isinstance(a, list) else items[0])
    return f"{function}({', '.join(shown)})"


def call_plain(context, function: str, argument_lists: list[list]) -> list:
    """On a rank: call a function without communication; an error about its values becomes text."""
    results = []
    for arguments in argument_lists:
        context.case(call_text(function, arguments))
        try:
            results.append(getattr(context.student, function)(*arguments))
        except (ValueError, LookupError, ArithmeticError) as error:  # the check knows which was asked for
            results.append(type(error).__name__)
    return results


def expect_numbers(
    ranks: Callable,
    function: str,
    table: list[tuple[list, object]],
    perhaps: dict | None = None,
    mistakes: Callable[[list, object], dict[str, object]] = lambda arguments, wanted: {},
) -> None:
    """Each row: arguments, and the number, tuple of numbers or "ValueError" that they must give.

    Args:
        perhaps: an argument of the call -> the misconception that is likely there.
        mistakes: from the arguments and what is wanted: a misconception -> what it would give.
    """
    run = ranks(call_plain, 1, function, [arguments for arguments, _ in table])
    for (arguments, wanted), found in zip(table, run.values[0], strict=True):
        wrong = numbers_agree(found, wanted)
        if wrong:
            hint = "the function ends without a `return`" if found is None else None
            if isinstance(found, int | float):
                hint = next((h for key, h in (perhaps or {}).items() if key in map(str, arguments)), None)
            for mistake, gives in mistakes(arguments, wanted).items():
                if not numbers_agree(found, gives):
                    hint = mistake
            if found == "KeyError":
                hint = "an unknown name is to be a ValueError: say which names there are"
            fail(
                case=call_text(function, arguments),
                expected=wrong[0],
                found=wrong[1],
                line=ranks.definition(function),
                perhaps=hint,
            )


@check("accounting", "bytes that one rank sends, for every collective", weight=3)
def test_accounting_bytes_sent(ranks, rng):
    table = []
    for p in (1, 2, 3, draw_int(rng, 4, 100)):
        s = 24 * p * draw_int(rng, 1, 10**6)
        shares = {
            "all_reduce": 2 * s * (p - 1) / p, "all_gather": s * (p - 1) / p, "reduce_scatter": s * (p - 1) / p,
            "all_to_all": s * (p - 1) / p, "scatter": s * (p - 1) / p, "broadcast": s, "reduce": s, "gather": s / p,
        }  # fmt: skip
        table += [([op, s, p], wanted if p > 1 else 0) for op, wanted in shares.items()]
    table += [(["all_reduce", 10, 3], 2 * 10 * 2 / 3), (["all_reduced", 8, 2], "ValueError")]
    table.append((["all_reduced", 8, 1], "ValueError"))
    hints = {
        "all_reduce": "a reduce-scatter and an all-gather, each (p-1)/p of the tensor",
        "all_gather": "nbytes is the full tensor, not one rank's shard",
        "reduce_scatter": "nbytes is the full tensor, not one rank's shard",
    }
    expect_numbers(ranks, "bytes_sent", table, hints)


@check("accounting", "bandwidth from a measured time, as in the published run on four GPUs", weight=2)
def test_accounting_effective_bandwidth(ranks, rng):
    s, p = 4 * 100 * 1024**2, 4
    table = [(["all_reduce", s, p, t], 2 * s * 3 / 4 / t) for t in (1.60e-3, 1.50e-3, 1.38e-3)]
    table += [(["reduce_scatter", 4 * s, p, t], 4 * s * 3 / 4 / t) for t in (2.61e-3, 2.47e-3, 2.39e-3)]
    n, q = draw_int(rng, 1, 10**9), draw_int(rng, 2, 64)
    table.append((["all_gather", n, q, 0.01], n * (q - 1) / q / 0.01))
    table.append((["all_reduced", 8, 2, 0.01], "ValueError"))
    hints = {"reduce_scatter": "the factor 2 of an all-reduce comes from its two halves; a reduce-scatter is one half"}

    def mistakes(arguments: list, wanted: object) -> dict[str, object]:
        if wanted == "ValueError":
            return {}
        return {
            "the bandwidth is asked for in bytes per second, not in GB/s": wanted / 1e9,
            "the bandwidth is asked for in bytes per second, not in GiB/s": wanted / 2**30,
            "the bytes that this rank sent, divided by the seconds; not the size of the tensor": arguments[1]
            / arguments[3],
        }

    expect_numbers(ranks, "effective_bandwidth", table, hints, mistakes)


@check("accounting", "predicted time of ring, tree and recursive doubling", weight=3)
def test_accounting_collective_time(ranks, rng):
    alpha, bandwidth = 5e-6, 1e9 * draw_int(rng, 1, 900)
    table = []
    for p in (1, 2, 3, 4, 5, 8, draw_int(rng, 9, 500)):
        s = draw_int(rng, 1, 10**9)
        levels = log2_ceil(p)
        fold = 1 if p & (p - 1) else 0
        whole, chunk = alpha + s / bandwidth, alpha + s / p / bandwidth
        growing = levels * alpha + (p - 1) / p * s / bandwidth
        rows = [
            ("ring", "all_reduce", 2 * (p - 1) * chunk), ("ring", "all_gather", (p - 1) * chunk),
            ("ring", "reduce_scatter", (p - 1) * chunk), ("ring", "broadcast", (p - 1) * whole),
            ("ring", "reduce", (p - 1) * whole), ("tree", "broadcast", levels * whole),
            ("tree", "reduce", levels * whole), ("tree", "all_reduce", 2 * levels * whole),
            ("recursive_doubling", "all_reduce", (levels + fold) * whole),
            ("recursive_doubling", "all_gather", growing), ("recursive_doubling", "reduce_scatter", growing),
        ]  # fmt: skip
        table += [([op, s, p, alpha, bandwidth, algorithm], wanted) for algorithm, op, wanted in rows]
    table += [
        (["all_reduce", 8, 4, alpha, bandwidth, "star"], "ValueError"),
        (["all_reduced", 8, 4, alpha, bandwidth, "ring"], "ValueError"),
        (["broadcast", 8, 4, alpha, bandwidth, "recursive_doubling"], "ValueError"),
    ]
    hints = {"ring": "each step of a ring pays alpha once and moves nbytes / p"}

    def mistakes(arguments: list, wanted: object) -> dict[str, object]:
        op, s, p, _, _, algorithm = arguments
        if algorithm != "tree" or p == 1:
            return {}
        once = (alpha + s / bandwidth) * (2 if op == "all_reduce" else 1)
        return {
            "a tree over p ranks has a whole number of rounds: log2 p, rounded up": math.log2(p) * once,
            "log2 p is rounded up, not down": (p.bit_length() - 1) * once,
        }

    expect_numbers(ranks, "collective_time", table, hints, mistakes)


@check("accounting", "latency and bandwidth fitted to measured messages", weight=2)
def test_accounting_fit(ranks, rng):
    table = []
    for noise in (0.0, 0.05, 0.05):
        alpha, bandwidth = draw_int(rng, 10, 100) * 1e-6, draw_int(rng, 5, 20) * 1e8
        sizes = [8000.0 * k for k in range(1, 11)]
        errors = 1 + noise * torch.randn(len(sizes), generator=rng, dtype=torch.float64)
        seconds = [(alpha + s / bandwidth) * float(e) for s, e in zip(sizes, errors, strict=True)]
        slope, level = np.polyfit(sizes, seconds, 1)
        table.append(([sizes, seconds], (float(level), float(1 / slope))))
    table += [(([[1000.0, 1000.0], [1e-6, 2e-6]]), "ValueError"), (([[1000.0], [1e-6]]), "ValueError")]

    def mistakes(arguments: list, wanted: object) -> dict[str, object]:
        if wanted == "ValueError":
            return {}
        level, rate = wanted
        return {
            "the slope is seconds per byte; the bandwidth is one divided by it": (level, 1 / rate),
            "the latency comes first, then the bandwidth": (rate, level),
            "the slope, one divided by it, is the bandwidth: it comes second": (1 / rate, level),
        }

    expect_numbers(ranks, "fit_alpha_beta", table, mistakes=mistakes)
