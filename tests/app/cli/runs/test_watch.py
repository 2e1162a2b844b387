"""Commands that follow runs: `anneal runs watch`, `logs` and `events`."""

import gzip
import json
import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from anneal.client import client
from anneal.contracts.events import (
    ConfigEvent,
    DeviceEvent,
    EvalEvent,
    MetricEvent,
    PendingEvent,
    RepairEvent,
    SampleEvent,
    StatusEvent,
)
from app.cli.runs.state_text import status_text
from app.cli.runs.watch import WatchState, draw_curve, step_ticks
from app.infra.storage import Storage
from tests.conftest import Anneal
from tests.factories import Trainer, mark_run
from tests.server import ApiServer
from tests.waiting import eventually


def end(trainer: Trainer, how: str) -> None:
    """End the run as `how` says."""
    {"completed": trainer.complete, "failed": trainer.fail, "cancelled": trainer.cancel}[how]()


ENDS = pytest.mark.parametrize(("how", "code"), [("completed", 0), ("failed", 3), ("cancelled", 4)])


@ENDS
def test_watching_ends_as_the_run_does(anneal: Anneal, trainer: Trainer, how: str, code: int) -> None:
    if how == "cancelled":
        anneal("runs", "stop", trainer.run_id)
    trainer.events("metric", {"step": 40, "loss": -1e-9, "extra": {"reward": 0.25}})
    ending = threading.Timer(0.3, lambda: end(trainer, how))
    ending.start()
    watched = anneal("runs", "watch", trainer.run_id, code=code)
    ending.join()
    last = watched.stdout.splitlines()[-2]
    assert f"counting: {status_text(how)} at step" in last and last.endswith(", reward 0.2500")
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
def test_watch_shows_loss_or_reward_by_method(learns_from_rewards: bool, shown: str, line: str) -> None:
    began = datetime(2026, 1, 2, tzinfo=UTC)
    seen = WatchState("run_1", "counting", "running", 0, 10, learns_from_rewards, started=began)
    measured = {"eval_loss": 2.0, "eval_reward": 0.75, "eval_seconds": 3.0, "eval_samples_per_second": 9.0}
    metric = MetricEvent(
        type="metric", run_id="run_1", seq=1, step=5, loss=0.5, learning_rate=1e-3,
        extra={"reward": 0.25, "tokens_per_second": 12345.6}, ts=began + timedelta(seconds=3725),
    )  # fmt: skip
    assert seen.apply_event(metric) is None and seen.curve == {5: 0.25 if learns_from_rewards else 0.5}
    assert seen.progress_line(metric) == f" 50%|#####     | 5/10 [1:02:05]  {line}  tokens_per_second 12346"
    evaluated = seen.apply_event(EvalEvent(type="eval", run_id="run_1", seq=2, step=5, metrics=measured))
    assert evaluated == "step 5  eval_loss 2  eval_reward 0.75"
    assert seen.figures == shown
    text = {"type": "sample", "run_id": "run_1", "seq": 3, "step": 5, "prompt": "Hi", "completion": 'a "b"\n'}
    assert seen.apply_event(SampleEvent(**text)) == r'step 5  sample "Hi" -> "a \"b\"\n"'
    assert seen.apply_event(SampleEvent(**text, rewards={"length": 1.0})) is None


def test_a_repair_is_a_line() -> None:
    seen = WatchState("run_1", "counting", "running", 0, 10)
    reason = "out of memory: half the micro-batch size"
    repair = RepairEvent(type="repair", run_id="run_1", seq=1, kind="out_of_memory", reason=reason)
    assert seen.apply_event(repair) == f"repair: {reason}"


def test_watching_starts_with_the_name_and_the_state_in_the_words_of_the_dashboard() -> None:
    waiting = WatchState("run_1", "counting", "pending", 0, None)
    assert waiting.first_line == "run_1 counting: pending"
    ended = WatchState("run_1", "counting", "cancelled", 5, 10)
    assert ended.first_line == "run_1 counting: stopped, step 5 of 10"
    event = StatusEvent(type="status", to="initializing", run_id="run_1", seq=1)
    assert waiting.apply_event(event) == "starting"


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        (1, 30, [10, 20, 30]), (1, 3, [1, 2, 3]), (7, 8, [7, 8]), (0, 1000, [0, 500, 1000]),
        (101, 199, [120, 140, 160, 180]), (5, 40_000, [10_000, 20_000, 30_000, 40_000]),
    ],
)  # fmt: skip
def test_ticks_of_a_plot_are_round_steps(first: int, last: int, ticks: list[int]) -> None:
    assert step_ticks(first, last, 4) == ticks
    assert all(re.fullmatch(r"[\d,\s]+", draw_curve({first: 2.0, last: 1.0}, 70, 12).splitlines()[-1]) for _ in ticks)


def test_a_resume_that_is_not_exact_is_a_line() -> None:
    seen = WatchState("run_1", "counting", "starting", 3, None)
    about = {"type": "config", "run_id": "run_1", "seq": 1}
    reasons = ["The number of devices was 2 at the checkpoint and is 1 now."]
    inexact = ConfigEvent(facts={"total_steps": 9, "fidelity": "approximate", "fidelity_reasons": reasons}, **about)
    assert seen.apply_event(inexact) == f"resume approximate: {reasons[0]}" and seen.total == 9
    assert seen.apply_event(ConfigEvent(facts={"fidelity": "exact", "fidelity_reasons": []}, **about)) is None


