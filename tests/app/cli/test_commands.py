"""The command line over HTTP: from a shell, without reading the docs, and from scripts by JSON and exit codes."""

import gzip
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update
from typer.testing import CliRunner

from app.api.errors import RETRY_SECONDS
from app.cli.console import listing
from app.cli.error_text import in_commands
from app.cli.main import cli
from app.cli.runs.postmortem import typed
from app.cli.runs.watch import WatchState
from app.client import client
from app.client.transport import SyncTransport
from app.contracts.events import DeviceEvent, EvalEvent, MetricEvent, PendingEvent, SampleEvent, StatusEvent
from app.contracts.schemas.postmortem import CorrectedRequest
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.tables.runs import Run
from tests.app import hub_server
from tests.app.client.test_client import EMPTY, Failing
from tests.app.conftest import Anneal, json_of
from tests.app.hub_server import Hub
from tests.factories import Trainer, make_experiment, make_model, mark_run
from tests.http_server import serving
from tests.nodes import ROOT
from tests.server import ApiServer
from tests.waiting import eventually

ROWS = "".join(f'{{"text": "row {n}"}}\n' for n in range(5))
Started = tuple[subprocess.Popen[bytes], int]


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def trainer(anneal: Anneal, engine: Engine, run_file: Path) -> Trainer:
    """A run that trains, the only one that waited."""
    for other in json.loads(anneal("runs", "list", "--status", "pending", "--json").stdout)["data"]:
        anneal("runs", "stop", other["id"])
    run_id = anneal("runs", "create", "-f", str(run_file)).stdout.strip()
    return Trainer(engine, run_id).begin(total=100)


