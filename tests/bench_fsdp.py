"""FSDP: step time and peak bytes, this course's reference beside PyTorch's own fully_shard, and plain DDP beside both.

`python -m tests.bench_fsdp` prints a table. Peak bytes are the most live tensor bytes of a rank in one step, parameters
and gradients and activations together, counted after every operator (so in a step of its own, which is not timed).
"""

import statistics
import time
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from autograder.lab import ranks
from autograder.lab.gpt import GPT, GPTConfig
from autograder.lab.live import LiveTensors

FILE = Path(__file__).parents[1] / "solutions/04_fsdp/fsdp.py"
CONFIG = GPTConfig(vocab_size=256, context_length=64, width=128, heads=4, layers=6)
ROWS, WARMUP, STEPS, ROUNDS = 2, 2, 5, 3
WAYS = ("DDP", "torch", "reference", "prefetch")
PRELOAD = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh", "torch.utils.checkpoint")


def prepare(student: ModuleType, way: str) -> nn.Module:
    """The module to call."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    if way == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if way == "torch":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    return student.FSDP(model, list(model.blocks), prefetch=way == "prefetch")


def measure(context, ways: tuple[str, ...]) -> list:
    """On a rank: seconds of forward and backward for each way in turn, several times round, and the peak of each."""
    tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, CONFIG.context_length + 1))
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}

    def step(module: nn.Module) -> None:
        logits = module(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    for way in ways:
        with LiveTensors(peak=True) as live:
            module = prepare(context.student, way)
            step(module)
            live.reset_peak()
            step(module)
            peaks[way] = live.peak()
        del module
    prepared = {way: prepare(context.student, way) for way in ways}
    for _ in range(ROUNDS):
        for way, module in prepared.items():
            for k in range(WARMUP + STEPS):
                torch.distributed.barrier()
                begin = time.perf_counter()
                step(module)
                if k >= WARMUP:
                    times[way].append(time.perf_counter() - begin)
    return [times, peaks]


def medians(world_size: int, ways: tuple[str, ...] = WAYS) -> tuple[dict[str, float], dict[str, int]]:
    """Of each way the median step time in seconds (of the slowest rank), and the largest rank's peak bytes."""
    run = ranks.run(measure, world_size, ways, student=FILE, preload=PRELOAD, timeout=300)
    times = {way: statistics.median(map(max, zip(*(v[0][way] for v in run.values), strict=True))) for way in ways}
    return times, {way: max(v[1][way] for v in run.values) for way in ways}


def main() -> None:
    size = sum(p.nbytes for p in GPT(CONFIG).parameters())
    print(f"FSDP, a GPT of {size / 2**20:.1f} MB in {CONFIG.layers} blocks, {ROWS} sequences on each rank, gloo")
    print(f"{'ranks':>5}  {'':>8}  " + "  ".join(f"{way:>10}" for way in WAYS) + "  reference/torch")
    for world_size in (2, 4):
        times, peaks = medians(world_size)
        for what, found, scale in (("ms", times, 1e3), ("peak MB", peaks, 2**-20)):
            row = "  ".join(f"{scale * found[way]:10.1f}" for way in WAYS)
            ratio = found["reference"] / found["torch"]
            print(f"{world_size:>5}  {what:>8}  {row}  {ratio:15.2f}", flush=True)


if __name__ == "__main__":
    main()
