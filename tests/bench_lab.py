"""What recording costs where much is recorded: part of `make bench`. The time with the recorder over that without.

Two kinds of work, on 4 ranks: a check of module 01 in kind (rings of small messages), and a training step that
issues an all-reduce for each parameter.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from autograder.lab import ranks

REPEATS = 9


def rings(context) -> None:
    right, left = (context.rank + 1) % context.world_size, (context.rank - 1) % context.world_size
    tensor, received = torch.ones(1000), torch.ones(1000)
    for _ in range(30):
        works = [dist.isend(tensor, right), dist.irecv(received, left)]
        for work in works:
            work.wait()


def training(context) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])
    for _ in range(3):
        model(torch.ones(32, 128)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


def unrecorded(body: Callable) -> Callable:
    def run(context) -> None:
        with _disable_current_modes():
            body(context)

    return run


def seconds(body: Callable) -> tuple[float, float]:
    """By the clock, and of computing in the ranks: the second depends less on what else the machine does."""

    def timed(context) -> float:
        body(context)
        return time.process_time()

    begin = time.perf_counter()
    run = ranks.run(timed, 4)
    return time.perf_counter() - begin, sum(run.values)


def main() -> None:
    for body in (rings, training):
        seconds(body)
        recorded, plain = zip(*[(seconds(body), seconds(unrecorded(body))) for _ in range(REPEATS)], strict=True)
        for what, kind in enumerate(("by the clock", "of computing")):
            one, other = (min(times[what] for times in column) for column in (recorded, plain))
            print(f"{body.__name__:<9} {one:.3f} s {kind} with the recorder, {other:.3f} s without: {one / other:.2f}x")
