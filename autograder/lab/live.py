"""Live tensors: how many bytes a process really holds at a moment, whoever holds them.

`memory` counts tensors that it is given. Here nothing is declared: a `TorchDispatchMode` sees what every operator takes
and returns, and keeps weak references to the storages behind it. A storage counts for as long as anything holds it: a
variable, a gradient, autograd's graph, a message under way. One that was resized counts with the bytes that it has now;
one that several tensors share counts once.

    with LiveTensors(model.parameters()) as live:
        before = live.nbytes()
        loss = model(x)
        print(live.nbytes() - before)  # what forward has left behind

What is told apart is for the caller to say: by moments (what came between two of them), by tensors that it knows
(`nbytes(without=...)`), or by sizes that it has chosen (`sizes()`).
"""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):
    """Knows all storages that operators use while it is active, and those of the tensors that it was given.

    It acts in the thread that enters it, and in backward passes of that thread.

    Args:
        tensors: that are there already. One that no operator uses would not be seen otherwise.
        on_device: only storages of this type of device count; None for all.
        peak: whether the largest number of bytes is looked for, after every operator; it makes each a little slower.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `recorder.Recorder`

    def __init__(self, tensors: Iterable[Tensor] = (), on_device: str | None = None, peak: bool = False) -> None:
        super().__init__()
        self.on_device = on_device
        self._known: dict[int, _Weak] = {}
        self._watch = peak
        self._peak = 0
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count these from now on, too."""
        for tensor in tensors:
            self._see(tensor)

    def nbytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of all live storages, but for those behind some tensors."""
        return sum(self.sizes(without))

    def settled(self, seconds: float = 0.008) -> int:
        """The fewest bytes that were live at any of a few moments of so long a time.

        A message that has been waited for may be held a moment longer, by a thread of the backend.
        """
        fewest = self.nbytes()
        for _ in range(4):
            time.sleep(seconds / 4)
            fewest = min(fewest, self.nbytes())
        return fewest

    def sizes(self, without: Iterable[Tensor] = ()) -> list[int]:
        """Bytes of each live storage that has any, largest first, but for those behind some tensors."""
        excluded = {tensor.untyped_storage()._cdata for tensor in without}
        found = []
        for key, weak in list(self._known.items()):
            nbytes = weak.nbytes()
            if nbytes is None:
                del self._known[key]
            elif nbytes and key not in excluded:
                found.append(nbytes)
        return sorted(found, reverse=True)

    def reset_peak(self) -> None:
        """Look for the peak from here on."""
        self._peak = self.nbytes()

    def peak(self) -> int:
        """The most bytes that were live after any operator since the beginning, or since `reset_peak`."""
        if not self._watch:
            raise ValueError("LiveTensors was made without peak=True")
        return max(self._peak, self.nbytes())

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if any(_is_wrapper(t) and t.__name__ != "FakeTensor" for t in types):  # a fake one only works out shapes
            return NotImplemented  # a DTensor, say: its own handler runs first, and we see the tensors inside it
        out = func(*args, **(kwargs or {}))
        self._see_all((args, kwargs, out))
        if self._watch:
            self._peak = max(self._peak, self.nbytes())
        return out

    def _see_all(self, tree: object) -> None:
        if isinstance(tree, Tensor):
            self._see(tree)
        elif isinstance(tree, tuple | list):
            for part in tree:
                self._see_all(part)
        elif isinstance(tree, dict):
            for part in tree.values():
                self._see_all(part)

    def _see(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_meta or _is_wrapper(type(tensor)):
            return
        if self.on_device and tensor.device.type != self.on_device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        # While a weak reference is there, its address is not given to another storage.
        if key not in self._known:
            self._known[key] = _Weak(storage)


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of this class are made of others, and have a storage for show only."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


class _Weak:
    """A reference to a storage that does not keep its bytes."""

    __slots__ = ("cdata", "free")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata, self.free = storage._weak_ref(), torch.UntypedStorage._free_weak_ref

    def nbytes(self) -> int | None:
        """Bytes that the storage has now; None where it is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.cdata)
        return None if storage is None else storage.nbytes()

    def __del__(self) -> None:
        self.free(self.cdata)
