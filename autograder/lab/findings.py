"""What a run or a check found wrong, in the words that a student reads."""

from dataclasses import dataclass, field

# Every status that a check can end with. `infrastructure` is never a zero: it is reported apart and can be rerun.
STATUSES = (
    "passed",
    "failed",
    "not_implemented",
    "timeout",
    "deadlock",
    "crashed",
    "forbidden",
    "infrastructure",
)


@dataclass(eq=False)
class Finding(Exception):
    """One thing that went wrong.

    Args:
        status: one of `STATUSES`, never "passed".
        title: one line: what should have been true, or what happened.
        facts: (label, text) pairs in the order they are shown: expected, found, your line, perhaps, ...
            A text may have several lines.
    """

    status: str
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.status in STATUSES[1:], self.status

    def __str__(self) -> str:
        return "\n".join([f"{self.status}  {self.title}", *fact_lines(self.facts)])

    def fact(self, label: str) -> str | None:
        """The text under a label, or None."""
        return dict(self.facts).get(label)


def fact_lines(facts: list[tuple[str, str]], indent: str = "  ") -> list[str]:
    """Facts as aligned lines: the label once, continuation lines under the text."""
    width = max((len(label) for label, _ in facts), default=0)
    lines = []
    for label, text in facts:
        for number, line in enumerate(str(text).splitlines() or [""]):
            lines.append(f"{indent}{label if number == 0 else '':<{width}}  {line}".rstrip())
    return lines
