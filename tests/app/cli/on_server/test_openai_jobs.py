"""`anneal import openai-jobs`: jobs as OpenAI's API returns them become run files that the service accepts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.app.uploads import lines
from tests.conftest import Anneal, json_of
from tests.factories import make_model
from tests.openai.test_files import CHAT, PAIR
from tests.openai.test_reinforcement import CHECK, ROW, SIMILAR, multi, reinforcement
from tests.server import ApiServer

SUPERVISED = {
    "id": "ftjob-abc", "object": "fine_tuning.job", "model": "gpt-4o-mini-2024-07-18", "status": "succeeded",
    "created_at": 1721764867, "training_file": "file-train", "validation_file": "file-valid", "seed": 7,
    "user_provided_suffix": "docs", "fine_tuned_model": "ft:gpt-4o-mini:acme:docs:7p4lURel",
    "hyperparameters": {"n_epochs": 4, "batch_size": 6, "learning_rate_multiplier": 1.8},
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto"}}},
}  # fmt: skip
DPO = {
    "id": "ftjob-pairs", "model": "gpt-4o", "status": "failed", "training_file": "file-pairs", "validation_file": None,
    "hyperparameters": None, "seed": None,
    "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": "auto", "batch_size": "auto"}}},
}  # fmt: skip
REINFORCEMENT: dict[str, Any] = {
    "id": "ftjob-rl", "training_file": "file-questions", "validation_file": "file-questions",
    "method": reinforcement(multi("answer + 0.5 * style", answer=CHECK, style=SIMILAR), batch_size=3, eval_interval=5),
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"object": "list", "data": [SUPERVISED, DPO], "has_more": False}),
        json.dumps([SUPERVISED, DPO], indent=2),
        "\n".join(json.dumps(job) for job in (SUPERVISED, DPO)) + "\n",
    ],
    ids=["list", "array", "lines"],
)
def test_jobs_become_run_files_that_the_service_accepts(
    emptied_api: ApiServer, anneal: Anneal, tmp_path: Path, text: str
) -> None:
    make_model(emptied_api.settings, "tiny")
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, row in (("train", CHAT), ("valid", CHAT), ("pairs", PAIR)):
        (exported / f"file-{name}.jsonl").write_bytes(lines(row))
    Path("jobs.json").write_text(text)
    done = anneal("import", "openai-jobs", "jobs.json", "--model", "tiny", "--files", "exported", "--to", "runs")
    assert done.stdout.split() == ["runs/ftjob-abc.yaml", "runs/ftjob-pairs.yaml"]
    supervised = json_of(anneal("runs", "create", "-f", "runs/ftjob-abc.yaml", "--json"))
    config = {
        "base_model": "tiny", "method": "qlora", "epochs": 4, "batch_size": 3, "gradient_accumulation_steps": 2,
        "learning_rate": 3.6e-4, "seed": 7, "eval_steps": "epoch", "loss_on": "assistant",
    }  # fmt: skip
    assert {name: supervised["config"][name] for name in config} == config
    assert (supervised["name"], supervised["tags"]) == ("docs", ["openai"])
    dpo = json_of(anneal("runs", "create", "-f", "runs/ftjob-pairs.yaml", "--json"))
    assert (dpo["config"]["method"], dpo["config"]["dpo"]["beta"], dpo["config"]["epochs"]) == ("dpo", 0.2, 3)


def test_job_with_graders_becomes_a_run_file_with_their_rewards(emptied_api: ApiServer, anneal: Anneal) -> None:
    make_model(emptied_api.settings, "tiny")
    Path("file-questions.jsonl").write_bytes(lines(ROW, ROW))
    Path("jobs.json").write_text(json.dumps([REINFORCEMENT]))
    anneal("import", "openai-jobs", "jobs.json", "--model", "tiny")
    config = json_of(anneal("runs", "create", "-f", "ftjob-rl.yaml", "--json"))["config"]
    assert (config["method"], config["batch_size"], config["gradient_accumulation_steps"]) == ("rlhf", 4, 6)
    assert (config["eval_steps"], config["rlhf"]["num_generations"]) == (5, 8)
    rewards = config["rlhf"]["rewards"]
    assert [(reward["type"], reward["weight"]) for reward in rewards] == [
        ("string_check", 1),
        ("text_similarity", 0.5),
    ]


@pytest.mark.parametrize(
    ("of_job", "of_method", "epochs"), [("auto", 4, 4), (4, "auto", 4), (2, 4, 4), (None, 4, 4), ("auto", "auto", None)]
)
def test_numbers_win_over_auto_and_those_of_the_method_over_the_deprecated_ones(
    anneal: Anneal, of_job: Any, of_method: Any, epochs: int | None
) -> None:
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": of_method}}}
    Path("jobs.json").write_text(
        json.dumps([{**SUPERVISED, "hyperparameters": {"n_epochs": of_job}, "method": method}])
    )
    anneal("import", "openai-jobs", "jobs.json", "-m", "tiny")
    assert yaml.safe_load(Path("ftjob-abc.yaml").read_text())["config"].get("epochs") == epochs


@pytest.mark.parametrize(("row", "loss_on"), [(None, "assistant"), (CHAT, "assistant"), ({"prompt": "a"}, None)])
def test_supervised_job_learns_the_assistant_unless_its_file_has_no_chats(
    anneal: Anneal, row: dict[str, Any] | None, loss_on: str | None
) -> None:
    if row is not None:
        Path("file-train.jsonl").write_bytes(lines(row))
    Path("jobs.json").write_text(json.dumps([SUPERVISED]))
    anneal("import", "openai-jobs", "jobs.json", "-m", "tiny")
    assert yaml.safe_load(Path("ftjob-abc.yaml").read_text())["config"].get("loss_on") == loss_on


def test_run_file_that_exists_is_kept_and_a_job_whose_grader_has_no_counterpart_is_left_out(anneal: Anneal) -> None:
    graders: list[Any] = [{"type": "python", "name": "p", "source": ""}, {**SIMILAR, "evaluation_metric": "best"}, None]
    jobs = [{**REINFORCEMENT, "id": f"ftjob-{at}", "method": reinforcement(one)} for at, one in enumerate(graders)]
    Path("jobs.json").write_text(json.dumps([SUPERVISED, *jobs]))
    Path("ftjob-abc.yaml").write_text("mine")
    done = anneal("import", "openai-jobs", "jobs.json", "-m", "tiny")
    assert done.stdout == "" and Path("ftjob-abc.yaml").read_text() == "mine"
    notes = " ".join(done.stderr.split())
    assert "ftjob-abc.yaml exists, and is kept." in notes
    assert "ftjob-0 is left out: `grader.type` is `python`, whose program is not run here" in notes
    assert "ftjob-1 is left out: its grader cannot be read (text_similarity.evaluation_metric: " in notes
    assert "ftjob-2 is left out: its grader cannot be read" in notes


def test_id_does_not_lead_out_of_the_folder(anneal: Anneal) -> None:
    Path("jobs.json").write_text(json.dumps([{**DPO, "id": "../../escape"}]))
    assert anneal("import", "openai-jobs", "jobs.json", "-m", "tiny", "--to", "runs").stdout == "runs/escape.yaml\n"
    body: Any = yaml.safe_load(Path("runs/escape.yaml").read_text())
    assert body["config"]["base_model"] == "tiny"


def test_id_adds_no_line_to_the_run_file(anneal: Anneal) -> None:
    Path("jobs.json").write_text(json.dumps([{**DPO, "id": "ftjob-x\nname: y"}]))
    assert anneal("import", "openai-jobs", "jobs.json", "-m", "tiny").stdout == "ftjob-x_name__y.yaml\n"
    assert yaml.safe_load(Path("ftjob-x_name__y.yaml").read_text())["config"]["base_model"] == "tiny"


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '[{"id": 1}]', '[{"id": "x"}]', '{"data": []}', "null"])
def test_what_is_no_job_is_refused(anneal: Anneal, text: str) -> None:
    Path("jobs.json").write_text(text)
    refused = anneal("import", "openai-jobs", "jobs.json", "-m", "tiny", code=1)
    assert "jobs.json" in refused.stderr and refused.stderr.rstrip().endswith(".")
    assert "cannot be read" in anneal("import", "openai-jobs", "none.json", "-m", "tiny", code=1).stderr


def test_page_of_a_longer_list_is_imported_with_a_note(anneal: Anneal) -> None:
    page = {"object": "list", "data": [SUPERVISED], "has_more": True}
    Path("jobs.json").write_text("\ufeff" + json.dumps(page), encoding="utf-8")
    done = anneal("import", "openai-jobs", "jobs.json", "-m", "tiny")
    assert done.stdout == "ftjob-abc.yaml\n" and "there are more" in done.stderr
