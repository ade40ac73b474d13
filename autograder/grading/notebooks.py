"""Builds the notebooks from their text: ``python -m autograder.grading.notebooks [--check] [PATH ...]``.

The source of ``X.ipynb`` is the jupytext Markdown ``X.md`` beside it. Lectures (``lectures/*.md``) are
executed in their own folder and keep their outputs; worksheets (``solutions/*/*.md``) are not executed, so
that building one twice gives the same bytes.
"""

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

LECTURES, WORKSHEETS = "lectures/*", "solutions/*/*"
ALL = (LECTURES, WORKSHEETS)
CELL_TIMEOUT_S = 600
MAX_OUTPUT_BYTES = 400_000  # of one cell: an SVG with a few thousand points; more belongs in a smaller picture
METADATA = {  # the same on every machine: no Python version, no jupytext version
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class NotebookError(Exception):
    """A notebook cannot be built; the message names the source and the cell."""


def course_root() -> Path:
    """The nearest folder with nbgrader_config.py, above the working directory or this file."""
    here = Path.cwd()
    for folder in [here, *here.parents, *Path(__file__).resolve().parents]:
        if (folder / "nbgrader_config.py").is_file():
            return folder
    raise FileNotFoundError("no nbgrader_config.py in this folder or above it: run this inside the course's checkout")


def sources(root: Path, patterns: Sequence[str] = ALL) -> list[Path]:
    """Every notebook source of the course, in order."""
    found = [path for pattern in patterns for path in sorted(root.glob(f"{pattern}.md"))]
    return [path for path in found if path.name != "README.md"]


def is_lecture(source: Path) -> bool:
    """Whether the notebook is given out executed."""
    return source.resolve().parent.name == "lectures"


def read(source: Path) -> NotebookNode:
    """The notebook that the text describes, not executed; the same text gives the same notebook."""
    notebook = jupytext.read(source, fmt="md")
    notebook.metadata = nbformat.from_dict(METADATA)
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        # The id follows from the content, so that a new cell does not rename the others.
        content = json.dumps([cell.cell_type, cell.source, cell.metadata], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    nbformat.validate(notebook)
    return notebook


def execute(notebook: NotebookNode, source: Path) -> None:
    """Run every cell in the source's folder and keep the outputs.

    Raises:
        NotebookError: a cell raised, wrote to stderr, ran too long or left too large an output.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(source.resolve().parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    stopped = ""
    try:
        # matplotlib writes this date, not today's, into an SVG.
        client.execute(env={**os.environ, "SOURCE_DATE_EPOCH": "0"})
    except CellExecutionError:
        pass  # the error is among the cell's outputs
    except (CellTimeoutError, DeadKernelError) as error:
        stopped = f"{source}: {type(error).__name__} after {_last_executed(notebook)}: {error}"
    notebook.metadata = nbformat.from_dict(METADATA)  # the kernel has added its version
    problems = [*output_problems(notebook, source), *([stopped] if stopped else [])]
    if problems:
        raise NotebookError("\n".join(problems))


def _last_executed(notebook: NotebookNode) -> str:
    done = [i for i, cell in enumerate(notebook.cells, 1) if cell.get("execution_count")]
    return f"cell {done[-1]}" if done else "no cell"


def output_problems(notebook: NotebookNode, source: Path) -> Iterator[str]:
    """What a reader should not find in the outputs, one line for each."""
    for number, cell in enumerate(notebook.cells, 1):
        first_line = cell.source.strip().partition("\n")[0]
        where = f"{source}: cell {number} ({first_line})"
        outputs = cell.get("outputs", [])
        for output in outputs:
            if output.output_type == "error":
                yield f"{where} raises {output.ename}: {output.evalue}"
            elif output.output_type == "stream" and output.name == "stderr":
                yield f"{where} writes to stderr: {output.text.strip()[:500]}"
        size = len(json.dumps(outputs))
        if size > MAX_OUTPUT_BYTES:
            yield f"{where} has {size:,} bytes of output, more than {MAX_OUTPUT_BYTES:,}"


def build(source: Path) -> Path:
    """Write the notebook beside its source; a lecture is executed first.

    Raises:
        NotebookError: the lecture does not run cleanly; the notebook is left as it was.
    """
    notebook = read(source)
    if is_lecture(source):
        execute(notebook, source)
    target = source.with_suffix(".ipynb")
    target.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")
    return target


def difference(source: Path) -> str | None:
    """How the notebook differs from its source (None: it does not), whatever a lecture's outputs are."""
    target = source.with_suffix(".ipynb")
    if not target.is_file():
        return f"{target}: not built"
    built = nbformat.read(target, as_version=4)
    expected = read(source)
    if is_lecture(source):
        code = [cell for cell in built.cells if cell.cell_type == "code" and cell.source.strip()]
        if any(cell.execution_count is None for cell in code):
            return f"{target}: not executed"
        problems = list(output_problems(built, target))
        if problems:
            return problems[0]
        for cell in code:
            cell.outputs, cell.execution_count = [], None
    if built.metadata != expected.metadata:
        return f"{target}: its metadata differ from what is built from {source.name}"
    for number, (old, new) in enumerate(zip(built.cells, expected.cells, strict=False), 1):
        if old != new:
            return f"{target}: cell {number} differs from {source.name}"
    if len(built.cells) != len(expected.cells):
        return f"{target}: has {len(built.cells)} cells, {source.name} has {len(expected.cells)}"
    return None


def stale(root: Path, patterns: Sequence[str] = ALL) -> list[str]:
    """One line for each notebook of the course that is not what its source says, or has no source."""
    texts = sources(root, patterns)
    built = {path for pattern in patterns for path in root.glob(f"{pattern}.ipynb")}
    orphans = sorted(built - {source.with_suffix(".ipynb") for source in texts})
    return [line for line in map(difference, texts) if line] + [
        f"{orphan}: there is no {orphan.stem}.md beside it" for orphan in orphans
    ]


def main(argv: list[str] | None = None) -> int:
    """Build the named notebooks, or all; with --check, say which differ from their source and return 1."""
    parser = argparse.ArgumentParser(prog="python -m autograder.grading.notebooks", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a notebook differs")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a .md or .ipynb file; default: all")
    arguments = parser.parse_args(argv)
    named = [path.with_suffix(".md") for path in arguments.paths]
    for source in named:
        if not source.is_file():
            parser.error(f"{source} does not exist")

    if arguments.check:
        lines = [line for line in map(difference, named) if line] if named else stale(course_root())
        for line in lines:
            print(line)
        return 1 if lines else 0

    failed = False
    for source in named or sources(course_root()):
        try:
            print(build(source), flush=True)
        except NotebookError as error:
            failed = True
            print(error, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
