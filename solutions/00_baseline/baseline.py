"""Module 00: training on a single device, the run that all later modules spread over several.

Random windows of a file of tokens, AdamW with a cosine schedule, and checkpoints from which a run goes on as if it had
never stopped.

What holds for every function:

* A model is any `torch.nn.Module` with a method `loss(tokens, targets)` that returns the mean loss of a batch, such as
  `autograder.lab.gpt.GPT`. It may be in any dtype and on any device; nothing here moves it.
* Random numbers come from the global generators of Python, numpy and torch, which can be seeded and saved.
* All of PyTorch, numpy and the standard library may be used.
"""

import math
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TrainConfig:
    """What a training run is made of, besides the model and the tokens (given).

    Args:
        steps: number of steps of the whole run; for a run that is resumed, those made before count.
        batch_size: sequences in the batch of one step. Where several ranks share the work (module 02), all of
            theirs together: the global batch.
        context_length: tokens in a sequence.
        max_lr, min_lr, warmup_steps, cycle_steps, cycle_mult: the schedule, see `cosine_lr`.
        weight_decay: AdamW's.
        seed: what the global generators start from, see `seed_everything`.
        checkpoint_path: file to save to; None to save nothing.
        checkpoint_interval: number of steps from one checkpoint to the next, at least 1.
    """

    steps: int
    batch_size: int = 16
    context_length: int = 64
    max_lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 10
    cycle_steps: int = 90
    cycle_mult: float = 1.0
    weight_decay: float = 0.1
    seed: int = 0
    checkpoint_path: str | Path | None = None
    checkpoint_interval: int = 100


# Data and randomness


def get_batch(
    tokens: np.ndarray, batch_size: int, context_length: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Draw random windows of the tokens, and for each of its tokens the one that follows.

    The windows start at the positions that

        torch.randint(0, len(tokens) - context_length, (batch_size,))

    draws from torch's global generator: on the CPU whatever `device` is, once a call, and nothing else is drawn. All
    starts that leave room for a window and the token after it are equally likely, and windows may overlap.

    Args:
        tokens: 1-D array of token ids, of any integer dtype. It may be a read-only memory map that is larger than the
            memory: only the windows may be read, never the whole array.
        batch_size: number of windows, B.
        context_length: tokens in a window, T.
        device: where the batch goes.

    Returns:
        (x, y), both int64 of shape (B, T) on `device`: x[i, t] is the token at starts[i] + t, and y[i, t] the next one.

    Raises:
        ValueError: fewer than context_length + 1 tokens.
    """
    ### BEGIN SOLUTION
    if len(tokens) < context_length + 1:
        raise ValueError(f"{len(tokens)} tokens are too few for a window of {context_length} and the token after it")
    starts = torch.randint(0, len(tokens) - context_length, (batch_size,)).tolist()
    windows = np.stack([tokens[start : start + context_length + 1] for start in starts])
    windows = torch.from_numpy(windows.astype(np.int64)).to(device)
    return windows[:, :-1], windows[:, 1:]
    ### END SOLUTION


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed the global generators of Python (`random`), numpy (`np.random`) and torch, each with seed + rank.

    torch's on every device, not the CPU's only. After this call a rank draws the same numbers in every run, and other
    ranks draw others. That suits what should differ between ranks, such as dropout, and not what must be the same,
    such as initial weights. Whether a device computes the same from the same numbers is another matter
    (`torch.use_deterministic_algorithms`) and is not touched.

    Args:
        seed: at least 0; seed + rank is below 2**63. numpy takes seeds below 2**32 only: it gets (seed + rank) modulo
            2**32.
        rank: of this process.
    """
    ### BEGIN SOLUTION
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)  # all devices
    ### END SOLUTION


# The schedule


def cosine_lr(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, cycle_steps: int, cycle_mult: float = 1.0
) -> float:
    """The learning rate of a step: a linear warm-up, then cosines from max_lr down to min_lr, one after the other.

        step < warmup_steps      max_lr · step / warmup_steps
        in a cycle of T steps    min_lr + (max_lr - min_lr) · (1 + cos(π · t / T)) / 2

    where t = 0, 1, ..., T-1 counts the steps of the cycle. So the rate is 0 at step 0, max_lr at step warmup_steps,
    halfway between at t = T/2, and max_lr again at step warmup_steps + cycle_steps, the first one of the second cycle:
    min_lr itself, at t = T, is never reached. Without a warm-up (warmup_steps = 0) the rate is max_lr at step 0.

    Args:
        step: counted from 0.
        max_lr: rate at the end of the warm-up and at the start of each cycle.
        min_lr: rate that each cycle falls towards.
        warmup_steps: length of the warm-up.
        cycle_steps: length T of the first cycle, at least 1.
        cycle_mult: at least 1. Each cycle has `round(cycle_mult * T)` steps, T being those of the cycle before it.

    Returns:
        The rate, as a float.
    """
    ### BEGIN SOLUTION
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    t, length = step - warmup_steps, cycle_steps
    while t >= length:
        t -= length
        length = round(cycle_mult * length)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * t / length)) / 2
    ### END SOLUTION


# Checkpoints


