"""Module 00's functions, called and judged: batches, seeds, learning rates and training runs. Checkpoints are in
checkpoint_calls."""

import io
import math
import os
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autograder.lab.gpt import tiny
from autograder.suites.kit import draw_int, dtype_name, fail, learning_rate, numbers_agree, one_thread

# ------------------------------------------------------------------------------------------------------------ get_batch


def batch_case(call: dict, length: int) -> str:
    seeded = f"torch.manual_seed({call['seed']}), " if "seed" in call else ""
    return f"{seeded}{length} tokens, batch_size={call['batch_size']}, context_length={call['context_length']}"


def batches(context, tokens: np.ndarray, calls: list[dict], device: str | None = None) -> list:
    """On a rank: the batches of several calls, for some after seeding torch's generator."""
    found = []
    for call in calls:
        context.case(batch_case(call, len(tokens)))
        if "seed" in call:
            torch.manual_seed(call["seed"])
        batch = context.student.get_batch(tokens, call["batch_size"], call["context_length"], device or context.device)
        found.append([t.device.type for t in batch] if device else batch)
    return found


def errors_of_short_files(context, tokens: np.ndarray, context_lengths: list[int]) -> list:
    """On a rank: for each context length, the error's name and message, or "a batch"."""
    found = []
    for context_length in context_lengths:
        context.case(batch_case({"batch_size": 2, "context_length": context_length}, len(tokens)))
        try:
            context.student.get_batch(tokens, 2, context_length, context.device)
            found.append(["a batch", ""])
        except NotImplementedError:
            raise
        except Exception as error:
            found.append([type(error).__name__, str(error)])
    return found


def memory_growth(context, megabytes: int) -> float:
    """On a rank: megabytes by which its memory grows at most, with a file of that many."""
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


def distinct_tokens(rng: torch.Generator, length: int, dtype: type = np.uint16) -> np.ndarray:
    """Tokens that are all different, the highest ones that the dtype has room for: a token tells its position."""
    top = min(np.iinfo(dtype).max, 2**40)
    return (top - torch.randperm(length, generator=rng).numpy()).astype(dtype)


