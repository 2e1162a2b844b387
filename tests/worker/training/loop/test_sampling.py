"""Periodic samples: what is sampled when, and that training does not depend on it."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.worker.training.output.outputs import weights
from tests.worker.training.tiny import Forks, Outcome, make_job, make_pairs, make_tiny_model
from worker.training.loop import sampling

PROMPTS = [
    "what is row 3",
    [
        {"role": "system", "content": "say little"},
        {"role": "user", "content": "what is row 4"},
    ],
]
CONFIG: dict[str, Any] = {
    "method": "lora", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 4, "lora_dropout": 0.1,
    "logging_steps": 1, "save_steps": "epoch", "max_steps": 12, "eval_split": 0.2, "eval_steps": "epoch", "seed": 7,
}  # fmt: skip
SAMPLES = {"sample_steps": "epoch", "sample_prompts": PROMPTS, "sample_max_new_tokens": 8}
"""Samples after each of the epochs of four steps."""


def samples(outcome: Outcome) -> list[tuple[int, str, str]]:
    return [(one["step"], one["prompt"], one["completion"]) for one in outcome.of("sample")]


def losses(outcome: Outcome) -> dict[int, str]:
    return {step: loss for step, (loss, _) in outcome.steps.items()}


def test_samples_and_evaluations_per_epoch_do_not_change_training_and_are_the_same_after_a_resume(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    plain = forks.run(make_job(tmp_path / "plain", tiny_model, chats, **CONFIG))
    whole = forks.run(make_job(tmp_path / "whole", tiny_model, chats, **CONFIG, **SAMPLES))
    assert whole.result["outcome"] == "completed", whole.result
    assert [record["step"] for record in whole.of("eval")] == [4, 8, 12]
    assert [record["step"] for record in whole.of("checkpoint")] == [4, 8, 12]
    chat = "system: say little\nuser: what is row 4"
    assert [one[:2] for one in samples(whole)] == [
        (step, prompt) for step in (4, 8, 12) for prompt in ("what is row 3", chat)
    ]
    assert all(completion for _, _, completion in samples(whole))
    assert (losses(whole), weights(whole)) == (losses(plain), weights(plain))

    # Drained at the very step of samples, which are left to the attempt that follows.
    drained = forks.run(
        make_job(
            tmp_path / "whole", tiny_model, chats, attempt=2, resume_from=whole.checkpoint(4), **CONFIG, **SAMPLES
        ),
        course={"drain_at": 8},
    )
    assert (drained.result["why"], drained.result["step"], samples(drained)) == ("drain", 8, [])
    job = make_job(
        tmp_path / "whole", tiny_model, chats, attempt=3, resume_from=drained.checkpoint(8), **CONFIG, **SAMPLES
    )
    ended = forks.run(job)
    assert samples(ended) == samples(whole)[2:]
    assert losses(drained) | losses(ended) == {step: loss for step, loss in losses(whole).items() if step > 4}
    assert weights(ended) == weights(whole)
    assert [record["metrics"]["eval_loss"] for record in ended.of("eval")] == [
        record["metrics"]["eval_loss"] for record in whole.of("eval")[1:]
    ]


def test_a_run_on_texts_samples_chats_with_a_plain_template_and_ends_with_samples(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    # A sample ends at each token with which the model ends texts, here all of them.
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    GenerationConfig(eos_token_id=list(range(1, len(tokenizer)))).save_pretrained(model)
    data = make_pairs(tmp_path / "pairs.jsonl", 8)
    config = {"method": "dpo", "max_seq_length": 64, "max_steps": 3, "batch_size": 2, "gradient_accumulation_steps": 1}
    fields = SAMPLES | {"sample_steps": 2, "sample_temperature": 0.0}
    done = forks.run(make_job(tmp_path / "run", model, data, data_format="preference", **config, **fields))
    assert done.result["outcome"] == "completed", done.result
    assert [one[0] for one in samples(done)] == [2, 2, 3, 3]
    longest = max(map(len, tokenizer.get_vocab()))
    assert all(len(completion) <= longest for _, _, completion in samples(done))
    assert "chat_template" not in (done.output / "tokenizer_config.json").read_text()
    assert not (done.output / "chat_template.jinja").exists()


def test_a_failure_to_sample_is_reported_and_training_goes_on(forks: Forks, tmp_path: Path) -> None:
    template = "{{ raise_exception('no system messages') }}"
    model = make_tiny_model(tmp_path / "model", chat_template=template)
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "the model learns from rows"}\n' * 4)
    config = CONFIG | {"max_steps": 1, "eval_split": 0.0, "eval_steps": None}
    done = forks.run(make_job(tmp_path, model, data, data_format="text", **config, **SAMPLES))
    assert done.result["outcome"] == "completed", done.result
    (line,) = [record["line"] for record in done.of("message") if "Sampling failed" in record["line"]]
    assert "no system messages" in line and "Training continues." in line


def test_a_failure_ends_a_divided_run_since_the_other_devices_wait() -> None:
    """Without the end, they would wait until the run counts as hanging, and again in the next attempt."""

    def fail(_: Any) -> None:
        raise RuntimeError("no generation")

    said: list[str] = []
    run = SimpleNamespace(
        config=SimpleNamespace(sample_prompts=["row"], sample_max_new_tokens=4, sample_temperature=0.0),
        state=SimpleNamespace(samples_pending=True),
        report=SimpleNamespace(message=lambda text, level: said.append(text)),
        is_sharded=False,
    )
    trainer: Any = SimpleNamespace(run=run, processing_class=None, model=None, accelerator=SimpleNamespace())
    trainer.accelerator.unwrap_model = fail
    sampling.report_samples(trainer)
    assert said == ["Sampling failed: RuntimeError: no generation. Training continues."]
    run.is_sharded = True
    with pytest.raises(RuntimeError, match="no generation"):
        sampling.report_samples(trainer)
