"""Which modules there are: one per suite, in the course's order."""

import difflib
import importlib
from functools import cache
from pathlib import Path

from autograder import suites
from autograder.suites.kit import Module

SUITES = Path(suites.__file__).parent
SOLUTIONS = Path(__file__).parents[2] / "solutions"  # in a checkout of the course


class UnknownName(ValueError):
    """A module or problem that does not exist; the message suggests the nearest."""


def suite_file(module: Module) -> Path:
    """The pytest file with the module's public checks."""
    return SUITES / f"test_{module.name}.py"


@cache
def modules() -> tuple[Module, ...]:
    """All modules, in order."""
    names = sorted(path.stem for path in SUITES.glob("test_[0-9][0-9]_*.py"))
    return tuple(importlib.import_module(f"autograder.suites.{name}").MODULE for name in names)


def find_module(name: str) -> Module:
    """The module of this name; its number or the rest of the name will do ("01", "collectives").

    Raises:
        UnknownName: there is none.
    """
    name = Path(name).name  # a shell completes folder names with their path and a slash
    for module in modules():
        if name in (module.name, module.name[:2], module.name[3:]):
            return module
    raise UnknownName(_unknown("module", name, [m.name for m in modules()]))


def find_problem(name: str, among: tuple[Module, ...], checks: list[str]) -> None:
    """Refuse a name that is neither a problem nor a check of these modules.

    Raises:
        UnknownName: it is neither.
    """
    problems = [p.name for m in among for p in m.problems]
    if name not in problems + checks:
        raise UnknownName(_unknown("problem", name, problems, also=checks))


def _unknown(kind: str, name: str, known: list[str], also: list[str] = ()) -> str:
    near = difflib.get_close_matches(name, [*known, *also], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"there is no {kind} {name!r}.{hint} There are: {', '.join(known)}."


def hidden_checks(chosen: tuple[Module, ...]) -> tuple[Path, ...]:
    """The instructor's further checks of these modules: solutions/<module>/hidden_checks.py, where they are there."""
    return tuple(f for m in chosen if (f := SOLUTIONS / m.name / "hidden_checks.py").exists())
