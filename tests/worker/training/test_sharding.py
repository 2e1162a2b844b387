"""Promises about a run whose model is divided among two devices: it trains as replicas do, and resumes exactly."""

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.worker.training.output.outputs import weights
from tests.worker.training.test_ranks import Train, losses, make_data, make_models, make_train, rows, train  # noqa: F401
from tests.worker.training.tiny import Forks, Outcome, load_output, make_job, make_tiny_model, write_rows
from tests.worker.training.two_ranks import TwoRanks
from worker.checkpoint_files.manifest import verify
from worker.wire.rank_place import EXIT_PEER_LOST

_TOLERANCE = 1e-6
_REPLICAS, _SHARDED = {"devices": 2}, {"devices": 2, "sharded": True}
_ONE = {"devices": 1}
_FEW_STEPS = {"method": "full", "optim": "adamw_torch", "max_steps": 4, "batch_size": 2}
_SAVES: dict[str, Any] = {
    "method": "full", "optim": "adamw_torch", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2, "max_steps": 6, "save_steps": 2, "save_total_limit": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """Tiny models by their dropout, of two layers that are divided one by one."""
    return make_models(tmp_path_factory.mktemp("models"), layers=2)


@pytest.fixture(scope="module")
def divided(
    forks: Forks,
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    """A run of a divided model whose weights are all trained."""
    train_in_module = make_train(forks, two_ranks, models, tmp_path_factory.mktemp("divided"))
    return train_in_module("full", **_SHARDED, **options("full"))


def options(method: str) -> dict[str, Any]:
    """An optimizer that replicas and divided models share, and no adapter on a model with a new head."""
    if method not in ("full", "reward"):
        return {}
    return {"optim": "adamw_torch"} | ({"lora_r": None} if method == "reward" else {})


@pytest.mark.parametrize(
    "method",
    [
        "qlora",
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in ("full", "lora", "dpo", "reward", "kto", "orpo", "simpo")
        ),
    ],
)
def test_a_divided_model_trains_and_generates_as_replicas_do(train: Train, method: str) -> None:  # noqa: F811
    """Also in the last step of an epoch, which has fewer rows, and with fewer batches to evaluate on one device."""
    count = 28 if method in ("full", "lora", "qlora") else 33
    more = {**options(method), "count": count, "eval_split": 9 / count, "extra": {"eval_batch_size": 2}}
    if method != "reward":
        more |= {"sample_prompts": ["what is row 3", "row"], "sample_steps": 3, "sample_max_new_tokens": 4}
    replicas, sharded = (train(method, **devices, **more) for devices in (_REPLICAS, _SHARDED))
    assert rows(sharded) == rows(replicas) and len(rows(sharded)) == 4
    assert sharded.of("config")[-1]["facts"]["eval_rows"] == 9
    assert losses(sharded) == pytest.approx(losses(replicas), abs=_TOLERANCE)
    samples = [[(record["step"], record["completion"]) for record in run.of("sample")] for run in (replicas, sharded)]
    assert samples[1] == samples[0]
    assert [step for step, _ in samples[0]] == ([] if method == "reward" else [3, 3, 4, 4])
    evaluations = [[record["metrics"] for record in run.of("eval")] for run in (replicas, sharded)]
    for expected, actual in zip(*evaluations, strict=True):
        assert actual["eval_loss"] == pytest.approx(expected["eval_loss"], abs=_TOLERANCE), (
            "each held-out row counts once"
        )
    assert sorted(path.name for path in sharded.output.iterdir()) == sorted(p.name for p in replicas.output.iterdir())
    name = "model.safetensors" if method in ("full", "reward") else "adapter_model.safetensors"
    expected, actual = (load_file(run.output / name) for run in (replicas, sharded))
    assert {key: one.shape for key, one in actual.items()} == {key: one.shape for key, one in expected.items()}
    assert all(actual[key].allclose(one, atol=1e-4) for key, one in expected.items())


@pytest.mark.parametrize("method", ["lora", *(pytest.param(one, marks=pytest.mark.full) for one in ("full", "qlora"))])
def test_resumes_exactly_with_dropout(train: Train, method: str) -> None:  # noqa: F811
    """From a checkpoint that was written while training went on."""
    more = {"dropout": 0.1, **_SHARDED, **options(method)}
    whole = train(method, **more)
    rest = train(method, **more, resume_from=whole.checkpoint(2), attempt=2)
    assert rest.steps == {step: done for step, done in whole.steps.items() if step > 2} and len(rest.steps) == 2
    facts = rest.of("config")[-1]["facts"]
    assert (facts["fidelity"], facts["fidelity_reasons"]) == ("exact", [])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_SHARDED, _ONE),
        pytest.param(_ONE, _SHARDED, marks=pytest.mark.full),
        pytest.param(_REPLICAS, _SHARDED, marks=pytest.mark.full),
        pytest.param(_SHARDED, _REPLICAS, marks=pytest.mark.full),
    ],
)
def test_resumes_with_another_division_and_the_same_rows(
    train: Train,  # noqa: F811
    divided: Outcome,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    whole = divided if before is _SHARDED else train("full", **before, **options("full"))
    rest = train("full", **after, **options("full"), resume_from=whole.checkpoint(2), attempt=2)
    assert rows(rest) == {step: trained for step, trained in rows(whole).items() if step > 2}
    assert losses(rest) == pytest.approx({step: losses(whole)[step] for step in (3, 4)}, abs=1e-5)
    facts = rest.of("config")[-1]["facts"]
    assert facts["fidelity"] == "approximate"
    was, present = ("" if "sharded" in one else "not " for one in (before, after))
    reason = f"The model was {was}sharded at the checkpoint and is {present}now."
    assert reason in facts["fidelity_reasons"]


@pytest.fixture(scope="module")
def undisturbed(
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    data, data_format = make_data(folder, "full", 40)
    return two_ranks.run(make_job(folder, models(0.0), data, data_format=data_format, **_SAVES) | {"sharded": True})


def test_a_checkpoint_is_evaluated_and_exported_as_any_other(
    divided: Outcome,
    forks: Forks,
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path: Path,
) -> None:
    saved, expected = divided.checkpoint(2), divided.of("eval")[0]["metrics"]["eval_loss"]
    held_out = make_data(tmp_path, "full", 30)[0]
    lines = held_out.read_text().splitlines(keepends=True)
    evaluated = sorted(set(range(30)) - {row for done in rows(divided).values() for row in done})
    held_out.write_text("".join(lines[row] for row in evaluated))
    config = {"method": "full", "max_seq_length": 64, **options("full")}
    for name, sharded in (("one", False), ("two", True)):
        job = make_job(tmp_path / name, models(0.0), held_out, **config)
        weights_of = {"path": saved["path"], "step": 2, "epoch": 0.7}
        job |= {"task": "evaluate", "weights": weights_of, "reward_models": [], "sharded": sharded}
        done = two_ranks.run(job) if sharded else forks.run(job)
        assert done.of("eval")[0]["metrics"]["eval_loss"] == pytest.approx(expected, abs=_TOLERANCE), done.stderr
    job = make_job(tmp_path / "export", models(0.0), held_out, attempt=2, resume_from=saved, **config)
    exported = forks.run(job | {"task": "export"})
    assert exported.result["outcome"] == "completed", exported.stderr[-3000:]
    assert (exported.output / "model.safetensors").read_bytes() == (
        Path(saved["path"]) / "model.safetensors"
    ).read_bytes()
    assert load_output(exported.output, models(0.0)).num_parameters() > 0
    assert not (exported.output / "optimizer").exists()


@pytest.mark.full
def test_a_checkpoint_of_devices_without_a_common_folder_has_the_parts_of_all(
    undisturbed: Outcome,
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path: Path,
) -> None:
    data, data_format = make_data(tmp_path, "full", 40)
    apart = {"sharded": True, "shares_folder": False}
    job, other = (
        make_job(tmp_path / name, models(0.0), data, data_format=data_format, **_SAVES) | apart
        for name in ("first", "second")
    )
    done = two_ranks.run(job, second_job=other)
    assert done.steps == undisturbed.steps and weights(done) == weights(undisturbed)
    for folder in done.folder.glob("checkpoint-*"):
        assert verify(folder, hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()) == []
    assert [path for path in (tmp_path / "second").rglob("*") if "checkpoint" in path.name] == [], "it keeps none"
    again = make_job(
        tmp_path / "again", models(0.0), data, data_format=data_format, attempt=2, resume_from=done.checkpoint(2),
        **_SAVES,
    )  # fmt: skip
    rest = two_ranks.run(again | {"sharded": True})
    assert rest.steps == {step: made for step, made in undisturbed.steps.items() if step > 2}


@pytest.mark.full
@pytest.mark.parametrize("save_steps", [1, 100])
def test_a_part_that_a_device_cannot_send_ends_it_and_keeps_no_other_waiting(
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path: Path,
    save_steps: int,
) -> None:
    data, data_format = make_data(tmp_path, "full", 40)
    job, other = (
        make_job(tmp_path / name, models(0.0), data, data_format=data_format, **_FEW_STEPS, save_steps=save_steps)
        | {"sharded": True, "shares_folder": False}
        for name in ("first", "second")
    )
    first, second = two_ranks.run_until_death(job, 1, {"unreadable": "__1_0.distcp"}, other)
    assert (second.code, first.code) == (1, EXIT_PEER_LOST), second.stderr[-3000:]
    assert "Input/output error" in second.result["error"]["message"]
    assert first.of("checkpoint") == [] and list(first.folder.glob("checkpoint-*")) == []


@pytest.mark.parametrize(
    "save_steps",
    [pytest.param(1, id="in_the_background"), pytest.param(100, id="at_the_end", marks=pytest.mark.full)],
)
def test_a_part_that_a_device_cannot_write_fails_the_checkpoint(
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path: Path,
    save_steps: int,
) -> None:
    data, data_format = make_data(tmp_path, "full", 40)
    job = make_job(
        tmp_path / "run", models(0.0), data, data_format=data_format, **_FEW_STEPS, save_steps=save_steps
    ) | {"sharded": True}
    done = two_ranks.run_to_end_of_first(job, second={"file_bytes": 20_000})
    assert done.result["outcome"] == "failed", done.result
    assert done.result["error"]["code"] == "disk_full"
    assert "Rank 1 could not write its part" in done.result["error"]["message"]
    assert done.of("checkpoint") == [] and list(done.folder.glob("*checkpoint*")) == []


# Of the second checkpoint: a tensor of the optimizer is half written, its file or metadata is synced, that is renamed,
# the weights are half written, files are synced, the manifest is half written, the folder is renamed, it has its name.
@pytest.mark.parametrize(
    ("rank", "call"),
    [
        (1, 126),
        *(
            pytest.param(0, call, marks=pytest.mark.full)
            for call in (88, 100, 129, 130, 131, 132, 140, 148, 160, 171, 172)
        ),
        *(pytest.param(1, call, marks=pytest.mark.full) for call in (64, 90, 125)),
    ],
)
def test_a_kill_at_any_write_fsync_or_rename_of_either_device_leaves_whole_checkpoints(
    two_ranks: TwoRanks,
    undisturbed: Outcome,
    models: Callable[[float], Path],
    tmp_path: Path,
    rank: int,
    call: int,
) -> None:
    """The other device ends too, and the next attempt continues exactly from the last checkpoint that was reported."""
    data, data_format = make_data(tmp_path, "full", 40)
    job = make_job(tmp_path, models(0.0), data, data_format=data_format, **_SAVES) | {"sharded": True}
    first, second = two_ranks.run_until_death(job, rank, {"kill_at": call})
    dead, other = (first, second) if rank == 0 else (second, first)
    assert (dead.code, other.code) == (-signal.SIGKILL, EXIT_PEER_LOST), other.stderr[-3000:]
    assert first.of("result") == [], "the end of the other one is no failure of its own"
    for folder in first.folder.glob("checkpoint-*"):
        assert verify(folder, hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()) == []
    reported = [record["step"] for record in first.of("checkpoint")]
    assert reported == [2]
    again = make_job(
        tmp_path, models(0.0), data, data_format=data_format, attempt=2, resume_from=first.checkpoint(2), **_SAVES
    )
    rest = two_ranks.run(again | {"sharded": True})
    assert rest.steps == {step: done for step, done in undisturbed.steps.items() if step > 2}
    assert weights(rest) == weights(undisturbed)


def test_a_stop_in_an_evaluation_ends_it_on_both_devices(
    two_ranks: TwoRanks,
    models: Callable[[float], Path],
    tmp_path: Path,
) -> None:
    data, data_format = make_data(tmp_path, "lora", 15)
    config = {
        "method": "lora", "max_steps": 4, "batch_size": 1, "gradient_accumulation_steps": 1, "eval_split": 0.4,
        "eval_steps": 2, "save_steps": 100,
    }  # fmt: skip
    job = make_job(tmp_path / "run", models(0.0), data, data_format=data_format, **config) | {"sharded": True}
    stopped = two_ranks.run_to_end_of_first(job, course={"drain_at_evaluation": 1})
    assert (stopped.result["outcome"], stopped.of("eval")) == ("stopped", [])
    again = make_job(
        tmp_path / "run", models(0.0), data, data_format=data_format, attempt=2,
        resume_from=stopped.checkpoint(2), **config,
    )  # fmt: skip
    rest = two_ranks.run_to_end_of_first(again | {"sharded": True})
    assert (rest.result["outcome"], [one["step"] for one in rest.of("eval")]) == ("completed", [2, 4])


def test_the_row_of_a_step_without_numbers_is_named(two_ranks: TwoRanks, tmp_path: Path) -> None:
    texts = [f"row {row} is like every other row" + ("§§§§" if row == 5 else "") for row in range(12)]
    data = write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in texts))
    model = make_tiny_model(tmp_path / "model", layers=2)
    weights = load_file(model / "model.safetensors")
    ids = AutoTokenizer.from_pretrained(model)("§§§§", add_special_tokens=False)["input_ids"]
    weights["model.embed_tokens.weight"][ids] = 3e38  # the gradients overflow
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = {
        "method": "full", "optim": "adamw_torch", "batch_size": 2, "gradient_accumulation_steps": 1, "epochs": 1,
        "on_non_finite": "rewind",
    }  # fmt: skip
    job = make_job(tmp_path / "run", model, data, data_format="text", **config) | {"sharded": True}
    done = two_ranks.run_to_end_of_first(job)
    assert done.result["error"]["code"] == "non_finite_loss", done.result
    assert done.result["repair"]["singled_out"] == [5]
