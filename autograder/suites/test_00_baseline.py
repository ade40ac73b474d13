"""The public checks of module 00: the training run on a single device."""

import contextlib
import io
import linecache
import math
import os
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autograder.lab.gpt import tiny
from autograder.suites.kit import Expect, Module, Problem, check, difference, fail, numbers_agree, one_thread

MODULE = Module(
    "00_baseline",
    "Training on a single device",
    files=["baseline.py"],
    problems=[
        Problem("get_batch", 20, "Random windows of a file of tokens", "Data"),
        Problem("seed_everything", 10, "Seeding every generator", "Seeds"),
        Problem("cosine_lr", 20, "Warm-up and cosine cycles", "The learning rate"),
        Problem("checkpoint", 25, "Checkpoints that survive a crash", "Checkpoints"),
        Problem("train", 25, "The run, and the run resumed", "The training run"),
    ],
    timeout=20.0,
)


def draw_int(rng: torch.Generator, low: int, high: int) -> int:
    """A number from low to high - 1."""
    return int(torch.randint(low, high, (1,), generator=rng))


# ----------------------------------------------------------------------------------------------------- get_batch


def batches(context, tokens: np.ndarray, calls: list[dict], device: str | None = None) -> list:
    """On a rank: the batches of several calls, for some after seeding torch's generator."""
    found = []
    for call in calls:
        context.case(case_of(call, len(tokens)))
        if "seed" in call:
            torch.manual_seed(call["seed"])
        batch = context.student.get_batch(tokens, call["batch_size"], call["context_length"], device or context.device)
        found.append([t.device.type for t in batch] if device else batch)
    return found


def case_of(call: dict, length: int) -> str:
    seeded = f"torch.manual_seed({call['seed']}), " if "seed" in call else ""
    return f"{seeded}{length} tokens, batch_size={call['batch_size']}, context_length={call['context_length']}"


def distinct_tokens(rng: torch.Generator, length: int, dtype: type = np.uint16) -> np.ndarray:
    """Tokens that are all different, the highest ones that the dtype has room for: a token tells its position."""
    top = min(np.iinfo(dtype).max, 2**20)
    return (top - torch.randperm(length, generator=rng).numpy()).astype(dtype)


def expect_batch(found: object, call: dict, tokens: np.ndarray, line: str) -> list[int]:
    """Right shapes and dtypes, and contiguous windows with their targets; returns where they start."""
    case, shape = case_of(call, len(tokens)), [call["batch_size"], call["context_length"]]
    case += f", {tokens.dtype}"
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(t, torch.Tensor) for t in found):
        fail(case=case, expected="(x, y), two tensors", found=type(found).__name__, line=line)
    for name, tensor in zip("xy", found, strict=True):
        if tensor.dtype != torch.int64 or list(tensor.shape) != shape:
            dtype = str(tensor.dtype).removeprefix("torch.")
            fail(
                case=case,
                expected=f"{name}: int64 of shape {shape}",
                found=f"{dtype} of shape {list(tensor.shape)}",
                line=line,
            )
    position = {int(token): i for i, token in enumerate(tokens)}
    starts = []
    for row, (x, y) in enumerate(zip(*found, strict=True)):
        start = position.get(int(x[0]))
        if start is None:
            fail(
                case=case,
                expected=f"x[{row}] to start with one of the tokens, {tokens.min()} to {tokens.max()}",
                found=str(int(x[0])),
                line=line,
                perhaps="the tokens went through a dtype that is too small for them on their way to int64",
            )
        starts.append(start)
        for name, tensor, first in (("x", x, start), ("y", y, start + 1)):
            wanted = tokens[first : first + len(tensor)].astype(np.int64).tolist()
            if tensor.tolist() != wanted:
                hint = None
                if name == "y" and torch.equal(x, y):
                    hint = "y is x itself; the target of a token is the one after it"
                elif name == "y" and torch.equal(x[:-1], y[1:]):
                    hint = "y is the token before; are x and y the wrong way round?"
                fail(
                    case=case,
                    expected=f"{name}[{row}], which starts at token {first}: {wanted}",
                    found=str(tensor.tolist()),
                    line=line,
                    perhaps=hint,
                )
    return starts


@check(
    "get_batch", "x are windows of the tokens, y the tokens that follow, in int64 whatever the file's dtype", weight=6
)
def test_get_batch_windows(ranks, rng):
    for dtype in (np.uint16, np.int32, np.uint8, np.int64):
        tokens = distinct_tokens(rng, 40, dtype)
        calls = [{"batch_size": b, "context_length": t} for b, t in ((5, 7), (1, 1), (3, 39), (2, 12))]
        run = ranks(batches, 1, tokens, calls)
        for call, found in zip(calls, run.values[0], strict=True):
            expect_batch(found, call, tokens, ranks.definition("get_batch"))


@check("get_batch", "every start that leaves room for the last target occurs, equally often, and none beyond", weight=5)
def test_get_batch_starts(ranks, rng):
    for length, context_length in ((12, 4), (6, 5), (9, 1)):
        tokens, count = distinct_tokens(rng, length), length - context_length
        call = {"batch_size": 500 * count, "context_length": context_length}
        run = ranks(batches, 1, tokens, [call])
        starts = expect_batch(run.values[0][0], call, tokens, ranks.definition("get_batch"))
        often = [starts.count(s) for s in range(count)]
        if min(often) < 350 or max(often) > 650:  # each is 500, give or take 22
            fail(
                case=case_of(call, length),
                expected=f"each of the starts 0 to {count - 1} about 500 times: {context_length} + 1 tokens fit there",
                found=", ".join(f"{n} times {s}" for s, n in enumerate(often)),
                line=ranks.definition("get_batch"),
                perhaps="torch.randint(0, n) draws from 0 to n - 1; the last start is len(tokens) - context_length - 1"
                if often[-1] == 0
                else "draw from the starts that are possible only; what is moved into range is not equally likely",
            )


@check("get_batch", "the starts are one torch.randint from torch's global generator", weight=3)
def test_get_batch_generator(ranks, rng):
    tokens = distinct_tokens(rng, 1000)
    calls = []
    for _ in range(2):
        seeded = {"seed": draw_int(rng, 0, 10**6), "batch_size": 6, "context_length": 8}
        calls += [seeded, {"batch_size": 4, "context_length": 3}]  # goes on where the generator stands
    run = ranks(batches, 1, tokens, calls)
    generator = torch.Generator()
    for call, found in zip(calls, run.values[0], strict=True):
        if "seed" in call:
            generator.manual_seed(call["seed"])
        wanted = torch.randint(0, 1000 - call["context_length"], (call["batch_size"],), generator=generator).tolist()
        starts = expect_batch(found, call, tokens, ranks.definition("get_batch"))
        if starts != wanted:
            fail(
                case=case_of(call, 1000) + ("" if "seed" in call else ", right after the call before"),
                expected=f"starts {wanted}: torch.randint(0, {1000 - call['context_length']}, ({call['batch_size']},))",
                found=f"starts {starts}",
                line=ranks.definition("get_batch"),
                perhaps="draw all starts at once, from torch's generator, and nothing else from it",
            )


