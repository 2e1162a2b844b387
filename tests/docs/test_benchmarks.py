"""Published figures say what they belong to."""

import re

from tests.nodes import ROOT

_ORIGIN = re.compile(r"\n\n\*Commit [0-9a-f]{8}, \d{4}-\d\d-\d\d, \d+ cores, [^\n]+\.\*\n")


def test_every_section_of_figures_names_commit_date_and_machine() -> None:
    _, *sections = re.split(r"^## (?=C\d)", (ROOT / "docs/internals/benchmarks.md").read_text(), flags=re.MULTILINE)
    assert len(sections) >= 14
    assert [section.partition("\n")[0] for section in sections if not _ORIGIN.match(section, section.index("\n"))] == []
