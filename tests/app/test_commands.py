"""The command line over HTTP: from a shell, without reading the docs, and from scripts by JSON and exit codes."""

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
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from app import client
from app.cli import cli
from app.db import sync_engine
from app.experiments.schemas import ExperimentView
from app.home import write_private_json
from app.runs.schemas import RunRead
from app.storage import Storage
from tests.app import hub_server
from tests.app.hub_server import Hub
from tests.app.test_client import Failing
from tests.factories import Trainer, make_dataset, make_model
from tests.http_server import serving
from tests.server import ApiServer
from tests.waiting import eventually

ROWS = "".join(f'{{"text": "row {n}"}}\n' for n in range(5))
RUN = """\
dataset_id: {dataset_id}
backend: fake
name: counting
tags: [2026-01-02, no]
config:
  base_model: any
  method: sft
  learning_rate: 1e-4
"""

Anneal = Callable[..., Result]
Started = tuple[subprocess.Popen[bytes], int]


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def anneal(shared_api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Anneal:
    """Runs a command in an empty folder, with a service to be found by `connection.json`."""
    home = tmp_path / "home"
    home.mkdir()
    write_private_json(home / "connection.json", {"url": shared_api.url, "api_key": shared_api.key, "pids": {}})
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0, **options: Any) -> Result:
        result = CliRunner().invoke(cli, list(arguments), env={"ANNEAL_HOME": str(home)}, **options)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def run_file(engine: Engine, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(dataset_id=make_dataset(engine)))
    return path


@pytest.fixture
def trainer(anneal: Anneal, engine: Engine, run_file: Path) -> Trainer:
    """A run that trains, the only one that waited."""
    for other in json.loads(anneal("runs", "list", "--status", "pending", "--json").stdout)["data"]:
        anneal("runs", "stop", other["id"])
    run_id = anneal("runs", "create", "-f", str(run_file)).stdout.strip()
    return Trainer(engine, run_id).begin(total=100)


def told(result: Result) -> Any:
    """The one JSON document on standard output."""
    return json.loads(result.stdout)


class TestSentences:
    def test_without_a_service_the_next_step_is_told(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(cli, ["runs", "list"], env={"ANNEAL_HOME": str(tmp_path)})
        assert result.exit_code == 1
        (sentence,) = result.stderr.splitlines()
        assert "`anneal up`" in sentence and "ANNEAL_URL" in sentence and "ANNEAL_API_KEY" in sentence

    def test_the_environment_names_another_service(self, shared_api: ApiServer, tmp_path: Path) -> None:
        there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": shared_api.url, "ANNEAL_API_KEY": shared_api.key}
        assert CliRunner().invoke(cli, ["workers", "list"], env=there).exit_code == 0
        wrong = CliRunner().invoke(cli, ["workers", "list"], env={**there, "ANNEAL_API_KEY": "anneal_wrong"})
        assert wrong.exit_code == 1 and "anneal keys create" in wrong.stderr

    def test_every_wrong_field_is_told(self, anneal: Anneal, run_file: Path) -> None:
        changes = ["--set", "config.lora_r=-1", "--set", "config.epochs=0"]
        stderr = anneal("runs", "create", "-f", str(run_file), *changes, code=1).stderr
        assert "  config.lora_r: " in stderr and "  config.epochs: " in stderr

    def test_a_file_that_is_not_there_is_told(self, anneal: Anneal) -> None:
        assert (
            anneal("datasets", "upload", "none.jsonl", code=1).stderr
            == "anneal: none.jsonl: No such file or directory.\n"
        )
        assert "none.yaml: No such file" in anneal("runs", "create", "-f", "none.yaml", code=1).stderr

    def test_what_is_not_understood_has_another_code(self, anneal: Anneal) -> None:
        anneal("runs", "list", "--limit", "none", code=2)
        anneal("runs", "none", code=2)


class TestRunFile:
    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("config:\n  lora_r: 1\n  lora_r: 2\n", "the key 'lora_r' is there twice, again in line 3"),
            ("a: 1\na: 2\n", "the key 'a' is there twice, again in line 2"),
            ("config: [\n", "in line 2"),
            ("- 1\n", "it holds no fields"),
            ("", "it holds no fields"),
            ("config: {learning_rate: !!float .inf}\n", "JSON cannot tell"),
        ],
    )
    def test_a_file_that_cannot_be_meant_is_refused(self, anneal: Anneal, text: str, sentence: str) -> None:
        Path("bad.yaml").write_text(text)
        assert sentence in anneal("runs", "create", "-f", "bad.yaml", code=1).stderr

    def test_a_duplicate_key_of_json_is_refused_by_name(self, anneal: Anneal) -> None:
        Path("bad.json").write_text('{"dataset_id": "a", "dataset_id": "b"}')
        assert "the key 'dataset_id' is there twice" in anneal("runs", "create", "-f", "bad.json", code=1).stderr

    def test_values_are_what_people_mean(self, anneal: Anneal, run_file: Path) -> None:
        changes = ["--set", "config.epochs=2", "--set", "config.extra.steps=7", "--set", "name=null"]
        run = told(anneal("runs", "create", "-f", "-", *changes, "--json", input=run_file.read_text()))
        assert run["tags"] == ["2026-01-02", "no"]
        assert (run["config"]["learning_rate"], run["config"]["epochs"]) == (1e-4, 2)
        assert run["config"]["extra"] == {"steps": 7} and run["name"] == "sft of any"
        assert told(anneal("runs", "validate", "-f", str(run_file), "--json"))["valid"] is True

    def test_a_merge_may_bring_a_key_again(self, anneal: Anneal, run_file: Path) -> None:
        text = "x: &x {lora_r: 4, epochs: 1}\ny: &y {<<: *x, lora_r: 8}\nconfig: {<<: *y, epochs: 5}\n"
        Path("merged.yaml").write_text(text)
        from app.commands.run_file import read

        assert read(Path("merged.yaml"))["config"] == {"lora_r": 8, "epochs": 5}

    @pytest.mark.parametrize("change", ["config", "config.=1", "name.first=1", "config.a=[1"])
    def test_a_change_that_cannot_be_meant_is_refused(self, anneal: Anneal, run_file: Path, change: str) -> None:
        assert f"--set {change}" in anneal("runs", "create", "-f", str(run_file), "--set", change, code=1).stderr


