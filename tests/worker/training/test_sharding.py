"""Promises about a run whose model is divided among two devices: it trains as replicas do, and resumes exactly."""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.worker.training.test_ranks import (  # noqa: F401
    Train,
    losses,
    models,
    other_forks,
    rows,
    train,
)

_TOLERANCE = 1e-6
_REPLICAS, _SHARDED = {"devices": 2}, {"devices": 2, "sharded": True}
_ONE = {"devices": 1}


def options(method: str) -> dict[str, Any]:
    """An optimizer that replicas and divided models share, and no adapter on a model with a new head."""
    if method not in ("full", "reward"):
        return {}
    return {"optim": "adamw_torch"} | ({"lora_r": None} if method == "reward" else {})


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "reward", "dpo", "kto"])
def test_a_divided_model_trains_as_replicas_do(train: Train, method: str) -> None:  # noqa: F811
    """Also in the last step of an epoch, which has fewer rows, and with fewer batches to evaluate on one device."""
    count = 44 if method in ("full", "lora", "qlora") else 41
    more = {**options(method), "count": count, "eval_split": 9 / count, "extra": {"eval_batch_size": 2}}
    replicas, sharded = (train(method, **devices, **more) for devices in (_REPLICAS, _SHARDED))
    assert rows(sharded) == rows(replicas) and len(rows(sharded)) == 6
    assert sharded.of("config")[-1]["facts"]["eval_rows"] == 9
    assert losses(sharded) == pytest.approx(losses(replicas), abs=_TOLERANCE)
    evaluations = [[record["metrics"] for record in run.of("eval")] for run in (replicas, sharded)]
    for expected, found in zip(*evaluations, strict=True):
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=_TOLERANCE), (
            "each held-out row counts once"
        )
    assert sorted(path.name for path in sharded.output.iterdir()) == sorted(p.name for p in replicas.output.iterdir())
    name = "model.safetensors" if method in ("full", "reward") else "adapter_model.safetensors"
    expected, found = (load_file(run.output / name) for run in (replicas, sharded))
    assert {key: one.shape for key, one in found.items()} == {key: one.shape for key, one in expected.items()}
    assert all(found[key].allclose(one, atol=1e-4) for key, one in expected.items())


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_resumes_exactly_with_dropout(train: Train, method: str) -> None:  # noqa: F811
    """From a checkpoint that was written while training went on."""
    more = {"dropout": 0.1, **_SHARDED, **options(method)}
    whole = train(method, **more)
    rest = train(method, **more, resume_from=whole.checkpoint(3), attempt=2)
    assert rest.steps == {step: done for step, done in whole.steps.items() if step > 3} and len(rest.steps) == 3
    facts = rest.of("config")[-1]["facts"]
    assert (facts["fidelity"], facts["fidelity_reasons"]) == ("exact", [])


@pytest.mark.parametrize(
    ("before", "after"), [(_SHARDED, _ONE), (_ONE, _SHARDED), (_REPLICAS, _SHARDED), (_SHARDED, _REPLICAS)]
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_resumes_with_another_division_and_the_same_rows(
    train: Train,  # noqa: F811
    method: str,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    whole = train(method, **before, **options(method))
    rest = train(method, **after, **options(method), resume_from=whole.checkpoint(3), attempt=2)
    assert rows(rest) == {step: trained for step, trained in rows(whole).items() if step > 3}
    assert losses(rest) == pytest.approx({step: losses(whole)[step] for step in (4, 5, 6)}, abs=1e-5)
    facts = rest.of("config")[-1]["facts"]
    assert facts["fidelity"] == "approximate"
    reason = f"sharded: {'sharded' in before} at the checkpoint, {'sharded' in after} now."
    assert reason in facts["fidelity_reasons"]


def test_generates_the_samples_that_replicas_do(train: Train) -> None:  # noqa: F811
    asked = {"sample_prompts": ["what is row 3", "row"], "sample_steps": 2, "sample_max_new_tokens": 6}
    for method in ("full", "lora"):
        made = [train(method, **devices, **options(method), **asked) for devices in (_REPLICAS, _SHARDED)]
        texts = [[(one["step"], one["completion"]) for one in run.of("sample")] for run in made]
        assert texts[1] == texts[0] and len(texts[0]) == 6
