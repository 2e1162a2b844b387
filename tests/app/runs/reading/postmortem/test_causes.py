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
