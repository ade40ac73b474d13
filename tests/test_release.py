"""What students are given holds no solutions, is complete, and is what solutions/ gives."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autograder.grading import notebooks
from autograder.grading.release import (
    ReleaseError,
    file_problems,
    generate,
    marker_problems,
    release,
    student_files,
)
from tests import tiny_course


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module's source folder in a new course, which is the working directory's course."""
    folder = tiny_course.make(tmp_path / "course")
    monkeypatch.chdir(folder)
    return folder


def test_nothing_of_the_solutions_reaches_the_real_assignments() -> None:
    for path in (tiny_course.ROOT / "assignments").rglob("*"):
        assert path.name != "hidden_checks.py"
        if path.is_file():
            assert path.suffix != ".md", path
            assert not list(marker_problems(path.read_text("utf-8", "replace"), reserved=False)), path
            assert b"SOLUTION" not in path.read_bytes(), path


def test_the_real_assignments_are_what_the_solutions_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_course.ROOT)
    assert release(check=True) == 0


def test_a_release_holds_the_skeleton_and_the_worksheet_only(folder: Path) -> None:
    assert release() == 0
    released = folder.parents[1] / "assignments" / tiny_course.MODULE
    assert sorted(path.name for path in released.rglob("*")) == ["given.py", "tiny.ipynb", "tiny.py"]
    assert (released / "given.py").read_bytes() == (folder / "given.py").read_bytes()
    assert (
        (released / "tiny.py").read_text()
        == '''"""Two problems."""


def double(x: float) -> float:
    """Twice x."""
    raise NotImplementedError("not implemented yet")


def square(x: float) -> float:
    """x times x."""
    if x == 0:
        raise NotImplementedError("not implemented yet")
    raise NotImplementedError("not implemented yet")
'''
    )
    worksheet = (released / "tiny.ipynb").read_text()
    assert "YOUR ANSWER HERE" in worksheet
    assert "Why is the square" in worksheet
    assert "model answer" not in worksheet
    assert not any(b"SECRET" in path.read_bytes() for path in released.rglob("*"))
    assert not (folder.parents[1] / "gradebook.db").exists()


def test_check_finds_what_differs_and_leaves_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    released = folder.parents[1] / "assignments" / tiny_course.MODULE
    assert release(check=True) == 1
    assert not released.exists()
    assert release() == 0
    assert release(check=True) == 0, "the same sources give the same bytes"
    (released / "__pycache__").mkdir()
    (released / "__pycache__" / "tiny.pyc").touch()
    assert release(check=True) == 0, "what running an assignment leaves is not a difference"

    (released / "tiny.py").write_text("edited by hand\n")
    (released / "given.py").unlink()
    (released / "hidden_checks.py").touch()
    old = released.with_name("00_old")
    old.mkdir()
    (old / "old.py").touch()
    capsys.readouterr()
    assert release(check=True) == 1
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "assignments/00_old/old.py: not from solutions/",
        "assignments/01_tiny/given.py: missing",
        "assignments/01_tiny/hidden_checks.py: not from solutions/",
        "assignments/01_tiny/tiny.py: differs",
    ]
    assert (released / "tiny.py").read_text() == "edited by hand\n"

    assert release() == 0
    assert release(check=True) == 0
    assert not old.exists()