class TestNouns:
    def test_a_data_set_is_uploaded_listed_and_shown(self, anneal: Anneal) -> None:
        Path("rows.jsonl").write_text(ROWS)
        uploaded = anneal("datasets", "upload", "rows.jsonl", "--name", "five rows")
        dataset_id = uploaded.stdout.strip()
        assert "5 rows, text" in uploaded.stderr
        listed = anneal("datasets", "list").stdout
        assert listed.splitlines()[0].startswith("ID ") and dataset_id in listed and "five rows" in listed
        assert told(anneal("datasets", "list", "--json", "--limit", "1"))["data"][0]["id"] == dataset_id
        assert "row 0" in anneal("datasets", "show", dataset_id).stdout
        assert told(anneal("datasets", "show", dataset_id, "--json"))["rows"] == 5

    def test_what_a_file_is_and_calls_its_columns_is_told_with_it(self, anneal: Anneal, shared_api: ApiServer) -> None:
        words = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}}'
        (make_model(shared_api.settings, "counts") / "tokenizer.json").write_text(words)
        Path("table").write_text("question,answer\nq1,a1\n")
        names = ["--column", "prompt=question", "--column", "completion=answer"]
        uploaded = anneal("datasets", "upload", "table", "--file-format", "csv", *names, "--tokenizer", "counts")
        assert "1 rows, prompt_completion" in uploaded.stderr and ", 2 tokens" in uploaded.stderr
        content = anneal("datasets", "content", uploaded.stdout.strip()).stdout
        assert content == '{"prompt": "q1", "completion": "a1"}\n'
        anneal("datasets", "upload", "table", "--column", "prompt", code=2)
        assert "JSONL" in anneal("datasets", "content", "--help").stdout

    def test_a_data_set_of_the_hub_is_imported(self, anneal: Anneal, hub: Hub) -> None:
        hub.serve({"main/train.jsonl": b'{"t": "a"}\n', "main/test.jsonl": b'{"t": "b"}\n', "x/test.jsonl": b""})
        options = ["--split", "test", "--subset", "main", "--column", "text=t", "--name", "held out"]
        imported = anneal("datasets", "import", "ada/words", *options)
        assert "held out: 1 rows, text" in imported.stderr
        assert anneal("datasets", "content", imported.stdout.strip()).stdout == '{"text": "b"}\n'
        assert told(anneal("datasets", "import", "ada/words", "--column", "text=t", "--json"))["rows"] == 1
        assert "the hub has no data set" in anneal("datasets", "import", "ada/none", code=1).stderr

    def test_an_experiment_is_made_and_shown(self, anneal: Anneal, run_file: Path) -> None:
        experiment_id = anneal("experiments", "create", "ranks", "--tag", "x", "--description", "why").stdout.strip()
        anneal("runs", "create", "-f", str(run_file), "--set", f"experiment_id={experiment_id}")
        assert "1 pending" in anneal("experiments", "show", experiment_id).stdout
        assert told(anneal("experiments", "show", experiment_id, "--json"))["runs"]["pending"] == 1
        assert told(anneal("experiments", "list", "--json"))["data"][0]["name"] == "ranks"
        assert experiment_id in anneal("experiments", "list").stdout

    def test_runs_are_filtered_and_paged(self, anneal: Anneal, run_file: Path) -> None:
        create = ["runs", "create", "-f", str(run_file), "--set", "tags=[paged]"]
        ids = [anneal(*create).stdout.strip() for _ in range(3)]
        first = anneal("runs", "list", "--tag", "paged", "--limit", "2")
        assert [line.split()[0] for line in first.stdout.splitlines()[1:]] == ids[:0:-1]
        assert f"--after {ids[1]}" in first.stderr
        rest = told(anneal("runs", "list", "--tag", "paged", "--after", ids[1], "--json"))
        assert [run["id"] for run in rest["data"]] == ids[:1] and rest["has_more"] is False
        assert anneal("runs", "list", "--tag", "paged", "--status", "failed").stderr == "There are none.\n"
        assert re.search(r"config.learning_rate +0\.0001\n", anneal("runs", "show", ids[0]).stdout)
        assert told(anneal("runs", "stop", ids[0], "--json"))["status"] == "cancelled"

    def test_workers_are_listed(self, anneal: Anneal, trainer: Trainer) -> None:
        assert trainer.worker_id in anneal("workers", "list").stdout
        assert any(worker["id"] == trainer.worker_id for worker in told(anneal("workers", "list", "--json"))["data"])

    def test_checkpoints_are_listed_and_resumed_from(self, anneal: Anneal, trainer: Trainer) -> None:
        checkpoint_id = trainer.checkpoint(40)
        assert checkpoint_id in anneal("runs", "checkpoints", trainer.run_id).stdout
        assert told(anneal("runs", "checkpoints", trainer.run_id, "--json"))["data"][0]["step"] == 40
        assert anneal("runs", "resume", trainer.run_id, code=1).stderr.startswith("anneal: ")
        anneal("runs", "stop", trainer.run_id)
        trainer.cancel()
        resume = ["runs", "resume", trainer.run_id, "--checkpoint", checkpoint_id, "--json"]
        assert "--set config.epochs" in anneal(*resume, "--set", "epochs=5", code=1).stderr
        child = told(anneal(*resume, "--set", "config.epochs=5"))
        assert (child["parent_run_id"], child["resume_checkpoint_id"]) == (trainer.run_id, checkpoint_id)
        assert child["config"]["epochs"] == 5

    def test_a_model_is_downloaded(self, anneal: Anneal, trainer: Trainer, shared_api: ApiServer) -> None:
        trainer.write_output(Storage(shared_api.settings))
        trainer.complete()
        assert anneal("runs", "download", trainer.run_id).stdout.strip() == trainer.run_id
        assert (Path(trainer.run_id) / "adapter_config.json").read_text() == "{}"
        files = told(anneal("runs", "download", trainer.run_id, "-o", "here", "--path", "*.json", "--json"))
        assert files == {"folder": "here", "files": ["adapter_config.json"]}


