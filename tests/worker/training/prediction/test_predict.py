"""Predictions: answers are those of plain transformers and peft, in the order of the dataset, also after kills."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from anneal.contracts.training_config.fields import TrainingConfig
from tests.waiting import eventually
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    load_output,
    make_job,
    make_tiny_model,
    write_rows,
)
from worker.training.data.chat_template import ensure_template
from worker.training.failures import Stopped
from worker.training.model.loader import keep_evaluation_neutral
from worker.training.prediction.predict import _load_base_in_compute_dtype, _sum_up

NEW_TOKENS = 12
TRAINING: dict[str, Any] = {
    "max_seq_length": 64, "max_steps": 4, "save_steps": 2, "batch_size": 4, "gradient_accumulation_steps": 1,
    "learning_rate": 3e-3, "optim": "adamw_torch", "export": "last", "save_total_limit": None,
}  # fmt: skip


def predict(
    forks: Forks, folder: Path, model: Path, data: Path, *, weights: Path | None = None, attempt: int = 1,
    resume_from: dict[str, Any] | None = None, data_format: str = "chat", options: dict[str, Any] | None = None,
    **config: Any,
) -> Outcome:  # fmt: skip
    return forks.run(
        prediction_job(
            folder, model, data, weights=weights, attempt=attempt, resume_from=resume_from, data_format=data_format,
            options=options, **config,
        )
    )  # fmt: skip


def prediction_job(
    folder: Path, model: Path, data: Path, *, weights: Path | None = None, options: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:  # fmt: skip
    extra = {"predict": {"max_new_tokens": NEW_TOKENS, "scores": [], **(options or {})}}
    fields = {"method": "full", "max_seq_length": None, **config, "extra": extra}
    loaded = {"path": str(weights), "step": 4, "epoch": 1.0} if weights else None
    return make_job(folder, model, data, **fields) | {"task": "predict", "weights": loaded}


def answers_of(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.result["outcome"] == "completed", (outcome.result, outcome.stderr[-3000:])
    return [json.loads(line) for line in (outcome.output / "predictions.jsonl").read_text().splitlines()]


def texts_of(outcome: Outcome) -> list[str]:
    return [row["prediction"] for row in answers_of(outcome)]


def make_questions(path: Path, rows: int) -> Path:
    """Chats whose prompts have very different lengths, so that batches are padded."""
    return write_rows(
        path,
        (
            {
                "messages": [
                    {"role": "user", "content": f"what is row {row}" + " and the model" * (row * 7 % 6)},
                    {"role": "assistant", "content": f"row {row}"},
                ]
            }
            for row in range(rows)
        ),
    )


def plain_answers(model: Any, folder: Path, data: Path, new_tokens: int = NEW_TOKENS) -> list[str]:
    """Return the answer of `generate` to each prompt alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ensure_template(tokenizer)
    texts = []
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"][:-1]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        written = model.eval().generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        texts.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("full", {}),
        ("lora", {"lora_r": 4}),
        ("lora", {"lora_r": 4, "use_dora": True}),
        pytest.param("lora", {"lora_r": 4, "init_lora_weights": "pissa"}, marks=pytest.mark.full),
        ("qlora", {"lora_r": 4, "load_in_4bit": True}),
    ],
    ids=["full", "lora", "dora", "pissa", "qlora"],
)
def test_greedy_answers_equal_those_of_transformers_and_peft_for_each_prompt_alone(
    method: str, fields: dict[str, Any], forks: Forks, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=64)
    data = make_questions(tmp_path / "data.jsonl", 16)
    config = {"method": method, **fields}
    trained = forks.run(make_job(tmp_path / "train", model, data, **TRAINING, **config))
    assert trained.result["outcome"] == "completed", (trained.result, trained.stderr[-2000:])
    options: dict[str, Any] = {}
    if method == "qlora":
        effective = trained.of("config")[0]["effective"]
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, effective["bnb_4bit_compute_dtype"]),
        )  # fmt: skip
    places = [trained.output] if "init_lora_weights" in fields else [trained.output, trained.folder / "checkpoint-2"]
    for number, place in enumerate(places):
        # 4-bit layers compute in bfloat16, whose rounding depends on the shape of the batch.
        tokens = 1 if method == "qlora" else None
        plain = load_output(place, model, **options)
        keep_evaluation_neutral(plain)
        done = predict(
            forks, tmp_path / f"p{number}", model, data, weights=place, options={"batch_tokens": tokens}, **config
        )
        expected = plain_answers(plain, model, data)
        assert texts_of(done) == expected
        assert len(set(expected)) > 1


