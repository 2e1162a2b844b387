"""`report_to`: what a run tells goes to its trackers too, point for point, and no tracker ever gets in its way."""

import json
import math
import os
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest

from anneal.contracts.attempt.job import JobSpec, TrackerServers
from anneal.contracts.training_config.fields import TrainingConfig
from tests.http_server import serving
from tests.jobs import make_spec
from tests.waiting import eventually
from tests.worker.training.tiny import Forks, Outcome, make_job, run_cold
from tests.worker.training.tracking.mlflow_server import mlflow_server
from worker.training.failures import TrainingFailure
from worker.training.tracking import clients, trackers
from worker.training.tracking.clients import Wandb
from worker.wire.reporter import Reporter

CONFIG: dict[str, Any] = {
    "method": "lora", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1, "logging_steps": 1,
    "save_steps": 2, "eval_split": 0.2, "eval_steps": 2, "optim": "adamw_torch",
}  # fmt: skip
KEY = "key-of-ada-0123456789-0123456789-abcdefgh"
Points = set[tuple[str, int, float]]


@pytest.fixture(scope="module")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


def reported(outcome: Outcome, above: int = 0) -> Points:
    """What a run told of steps above this one, by the names of its events."""
    points: dict[str, Any] = {}
    for record in outcome.of("metric"):
        plain = {name: record[name] for name in record if name not in ("type", "ts", "step", "extra", "total_steps")}
        plain |= {f"extra.{name}": value for name, value in record["extra"].items()}
        points |= {(name, record["step"]): value for name, value in plain.items()}
    for record in outcome.of("eval"):
        points |= {(name, record["step"]): value for name, value in record["metrics"].items()}
    return {(name, step, value) for (name, step), value in points.items() if value is not None and step > above}


def opening(folder: Path, tracker: str) -> tuple[JobSpec, TrainingConfig, Reporter]:
    """What `trackers.opened` takes, for a run with this tracker."""
    config = TrainingConfig.model_validate({"base_model": "tiny", "report_to": [tracker]})
    return make_spec(folder), config, Reporter(None)


def completed(outcome: Outcome) -> Outcome:
    assert outcome.result["outcome"] == "completed", (outcome.result, outcome.stderr[-3000:])
    assert not [record for record in outcome.of("message") if record["level"] == "warning" and "tracker" in str(record)]
    return outcome


