"""The report in a terminal: one line per problem, and under it the first check that failed."""

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autograder.grading.report import CheckResult, ModuleResult, ProblemResult, Report

STYLE = {"passed": "green", "not_implemented": "yellow", "infrastructure": "magenta"}  # anything else: red


def show(report: Report, console: Console) -> None:
    """Print the whole report."""
    for module in report.modules:
        console.print(_module(module))
    console.print(_total(report))


def _module(module: ModuleResult) -> Group:
    lines = []
    if module.fault is not None:
        for problem in module.problems:
            lines.append(_headline(problem))
        lines.append(Text(f"  {module.fault.status}  {module.fault.title}", "red"))
        lines.append(_facts(module.fault.facts))
        return Group(*lines)
    for problem in module.problems:
        lines.append(_headline(problem))
        failed = [c for c in problem.checks if c.status != "passed"]
        if failed:
            lines.append(_failure(failed[0]))
        if len(failed) > 1 and failed[0].status != "not_implemented":
            others = ", ".join(c.name for c in failed[1:])
            lines.append(Text(f"    and {len(failed) - 1} more: {others}", "dim"))
    return Group(*lines)


def _headline(problem: ProblemResult) -> Table:
    row = Table.grid(expand=True)
    row.add_column()
    row.add_column(justify="right")
    points = f"{_number(problem.points)} / {_number(problem.problem.points)} points"
    if 0 < len(problem.checks) < problem.of[0]:
        points = f"{len(problem.checks)} of {problem.of[0]} checks run   {points}"
    row.add_row(Text(problem.problem.name, "bold"), Text(points, STYLE.get(problem.status, "red")))
    return row


def _failure(check: CheckResult) -> Group:
    style = STYLE.get(check.status, "red")
    if check.status == "not_implemented":
        return Group(Text("  not implemented yet", style))
    head = Text.assemble((f"  {check.status:<8}  ", style), check.headline)
    return Group(head, _facts(check.facts))


def _facts(facts: list[tuple[str, str]]) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, text in facts:
        table.add_row(label, Text(text))
    return Padding(table, (0, 0, 0, 4), expand=False)


def _total(report: Report) -> Text:
    style = "bold green" if report.perfect else "bold"
    text = Text(f"{_number(report.score)} / {_number(report.max_score)} points", style)
    text.append(f"   {report.duration_s:.1f} s   --seed {report.seed}", "dim")
    if report.faults:
        text.append(f"\n{len(report.faults)} checks could not be run and are not scored; run them again", "magenta")
    return text


def _number(points: float) -> str:
    return f"{points:g}"