def test_why_a_run_waits_is_a_line_and_its_gpu_is_in_the_status_line() -> None:
    seen = WatchState("run_1", "counting", "pending", 0, 10)
    about = {"run_id": "run_1", "seq": 1}
    assert seen.apply_event(PendingEvent(type="pending", code="no_worker", message="Start one.", **about)) == (
        "waits: Start one."
    )
    assert seen.apply_event(PendingEvent(type="pending", code="queued", message="One is online.", **about)) == (
        "queued: One is online."
    )
    device = DeviceEvent(
        type="device", index=0, uid="GPU-1", seconds=10, utilization_percent=97.4, memory_mb=61_204,
        temperature_celsius=63, **about,
    )  # fmt: skip
    assert seen.apply_event(device) is None and seen.figures == "GPU 97% 59.8 GiB 63 °C"
    seen.apply_event(StatusEvent(type="status", to="completed", **about))
    assert seen.figures == ""


def test_a_run_that_waits_says_why_when_watching_starts(anneal: Anneal, trainer: Trainer, engine: Engine) -> None:
    trainer.complete()
    reason = {"code": "no_device_fits", "message": "Start a worker with a larger device."}
    mark_run(engine, trainer.run_id, pending_reason=reason)
    watched = anneal("runs", "watch", trainer.run_id).stdout.splitlines()
    assert watched[0] == f"{trainer.run_id} counting: completed"
    assert watched[1] == "waits: Start a worker with a larger device."


def test_every_metric_is_a_line_before_the_end(anneal: Anneal, trainer: Trainer, shared_api: ApiServer) -> None:
    def is_watched() -> bool:
        return 'anneal_streams{state="live"} 1.0' in shared_api.client.get("/metrics").text

    def finish() -> None:
        try:
            eventually(is_watched)
            trainer.events("skipped_rows", {"data": "training", "count": 2, "total": 9, "reason": "2 of 9 rows …"})
            for step in (28, 29, 30):
                trainer.metric(step, loss=step / 100)
        finally:
            trainer.complete()

    ending = threading.Thread(target=finish)
    ending.start()
    lines = anneal("runs", "watch", trainer.run_id).stdout.splitlines()
    ending.join()
    assert "warning: 2 of 9 rows …" in lines
    shown = [line for line in lines if "/100 [" in line]
    assert [line.partition(" [")[0] for line in shown] == [f" {n}%|###       | {n}/100" for n in (28, 29, 30)]
    assert shown[-1].endswith("  loss 0.3") and lines[lines.index(shown[-1]) + 1].startswith("completed")


def test_json_is_a_line_for_each_event(anneal: Anneal, trainer: Trainer) -> None:
    trainer.log("first", "second")
    trainer.metric(10, loss=2.5)
    trainer.complete()
    events = [json.loads(line) for line in anneal("runs", "watch", trainer.run_id, "--json").stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["from"] is None and events[-1]["type"] == "end"
    lines = anneal("runs", "logs", trainer.run_id, "--json", "--tail", "1").stdout.splitlines()
    assert [json.loads(line).get("line") for line in lines] == ["second", None]
    assert anneal("runs", "logs", trainer.run_id, "--grep", "fir").stdout == "first\n"


def test_complete_log_is_printed_and_searched(anneal: Anneal, trainer: Trainer, shared_api: ApiServer) -> None:
    folder = Storage(shared_api.settings).attempt_dir(trainer.run_id, 1)
    folder.mkdir(parents=True)
    lines = [f"2026-01-02T03:04:05.678Z stdout info line {number}" for number in range(3)]
    (folder / "log.txt.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    assert anneal("runs", "logs", "--all", trainer.run_id).stdout.splitlines() == lines
    matches = anneal("runs", "logs", "--all", trainer.run_id, "--attempt", "1", "--grep", "line 2").stdout
    assert matches.splitlines() == lines[2:]
    assert "--attempt selects lines" in anneal("runs", "logs", trainer.run_id, "--attempt", "1", code=2).stderr
    assert "omit --follow" in anneal("runs", "logs", "--all", "-f", trainer.run_id, code=2).stderr
    assert "has no attempt 2" in anneal("runs", "logs", "--all", "--attempt", "2", trainer.run_id, code=1).stderr


def test_events_of_all_runs_are_printed_with_their_cursors(anneal: Anneal, trainer: Trainer) -> None:
    trainer.events("progress", {"phase": "evaluating", "done": 1, "total": 2, "message": None})
    trainer.complete()

    def printed(*arguments: str) -> list[str]:
        return anneal("runs", "events", "--no-follow", *arguments).stdout.splitlines()

    shown = eventually(
        lambda: (lines := [it for it in printed() if trainer.run_id in it]) and len(lines) == 6 and lines
    )
    assert [line.split("  ")[-1] for line in shown[-3:]] == [
        "counting: evaluating 1 of 2",
        "counting: completed: all steps done",
        "counting: ended: completed",
    ]
    ends = [json.loads(line) for line in printed("--types", "end", "--json")]
    assert ends[-1]["run_id"] == trainer.run_id
    assert printed("--after", str(ends[-1]["cursor"])) == []
    misled = anneal("runs", "events", "my run", "--no-follow", code=2).stderr
    assert "`anneal runs watch 'my run'`" in misled and "`anneal runs logs 'my run'`" in misled


def test_a_run_is_made_and_watched_in_one(anneal: Anneal, shared_api: ApiServer, run_file: Path) -> None:
    def stop() -> None:
        with client.Anneal(shared_api.url, shared_api.key) as there:
            run = eventually(lambda: next(there.runs.list(tag="watched"), None))
            there.runs.stop(run.id)

    stopping = threading.Thread(target=stop)
    stopping.start()
    anneal("runs", "create", "-f", str(run_file), "--set", "tags=[watched]", "--watch", code=4)
    stopping.join()