REFUSED = {
    "unbalanced": (
        "    ### END SOLUTION\n\n\ndef square",
        "\n\ndef square",
        "tiny.py:10: the solution region of line 6 leaves its block",
    ),
    "not ended": (
        "    return x**2\n    ### END SOLUTION\n",
        "    return x**2\n",
        "tiny.py:17: a solution begins that does not end",
    ),
    "not begun": (
        "    ### BEGIN SOLUTION\n    return x + x",
        "    return x + x",
        "tiny.py:7: a solution ends",
    ),
    "nested": (
        "    return x + x",
        "    ### BEGIN SOLUTION\n    return x + x",
        "tiny.py:7: a solution begins inside",
    ),
    "one hash": (
        "    ### BEGIN SOLUTION\n    return x + x\n    ### END",
        "    # BEGIN SOLUTION\n    # END",
        "tiny.py:6",
    ),
    "lower case": ("### BEGIN SOLUTION\n    return x +", "### begin solution\n    return x +", "tiny.py:6"),
    "misspelt": (tiny_course.TINY, tiny_course.TINY.replace("SOLUTION", "SOLTUION"), "tiny.py:6"),
    "one word": (tiny_course.TINY, tiny_course.TINY.replace("# BEGIN SOL", "# BEGIN_SOL"), "tiny.py:6"),
    "after code": ("    return x + x", "    return x + x  ### BEGIN SOLUTION", "tiny.py:7"),
    "at top level": (
        "def double",
        "### BEGIN SOLUTION\ny = 1\n### END SOLUTION\n\n\ndef double",
        "tiny.py:4: a solution region outside a function",
    ),
    "in a class": (
        "def double",
        "class A:\n    ### BEGIN SOLUTION\n    y = 1\n    ### END SOLUTION\n\n\ndef double",
        "tiny.py:5: a solution region outside a function",
    ),
    "over two functions": (
        "    ### END SOLUTION\n\n\ndef square(x: float) -> float:\n",
        "\n\ndef square(x: float) -> float:\n    ### END SOLUTION\n",
        "tiny.py:10: the solution region of line 6 leaves its block",
    ),
    "a syntax error": ("return x**2", "return x**", "tiny.py:18: syntax error"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_file_whose_solution_could_leak_is_refused_and_nothing_is_released(
    folder: Path, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, message = REFUSED[fault]
    source = folder / "tiny.py"
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new, 1))
    assert release() == 1
    assert message in capsys.readouterr().err
    # nbgrader's own command refuses as well: the preprocessor does not rely on the check before.
    with pytest.raises(ReleaseError, match=r"tiny\.py:"):
        generate(folder.parents[1], tiny_course.MODULE, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.*"))


@pytest.mark.slow
def test_the_nbgrader_command_fails_and_removes_what_it_had_released(folder: Path) -> None:
    root = folder.parents[1]
    assert release() == 0
    (folder / "tiny.py").write_text(tiny_course.TINY.replace("### END", "# END"))
    command = [sys.executable, "-m", "nbgrader", "generate_assignment", "--force", tiny_course.MODULE]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert "01_tiny/tiny.py:8: '# END SOLUTION' is neither" in done.stderr
    assert not (root / "assignments" / tiny_course.MODULE).exists()


def test_a_copy_of_a_solution_under_another_name_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "tiny.py", folder / "tiny.py.old")
    with pytest.raises(ReleaseError, match=r"tiny\.py\.old: holds a solution marker"):
        generate(folder.parents[1], tiny_course.MODULE, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.*"))


def test_a_marker_in_a_cell_that_is_not_a_solution_is_refused(folder: Path, tmp_path: Path) -> None:
    worksheet = folder / "tiny.md"
    for marker in ("### BEGIN SOLUTION\n\nx\n\n### END SOLUTION", "## BEGIN SOLUTION"):
        worksheet.write_text(tiny_course.WORKSHEET.replace("Twice, and", f"{marker}\n\nTwice, and"))
        notebooks.build(worksheet)
        with pytest.raises(ReleaseError, match="olution"):
            generate(folder.parents[1], tiny_course.MODULE, tmp_path / "out")
        assert not list((tmp_path / "out").rglob("*.*"))


def test_a_module_without_regions_or_worksheet_or_with_an_old_worksheet_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tiny.py").write_text("def double(x):\n    return x + x\n")
    assert release() == 1
    assert "no .py file has a solution region" in capsys.readouterr().err

    (folder / "tiny.py").write_text(tiny_course.TINY)
    (folder / "tiny.md").write_text(tiny_course.WORKSHEET + "\nMore.\n")
    assert release() == 1
    assert "tiny.ipynb: has 6 cells, tiny.md has 7" in capsys.readouterr().err

    (folder / "tiny.md").unlink()
    (folder / "tiny.ipynb").unlink()
    assert release() == 1
    assert "has no worksheet" in capsys.readouterr().err


def test_files_that_students_edit_are_those_with_regions(folder: Path) -> None:
    assert student_files(folder) == ["tiny.py"]


def test_prose_about_solutions_is_no_marker() -> None:
    text = '"""The solution begins where the end of a solution is."""\n# The solution: begin with rank 0.\n'
    assert list(file_problems(text)) == []
