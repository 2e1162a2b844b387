"""The duration of a run is estimated from the speed of earlier runs."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, insert

from app.runs.creating.estimates import history
from app.runs.queue.durations import similarity_key
from app.tables.runs import AttemptTimings
from tests.app.runs.creating.estimates.estimating import QWEN, estimated
from tests.factories import Trainer, make_dataset, make_model, make_run
from tests.server import ApiServer


def trained(engine: Engine, run: dict[str, Any], device: str, rate: float, length: int = 25) -> None:
    """The run has trained, at so many tokens a second on texts of that length, and is over."""
    trainer = Trainer(engine, run["id"], devices=run["resources"]["devices"])
    trainer.begin()
    facts = {"device": device, "flops_per_token_hardware": 1e9, "flops_sequence_length": length}
    trainer.events("config", {"facts": facts, "effective": run["config"]})
    trainer.metric(1, loss=1.0, extra={"tokens_per_second": rate})
    pace = {"similarity_key": similarity_key("celery", run["config"]), "measured_at": datetime.now(UTC), "timings": {}}
    with engine.begin() as connection:
        connection.execute(insert(AttemptTimings).values(run_id=run["id"], attempt=trainer.attempt, **pace))


def test_time_comes_from_runs_that_were_there_before(
    api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_LATEST", 3)
    dataset = make_dataset(engine)
    config = {"base_model": "qwen", "max_steps": 100}
    trained(engine, make_run(api.client, dataset, backend="celery", config=config), "cpu", 50.0)
    # However many others have trained since.
    for at in range(4):
        other = {**config, "base_model": f"other-{at}"}
        (make_model(api.settings, f"other-{at}") / "config.json").write_text(json.dumps(QWEN))
        trained(engine, make_run(api.client, dataset, backend="celery", config=other), "cpu", 10.0)
    same = estimated(api, dataset, max_steps=100)
    assert same["confidence"]["seconds"] == "history"
    assert same["seconds"] == pytest.approx(same["tokens"] / 50, rel=0.01)
    other = estimated(api, dataset, max_steps=100, method="lora")
    assert other["confidence"]["seconds"] == "comparable"
    assert other["seconds"] == pytest.approx(other["flops"] / 10e9, rel=0.01)


_SCALED = "assumed to be inversely proportional to the number of devices"


@pytest.mark.parametrize("sequence_parallel", [1, 2])
@pytest.mark.parametrize("method", ["sft", "full"], ids=["history", "comparable"])
def test_the_speed_of_earlier_runs_counts_for_each_of_their_devices(
    api: ApiServer, engine: Engine, method: str, sequence_parallel: int
) -> None:
    dataset, config = make_dataset(engine), {"base_model": "qwen", "method": "sft", "max_steps": 100}
    on_two = {"devices": 2, "sequence_parallel": sequence_parallel}
    trained(engine, make_run(api.client, dataset, backend="celery", config=config, resources=on_two), "cpu", 50.0)
    with_one, with_two = (
        estimated(api, dataset, {"devices": devices}, **{**config, "method": method}) for devices in (1, 2)
    )
    is_same = method == "sft"
    assert {found["confidence"]["seconds"] for found in (with_one, with_two)} == {
        "history" if is_same else "comparable"
    }
    assert with_one["seconds"] == pytest.approx(
        with_one["tokens"] / 25 if is_same else with_one["flops"] / 25e9, rel=0.01
    )
    assert with_two["seconds"] == pytest.approx(
        with_two["tokens"] / 50 if is_same else with_two["flops"] / 50e9, rel=0.01
    )
    assert [_SCALED in " ".join(found["assumptions"]) for found in (with_one, with_two)] == [True, False]


def test_runs_on_as_many_devices_give_the_speed_where_there_are_any(api: ApiServer, engine: Engine) -> None:
    dataset, config = make_dataset(engine), {"base_model": "qwen", "method": "sft", "max_steps": 100}
    for devices, rate in ((2, 80.0), (1, 50.0), (1, 50.0)):
        run = make_run(api.client, dataset, backend="celery", config=config, resources={"devices": devices})
        trained(engine, run, "cpu", rate)
    estimate = estimated(api, dataset, {"devices": 2}, **config)
    assert estimate["seconds"] == pytest.approx(estimate["tokens"] / 80, rel=0.01)
    assert any(
        "1 earlier run of the same" in one and "40 tokens per second per" in one for one in estimate["assumptions"]
    )


@pytest.mark.parametrize(
    ("then", "now", "length", "source"),
    [
        ({"max_steps": 5}, {}, 13, "history"),
        ({}, {"lora_r": 64}, 50, "history"),
        ({"max_seq_length": 512}, {}, 51, "comparable"),
        ({}, {}, 12, "comparable"),
        ({"lora_r": None}, {}, 25, "comparable"),
        ({}, {"load_in_4bit": False}, 25, "comparable"),
        ({"packing": True, "max_seq_length": 512}, {"packing": True, "max_seq_length": 1024}, 10, "history"),
        ({"packing": True, "max_seq_length": 512}, {"packing": True, "max_seq_length": 2048}, 25, "comparable"),
    ],
)
def test_runs_of_the_same_model_with_other_work_are_only_comparable(
    api: ApiServer, engine: Engine, then: dict[str, Any], now: dict[str, Any], length: int, source: str
) -> None:
    dataset = make_dataset(engine)  # by its bytes, of 25 tokens a row
    config = {"base_model": "qwen", "method": "sft", **then}
    trained(engine, make_run(api.client, dataset, backend="celery", config=config), "cpu", 50.0, length)
    estimate = estimated(api, dataset, method="sft", max_steps=100, **now)
    assert estimate["confidence"]["seconds"] == source


@pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("facts", "effective", "rate"),
    [
        pytest.param(
            {"flops_sequence_length": "64", "flops_per_token_hardware": "x"}, {}, 50.0, marks=pytest.mark.full
        ),
        ({"flops_sequence_length": [], "flops_per_token_hardware": True}, {"lora_r": [1], "packing": {}}, 50.0),
        ({"flops_per_token_hardware": 1e300}, {}, 1e300),
        pytest.param({"flops_per_token_hardware": 1e-300}, {}, 1e-10, marks=pytest.mark.full),
        ({}, {"packing": True, "max_seq_length": "512"}, 50.0),
        ({}, {}, -5.0),
        pytest.param({}, {}, 1e-320, marks=pytest.mark.full),
        ({}, {}, 1e308),
        pytest.param([1], [2], 50.0, marks=pytest.mark.full),
        ("facts", None, 50.0),
    ],
)
def test_what_a_trainer_has_forged_changes_no_estimate_of_others(
    api: ApiServer, engine: Engine, facts: Any, effective: Any, rate: float, count: int
) -> None:
    """Stored as by an earlier version, which did not check facts; metrics are stored as they are reported."""
    dataset, config = make_dataset(engine), {"base_model": "qwen", "method": "sft", "max_steps": 100}
    for _ in range(count):
        run = make_run(api.client, dataset, backend="celery", config=config)
        trainer = Trainer(engine, run["id"]).begin()
        if isinstance(facts, dict):
            facts = {"device": "cpu", "flops_per_token_hardware": 1e9, "flops_sequence_length": 25, **facts}
        if isinstance(effective, dict):
            effective = run["config"] | effective
        trainer.events("config", {"facts": facts, "effective": effective})
        trainer.metric(1, loss=1.0, extra={"tokens_per_second": rate})
        pace = {"similarity_key": similarity_key("celery", run["config"]), "measured_at": datetime.now(UTC)}
        with engine.begin() as connection:
            connection.execute(insert(AttemptTimings).values(run_id=run["id"], attempt=1, timings={}, **pace))
    for method in ("sft", "full"):
        estimate = estimated(api, dataset, max_steps=100, method=method)
        assert 0 < estimate["seconds"] < 1e9
        if rate != 50.0:
            assert estimate["confidence"]["seconds"] == "assumed"
    assert api.client.get(f"/v1/runs/{run['id']}").status_code == 200


def test_an_assumed_time_is_not_below_the_overhead_of_its_steps() -> None:
    bounded = history.Speed(0.1, "assumed", ("an assumed speed",)).bounded(2000)
    assert (bounded.seconds, bounded.source) == (10.0, "assumed")
    assert bounded.sentences[0] == "an assumed speed" and "assumed to take 5 ms" in bounded.sentences[1]
    for speed in (history.Speed(60.0, "assumed", ()), history.Speed(0.1, "comparable", ())):
        assert speed.bounded(2000) == speed
    assert history.Speed(0.1, "assumed", ()).bounded(None).seconds == 0.1
