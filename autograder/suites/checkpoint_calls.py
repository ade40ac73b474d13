"""Module 00's checkpoints, saved and loaded on ranks: there and back, into models that do not fit, and by copies of a
rank that die in the middle or run out of disk."""

import contextlib
import io
import linecache
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
from torch import nn

from autograder.suites.kit import draw_int

# --------------------------------------------------------------------------------------------------- models in training


def network(widths: list[int] | dict[str, list[int]]) -> nn.Module:
    """A small model in several dtypes that has buffers, an integer one too; or parameters of given shapes only."""
    if isinstance(widths, dict):
        return nn.ParameterDict({name: torch.ones(shape) for name, shape in widths.items()})
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, dtype=torch.float64), nn.BatchNorm1d(b)]
    return nn.Sequential(*layers)


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    """An AdamW that treats biases and weights differently."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}])


def practised(rng: torch.Generator, widths: list[int] | dict[str, list[int]]) -> dict:
    """The states of a model and its optimizer in the middle of training: arbitrary numbers everywhere."""
    model = network(widths)
    numbers = {
        name: torch.rand(t.shape, generator=rng, dtype=t.dtype)
        if t.is_floating_point()
        else torch.tensor(draw_int(rng, 1, 1000))  # BatchNorm's num_batches_tracked
        for name, t in model.state_dict().items()
    }
    ordered = sorted(model.parameters(), key=lambda p: p.ndim < 2)  # as in the groups of `two_groups`
    moments = {
        i: {
            "step": torch.tensor(float(draw_int(rng, 1, 1000))),
            "exp_avg": torch.randn(p.shape, generator=rng, dtype=p.dtype),
            "exp_avg_sq": torch.rand(p.shape, generator=rng, dtype=p.dtype),
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


# ----------------------------------------------------------------------------------------------------- saved and loaded

TARGETS = (
    "out is a Path",
    "out is a str",
    "out is a file object that has been written to before",
    "no optimizer is passed to load_checkpoint",
)
NEIGHBOURS = "checkpoint-1000.pt", "notes.txt"  # files in the folder that are none of save_checkpoint's


def besides_values(model: nn.Module) -> list:
    """What saving could change in a model besides its values."""
    return [
        [m.training for m in model.modules()],
        [None if p.grad is None else p.grad.sum() for p in model.parameters()],
    ]


def round_trips(context, states: dict, iteration: int) -> list[dict]:
    """On a rank: save to and load from each of the targets."""
    found, before = [], b"what stands before the checkpoint"
    with tempfile.TemporaryDirectory() as folder:
        for name in NEIGHBOURS:
            Path(folder, name).write_bytes(before)
        outs = Path(folder) / "checkpoint.pt", f"{folder}/checkpoint.pt", io.BytesIO(), io.BytesIO()
        for target, out in zip(TARGETS, outs, strict=True):
            context.case(target)
            model, optimizer = rebuilt(states, context.device)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            if isinstance(out, io.BytesIO):
                out.write(before)
            others = besides_values(model)
            context.student.save_checkpoint(model, optimizer, iteration, out)
            kept = besides_values(model) == others and not any(
                bool((t != states["model"][name]).any()) for name, t in model.state_dict().items()
            )
            if isinstance(out, io.BytesIO):
                if out.closed:
                    raise ValueError("save_checkpoint has closed the file object, which belongs to its caller")
                out.seek(len(before))
            model, optimizer = fresh(states, context.device)
            own = [p.data_ptr() for p in model.parameters()]
            optimizer_too = target != TARGETS[-1]
            returned = context.student.load_checkpoint(out, model, *([optimizer] if optimizer_too else []))
            found.append(
                {
                    "iteration": returned,
                    "kept": kept,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict() if optimizer_too else None,
                    "in place": own == [p.data_ptr() for p in model.parameters()],
                    "folder": sorted(p.name for p in Path(folder).iterdir()),
                }
            )
    return found


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


def draws_after_saving_and_loading(context, states: dict, seeds: list[int]) -> list[dict]:
    """On a rank: what the generators give after a checkpoint was saved, after it was loaded, and without optimizer."""
    model, optimizer = rebuilt(states, context.device)
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.manual_seed(seeds[2])
    draws(random, np.random, None)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/checkpoint.pt"
        context.student.save_checkpoint(model, optimizer, 1, out)
        found = [draws(random, np.random, None)]
        for optimizer_too in (True, False):
            for other in (random.seed, np.random.seed, torch.manual_seed):
                other(0)
            model, optimizer = fresh(states, context.device)
            context.student.load_checkpoint(out, model, *([optimizer] if optimizer_too else []))
            found.append(draws(random, np.random, None))
    return found


def saved_on_a_gpu(context, states: dict) -> dict:
    """On a rank: save tensors that say they are on cuda:99, and load them."""
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


# ------------------------------------------------------------------------------------------------ files that do not fit


class Mischief:
    """Makes a folder when it is unpickled: a harmless sign that code from the file was run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.folder,)