@check("get_batch", "a file that is too short is a ValueError", weight=2)
def test_get_batch_short(ranks, rng):
    def too_short(context, tokens: np.ndarray, context_lengths: list[int]) -> list:
        found = []
        for context_length in context_lengths:
            context.case(case_of({"batch_size": 2, "context_length": context_length}, len(tokens)))
            try:
                context.student.get_batch(tokens, 2, context_length, context.device)
                found.append(["a batch", ""])
            except NotImplementedError:
                raise
            except Exception as error:
                found.append([type(error).__name__, str(error)])
        return found

    for length in (9, 1, 0):
        lengths = [length, length + 1, length + 50]
        run = ranks(too_short, 1, distinct_tokens(rng, length), lengths)
        for context_length, found in zip(lengths, run.values[0], strict=True):
            kind, message = found
            if kind != "ValueError" or not message:
                fail(
                    case=case_of({"batch_size": 2, "context_length": context_length}, length),
                    expected="a ValueError that says so",
                    found=f"{kind}: {message[:100]}".removesuffix(": "),
                    line=ranks.definition("get_batch"),
                )


@check("get_batch", "of a memory-mapped file only the windows are read", weight=3)
def test_get_batch_memory(ranks, rng):
    def growth(context, megabytes: int) -> float:
        """Megabytes by which the rank's memory grows at most, with a file of that many."""
        unit = 1 if sys.platform == "darwin" else 1024
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokens.bin"
            with path.open("wb") as file:
                file.truncate(megabytes * 2**20)  # all zeros, and no room on the disk
            context.student.get_batch(np.zeros(100, np.uint16), 4, 16, context.device)
            tokens = np.memmap(path, np.uint16, "r")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(3):
                context.student.get_batch(tokens, 4, 16, context.device)
            return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 2**20

    size = 192
    grown = ranks(growth, 1, size).values[0]
    if grown > size / 4:
        fail(
            case=f"a memory-mapped file of {size} MiB, uint16, 3 batches of 4 windows of 16 tokens",
            expected="memory for the windows only, less than 1 MiB",
            found=f"{grown:.0f} MiB more in memory",
            line=ranks.definition("get_batch"),
            perhaps="the whole file is converted or copied; cut the windows out first, then convert them",
        )


@check("get_batch", "the batch is on the device that was asked for", weight=1)
def test_get_batch_device(ranks, rng):
    run = ranks(batches, 1, distinct_tokens(rng, 20), [{"batch_size": 2, "context_length": 3}], "meta")
    if run.values[0][0] != ["meta", "meta"]:
        fail(
            case='device="meta"',
            expected="x and y on that device",
            found=f"on {' and '.join(run.values[0][0])}",
            line=ranks.definition("get_batch"),
        )


# ----------------------------------------------------------------------------------------------- seed_everything

GENERATORS = {
    "Python": "random.random()",
    "numpy": "np.random.random()",
    "torch": "torch.rand(1, dtype=torch.float64)",
}


def drawn_after_seeding(context, calls: list[tuple[int, int]]) -> list[dict]:
    """On a rank: what each generator gives first after each call, the state before being another each time."""
    found = []
    for number, (seed, rank) in enumerate(calls):
        random.seed(number + 10**9)
        np.random.seed(number + 10**9)
        torch.manual_seed(number + 10**9)
        context.case(f"seed_everything({seed}, rank={rank})" if rank else f"seed_everything({seed})")
        context.student.seed_everything(*([seed, rank] if rank else [seed]))
        found.append(
            {
                "Python": random.random(),
                "numpy": float(np.random.random()),
                "torch": torch.rand(1, dtype=torch.float64).item(),
            }
        )
    return found


def drawn_with(seed: int) -> dict:
    """What each generator gives first with this seed."""
    return {
        "Python": random.Random(seed).random(),
        "numpy": float(np.random.RandomState(seed % 2**32).random_sample()),
        "torch": torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).item(),
    }


def expect_seeded(ranks: Callable, calls: list[tuple[int, int]], generators: list[str]) -> None:
    run = ranks(drawn_after_seeding, 1, calls)
    for (seed, rank), found in zip(calls, run.values[0], strict=True):
        for name in generators:
            wanted = drawn_with(seed + rank)[name]
            if found[name] == wanted:
                continue
            hint = None
            if found[name] in [drawn_with(10**9 + i)[name] for i in range(len(calls))]:
                hint = "this generator goes on as if it had not been seeded"
                if name == "numpy":
                    hint += "; np.random.default_rng makes another one and leaves the global one alone"
            elif rank and found[name] == drawn_with(seed)[name]:
                hint = "these are the numbers of rank 0; the rank is part of the seed"
            fail(
                case=f"seed_everything({seed}, rank={rank}), then {GENERATORS[name]}",
                expected=f"{wanted:.9g}, the first number with seed {seed + rank}",
                found=f"{found[name]:.9g}",
                line=ranks.definition("seed_everything"),
                perhaps=hint,
            )


@check("seed_everything", "Python's generator starts from the seed", weight=2)
def test_seed_python(ranks, rng):
    expect_seeded(ranks, [(draw_int(rng, 0, 10**6), 0) for _ in range(3)], ["Python"])


@check("seed_everything", "numpy's global generator starts from the seed", weight=2)
def test_seed_numpy(ranks, rng):
    expect_seeded(ranks, [(draw_int(rng, 0, 10**6), 0) for _ in range(3)], ["numpy"])


@check("seed_everything", "torch's generator starts from the seed", weight=2)
def test_seed_torch(ranks, rng):
    expect_seeded(ranks, [(draw_int(rng, 0, 10**6), 0) for _ in range(3)], ["torch"])


@check("seed_everything", "each rank draws numbers of its own, the same in every run", weight=3)
def test_seed_ranks(ranks, rng):
    seed = draw_int(rng, 0, 10**6)
    expect_seeded(ranks, [(seed, 1), (seed, 7), (seed, 1), (0, 3)], list(GENERATORS))


