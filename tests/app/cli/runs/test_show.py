"""`anneal runs show`: what a run needs, as its owner asked for it, and what computes it."""

from pathlib import Path
from typing import Any

import pytest

from anneal.contracts.schemas.estimates import EXAMPLE
from anneal.contracts.schemas.runs.common import FACTS
from anneal.contracts.schemas.runs.reads import RunRead
from app.cli.runs.commands import _estimated_memory, _measured_memory, _needs_text
from tests.conftest import Anneal, json_of
from tests.factories import Trainer, mark_run


def test_a_run_on_several_devices_shows_them_and_what_else_it_needs(anneal: Anneal, run_file: Path) -> None:
    created = json_of(anneal("runs", "create", "-f", str(run_file), "--json"))
    resources = {"devices": 4, "hosts": 2, "labels": ["site-b"], "sharding": "full", "sequence_parallel": 2}
    needs = {"labels": ["site-b"], "sharded": True, "sequence_parallel": 2}
    parts = "4 devices on 2 hosts", "labels site-b", "model divided among the devices", "2 of them share each sequence"
    run = RunRead.model_validate({**created, "resources": resources, "requirements": needs})
    assert _needs_text(run) == "; ".join(parts)
    assert _needs_text(RunRead.model_validate({**created, "requirements": {"kind": "cpu"}})) == "cpu"


def test_each_memory_figure_says_what_it_is(anneal: Anneal, run_file: Path) -> None:
    """The least memory may be smaller than the estimate of the run, and what is measured on a GPU lacks its context."""
    created = json_of(anneal("runs", "create", "-f", str(run_file), "--json"))
    measured = {"peak_memory_mb": 15210.4, "reserved_memory_mb": 16022.0, "tokens_per_second": None}

    def run(needs: dict[str, object], **values: object) -> RunRead:
        return RunRead.model_validate({**created, "requirements": needs, **values})

    whole = run({}, estimate=EXAMPLE, measured=measured)
    assert _estimated_memory(whole) == "14,174 MiB at the peak of a step, including the CUDA context"
    assert _measured_memory(whole) == "15,210 MiB at the peak, without the CUDA context"
    assert _measured_memory(run({}, measured={**measured, "reserved_memory_mb": None})) == "15,210 MiB at the peak"
    least = {"estimated_mb": {"cuda": 9000, "cpu": 8000}}
    of_smallest = "device memory of at least 9,000 MiB (estimate of its smallest micro-batch, to which repairs lead)"
    assert _needs_text(run(least)) == of_smallest
    stops = {**created["config"], "on_out_of_memory": "stop"}
    assert _needs_text(run(least, config=stops)) == "device memory of at least 9,000 MiB (estimate)"
    assert _needs_text(run({**least, "memory_mb": 7000})) == "device memory of at least 7,000 MiB (requested)"


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        ([], "exact"),
        (["The device was cpu.", "The dataset differs."], "approximate: The device was cpu. The dataset differs."),
    ],
)
def test_a_resumed_run_shows_whether_it_continues_exactly(
    anneal: Anneal, trainer: Trainer, reasons: list[str], shown: str
) -> None:
    trainer.events("config", {"facts": {"fidelity_reasons": ["of its own start"]}})
    trainer.checkpoint(20)
    anneal("runs", "stop", trainer.run_id)
    trainer.cancel()
    assert "of its own start" not in anneal("runs", "show", trainer.run_id).stdout
    child = anneal("runs", "resume", trainer.run_id).stdout.strip()
    assert "\nresume " not in anneal("runs", "show", child).stdout, "it has not started"
    resumed = Trainer(trainer.engine, child).begin(20)
    resumed.events(
        "config", {"facts": {"fidelity_reasons": ["of the attempt before"]}}, {"facts": {"fidelity_reasons": reasons}}
    )
    (line,) = (line for line in anneal("runs", "show", child).stdout.splitlines() if line.startswith("resume "))
    assert line.split(maxsplit=1)[1] == shown
    resumed.complete()


def _lines(anneal: Anneal, run_id: str) -> dict[str, str]:
    """Return the values that `anneal runs show` prints, by name."""
    lines = anneal("runs", "show", run_id).stdout.splitlines()
    return {name: value for name, _, value in (line.partition("  ") for line in lines)}


