"""A run from a run file with names and local files, from options alone, and from the file of `runs init`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from anneal.contracts.training_config.fields import TrainingConfig
from app.cli.runs import run_file
from tests.conftest import Anneal, json_of
from tests.server import ApiServer

_FAKE = ("--set", "backend=fake")


def write_rows(path: Path, *texts: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_run(path: Path, **fields: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"backend": "fake", "config": {"base_model": "any", "method": "sft"}, **fields}))
    return path


def test_local_file_of_a_run_is_uploaded_once_by_its_content(anneal: Anneal, tmp_path: Path) -> None:
    write_rows(tmp_path / "runs" / "rows.jsonl", "one of two", "two of two")
    file = write_run(tmp_path / "runs" / "run.yaml", dataset_id="rows.jsonl")  # relative to the file, not the shell
    first = anneal("runs", "create", "-f", str(file), "--json")
    assert "rows.jsonl is uploaded" in first.stderr
    again = anneal("runs", "create", "-f", str(file), "--json")
    assert json_of(again)["dataset_id"] == json_of(first)["dataset_id"] and "was uploaded before" in again.stderr
    (tmp_path / "runs" / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    moved = anneal("runs", "create", "-m", "any", "-d", "moved.jsonl", "--method", "sft", *_FAKE, "--json")
    assert json_of(moved)["dataset_id"] == json_of(first)["dataset_id"]
    write_rows(tmp_path / "moved.jsonl", "another row")
    other = anneal("runs", "create", "-m", "any", "-d", "moved.jsonl", "--method", "sft", *_FAKE, "--json")
    assert json_of(other)["dataset_id"] != json_of(first)["dataset_id"]


def test_local_file_of_a_run_is_no_dataset_for_which_other_columns_were_named(anneal: Anneal, tmp_path: Path) -> None:
    row = {"prompt": "what is asked", "completion": "what alone another user trains on"}
    (tmp_path / "notes.jsonl").write_text(json.dumps(row) + "\n")
    mapped = anneal("datasets", "upload", str(tmp_path / "notes.jsonl"), "--column", "text=completion").stdout.strip()
    options = ("-m", "any", "-d", "notes.jsonl", "--method", "sft", *_FAKE, "--json")
    created = anneal("runs", "create", *options)
    dataset = json_of(created)["dataset_id"]
    assert dataset != mapped and "is uploaded" in created.stderr
    assert json_of(anneal("datasets", "show", dataset, "--json"))["preview"] == [row]
    requested = json_of(anneal("datasets", "show", mapped, "--json"))["source"]
    assert (requested["requested_format"], requested["requested_columns"]) == (None, {"text": "completion"})
    assert json_of(anneal("runs", "create", *options))["dataset_id"] == dataset


def test_run_file_names_datasets_and_experiments_as_commands_do(anneal: Anneal, tmp_path: Path) -> None:
    chats, heldout = (
        anneal("datasets", "upload", str(write_rows(tmp_path / f"{name}.txt", name)), "--name", name,
               "--file-format", "jsonl").stdout.strip()
        for name in ("named rows", "named heldout")
    )  # fmt: skip
    experiment = anneal("experiments", "create", "named trial").stdout.split()[0]
    file = write_run(
        tmp_path / "run.yaml", dataset_id="named rows", eval_dataset_id=heldout[:20], experiment_id="named trial",
        extra_eval_datasets={"more": "named heldout"},
    )  # fmt: skip
    run = json_of(anneal("runs", "create", "-f", str(file), "--set", "config.eval_steps=5", "--json"))
    assert (run["dataset_id"], run["eval_dataset_id"], run["experiment_id"]) == (chats, heldout, experiment)
    assert run["extra_eval_datasets"] == {"more": heldout}
    check = anneal(
        "runs", "validate", "-f", str(file), "--set", "dataset_id=last", "--set", "config.eval_steps=5", "--json"
    )
    assert json_of(check)["valid"]
    for field, value, says in (
        ("dataset_id", "no such name", "There is no dataset 'no such name'"),
        ("dataset_id", "missing.jsonl", "There is no file"),
        ("eval_dataset_id", "./rows", "There is no file"),
        ("eval_dataset_id", "~no_such_user/rows.jsonl", "There is no file"),
        ("experiment_id", "no such trial", "There is no experiment 'no such trial'"),
    ):
        refused = anneal(
            "runs", "create", "-f", str(write_run(tmp_path / "bad.yaml", **{"dataset_id": chats, field: value})), code=1
        )
        assert says in refused.stderr, refused.stderr


def test_options_alone_make_a_run_and_override_a_file(anneal: Anneal, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "of the options")
    options = ("-m", "any", "-d", "rows.jsonl", "--lora", "--name", "first")
    created = json_of(anneal("runs", "create", *options, *_FAKE, "--json"))
    assert (created["name"], created["config"]["base_model"], created["config"]["method"]) == ("first", "any", "lora")
    file = write_run(tmp_path / "run.yaml", dataset_id="rows.jsonl")
    changed = json_of(anneal("runs", "create", "-f", str(file), "-m", "other", "--full", "--json"))
    assert (changed["config"]["base_model"], changed["config"]["method"]) == ("other", "full")
    assert changed["dataset_id"] == created["dataset_id"]
    several = anneal("runs", "create", "-m", "any", "-d", "rows.jsonl", "--lora", "--full", code=2)
    assert "full and lora are several methods" in " ".join(several.stderr.split())
    for arguments in ((), ("-m", "any"), ("-d", "rows.jsonl")):
        assert "`anneal runs init`" in anneal("runs", "create", *arguments, code=1).stderr
    unknown = anneal("runs", "create", "-m", "any", "-d", "rows.jsonl", "--method", "sfft", *_FAKE, code=1)
    assert "'sft'" in unknown.stderr


@pytest.mark.parametrize("method", ["qlora", "full", "rlhf"])
def test_written_run_file_is_valid_as_it_is_and_with_each_of_its_lines_set(
    anneal: Anneal, shared_api: ApiServer, tmp_path: Path, method: str
) -> None:
    write_rows(tmp_path / "chats.jsonl", "of the file")
    assert "run.yaml" in anneal("runs", "init", "-m", "any", "--method", method).stderr
    text = (tmp_path / "run.yaml").read_text()
    assert run_file.read_body(tmp_path / "run.yaml")["config"] == {"base_model": "any", "method": method}
    every_line = tmp_path / "every_line.yaml"
    every_line.write_text(re.sub(r"^(\s*)# (?=\s*\w+:)", r"\1", text, flags=re.MULTILINE))
    complete = run_file.read_body(every_line)
    assert complete["config"].keys() > {"epochs", "learning_rate", "save_steps"}
    assert complete["resources"] == {"devices": 1}
    defaults = TrainingConfig.model_validate({"base_model": "any", "method": method}).model_dump(mode="json")
    assert complete["config"] == {name: defaults[name] for name in complete["config"]}
    before = (tmp_path / "run.yaml").read_bytes()
    assert "is not replaced" in anneal("runs", "init", code=1).stderr
    assert (tmp_path / "run.yaml").read_bytes() == before
    if method == "full":
        assert json_of(anneal("runs", "validate", "-f", "run.yaml", *_FAKE, "--json"))["valid"]


def test_run_file_for_an_unknown_method_is_refused(anneal: Anneal) -> None:
    assert "name one of" in anneal("runs", "init", "--method", "sfft", code=1).stderr
