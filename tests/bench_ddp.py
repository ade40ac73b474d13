"""Step times of data-parallel training: this course's reference beside PyTorch's own, and its ways side by side.

`python -m tests.bench_ddp` prints two tables. On machines with fewer cores than ranks the ranks take turns, and overlap
has nothing to hide behind: compare ways on one machine, not machines.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from autograder.lab import ranks
from autograder.lab.gpt import GPT, GPTConfig

FILE = Path(__file__).parents[1] / "solutions/02_ddp/ddp.py"
CONFIG = GPTConfig(vocab_size=256, context_length=64, width=128, heads=4, layers=4)
ROWS, WARMUP, STEPS, ROUNDS = 4, 2, 5, 3
CAP_MB = 1.0  # the model has 3.5 MB of gradients
WAYS = ("naive", "flat", "per parameter", "bucketed", "torch")


def prepare(student: ModuleType, way: str, model: nn.Module) -> tuple[nn.Module, Callable]:
    """The module to call, and what to call after backward."""
    if way == "torch":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=CAP_MB), lambda: None
    if way == "naive":
        return model, lambda: student.average_gradients(model)
    if way == "flat":
        return model, lambda: student.average_gradients_flat(model)
    ddp = student.OverlappedDDP(model) if way == "per parameter" else student.BucketedDDP(model, CAP_MB)
    return ddp, ddp.finish_gradient_synchronization


def measure(context, ways: tuple[str, ...]) -> dict[str, list[float]]:
    """On a rank: seconds of forward, backward and averaging, for each way in turn, several times round."""
    torch.manual_seed(0)
    prepared = {way: prepare(context.student, way, GPT(CONFIG)) for way in ways}
    tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, CONFIG.context_length + 1))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, (module, finish) in prepared.items():
            for step in range(WARMUP + STEPS):
                module.zero_grad()
                torch.distributed.barrier()
                begin = time.perf_counter()
                logits = module(tokens[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                finish()
                if step >= WARMUP:
                    times[way].append(time.perf_counter() - begin)
    return times


def medians(world_size: int, ways: tuple[str, ...] = WAYS) -> dict[str, float]:
    """Median step time of each way, in seconds; of a step, the slowest rank's time counts."""
    run = ranks.run(measure, world_size, ways, student=FILE, timeout=300)
    return {way: statistics.median(map(max, zip(*(v[way] for v in run.values), strict=True))) for way in ways}


def main() -> None:
    size = sum(p.nbytes for p in GPT(CONFIG).parameters())
    print(f"DDP, a GPT with {size / 2**20:.1f} MB of gradients, {ROWS} sequences on each rank, gloo; ms for a step")
    print(f"{'ranks':>5}  " + "  ".join(f"{way:>13}" for way in WAYS) + "  bucketed/torch")
    for world_size in (2, 4):
        found = medians(world_size)
        row = "  ".join(f"{1000 * found[way]:13.1f}" for way in WAYS)
        print(f"{world_size:>5}  {row}  {found['bucketed'] / found['torch']:14.2f}", flush=True)


if __name__ == "__main__":
    main()
