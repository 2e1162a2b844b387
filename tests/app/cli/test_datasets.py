"""Commands of `anneal datasets`."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import cli
from tests.anneal.client.test_client import Failing
from tests.app import hub_server
from tests.app.hub_server import Hub
from tests.conftest import ROWS, Anneal, json_of
from tests.factories import make_model
from tests.http_server import serving
from tests.server import ApiServer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_dataset_is_uploaded_listed_and_shown(anneal: Anneal) -> None:
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


def test_what_a_file_is_and_calls_its_columns_is_sent_with_it(anneal: Anneal, shared_api: ApiServer) -> None:
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


def test_a_dataset_may_come_from_standard_input(anneal: Anneal) -> None:
    uploaded = anneal("datasets", "upload", "-", "--name", "piped", input=gzip.compress(ROWS.encode()))
    assert "piped: 5 rows, text" in uploaded.stderr
    shown = anneal("datasets", "show", uploaded.stdout.strip()).stdout
    assert "jsonl, gzip" in shown
    table = b"instruction;output\nq;a\n"
    assert "or add `--file-format`" in anneal("datasets", "upload", "-", input=table, code=1).stderr
    uploaded = anneal("datasets", "upload", "-", "--file-format", "csv", input=table)
    assert "stdin: 1 rows, chat" in uploaded.stderr
    assert "csv with semicolons, alpaca" in anneal("datasets", "show", uploaded.stdout.strip()).stdout


def test_a_dataset_of_the_hub_is_imported(anneal: Anneal, hub: Hub) -> None:
    hub.serve({"main/train.jsonl": b'{"t": "a"}\n', "main/test.jsonl": b'{"t": "b"}\n', "x/test.jsonl": b""})
    options = ["--split", "test", "--subset", "main", "--column", "text=t", "--name", "held out"]
    imported = anneal("datasets", "import", "ada/words", *options)
    assert "held out: 1 rows, text" in imported.stderr
    assert anneal("datasets", "content", imported.stdout.strip()).stdout == '{"text": "b"}\n'
    assert json_of(anneal("datasets", "import", "ada/words", "--column", "text=t", "--json"))["rows"] == 1
    assert "the hub has no dataset" in anneal("datasets", "import", "ada/none", code=1).stderr


def test_content_is_printed_or_written_whole(anneal: Anneal) -> None:
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