def _facts(anneal: Anneal, run_id: str) -> dict[str, str]:
    names = ("device", "kernels", "precision", "planned step", "compilation")
    return {name: value.strip() for name, value in _lines(anneal, run_id).items() if name in names}


def test_a_run_shows_what_computes_it_once_its_trainer_has_reported_it(anneal: Anneal, trainer: Trainer) -> None:
    assert _facts(anneal, trainer.run_id) == {}
    trainer.events("config", {"facts": {**FACTS, "compile_seconds": 93.21}})
    mark_run(trainer.engine, trainer.run_id, effective_config={"dtype": "bfloat16", "load_in_8bit": True})
    assert _facts(anneal, trainer.run_id) == {
        "device": "NVIDIA H100 80GB HBM3",
        "kernels": "attention varlen, norms liger-kernel 0.8.5, adapters fused, dropout Triton, loss head two products",
        "precision": "computes in bfloat16, base in 8 bits",
        "planned step": "2 rows × 2 micro-batches, 10 of 36 layers recomputed, measured peak 41.2 of 70.7 GiB, 1.46 s",
        "compilation": "93.2 s before the first step",
    }
    whole = json_of(anneal("runs", "show", trainer.run_id, "--json"))
    assert whole["facts"]["step_plan"] == FACTS["step_plan"], "with its alternatives"
    trainer.complete()


def test_a_run_shows_its_warnings_and_the_defaults_that_its_trainer_replaced(anneal: Anneal, trainer: Trainer) -> None:
    about_worker = {"field": "resources", "code": "no_device_fits", "message": "No device fits."}
    about_config = {"field": "config.learning_rate", "code": "unusual_value", "message": "`learning_rate` is 2."}
    mark_run(trainer.engine, trainer.run_id, warnings=[about_worker, about_config])
    replaced = {"field": "optim", "requested": "paged_adamw_8bit", "used": "adamw_8bit", "reason": "No GPU."}
    trainer.events("config", {"replaced": [replaced], "facts": FACTS})
    lines = _lines(anneal, trainer.run_id)
    assert lines["replaced optim"].strip() == "paged_adamw_8bit by adamw_8bit: No GPU."
    assert lines["warning config.learning_rate"].strip() == "`learning_rate` is 2."
    assert "warning resources" not in lines, "the run has started, so it was about the past"
    trainer.complete()


def test_an_attention_that_depends_on_the_texts_is_shown_with_both_kernels(anneal: Anneal, trainer: Trainer) -> None:
    kernels = {"norms": "transformers", "attention": "varlen (cudnn for texts of 4096 tokens)"}
    trainer.events("config", {"facts": {"attention": "varlen", "kernels": kernels}})
    shown = "attention varlen (cudnn for texts of 4096 tokens), norms transformers"
    assert _facts(anneal, trainer.run_id) == {"kernels": shown}
    trainer.complete()


def test_a_planned_step_that_did_not_fit_says_so(anneal: Anneal, trainer: Trainer) -> None:
    plan: Any = FACTS["step_plan"]
    narrow = {"batch_size": 1, "gradient_accumulation_steps": 1, "recomputed_layers": 36, "fits": False}
    trainer.events("config", {"facts": {"step_plan": {**plan, **narrow, "needed_bytes": None, "step_seconds": None}}})
    step = "1 row × 1 micro-batch, 36 of 36 layers recomputed, measured peak above 70.7 GiB, may run out of memory"
    assert _facts(anneal, trainer.run_id) == {"planned step": step}
    trainer.complete()


@pytest.mark.parametrize(
    ("effective", "shown"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "lora_r": 8}, "base in 4 bits (nf4)"),
        ({"lora_r": 8, "weights_dtype": "float32"}, "base in float16"),
        ({"lora_r": None, "weights_dtype": "float32"}, "weights in float32"),
    ],
)
def test_the_precision_of_a_run_is_that_of_the_computation_and_of_the_weights(
    anneal: Anneal, trainer: Trainer, effective: dict[str, Any], shown: str
) -> None:
    mark_run(trainer.engine, trainer.run_id, effective_config={"dtype": "float16", **effective})
    assert _facts(anneal, trainer.run_id) == {"precision": f"computes in float16, {shown}"}
    trainer.complete()