@check("seed_everything", "a seed may be larger than numpy takes", weight=1)
def test_seed_large(ranks, rng):
    large = draw_int(rng, 2**32, 2**40)
    expect_seeded(ranks, [(large, 0), (2**32 - 1, 2)], list(GENERATORS))


# ----------------------------------------------------------------------------------------------------- cosine_lr


def rates(context, rows: list[tuple[int, dict]]) -> list:
    """On a rank: the learning rates of steps."""
    found = []
    for step, schedule in rows:
        context.case(lr_call(step, schedule))
        found.append(context.student.cosine_lr(step, **schedule))
    return found


def lr_call(step: int, schedule: dict) -> str:
    return f"cosine_lr({step}, {', '.join(f'{k}={v:g}' for k, v in schedule.items())})"


def wanted_rate(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cycle_steps: int, cycle_mult: float = 1.0
) -> float:
    """The learning rate of a step, by the formula of the docstring."""
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    begin, length = warmup_steps, cycle_steps
    while step >= begin + length:
        begin, length = begin + length, round(cycle_mult * length)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * (step - begin) / length)) / 2


def expect_rates(ranks: Callable, rows: list[tuple[int, dict]]) -> None:
    run = ranks(rates, 1, rows)
    for (step, schedule), found in zip(rows, run.values[0], strict=True):
        wrong = numbers_agree(found, wanted_rate(step, **schedule), rtol=1e-9)
        if wrong:
            fail(
                case=lr_call(step, schedule),
                expected=wrong[0],
                found=wrong[1],
                line=ranks.definition("cosine_lr"),
                perhaps=lr_misread(found, step, schedule) if isinstance(found, float) else None,
            )


def lr_misread(found: float, step: int, schedule: dict) -> str | None:
    """The reading of the docstring that would give this rate."""
    only = schedule["warmup_steps"] + schedule["cycle_steps"]
    readings = [
        (wanted_rate(step, **schedule | {"cycle_mult": 1}), "all cycles are as long as the first; see cycle_mult"),
        (wanted_rate(step, **schedule | {"min_lr": 0}), "this is what min_lr = 0 would give"),
    ]
    if step >= only:
        readings.append((schedule["min_lr"], "the rate is min_lr, but the next cycle has begun, at max_lr"))
    else:
        shifted = step + schedule["warmup_steps"]
        readings.append((wanted_rate(step + 1, **schedule), "this is the rate of the next step: step 0 is the first"))
        readings.append((wanted_rate(shifted, **schedule), "the cycle begins after the warm-up, not at step 0"))
    return next((hint for rate, hint in readings if math.isclose(found, rate, rel_tol=1e-9)), None)


def draw_schedule(rng: torch.Generator, **fixed: float) -> dict:
    drawn = {
        "max_lr": draw_int(rng, 10, 100) * 1e-4,
        "min_lr": draw_int(rng, 1, 9) * 1e-4,
        "warmup_steps": draw_int(rng, 3, 20),
        "cycle_steps": 2 * draw_int(rng, 4, 20),
    }
    return drawn | fixed


@check("cosine_lr", "a linear warm-up from 0 at step 0 to max_lr at step warmup_steps", weight=4)
def test_lr_warmup(ranks, rng):
    schedules = [draw_schedule(rng), draw_schedule(rng, warmup_steps=1), draw_schedule(rng, warmup_steps=0)]
    expect_rates(ranks, [(step, s) for s in schedules for step in range(s["warmup_steps"] + 1)])


