"""Promises about patterns and schemas of rewards: what is refused, and why."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anneal.contracts.reward_texts.patterns import pattern_error, schema_error
from tests.properties import examples

GOOD_PATTERNS = [
    r"= (\w+)", r"(?i)\\boxed\{.{1,100}\}", r"^.{0,500}\(\(x{300}[)(]{300}.{0,500}(?#()$",
    "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
]  # fmt: skip
BAD_PATTERNS = [
    ("(a", "missing )"), ("(" * 500 + ")" * 500, "regular expression"), (r"\p{L}", r"bad escape \p"),
    ("foo{e}", r"`\{`"), ("[[:alpha:]]", "[:alpha:]"), ("((a{100}){100}){100}", "counted repetitions"),
    ("(?:" + "(b|[(]c){2}" * 50 + "){1000}", "too large"), ("*", "nothing to repeat"),
]  # fmt: skip
GOOD_SCHEMAS: list[dict[str, Any]] = [
    {}, {"$ref": "#/$defs/a~1b/properties/x", "$defs": {"a/b": {"properties": {"x": {"$ref": "#"}}}}},
    {"properties": {"pattern": {"type": "string"}, "$ref": {"type": "string"}}},
]  # fmt: skip
BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "text"}, "$.type"), ({"pattern": "("}, "regex"), ({"pattern": "x{e}"}, "`{`"),
    ({"pattern": "x" * 1001}, "too long"), ({"patternProperties": {"x{e}": True}}, "`{`"),
    ({"$ref": "https://a.example/b"}, "$defs"), ({"items": {"$ref": "file:///etc/passwd"}}, "$ref"),
    ({"$ref": "#/$defs/gone"}, "gone"), ({"$ref": "#/title", "title": "a"}, "$ref"), ({"items": {"$id": "b"}}, "$id"),
    ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"$schema": "http://json-schema.org/draft-07/schema#"}, "2020-12"),
]  # fmt: skip
WORDS = st.sampled_from([
    "pattern", "$ref", "$defs", "properties", "patternProperties", "multipleOf", "type", "#", "#/$defs/model", "a{2,3}",
    "[[:a:]]",
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | WORDS | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("pattern", GOOD_PATTERNS)
def test_a_good_pattern_has_no_error(pattern: str) -> None:
    assert pattern_error(pattern) is None


@pytest.mark.parametrize(("pattern", "says"), BAD_PATTERNS, ids=[pattern[:60] for pattern, _ in BAD_PATTERNS])
def test_a_bad_pattern_has_a_reason(pattern: str, says: str) -> None:
    assert says in (pattern_error(pattern) or "")


@pytest.mark.parametrize("schema", GOOD_SCHEMAS, ids=str)
def test_a_good_schema_has_no_error(schema: dict[str, Any]) -> None:
    assert schema_error(schema) is None


@pytest.mark.parametrize(("schema", "says"), BAD_SCHEMAS, ids=[str(schema)[:60] for schema, _ in BAD_SCHEMAS])
def test_a_bad_schema_has_a_reason(schema: dict[str, Any], says: str) -> None:
    assert says in (schema_error(schema) or "")


@pytest.mark.parametrize("keyword", ["pattern", "patternProperties"])
def test_a_pattern_that_is_too_long_is_not_compiled(keyword: str) -> None:
    pattern = "(?i)" + r"[ -\uffff]" * 390
    began = time.thread_time()
    assert "too long" in (schema_error({"items": {keyword: {pattern: True} if "P" in keyword else pattern}}) or "")
    assert "too long" in (pattern_error(pattern) or "")
    assert time.thread_time() - began < 1


@given(st.dictionaries(WORDS, VALUES), st.text(max_size=20))
@examples(25)
def test_no_schema_however_odd_raises(schema: dict[str, Any], pattern: str) -> None:
    assert schema_error(schema) != ""
    assert pattern_error(pattern) != ""
