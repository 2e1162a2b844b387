"""`anneal runs show`: what a run needs, as its owner asked for it."""

from pathlib import Path

from app.cli.runs.commands import _needs
from app.contracts.schemas.runs.reads import RunRead
from tests.app.conftest import Anneal, json_of


def test_a_run_on_several_devices_shows_them_and_what_else_it_needs(anneal: Anneal, run_file: Path) -> None:
    made = json_of(anneal("runs", "create", "-f", str(run_file), "--json"))
    resources = {"devices": 4, "hosts": 2, "labels": ["site-b"], "sharding": "full", "sequence_parallel": 2}
    needs = {"labels": ["site-b"], "sharded": True, "sequence_parallel": 2}
    parts = "4 devices on 2 hosts", "labels site-b", "model divided among the devices", "2 of them share each sequence"
    run = RunRead.model_validate({**made, "resources": resources, "requirements": needs})
    assert _needs(run) == "; ".join(parts)
    assert _needs(RunRead.model_validate({**made, "requirements": {"kind": "cpu"}})) == "cpu"