@check("cosine_lr", "a cosine from max_lr towards min_lr, halfway between them in the middle", weight=6)
def test_lr_cycle(ranks, rng):
    simple = {"max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 0, "cycle_steps": 10}
    rows = [(step, simple) for step in (0, 5, 9)]
    for schedule in (draw_schedule(rng), draw_schedule(rng, min_lr=0.0), draw_schedule(rng, warmup_steps=0)):
        rows += [(schedule["warmup_steps"] + t, schedule) for t in range(schedule["cycle_steps"])]
    expect_rates(ranks, rows)


@check("cosine_lr", "after cycle_steps the next cycle starts at max_lr", weight=5)
def test_lr_restart(ranks, rng):
    schedules = [draw_schedule(rng), draw_schedule(rng, cycle_mult=1.0), draw_schedule(rng, cycle_steps=1)]
    rows = []
    for schedule in schedules:
        for cycle in (1, 2, 5):
            begin = schedule["warmup_steps"] + cycle * schedule["cycle_steps"]
            rows += [(begin, schedule), (begin - 1, schedule), (begin + 1, schedule), (begin + 3, schedule)]
    expect_rates(ranks, rows)


@check("cosine_lr", "each cycle has cycle_mult times the steps of the one before, rounded", weight=5)
def test_lr_growing_cycles(ranks, rng):
    schedules = [
        draw_schedule(rng, cycle_mult=2.0),
        draw_schedule(rng, cycle_steps=7, cycle_mult=1.3),  # 7, 9, 12, 16, 21
        draw_schedule(rng, cycle_steps=6, cycle_mult=1.6, warmup_steps=0),  # 6, 10, 16, 26, 42
        draw_schedule(rng, cycle_steps=1, cycle_mult=3.0),
    ]
    rows = []
    for schedule in schedules:
        begin, length = schedule["warmup_steps"], schedule["cycle_steps"]
        for _ in range(4):
            begin, length = begin + length, round(length * schedule["cycle_mult"])
            rows += [(step, schedule) for step in (begin - 1, begin, begin + 1, begin + length // 2)]
    expect_rates(ranks, rows)


# ---------------------------------------------------------------------------------------------------- checkpoint


def network(widths: list[int]) -> nn.Sequential:
    """A small model that has buffers, an integer one too."""
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b)]
    return nn.Sequential(*layers)


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    """An AdamW that treats biases and weights differently."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}])


def practised(rng: torch.Generator, widths: list[int]) -> dict:
    """The states of a model and its optimizer in the middle of training: arbitrary numbers everywhere."""
    model = network(widths)
    numbers = {name: torch.rand(t.shape, generator=rng) for name, t in model.state_dict().items()}
    for name in numbers:
        if name.endswith("num_batches_tracked"):
            numbers[name] = torch.tensor(draw_int(rng, 1, 1000))
    ordered = sorted(model.parameters(), key=lambda p: p.ndim < 2)  # as in the groups of `two_groups`
    moments = {
        i: {
            "step": torch.tensor(float(draw_int(rng, 1, 1000))),
            "exp_avg": torch.randn(p.shape, generator=rng),
            "exp_avg_sq": torch.rand(p.shape, generator=rng),
        }
        for i, p in enumerate(ordered)
    }
    lrs = [draw_int(rng, 1, 1000) * 1e-5 for _ in range(2)]
    return {"widths": widths, "model": numbers, "moments": moments, "lrs": lrs}


def rebuilt(states: dict, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and the optimizer in those states."""
    model = network(states["widths"]).to(device)
    model.load_state_dict(states["model"])
    optimizer = two_groups(model)
    state = optimizer.state_dict() | {"state": states["moments"]}
    for group, lr in zip(state["param_groups"], states["lrs"], strict=True):
        group["lr"] = lr
    optimizer.load_state_dict(state)
    return model, optimizer


def fresh(states: dict, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer before any training."""
    model = network(states["widths"]).to(device)
    return model, two_groups(model)


def round_trips(context, states: dict, iteration: int) -> list[dict]:
    """On a rank: save to and load from a path, in both spellings, and a file object."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for out in (Path(folder) / "checkpoint.pt", f"{folder}/checkpoint.pt", io.BytesIO(), io.BytesIO()):
            optimizer_too = len(found) < 3
            context.case(target(len(found)))
            model, optimizer = rebuilt(states, context.device)
            context.student.save_checkpoint(model, optimizer, iteration, out)
            if isinstance(out, io.BytesIO):
                out.seek(0)
            model, optimizer = fresh(states, context.device)
            own = [p.data_ptr() for p in model.parameters()]
            returned = context.student.load_checkpoint(out, model, *([optimizer] if optimizer_too else []))
            found.append(
                {
                    "iteration": returned,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict() if optimizer_too else None,
                    "in place": own == [p.data_ptr() for p in model.parameters()],
                    "folder": sorted(p.name for p in Path(folder).iterdir()),
                }
            )
    return found


def target(number: int) -> str:
    return ["out is a Path", "out is a str", "out is a file object", "no optimizer is passed to load_checkpoint"][
        number
    ]


@check("checkpoint", "the model, its buffers and the iteration come back, from a path and from a file object", weight=4)
def test_checkpoint_model(ranks, rng):
    states, iteration = practised(rng, [3, 5, 2]), draw_int(rng, 1, 10**6)
    for number, found in enumerate(ranks(round_trips, 1, states, iteration).values[0]):
        facts = {"case": target(number), "line": ranks.definition("load_checkpoint")}
        wrong = numbers_agree(found["iteration"], iteration)
        if wrong:
            fail(expected=f"iteration {wrong[0]} returned", found=wrong[1], **facts)
        for name, tensor in states["model"].items():
            wrong = difference(found["model"].get(name), Expect(tensor, tensor.dtype, terms=0))
            if wrong:
                fail(expected=f"{name}: {wrong[0]}", found=wrong[1], **facts)
        if not found["in place"]:
            fail(
                expected="the values copied into the model's own tensors",
                found="other tensors in their place, which an optimizer made before does not know",
                **facts,
            )
        if found["folder"] != ["checkpoint.pt"]:
            fail(
                expected="nothing but checkpoint.pt in the folder after saving",
                found=", ".join(found["folder"]),
                case=target(number),
                line=ranks.definition("save_checkpoint"),
            )


@check("checkpoint", "the optimizer comes back: moments, step counts and the groups' settings", weight=4)
def test_checkpoint_optimizer(ranks, rng):
    states = practised(rng, [3, 5, 2])
    for number, found in enumerate(ranks(round_trips, 1, states, 7).values[0][:3]):
        facts = {"case": target(number), "line": ranks.definition("load_checkpoint")}
        for index, moments in states["moments"].items():
            for name, tensor in moments.items():
                got = found["optimizer"]["state"].get(str(index), {}).get(name)
                wrong = difference(got, Expect(tensor, tensor.dtype, terms=0))
                if wrong:
                    hint = "without its moments AdamW starts anew, and the loss jumps" if got is None else None
                    fail(expected=f"{name} of parameter {index}: {wrong[0]}", found=wrong[1], perhaps=hint, **facts)
        for number, group in enumerate(found["optimizer"]["param_groups"]):
            for name, wanted in (("lr", states["lrs"][number]), ("weight_decay", [1e-2, 0.0][number])):
                wrong = numbers_agree(group[name], wanted)
                if wrong:
                    fail(expected=f"{name} of parameter group {number}: {wrong[0]}", found=wrong[1], **facts)


DRAWS = {
    "Python": "random.gauss, random.random",
    "numpy": "np.random.normal, np.random.random_sample",
    "torch": "torch.randn, torch.rand",
}


def draws(python: random.Random, numpy: np.random.RandomState, generator: torch.Generator | None) -> dict:
    """A few numbers of each generator. The normal ones are made in pairs: half of one may wait in the state."""
    return {
        "Python": [python.gauss(0, 1), python.random()],
        "numpy": [float(numpy.normal()), float(numpy.random_sample())],
        "torch": torch.cat([torch.randn(3, generator=generator), torch.rand(2, generator=generator)]).tolist(),
    }


@check("checkpoint", "the random numbers go on where they were, in Python, numpy and torch", weight=4)
def test_checkpoint_random(ranks, rng):
    def saved_and_loaded(context, states: dict, seeds: list[int]) -> list[dict]:
        out, model, optimizer = io.BytesIO(), *rebuilt(states, context.device)
        random.seed(seeds[0])
        np.random.seed(seeds[1])
        torch.manual_seed(seeds[2])
        draws(random, np.random, None)
        context.student.save_checkpoint(model, optimizer, 1, out)
        found = [draws(random, np.random, None)]
        for other in (random.seed, np.random.seed, torch.manual_seed):
            other(0)
        out.seek(0)
        context.student.load_checkpoint(out, *fresh(states, context.device))
        return [*found, draws(random, np.random, None)]

    seeds = [draw_int(rng, 0, 10**6) for _ in range(3)]
    found = ranks(saved_and_loaded, 1, practised(rng, [3, 5, 2]), seeds).values[0]
    generators = random.Random(seeds[0]), np.random.RandomState(seeds[1]), torch.Generator().manual_seed(seeds[2])
    draws(*generators)
    wanted = draws(*generators)
    for name in wanted:
        for when, function, got in (("saved", "save", found[0][name]), ("loaded", "load", found[1][name])):
            if got != wanted[name]:
                fail(
                    case=f"{DRAWS[name]} after the checkpoint was {when}",
                    expected=", ".join(f"{x:.6g}" for x in wanted[name]) + ", as if nothing had happened",
                    found=", ".join(f"{x:.6g}" for x in got),
                    line=ranks.definition(f"{function}_checkpoint"),
                    perhaps=f"the state of {name}'s generator is not in the checkpoint, or not put back"
                    if when == "loaded"
                    else "saving draws random numbers or seeds the generator",
                )


class Mischief:
    """Makes a folder when it is unpickled: a harmless sign that code from the file was run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.folder,)


@check("checkpoint", "the file is read with weights_only=True, so that nothing in it can run", weight=3)
def test_checkpoint_safe(ranks, rng):
    def tried(context, states: dict) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            path, sign = Path(folder) / "checkpoint.pt", Path(folder) / "sign"
            context.student.save_checkpoint(*rebuilt(states, context.device), 1, path)
            context.student.load_checkpoint(path, *fresh(states, context.device))
            refused = None
            try:
                torch.load(path, weights_only=True)
            except Exception as error:
                refused = str(error)
            torch.save({"model": Mischief(str(sign))}, path)
            context.case("a file that holds a pickled call")
            with contextlib.suppress(Exception):  # as it should be
                context.student.load_checkpoint(path, *fresh(states, context.device))
            return {"refused": refused, "ran": sign.exists()}

    found = ranks(tried, 1, practised(rng, [3, 5, 2])).values[0]
    if found["refused"] is not None:
        kinds = [w for w in found["refused"].split() if w.startswith(("numpy.", "GLOBAL"))]
        fail(
            expected="torch.load(..., weights_only=True) reads the checkpoint",
            found=" ".join(["it refuses what is in it", *kinds[:1]]),
            line=ranks.definition("save_checkpoint"),
            perhaps="save tensors, numbers, text, tuples, lists and dicts only: numpy's state holds an array",
        )
    if found["ran"]:
        fail(
            case="load_checkpoint of a file that holds a pickled call",
            expected="an error, and nothing of the file is run",
            found="the call was run",
            line=ranks.definition("load_checkpoint"),
            perhaps="torch.load with weights_only=False trusts whoever wrote the file",
        )


def in_a_copy(action: Callable[[], None]) -> None:
    """Do something in a fork of this process, which may die of it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(1)
    os.waitpid(pid, 0)


def loaded(context, states: dict, path: str | Path) -> object:
    """The iteration of the checkpoint at the path, or in words why there is none."""
    try:
        iteration = context.student.load_checkpoint(path, *fresh(states, context.device))
        return iteration if iteration in (1, 2, 3) else f"a checkpoint of iteration {iteration}"
    except NotImplementedError:
        raise
    except Exception as error:
        message = str(error).strip().partition("\n")[0][:100]
        return f"it does not load: {type(error).__name__} {message}".strip()


@check("checkpoint", "killed at any line of save_checkpoint, the old file or the new one is there, whole", weight=4)
def test_checkpoint_killed(ranks, rng):
    def killed_at_each_line(context, states: dict) -> dict:
        """Saves as iteration 2 over iteration 1, in copies of this process that end before one of the lines."""
        model, optimizer = rebuilt(states, context.device)
        save, file = context.student.save_checkpoint, context.student.__file__
        lines = []

        def traced(end_at: int | None) -> None:
            def trace(frame, event, argument):
                if frame.f_code.co_filename != file:
                    return None
                if event == "line":
                    if end_at is None and frame.f_lineno not in lines:
                        lines.append(frame.f_lineno)
                    if frame.f_lineno == end_at:
                        os._exit(0)
                return trace

            sys.settrace(trace)
            try:
                save(model, optimizer, 2, path)
            finally:
                sys.settrace(None)

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            traced(None)
            for line in lines:
                context.case("a save after one that was killed")
                save(model, optimizer, 1, path)
                in_a_copy(lambda line=line: traced(line))
                after = loaded(context, states, path)
                if after not in (1, 2):
                    code = linecache.getline(file, line).strip()
                    return {"line": f"{Path(file).name}:{line}   {code}", "after": after}
            save(model, optimizer, 3, path)
            return {"line": None, "after": loaded(context, states, path)}

    found = ranks(killed_at_each_line, 1, practised(rng, [3, 5, 2])).values[0]
    if found["line"]:
        fail(
            case="killed when it gets to this line",
            expected="load_checkpoint of the path gives the checkpoint of before or the new one",
            found=str(found["after"]),
            line=found["line"],
            perhaps="until os.replace, nothing may touch the old file: write the new one beside it",
        )
    expect_saves_again(found["after"], ranks.definition("save_checkpoint"))


def expect_saves_again(after: object, line: str) -> None:
    if after != 3:
        fail(
            case="the save after those that failed",
            expected="a checkpoint as if nothing had happened",
            found=after if isinstance(after, str) else "the old checkpoint",
            line=line,
        )


@check("checkpoint", "a full disk leaves the old file as it was", weight=2)
def test_checkpoint_disk_full(ranks, rng):
    def saved_on_full_disks(context, states: dict) -> dict:
        """Saves as iteration 2 over iteration 1 where no file may get larger than a part of the checkpoint."""
        model, optimizer = rebuilt(states, context.device)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/checkpoint.pt"
            context.student.save_checkpoint(model, optimizer, 1, path)
            size, hard = Path(path).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]

            def limited(room: int) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
                context.student.save_checkpoint(model, optimizer, 2, path)

            for room in (0, size // 2, size * 9 // 10):
                in_a_copy(lambda room=room: limited(room))
                after = loaded(context, states, path)
                if after != 1:
                    return {"room": room, "size": size, "after": after}
            context.student.save_checkpoint(model, optimizer, 3, path)
            return {"room": None, "after": loaded(context, states, path)}

    found = ranks(saved_on_full_disks, 1, practised(rng, [3, 5, 2])).values[0]
    if found["room"] is not None:
        fail(
            case=f"room for {found['room']} bytes of a checkpoint of {found['size']}, over one that is whole",
            expected="load_checkpoint of the path gives the checkpoint of before",
            found=str(found["after"]),
            line=ranks.definition("save_checkpoint"),
            perhaps="write another file, and replace the old one only if nothing went wrong and the new one is whole",
        )
    expect_saves_again(found["after"], ranks.definition("save_checkpoint"))


@check("checkpoint", "the new file is beside the old one and on the disk before it takes its place", weight=1)
def test_checkpoint_synced(ranks, rng):
    def watched(context, states: dict) -> list[dict]:
        """What was replaced by what. The functions are watched before the student's file is loaded."""
        synced, replaced = {}, []

        def watch(name: str, note: Callable) -> None:
            original = getattr(os, name)

            def noted(*args, **settings):
                note(*args)
                return original(*args, **settings)

            setattr(os, name, noted)

        def sync(file) -> None:
            info = os.fstat(file if isinstance(file, int) else file.fileno())
            synced[info.st_ino] = info.st_size

        def replace(source, destination, *_) -> None:
            new, old = Path(source).resolve(), Path(destination).resolve()
            replaced.append(
                {
                    "onto": old.name,
                    "beside": new.parent == old.parent,
                    "synced": synced.get(new.stat().st_ino),
                    "size": new.stat().st_size,
                }
            )

        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                watch(name, sync)
        for name in ("replace", "rename"):
            watch(name, replace)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            for iteration in (1, 2):
                context.student.save_checkpoint(*rebuilt(states, context.device), iteration, path)
        return replaced

    found = [r for r in ranks(watched, 1, practised(rng, [3, 5, 2])).values[0] if r["onto"] == "checkpoint.pt"]
    facts = {"case": "saving to checkpoint.pt", "line": ranks.definition("save_checkpoint")}
    if len(found) < 2:
        hint = "while a file is written to, it is neither the old one nor the new one"
        fail(
            expected="os.replace puts the new file in the place of checkpoint.pt",
            found="it is written to",
            perhaps=hint,
            **facts,
        )
    for replacement in found:
        if not replacement["beside"]:
            fail(
                expected="the unfinished file in the folder of checkpoint.pt",
                found="it is in another folder",
                perhaps="on another file system os.replace fails, and a copy is not all at once",
                **facts,
            )
        if replacement["synced"] is None:
            fail(
                expected="os.fsync of the new file before os.replace",
                found="no os.fsync",
                perhaps="after a power cut, the name may be on the disk already, and the contents not",
                **facts,
            )
        if replacement["synced"] < replacement["size"]:
            fail(
                expected=f"all {replacement['size']} bytes in the file when it is synced",
                found=f"{replacement['synced']}",
                perhaps="the rest was in Python's buffer: call the file's flush() before os.fsync",
                **facts,
            )


@check("checkpoint", "a model of another shape is a ValueError that names the tensor, and stays as it was", weight=2)
def test_checkpoint_mismatch(ranks, rng):
    def loaded_into(context, states: dict, others: list[dict]) -> list[dict]:
        out, found = io.BytesIO(), []
        context.student.save_checkpoint(*rebuilt(states, context.device), 1, out)
        for other in others:
            context.case(widths_case(states, other))
            out.seek(0)
            model, optimizer = rebuilt(other, context.device)
            raised = "nothing", ""
            try:
                context.student.load_checkpoint(out, model, optimizer)
            except NotImplementedError:
                raise
            except Exception as error:
                raised = f"{type(error).__name__}", str(error)
            found.append({"raised": raised, "model": model.state_dict()})
        return found

    def widths_case(states: dict, other: dict) -> str:
        return f"a checkpoint of layers {states['widths']} into a model of layers {other['widths']}"

    states = practised(rng, [3, 5, 2])
    others = [practised(rng, widths) for widths in ([3, 4, 2], [3, 5, 2, 2], [3, 5])]
    for other, found in zip(others, ranks(loaded_into, 1, states, others).values[0], strict=True):
        facts = {"case": widths_case(states, other), "line": ranks.definition("load_checkpoint")}
        shapes = [{name: list(t.shape) for name, t in s["model"].items()} for s in (states, other)]
        wrong = [name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name)]
        kind, message = found["raised"]
        if kind != "ValueError" or not any(name in message for name in wrong):
            fail(
                expected=f"a ValueError with the name of a tensor that does not fit, such as {wrong[0]}",
                found="nothing raised" if kind == "nothing" else f"{kind}: {' '.join(message.split())[:120]}",
                **facts,
            )
        for name, tensor in other["model"].items():
            if not torch.equal(found["model"][name], tensor):
                fail(
                    expected="the model as it was before the ValueError",
                    found=f"{name} has been changed",
                    perhaps="compare all names and shapes before anything is loaded",
                    **facts,
                )


@check("checkpoint", "a checkpoint from a GPU that is not there is loaded", weight=1)
def test_checkpoint_device(ranks, rng):
    def moved(context, states: dict) -> dict:
        """Saves tensors that say they are on cuda:99."""
        out = io.BytesIO()
        torch.serialization.register_package(0, lambda storage: "cuda:99", lambda storage, location: None)
        context.student.save_checkpoint(*rebuilt(states, context.device), 1, out)
        torch.serialization._package_registry.pop(0)
        out.seek(0)
        model, optimizer = fresh(states, context.device)
        context.case("tensors that were saved on cuda:99")
        problem = None
        try:
            context.student.load_checkpoint(out, model, optimizer)
        except RuntimeError as error:
            if "deserialize" not in str(error):
                raise
            problem = str(error).partition(". ")[0]
        return {"problem": problem, "model": model.state_dict()}

    states = practised(rng, [3, 5, 2])
    found = ranks(moved, 1, states).values[0]
    facts = {"case": "tensors that were saved on cuda:99", "line": ranks.definition("load_checkpoint")}
    if found["problem"]:
        fail(
            expected="their values in the model, on the device where the model is",
            found=found["problem"],
            perhaps="torch.load puts tensors back to where they came from, unless map_location says otherwise",
            **facts,
        )
    for name, tensor in states["model"].items():
        wrong = difference(found["model"][name], Expect(tensor, tensor.dtype, terms=0))
        if wrong:
            fail(expected=f"{name}: {wrong[0]}", found=wrong[1], **facts)


# --------------------------------------------------------------------------------------------------------- train


class Noisy(nn.Module):
    """A model that draws random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(64, 16)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 64)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.drop(self.token(tokens))).flatten(0, 1), targets.flatten())


MODELS = {"gpt": tiny, "dropout": Noisy, "float32": lambda: tiny(torch.float32)}


class Stopped(Exception):
    """What ends a run in its middle."""


def one_run(
    context, kind: str, weights: dict, tokens: np.ndarray, settings: dict, stop_at: int | None, checkpoint: object
) -> dict:
    """On a rank: train in a folder of its own.

    Args:
        kind: which model, with which weights.
        settings: for TrainConfig; "checkpoint_path" is put into the folder.
        stop_at: step in whose forward the run ends.
        checkpoint: bytes, as a tensor, of the file to resume from.
    """
    random.seed(10**9)  # states that no run depends on
    np.random.seed(10**9)
    torch.manual_seed(10**9)
    model = MODELS[kind]()
    model.load_state_dict(weights)
    model.to(context.device)
    loss, calls, lrs = model.loss, [], []

    def watched_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(x.tolist())
        if len(calls) - 1 == stop_at:
            raise Stopped
        return loss(x, y)

    model.loss = watched_loss
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: lrs.append([float(group["lr"]) for group in optimizer.param_groups])
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if "checkpoint_path" in settings:
            settings = settings | {"checkpoint_path": f"{folder}/{settings['checkpoint_path']}"}
        config = context.student.TrainConfig(**settings)
        resume = {}
        if checkpoint is not None:
            Path("resumed.pt").write_bytes(bytes(checkpoint.tolist()))
            resume = {"resume": f"{folder}/resumed.pt"}
        try:
            losses = context.student.train(model, tokens, config, **resume)
        except Stopped:
            losses = None
        files = sorted(p.name for p in Path(folder).iterdir() if p.name != "resumed.pt")
        saved = None
        if files:
            saved = torch.from_numpy(np.fromfile(files[0], np.uint8))
        os.chdir("/")
    hook.remove()
    return {"losses": losses, "batches": calls, "lrs": lrs, "model": model.state_dict(), "files": files, "saved": saved}


def start_train(
    ranks: Callable, kind: str, weights: dict, tokens: np.ndarray, settings: dict, stop_at=None, checkpoint=None
) -> dict:
    return ranks(one_run, 1, kind, weights, tokens, settings, stop_at, checkpoint).values[0]


def initial_weights(rng: torch.Generator, kind: str) -> dict:
    """Weights for a model, drawn from rng."""
    model = MODELS[kind]()
    for p in model.parameters():
        with torch.no_grad():
            noise = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p.dtype)
            p.copy_(noise * (0.1 if p.ndim > 1 else 0.02) + (1.0 if p.ndim == 1 and p.mean() > 0.5 else 0.0))
    return model.state_dict()


def text(rng: torch.Generator, length: int = 400) -> np.ndarray:
    """Tokens that can be learned: a phrase again and again, with some noise."""
    phrase = torch.randint(0, 64, (11,), generator=rng).repeat(length // 11 + 1)[:length]
    noise = torch.rand(length, generator=rng) < 0.05
    return torch.where(noise, torch.randint(0, 64, (length,), generator=rng), phrase).numpy().astype(np.uint16)


@one_thread()
def wanted_run(weights: dict, tokens: np.ndarray, settings: dict) -> dict:
    """Losses, learning rates and batches of a run, computed here, with AdamW written out."""
    model = MODELS["gpt"]()
    model.load_state_dict(weights)
    parameters = list(model.parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    names = ("max_lr", "min_lr", "warmup_steps", "cycle_steps", "cycle_mult")
    schedule = {name: settings[name] for name in names}
    generator = torch.Generator().manual_seed(settings["seed"])
    context_length = settings["context_length"]
    found = {"losses": [], "lrs": [], "batches": []}
    for step in range(settings["steps"]):
        starts = torch.randint(0, len(tokens) - context_length, (settings["batch_size"],), generator=generator)
        windows = torch.stack([torch.from_numpy(tokens[s : s + context_length + 1].astype(np.int64)) for s in starts])
        loss = model.loss(windows[:, :-1], windows[:, 1:])
        lr = wanted_rate(step, **schedule)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, torch.autograd.grad(loss, parameters), means, squares, strict=True):
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.001)
                p.mul_(1 - lr * settings["weight_decay"])
                p.sub_(lr * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
        found["losses"].append(loss.item())
        found["lrs"].append(lr)
        found["batches"].append(windows[:, :-1].tolist())
    return found


def draw_settings(rng: torch.Generator, **fixed: object) -> dict:
    drawn = {
        "steps": 11, "batch_size": 4, "context_length": 12, "max_lr": 3e-3, "min_lr": 5e-4, "warmup_steps": 2,
        "cycle_steps": 4, "cycle_mult": 1.5, "weight_decay": 0.2, "seed": draw_int(rng, 1, 10**6),
    }  # fmt: skip
    return drawn | fixed


def expect_losses(found: object, settings: dict, line: str, count: int | None = None) -> None:
    """A list of floats, one for each step."""
    count = settings["steps"] if count is None else count
    right = isinstance(found, list) and len(found) == count and all(type(loss) is float for loss in found)
    if not right:
        what = f"{len(found)} items" if isinstance(found, list) else type(found).__name__
        if isinstance(found, list) and len(found) == count:
            what = "a list with " + ", ".join(sorted({type(loss).__name__ for loss in found}))
        fail(
            case=settings_case(settings),
            expected=f"a list of {count} floats, one for each step",
            found=what,
            line=line,
            perhaps="loss.item() is the number" if "Tensor" in what else None,
        )


def settings_case(settings: dict) -> str:
    shown = ", ".join(f"{k}={v}" for k, v in settings.items() if k in ("steps", "batch_size", "context_length", "seed"))
    return f"TrainConfig({shown}, ...)"


@check("train", "the losses are those of AdamW on the batches that get_batch draws after seeding", weight=6)
def test_train_losses(ranks, rng):
    settings = draw_settings(rng, max_lr=2e-3, min_lr=2e-3, warmup_steps=0)  # constant: the schedule is checked below
    weights, tokens = initial_weights(rng, "gpt"), text(rng)
    found = start_train(ranks, "gpt", weights, tokens, settings)
    wanted = wanted_run(weights, tokens, settings)
    line = ranks.definition("train")
    expect_losses(found["losses"], settings, line)
    calls = len(found["batches"])
    if calls != settings["steps"]:
        fail(
            case=settings_case(settings),
            expected=f"one call of model.loss in each step, {settings['steps']} in all",
            found=f"{calls} calls",
            line=line,
            perhaps="the loss of a step is that of its batch before the weights are updated",
        )
    pairs = zip(found["batches"], wanted["batches"], strict=True)
    step = next((s for s, (a, b) in enumerate(pairs) if a != b), None)
    if step is not None:
        fail(
            case=settings_case(settings),
            expected=f"step {step} on the batch number {step} after seed_everything({settings['seed']})",
            found="another batch",
            line=line,
            perhaps="seed once, before the first step, and draw nothing but one batch in each step",
        )
    expect_same_losses(found["losses"], wanted["losses"], settings, line)


def expect_same_losses(found: list, wanted: list, settings: dict, line: str) -> None:
    for step, pair in enumerate(zip(found, wanted, strict=True)):
        wrong = numbers_agree(*pair)
        if wrong:
            hint = "gradients add up until zero_grad; weight_decay is the config's; betas and eps are AdamW's defaults"
            fail(
                case=f"{settings_case(settings)}, step {step}",
                expected=f"loss {wrong[0]}",
                found=wrong[1],
                line=line,
                perhaps=hint if step else "the loss of a step is that of its batch before the weights are updated",
            )


@check("train", "each step has the learning rate that cosine_lr gives for it", weight=4)
def test_train_schedule(ranks, rng):
    settings = draw_settings(rng)
    weights, tokens = initial_weights(rng, "gpt"), text(rng)
    found = start_train(ranks, "gpt", weights, tokens, settings)
    wanted = wanted_run(weights, tokens, settings)
    line = ranks.definition("train")
    expect_losses(found["losses"], settings, line)
    names = ("max_lr", "min_lr", "warmup_steps", "cycle_steps", "cycle_mult")
    case = ", ".join(f"{name}={settings[name]}" for name in names)
    if len(found["lrs"]) != settings["steps"]:
        fail(
            case=case,
            expected=f"{settings['steps']} calls of the optimizer's step",
            found=str(len(found["lrs"])),
            line=line,
        )
    for step, (lrs, lr) in enumerate(zip(found["lrs"], wanted["lrs"], strict=True)):
        wrong = next((w for each in lrs if (w := numbers_agree(each, lr, rtol=1e-9))), None)
        if wrong:
            fail(
                case=case,
                expected=f"step {step} with learning rate {wrong[0]}",
                found=wrong[1],
                line=line,
                perhaps="set the rate in optimizer.param_groups before optimizer.step(); step 0 is the first",
            )
    expect_same_losses(found["losses"], wanted["losses"], settings, line)


@check("train", "the loss falls on a text that can be learned", weight=3)
def test_train_learns(ranks, rng):
    settings = draw_settings(rng, steps=40, warmup_steps=5, cycle_steps=100, batch_size=8, max_lr=1e-2)
    found = start_train(ranks, "float32", initial_weights(rng, "float32"), text(rng), settings)
    expect_losses(found["losses"], settings, ranks.definition("train"))
    first, last = found["losses"][0], sum(found["losses"][-5:]) / 5
    if not last < 0.6 * first:
        fail(
            case=settings_case(settings),
            expected=f"a loss far below {first:.3g}, the first one, at the end",
            found=f"{last:.3g}",
            line=ranks.definition("train"),
        )


@check("train", "checkpoints after every interval and after the last step, none without a path", weight=4)
def test_train_checkpoints(ranks, rng):
    def iteration_in(context, kind: str, saved: torch.Tensor) -> list:
        """What the student's load_checkpoint makes of a file."""
        model = MODELS[kind]()
        iteration = context.student.load_checkpoint(io.BytesIO(bytes(saved.tolist())), model)
        return [iteration, model.state_dict()]

    weights, tokens, line = initial_weights(rng, "gpt"), text(rng), ranks.definition("train")
    plain = draw_settings(rng, steps=5)
    found = start_train(ranks, "gpt", weights, tokens, plain)
    expect_losses(found["losses"], plain, line)
    if found["files"]:
        fail(case="checkpoint_path=None", expected="no file", found=", ".join(found["files"]), line=line)
    settings = plain | {"checkpoint_path": "run.pt", "checkpoint_interval": 3}
    for stop_at, wanted in ((2, None), (3, 3), (4, 3), (None, 5)):
        after = f"stopped in step {stop_at}" if stop_at is not None else "after the last step, 4"
        case = f"steps=5, checkpoint_interval=3, {after} (steps are counted from 0)"
        found = start_train(ranks, "gpt", weights, tokens, settings, stop_at)
        expected = f"run.pt with iteration {wanted}" if wanted else "no checkpoint yet"
        if found["files"] != ([] if wanted is None else ["run.pt"]):
            fail(case=case, expected=expected, found=", ".join(found["files"]) or "no file", line=line)
        if wanted is None:
            continue
        iteration, state = ranks(iteration_in, 1, "gpt", found["saved"]).values[0]
        wrong = numbers_agree(iteration, wanted)
        if wrong:
            hint = "the iteration is the number of steps done, so the next step is the one of that number"
            fail(case=case, expected=expected, found=f"iteration {wrong[1]}", line=line, perhaps=hint)
        if stop_at in (3, None):
            for name, tensor in found["model"].items():
                if not torch.equal(tensor, state[name]):
                    fail(
                        case=case,
                        expected=f"the weights after {wanted} steps in run.pt",
                        found=f"others: {name} differs from the model's",
                        line=line,
                    )


def expect_resumed(ranks: Callable, rng: torch.Generator, kind: str) -> None:
    """Stopped in step 7 and resumed from the checkpoint after 5, in a new process: the same from there on."""
    weights, tokens, line = initial_weights(rng, kind), text(rng), ranks.definition("train")
    settings = draw_settings(rng, checkpoint_path="run.pt", checkpoint_interval=5)
    whole = start_train(ranks, kind, weights, tokens, settings)
    expect_losses(whole["losses"], settings, line)
    stopped = start_train(ranks, kind, weights, tokens, settings, stop_at=7)
    case = "11 steps, stopped in step 7, resumed from the checkpoint after step 4 (steps are counted from 0)"
    if stopped["saved"] is None:
        fail(case=case, expected="a checkpoint after 5 steps", found="no file", line=line)
    resumed = start_train(ranks, kind, initial_weights(rng, kind), tokens, settings, checkpoint=stopped["saved"])
    if isinstance(resumed["losses"], list) and len(resumed["losses"]) != 6:
        fail(
            case=case,
            expected="6 losses, of steps 5 to 10",
            found=f"{len(resumed['losses'])} losses",
            line=line,
            perhaps="config.steps is the length of the whole run; the steps before the checkpoint are not made again",
        )
    expect_losses(resumed["losses"], settings, line, count=6)
    for step, (a, b) in enumerate(zip(whole["losses"][5:], resumed["losses"], strict=True), 5):
        if a != b:
            same_batch = whole["batches"][step] == resumed["batches"][step - 5]
            hint = "the batch is another one: seeding after load_checkpoint undoes the random states that it restored"
            if same_batch:
                hint = "the batch is the same; the weights, the optimizer's state or the learning rate are not"
            if same_batch and kind == "dropout":
                hint = "the batch is the same; what the model draws for its dropout may not be"
            fail(
                case=case,
                expected=f"loss {a!r} in step {step}, as without the stop",
                found=repr(b),
                line=line,
                perhaps=hint,
            )
    for name, tensor in whole["model"].items():
        if not torch.equal(tensor, resumed["model"][name]):
            fail(
                case=case,
                expected="the same weights at the end, bit for bit",
                found=f"{name} differs",
                line=line,
            )


@check("train", "stopped and resumed, the run equals the uninterrupted one bit for bit", weight=6)
def test_train_resumed(ranks, rng):
    expect_resumed(ranks, rng, "gpt")


@check("train", "a model with dropout resumes bit for bit, too", weight=2)
def test_train_resumed_dropout(ranks, rng):
    expect_resumed(ranks, rng, "dropout")
