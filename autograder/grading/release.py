"""What students are given: ``assignments/``, made from ``solutions/`` by nbgrader's generate_assignment.

nbgrader clears the solutions of notebooks, but copies a folder's other files as they are. One of the
preprocessors in nbgrader_config.py, `ClearSolutionFiles`, clears the ``.py`` files. It is a preprocessor
because nbgrader removes the release when a preprocessor fails, and ignores what goes wrong in a hook.
"""

import ast
import io
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from nbgrader.converters import GenerateAssignment
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import ClearSolutions
from nbgrader.preprocessors.base import NbGraderPreprocessor
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from autograder.grading import notebooks

MARKER = re.compile(r"^(\s*)### (BEGIN|END) SOLUTION\s*$")
# Whatever else looks like a marker, or that nbgrader would take for one.
MISSPELT = re.compile(
    r"(BEGIN|END|START|STOP)[\W_]*SOLUTION|SOLUTION[\W_]*(BEGIN|END|START|STOP)\b"
    r"|^\s*#\W*(?i:(begin|end|start|stop)[\W_]*solution)"
)
RESERVED = re.compile(r"^\s*###")  # in Python files: for markers only, which finds the misspelt ones
CACHES = {
    "__pycache__",
    ".ipynb_checkpoints",
    ".pytest_cache",
}  # what running an assignment leaves in its folder


class ReleaseError(Exception):
    """Something would be released that must not be; the message names file and line."""


def marker_problems(text: str, reserved: bool) -> Iterator[tuple[int, str]]:
    """The line and the fault of each solution marker that is not one of a pair, plainly written.

    Args:
        text: a Python file or a notebook cell
        reserved: whether ``###`` at the start of a line is for markers only
    """
    begin, indent = 0, ""  # of the region that is open
    inside = False  # and has not left its block
    for number, line in enumerate(text.splitlines(), 1):
        marker = MARKER.match(line)
        if not marker:
            if MISSPELT.search(line) or (reserved and RESERVED.match(line)):
                yield number, f"{line.strip()!r} is neither '### BEGIN SOLUTION' nor '### END SOLUTION'"
            if inside and line.strip() and not line.startswith(indent):
                inside = False
                yield number, f"the solution region of line {begin} leaves its block here"
        elif marker[2] == "BEGIN":
            if begin:
                yield number, f"a solution begins inside the one that begins in line {begin}"
            begin, indent, inside = number, marker[1], True
        else:
            if not begin:
                yield number, "a solution ends that did not begin"
            elif inside and marker[1] != indent:
                yield number, f"not indented like the '### BEGIN SOLUTION' of line {begin}"
            begin, inside = 0, False
    if begin:
        yield begin, "a solution begins that does not end"


def file_problems(text: str) -> Iterator[tuple[int, str]]:
    """The line and the fault of whatever keeps a file from becoming a skeleton that can be imported."""
    yield from marker_problems(text, reserved=True)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield error.lineno or 1, f"syntax error: {error.msg}"
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for number, line in enumerate(text.splitlines(), 1):
        marker = MARKER.match(line)
        if marker and marker[2] == "BEGIN" and not any(f.lineno < number <= (f.end_lineno or 0) for f in functions):
            yield (
                number,
                "a solution region outside a function: its stub would raise when the file is imported",
            )


def has_regions(text: str) -> bool:
    """Whether the text has solution regions, so that students edit the file."""
    return any(MARKER.match(line) for line in text.splitlines())


def student_files(folder: Path) -> list[str]:
    """The files in a module's folder that students edit, relative to it: those with solution regions."""
    files = (path for path in sorted(folder.rglob("*.py")) if path.name != "hidden_checks.py")
    return [path.relative_to(folder).as_posix() for path in files if has_regions(path.read_text(encoding="utf-8"))]


def modules(root: Path) -> list[str]:
    """The names of the modules that have a source folder."""
    folders = (root / "solutions").glob("*") if (root / "solutions").is_dir() else []
    return sorted(folder.name for folder in folders if folder.is_dir() and not folder.name.startswith((".", "_")))


