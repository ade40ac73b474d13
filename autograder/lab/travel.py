"""How a function reaches the ranks: pickled by value, with the names of its source files and, if need be, their text.

The other direction is not pickle: see `rank` and `ranks`.
"""

import io
import linecache
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import cloudpickle

_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, keeping the file name of code; and collecting the text of files that exist in this process only."""

    def __init__(self, file: io.BytesIO, sources: dict[str, list[str]]) -> None:
        # The C pickler looks its dispatch table up once, when it is made.
        self.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: self._reduce_code})
        super().__init__(file)
        self.sources = sources

    def _reduce_code(self, code: types.CodeType) -> tuple:
        name = code.co_filename
        if name not in self.sources and not Path(name).exists():  # a cell of a notebook
            self.sources[name] = linecache.getlines(name)
        make, arguments = _code(code)
        return make, tuple(name if isinstance(a, str) and a == "<dynamic-code>" else a for a in arguments)


def pack(value: object, fn: Callable) -> bytes:
    """Pickle by value what is in `fn`'s own module and in suites, so that a rank imports neither those nor pytest."""
    by_value = [
        module for name, module in list(sys.modules.items())
        if (name == getattr(fn, "__module__", None) and name != "__main__" and not name.startswith("autograder.lab"))
        or name.startswith("autograder.suites.")
    ]  # fmt: skip
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        sources: dict[str, list[str]] = {}
        file = io.BytesIO()
        _Pickler(file, sources).dump(value)
        return pickle.dumps((sources, file.getvalue()))
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def unpack(payload: bytes) -> object:
    """In a rank: what `pack` packed. The text of files that are not on disk goes where tracebacks look for it."""
    sources, value = pickle.loads(payload)
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return pickle.loads(value)
