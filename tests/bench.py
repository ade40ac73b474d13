"""What checking costs, and what it would cost the usual way: `make bench`.

The usual way starts Python and imports torch for every rank of every test (`torch.multiprocessing.spawn`); `ranks.run`
forks ranks from a process that has imported torch once. Both run the same six checks of module 01, on 4 ranks, on the
reference. All times are wall-clock seconds; on a machine that does other things too, they all grow.
"""

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from autograder.grading import catalog, session  # noqa: E402
from autograder.lab import ranks  # noqa: E402
from tests import bench_ddp, bench_fsdp, bench_lab  # noqa: E402

MODULE = "01_collectives"
REFERENCE = ROOT / "solutions" / MODULE / "collectives.py"
P = 4  # ranks
REPEATS = 5

# ------------------------------------------------- six checks; each rank compares with what it knows to be right


def own(rank: int, n: int = 1003) -> torch.Tensor:
    """A tensor that every rank can work out for every rank."""
    return torch.arange(n, dtype=torch.float64) * (rank + 1)


def check_broadcast(module: object, rank: int) -> bool:
    tensor = own(rank)
    module.broadcast(tensor, 1)
    return torch.equal(tensor, own(1))


def check_reduce(module: object, rank: int) -> bool:
    tensor = own(rank)
    module.reduce(tensor, 2)
    return torch.equal(tensor, sum(own(r) for r in range(P)) if rank == 2 else own(rank))


def check_ring_all_gather(module: object, rank: int) -> bool:
    output = torch.empty(P * 1003, dtype=torch.float64)
    module.ring_all_gather(output, own(rank))
    return torch.equal(output, torch.cat([own(r) for r in range(P)]))


def check_ring_reduce_scatter(module: object, rank: int) -> bool:
    output = torch.empty(251, dtype=torch.float64)
    module.ring_reduce_scatter(output, own(rank, P * 251))
    return torch.equal(output, sum(own(r, P * 251) for r in range(P))[rank * 251 : (rank + 1) * 251])


def check_ring_all_reduce(module: object, rank: int) -> bool:
    tensor = own(rank)
    module.ring_all_reduce(tensor)
    return torch.equal(tensor, sum(own(r) for r in range(P)))


def check_all_to_all(module: object, rank: int) -> bool:
    outputs = [torch.empty(rank + 1, dtype=torch.float64) for _ in range(P)]
    module.all_to_all(outputs, [own(rank, to + 1) for to in range(P)])
    return all(torch.equal(outputs[r], own(r, rank + 1)) for r in range(P))


CHECKS = [
    check_broadcast, check_reduce, check_ring_all_gather, check_ring_reduce_scatter, check_ring_all_reduce,
    check_all_to_all,
]  # fmt: skip

# ------------------------------------------------------------------------------------------------ two ways to run


def in_spawned_rank(rank: int, name: str, store: str) -> None:
    """A rank of the usual way: it has imported torch to get here."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, P), rank=rank, world_size=P)
    spec = importlib.util.spec_from_file_location("collectives", REFERENCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert globals()[name](module, rank), name
    dist.destroy_process_group()


def spawned(check: Callable) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_spawned_rank, (check.__name__, f"{folder}/store"), nprocs=P)


def forked(check: Callable) -> None:
    def body(context: ranks.rank_files.RankContext) -> bool:
        return check(context.student, context.rank)

    assert all(ranks.run(body, P, student=REFERENCE).values), check.__name__


def without_recorder(check: Callable) -> None:
    """The same, with the recorder taken off for the check's own part."""

    def body(context: ranks.rank_files.RankContext) -> bool:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return check(context.student, context.rank)

    assert all(ranks.run(body, P, student=REFERENCE).values), check.__name__


def seconds(run: Callable, *arguments: object, repeats: int = REPEATS) -> float:
    """Median of several."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(*arguments)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# --------------------------------------------------------------------------------------------------------- tables


def row(first: str, *cells: str) -> None:
    print(f"  {first:<30}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def whole_module(name: str) -> None:
    print(f"check {name} on the reference")
    row("problem", "checks", "seconds", "median check")
    begin = time.perf_counter()
    report = session.grade_modules((catalog.find_module(name),), ROOT / "solutions")
    took = time.perf_counter() - begin
    assert report.perfect, "the reference does not pass"
    for problem in report.modules[0].problems:
        times = [c.duration_s for c in problem.checks]
        row(problem.problem.name, str(len(times)), f"{sum(times):.1f}", f"{statistics.median(times):.2f}")
    times = [c.duration_s for p in report.modules[0].problems for c in p.checks]
    row("all", str(len(times)), f"{took:.1f}", f"{statistics.median(times):.2f}")


def compare_ways() -> None:
    print(f"\none run of a check on {P} ranks, the usual way and with ranks.run")
    row("check", "spawn, s", "ranks.run, s", "ratio")
    forked(check_broadcast)  # starts the agent
    slow, fast = [], []
    for check in CHECKS:
        slow.append(seconds(spawned, check, repeats=1))
        fast.append(seconds(forked, check))
        name = check.__name__.removeprefix("check_")
        row(name, f"{slow[-1]:.2f}", f"{fast[-1]:.3f}", f"{slow[-1] / fast[-1]:.0f}")
    row("median", f"{statistics.median(slow):.2f}", f"{statistics.median(fast):.3f}", "")
    row("all six", f"{sum(slow):.1f}", f"{sum(fast):.2f}", f"{sum(slow) / sum(fast):.0f}")


def compare_recorder() -> None:
    print(f"\nthe same six checks on {P} ranks with the recorder and without")
    with_it, without = [], []
    for _ in range(REPEATS):  # turn by turn, so that a busy spell meets both
        for check in CHECKS:
            with_it.append(seconds(forked, check, repeats=1))
            without.append(seconds(without_recorder, check, repeats=1))
    row("", "with, s", "without, s", "ratio")
    a, b = statistics.median(with_it), statistics.median(without)
    row("median", f"{a:.3f}", f"{b:.3f}", f"{a / b:.2f}")


def main() -> None:
    """Print the tables; arguments are the modules to check, 01_collectives by default."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    for name in sys.argv[1:] or [MODULE]:
        whole_module(name)
    compare_ways()
    compare_recorder()
    bench_lab.main()
    print()
    bench_ddp.main()
    print()
    bench_fsdp.main()


if __name__ == "__main__":
    main()