class TestOtherCalls:
    """By what goes over the wire."""

    @pytest.fixture
    def anneal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Anneal]:
        Failing.answers, Failing.asked, Failing.bodies = [], [], []
        monkeypatch.chdir(tmp_path)
        with serving(Failing) as url:
            there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": url, "ANNEAL_API_KEY": "key"}
            yield lambda *arguments: CliRunner().invoke(cli, list(arguments), env=there)

    def test_deleting_says_so(self, anneal: Anneal) -> None:
        for noun, id in (("runs", "run_1"), ("experiments", "exp_1"), ("datasets", "ds_1")):
            Failing.answers = [(204, {}, b""), (409, {}, b'{"code": "run_is_live", "detail": "It is running."}')]
            assert anneal(noun, "delete", id).stderr == f"{id} is deleted.\n"
            refused = anneal(noun, "delete", id)
            assert (refused.exit_code, refused.stderr) == (1, "anneal: It is running.\n")
            assert Failing.asked[-1][:2] == ("DELETE", f"/v1/{noun}/{id}")
            Failing.answers = [(204, {}, b"")]
            assert told(anneal(noun, "delete", id, "--json")) == {"id": id, "deleted": True}

    def test_editing_changes_what_is_named(self, anneal: Anneal) -> None:
        for noun, id, view in (("runs", "run_1", RunRead), ("experiments", "exp_1", ExperimentView)):
            answer = view.model_config["json_schema_extra"]["example"]  # type: ignore[index,call-overload]
            Failing.answers = [(200, {}, json.dumps(answer).encode())]
            edited = anneal(noun, "edit", id, "--name", "x", "--tag", "a", "--tag", "b", "--json")
            assert told(edited)["name"] == "docstrings"
            assert json.loads(Failing.bodies[-1]) == {"name": "x", "tags": ["a", "b"]}

    def test_content_is_printed_or_written_whole(self, anneal: Anneal) -> None:
        Failing.answers = [(200, {}, ROWS.encode()), (200, {}, ROWS.encode()), (200, {"Content-Length": "9999"}, b"{")]
        assert anneal("datasets", "content", "ds_1").stdout == ROWS
        assert anneal("datasets", "content", "ds_1", "-o", "rows.jsonl").exit_code == 0
        assert anneal("datasets", "content", "ds_1", "-o", "rows.jsonl").exit_code == 1
        assert Path("rows.jsonl").read_text() == ROWS
        assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


