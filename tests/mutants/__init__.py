"""Per module: wrong answers that the suite must fail, and unusual right ones that it must pass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """The reference with one place changed, so that `problem` must fail.

    Args:
        problem: the problem that must lose points.
        name: the mistake, in a few words.
        old: text that occurs exactly once in the reference's file.
        new: what stands in its place.
    """

    problem: str
    name: str
    old: str
    new: str

    def apply(self, reference: str) -> str:
        """The text of the wrong file; ValueError where `old` does not occur exactly once."""
        count = reference.count(self.old)
        if count != 1:
            raise ValueError(f"{self.problem}, {self.name!r}: its old text occurs {count} times")
        return reference.replace(self.old, self.new)


@dataclass(frozen=True)
class Rewrite:
    """The reference with a function written another way, and wrong, so that `problem` must fail.

    Args:
        problem: the problem that must lose points.
        name: the mistake, in a few words.
        source: the function's whole text; it may use whatever the reference's file defines.
    """

    problem: str
    name: str
    source: str

    def apply(self, reference: str) -> str:
        """The text of the wrong file: a later definition replaces an earlier one."""
        return f"{reference}\n\n{self.source}"


@dataclass(frozen=True)
class Alternative:
    """The reference with one function done differently, so that `problem` must still pass in full.

    Args:
        problem: the problem that is graded.
        name: what is different, in a few words.
        function: name of the function that is replaced.
        source: its whole text; it may use whatever the reference's file defines.
    """

    problem: str
    name: str
    function: str
    source: str

    def apply(self, reference: str) -> str:
        """The text of the file: a later definition replaces an earlier one."""
        return f"{reference}\n\n{self.source}"