def expect_batch(found: object, call: dict, tokens: np.ndarray, line: str) -> list[int]:
    """Right shapes and dtypes, and contiguous windows with their targets; returns where they start."""
    case, shape = batch_case(call, len(tokens)), [call["batch_size"], call["context_length"]]
    case += f", {tokens.dtype}"
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(t, torch.Tensor) for t in found):
        fail(case=case, expected="(x, y), two tensors", found=type(found).__name__, line=line)
    for name, tensor in zip("xy", found, strict=True):
        if tensor.dtype != torch.int64 or list(tensor.shape) != shape:
            fail(
                case=case,
                expected=f"{name}: int64 of shape {shape}",
                found=f"{dtype_name(tensor.dtype)} of shape {list(tensor.shape)}",
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


# ------------------------------------------------------------------------------------------------------ seed_everything

GENERATORS = {
    "Python": "random.random()",
    "numpy": "np.random.random()",
    "torch": "torch.rand(1, dtype=torch.float64)",
}


def torch_flags() -> list[bool]:
    """What makes torch compute the same from the same numbers, or not."""
    flags = ("deterministic_algorithms", "cudnn_deterministic", "cudnn_benchmark")
    return [getattr(torch._C, f"_get_{flag}")() for flag in flags]  # torch.backends.cudnn cannot travel to a rank


def drawn_after_seeding(context, calls: list[tuple[int, int]]) -> list[dict]:
    """On a rank: what each generator gives first after each call, the state before being another each time.

    "devices" is whether torch.cuda was asked for anything that leads to other devices' generators (torch.manual_seed
    asks, too); it is watched before the student's file is loaded.
    """
    found, asked = [], []

    def watch(name: str) -> None:
        original = getattr(torch.cuda, name)

        def noted(*args, **settings):
            asked.append(name)
            return original(*args, **settings)

        setattr(torch.cuda, name, noted)

    for name in ("manual_seed_all", "is_available", "is_initialized", "device_count"):
        watch(name)
    for number, (seed, rank) in enumerate(calls):
        random.seed(number + 10**9)
        np.random.seed(number + 10**9)
        torch.manual_seed(number + 10**9)
        context.case(f"seed_everything({seed}, rank={rank})" if rank else f"seed_everything({seed})")
        seed_everything, flags = context.student.seed_everything, torch_flags()
        asked.clear()
        seed_everything(*([seed, rank] if rank else [seed]))
        found.append(
            {
                "Python": random.random(),
                "numpy": float(np.random.random()),
                "torch": torch.rand(1, dtype=torch.float64).item(),
                "torch's seed": torch.initial_seed(),
                "devices": bool(asked),
                "flags kept": torch_flags() == flags,
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
        if "torch" in generators:
            expect_torch_seeded(found, f"seed_everything({seed}, rank={rank})", seed + rank, ranks)


def expect_torch_seeded(found: dict, case: str, seed: int, ranks: Callable) -> None:
    """What the numbers of torch's generator on a CPU do not tell."""
    facts = {"case": case, "line": ranks.definition("seed_everything")}
    if found["torch's seed"] != seed:
        fail(
            expected=f"torch seeded with {seed}, as torch.initial_seed() tells",
            found=str(found["torch's seed"]),
            perhaps="torch's generator on a CPU uses the lowest 32 bits of its seed, that on a GPU all of them",
            **facts,
        )
    if not found["devices"]:
        fail(
            expected="torch's generators seeded on every device",
            found="the one of the CPU only",
            perhaps="torch.manual_seed seeds all of them",
            **facts,
        )
    if not found["flags kept"]:
        fail(
            expected="use_deterministic_algorithms and the settings of torch.backends.cudnn as they were",
            found="others",
            perhaps="whether a device computes the same from the same numbers is for its caller to choose",
            **facts,
        )


# ------------------------------------------------------------------------------------------------------------ cosine_lr


def lr_case(step: int, schedule: dict) -> str:
    return f"cosine_lr({step}, {', '.join(f'{k}={v:g}' for k, v in schedule.items())})"


def rates(context, rows: list[tuple[int, dict]]) -> list:
    """On a rank: the learning rates of steps."""
    found = []
    for step, schedule in rows:
        context.case(lr_case(step, schedule))
        found.append(context.student.cosine_lr(step, **schedule))
    return found


def lr_misread(found: float, step: int, schedule: dict) -> str | None:
    """The reading of the docstring that would give this rate."""
    only = schedule["warmup_steps"] + schedule["cycle_steps"]
    readings = [
        (learning_rate(step, **schedule | {"cycle_mult": 1}), "all cycles are as long as the first; see cycle_mult"),
        (learning_rate(step, **schedule | {"min_lr": 0}), "this is what min_lr = 0 would give"),
    ]
    if step >= only:
        readings.append((schedule["min_lr"], "the rate is min_lr, but the next cycle has begun, at max_lr"))
    else:
        shifted = step + schedule["warmup_steps"]
        readings.append((learning_rate(step + 1, **schedule), "this is the rate of the next step: step 0 is the first"))
        readings.append((learning_rate(shifted, **schedule), "the cycle begins after the warm-up, not at step 0"))
    return next((hint for rate, hint in readings if math.isclose(found, rate, rel_tol=1e-9)), None)


def expect_rates(ranks: Callable, rows: list[tuple[int, dict]]) -> None:
    run = ranks(rates, 1, rows)
    for (step, schedule), found in zip(rows, run.values[0], strict=True):
        wrong = numbers_agree(found, learning_rate(step, **schedule), rtol=1e-9)
        if not wrong and not isinstance(found, float):
            wrong = f"{learning_rate(step, **schedule):.9g}, a float", f"of type {type(found).__name__}"
        if wrong:
            fail(
                case=lr_case(step, schedule),
                expected=wrong[0],
                found=wrong[1],
                line=ranks.definition("cosine_lr"),
                perhaps=lr_misread(found, step, schedule) if isinstance(found, float) else None,
            )


def draw_schedule(rng: torch.Generator, **fixed: float) -> dict:
    drawn = {
        "max_lr": draw_int(rng, 10, 100) * 1e-4,
        "min_lr": draw_int(rng, 1, 9) * 1e-4,
        "warmup_steps": draw_int(rng, 3, 20),
        "cycle_steps": 2 * draw_int(rng, 4, 20),
    }
    return drawn | fixed


# ---------------------------------------------------------------------------------------------------------------- train


class Noisy(nn.Module):
    """A model that draws random numbers of its own, from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(64, 16)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 64)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inner = self.drop(self.token(tokens)) * (1 + random.random() + np.random.random())
        return F.cross_entropy(self.head(inner).flatten(0, 1), targets.flatten())


MODELS = {"gpt": tiny, "dropout": Noisy, "float32": lambda: tiny(torch.float32)}


def model_with(kind: str, weights: dict) -> nn.Module:
    model = MODELS[kind]()
    model.load_state_dict(weights)
    return model


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
        checkpoint: bytes, as a tensor, of the file to resume from: by its path, for "dropout" as a file object.
    """
    random.seed(10**9)  # states that no run depends on
    np.random.seed(10**9)
    torch.manual_seed(10**9)
    model = model_with(kind, weights).to(context.device)
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # left over from something else
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
            content = bytes(checkpoint.tolist())
            Path("resumed.pt").write_bytes(content)
            resume = {"resume": io.BytesIO(content) if kind == "dropout" else f"{folder}/resumed.pt"}
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
    return {
        "losses": losses,
        "batches": calls,
        "lrs": lrs,
        "model": model.state_dict(),
        "training": model.training,
        "files": files,
        "saved": saved,
    }


def load_saved(context, kind: str, saved: torch.Tensor) -> list:
    """On a rank: what the student's load_checkpoint makes of a file, iteration and weights."""
    model = MODELS[kind]()
    iteration = context.student.load_checkpoint(io.BytesIO(bytes(saved.tolist())), model)
    return [iteration, model.state_dict()]


def losses_of(model: nn.Module, tokens: np.ndarray, settings: dict) -> list[float]:
    """The losses of a run whose learning rate is 0, after seeding all generators, which are put back."""
    python, numpy, found = random.getstate(), np.random.get_state(), []
    with torch.random.fork_rng(devices=[]), one_thread():
        for seeded in (random.seed, np.random.seed, torch.default_generator.manual_seed):
            seeded(settings["seed"])
        length = settings["context_length"]
        for _ in range(settings["steps"]):
            starts = torch.randint(0, len(tokens) - length, (settings["batch_size"],)).tolist()
            windows = torch.tensor(np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64))
            found.append(model.loss(windows[:, :-1], windows[:, 1:]).item())
    random.setstate(python)
    np.random.set_state(numpy)
    return found


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


def draw_settings(rng: torch.Generator, **fixed: object) -> dict:
    drawn = {
        "steps": 11, "batch_size": 4, "context_length": 12, "max_lr": 3e-3, "min_lr": 5e-4, "warmup_steps": 2,
        "cycle_steps": 4, "cycle_mult": 1.5, "weight_decay": 0.2, "seed": draw_int(rng, 1, 10**6),
    }  # fmt: skip
    return drawn | fixed


def settings_case(settings: dict) -> str:
    shown = ", ".join(f"{k}={v}" for k, v in settings.items() if k in ("steps", "batch_size", "context_length", "seed"))
    return f"TrainConfig({shown}, ...)"


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


def expect_same_losses(found: list, wanted: list, settings: dict, line: str) -> None:
    for step, pair in enumerate(zip(found, wanted, strict=True)):
        wrong = numbers_agree(*pair)
        if wrong:
            hint = (
                "gradients add up until zero_grad; weight_decay is the config's; betas and eps are AdamW's defaults; "
            )
            hint += "all parameters are trained, gradients are not clipped, and a loss is that of one step"
            fail(
                case=f"{settings_case(settings)}, step {step}",
                expected=f"loss {wrong[0]}",
                found=wrong[1],
                line=line,
                perhaps=hint if step else "the loss of a step is that of its batch before the weights are updated",
            )
