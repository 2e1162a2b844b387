"""Commands of `anneal experiments`."""

import re
from pathlib import Path

from tests.conftest import ROWS, Anneal, json_of
from tests.factories import Trainer, make_experiment, mark_run


def test_an_experiment_is_made_and_shown(anneal: Anneal, run_file: Path) -> None:
    experiment_id = anneal("experiments", "create", "ranks", "--tag", "x", "--description", "why").stdout.strip()
    anneal("runs", "create", "-f", str(run_file), "--set", f"experiment_id={experiment_id}")
    assert "1 pending" in anneal("experiments", "show", experiment_id).stdout
    assert json_of(anneal("experiments", "show", experiment_id, "--json"))["runs"]["pending"] == 1
    assert json_of(anneal("experiments", "list", "--json"))["data"][0]["name"] == "ranks"
    assert experiment_id in anneal("experiments", "list").stdout


def test_the_quota_of_an_experiment_is_shown_changed_and_removed(anneal: Anneal) -> None:
    id = anneal("experiments", "create", "ranks", "--max-devices", "4").stdout.strip()
    assert re.search(r"^max devices +4$", anneal("experiments", "show", id).stdout, re.MULTILINE)
    assert json_of(anneal("experiments", "edit", id, "--name", "x", "--json"))["max_devices"] == 4
    assert json_of(anneal("experiments", "edit", id, "--max-devices", "0", "--json"))["max_devices"] == 0
    both = anneal("experiments", "edit", id, "--max-devices", "1", "--no-max-devices", code=2).stderr
    assert "--no-max-devices contradicts --max-devices" in " ".join(re.sub(r"[│╭╮╰╯─]", " ", both).split())
    assert json_of(anneal("experiments", "edit", id, "--no-max-devices", "--json"))["max_devices"] is None
    assert "max devices" not in anneal("experiments", "show", id).stdout


def test_an_experiment_goes_with_its_runs_only_on_request(anneal: Anneal, trainer: Trainer) -> None:
    trainer.checkpoint(40)
    trainer.complete()
    alone = make_experiment(trainer.engine)
    mark_run(trainer.engine, trainer.run_id, experiment_id=alone)
    held = "1 run (1 completed), 1 checkpoint and 1 model"
    refused = anneal("experiments", "delete", alone, code=1).stderr
    assert held in refused and "--with-runs" in refused and "cascade" not in refused
    delete = ["experiments", "delete", alone, "--with-runs"]
    for answer in ("", "n\n"):
        question = anneal(*delete, input=answer, code=1).stderr
        assert held in question and "Nothing is deleted" in question and "--yes" in question
    assert anneal("runs", "show", trainer.run_id).exit_code == 0
    assert f"{alone} is deleted." in anneal(*delete, input="y\n").stderr
    assert "There is no run" in anneal("runs", "show", trainer.run_id, code=1).stderr
    other = anneal("experiments", "create", "scripted").stdout.strip()
    assert json_of(anneal("experiments", "delete", other, "--with-runs", "--yes", "--json"))["deleted"] is True


def test_what_is_deleted_is_reported(anneal: Anneal) -> None:
    Path("rows.jsonl").write_text(ROWS)
    for noun, creation in (("datasets", ["upload", "rows.jsonl"]), ("experiments", ["create", "short"])):
        id = anneal(noun, *creation).stdout.strip()
        assert json_of(anneal(noun, "delete", id, "--json")) == {"id": id, "deleted": True}
        assert anneal(noun, "delete", id, code=1).stderr.startswith("anneal: ")
