"""Probable causes: a sentence from the error of a run and the failure report of its last attempt."""

import re

import pytest

from anneal.contracts.attempt.failure_report import FailureReport
from app.runs.reading.postmortem.causes import probable_cause


@pytest.mark.parametrize(("rank", "named"), [(None, []), (1, ["training process of rank 1 "])])
@pytest.mark.parametrize("code", [None, "trainer_crashed"])
@pytest.mark.parametrize("end", [{"exit_signal": 9}, {"exit_signal": 11}, {"exit_code": 3}])
def test_a_crash_names_the_rank_if_the_run_has_several(
    code: str | None, end: dict[str, int], rank: int | None, named: list[str]
) -> None:
    report = FailureReport(**end, rank=rank, phase="training")
    sentence = probable_cause(code, None, report, {}, "retried").sentence
    assert re.findall(r"training process of rank \d ", sentence.replace("The", "the")) == named


def test_prediction_without_memory_is_advised_nothing_about_training() -> None:
    config = {"batch_size": 4, "gradient_accumulation_steps": 1, "extra": {"predict": {"max_new_tokens": 64}}}
    cause = probable_cause("out_of_memory", None, FailureReport(phase="predicting"), config, "failed")
    assert cause.changes == {} and cause.advice is not None and "`max_new_tokens`" in cause.advice
