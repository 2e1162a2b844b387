"""What a mutant is: a small bug, the promise that it breaks, and the test that must fail because of it."""

from dataclasses import dataclass
from pathlib import Path


class MutantError(Exception):
    """A mutant that cannot be tried: its text is not there, or its test is not."""


@dataclass(frozen=True)
class Change:
    """`old`, which occurs exactly once in `file`, becomes `new`."""

    file: str
    old: str
    new: str

    def problem(self, root: Path) -> str | None:
        """Why it cannot be made below `root`."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist any more"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"{self.file} holds its text {count} times instead of once: {self.old.strip().splitlines()[0]!r} …"
        return None

    def make(self, root: Path) -> None:
        """Write the changed file.

        Raises:
            MutantError: the text is not there exactly once.
        """
        problem = self.problem(root)
        if problem:
            raise MutantError(problem)
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


@dataclass(frozen=True)
class Mutant:
    """A deliberate bug. Most need one change; some need a second one, where two safeguards do the same."""

    name: str
    promises: tuple[int, ...]
    """Of docs/reliability.md."""
    about: str
    """What the bug is, in one sentence."""
    changes: tuple[Change, ...]
    test: str
    """The node id of the test that fails with it, and passes without."""
