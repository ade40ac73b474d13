"""Which lines are the caller's own, and how they are called in messages."""

import functools
import linecache
import os
import types
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_LAB = str(Path(__file__).parent)
_STANDARD = str(Path(os.__file__).parent)  # the standard library, and site-packages in it


@functools.cache
def is_library(path: str) -> bool:
    """Whether a file is PyTorch's, Python's, an installed package's or the lab's own: never "the student's line"."""
    if path.startswith("<"):  # of code without a file, only a notebook's is the caller's own
        return not path.startswith("<ipython")
    return path.startswith((_TORCH, _LAB, _STANDARD)) or "site-packages" in path


def position(frame: types.FrameType) -> tuple[str, str]:
    """Where a frame is, as "file:line", and the text of that line."""
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file_name(path, frame.f_code.co_name)}:{line}", linecache.getline(path, line).strip()[:160]


@functools.cache
def file_name(path: str, function: str) -> str:
    """How a file is called in messages; in a notebook, the function stands for the cell."""
    name = Path(path).name
    in_notebook = path.startswith("<ipython") or (name != path and not Path(path).exists())
    return function if in_notebook else name
