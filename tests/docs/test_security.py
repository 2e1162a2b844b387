"""Tests named in docs/operations/security.md exist, and every attacker has at least one."""

import re

import pytest

from tests.nodes import ROOT, is_test

TEXT = (ROOT / "docs" / "operations" / "security.md").read_text()
ATTACKERS = dict(re.findall(r"^### (.*?)$(.*?)(?=^##)", TEXT, flags=re.MULTILINE | re.DOTALL))


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/\S+)`", TEXT)
    assert len(named) > 50
    assert [test for test in named if "::" in test and not is_test(test)] == []


def test_every_attacker_is_listed() -> None:
    assert list(ATTACKERS) == [
        "An untrusted client on the network",
        "A web page in a user's browser",
        "The holder of a key",
        "A malicious dataset or model",
        "The training process",
        "A writer to Redis",
        "The network between hosts",
        "A user of the Ray cluster",
        "A user of the external engine",
        "Another Unix user of the machine",
        "A stolen dump of the database",
        "A stolen disk",
    ]


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_each_defense_has_a_test_and_remaining_risks_are_listed(attacker: str) -> None:
    defenses = re.findall(r"^- (.*?)(?=^- |^Left|^\s*$)", ATTACKERS[attacker], flags=re.MULTILINE | re.DOTALL)
    assert defenses
    assert [defense for defense in defenses if "`tests/" not in defense] == []
    assert "\nLeft: " in ATTACKERS[attacker]
