"""Tests named in docs/operations/security.md exist, and every attacker has at least one."""

import re

import pytest

from tests.nodes import ROOT, is_test

TEXT = (ROOT / "docs" / "operations" / "security.md").read_text()
ATTACKERS = dict(re.findall(r"^### (.*?)$(.*?)(?=^##)", TEXT, flags=re.MULTILINE | re.DOTALL))


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/\S+)`", TEXT)
    assert len(named) > 50
    assert [test for test in named if "::" in test and not is_test(test)] == []


def test_every_attacker_is_there() -> None:
    assert list(ATTACKERS) == [
        "A stranger on the network",
        "A web page in a user's browser",
        "The holder of a key",
        "A malicious data set or model",
        "The training process",
        "Another unix user of the machine",
        "A stolen dump of the database",
        "A stolen disk",
    ]


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_each_line_of_defence_is_followed_by_a_test_and_what_is_left_is_told(attacker: str) -> None:
    defences = re.findall(r"^- (.*?)(?=^- |^Left|^\s*$)", ATTACKERS[attacker], flags=re.MULTILINE | re.DOTALL)
    assert defences
    assert [defence for defence in defences if "`tests/" not in defence] == []
    assert "\nLeft: " in ATTACKERS[attacker]
