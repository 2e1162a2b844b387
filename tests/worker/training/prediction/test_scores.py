"""Scores of predictions: those of the libraries on the same texts, and the rewards of `rlhf`."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from anneal.contracts.prompts import SCORES
from tests.properties import examples
from tests.worker.training.prediction.test_predict import answers_of, make_questions, predict, prediction_job
from tests.worker.training.tiny import Forks, make_job, make_pairs, write_rows
from worker.training.prediction.scores import Totals, _comparisons

ALL = {"scores": None}


def metrics_of(outcome: Any) -> dict[str, float]:
    (event,) = outcome.of("eval")
    metrics: dict[str, float] = event["metrics"]
    return metrics


def test_scores_of_a_dataset_and_of_its_rows_equal_those_of_the_libraries(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    plain = predict(forks, tmp_path / "plain", tiny_model, make_questions(tmp_path / "questions.jsonl", 12))
    # References that are partly the answers themselves, so that no score is 0.
    answers = answers_of(plain)
    data = write_rows(
        tmp_path / "data.jsonl",
        [
            {"messages": [*row["prompt"], {"role": "assistant", "content": text}]}
            for at, row in enumerate(answers)
            for text in [row["prediction"] if at % 3 == 0 else f"{row['prediction'][:9]} and the rows"]
        ],
    )
    done = predict(forks, tmp_path / "run", tiny_model, data, options=ALL)
    rows, metrics = answers_of(done), metrics_of(done)
    texts, references = [row["prediction"] for row in rows], [row["reference"] for row in rows]
    assert metrics["eval_bleu"] == sacrebleu.corpus_bleu(texts, [references]).score > 0
    assert metrics["eval_chrf"] == sacrebleu.corpus_chrf(texts, [references]).score > 0
    rouge = RougeScorer(["rougeL"])
    for row in rows:
        text, reference = row["prediction"], row["reference"]
        assert list(row["scores"]) == list(SCORES)
        assert row["scores"]["rouge_l"] == rouge.score(reference, text)["rougeL"].fmeasure
        assert row["scores"]["bleu"] == sacrebleu.sentence_bleu(text, [reference]).score
        assert row["scores"]["chrf"] == sacrebleu.sentence_chrf(text, [reference]).score
        assert row["scores"]["exact_match"] == float(text.strip() == reference.strip())
        assert row["scores"]["contains"] == float(reference.strip() in text)
    for name in ("exact_match", "contains", "rouge_l"):
        assert metrics[f"eval_{name}"] == pytest.approx(sum(row["scores"][name] for row in rows) / len(rows))
    assert 0 < metrics["eval_exact_match"] < 1 and metrics["eval_score"] == metrics["eval_exact_match"]
    assert metrics["eval_rows"] == len(rows) and done.result["metrics"] == metrics
    table = pq.read_table(done.output / "predictions.parquet").to_pylist()
    assert [{**row, "prompt": json.loads(row["prompt"])} for row in table] == rows


def test_scores_of_parts_are_those_of_the_whole() -> None:
    words = ["the", "rows", "of", "a", "model", "tell", "what", "it", "saw"]
    rows = [
        {
            "prediction": " ".join(words[at % 3 : 4 + at % 5]), "reference": " ".join(words[: 3 + at % 6]),
            "scores": {"bleu": 0.0, "chrf": 0.0}, "finish_reason": "stop", "completion_tokens": 3,
        }
        for at in range(20)
    ]  # fmt: skip
    whole, parts = Totals(["bleu", "chrf"]), Totals(["bleu", "chrf"])
    whole.add_rows(rows)
    for start in range(0, len(rows), 7):
        parts.add_rows(rows[start : start + 7])
    assert parts.metrics() == whole.metrics()
    expected = sacrebleu.corpus_bleu([row["prediction"] for row in rows], [[row["reference"] for row in rows]])
    assert parts.metrics()["eval_bleu"] == expected.score


def test_rewards_and_a_reward_model_score_answers(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    pairs = make_pairs(tmp_path / "pairs.jsonl", 8, chat=True)
    trained = forks.run(
        make_job(
            tmp_path / "judge", tiny_model, pairs, data_format="preference", method="reward", lora_r=4, max_steps=1,
            load_in_4bit=False, max_seq_length=128, optim="adamw_torch",
        )
    )  # fmt: skip
    assert trained.result["outcome"] == "completed", trained.result
    judge = {"name": "judge", "path": str(trained.output), "hub": None, "revision": None}
    judge["base"] = {"name": "tiny", "path": str(tiny_model), "hub": None, "revision": None}  # type: ignore[assignment]
    rewards = [
        {"type": "length", "min": 4, "max": 8, "unit": "characters", "slack": 30, "weight": 2.0},
        {"type": "model", "model": "judge"},
        {"type": "exact_match"},
    ]
    data = make_questions(tmp_path / "data.jsonl", 6)
    options = {"rewards": rewards, "scores": ["contains"]}
    done = forks.run(prediction_job(tmp_path / "run", tiny_model, data, options=options) | {"reward_models": [judge]})
    rows, metrics = answers_of(done), metrics_of(done)
    for row in rows:
        scores = row["scores"]
        assert list(scores) == ["contains", "reward_length", "reward_model", "reward_exact_match", "reward"]
        assert 0 <= scores["reward_length"] <= 1 and scores["reward_exact_match"] == 0
        assert scores["reward"] == pytest.approx(2 * scores["reward_length"] + scores["reward_model"])
    assert len({row["scores"]["reward_model"] for row in rows}) > 1
    assert (
        metrics["eval_score"]
        == metrics["eval_reward"]
        == pytest.approx(sum(row["scores"]["reward"] for row in rows) / len(rows))
    )


def test_empty_reference_is_contained_in_no_answer(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "what", "answer": answer} for answer in (" ", "row")])
    done = predict(forks, tmp_path / "run", tiny_model, data, data_format="prompt", options={"scores": ["contains"]})
    empty, word = (row["scores"]["contains"] for row in answers_of(done))
    assert empty is None and metrics_of(done)["eval_contains"] == word


def test_rows_without_references_have_no_scores(forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "what is it"}, {"prompt": "what", "answer": "a row"}])
    done = predict(forks, tmp_path / "run", tiny_model, data, data_format="prompt", options=ALL)
    first, second = answers_of(done)
    assert first["scores"] == {} and list(second["scores"]) == list(SCORES)
    none = predict(
        forks, tmp_path / "none", tiny_model, write_rows(tmp_path / "n.jsonl", [{"prompt": "what is it"}]),
        data_format="prompt", options=ALL,
    )  # fmt: skip
    assert metrics_of(none).keys() == {"eval_rows", "eval_completion_length", "eval_completions_cut"}


WORDS = st.lists(st.sampled_from(["the", "row", "of", "a", "model", "42", "Ça", "", "?!"]), max_size=30).map(" ".join)


@given(WORDS, WORDS)
@examples(66)
def test_rouge_l_is_that_of_the_library(text: str, reference: str) -> None:
    expected = RougeScorer(["rougeL"]).score(reference, text)["rougeL"].fmeasure
    assert _comparisons()["rouge_l"](text, reference) == expected


def test_rouge_l_of_long_texts_takes_no_time_in_which_the_device_waits() -> None:
    text, reference = "the row of a model " * 800, "a model of the row " * 800
    rouge_l = _comparisons()["rouge_l"]
    began = time.thread_time()
    assert 0 < (rouge_l(text, reference) or 0) < 1
    assert time.thread_time() - began < 0.5  # the table of the library has 16 million entries