def load_mischief(context, states: dict) -> dict:
    """On a rank: why torch refuses the student's file, if it does, and whether the student runs what is in another."""
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


def widths_case(states: dict, other: dict) -> str:
    return f"a checkpoint of layers {states['widths']} into a model of layers {other['widths']}"


def besides_model(optimizer: torch.optim.Optimizer) -> list:
    """What loading could change besides the model."""
    moments = [moment["exp_avg"].tolist() for moment in optimizer.state.values()]
    return [moments, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def loaded_into(context, pairs: list[tuple[dict, dict]]) -> list[dict]:
    """On a rank: load checkpoints into models of other shapes; what was raised, and the model after it."""
    found = []
    for states, other in pairs:
        context.case(widths_case(states, other))
        out = io.BytesIO()
        context.student.save_checkpoint(*rebuilt(states, context.device), 1, out)
        out.seek(0)
        torch.manual_seed(1)  # not where the checkpoint was saved
        model, optimizer = rebuilt(other, context.device)
        raised, others = ("nothing", ""), besides_model(optimizer)
        try:
            context.student.load_checkpoint(out, model, optimizer)
        except NotImplementedError:
            raise
        except Exception as error:
            raised = type(error).__name__, str(error)
        found.append({"raised": raised, "model": model.state_dict(), "kept": besides_model(optimizer) == others})
    return found


# ------------------------------------------------------------------------------------------------------ saves that fail


def in_a_copy(action: Callable[[], None]) -> bool:
    """Do something in a fork of this process, which may die of it; whether it was done."""
    pid, code = os.fork(), 1
    if pid == 0:
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


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


def killed_at_each_line(context, states: dict) -> dict:
    """On a rank: save as iteration 2 over iteration 1, in copies of this process that end before one of the lines."""
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


def saved_on_full_disks(context, states: dict) -> dict:
    """On a rank: save as iteration 2 over iteration 1 where no file may get larger than a part of the checkpoint."""
    model, optimizer = rebuilt(states, context.device)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint.pt"
        context.student.save_checkpoint(model, optimizer, 1, path)
        size, hard = Path(path).stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]

        def limited(room: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            context.student.save_checkpoint(model, optimizer, 2, path)

        for room in (0, size // 2, size * 9 // 10):
            returned = in_a_copy(lambda room=room: limited(room))
            after = loaded(context, states, path)
            if after != 1 or returned:
                return {"room": room, "size": size, "after": after, "returned": returned}
        context.student.save_checkpoint(model, optimizer, 3, path)
        return {"room": None, "after": loaded(context, states, path)}


class Place(os.PathLike):
    """A path that is neither a text nor a Path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__


SAVES = (
    ("checkpoint.pt", "a Path"),
    ("checkpoint.pt", "another os.PathLike"),
    ("checkpoint.tmp", "a Path"),
    ("checkpoint.pt.tmp", "a Path"),
)


def replaced_files(context, states: dict) -> list[list[dict]]:
    """On a rank: for each of SAVES, by what the file was replaced.

    The functions are watched before the student's file is loaded.
    """
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
        if new == old:
            return
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
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in SAVES:
            path = Path(folder) / name
            replaced.clear()
            context.student.save_checkpoint(
                *rebuilt(states, context.device), 1, path if kind == "a Path" else Place(path)
            )
            found.append([r for r in replaced if r["onto"] == name])
    return found
