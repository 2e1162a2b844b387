"""Checks of a dataset against a configuration: its format, its columns and its number of rows."""

from collections.abc import Iterator, Mapping
from typing import Any

from anneal.contracts import rewards
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import DEFAULT_METHOD, METHODS, method_of, rewards_of
from app.tables.datasets import Dataset


def data_problems(config: Mapping[str, Any], place: str, dataset: Dataset | None, splits: bool) -> Iterator[FieldError]:
    """Yield errors of a dataset for a configuration as the user wrote it; `dataset` None: there is none to check.

    `place` is the field of the request that names it. `splits`: True if the backend holds out the fraction
    `eval_split`.
    """
    if dataset is None:
        return
    yield from _format_problems(config, place, dataset)
    yield from _answer_problems(config, place, dataset)
    if splits and place == "dataset_id":
        yield from _split_problems(config, dataset)


def _format_problems(config: Mapping[str, Any], place: str, dataset: Dataset) -> Iterator[FieldError]:
    method = method_of(config)
    is_known = config.get("method", DEFAULT_METHOD) in list(METHODS)
    if is_known and dataset.format not in method.formats:
        formats = ", ".join(f"`{item}`" for item in method.formats)
        message = (
            f"method `{method.name}` trains on {formats}, and this dataset is `{dataset.format}`; upload the rows "
            "in that format, or choose another method"
        )
        yield FieldError(field=place, code="wrong_dataset_format", message=message)


def _answer_problems(config: Mapping[str, Any], place: str, dataset: Dataset) -> Iterator[FieldError]:
    if dataset.format != "prompt" or "answer" in dataset.columns:
        return
    for _, reward in rewards_of(config):
        if reward.get("type") in rewards.WITH_ANSWER:
            message = (
                f"the reward `{reward['type']}` compares completions with a column `answer`, and this dataset has "
                "none; upload it with answers, or choose other rewards"
            )
            yield FieldError(field=place, code="no_answers", message=message)
            return


def _split_problems(config: Mapping[str, Any], dataset: Dataset) -> Iterator[FieldError]:
    part, extra = config.get("eval_split"), config.get("extra")
    # A plugin decides itself how it uses the file.
    if isinstance(extra, Mapping) and extra.get("data_source"):
        return
    if isinstance(part, int | float) and 0 < part < 1 and dataset.rows < 2:
        message = "`eval_split` needs at least two rows, one of them to train on, and this dataset has one."
        yield FieldError(field="config.eval_split", code="conflict", message=message)