def test_answers_of_a_base_model_equal_those_of_transformers(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    data = make_questions(tmp_path / "data.jsonl", 8)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert texts_of(predict(forks, tmp_path / "run", tiny_model, data)) == plain_answers(base, tiny_model, data)


@pytest.mark.parametrize(
    ("kind", "dtype", "weights", "loaded"),
    [
        ("cuda", "bfloat16", None, "bfloat16"),
        ("cuda", "bfloat16", Path("output"), "float32"),
        ("cuda", "float16", None, "float32"),
        ("cpu", "bfloat16", None, "float32"),
    ],
)
def test_base_model_on_a_gpu_is_loaded_in_the_type_that_it_computes_in(
    kind: str, dtype: str, weights: Path | None, loaded: str
) -> None:
    config = TrainingConfig.model_validate({"base_model": "tiny", "method": "full", "lora_r": None, "dtype": dtype})
    run: Any = SimpleNamespace(config=config, job=SimpleNamespace(weights=weights), machine=SimpleNamespace(kind=kind))
    _load_base_in_compute_dtype(run)
    assert run.config.weights_dtype == loaded


def killed_after_a_checkpoint(forks: Forks, job: dict[str, Any], control: Path | None = None) -> Outcome:
    """Kill an attempt as soon as it has saved a checkpoint."""
    pid = forks.start(job)
    eventually(lambda: any(one["type"] == "checkpoint" for one in forks.said()), every=0.01)
    os.kill(pid, signal.SIGKILL)
    return forks.wait()


def last_checkpoint(outcome: Outcome) -> dict[str, Any]:
    return outcome.checkpoint(max(one["step"] for one in outcome.of("checkpoint")))


def output_bytes(outcome: Outcome) -> dict[str, bytes]:
    return {name: (outcome.output / name).read_bytes() for name in ("predictions.jsonl", "predictions.parquet")}


@pytest.mark.parametrize("rows", [80, pytest.param(2_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_prediction_killed_three_times_writes_the_file_of_an_undisturbed_one(
    rows: int, temperature: float, forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data = make_questions(tmp_path / "data.jsonl", rows)
    options = {"max_new_tokens": 40, "temperature": temperature, "batch_tokens": 1_000}
    whole = predict(forks, tmp_path / "whole", tiny_model, data, options=options)
    assert [row["row"] for row in answers_of(whole)] == list(range(rows))
    resume_from, done_so_far = None, [0]
    for attempt in (1, 2, 3):
        job = prediction_job(
            tmp_path / "killed", tiny_model, data, options=options, attempt=attempt, resume_from=resume_from
        )
        killed = killed_after_a_checkpoint(forks, job)
        assert killed.code == -signal.SIGKILL
        resume_from = last_checkpoint(killed)
        done_so_far.append(resume_from["step"])
    assert done_so_far == sorted(set(done_so_far)) and done_so_far[-1] < rows
    last = predict(forks, tmp_path / "killed", tiny_model, data, options=options, attempt=4, resume_from=resume_from)
    assert last.of("phase")[-2]["start_step"] == done_so_far[-1]
    assert output_bytes(last) == output_bytes(whole)


def test_stop_while_the_scores_are_summed_up_is_noticed() -> None:
    def stop() -> None:
        raise Stopped

    row = {"row": 0, "prediction": "a", "reference": "a", "finish_reason": "stop", "completion_tokens": 1, "scores": {}}
    run: Any = SimpleNamespace(report=SimpleNamespace(alive=lambda: None), raise_if_stopped=stop)
    answers: Any = SimpleNamespace(read_rows=lambda: iter([row] * 3), total=3)
    with pytest.raises(Stopped):
        _sum_up(run, answers, [])


def test_sampled_answers_depend_on_seed_and_row_and_not_on_batches(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data = make_questions(tmp_path / "data.jsonl", 12)
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
    first, other_batches, other_seed = (
        texts_of(predict(forks, tmp_path / name, tiny_model, data, options={**options, **more}, seed=seed))
        for name, more, seed in (("a", {}, 1), ("b", {"batch_tokens": 1}, 1), ("c", {}, 2))
    )
    assert first == other_batches != other_seed
    greedy = texts_of(predict(forks, tmp_path / "d", tiny_model, data, options={"temperature": 0.9, "top_k": 1}))
    assert greedy == texts_of(predict(forks, tmp_path / "e", tiny_model, data))


def test_answer_ends_before_a_stop_text(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    data = make_questions(tmp_path / "data.jsonl", 8)
    whole = answers_of(predict(forks, tmp_path / "whole", tiny_model, data))
    stop = whole[3]["prediction"][3:6]
    ended = answers_of(predict(forks, tmp_path / "ended", tiny_model, data, options={"stop": ["never in it", stop]}))
    for before, after in zip(whole, ended, strict=True):
        expected, separator, _ = before["prediction"].partition(stop)
        assert after["prediction"] == expected
        assert after["finish_reason"] == ("stop" if separator else before["finish_reason"])
        assert (after["completion_tokens"] < before["completion_tokens"]) >= (bool(separator) and len(expected) < 3)
    assert ended[3]["finish_reason"] == "stop"


def test_answer_ends_at_a_stop_text_that_is_a_special_token(forks: Forks, tmp_path: Path) -> None:
    model, prompt = make_tiny_model(tmp_path / "model"), "what is row 3"
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": prompt}])
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(model)
    written = network.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    stop = tokenizer.convert_ids_to_tokens(written[2])
    tokenizer.add_special_tokens({"additional_special_tokens": [stop]})
    tokenizer.save_pretrained(model)
    (row,) = answers_of(predict(forks, tmp_path / "run", model, data, data_format="prompt", options={"stop": [stop]}))
    assert (row["finish_reason"], row["completion_tokens"]) == ("stop", written.index(written[2]) + 1)


def test_answers_do_not_depend_on_published_generation_options(forks: Forks, tmp_path: Path) -> None:
    model, data = make_tiny_model(tmp_path / "model"), make_questions(tmp_path / "data.jsonl", 8)
    plain = texts_of(predict(forks, tmp_path / "plain", model, data))
    options = {
        "repetition_penalty": 5.0, "return_dict_in_generate": True, "cache_implementation": "static",
        "max_time": 1e-6, "stop_strings": ["e"],
    }  # fmt: skip
    path = model / "generation_config.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | options))
    assert texts_of(predict(forks, tmp_path / "published", model, data)) == plain


def test_row_without_a_prompt_is_skipped_with_the_reason(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "what is it"}, {"answer": "a row"}, {"messages": []}])
    done = answers_of(predict(forks, tmp_path / "run", tiny_model, data, data_format="prompt"))
    assert [row["finish_reason"] == "skipped" for row in done] == [False, True, True]
    assert all("no prompt" in row["problem"] for row in done[1:])


def test_reference_that_is_a_number_is_its_text_and_any_other_value_skips_the_row(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "what is it", "answer": answer} for answer in (42, ["a row"], {"text": "a row"}, True)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    options = {"scores": None}
    done = answers_of(predict(forks, tmp_path / "run", tiny_model, data, data_format="prompt", options=options))
    assert done[0]["reference"] == "42" and done[0]["scores"]["exact_match"] == 0
    assert [row["problem"] for row in done[1:]] == [
        f"its reference is a {kind}, and must be a text" for kind in ("list", "dict", "bool")
    ]


def test_rows_of_every_format_have_prompt_and_reference(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a row"}
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
    formats: dict[str, list[tuple[dict[str, Any], Any, str | None]]] = {
        "chat": [
            ({"messages": [question, answer]}, [question], "a row"),
            ({"messages": [question, answer, question]}, [question, answer, question], None),
            ({"messages": [question, {**answer, "content": [{"type": "text", "text": "a row"}]}]}, [question], "a row"),
            ({"messages": [question, answer], "tools": tools}, [question], "a row"),
        ],
        "prompt_completion": [
            ({"prompt": "what is it", "completion": "a row"}, "what is it", "a row"),
            ({"prompt": [question], "completion": [answer]}, [question], "a row"),
        ],
        "prompt": [
            ({"prompt": "what is it", "answer": "a row"}, "what is it", "a row"),
            ({"prompt": [question]}, [question], None),
        ],
    }
    counts: dict[str, list[int]] = {}
    for name, rows in formats.items():
        data = write_rows(tmp_path / f"{name}.jsonl", [row for row, _, _ in rows])
        done = answers_of(predict(forks, tmp_path / name, tiny_model, data, data_format=name))
        assert [(row["prompt"], row["reference"]) for row in done] == [(prompt, text) for _, prompt, text in rows]
        counts[name] = [row["prompt_tokens"] for row in done]
    assert counts["chat"][3] > counts["chat"][0] == counts["chat"][2]  # the template renders the tools
    assert counts["prompt_completion"] == [counts["prompt"][0], counts["chat"][0]]
    data = write_rows(tmp_path / "system.jsonl", [{"prompt": "what is it"}])
    options = {"system_prompt": "be short"}
    (row,) = answers_of(predict(forks, tmp_path / "system", tiny_model, data, data_format="prompt", options=options))
    assert row["prompt"] == "what is it" and row["prompt_tokens"] > counts["chat"][0]


def test_row_with_line_ends_of_unicode_is_one_line(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "what\u2028is\u0085it \u00fc\n?", "answer": "it"}])
    done = predict(forks, tmp_path / "run", tiny_model, data, data_format="prompt")
    text = (done.output / "predictions.jsonl").read_text()
    assert len(text.splitlines()) == 1 and "\u00fc" in text
    assert json.loads(text)["prompt"] == "what\u2028is\u0085it \u00fc\n?"


def test_row_whose_prompt_is_too_long_is_skipped_with_the_reason(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "what " * length} for length in (2, 300, 3)])
    done = predict(forks, tmp_path / "run", tiny_model, data, data_format="prompt")
    skipped = answers_of(done)[1]
    assert (skipped["prediction"], skipped["finish_reason"]) == (None, "skipped") and "tokens" in skipped["problem"]
    (event,) = done.of("skipped_rows")
    assert (event["count"], event["examples"]) == (1, [1])
    only = write_rows(tmp_path / "only.jsonl", [{"prompt": "what " * 300}])
    failed = predict(forks, tmp_path / "only", tiny_model, only, data_format="prompt").result
    assert failed["error"]["code"] == "bad_data" and "and may have 244" in failed["error"]["message"]
    options = {"max_new_tokens": 256}
    failed = predict(forks, tmp_path / "long", tiny_model, data, data_format="prompt", options=options).result
    assert failed["error"]["code"] == "config_error" and "max_new_tokens" in failed["error"]["message"]
