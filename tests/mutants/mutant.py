"""Mutants: a small bug, the promise that it breaks, and the test that must fail because of it."""

from dataclasses import dataclass
from pathlib import Path


class MutantError(Exception):
    """Mutant that cannot be tested, because its text or its test does not exist."""


@dataclass(frozen=True)
class Change:
    """Replacement of `old`, which occurs exactly once in `file`, by `new`."""

    file: str
    old: str
    new: str

    def problem(self, root: Path) -> str | None:
        """Return the reason why the change cannot be applied below `root`, or None."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        count = path.read_text().count(self.old)
        if count != 1:
            return (
                f"{self.file} contains the text {count} times instead of once: {self.old.strip().splitlines()[0]!r} …"
            )
        return None

    def make(self, root: Path) -> None:
        """Write the changed file.

        Raises:
            MutantError: the text does not occur exactly once.
        """
        problem = self.problem(root)
        if problem:
            raise MutantError(problem)
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


@dataclass(frozen=True)
class Mutant:
    """Deliberate bug. Most need one change; some need a second one where two safeguards overlap."""

    name: str
    promises: tuple[int, ...]
    """Numbers of the promises in docs/internals/promises.md."""
    about: str
    """One sentence that describes the bug."""
    changes: tuple[Change, ...]
    test: str
    """Node id of the test that fails with the mutant and passes without it."""
