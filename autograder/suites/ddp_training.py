"""Module 02's training run, on many ranks: what it is given, and its losses judged."""

import importlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from autograder.lab import gpt
from autograder.lab.ranks import Run, RunFailed
from autograder.suites.kit import draw_int, fail, hand_out, numbers_agree

B, T, VOCAB = 12, 8, 32


def random_tokens(rng: torch.Generator) -> np.ndarray:
    return torch.randint(0, VOCAB, (500,), generator=rng).numpy().astype(np.uint16)


def small_gpt(rng: torch.Generator) -> nn.Module:
    torch.manual_seed(draw_int(rng, 0, 10**6))
    return gpt.tiny(layers=1, width=16, vocab_size=VOCAB, context_length=T)


def draw_settings(rng: torch.Generator, steps: int) -> dict:
    return {
        "steps": steps, "batch_size": B, "context_length": T, "max_lr": 0.01, "min_lr": 0.001, "warmup_steps": 2,
        "cycle_steps": 3, "cycle_mult": 1.0, "weight_decay": 0.1, "seed": draw_int(rng, 0, 1000),
        "checkpoint_interval": 2,
    }  # fmt: skip


@dataclass
class Training:
    """A run of `train_ddp`: what every rank passes, but for where its checkpoint is.

    Args:
        config: fields of `TrainConfig`.
        resume: what is in the checkpoint to go on from.
        single: run module 00's `train` in place of `train_ddp`.
        slow: all ranks have one disk, on which saving takes a while.
    """

    config: dict
    resume: Tensor | None = None
    single: bool = False
    slow: bool = False


def train(context, model: nn.Module, tokens: np.ndarray, run: Training, members: list[int] | None) -> dict | None:
    """On a rank: one training run. Tells the losses, the batches that the model saw, the iterations that were saved,
    whether the checkpoint was there on return, and its bytes."""
    group = context.group(members) if members else None
    if model is None:
        return None
    student = context.student  # from here on the student's other modules can be imported
    baseline = importlib.import_module("baseline")
    batches = []

    def watch(module: nn.Module, arguments: tuple) -> None:
        batches.append(arguments[0].detach().clone())

    save, saves = baseline.save_checkpoint, []

    def watched_save(model: nn.Module, optimizer: object, iteration: int, out: object) -> None:
        saves.append(iteration)
        time.sleep(0.3 if run.slow else 0.0)
        save(model, optimizer, iteration, out)

    for place in (baseline, student):
        if getattr(place, "save_checkpoint", None) is save:
            place.save_checkpoint = watched_save
    model.register_forward_pre_hook(watch)
    with tempfile.TemporaryDirectory() as folder:  # in the job's own, which the driver removes whatever happens
        path, source = (Path(folder).parent if run.slow else Path(folder)) / "checkpoint.pt", None
        if run.resume is not None:
            source = Path(folder) / "source.pt"
            source.write_bytes(run.resume.numpy().tobytes())
        config = baseline.TrainConfig(**run.config, checkpoint_path=path)
        if run.single:
            losses = baseline.train(model, tokens, config, resume=source)
        else:
            losses = student.train_ddp(model, tokens, config, resume=source, **({"group": group} if members else {}))
        there = path.exists()
        saved = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) if there else None
    return {"losses": losses, "batches": batches, "saves": saves, "there": there, "saved": saved}


def run_training(
    ranks: Callable, models: list[nn.Module], tokens: np.ndarray, run: Training, members: list[int] | None = None
) -> Run:
    """One training run on ranks; where module 00 is not there yet, the check says so."""
    world_size = max(members) + 1 if members else len(models)
    try:
        return ranks(train, world_size, hand_out(models, members, world_size), tokens, run, members)
    except RunFailed as failure:
        frames = [f for error in failure.run.errors for f in error.get("frames", [])[-1:]]
        if failure.status == "not_implemented" and any(f[0] != "ddp.py" for f in frames):
            name, number, function, _ = next(f for f in frames if f[0] != "ddp.py")
            fail(expected="your module 00, which train_ddp builds on", found=f"{function} is not implemented yet",
                 line=f"{name}:{number}")  # fmt: skip
        raise


def expect_losses(ranks: Callable, run: Run, wanted: list[float], places: list[int], case: str) -> None:
    """These losses on every rank."""
    everybody = [run.values[rank]["losses"] for rank in places]
    for rank, found in zip(places, everybody, strict=True):
        wrong = numbers_agree(found, tuple(wanted), rtol=1e-7)
        if not wrong:
            continue
        step = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if abs(a - b) > 1e-7 * b), 0)
        perhaps = "the gradients are not averaged, or the learning rate is not that of the step"
        if len(found) != len(wanted):
            perhaps = (
                "one for each step that is left: is there a checkpoint after the last step, and is it told from where?"
            )
        elif step == 0 and any(other != found for other in everybody):
            perhaps = "each rank tells the loss of its own rows; the mean over the ranks is asked for"
        elif step == 0:
            perhaps = "do all ranks start from the first rank's weights, or the checkpoint's, and draw the same batch?"
        fail(
            case=case,
            expected=f"losses on rank {rank}: {wrong[0]}",
            found=wrong[1],
            line=ranks.definition("train_ddp"),
            perhaps=perhaps,
        )