def tensorboard_points(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return [(tag, one.step, one.value) for tag in reader.Tags()["scalars"] for one in reader.Scalars(tag)]


def same_in_32_bits(actual: list[tuple[str, int, float]], expected: Points) -> None:
    """TensorBoard keeps numbers in 32 bits."""
    assert len(actual) == len(expected)
    expected_values = {(name, step): value for name, step, value in expected}
    for name, step, value in actual:
        assert math.isclose(value, expected_values[name, step], rel_tol=1e-6, abs_tol=1e-30), (name, step)


def tensorboard_histograms(folder: Path) -> set[tuple[str, int, int]]:
    """Name, step and count of the histograms in the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    accumulator.Reload()
    return {
        (name, one.step, int(sum(one.histogram_value.bucket)))
        for name in accumulator.Tags()["histograms"] for one in accumulator.Histograms(name)
    }  # fmt: skip


@pytest.mark.full
class TestTensorBoard:
    def test_the_output_holds_event_files_with_every_point_and_a_resumed_attempt_the_whole_curve_once(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = {**CONFIG, "report_to": ["tensorboard"], "extra": {"distributions_steps": 1}}
        first = completed(forks.run(make_job(tmp_path, tiny_model, chats, max_steps=6, **config)))
        points = reported(first)
        assert {"loss", "learning_rate", "grad_norm", "extra.tokens_per_second", "eval_loss"} <= {p[0] for p in points}
        same_in_32_bits(tensorboard_points(first.output / "tensorboard"), points)

        job = make_job(tmp_path, tiny_model, chats, attempt=2, resume_from=first.checkpoint(4), max_steps=6, **config)
        second = completed(forks.run(job))
        earlier = {point for point in points if point[1] <= 4}
        same_in_32_bits(tensorboard_points(second.output / "tensorboard"), earlier | reported(second))
        histograms = {
            (f"{group}/{of}", one["step"], part["count"])
            for one in first.of("distribution") for group, parts in one["groups"].items() for of, part in parts.items()
        }  # fmt: skip
        assert {step for _, step, _ in histograms} == set(range(1, 7))
        for done in (first, second):
            assert tensorboard_histograms(done.output / "tensorboard") == histograms
            files = [path for path in done.output.rglob("*") if path.is_file()]
            assert [path for path in files if str(tiny_model).encode() in path.read_bytes()] == []


@pytest.mark.full
class TestMlflow:
    def job(self, folder: Path, model: Path, data: Path, url: str, **more: Any) -> dict[str, Any]:
        job = make_job(folder, model, data, max_steps=6, **{**CONFIG, "report_to": ["mlflow"]}, **more)
        return {**job, "trackers": {"mlflow_tracking_uri": url}}

    def stored_run(self, url: str, run_id: str) -> tuple[Any, Counter[tuple[str, int, float]]]:
        """The one run of that id on the server, and every point of it with how often it is there."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=url)
        experiment = client.get_experiment_by_name("anneal")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id], f"tags.`anneal.run_id` = '{run_id}'")
        histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
        return run, Counter((key, one.step, one.value) for key, history in histories.items() for one in history)

    def test_a_run_is_there_with_its_points_parameters_tags_and_end(
        self, mlflow_url: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        done = completed(forks.run(self.job(tmp_path, tiny_model, chats, mlflow_url, run_id="run_one")))
        run, points = self.stored_run(mlflow_url, "run_one")
        assert points == Counter(reported(done))
        assert run.data.params["learning_rate"] == "0.0002" and run.data.params["dpo.beta"] == "0.1"
        assert run.data.params["facts.total_steps"] == "6"
        tags = {name.removeprefix("anneal."): value for name, value in run.data.tags.items() if "anneal." in name}
        assert tags == {"run_id": "run_one", "attempt": "1", "method": "lora", "status": "completed"}
        assert run.info.status == "FINISHED"

    def test_a_later_attempt_goes_on_with_the_same_run_and_doubles_no_point(
        self, mlflow_url: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        first = completed(forks.run(self.job(tmp_path, tiny_model, chats, mlflow_url, run_id="run_two")))
        resume = first.checkpoint(4)
        again = self.job(tmp_path, tiny_model, chats, mlflow_url, run_id="run_two", attempt=2, resume_from=resume)
        second = completed(forks.run(again))
        run, points = self.stored_run(mlflow_url, "run_two")
        assert set(points.values()) == {1}
        assert set(points) == reported(first) | reported(second)
        exact = {point for point in points if point[0] in ("loss", "eval_loss", "learning_rate", "grad_norm")}
        assert len(exact) == 3 * 6 + 3, "a resumed step has the values that it had, and is there once"
        assert (run.data.tags["anneal.attempt"], run.info.status) == ("2", "FINISHED")

    def test_a_run_that_resumes_another_has_one_of_its_own(
        self, mlflow_url: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        parent = completed(forks.run(self.job(tmp_path / "parent", tiny_model, chats, mlflow_url, run_id="run_three")))
        resume = parent.checkpoint(4)
        job = self.job(tmp_path / "child", tiny_model, chats, mlflow_url, run_id="run_four", resume_from=resume)
        child = completed(forks.run(job))
        assert self.stored_run(mlflow_url, "run_three")[1] == Counter(reported(parent))
        assert self.stored_run(mlflow_url, "run_four")[1] == Counter(reported(child))

    def test_a_run_that_fails_is_failed_there(
        self, mlflow_url: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = self.job(tmp_path, tiny_model, chats, mlflow_url, run_id="run_five")
        job["dataset"]["path"] = str(tmp_path / "gone.jsonl")
        done = forks.run(job)
        assert done.result["error"]["code"] == "bad_data"
        run, _ = self.stored_run(mlflow_url, "run_five")
        assert (run.info.status, run.data.tags["anneal.status"]) == ("FAILED", "failed")


def test_weights_and_biases_without_a_key_name_the_command_that_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracker = Wandb(make_spec(tmp_path), "lora")
    with pytest.raises(LookupError, match="`anneal secrets set wandb_api_key`"):
        tracker.connect()


@pytest.mark.full
class TestWandb:
    def test_its_files_hold_every_point_and_the_key_is_in_none(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = {**CONFIG, "report_to": ["wandb"], "extra": {"distributions_steps": 3}}
        config |= {
            "wandb_project": "summaries",
            "wandb_entity": "team-a",
            "wandb_name": "rank 8",
            "wandb_group": "ranks",
        }
        job = make_job(tmp_path, tiny_model, chats, run_id="run_w", max_steps=6, **config)
        variables = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}  # offline it writes files and asks nobody
        done = completed(forks.run(job, variables=variables))
        (file,) = (done.folder / "wandb").glob("offline-run-*/run-run_w.wandb")
        records = wandb_records(file)
        rows = [row for record in records if record.WhichOneof("record_type") == "history" for row in [as_row(record)]]
        points = {
            (name, int(row["_step"]), value)
            for row in rows
            for name, value in row.items()
            if not name.startswith("_") and name != "step" and isinstance(value, int | float)
        }
        assert points == reported(done)
        histograms = {
            (name.removesuffix(".values"), int(row["_step"]), sum(value))
            for row in rows
            for name, value in row.items()
            if name.endswith(".values")
        }
        assert histograms == {
            (f"{group}/{of}", one["step"], part["count"])
            for one in done.of("distribution") for group, parts in one["groups"].items() for of, part in parts.items()
        } != set()  # fmt: skip
        (run, *_) = (record.run for record in records if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.project, run.entity) == ("run_w", "summaries", "team-a")
        assert (run.display_name, run.run_group, list(run.tags)) == ("rank 8", "ranks", ["lora"])
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]

    def test_the_key_is_in_no_environment_that_the_kernel_shows(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        opened = trackers.open_trackers(*opening(tmp_path, "wandb"))
        opened.add_record({"step": 1, "loss": 1.0})
        service = eventually(lambda: [one for one in psutil.Process().children() if one.name().startswith("wandb")])
        assert not [one for one in service if KEY in Path(f"/proc/{one.pid}/environ").read_text()]
        assert "WANDB_API_KEY" not in os.environ
        opened.close("completed")

    @pytest.mark.full
    @pytest.mark.parametrize("how", ["away", "silent"])
    def test_run_completes_and_its_process_ends_without_a_reachable_tracker(
        self, how: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        # What never answers is what could keep a process from its end, so that one ends as interpreters do.
        run = run_cold if how == "silent" else lambda job, **variables: forks.run(job, variables=variables)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            if how == "silent":
                listening.listen()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            job = make_job(tmp_path, tiny_model, chats, max_steps=3, **CONFIG, report_to=["wandb"])
            done = run(job, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        assert (done.code, done.result["outcome"]) == (0, "completed"), done.stderr
        assert "points were not sent" in done.of("message")[-1]["line"], done.of("message")
        assert done.records[-1]["type"] == "result"


def wandb_records(file: Path) -> list[Any]:
    """The records of a file of W&B's: a log as LevelDB has it, in blocks of 32 KiB, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of it, or the last part
            records.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return records


def as_row(record: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


class Refuses(BaseHTTPRequestHandler):
    """Says no to everybody."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


def seconds_of_steps(outcome: Outcome) -> float:
    """Seconds from the first step to the last."""
    steps = [record["ts"] for record in outcome.of("metric")]
    return float(steps[-1] - steps[0])


class TestTrouble:
    @pytest.mark.full
    @pytest.mark.parametrize("how", ["away", "silent", "refuses"])
    def test_a_tracker_that_does_not_take_points_costs_a_warning_and_no_more(
        self, how: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        request.addfinalizer(listening.close)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"  # bound, and nobody listens
        if how == "silent":
            listening.listen()  # takes connections, and never answers
        if how == "refuses":
            server = serving(Refuses)
            url = server.__enter__()
            request.addfinalizer(lambda: server.__exit__(None, None, None))
        alone = completed(forks.run(make_job(tmp_path / "alone", tiny_model, chats, max_steps=6, **CONFIG)))
        job = make_job(tmp_path, tiny_model, chats, max_steps=6, **CONFIG, report_to=["mlflow", "tensorboard"])
        done = forks.run({**job, "trackers": {"mlflow_tracking_uri": url}})
        assert done.result["outcome"] == "completed"
        warnings = [record["line"] for record in done.of("message") if "mlflow" in record["line"]]
        assert ["cannot be updated for this run" in line for line in warnings] == [True, False]
        assert "9 points were not sent" in warnings[-1]
        # A step that waits for a call to a silent server takes 10 s, its time limit.
        assert seconds_of_steps(done) < max(10, 5 * seconds_of_steps(alone)), "training went on meanwhile"
        same_in_32_bits(tensorboard_points(done.output / "tensorboard"), reported(done))

    def test_without_its_package_a_run_fails_before_training_and_names_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(TrainingFailure, match=r"wandb.*pip install .* '\.\[trackers\]'") as refused:
            trackers.open_trackers(*opening(tmp_path, "wandb"))
        assert refused.value.code == "config_error"

    @pytest.mark.full
    def test_a_worker_that_knows_no_server_says_what_its_operator_sets(self, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailure, match="ANNEAL_MLFLOW_TRACKING_URI"):
            trackers.open_trackers(*opening(tmp_path, "mlflow"))

    @pytest.mark.full
    def test_silent_tracker_delays_neither_reports_nor_the_end_beyond_its_limit(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No clock decides: the first call outlasts everything else, which would never end if it waited for that."""
        monkeypatch.setattr(clients, "_CALL_TIMEOUT_SECONDS", 3600)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3600")  # the client sets it too; undone after the test
        monkeypatch.setitem(trackers._FLUSH_SECONDS, "cancelled", 0.2)
        before = threading.active_count()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(60)
            job, config, report = opening(tmp_path, "mlflow")
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            opened = trackers.open_trackers(
                job.model_copy(update={"trackers": TrackerServers(mlflow_tracking_uri=url)}), config, report
            )
            for step in range(12_000):
                opened.add_record({"step": step, "loss": 1.0})
            opened.close("cancelled")
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(4).startswith(b"GET "), "the first call, which still waits for its answer"
                assert "12000 points were not sent" in capfd.readouterr().out
                assert threading.active_count() <= before + 1
        eventually(lambda: threading.active_count() <= before, what="the thread ends once its call has failed")


@pytest.mark.full
def test_the_token_of_the_server_goes_along_with_every_call(
    tiny_model: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Notes(Refuses):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            super().do_GET()

        do_POST = do_GET

    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token-of-ada")
    with serving(Notes) as url:
        job, config, report = opening(tmp_path, "mlflow")
        opened = trackers.open_trackers(
            job.model_copy(update={"trackers": TrackerServers(mlflow_tracking_uri=url)}), config, report
        )
        opened.add_record({"step": 1, "loss": 1.0})
        opened.close("cancelled")
    assert set(seen) == {"Bearer token-of-ada"}
