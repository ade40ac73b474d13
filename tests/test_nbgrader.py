"""nbgrader itself releases, grades, gives feedback and exports; what is known to go wrong there does not."""

import csv
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_output
from nbgrader.api import Gradebook
from nbgrader.utils import determine_grade

from autograder.grading import notebooks
from autograder.grading.release import MARKER
from tests import tiny_course

pytestmark = pytest.mark.xdist_group("nbgrader")  # one worker runs them all: they share one graded course

WORKSHEETS = notebooks.sources(tiny_course.ROOT, [notebooks.WORKSHEETS])
GRADED_CALL = re.compile(r'autograder\.grade\("(\w+)", "(\w+)", points=(\d+)\)')


def fill_in(skeleton: str, solution: str, regions: int) -> str:
    """The skeleton with the first few solution regions filled in."""
    lines, done, inside = [], 0, False
    for line in solution.splitlines(keepends=True):
        marker = MARKER.match(line)
        if marker and marker[2] == "BEGIN":
            inside, done = True, done + 1
            if done > regions:
                lines.append(f'{marker[1]}raise NotImplementedError("not implemented yet")\n')
        elif marker:
            inside = False
        elif not inside or done <= regions:
            lines.append(line)
    if regions == 0:
        assert "".join(lines) == skeleton
    return "".join(lines)


def submit(root: Path, student: str, module: str, **changed: str) -> Path:
    """Hand in the released files of a module, with the text of some of them (by stem) replaced."""
    folder = root / "submitted" / student / module
    shutil.copytree(root / "assignments" / module, folder)
    for stem, text in changed.items():
        (folder / f"{stem}.py").write_text(text)
    return folder