class ClearSolutionFiles(NbGraderPreprocessor):
    """Replaces the solution regions of the released ``.py`` files by nbgrader's stub."""

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Clear the files beside the notebook that is being released; the notebook itself is only checked."""
        info = resources["nbgrader"]
        for number, cell in enumerate(nb.cells, 1):
            for line, problem in marker_problems(cell.source, reserved=cell.cell_type == "code"):
                raise ReleaseError(f"{info['notebook']}.ipynb: cell {number}, line {line}: {problem}")
        converter = self.parent.parent  # the exporter's parent
        folder = Path(converter._format_dest(info["assignment"], info["student"]))
        for path in sorted(folder.rglob("*")):
            if path.suffix == ".py":
                self.clear_file(path, f"{info['assignment']}/{path.relative_to(folder).as_posix()}")
            elif path.is_file() and path.suffix != ".ipynb" and MISSPELT.search(path.read_text("utf-8", "replace")):
                raise ReleaseError(f"{path.name}: holds a solution marker, and only .py files are cleared")
        return nb, resources

    def clear_file(self, path: Path, name: str) -> None:
        """Replace the solution regions of one file."""
        text = path.read_text(encoding="utf-8")
        for line, problem in file_problems(text):
            raise ReleaseError(f"{name}:{line}: {problem}")
        if not has_regions(text):
            return
        cell = new_code_cell(text, metadata={"nbgrader": {"solution": True}})
        cell, _ = ClearSolutions(parent=self).preprocess_cell(cell, {"language": "python"}, 0)
        compile(cell.source, name, "exec")
        path.unlink()  # the copy has the source's permissions and may be read-only
        path.write_text(cell.source, encoding="utf-8", newline="\n")


def source_problems(root: Path) -> list[str]:
    """One line for everything in solutions/ that keeps it from being released."""
    problems = notebooks.stale(root, [notebooks.WORKSHEETS])
    for module in modules(root):
        folder = root / "solutions" / module
        if not list(folder.glob("*.md")):
            problems.append(f"{folder}: has no worksheet")
        python = [path for path in sorted(folder.rglob("*.py")) if path.name != "hidden_checks.py"]
        if python and not student_files(folder):
            problems.append(f"{folder}: no .py file has a solution region, so the solution would be released as it is")
        for path in python:
            problems += [f"{path}:{line}: {text}" for line, text in file_problems(path.read_text(encoding="utf-8"))]
    return problems


def generate(root: Path, module: str, out: Path) -> None:
    """Write what students get of one module to ``out/module``; the same sources give the same bytes.

    nbgrader runs without its database here, so that nothing else is written.

    Raises:
        ReleaseError: with nbgrader's log; nothing is left in ``out/module``.
    """
    config = PyFileConfigLoader("nbgrader_config.py", path=str(root)).load_config()
    config.merge(
        Config(
            CourseDirectory={"root": str(root), "assignment_id": module, "release_directory": str(out)},
            GenerateAssignment={"no_database": True},
            SaveCells={"enabled": False},
            BaseConverter={"force": True},
        )
    )
    messages = io.StringIO()
    log = logging.Logger("nbgrader", level=logging.ERROR)
    log.addHandler(logging.StreamHandler(messages))
    try:
        coursedir = CourseDirectory(config=config, log=log)
        GenerateAssignment(coursedir=coursedir, config=config, log=log).start()
    except NbGraderException as error:
        raise ReleaseError(messages.getvalue()) from error


def _files(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by its relative name, without what running it leaves there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    relative = {path.relative_to(folder): path for path in files}
    return {name.as_posix(): path.read_bytes() for name, path in relative.items() if not CACHES & set(name.parts)}


def release(check: bool = False) -> int:
    """Regenerate assignments/ from solutions/, or see whether that would change it.

    Args:
        check: write nothing, compare only

    Returns:
        0, or 1 where the sources cannot be released or, with ``check``, where assignments/ differs.
    """
    root = notebooks.course_root()
    problems = source_problems(root)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1

    assignments = root / "assignments"
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary).resolve()
        for module in modules(root):
            try:
                generate(root, module, out)
            except ReleaseError as error:
                print(error, file=sys.stderr)
                return 1
        new, old = _files(out), _files(assignments)
        changed = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
        for name in changed:
            state = "missing" if name not in old else "not from solutions/" if name not in new else "differs"
            print(f"assignments/{name}: {state}" if check else f"assignments/{name}")
        if check:
            if changed:
                print("assignments/ is not what solutions/ gives: run `autograder release`")
            return 1 if changed else 0
        for name in changed:
            target = assignments / name
            target.unlink(missing_ok=True)
            if name in new:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(out / name, target)
            elif not any(target.parent.iterdir()):
                target.parent.rmdir()
    return 0
