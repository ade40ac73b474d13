"""A student's file before any problem is judged: whether it can be loaded, and what functions it has."""

import ast
import difflib
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from autograder.lab import ranks
from autograder.lab.findings import Finding
from autograder.suites.kit import Module

IMPORTS = "torch, numpy, Python's standard library and your files of earlier modules"


def load(module: Module, file: Path) -> dict[str, str]:
    """Load the file on a rank of its own.

    Returns:
        Its functions and classes: name -> "collectives.py:64   def broadcast(tensor, src, group=None):".

    Raises:
        Finding: it cannot be loaded.
    """
    try:
        run = ranks.run(_functions, 1, student=file, timeout=module.timeout, preload=module.preload)
    except ranks.RunFailed as failure:
        error, facts = failure.run.errors[0], list(failure.facts)
        title = failure.title.replace("the code raised ", "")
        if error.get("type") == "ModuleNotFoundError":
            facts.append(("perhaps", f"leave this import out: what can be counted on is {IMPORTS}"))
        raise Finding(failure.status, f"{module.name}/{file.name} cannot be loaded: {title}", facts) from None
    return {str(name): str(line) for name, line in dict(run.values[0]).items()}


def _functions(context: ranks.rank_files.RankContext) -> dict[str, str]:
    """On a rank: the functions and classes that the student's file defines, each with its line."""
    student = context.student
    with tokenize.open(student.__file__) as file:  # in the file's own encoding, with or without a byte-order mark
        text = file.read()
    lines = text.split("\n")

    def definitions(node: ast.AST) -> Iterator[tuple[str, int]]:
        """Those at the top, also under an `if` or `try`, but not within one another."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield child.name, child.lineno
            else:
                yield from definitions(child)

    starts, found = dict(definitions(ast.parse(text))), {}
    for name, value in vars(student).items():
        start = starts.get(name) or starts.get(getattr(value, "__name__", None))  # the second: another name for it
        if start and getattr(value, "__module__", None) == student.__name__:
            found[name] = f"{Path(student.__file__).name}:{start}   {lines[start - 1].strip()}"
    return found


def reworded(failure: ranks.RunFailed, file: Path, functions: dict[str, str]) -> Finding:
    """The failure in words about the file where the check itself could not call a function of it, else as it is."""
    error = next((e for e in failure.run.errors if e), {})
    kind, message = error.get("type"), str(error.get("message"))
    if error.get("frames"):  # raised in the student's own lines
        return failure
    absent = re.fullmatch(rf"module '{re.escape(file.stem)}' has no attribute '(\w+)'", message)
    if kind == "AttributeError" and absent:
        name = absent[1]
        near = difflib.get_close_matches(name, functions, n=1, cutoff=0.7)
        title = f"{file.name} has no function `{name}`"
        return Finding("failed", f"{title}; did you mean `{near[0]}`?" if near else title)
    called = re.match(r"(\w+)\(\) ", message)
    if kind == "TypeError" and called and called[1] in functions and not called[1].startswith("_"):
        facts = [(label, text) for label, text in failure.facts if label == "case"]
        facts.append(("your line", functions[called[1]]))
        facts.append(("perhaps", "keep the parameters of the skeleton, all of them and in the same order"))
        return Finding("failed", message, facts)
    named = re.match(r"(\w+) ", message)  # the check's own code says it of a function: "save_checkpoint has closed ..."
    if named and named[1] in functions and not failure.fact("your line"):
        failure.facts.append(("your line", functions[named[1]]))
    return failure
