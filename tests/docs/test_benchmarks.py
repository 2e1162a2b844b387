"""Published figures say what they belong to."""

import re

from tests.nodes import ROOT

_SECTION = re.compile(
    r"^## (C\d+)[^\n]*\n\n\*Commit ([0-9a-f]{8}, \d{4}-\d\d-\d\d), \d+ cores, [^\n]+\.\*\n", re.MULTILINE
)
METHODS = (ROOT / "benchmarks/README.md").read_text()
RESULTS = (ROOT / "docs/internals/benchmarks.md").read_text()


def test_every_section_of_figures_names_commit_date_and_machine() -> None:
    assert len(_SECTION.findall(METHODS)) >= 14
    assert [name for name, _ in _SECTION.findall(METHODS)] == re.findall(r"^## (C\d+)", METHODS, re.MULTILINE)


def test_the_page_of_results_names_the_commit_and_date_of_each_benchmark() -> None:
    rows = re.findall(r"^\| (C\d+) \|.*\| ([0-9a-f]{8}, [\d-]+) \|$", RESULTS, re.MULTILINE)
    assert rows == _SECTION.findall(METHODS)
