"""Notebooks are what their text says; lectures run cleanly from top to bottom."""

from pathlib import Path

import nbformat
import pytest

from autograder.grading import notebooks
from tests import tiny_course

LECTURES = notebooks.sources(tiny_course.ROOT, [notebooks.LECTURES])
LECTURE = """# A lecture

```python
from pathlib import Path

print(Path.cwd().name)
```

```python
x = 1
```

```python
x = 1
```
"""


@pytest.fixture
def lecture(tmp_path: Path) -> Path:
    """The source of a lecture."""
    (tmp_path / "lectures").mkdir()
    path = tmp_path / "lectures" / "01_tiny.md"
    path.write_text(LECTURE)
    return path


def test_the_courses_notebooks_are_built_from_their_sources() -> None:
    assert notebooks.stale(tiny_course.ROOT) == []


@pytest.mark.slow
@pytest.mark.parametrize("source", LECTURES, ids=lambda path: path.stem)
def test_a_lecture_runs_without_errors_or_warnings(source: Path) -> None:
    notebooks.execute(notebooks.read(source), source)


def test_a_worksheet_is_built_byte_for_byte_the_same_and_keeps_its_metadata(tmp_path: Path) -> None:
    folder = tiny_course.make(tmp_path)
    built = folder / "tiny.ipynb"
    before = built.read_bytes()
    assert notebooks.main([str(built)]) == 0
    assert built.read_bytes() == before

    cells = nbformat.read(built, as_version=4).cells
    assert [cell.metadata["nbgrader"]["grade_id"] for cell in cells if "nbgrader" in cell.metadata] == [
        "double",
        "square",
        "why",
    ]
    assert cells[2].metadata["tags"] == ["try-it"]
    assert cells[-1].cell_type == "markdown"
    assert cells[-1].source.endswith("\n\n\nThe model answer has two paragraphs.\n### END SOLUTION")
    assert all(not cell.get("outputs") for cell in cells)


def test_a_lecture_is_executed_in_its_folder_and_holds_nothing_of_the_machine(lecture: Path) -> None:
    assert notebooks.main([str(lecture)]) == 0
    notebook = nbformat.read(lecture.with_suffix(".ipynb"), as_version=4)
    assert notebook.cells[1].outputs[0].text == "lectures\n"
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2, 3]
    assert notebook.metadata == notebooks.METADATA
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert len({cell.id for cell in notebook.cells}) == 4, "cells with the same text have different ids"
    assert notebooks.main(["--check", str(lecture)]) == 0


def test_check_names_what_differs_and_ignores_outputs(lecture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = lecture.with_suffix(".ipynb")
    assert "not built" in notebooks.difference(lecture)
    nbformat.write(notebooks.read(lecture), built)
    assert "not executed" in notebooks.difference(lecture)
    notebooks.build(lecture)

    notebook = nbformat.read(built, as_version=4)
    notebook.cells[1].outputs[0].text = "elsewhere\n"
    nbformat.write(notebook, built)
    assert notebooks.difference(lecture) is None

    lecture.write_text(LECTURE.replace("x = 1", "x = 2", 1))
    assert "cell 3 differs" in notebooks.difference(lecture)
    lecture.write_text(LECTURE + "\nMore.\n")
    assert notebooks.main(["--check", str(lecture)]) == 1
    assert "has 4 cells, 01_tiny.md has 5" in capsys.readouterr().out
    lecture.write_text(LECTURE.replace("```python\nx", '```python tags=["wide"]\nx', 1))
    assert "cell 3 differs" in notebooks.difference(lecture)

    lecture.unlink()
    assert "there is no 01_tiny.md" in notebooks.stale(lecture.parents[1])[0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('no')", "cell 1 (raise ValueError('no')) raises ValueError: no"),
        ("import sys\nprint('oh', file=sys.stderr)", "cell 1 (import sys) writes to stderr: oh"),
        ("print(('x' * 99 + '\\n') * 5000)", "more than"),
        ("import os\nos._exit(1)", "DeadKernelError"),
    ],
    ids=["error", "stderr", "large", "dead"],
)
def test_a_lecture_that_does_not_run_cleanly_is_not_built(
    lecture: Path, code: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lecture.write_text(f"```python\n{code}\n```\n")
    assert notebooks.main([str(lecture)]) == 1
    assert message in capsys.readouterr().err
    assert not lecture.with_suffix(".ipynb").exists()