def end(trainer: Trainer, how: str) -> None:
    """End the run as `how` says."""
    {"completed": trainer.complete, "failed": trainer.fail, "cancelled": trainer.cancel}[how]()


ENDS = pytest.mark.parametrize(("how", "code"), [("completed", 0), ("failed", 3), ("cancelled", 4)])


class TestFollowing:
    @ENDS
    def test_watching_ends_as_the_run_does(self, anneal: Anneal, trainer: Trainer, how: str, code: int) -> None:
        if how == "cancelled":
            anneal("runs", "stop", trainer.run_id)
        ending = threading.Timer(0.3, lambda: end(trainer, how))
        ending.start()
        watched = anneal("runs", "watch", trainer.run_id, code=code)
        ending.join()
        assert f"counting: {how} at step" in watched.stdout.splitlines()[-2]
        assert (
            anneal("runs", "watch", trainer.run_id, code=code).stdout.splitlines()[-2:]
            == watched.stdout.splitlines()[-2:]
        )
        assert anneal("runs", "logs", "-f", trainer.run_id, code=code).stdout == ""
        if how == "failed":
            assert "internal: it broke" in watched.stdout

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

    def test_a_run_is_made_and_watched_in_one(self, anneal: Anneal, shared_api: ApiServer, run_file: Path) -> None:
        def stop() -> None:
            with client.Anneal(shared_api.url, shared_api.key) as there:
                run = eventually(lambda: next(there.runs.list(tag="watched"), None))
                there.runs.stop(run.id)

        stopping = threading.Thread(target=stop)
        stopping.start()
        anneal("runs", "create", "-f", str(run_file), "--set", "tags=[watched]", "--watch", code=4)
        stopping.join()

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
                [sys.executable, "-P", "-m", "app.cli", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
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
        eventually(lambda: shows("the run goes on"))
        assert process.wait(20) == 130
        assert b"Traceback" not in seen
        assert told(anneal("runs", "show", trainer.run_id, "--json"))["status"] == "running"

    def test_a_list_is_a_table(self, start: Any, trainer: Trainer) -> None:
        process, terminal = start("runs", "list", "--limit", "1")
        shown = b""
        while b"counting" not in shown:
            shown += os.read(terminal, 65536)
        assert trainer.run_id.encode() in shown and process.wait(20) == 0
