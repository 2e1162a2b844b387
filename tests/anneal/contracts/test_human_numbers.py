"""Counts as people write them: one number, however it is written, and what is none is refused by name."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from anneal.contracts.human_numbers import read_bytes, read_count
from anneal.contracts.schemas.runs.placement import ResourceRequest
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields, normalize_numbers
from anneal.contracts.training_config.validation import config_errors
from app.config import Settings
from app.infra.strict_json import BadJson, parse_json
from tests.properties import examples

COUNTS = (
    "max_steps", "min_steps", "save_steps", "eval_steps", "logging_steps", "stop_at_step", "batch_size",
    "gradient_accumulation_steps", "max_seq_length", "time_limit_seconds", "lora_r", "lora_alpha", "save_total_limit",
)  # fmt: skip
SCHEMA = TrainingConfig.model_json_schema()["properties"]


def sentences(**fields: Any) -> list[tuple[str, str, str]]:
    errors = config_errors({"base_model": "tiny", **fields}, has_eval_dataset=True)
    return [(problem.field, problem.code, problem.message) for problem in errors if problem.field in fields]


def form(name: str) -> str:
    """The pattern of the texts that a field takes."""

    def patterns(schema: dict[str, Any]) -> list[str]:
        inner = [one for key in ("anyOf", "oneOf") for option in schema.get(key, []) for one in patterns(option)]
        return inner + ([schema["pattern"]] if "pattern" in schema else [])

    (pattern,) = patterns(SCHEMA[name])
    return pattern


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10k", 10_000), ("10K", 10_000), ("1.5M", 1_500_000), ("2**15", 32_768), ("1e4", 10_000), ("1.5e3", 1_500),
        ("10_000", 10_000), ("2_000_000", 2_000_000), ("12", 12), ("2.0k", 2_000), (1e4, 10_000), (4.0, 4),
        ("2^10", 1024), ("1.5m", 1_500_000), ("0.05B", 50_000_000), ("0.01b", 10_000_000), ("0.00001T", 10_000_000),
        ("8ki", 8192), ("8Ki", 8192), ("8KI", 8192), ("1Mi", 2**20), ("1mi", 2**20), ("0.0625Gi", 2**26),
        ("0.5ki", 512),
    ],
)  # fmt: skip
def test_a_count_is_stored_as_the_number_that_it_says(text: Any, number: int) -> None:
    config = TrainingConfig(base_model="tiny", max_steps=text).model_dump(mode="json")
    assert (config["max_steps"], type(config["max_steps"])) == (number, int)
    assert normalize_numbers({"max_steps": text, "seed": "10k"}) == {"max_steps": number, "seed": "10k"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("30m", 1800),
        ("1d", 86_400),
        ("1h30m", 5400),
        ("0.5h", 1800),
        ("10k", 10_000),
        ("1.5m", 90),
        ("1M", 1_000_000),
        ("2^10", 1024),
    ],
)
def test_a_time_limit_may_be_hours(text: str, seconds: int) -> None:
    assert TrainingConfig(base_model="tiny", time_limit_seconds=text).time_limit_seconds == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "bytes_", "mebibytes"),
    [
        ("80Gi", 80 * 2**30, 81_920), ("80GiB", 80 * 2**30, 81_920), ("80 GB", 80 * 10**9, 76_293),
        ("0.5Gi", 2**29, 512), ("1Ti", 2**40, 2**20), ("512Mi", 2**29, 512), ("1.5M", 1_500_000, 1),
    ],
)  # fmt: skip
def test_a_size_with_a_unit_is_bytes_also_where_a_plain_number_is_mebibytes(
    text: str, bytes_: int, mebibytes: int
) -> None:
    assert read_bytes(text) == bytes_
    assert ResourceRequest.model_validate({"memory_mb": text}).memory_mb == mebibytes
    assert Settings(cache_bytes=text).cache_bytes == bytes_  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["81920", "81_920"])
def test_a_size_without_a_unit_is_in_the_unit_of_its_field(text: str) -> None:
    assert ResourceRequest.model_validate({"memory_mb": text}).memory_mb == 81_920
    assert read_bytes(text) == 81_920


@pytest.mark.parametrize("text", ["80G i", "Gi", "80Xi", "-1Gi", "80Gi5", "1e9Gi", ""])
def test_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValidationError, match=r"such as .*80Gi"):
        ResourceRequest.model_validate({"memory_mb": text})


def test_counts_in_option_groups_are_stored_as_numbers() -> None:
    extra = {"eval_batch_size": "1k", "distributions_steps": "2^4"}
    written = {"base_model": "tiny", "method": "rlhf", "extra": extra, "rlhf": {"max_completion_length": "1k"}}
    config = TrainingConfig.model_validate(written)
    assert config.extra == {"eval_batch_size": 1000, "distributions_steps": 16}
    assert config.rlhf.max_completion_length == 1000
    assert normalize_numbers({"extra": extra})["extra"] == config.extra
    default = {**written, "rlhf": {"max_completion_length": "256"}, "extra": {}}
    assert "rlhf.max_completion_length" not in given_fields(default), "it equals the default"


@pytest.mark.parametrize("name", COUNTS)
def test_every_count_takes_both_forms_and_its_description_says_so(name: str) -> None:
    assert sentences(**{name: "0.1k"}) == [] and sentences(**{name: 100}) == []
    assert re.search(form(name), "10k")
    (refused,) = sentences(**{name: "10kk"})
    assert refused[:2] == (name, "bad_count")


@pytest.mark.parametrize(("text", "number"), [
    ("1B", 10**9), ("1T", 10**12), ("1t", 10**12), ("1Gi", 2**30), ("1Ti", 2**40), ("9999^2", 9999**2),
])  # fmt: skip
def test_large_units_are_read(text: str, number: int) -> None:
    assert read_count(text) == number


def test_a_bad_count_is_one_clear_problem() -> None:
    assert sentences(max_steps="10kk") == [
        ("max_steps", "bad_count", '`max_steps` cannot be parsed: "10kk" is not a count; write 10000, "10k", "1.5M", '
         '"8Ki" or "2^15".')
    ]  # fmt: skip
    assert sentences(max_steps="1.2345k")[0][2] == '`max_steps` cannot be parsed: "1.2345k" is not a whole number.'
    assert sentences(max_steps="1M", batch_size="1M")[0][:2] == ("batch_size", "out_of_range")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.5",
        "k",
        "-1",
        "+1",
        " 1",
        "1k\n",
        "1__0",
        "_1",
        "1_0",
        "0x10",
        "2**",
        "2***3",
        "1e",
        "٣",
        "2h",
        "\ud800",
        "2^",
        "2^^3",
        "1g",
        "1bi",
        "1i",
        "1e4k",
        "1_000k",
    ],
)
def test_invalid_count_is_refused(text: str) -> None:
    assert [refused[:2] for refused in sentences(max_steps=text)] == [("max_steps", "bad_count")]


@given(
    st.sampled_from(COUNTS).flatmap(lambda name: st.tuples(st.just(name), st.from_regex(form(name), fullmatch=True)))
)
@examples(100)
def test_what_the_description_allows_is_read_or_out_of_range_or_no_whole_number(case: tuple[str, str]) -> None:
    for _, code, message in sentences(**dict([case])):
        assert code == "out_of_range" or "is not a whole number" in message


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(BadJson, match="'lora_r' occurs twice"):
        parse_json(b'{"config": {"lora_r": 1, "lora_r": 2}}')
    assert parse_json(json.dumps({"config": {"lora_r": 1}, "lora_r": 2}).encode())