def edit_cell(worksheet: Path, grade_id: str, source: str) -> None:
    """Replace a graded cell in a submitted worksheet."""
    notebook = nbformat.read(worksheet, as_version=4)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == grade_id:
            cell.source = source
    nbformat.write(notebook, worksheet)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course whose assignment was released, handed in, changed, released again, graded and exported."""
    root = tmp_path_factory.mktemp("course")
    module = tiny_course.MODULE
    folder = tiny_course.make(root)
    source = folder / "tiny.md"
    source.write_text(tiny_course.WORKSHEET.replace('score("square", points=20)', 'score("square", points=20) / 2'))
    notebooks.build(source)
    tiny_course.nbgrader(root, f"generate_assignment {module}")

    skeleton = (root / "assignments" / module / "tiny.py").read_text()
    submit(root, "skeleton", module)
    submit(root, "half", module, tiny=fill_in(skeleton, tiny_course.TINY, 1))
    reference = submit(root, "reference", module, tiny=tiny_course.TINY)
    edit_cell(reference / "tiny.ipynb", "why", "Because 2 + 2 = 2 · 2.")
    forger = submit(root, "forger", module, given="def score(problem, points):\n    return float(points)\n")
    edit_cell(forger / "tiny.ipynb", "double", "10.0")

    source.write_text(tiny_course.WORKSHEET)
    notebooks.build(source)
    tiny_course.nbgrader(
        root,
        f"generate_assignment --force {module}",
        f"autograde {module}",
        f"generate_feedback {module}",
        "export",
    )
    return root


@pytest.mark.slow
def test_the_reference_earns_all_the_half_done_half_and_the_skeleton_nothing(graded: Path) -> None:
    """The student's file is graded, not the source's; and a warning on stderr costs nothing."""
    assert tiny_course.scores(graded, tiny_course.MODULE) == {
        "skeleton": {"double": 0, "square": 0, "why": 0},
        "half": {"double": 10, "square": 0, "why": 0},
        "reference": {"double": 10, "square": 20, "why": 0},
        "forger": {"double": 0, "square": 0, "why": 0},
    }


@pytest.mark.slow
def test_the_graded_cells_are_the_newest_of_the_source(graded: Path) -> None:
    for student in ("skeleton", "reference", "forger"):
        notebook = nbformat.read(graded / "autograded" / student / tiny_course.MODULE / "tiny.ipynb", as_version=4)
        sources = [cell.source for cell in notebook.cells if "nbgrader" in cell.metadata]
        assert sources[:2] == ['given.score("double", points=10)', 'given.score("square", points=20)']


@pytest.mark.slow
def test_only_written_answers_wait_for_a_reader(graded: Path) -> None:
    with Gradebook(f"sqlite:///{graded}/gradebook.db") as gradebook:
        waiting = {
            (submission.student.id, grade.name)
            for submission in gradebook.assignment_submissions(tiny_course.MODULE)
            for notebook in submission.notebooks
            for grade in notebook.grades
            if grade.needs_manual_grade
        }
    assert waiting == {("reference", "why")}


@pytest.mark.slow
def test_hidden_checks_and_sources_do_not_reach_the_folder_of_a_submission(graded: Path) -> None:
    folder = graded / "autograded" / "half" / tiny_course.MODULE
    assert sorted(path.name for path in folder.glob("*.*")) == ["given.py", "tiny.ipynb", "tiny.py"]
    assert (folder / "given.py").read_text() == tiny_course.GIVEN


@pytest.mark.slow
def test_feedback_shows_each_score(graded: Path) -> None:
    page = (graded / "feedback" / "half" / tiny_course.MODULE / "tiny.html").read_text()
    text = re.sub(r"<[^>]*>|\s+", " ", page)
    assert re.search(r"tiny +\(Score: 10\.0 / 35\.0\)", text)
    assert re.search(r"Score: 10\.0 */ *10\.0", text)
    assert re.search(r"Score: 0\.0 */ *20\.0", text)
    assert "not implemented yet" in text


@pytest.mark.slow
def test_export_lists_the_scores(graded: Path) -> None:
    with (graded / "grades.csv").open() as file:
        rows = {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}
    assert rows == {"skeleton": (0, 35), "half": (10, 35), "reference": (30, 35), "forger": (0, 35)}


@pytest.mark.parametrize(
    ("result", "points"),
    [("7.5", 7.5), ("0.0", 0), ("3", 3)]  # only these are read as numbers; the others earn all 10 points:
    + [(text, 10) for text in ("True", "None", "nan", "np.float64(2.0)", "(2.0, 10.0)", "tensor(2.)", "-1.0")],
)
def test_nbgrader_reads_only_a_plain_number_as_a_score(result: str, points: float) -> None:
    """Why `autograder.grade` returns a plain float, and why it is the last expression of a graded cell."""
    output = new_output("execute_result", data={"text/plain": result})
    assert _points(new_output("stream", text="shown first"), output) == points


def test_nbgrader_gives_all_points_for_no_result_none_for_an_error_and_refuses_too_many() -> None:
    assert _points(new_output("stream", text="10.0")) == 10
    assert _points(new_output("error", ename="ValueError")) == 0
    result = new_output("execute_result", data={"text/plain": "5.0"})
    assert _points(new_output("stream", name="stderr", text="warning"), result) == 0
    with pytest.raises(ValueError, match="greater than maximum"):
        _points(new_output("execute_result", data={"text/plain": "11.0"}))


def _points(*outputs: nbformat.NotebookNode) -> float:
    metadata = {"nbgrader": {"grade": True, "solution": False, "points": 10}}
    return determine_grade(new_code_cell("", metadata=metadata, outputs=list(outputs)))[0]


# The course's own worksheets and solutions


@pytest.mark.parametrize("source", WORKSHEETS, ids=lambda path: path.stem)
def test_each_graded_cell_is_one_call_whose_points_are_the_cells(source: Path) -> None:
    total = 0
    for cell in notebooks.read(source).cells:
        info = cell.metadata.get("nbgrader", {})
        if info.get("grade") and cell.cell_type == "code":
            call = GRADED_CALL.fullmatch(cell.source)
            assert call, f"not a bare call of autograder.grade: {cell.source}"
            assert call.groups() == (source.parent.name, info["grade_id"], str(info["points"]))
            assert info["locked"]
            assert not info["solution"]
            total += info["points"]
    assert total == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "students"),
    [
        ("01_collectives", ["reference", "half", "skeleton"]),
        ("02_ddp", ["reference"]),  # it builds on an earlier module, which is not handed in with it
    ],
)
def test_nbgrader_grades_the_module(module: str, students: list[str], tmp_path: Path) -> None:
    """Reference, half-done file and skeleton of a real module, through nbgrader and the real suite."""
    root = tmp_path
    source = tiny_course.ROOT / "solutions" / module
    shutil.copy(tiny_course.ROOT / "nbgrader_config.py", root)
    shutil.copytree(source, root / "solutions" / module)
    tiny_course.nbgrader(root, f"generate_assignment {module}")

    stem = module.partition("_")[2]
    solution = (source / f"{stem}.py").read_text()
    skeleton = (root / "assignments" / module / f"{stem}.py").read_text()
    points = _graded_cells(root / "assignments" / module / f"{stem}.ipynb")
    functions = _functions_of_regions(solution)
    problems = [name for name in functions if name in points]
    done = functions.index(problems[len(problems) // 2]) if problems else len(functions) // 2
    regions = {"reference": len(functions), "half": done, "skeleton": 0}  # how many of them are filled in
    for student in students:
        submit(root, student, module, **{stem: fill_in(skeleton, solution, regions[student])})
    tiny_course.nbgrader(root, f"autograde {module}")

    scores = {student: _select(cells, points) for student, cells in tiny_course.scores(root, module).items()}
    assert scores["reference"] == points
    if "half" not in students:
        return
    assert scores["skeleton"] == dict.fromkeys(points, 0)
    half = scores["half"]
    assert 0 < sum(half.values()) < sum(points.values())
    # A problem may have several functions, and then no function has its name.
    for name in problems:
        assert half[name] == (points[name] if name in functions[:done] else 0), name


def _graded_cells(worksheet: Path) -> dict[str, float]:
    """The points of each problem in a worksheet; the written questions are left out."""
    cells = nbformat.read(worksheet, as_version=4).cells
    infos = [cell.metadata.get("nbgrader", {}) for cell in cells if cell.cell_type == "code"]
    return {info["grade_id"]: info["points"] for info in infos if info.get("grade")}


def _functions_of_regions(solution: str) -> list[str]:
    """For each solution region, in order, the top-level function or class that it is in."""
    names, name = [], ""
    for line in solution.splitlines():
        definition = re.match(r"(?:async )?(?:def|class) (\w+)", line)
        name = definition[1] if definition else name
        marker = MARKER.match(line)
        if marker and marker[2] == "BEGIN":
            names.append(name)
    return names


def _select(cells: dict[str, float], names: dict[str, float]) -> dict[str, float]:
    return {name: cells[name] for name in names}
