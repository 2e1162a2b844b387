"""Links in the README, the guides and the documentation site lead to existing files and headings."""

import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.nodes import ROOT

DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
]
EXAMPLES = {"worker/training/methods/kto.py"}
"""Files that a recipe in CONTRIBUTING.md creates."""
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|(`+)[^\n]*?\1", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as Python-Markdown makes it."""
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@cache
def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:app|worker|tests|migrations|anneal|docs)/[\w/.-]+\.\w+)`", page.read_text()))
    assert sorted(name for name in named - EXAMPLES if not (ROOT / name).is_file()) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](missing.md) [d](page.md#one) [e](page.md#three) `[f](x.md)`\n")
    assert broken_links(page) == ["#two", "missing.md", "page.md#three"]


def test_navigation_has_every_page() -> None:
    # The icons of the theme need tags that only MkDocs knows.
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_index_links_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall((DOCS / "index.md").read_text())}
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"} <= linked


def test_pages_of_the_site_link_to_no_file_outside_of_it() -> None:
    links = [(page, link) for page in DOCS.rglob("*.md") for link in _LINK.findall(_CODE.sub("", page.read_text()))]
    outside = [
        link
        for page, link in links
        if ":" not in link and not (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS)
    ]
    assert outside == []
