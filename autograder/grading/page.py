"""The report as one HTML page: nothing is loaded from elsewhere, so that it opens offline and can be mailed."""

import re
from functools import cache
from itertools import count
from pathlib import Path

import jinja2
from markupsafe import Markup

from autograder.grading.report import CheckResult, ProblemResult, Report
from autograder.lab import palette
from autograder.lab.ledger import Event

MAX_EVENTS = 300  # in one picture; more cannot be read, and would make the page heavy
STATUS = {  # colour of a status, always shown beside its word; anything else: that of an error
    "passed": palette.KIND["compute"],
    "not_implemented": palette.KIND["collective"],
    "infrastructure": palette.RANK[3],
}


def render(report: Report) -> str:
    """The page of a report.

    Args:
        report: of one grading run.

    Returns:
        The text of an HTML file. Whatever comes from the student's file or its output is escaped.
    """
    numbers = count(1)
    return _template().render(
        report=report,
        about=report.to_json(),
        palette=palette,
        color=lambda status: STATUS.get(status, palette.KIND["error"]),
        rank_color=rank_color,
        share=share,
        repeats=repeats,
        picture=lambda check: picture(check, f"picture{next(numbers)}-"),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.undefined = jinja2.StrictUndefined
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def share(problem: ProblemResult, check: CheckResult) -> float:
    """The points that one check of a problem is worth."""
    return round(problem.problem.points * check.weight / sum(c.weight for c in problem.checks), 2)


def repeats(problem: ProblemResult, check: CheckResult) -> str | None:
    """The name of an earlier check of the problem that failed in the very same words, as when a function is missing."""
    for other in problem.checks:
        if other is check or check.finding is None:
            return None
        if other.finding is not None and str(other.finding) == str(check.finding):
            return other.name
    return None


def rank_color(label: str) -> str | None:
    """The colour of a fact that is one rank's ("rank 2"), the same as in the picture."""
    match = re.fullmatch(r"rank (\d{1,6})", label)
    return palette.RANK[int(match[1]) % len(palette.RANK)] if match else None


def picture(check: CheckResult, prefix: str) -> tuple[Markup, str] | None:
    """The timeline of the case that a check failed in, and its caption; None where nothing was sent.

    Args:
        check: whose last run is drawn.
        prefix: of all ids in the picture: several pictures stand on one page.
    """
    if check.run is None or check.status in ("passed", "not_implemented", "forbidden"):
        return None
    from autograder.lab import timeline

    case = dict(check.facts).get("case")
    events = of_case(check.run.events, case)
    drawn = sorted(events, key=lambda e: e.start)[:MAX_EVENTS]
    if not any(e.op not in ("case", "span") for e in drawn):
        return None
    drawn.sort(key=lambda e: (e.rank, e.index))
    caption = "What the ranks did" + (" in this case" if len(events) < len(check.run.events) else "")
    if len(drawn) < len(events):
        caption += f", the first {MAX_EVENTS} of {len(events)} operations"
    return Markup(own_ids(timeline.svg(drawn), prefix)), caption


def of_case(events: list[Event], case: str | None) -> list[Event]:
    """The events after the marks of this case and before the next marks; all events where it has no mark."""
    chosen, inside, rank = [], False, None
    for e in events:
        inside, rank = inside and e.rank == rank, e.rank
        if e.op == "case":
            inside = e.api == case
        elif inside:
            chosen.append(e)
    return chosen or [e for e in events if e.op != "case"]


def own_ids(svg: str, prefix: str) -> str:
    """The SVG with a prefix on every id and on what refers to it, and without metadata."""
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)

    def in_tag(match: re.Match) -> str:
        tag = re.sub(r'(\s)id="', rf'\1id="{prefix}', match[0])
        tag = re.sub(r'href="#', f'href="#{prefix}', tag)
        return re.sub(r"url\(#", f"url(#{prefix}", tag)

    return re.sub(r"<\w[^>]*>", in_tag, svg)