def random_states() -> dict:
    """The states of all global generators, as tensors and plain Python values, so that they can be saved.

    With `set_random_states` a step that the functions below can share: the two have no points, and you may do without.
    `torch.load(weights_only=True)` reads tensors, numbers, text, None, and tuples, lists and dicts of those; a numpy
    array it refuses.
    """
    ### BEGIN SOLUTION
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }
    ### END SOLUTION


def set_random_states(states: dict) -> None:
    """Put all global generators into the states that `random_states` has returned. Those of torch are CPU tensors."""
    ### BEGIN SOLUTION
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_initialized() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    ### END SOLUTION


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, out: str | os.PathLike | BinaryIO
) -> None:
    """Save all that a run needs to go on: model, optimizer, iteration, and the states of the global generators.

    `torch.load(weights_only=True)` must be able to read the file. Saving changes nothing: neither the model, its
    gradients and whether it is in train or eval mode, nor the optimizer, nor a generator.

    If `out` is a path, the process may be killed at any moment and the disk may be full: the path holds the checkpoint
    of before or the new one, whole, never less, and the next save works. So: write another file in the same folder,
    `os.fsync` it (it is on the disk then), and only then `os.replace` the old file by it (all at once, within one file
    system). After a save that has returned, the folder holds no other file than before and `out`; one that has failed
    raises the error that it met.

    Args:
        model: as it is in training. Pass the bare model: a wrapper such as DistributedDataParallel puts `module.`
            before the names of its tensors, and its checkpoint fits no bare model.
        optimizer: of that model.
        iteration: number of steps that are done.
        out: a path, or a binary file to write to from where it stands.
    """
    ### BEGIN SOLUTION
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "iteration": iteration,
        "random": random_states(),
    }
    if not isinstance(out, str | os.PathLike):
        torch.save(state, out)
        return
    unfinished = Path(f"{os.fspath(out)}.unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(out)
    ### END SOLUTION


def load_checkpoint(
    source: str | os.PathLike | BinaryIO, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Restore what `save_checkpoint` has saved: the model, the optimizer and the states of the global generators.

    The file may come from somebody else, and a pickle can run code: read it with `weights_only=True`. It may come from
    another machine: a tensor that was saved on a GPU that this one does not have is loaded all the same. The values
    are copied into the tensors that the model has, where they are.

    Args:
        source: a path, or a binary file to read from where it stands.
        model: of the same architecture.
        optimizer: of that model; None to leave the optimizer's state in the file.

    Returns:
        The iteration.

    Raises:
        ValueError: a tensor of the model is missing in the checkpoint, or one is too many, or one has another shape.
            The message has the tensor's name, and the model, the optimizer and the generators are as they were.
    """
    ### BEGIN SOLUTION
    state = torch.load(source, map_location="cpu", weights_only=True)  # copied to the model's device below
    saved = {name: list(tensor.shape) for name, tensor in state["model"].items()}
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in saved | shapes:
        if saved.get(name) != shapes.get(name):
            raise ValueError(
                f"{name}: {saved.get(name, 'missing')} in the checkpoint, {shapes.get(name, 'missing')} in the model"
            )
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    set_random_states(state["random"])
    return state["iteration"]
    ### END SOLUTION


# The run


def train(
    model: nn.Module,
    tokens: np.ndarray,
    config: TrainConfig,
    *,
    resume: str | os.PathLike | BinaryIO | None = None,
) -> list[float]:
    """Train a model, from the start or from a checkpoint; the two give the same losses and weights, bit for bit.

    The run begins with `seed_everything(config.seed)`, on every rank with the same seed where there are several. Step
    s = 0, 1, ..., config.steps - 1 draws its batch by one call of `get_batch` with config.batch_size sequences, on the
    model's device; nothing but the model draws other random numbers. Then it takes one step of `torch.optim.AdamW` on
    all parameters, with learning rate `cosine_lr(s)`, weight decay config.weight_decay, and AdamW's defaults for the
    rest. (In module 02 every rank draws the same global batch in this way and keeps its own rows of it.) A step calls
    `model.loss` once, on the whole batch. Gradients that the model has before the run play no part in it, and train or
    eval mode stays as it is.

    Unless config.checkpoint_path is None, a checkpoint is saved there when the number of steps done is a multiple of
    config.checkpoint_interval, and after the last step.

    Args:
        model: its weights are where the run starts; trained in place.
        tokens: see `get_batch`.
        config: see `TrainConfig`.
        resume: a checkpoint of this run, to go on from; the model's weights are replaced by its.

    Returns:
        For each step that this call has made, the loss of its batch before the weights were updated; for none, [].
    """
    ### BEGIN SOLUTION
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.max_lr, weight_decay=config.weight_decay)
    seed_everything(config.seed)
    first = 0 if resume is None else load_checkpoint(resume, model, optimizer)
    losses = []
    for step in range(first, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = cosine_lr(
                step,
                max_lr=config.max_lr,
                min_lr=config.min_lr,
                warmup_steps=config.warmup_steps,
                cycle_steps=config.cycle_steps,
                cycle_mult=config.cycle_mult,
            )
        x, y = get_batch(tokens, config.batch_size, config.context_length, device)
        loss = model.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        done = step + 1
        if config.checkpoint_path is not None and (done % config.checkpoint_interval == 0 or done == config.steps):
            save_checkpoint(model, optimizer, done, config.checkpoint_path)
    return losses
    ### END SOLUTION
