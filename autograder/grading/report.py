"""The one report model: what the terminal, the JSON file, the HTML page, nbgrader and Gradescope are made from."""

from dataclasses import dataclass, field
from importlib.metadata import version

from autograder.lab.findings import Finding, fact_lines
from autograder.lab.ranks import Run
from autograder.suites.kit import Module, Problem


@dataclass
class CheckResult:
    """One check's outcome. `finding` is None where it passed; `run` is the last run on ranks, for pictures."""

    name: str
    title: str
    weight: float
    finding: Finding | None
    duration_s: float
    world_sizes: list[int] = field(default_factory=list)
    hints: list[tuple[str, str]] = field(default_factory=list)  # again, read
    run: Run | None = None

    @property
    def status(self) -> str:
        return self.finding.status if self.finding else "passed"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """All that is said about a failed check, in the order in which it is shown."""
        if self.finding is None:
            return []
        facts = list(self.finding.facts)
        if self.finding.title:
            facts.insert(1 if facts and facts[0][0] == "case" else 0, ("found", self.finding.title))
        return [*facts, *self.hints]

    @property
    def headline(self) -> str:
        """The check's title with the world size it failed at."""
        if self.finding is not None and self.run is not None and self.run.world_size > 1:
            return f"{self.title}  (world size {self.run.world_size})"
        return self.title

    @property
    def message(self) -> str:
        """The failed check as plain text; "" where it passed."""
        if self.finding is None:
            return ""
        if self.status == "not_implemented":
            return "not implemented yet"
        return "\n".join([f"{self.status}  {self.headline}", *fact_lines(self.facts)])


@dataclass
class ProblemResult:
    """One problem: its checks and the points they earned."""

    problem: Problem
    checks: list[CheckResult]
    of: tuple[int, float] = (0, 0.0)  # how many checks the problem has, and their weights in all

    @property
    def points(self) -> float:
        """Points earned: each check carries its weight's share of the problem's points."""
        total = self.of[1] or sum(c.weight for c in self.checks)
        if not total:
            return 0.0
        earned = sum(c.weight for c in self.checks if c.status == "passed")
        return round(self.problem.points * earned / total, 2)

    @property
    def status(self) -> str:
        """The status of the first check that did not pass; not_implemented only if nothing passed."""
        return next((c.status for c in self.checks if c.status != "passed"), "passed")


@dataclass
class ModuleResult:
    """One module; `fault` is what kept all of it from being checked: a missing file, a syntax error."""

    module: Module
    problems: list[ProblemResult]
    fault: Finding | None = None

    @property
    def points(self) -> float:
        return round(sum(p.points for p in self.problems), 2)

    @property
    def max_points(self) -> float:
        return sum(p.problem.points for p in self.problems)


@dataclass
class Report:
    """What one grading run found.

    Args:
        modules: in order, only what was selected.
        seed: repeats the random inputs.
        submission: the folder that was graded, as given.
    """

    modules: list[ModuleResult]
    seed: int
    backend: str
    submission: str
    duration_s: float

    @property
    def score(self) -> float:
        return round(sum(m.points for m in self.modules), 2)

    @property
    def max_score(self) -> float:
        return sum(m.max_points for m in self.modules)

    @property
    def perfect(self) -> bool:
        return all(c.status == "passed" for m in self.modules for p in m.problems for c in p.checks)

    @property
    def faults(self) -> list[CheckResult]:
        """Checks that the grader could not run; they are rerun, not scored."""
        return [c for m in self.modules for p in m.problems for c in p.checks if c.status == "infrastructure"]

    def to_json(self) -> dict:
        """The contract of `--json`."""
        sizes = {n for m in self.modules for p in m.problems for c in p.checks for n in c.world_sizes}
        return {
            "course_version": version("autograder"),
            "torch": version("torch"),
            "backend": self.backend,
            "world_sizes": sorted(sizes),
            "seed": self.seed,
            "score": self.score,
            "max_score": self.max_score,
            "duration_s": round(self.duration_s, 3),
            "modules": [
                {
                    "module": m.module.name,
                    "score": m.points,
                    "max_score": m.max_points,
                    "problems": [
                        {
                            "name": p.problem.name,
                            "title": p.problem.title,
                            "points": p.points,
                            "max_points": p.problem.points,
                            "status": p.status,
                            "checks": [
                                {
                                    "name": c.name,
                                    "status": c.status,
                                    "message": c.message,
                                    "duration_s": round(c.duration_s, 3),
                                }
                                for c in p.checks
                            ],
                        }
                        for p in m.problems
                    ],
                }
                for m in self.modules
            ],
        }
