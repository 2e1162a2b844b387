"""Checks of a dataset against a configuration: its format, its columns and its number of rows."""

from collections.abc import Iterator, Mapping
from typing import Any

from anneal.contracts import rewards
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import DEFAULT_METHOD, METHODS, method_of, predict_options, rewards_of
from anneal.contracts.prompts import PREDICTABLE_FORMATS
from anneal.contracts.reward_texts.templates import MESSAGES
from app.runs.creating.validation.rewards import valid_rewards
from app.tables.datasets import Dataset


def data_problems(config: Mapping[str, Any], place: str, dataset: Dataset, splits: bool) -> Iterator[FieldError]:
    """Yield errors of a dataset for a configuration as the user wrote it.

    `place` is the field of the request that names it. `splits`: True if the backend holds out the fraction
    `eval_split`.
    """
    method, extra, part = method_of(config), config.get("extra"), config.get("eval_split")
    predicts = predict_options(config)
    if predicts is not None and dataset.format not in PREDICTABLE_FORMATS:
        formats = ", ".join(f"`{item}`" for item in PREDICTABLE_FORMATS)
        message = (
            f"answers are for {formats}, and this dataset is `{dataset.format}`; upload the prompts in that format"
        )
        yield FieldError(field=place, code="wrong_dataset_format", message=message)
    elif (
        predicts is None
        and config.get("method", DEFAULT_METHOD) in list(METHODS)
        and (dataset.format not in method.formats)
    ):
        formats = ", ".join(f"`{item}`" for item in method.formats)
        message = (
            f"method `{method.name}` trains on {formats}, and this dataset is `{dataset.format}`; upload the rows "
            "in that format, or choose another method"
        )
        yield FieldError(field=place, code="wrong_dataset_format", message=message)
    compared = [
        f"reward `{reward['type']}`" for _, reward in rewards_of(config) if reward.get("type") in rewards.WITH_ANSWER
    ]
    compared += [f"score `{name}`" for name in (predicts or {}).get("scores") or ()]
    if compared and dataset.format == "prompt" and "answer" not in dataset.columns:
        message = (
            f"the {compared[0]} compares completions with a column `answer`, and this dataset has "
            "none; upload it with answers, or choose other rewards and scores"
        )
        yield FieldError(field=place, code="no_answers", message=message)
    # Datasets of prompts have `messages` as `prompt`; in predictions on other formats the reference is the `answer`.
    columns = {*dataset.columns, MESSAGES, *(() if dataset.format == "prompt" else ("answer",))}
    for name in rewards.referenced_columns(valid_rewards(config)):
        if name not in columns:
            there = ", ".join(f"`{column}`" for column in dataset.columns[:10])
            message = (
                f"a reward refers to `{{{{ item.{name[:60]} }}}}`, and this dataset has no column of this name; it has "
                f"{there}"
            )
            yield FieldError(field=place, code="missing_column", message=message)
    # A plugin decides itself how it uses the file.
    has_plugin = isinstance(extra, Mapping) and bool(extra.get("data_source"))
    is_split = splits and not has_plugin and isinstance(part, int | float) and 0 < part < 1
    if is_split and place == "dataset_id" and dataset.rows < 2:
        message = "`eval_split` needs at least two rows, one of them to train on, and this dataset has one."
        yield FieldError(field="config.eval_split", code="conflict", message=message)