class TestSentences:
    def test_without_a_service_the_next_step_is_reported(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(cli, ["runs", "list"], env={"ANNEAL_HOME": str(tmp_path)})
        assert result.exit_code == 1
        (sentence,) = result.stderr.splitlines()
        assert "`anneal up`" in sentence and "ANNEAL_URL" in sentence and "ANNEAL_API_KEY" in sentence

    def test_the_environment_names_another_service(self, shared_api: ApiServer, tmp_path: Path) -> None:
        there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": shared_api.url, "ANNEAL_API_KEY": shared_api.key}
        assert CliRunner().invoke(cli, ["workers", "list"], env=there).exit_code == 0
        wrong = CliRunner().invoke(cli, ["workers", "list"], env={**there, "ANNEAL_API_KEY": "anneal_wrong"})
        assert wrong.exit_code == 1 and "anneal keys create" in wrong.stderr

    def test_a_service_that_asks_to_come_back_is_asked_once_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses: list[float] = []

        async def pause(_: SyncTransport, seconds: float) -> None:
            pauses.append(seconds)

        monkeypatch.setattr(SyncTransport, "pause", pause)
        Failing.answers = [(503, {"Retry-After": str(RETRY_SECONDS)}, b"{}"), EMPTY]
        with serving(Failing) as url:
            there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": url, "ANNEAL_API_KEY": "key"}
            assert CliRunner().invoke(cli, ["workers", "list"], env=there).exit_code == 0 and pauses == [RETRY_SECONDS]

    def test_a_service_that_does_not_answer_is_reported_before_the_first_retry(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("app.cli.console._PATIENCE", 1.0)
        there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": "http://127.0.0.1:1", "ANNEAL_API_KEY": "key"}
        refused = CliRunner().invoke(cli, ["runs", "list"], env=there)
        first, *last = refused.stderr.splitlines()
        assert refused.exit_code == 1 and "is unreachable" in first and "Trying again for 1 s" in first
        assert len(last) == 1 and last[0].startswith("anneal: The service at http://127.0.0.1:1 is unreachable")
        (error,) = CliRunner().invoke(cli, ["runs", "list", "--json"], env=there).stderr.splitlines()
        assert json.loads(error)["code"] == "unreachable"

    def test_with_json_an_error_has_its_code_and_its_fields(self, anneal: Anneal, run_file: Path) -> None:
        refused = anneal("runs", "create", "-f", str(run_file), "--set", "config.lora_r=-1", "--json", code=1)
        error = json.loads(refused.stderr)
        assert refused.stdout == "" and error["code"] == "out_of_range" and "lora_r" in error["detail"]
        assert [(item["field"], item["code"]) for item in error["errors"]] == [("config.lora_r", "out_of_range")]
        missing = json.loads(anneal("runs", "show", new_id("run"), "--json", code=1).stderr)
        assert missing["code"] == "run_not_found" and missing["errors"] == []
        assert json.loads(anneal("runs", "show", "none", "--json", code=1).stderr)["code"] == "run_not_found"
        file = anneal("runs", "create", "-f", "none.yaml", "--json", code=1).stderr
        assert json.loads(file)["code"] == "file_error"

    def test_status_shows_what_runs_and_open_makes_a_link_that_works_once(
        self, anneal: Anneal, shared_api: ApiServer, trainer: Trainer, tmp_path: Path
    ) -> None:
        shown = anneal("status").stdout
        assert f"ready, version {version('anneal')}" in shown and shared_api.url in shown and "/home/logs" in shown
        assert f"{trainer.run_id}  running  0/100  counting" in shown
        found = json_of(anneal("status", "--json"))
        assert [run["id"] for run in found["active"]] == [trainer.run_id] and found["pending"] == []
        down = CliRunner().invoke(cli, ["status"], env={"ANNEAL_HOME": str(tmp_path / "other")})
        assert down.exit_code == 1 and "down" in down.stdout and "`anneal up`" in down.stderr
        link = json_of(anneal("open", "--print", "--json"))["url"]
        page, _, token = link.partition("#")
        assert page == f"{shared_api.url}/login"
        with shared_api.client_with(None) as browser:
            signed_in = [browser.post("/v1/session", json={"link": token}).status_code for _ in range(2)]
        assert signed_in == [201, 401]
        assert anneal("open", "--print").stdout.startswith(f"{page}#")

    def test_every_wrong_field_is_reported(self, anneal: Anneal, run_file: Path) -> None:
        changes = ["--set", "config.lora_r=-1", "--set", "config.epochs=0"]
        stderr = anneal("runs", "create", "-f", str(run_file), *changes, code=1).stderr
        assert "  config.lora_r: " in stderr and "  config.epochs: " in stderr
        assert stderr.startswith("anneal: 2 values are invalid.") and stderr.count("lora_r` must") == 1
        single = anneal("runs", "create", "-f", str(run_file), *changes[:2], code=1).stderr
        assert len(single.splitlines()) == 1 and single.count("must be") == 1 and "try again" in single

    def test_sentences_name_commands_and_no_calls_of_http(self, anneal: Anneal) -> None:
        assert "`anneal runs list`" in anneal("runs", "show", new_id("run"), code=1).stderr
        reference = (ROOT / "docs" / "reference" / "errors.md").read_text()
        cells = [cell for line in reference.splitlines() if line.startswith("| `") for cell in line.split("|")[2:]]
        said = [in_commands(cell) for cell in cells if "curl" not in cell]
        assert len(said) > 100
        left = [cell for cell in said if re.search(r"\b(GET|POST|PUT|PATCH|DELETE) |/v1/|`\?\w+=", cell)]
        assert left == []

    def test_a_file_that_is_not_there_is_reported(self, anneal: Anneal) -> None:
        assert (
            anneal("datasets", "upload", "none.jsonl", code=1).stderr
            == "anneal: none.jsonl: No such file or directory.\n"
        )
        assert "none.yaml: No such file" in anneal("runs", "create", "-f", "none.yaml", code=1).stderr

    def test_what_is_not_understood_has_another_code(self, anneal: Anneal) -> None:
        anneal("runs", "list", "--limit", "none", code=2)
        anneal("runs", "none", code=2)


class TestNouns:
    def test_a_dataset_is_uploaded_listed_and_shown(self, anneal: Anneal) -> None:
        Path("rows.jsonl").write_text(ROWS)
        uploaded = anneal("datasets", "upload", "rows.jsonl", "--name", "five rows")
        dataset_id = uploaded.stdout.strip()
        assert "5 rows, text" in uploaded.stderr
        listed = anneal("datasets", "list").stdout
        assert listed.splitlines()[0].startswith("ID ") and dataset_id in listed and "five rows" in listed
        assert json_of(anneal("datasets", "list", "--json", "--limit", "1"))["data"][0]["id"] == dataset_id
        assert "row 0" in anneal("datasets", "show", dataset_id).stdout
        assert json_of(anneal("datasets", "show", dataset_id, "--json"))["rows"] == 5
        mixed = anneal("datasets", "mix", "twice", "five rows:2", f"{dataset_id}:1", "--all", "--json")
        assert json_of(mixed)["source"]["stopping_strategy"] == "all_exhausted"
        shown = anneal("datasets", "show", "last").stdout
        assert "mix: all_exhausted, seed 42" in shown and "five rows" in shown and "weight 2" in shown
        assert "DATASET:WEIGHT" in anneal("datasets", "mix", "wrong", "five rows:x", code=2).stderr

    def test_what_a_file_is_and_calls_its_columns_is_sent_with_it(self, anneal: Anneal, shared_api: ApiServer) -> None:
        words = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}'
        (make_model(shared_api.settings, "counts") / "tokenizer.json").write_text(words)
        Path("table").write_text("question,answer\nq1,a1\n")
        names = ["--column", "prompt=question", "--column", "completion=answer"]
        uploaded = anneal("datasets", "upload", "table", "--file-format", "csv", *names, "--tokenizer", "counts")
        assert "1 rows, prompt_completion" in uploaded.stderr and ", 2 tokens" in uploaded.stderr
        content = anneal("datasets", "content", uploaded.stdout.strip()).stdout
        assert content == '{"prompt": "q1", "completion": "a1"}\n'
        assert "name a file in it" in anneal("datasets", "content", uploaded.stdout.strip(), "-o", ".", code=1).stderr
        anneal("datasets", "upload", "table", "--column", "prompt", code=2)
        Path("other.jsonl").write_text('{"question": "q1"}\n')
        assert "add `--column OURS=THEIRS`" in anneal("datasets", "upload", "other.jsonl", code=1).stderr
        assert "JSONL" in anneal("datasets", "content", "--help").stdout

    def test_a_dataset_may_come_from_standard_input(self, anneal: Anneal) -> None:
        uploaded = anneal("datasets", "upload", "-", "--name", "piped", input=gzip.compress(ROWS.encode()))
        assert "piped: 5 rows, text" in uploaded.stderr
        shown = anneal("datasets", "show", uploaded.stdout.strip()).stdout
        assert "jsonl, gzip" in shown
        table = b"instruction;output\nq;a\n"
        assert "or add `--file-format`" in anneal("datasets", "upload", "-", input=table, code=1).stderr
        uploaded = anneal("datasets", "upload", "-", "--file-format", "csv", input=table)
        assert "stdin: 1 rows, chat" in uploaded.stderr
        assert "csv with semicolons, alpaca" in anneal("datasets", "show", uploaded.stdout.strip()).stdout

    def test_a_dataset_of_the_hub_is_imported(self, anneal: Anneal, hub: Hub) -> None:
        hub.serve({"main/train.jsonl": b'{"t": "a"}\n', "main/test.jsonl": b'{"t": "b"}\n', "x/test.jsonl": b""})
        options = ["--split", "test", "--subset", "main", "--column", "text=t", "--name", "held out"]
        imported = anneal("datasets", "import", "ada/words", *options)
        assert "held out: 1 rows, text" in imported.stderr
        assert anneal("datasets", "content", imported.stdout.strip()).stdout == '{"text": "b"}\n'
        assert json_of(anneal("datasets", "import", "ada/words", "--column", "text=t", "--json"))["rows"] == 1
        assert "the hub has no dataset" in anneal("datasets", "import", "ada/none", code=1).stderr

    def test_an_experiment_is_made_and_shown(self, anneal: Anneal, run_file: Path) -> None:
        experiment_id = anneal("experiments", "create", "ranks", "--tag", "x", "--description", "why").stdout.strip()
        anneal("runs", "create", "-f", str(run_file), "--set", f"experiment_id={experiment_id}")
        assert "1 pending" in anneal("experiments", "show", experiment_id).stdout
        assert json_of(anneal("experiments", "show", experiment_id, "--json"))["runs"]["pending"] == 1
        assert json_of(anneal("experiments", "list", "--json"))["data"][0]["name"] == "ranks"
        assert experiment_id in anneal("experiments", "list").stdout

    def test_runs_are_filtered_and_paged(self, anneal: Anneal, run_file: Path) -> None:
        create = ["runs", "create", "-f", str(run_file), "--set", "tags=[paged]"]
        ids = [anneal(*create).stdout.strip() for _ in range(3)]
        first = anneal("runs", "list", "--tag", "paged", "--limit", "2")
        assert [line.split()[0] for line in first.stdout.splitlines()[1:]] == ids[:0:-1]
        assert f"--after {ids[1]}" in first.stderr
        rest = json_of(anneal("runs", "list", "--tag", "paged", "--after", ids[1], "--json"))
        assert [run["id"] for run in rest["data"]] == ids[:1] and rest["has_more"] is False
        assert anneal("runs", "list", "--tag", "paged", "--status", "failed").stderr == "There are none.\n"
        assert re.search(r"config.learning_rate +0\.0001\n", anneal("runs", "show", ids[0]).stdout)
        assert json_of(anneal("runs", "stop", ids[0], "--json"))["status"] == "cancelled"

    def test_workers_are_listed(self, anneal: Anneal, trainer: Trainer) -> None:
        assert trainer.worker_id in anneal("workers", "list").stdout
        assert any(worker["id"] == trainer.worker_id for worker in json_of(anneal("workers", "list", "--json"))["data"])

    def test_things_are_found_by_the_beginning_of_an_id_by_name_and_as_the_last(
        self, anneal: Anneal, run_file: Path
    ) -> None:
        def shown(noun: str, text: str) -> str:
            return str(json_of(anneal(noun, "show", text, "--json"))["id"])

        group = anneal("experiments", "create", "by name").stdout.strip()
        create = ["runs", "create", "-f", str(run_file), "--set", f"experiment_id={group}", "--set"]
        first, second = (anneal(*create, f"name={name}").stdout.strip() for name in ("sought", "sought_too"))
        for text in (second, second[:-4], second.removeprefix("run_")[:-4], "sought_too", "last"):
            assert shown("runs", text) == second
        assert shown("experiments", "by name") == shown("experiments", "last") == group
        listed = json_of(anneal("runs", "list", "--experiment", "by name", "--json"))["data"]
        assert [run["id"] for run in listed] == [second, first]
        compared = json_of(anneal("runs", "compare", "sought", "last", "--json"))["runs"]
        assert [run["run_id"] for run in compared] == [first, second]
        Path("rows.jsonl").write_text(ROWS)
        dataset = anneal("datasets", "upload", "rows.jsonl", "--name", "five rows").stdout.strip()
        assert shown("datasets", dataset[:-4]) == shown("datasets", "last") == dataset
        anneal("runs", "edit", second, "--name", "sought")
        for text in ("sought", "run_", first[:8]):
            several = anneal("runs", "delete", text, code=1).stderr
            assert "is not unique" in several and f"  {second}  sought" in several
        missing = anneal("runs", "show", "not there", code=1).stderr
        assert missing == (
            "anneal: There is no run 'not there'. Use an id, the beginning of one, a name, or `last`; "
            "`anneal runs list` lists them.\n"
        )
        Path("not sent.jsonl").write_text(ROWS)
        missing = anneal("datasets", "show", "not sent.jsonl", code=1).stderr
        assert "Upload the file first: `anneal datasets upload 'not sent.jsonl'`." in missing
        for run_id in (first, second):
            anneal("runs", "stop", run_id)

    def test_an_evaluation_shows_its_metrics_and_has_no_output(
        self, anneal: Anneal, shared_api: ApiServer, trainer: Trainer
    ) -> None:
        trainer.complete()
        make_model(shared_api.settings, "counted")
        Path("rows.jsonl").write_text(ROWS)
        anneal("datasets", "upload", "rows.jsonl")
        run_id = anneal("eval", "counted", "last", "--no-wait").stdout.strip()
        evaluation = Trainer(trainer.engine, run_id).begin()
        evaluation.events("eval", {"step": 0, "metrics": {"eval_loss": 0.5}})
        evaluation.complete()
        assert anneal("runs", "watch", run_id).stdout.splitlines()[-1] == "  eval_loss 0.5"
        shown = anneal("runs", "show", run_id).stdout
        assert re.search(r"^task +evaluate$", shown, re.MULTILINE) and re.search(
            r"^eval_loss +0.5$", shown, re.MULTILINE
        )
        assert "is an evaluation" in anneal("runs", "download", run_id, code=1).stderr
        listed = json_of(anneal("runs", "list", "--task", "evaluate", "--json"))["data"]
        assert [run["id"] for run in listed] == [run_id]
        assert "--install-completion" not in anneal("eval", "--help").stdout

    def test_checkpoints_are_listed_and_resumed_from(self, anneal: Anneal, trainer: Trainer) -> None:
        checkpoint_id = trainer.checkpoint(40)
        assert checkpoint_id in anneal("runs", "checkpoints", trainer.run_id).stdout
        assert json_of(anneal("runs", "checkpoints", trainer.run_id, "--json"))["data"][0]["step"] == 40
        assert anneal("runs", "resume", trainer.run_id, code=1).stderr.startswith("anneal: ")
        trainer.checkpoint(50, metrics={"loss": 1.5, "eval_loss": 2.5})
        trainer.checkpoint(60, metrics={"eval_loss": 2.25})
        listed = anneal("runs", "checkpoints", trainer.run_id).stdout
        assert "eval_loss 2.25 (best)" in listed and "eval_loss 2.5 " in listed and listed.count("(best)") == 1
        anneal("runs", "stop", trainer.run_id)
        trainer.cancel()
        assert "no checkpoint" in anneal("runs", "resume", "last", "--checkpoint", "ckpt_zz", code=1).stderr
        resume = ["runs", "resume", trainer.run_id, "--checkpoint", checkpoint_id[:-4], "--json"]
        assert "--set config.epochs" in anneal(*resume, "--set", "epochs=5", code=2).stderr
        child = json_of(anneal(*resume, "--set", "config.epochs=5"))
        assert (child["parent_run_id"], child["resume_checkpoint_id"]) == (trainer.run_id, checkpoint_id)
        assert child["config"]["epochs"] == 5

    def test_without_a_checkpoint_the_option_that_starts_over_is_named(self, anneal: Anneal, trainer: Trainer) -> None:
        trainer.fail()
        assert "has no checkpoint" in anneal("runs", "export", "last", "--checkpoint", "last", code=1).stderr
        assert "--from-start" in anneal("runs", "resume", trainer.run_id, code=1).stderr
        assert anneal("runs", "resume", trainer.run_id, "--from-start").stdout.startswith("run_")

    def test_why_names_a_command_that_can_be_typed(self, anneal: Anneal, trainer: Trainer) -> None:
        trainer.metric(1, loss=2.0)
        trainer.metric(2, loss=25.0)
        trainer.fail("non_finite_loss", "At step 3 the loss became nan.")
        reported = anneal("runs", "why", trainer.run_id).stdout
        command, body, end = reported.splitlines()[-3:]
        assert (command, end) == ("anneal runs create -f - <<'EOF'", "EOF") and "diverged" in reported
        Path("again.json").write_text(body)
        assert anneal("runs", "create", "-f", "again.json").stdout.startswith("run_")
        request = CorrectedRequest(path="/v1/runs/run_1/resume", body={"config": {"learning_rate": 1e-05, "epochs": 2}})
        assert (
            typed("run_1", request) == "anneal runs resume run_1 --set config.learning_rate=1e-05 --set config.epochs=2"
        )

    def test_a_model_is_downloaded(self, anneal: Anneal, trainer: Trainer, shared_api: ApiServer) -> None:
        trainer.write_output(Storage(shared_api.settings))
        trainer.complete()
        assert anneal("runs", "download", trainer.run_id).stdout.strip() == trainer.run_id
        assert (Path(trainer.run_id) / "adapter_config.json").read_text() == "{}"
        files = json_of(anneal("runs", "download", trainer.run_id, "-o", "here", "--path", "*.json", "--json"))
        assert files == {"folder": "here", "files": ["adapter_config.json"]}

    def test_editing_changes_what_is_named(self, anneal: Anneal, run_file: Path) -> None:
        run_id = anneal("runs", "create", "-f", str(run_file)).stdout.strip()
        assert json_of(anneal("runs", "edit", run_id, "--name", "x", "--json"))["tags"] == ["2026-01-02", "no"]
        assert json_of(anneal("runs", "edit", run_id, "--tag", "a", "--tag", "b", "--json"))["tags"] == ["a", "b"]
        experiment_id = anneal("experiments", "create", "ranks").stdout.strip()
        assert anneal("experiments", "edit", experiment_id, "--name", "x").stderr == f"{experiment_id} is changed.\n"
        assert json_of(anneal("experiments", "show", experiment_id, "--json"))["name"] == "x"

    def test_the_quota_of_an_experiment_is_shown_changed_and_removed(self, anneal: Anneal) -> None:
        id = anneal("experiments", "create", "ranks", "--max-devices", "4").stdout.strip()
        assert re.search(r"^max devices +4$", anneal("experiments", "show", id).stdout, re.MULTILINE)
        assert json_of(anneal("experiments", "edit", id, "--name", "x", "--json"))["max_devices"] == 4
        assert json_of(anneal("experiments", "edit", id, "--max-devices", "0", "--json"))["max_devices"] == 0
        both = anneal("experiments", "edit", id, "--max-devices", "1", "--no-max-devices", code=2).stderr
        assert "--no-max-devices contradicts --max-devices" in " ".join(re.sub(r"[│╭╮╰╯─]", " ", both).split())
        assert json_of(anneal("experiments", "edit", id, "--no-max-devices", "--json"))["max_devices"] is None
        assert "max devices" not in anneal("experiments", "show", id).stdout

    def test_what_is_pinned_cannot_be_deleted(self, anneal: Anneal, trainer: Trainer) -> None:
        checkpoint_id = trainer.checkpoint(40)
        trainer.complete()
        assert anneal("runs", "pin", trainer.run_id).stderr == f"{trainer.run_id} is pinned.\n"
        checkpoint = [trainer.run_id, "--checkpoint", checkpoint_id, "--json"]
        assert json_of(anneal("runs", "pin", *checkpoint))["pinned"] is True
        assert "periodic, pinned" in anneal("runs", "checkpoints", trainer.run_id).stdout
        assert "pinned" in anneal("runs", "delete", trainer.run_id, code=1).stderr
        assert json_of(anneal("runs", "unpin", *checkpoint))["pinned"] is False
        assert json_of(anneal("runs", "unpin", trainer.run_id, "--json"))["pinned"] is False
        assert anneal("runs", "delete", trainer.run_id).stderr == f"{trainer.run_id} is deleted.\n"

    def test_what_is_deleted_is_reported(self, anneal: Anneal) -> None:
        Path("rows.jsonl").write_text(ROWS)
        for noun, made in (("datasets", ["upload", "rows.jsonl"]), ("experiments", ["create", "short"])):
            id = anneal(noun, *made).stdout.strip()
            assert json_of(anneal(noun, "delete", id, "--json")) == {"id": id, "deleted": True}
            assert anneal(noun, "delete", id, code=1).stderr.startswith("anneal: ")

    def test_an_experiment_goes_with_its_runs_only_on_request(self, anneal: Anneal, trainer: Trainer) -> None:
        trainer.checkpoint(40)
        trainer.complete()
        alone = make_experiment(trainer.engine)
        mark_run(trainer.engine, trainer.run_id, experiment_id=alone)
        held = "1 run (1 completed), 1 checkpoint and 1 model"
        refused = anneal("experiments", "delete", alone, code=1).stderr
        assert held in refused and "--with-runs" in refused and "cascade" not in refused
        delete = ["experiments", "delete", alone, "--with-runs"]
        for answer in ("", "n\n"):
            asked = anneal(*delete, input=answer, code=1).stderr
            assert held in asked and "Nothing is deleted" in asked and "--yes" in asked
        assert anneal("runs", "show", trainer.run_id).exit_code == 0
        assert f"{alone} is deleted." in anneal(*delete, input="y\n").stderr
        assert "There is no run" in anneal("runs", "show", trainer.run_id, code=1).stderr
        other = anneal("experiments", "create", "scripted").stdout.strip()
        assert json_of(anneal("experiments", "delete", other, "--with-runs", "--yes", "--json"))["deleted"] is True

    def test_runs_are_compared(self, anneal: Anneal, trainer: Trainer, run_file: Path) -> None:
        trainer.metric(10, loss=2.5)
        mark_run(trainer.engine, trainer.run_id, best_loss=2.5)
        create = ["runs", "create", "-f", str(run_file), "--set", "name=other", "--set", "config.lora_r=4"]
        ids = [trainer.run_id, anneal(*create).stdout.strip()]
        header, *lines = anneal("runs", "compare", *ids).stdout.splitlines()
        assert header.split() == ids
        rows = [re.split("  +", line) for line in lines]
        assert ["name", "counting", "other"] in rows and ["loss", "2.5", "-"] in rows
        assert any(row[0] == "config.lora_r" and row[2] == "4" for row in rows)
        compared = json_of(anneal("runs", "compare", *ids, "--json"))
        assert compared["differences"]["config.lora_r"][ids[1]] == 4
        assert "2 to 20" in anneal("runs", "compare", ids[0], code=1).stderr
        assert json_of(anneal("runs", "list", "--sort", "best", "--json"))["data"][0]["id"] == trainer.run_id

    def test_content_is_printed_or_written_whole(self, anneal: Anneal) -> None:
        Path("rows.jsonl").write_text(ROWS)
        dataset_id = anneal("datasets", "upload", "rows.jsonl").stdout.strip()
        assert anneal("datasets", "content", dataset_id).stdout == ROWS
        anneal("datasets", "content", dataset_id, "-o", "copy.jsonl")
        Failing.answers = [(200, {"Content-Length": "9999"}, b"{")]
        with serving(Failing) as url:
            there = {"ANNEAL_URL": url, "ANNEAL_API_KEY": "key"}
            broken = CliRunner().invoke(cli, ["datasets", "content", dataset_id, "-o", "copy.jsonl"], env=there)
        assert broken.exit_code == 1 and Path("copy.jsonl").read_text() == ROWS
        assert not list(Path().glob(".*.part"))


def end(trainer: Trainer, how: str) -> None:
    """End the run as `how` says."""
    {"completed": trainer.complete, "failed": trainer.fail, "cancelled": trainer.cancel}[how]()


ENDS = pytest.mark.parametrize(("how", "code"), [("completed", 0), ("failed", 3), ("cancelled", 4)])


class TestCompletion:
    def test_the_shell_is_offered_ids_and_names(
        self, anneal: Anneal, shared_api: ApiServer, run_file: Path, tmp_path: Path
    ) -> None:
        run_id = anneal("runs", "create", "-f", str(run_file), "--set", "name=completed-by-tab").stdout.strip()
        anneal("runs", "stop", run_id)
        script = "import sys; sys.argv[0] = 'anneal'; from app.cli.main import main; main()"

        def offered(words: str, url: str) -> list[str]:
            asked = {"_ANNEAL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
            there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": url, "ANNEAL_API_KEY": shared_api.key}
            done = subprocess.run(
                [sys.executable, "-c", script], env={**os.environ, **there, **asked}, capture_output=True, text=True,
                timeout=60,
            )  # fmt: skip
            assert done.stderr == "", done.stderr
            return done.stdout.split()

        assert run_id in offered(f"anneal runs show {run_id[:-3]}", shared_api.url)
        assert offered("anneal runs delete completed-by", shared_api.url) == ["completed-by-tab"]
        assert offered("anneal runs show run_", "http://127.0.0.1:1") == []


class TestFollowing:
    @ENDS
    def test_watching_ends_as_the_run_does(self, anneal: Anneal, trainer: Trainer, how: str, code: int) -> None:
        if how == "cancelled":
            anneal("runs", "stop", trainer.run_id)
        trainer.events("metric", {"step": 40, "loss": -1e-9, "extra": {"reward": 0.25}})
        ending = threading.Timer(0.3, lambda: end(trainer, how))
        ending.start()
        watched = anneal("runs", "watch", trainer.run_id, code=code)
        ending.join()
        last = watched.stdout.splitlines()[-2]
        assert f"counting: {how} at step" in last and last.endswith(", reward 0.2500")
        again = anneal("runs", "watch", trainer.run_id, code=code)
        assert again.stdout.splitlines()[-2:] == watched.stdout.splitlines()[-2:]
        assert anneal("runs", "logs", "-f", trainer.run_id, code=code).stdout == ""
        if how == "failed":
            assert "internal: it broke" in watched.stdout

    @pytest.mark.parametrize(
        ("learns_from_rewards", "shown", "line"),
        [
            (False, "loss 0.5000  held-out 2.0000", "loss 0.5  learning_rate 0.001"),
            (True, "reward 0.2500  held-out reward 0.7500", "reward 0.25  loss 0.5  learning_rate 0.001"),
        ],
    )
    def test_what_the_method_goes_by_is_shown(self, learns_from_rewards: bool, shown: str, line: str) -> None:
        began = datetime(2026, 1, 2, tzinfo=UTC)
        seen = WatchState("run_1", "counting", "running", 0, 10, learns_from_rewards, started=began)
        measured = {"eval_loss": 2.0, "eval_reward": 0.75, "eval_seconds": 3.0, "eval_samples_per_second": 9.0}
        metric = MetricEvent(
            type="metric", run_id="run_1", seq=1, step=5, loss=0.5, learning_rate=1e-3, extra={"reward": 0.25},
            ts=began + timedelta(seconds=3725),
        )  # fmt: skip
        assert seen.take(metric) is None and seen.curve == {5: 0.25 if learns_from_rewards else 0.5}
        assert seen.progress(metric) == f" 50%|#####     | 5/10 [1:02:05]  {line}"
        evaluated = seen.take(EvalEvent(type="eval", run_id="run_1", seq=2, step=5, metrics=measured))
        assert evaluated == "step 5  eval_loss 2  eval_reward 0.75"
        assert seen.figures == shown
        text = {"type": "sample", "run_id": "run_1", "seq": 3, "step": 5, "prompt": "Hi", "completion": 'a "b"\n'}
        assert seen.take(SampleEvent(**text)) == r'step 5  sample "Hi" -> "a \"b\"\n"'
        assert seen.take(SampleEvent(**text, rewards={"length": 1.0})) is None

    def test_why_a_run_waits_is_a_line_and_its_gpu_is_in_the_status_line(self) -> None:
        seen = WatchState("run_1", "counting", "pending", 0, 10)
        about = {"run_id": "run_1", "seq": 1}
        assert seen.take(PendingEvent(type="pending", code="no_worker", message="Start one.", **about)) == (
            "waits: Start one."
        )
        assert seen.take(PendingEvent(type="pending", code="queued", message="One is online.", **about)) == (
            "queued: One is online."
        )
        device = DeviceEvent(
            type="device", index=0, uid="GPU-1", seconds=10, utilization_percent=97.4, memory_mb=61_204,
            temperature_celsius=63, **about,
        )  # fmt: skip
        assert seen.take(device) is None and seen.figures == "GPU 97% 59.8 GiB 63 °C"
        seen.take(StatusEvent(type="status", to="completed", **about))
        assert seen.figures == ""

    def test_a_run_that_waits_says_why_when_watching_starts(
        self, anneal: Anneal, trainer: Trainer, engine: Engine
    ) -> None:
        trainer.complete()
        reason = {"code": "no_device_fits", "message": "Start a worker with a larger device."}
        mark_run(engine, trainer.run_id, pending_reason=reason)
        watched = anneal("runs", "watch", trainer.run_id).stdout.splitlines()
        assert watched[0] == "waits: Start a worker with a larger device."

    def test_every_metric_is_a_line_before_the_end(
        self, anneal: Anneal, trainer: Trainer, shared_api: ApiServer
    ) -> None:
        def is_watched() -> bool:
            return 'anneal_streams{state="live"} 1.0' in shared_api.client.get("/metrics").text

        def finish() -> None:
            try:
                eventually(is_watched)
                for step in (28, 29, 30):
                    trainer.metric(step, loss=step / 100)
            finally:
                trainer.complete()

        ending = threading.Thread(target=finish)
        ending.start()
        lines = anneal("runs", "watch", trainer.run_id).stdout.splitlines()
        ending.join()
        shown = [line for line in lines if "/100 [" in line]
        assert [line.partition(" [")[0] for line in shown] == [f" {n}%|###       | {n}/100" for n in (28, 29, 30)]
        assert shown[-1].endswith("  loss 0.3") and lines[lines.index(shown[-1]) + 1].startswith("completed")

    def test_json_is_a_line_for_each_event(self, anneal: Anneal, trainer: Trainer) -> None:
        trainer.log("first", "second")
        trainer.metric(10, loss=2.5)
        trainer.complete()
        events = [json.loads(line) for line in anneal("runs", "watch", trainer.run_id, "--json").stdout.splitlines()]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert events[0]["from"] is None and events[-1]["type"] == "end"
        lines = anneal("runs", "logs", trainer.run_id, "--json", "--tail", "1").stdout.splitlines()
        assert [json.loads(line).get("line") for line in lines] == ["second", None]
        assert anneal("runs", "logs", trainer.run_id, "--grep", "fir").stdout == "first\n"

    def test_events_of_all_runs_are_printed_with_their_cursors(self, anneal: Anneal, trainer: Trainer) -> None:
        trainer.events("progress", {"phase": "evaluating", "done": 1, "total": 2, "message": None})
        trainer.complete()

        def printed(*arguments: str) -> list[str]:
            return anneal("runs", "events", "--no-follow", *arguments).stdout.splitlines()

        shown = eventually(
            lambda: (lines := [it for it in printed() if trainer.run_id in it]) and len(lines) == 6 and lines
        )
        assert [line.split("  ")[-1] for line in shown[-3:]] == [
            "evaluating 1 of 2",
            "completed: all steps done",
            "ended: completed",
        ]
        ends = [json.loads(line) for line in printed("--types", "end", "--json")]
        assert ends[-1]["run_id"] == trainer.run_id
        assert printed("--after", str(ends[-1]["cursor"])) == []

    def test_a_run_is_made_and_watched_in_one(self, anneal: Anneal, shared_api: ApiServer, run_file: Path) -> None:
        def stop() -> None:
            with client.Anneal(shared_api.url, shared_api.key) as there:
                run = eventually(lambda: next(there.runs.list(tag="watched"), None))
                there.runs.stop(run.id)

        stopping = threading.Thread(target=stop)
        stopping.start()
        anneal("runs", "create", "-f", str(run_file), "--set", "tags=[watched]", "--watch", code=4)
        stopping.join()

    def test_show_has_the_values_that_actions_changed(self, anneal: Anneal, trainer: Trainer, engine: Engine) -> None:
        assert "config.learning_rate  0.0001" in anneal("runs", "show", trainer.run_id).stdout
        in_force = {"learning_rate": 1e-6, "max_steps": 500, "optim": "adamw_8bit"}
        with engine.begin() as connection:
            connection.execute(update(Run).where(Run.id == trainer.run_id).values(effective_config=in_force))
        shown = " ".join(anneal("runs", "show", trainer.run_id).stdout.split())
        assert "config.learning_rate 1e-06" in shown and "config.max_steps 500" in shown and "adamw_8bit" not in shown

    def test_stop_can_wait_for_the_end(self, anneal: Anneal, trainer: Trainer) -> None:
        assert "was asked to stop; it is running" in anneal("runs", "stop", trainer.run_id).stdout
        ending = threading.Timer(0.3, trainer.cancel)
        ending.start()
        assert "is cancelled" in anneal("runs", "stop", "--wait", "--no-save", trainer.run_id).stdout
        ending.join()


class TestTerminal:
    @pytest.fixture
    def start(
        self, shared_api: ApiServer, tmp_path: Path
    ) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
        """Starts a command on a terminal of its own; answers the process and the terminal's other end."""
        there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": shared_api.url, "ANNEAL_API_KEY": shared_api.key}
        started: list[Started] = []

        def run(*arguments: str) -> Started:
            ours, theirs = pty.openpty()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "app.cli.main", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
                env={**os.environ, **there, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}, start_new_session=True,
            )  # fmt: skip
            os.close(theirs)
            started.append((process, ours))
            return process, ours

        yield run
        for process, ours in started:
            process.kill()
            process.wait()
            os.close(ours)

    def test_no_name_and_no_line_of_others_controls_it(
        self, start: Any, trainer: Trainer, anneal: Anneal, run_file: Path
    ) -> None:
        """Names come from anyone who may write, messages from code that trains."""
        hostile = "\x1b]0;owned\x07\x1b[2Jname\u202e\x9b2J\x7f"
        anneal("runs", "create", "-f", str(run_file), "--set", f"name={json.dumps(hostile)}")
        with trainer.engine.begin() as connection:
            connection.execute(update(Run).where(Run.id == trainer.run_id).values(name=hostile))
        trainer.log(hostile)
        trainer.events("progress", {"phase": hostile, "done": None, "total": None, "message": hostile})
        trainer.fail(message=hostile)
        run_id = trainer.run_id
        commands = [["show", run_id], ["logs", run_id], ["why", run_id], ["list"], ["show", run_id, "--json"]]
        printed = [anneal("runs", *command).stdout for command in commands]
        assert json.loads(printed[-1])["name"] == hostile, "as JSON it has the same value"
        assert all("name" in text and not set(text) & set("\x1b\x07\x7f\x9b\u202e") for text in printed)
        for command in (["watch", run_id], ["list"]):
            process, terminal = start("runs", *command)
            seen = bytearray()
            with suppress(OSError):  # the process has ended
                while piece := os.read(terminal, 65536):
                    seen += piece
            assert b"name" in seen and b"owned" not in seen and "\u202e".encode() not in seen
            process.wait(30)

    def test_watch_draws_the_loss_and_ctrl_c_leaves_the_run_alone(
        self, start: Any, trainer: Trainer, anneal: Anneal
    ) -> None:
        for step in range(1, 30):
            trainer.metric(step, loss=3 / step)
        process, terminal = start("runs", "watch", trainer.run_id)
        seen = bytearray()

        def shows(text: str) -> bool:
            if select.select([terminal], [], [], 0)[0]:
                with suppress(OSError):  # the other end is closed
                    seen.extend(os.read(terminal, 65536))
            return text in seen.decode(errors="replace")

        eventually(lambda: shows("loss 0.1034"))
        trainer.metric(30, loss=0.05)
        eventually(lambda: shows("30/100"))
        assert "┤" in seen.decode(errors="replace"), "a plot"
        process.send_signal(signal.SIGINT)
        eventually(lambda: shows("the run continues"))
        assert process.wait(20) == 130
        assert b"Traceback" not in seen
        assert json_of(anneal("runs", "show", trainer.run_id, "--json"))["status"] == "running"

    def test_a_list_is_a_table(self, start: Any, trainer: Trainer) -> None:
        process, terminal = start("runs", "list", "--limit", "1")
        shown = b""
        while b"counting" not in shown:
            shown += os.read(terminal, 65536)
        assert trainer.run_id.encode() in shown and process.wait(20) == 0

    @pytest.mark.parametrize("columns", [80, 200])
    def test_each_row_of_a_list_takes_one_line(
        self, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        row = [
            "run_" + "0" * 26,
            "initializing",
            "120/1000",
            "0.1234",
            "a name of many words " * 3,
            "soon",
            "2026-01-02",
        ]
        names = ("id", "status", "step", "best loss", "name", "eta", "created")
        listing([], False, False, names, [row, row])
        header, *lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert len(lines) == 2 and all(len(line) <= columns and row[0] in line for line in lines)
        assert header.split()[:2] == ["ID", "STATUS"] and "a name of" in lines[0]
        assert ("CREATED" in header) is (columns == 200)
