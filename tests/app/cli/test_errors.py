"""Errors of the command line: one sentence that says what to do next, and a code with `--json`."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anneal.client.transport import SyncTransport
from app.api.errors import RETRY_SECONDS
from app.cli.error_text import in_commands
from app.cli.main import cli
from app.infra.ids import new_id
from tests.anneal.client.test_client import EMPTY, Failing
from tests.conftest import Anneal
from tests.http_server import serving
from tests.nodes import ROOT


def test_error_without_a_service_names_the_next_step(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["runs", "list"], env={"ANNEAL_HOME": str(tmp_path)})
    assert result.exit_code == 1
    (sentence,) = result.stderr.splitlines()
    assert "`anneal up`" in sentence and "ANNEAL_URL" in sentence and "ANNEAL_API_KEY" in sentence


def test_a_service_that_asks_to_come_back_is_asked_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(_: SyncTransport, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(SyncTransport, "pause", pause)
    Failing.answers = [(503, {"Retry-After": str(RETRY_SECONDS)}, b"{}"), EMPTY]
    with serving(Failing) as url:
        there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": url, "ANNEAL_API_KEY": "key"}
        assert CliRunner().invoke(cli, ["workers", "list"], env=there).exit_code == 0 and pauses == [RETRY_SECONDS]


def test_a_service_that_does_not_answer_is_reported_before_the_first_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.console._PATIENCE", 1.0)
    there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": "http://127.0.0.1:1", "ANNEAL_API_KEY": "key"}
    refused = CliRunner().invoke(cli, ["runs", "list"], env=there)
    first, *last = refused.stderr.splitlines()
    assert refused.exit_code == 1 and "is unreachable" in first and "Trying again for 1 s" in first
    assert len(last) == 1 and last[0].startswith("anneal: The service at http://127.0.0.1:1 is unreachable")
    (error,) = CliRunner().invoke(cli, ["runs", "list", "--json"], env=there).stderr.splitlines()
    assert json.loads(error)["code"] == "unreachable"


def test_error_with_json_has_its_code_and_fields(anneal: Anneal, run_file: Path) -> None:
    refused = anneal("runs", "create", "-f", str(run_file), "--set", "config.lora_r=-1", "--json", code=1)
    error = json.loads(refused.stderr)
    assert refused.stdout == "" and error["code"] == "out_of_range" and "lora_r" in error["detail"]
    assert [(item["field"], item["code"]) for item in error["errors"]] == [("config.lora_r", "out_of_range")]
    missing = json.loads(anneal("runs", "show", new_id("run"), "--json", code=1).stderr)
    assert missing["code"] == "run_not_found" and missing["errors"] == []
    assert json.loads(anneal("runs", "show", "none", "--json", code=1).stderr)["code"] == "run_not_found"
    file = anneal("runs", "create", "-f", "none.yaml", "--json", code=1).stderr
    assert json.loads(file)["code"] == "file_error"


def test_every_wrong_field_is_reported(anneal: Anneal, run_file: Path) -> None:
    changes = ["--set", "config.lora_r=-1", "--set", "config.epochs=0"]
    stderr = anneal("runs", "create", "-f", str(run_file), *changes, code=1).stderr
    assert "  config.lora_r: " in stderr and "  config.epochs: " in stderr
    assert stderr.startswith("anneal: 2 values are invalid.") and stderr.count("lora_r` must") == 1
    single = anneal("runs", "create", "-f", str(run_file), *changes[:2], code=1).stderr
    assert len(single.splitlines()) == 1 and single.count("must be") == 1 and "try again" in single


def test_sentences_name_commands_and_no_calls_of_http(anneal: Anneal) -> None:
    assert "`anneal runs list`" in anneal("runs", "show", new_id("run"), code=1).stderr
    reference = (ROOT / "docs" / "reference" / "errors.md").read_text()
    cells = [cell for line in reference.splitlines() if line.startswith("| `") for cell in line.split("|")[2:]]
    said = [in_commands(cell) for cell in cells if "curl" not in cell and "/openai/" not in cell]
    assert in_commands("use an id of GET …/checkpoints") == "use an id of `anneal runs checkpoints`"
    assert len(said) > 100
    left = [cell for cell in said if re.search(r"\b(GET|POST|PUT|PATCH|DELETE) |/v1/|`\?\w+=", cell)]
    assert left == []


def test_a_file_that_is_not_there_is_reported(anneal: Anneal) -> None:
    assert (
        anneal("datasets", "upload", "none.jsonl", code=1).stderr == "anneal: none.jsonl: No such file or directory.\n"
    )
    assert "none.yaml: No such file" in anneal("runs", "create", "-f", "none.yaml", code=1).stderr


def test_usage_error_has_another_exit_code(anneal: Anneal) -> None:
    anneal("runs", "list", "--limit", "none", code=2)
    anneal("runs", "none", code=2)
