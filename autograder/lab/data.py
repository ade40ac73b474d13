"""Real text without a download: the Python standard library's own sources, as bytes, in one file of token ids."""

import sysconfig
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256  # a token is a byte


def tokenize(text: str) -> np.ndarray:
    """The token ids of a text: its UTF-8 bytes, as uint16."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)


def decode(tokens: np.ndarray) -> str:
    """The text of token ids; bytes that are no UTF-8 become a replacement character."""
    return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


def corpus(path: Path, size: int = 2**22) -> np.ndarray:
    """Open the corpus, which is written on first use.

    The sources in the standard library's top folder, in alphabetical order, cut off at `size` tokens.

    Args:
        path: of the .npy file.
        size: number of tokens to write, at most.

    Returns:
        A read-only memory map of uint16 token ids: only what is indexed is read.
    """
    path = Path(path)
    if not path.exists():
        parts, total = [], 0
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            tokens = tokenize(source.read_text(encoding="utf-8", errors="replace"))
            parts.append(tokens)
            total += len(tokens)
            if total >= size:
                break
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{id(parts)}.tmp.npy")
        np.save(unfinished, np.concatenate(parts)[:size])
        unfinished.replace(path)  # whole or not at all, also when two processes write it
    return np.load(path, mmap_mode="r")
