"""The suites are tested: the reference earns everything, the skeleton nothing, each mutant loses at its problem, each
alternative passes."""

import importlib
from pathlib import Path

import pytest

from autograder.grading import catalog, session
from autograder.grading.report import Report
from tests.mutants import Alternative, Mutant, Rewrite

ROOT = Path(__file__).parents[1]
STUCK = "deadlock", "timeout"
# What runs on ranks is to need no suite there: each rank would import it, and pytest with it.
ALONE = '\n\nimport sys\n\nassert "pytest" not in sys.modules, "the rank has imported a suite"\n'


def collection(module: str) -> object:
    """The mutants and alternatives of a module: tests/mutants/m01_collectives.py for 01_collectives."""
    return importlib.import_module(f"tests.mutants.m{module}")


def text_of(module: str, folder: str = "solutions") -> str:
    """A module's file: the reference, or from assignments/ the skeleton."""
    return (ROOT / folder / module / catalog.find_module(module).files[0]).read_text()


def grade(folder: Path, module: str, text: str, problem: str | None = None, **settings: object) -> Report:
    """Grade a file with this text; other modules' files are the references."""
    for other in catalog.modules():
        target = folder / other.name / other.files[0]
        target.parent.mkdir(parents=True)
        target.write_text(text if other.name == module else text_of(other.name))
    return session.grade_modules((catalog.find_module(module),), folder, select=problem, **settings)


def parameters(kind: str) -> list:
    return [
        pytest.param(module.name, item, id=f"{module.name}-{item.problem}-{item.name}".replace(" ", "_"))
        for module in catalog.modules()
        for item in getattr(collection(module.name), kind)
    ]


MODULES = [module.name for module in catalog.modules()]


@pytest.mark.parametrize("module", MODULES)
def test_points_add_up_to_100(module):
    assert sum(p.points for p in catalog.find_module(module).problems) == 100


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_reference_earns_everything(module, tmp_path):
    hidden = catalog.hidden_checks((catalog.find_module(module),))
    report = grade(tmp_path, module, text_of(module) + ALONE, extra=hidden)
    assert [c.message for m in report.modules for p in m.problems for c in p.checks if c.finding] == []
    assert report.score == report.max_score == 100


def test_hidden_checks_of_all_modules_go_together():
    every = catalog.modules()
    hidden = catalog.hidden_checks(every)
    assert len(hidden) == len(every)
    report = session.grade_modules(every, ROOT / "solutions", select="cosine_lr", extra=hidden)
    assert report.perfect
    assert "lr_hidden" in [c.name for m in report.modules for p in m.problems for c in p.checks]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_skeleton_earns_nothing(module, tmp_path):
    report = grade(tmp_path, module, text_of(module, "assignments"))
    assert report.score == 0
    assert {c.message for m in report.modules for p in m.problems for c in p.checks} == {"not implemented yet"}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "mutant"), parameters("MUTANTS"))
def test_mutant_loses_at_its_problem(module: str, mutant: Mutant | Rewrite, tmp_path):
    select = mutant.check or mutant.problem
    report = grade(tmp_path, module, mutant.apply(text_of(module)), select, stop_at_first=True)
    failed = [c for m in report.modules for p in m.problems for c in p.checks if c.finding]
    assert failed, f"the mutant passes {select}"
    assert failed[0].status in ("failed", "forbidden", "crashed", *STUCK), failed[0].message
    assert failed[0].finding.fact("your line") or failed[0].finding.fact("expected") or failed[0].status in STUCK


@pytest.mark.slow
@pytest.mark.parametrize(("module", "alternative"), parameters("ALTERNATIVES"))
def test_alternative_passes(module: str, alternative: Alternative, tmp_path):
    report = grade(tmp_path, module, alternative.apply(text_of(module)), alternative.problem)
    assert [c.message for m in report.modules for p in m.problems for c in p.checks if c.finding] == []
