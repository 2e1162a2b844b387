"""What completions are worth: each built-in reward by examples, and none of them can hang or end a training."""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu
from pydantic import TypeAdapter
from rouge_score.rouge_scorer import RougeScorer

from anneal.contracts.rewards import Reward, needs_answer
from worker.training.methods import rewards
from worker.training.methods.rewards import build_reward_functions
from worker.training.methods.rlhf import RewardTrainerMixin
from worker.training.run_state import RunState

TOKENIZER = SimpleNamespace(all_special_ids=[0, 1])
CATASTROPHE = r"^(([a-z])+.)+[A-Z]([a-z])+$"
VICTIM = "a" * 5000


def reward(**fields: Any) -> Reward:
    configured: Reward = TypeAdapter(Reward).validate_python(fields)
    return configured


def judge(fields: dict[str, Any], *completions: str, answer: str | None = None, item: Any = None) -> list[float | None]:
    """What a reward gives to completions of rows with the same answer."""
    (function,) = build_reward_functions([reward(**fields)], TOKENIZER)
    ids = [[1, *range(2, 2 + len(text)), 0] for text in completions]
    answers = {} if answer is None else {"answer": [answer] * len(completions)}
    items = {} if item is None else {"item": [json.dumps(item)] * len(completions)}
    return list(function(["?"] * len(completions), list(completions), ids, **answers, **items))


class TestExactMatch:
    @pytest.mark.parametrize(
        ("fields", "completion", "answer", "score"),
        [
            ({}, "Paris", "Paris", 1), ({}, " Paris\n", "Paris ", 1), ({}, "paris", "Paris", 0),
            ({}, "Paris.", "Paris", 0), ({}, "", "Paris", 0),
            ({"strip": False}, " Paris", "Paris", 0), ({"ignore_case": True}, "PARIS", "paris", 1),
            ({"ignore_case": True}, "STRASSE", "straße", 1),
            ({"extract": r"answer: (\w+)"}, "answer: Rome, no, answer: Paris!", "Paris", 1),
            ({"extract": r"answer: (\w+)"}, "Paris", "Paris", 0),
            ({"extract": r"[A-Z]\w+"}, "in Rome or Paris", "Paris", 1),
            ({"extract": r"is (\w+)|Paris"}, "it is Rome. Paris", "Paris", 1),
        ],
    )  # fmt: skip
    def test_the_completion_is_the_answer_or_not(
        self, fields: dict[str, Any], completion: str, answer: str, score: float
    ) -> None:
        assert judge({"type": "exact_match", **fields}, completion, answer=answer) == [score]


class TestNumericMatch:
    @pytest.mark.parametrize(
        ("completion", "answer", "score"),
        [
            ("42", "42", 1), ("It is 42.", "42", 1), ("6 * 7 = 42", "42", 1), ("41 or 42?", "41", 0),
            ("1,234,567", "1234567", 1), ("$1,234.50", "1234.5", 1), ("-$3", "-3", 1), ("\N{MINUS SIGN}3", "-3", 1),
            ("+3", "3", 1), ("3", "-3", 0), ("5-3", "3", 1), ("5 - 3", "3", 1), ("(5)-3", "3", 1), ("x = -3", "-3", 1),
            ("1.5e3", "1500", 1), ("-.5", "-0.5", 1), ("1.0000001", "1", 1), ("1.001", "1", 0), ("0.0000001", "0", 1),
            ("50%", "50", 1), ("3, 4", "4", 1), ("2019,20", "20", 1), ("1" + "0" * 400, "1", 0), ("none", "1", 0),
            ("42", "reasons … #### 1,042", 0), ("1042", "reasons … #### 1,042", 1), ("42", "no number", None),
        ],
    )  # fmt: skip
    def test_the_last_number_counts(self, completion: str, answer: str, score: float | None) -> None:
        assert judge({"type": "numeric_match"}, completion, answer=answer) == [score]

    def test_a_pattern_says_where_it_is_and_tolerances_how_near(self) -> None:
        fields = {"type": "numeric_match", "extract": r"\\boxed\{([^}]*)\}"}
        texts = [r"\boxed{42} in 3 steps", r"\boxed{1} then \boxed{42}", "42", r"\boxed{x}"]
        assert judge(fields, *texts, answer="42") == [1, 1, 0, 0]
        near = {"type": "numeric_match", "relative_tolerance": 0.1, "absolute_tolerance": 0.0}
        assert judge(near, "109", "120", "-100", answer="100") == [1, 0, 0]


class TestRegex:
    def test_it_is_looked_for_anywhere_or_has_to_be_all(self) -> None:
        assert judge({"type": "regex", "pattern": r"\d+"}, "a 1", "a") == [1, 0]
        assert judge({"type": "regex", "pattern": r"\d+", "mode": "fullmatch"}, "12", "a 1") == [1, 0]
        assert judge({"type": "regex", "pattern": "(?i)yes"}, "YES") == [1]


SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "next": {"$ref": "#"}},
    "patternProperties": {"^x_": {"$ref": "#/$defs/number"}},
    "additionalProperties": False,
    "$defs": {"number": {"type": "number", "minimum": 0}},
}


class TestJsonSchema:
    @pytest.mark.parametrize(
        ("completion", "score"),
        [
            ('{"name": "Ada"}', 1), (' {"name": "Ada", "x_age": 36, "next": {"name": "Bob"}} \n', 1),
            ('{"name": "ada"}', 0), ('{"name": "Ada", "x_age": -1}', 0), ('{"name": "Ada", "age": 36}', 0),
            ('{"name": "Ada", "next": {"name": "bob"}}', 0), ("{}", 0), ("Ada", 0), ("", 0), ("[]", 0),
            ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', 1), ('```json\n{"name": "Ada"}', 0),
            ('```json\n{}\n```\n```json\n{"name": "Ada"}\n```', 1),
            ('```json\n{"name": "Ada"}\n```\n```json\n1\n```', 0),
            ('{"name": "Ada", "x_age": NaN}', 0), ('{"name": "Ada", "x_age": ' + "1" * 5000 + "}", 0),
            ("[" * 100_000, 0),
        ],
    )  # fmt: skip
    def test_the_completion_or_its_last_block_is_json_and_valid(self, completion: str, score: float) -> None:
        assert judge({"type": "json_schema", "schema": SCHEMA}, completion) == [score]

    def test_what_has_no_name_may_be_of_any_other_kind(self) -> None:
        schema = {"properties": {"a": True}, "additionalProperties": {"type": "integer"}}
        assert judge({"type": "json_schema", "schema": schema}, '{"a": "x", "b": 1}', '{"b": "x"}') == [1, 0]

    @pytest.mark.parametrize(
        ("document", "score"),
        [
            ("[]", 1), ("[1, 2]", 1), ("[1, 1.0]", 0), ("[1, true]", 1), ("[0, false]", 1), ("[0, -0.0]", 0),
            ('["1", 1]', 1), ('[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]', 0), ("[[1, 2], [2, 1]]", 1),
            ("[null, null]", 0), ('{"a": 1}', 1), ("[9007199254740993, 9007199254740992.0]", 1),
            ('[[], {}, "", null]', 1), ("[[true], [1]]", 1),
        ],
    )  # fmt: skip
    def test_items_are_the_same_as_json_schema_says(self, document: str, score: float) -> None:
        assert judge({"type": "json_schema", "schema": {"uniqueItems": True}}, document) == [score]
        assert judge({"type": "json_schema", "schema": {"uniqueItems": False}}, document) == [1]


class TestLength:
    def test_within_bounds_it_is_one_and_falls_to_zero_over_the_slack(self) -> None:
        fields = {"type": "length", "unit": "characters", "min": 4, "max": 6, "slack": 2}
        texts = ["x" * n for n in range(1, 10)]
        assert judge(fields, *texts) == [0, 0, 0.5, 1, 1, 1, 0.5, 0, 0]
        assert judge({**fields, "slack": 0}, *texts[2:7]) == [0, 1, 1, 1, 0]

    def test_special_tokens_do_not_count_nor_do_spaces_between_words(self) -> None:
        assert judge({"type": "length", "min": 3, "max": 3}, "abc", "ab", "abcd") == [1, 0, 0]
        assert judge({"type": "length", "unit": "words", "max": 2}, " a \n b ", "a b c") == [1, 0]


class TestStringCheck:
    @pytest.mark.parametrize(
        ("operation", "scores"),
        [("eq", [1, 0, 0, 0]), ("ne", [0, 1, 1, 1]), ("like", [1, 0, 1, 0]), ("ilike", [1, 1, 1, 0])],
    )
    def test_completion_is_compared_with_a_column_of_its_row(self, operation: str, scores: list[float]) -> None:
        fields = {"type": "string_check", "reference": "{{ item.city.name }}", "operation": operation}
        texts = ["Paris", "paris", "in Paris.", "Rome"]
        assert judge(fields, *texts, item={"city": {"name": "Paris"}}) == scores

    def test_completion_without_the_member_that_is_checked_gets_0_whatever_the_operation(self) -> None:
        fields = {"type": "string_check", "input": "{{ sample.output_json.n }}", "reference": "4"}
        for operation, right in (("eq", 1), ("ne", 0)):
            checks = {**fields, "operation": operation}
            assert judge(checks, '{"n": 4}', '{"n": 5}', '{"m": 4}', "4") == [right, 1 - right, 0, 0]

    def test_row_without_a_value_gives_no_score(self) -> None:
        fields = {"type": "string_check", "reference": "{{ item.answer }}"}
        assert judge(fields, "", "4", item={"answer": None}) == [None, None]


class TestTextSimilarity:
    TEXT = "A quick brown fox, it jumps over the lazy dogs and sleeps."
    REFERENCE = "The quick brown fox jumps over the lazy dog and then it sleeps!"

    def similarity(self, metric: str, text: str = TEXT, reference: str = REFERENCE) -> float:
        fields = {"type": "text_similarity", "reference": "{{ item.answer }}", "evaluation_metric": metric}
        (score,) = judge(fields, text, item={"answer": reference})
        assert score is not None and 0 <= score <= 1
        return score

    @pytest.mark.parametrize("metric", ["rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"])
    def test_rouge_is_that_of_rouge_score(self, metric: str) -> None:
        name = "rougeL" if metric == "rouge_l" else metric.replace("_", "")
        expected = RougeScorer([name]).score(self.REFERENCE, self.TEXT)[name].fmeasure
        assert self.similarity(metric) == pytest.approx(expected)

    def test_bleu_is_that_of_sacrebleu(self) -> None:
        expected = sacrebleu.sentence_bleu(self.TEXT, [self.REFERENCE]).score
        assert self.similarity("bleu") == pytest.approx(expected / 100) and expected > 10

    def test_gleu_is_the_smaller_of_precision_and_recall_of_n_grams(self) -> None:
        # Of 4 + 3 + 2 + 1 n-grams of the longer text, `a b c` and `a b` have 3 + 2 + 1 and 2 + 1 in common with it.
        assert self.similarity("gleu", "a b c", "a b c d") == pytest.approx(6 / 10)
        assert self.similarity("gleu", "a b c d", "a b") == pytest.approx(3 / 10)

    def test_fuzzy_match_is_the_share_of_characters_in_the_longest_common_subsequence(self) -> None:
        # As `rapidfuzz.fuzz.ratio("this is a test", "this is a test!")` = 96.55.
        assert self.similarity("fuzzy_match", "this is a test", "this is a test!") == pytest.approx(28 / 29)
        assert self.similarity("fuzzy_match", "abcd", "xbxdx") == pytest.approx(4 / 9)

    @pytest.mark.parametrize("metric", ["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_l"])
    def test_equal_texts_have_1_and_texts_of_nothing_in_common_0(self, metric: str) -> None:
        assert self.similarity(metric, "one two three four", "one two three four") == pytest.approx(1)
        assert self.similarity(metric, "ab", "xyz w") == self.similarity(metric, "", "xyz w") == 0


class TestFormat:
    @pytest.mark.parametrize(
        ("completion", "score"),
        [
            ("<think>a</think><answer>b</answer>", 1), ("so <think>\n</think> and <answer></answer> done", 1),
            ("<think>1 < 2</think><answer><b>x</b></answer>", 1),
            ("<answer>b</answer><think>a</think>", 0), ("<think>a<answer>b</answer></think>", 0),
            ("<think>a</think>", 0), ("<think>a</think><answer>b", 0), ("<answer>b</answer>", 0), ("", 0),
            ("<think>a</think><think>a</think><answer>b</answer>", 0), ("<THINK>a</THINK><answer>b</answer>", 0),
        ],
    )  # fmt: skip
    def test_each_section_is_there_once_and_in_order(self, completion: str, score: float) -> None:
        assert judge({"type": "format", "sections": ["think", "answer"]}, completion) == [score]


class TestNothingHangs:
    @pytest.mark.parametrize(
        "fields",
        [
            {"type": "regex", "pattern": CATASTROPHE},
            pytest.param({"type": "regex", "pattern": CATASTROPHE, "mode": "fullmatch"}, marks=pytest.mark.full),
            pytest.param({"type": "exact_match", "extract": CATASTROPHE}, marks=pytest.mark.full),
            pytest.param({"type": "numeric_match", "extract": CATASTROPHE}, marks=pytest.mark.full),
        ],
    )
    def test_a_catastrophic_pattern_costs_a_second_and_the_reward(self, fields: dict[str, Any]) -> None:
        self.takes(fields, VICTIM, seconds=1)

    @pytest.mark.parametrize(
        ("schema", "document"),
        [
            ({"pattern": CATASTROPHE}, VICTIM),
            pytest.param({"patternProperties": {CATASTROPHE: False}}, {VICTIM: 1}, marks=pytest.mark.full),
            pytest.param(
                {"patternProperties": {CATASTROPHE: True}, "additionalProperties": False}, {VICTIM: 1},
                marks=pytest.mark.full,
            ),
            pytest.param(
                {"$schema": SCHEMA["$schema"], "properties": {"a": {"$ref": "#"}}, "pattern": CATASTROPHE},
                {"a": VICTIM},
                marks=pytest.mark.full,
            ),
            (
                # Forty levels, each of which asks the one below twice.
                {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
                 | {"d40": {}}, "$ref": "#/$defs/d0"},
                1,
            ),
        ],
        ids=["pattern", "property", "further-property", "in-a-reference", "references"],
    )  # fmt: skip
    def test_a_catastrophic_schema_too(
        self, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], document: Any
    ) -> None:
        monkeypatch.setattr(rewards, "_TIMEOUT_SECONDS", 0.2)
        self.takes({"type": "json_schema", "schema": schema}, json.dumps(document), seconds=0.2)

    @pytest.mark.parametrize(
        ("schema", "score"),
        [
            ({"uniqueItems": True}, 1),
            ({"items": {"properties": {"a": {"uniqueItems": True}}}, "uniqueItems": True}, 1),
            # Each item two hundred times.
            ({"allOf": [{"items": {"properties": {"a": {"type": "integer"}}}}] * 200}, 0),
            pytest.param(
                {"allOf": [{"items": {"additionalProperties": {"type": "integer"}}}] * 200}, 0, marks=pytest.mark.full
            ),
            pytest.param(
                {"allOf": [{"contains": {"required": ["c"]}, "minContains": 0}] * 200}, 0, marks=pytest.mark.full
            ),
        ],
        ids=["unique", "unique-within", "properties", "further-properties", "contains"],
    )  # fmt: skip
    def test_a_long_document_ends_soon_whatever_is_asked_of_it(self, schema: dict[str, Any], score: float) -> None:
        (function,) = build_reward_functions([reward(type="json_schema", schema=schema)], TOKENIZER)
        document = json.dumps([{"a": at, "b": -at} for at in range(10_000)])
        started = time.monotonic()
        assert function(["?"], [document], [[2]]) == [score]
        assert time.monotonic() - started < 60
        assert function.timeouts == (score == 0)

    def test_a_long_line_of_opened_blocks_ends_soon(self) -> None:
        started = time.monotonic()
        assert judge({"type": "json_schema", "schema": {}}, "```json" * 20_000) == [0]
        assert time.monotonic() - started < 30

    def test_a_schema_that_goes_round_in_circles_gives_nothing(self) -> None:
        assert judge({"type": "json_schema", "schema": {"$ref": "#"}}, "1") == [0]

    def test_always_slow_reward_is_reported_once_and_costs_at_most_three_limits_per_call(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rewards, "_TIMEOUT_SECONDS", 0.2)
        reported: list[str] = []
        beats: list[int] = []
        slow, quick = build_reward_functions(
            [reward(type="regex", pattern=CATASTROPHE), reward(type="length", max=1)],
            TOKENIZER, lambda: beats.append(len(reported)), reported.append,
        )  # fmt: skip
        assert slow(["?"] * 2, [VICTIM] * 2, [[2]] * 2) == [0, 0]
        assert reported == [] and len(beats) == 2
        assert slow(["?"] * 50, ["a.Bc", *[VICTIM] * 49], [[2]] * 50) == [1, *[0] * 49]
        assert len(beats) == 52, "each completion is a sign of life"
        assert slow.timeouts == 5, "of 51, so that a call costs three times the limit"
        (line,) = reported
        assert "`regex`" in line and "too slow" in line
        assert slow(["?"], ["a.Bc"], [[2]]) == [1], "the next call is judged again"
        assert quick(["?"], ["a"], [[2]]) == [1] and len(reported) == 1

    @staticmethod
    def takes(fields: dict[str, Any], completion: str, seconds: float) -> None:
        (function,) = build_reward_functions([reward(**fields)], TOKENIZER)
        started = time.monotonic()
        assert function(["?"], [completion], [[2]], answer=["7"]) == [0]
        assert 0.9 * seconds < time.monotonic() - started < 60
        assert function.timeouts == 1


class TestFunctions:
    def test_reward_functions_have_distinct_names_in_order_without_reward_models(self) -> None:
        rewards = [
            reward(type="regex", pattern="a"), reward(type="model", model="org/judge"),
            reward(type="length", max=3), reward(type="regex", pattern="b"),
        ]  # fmt: skip
        assert [function.__name__ for function in build_reward_functions(rewards, TOKENIZER)] == [
            "regex",
            "length",
            "regex_2",
        ]

    def test_of_messages_the_last_ones_content_counts_and_columns_that_no_one_asked_for_do_not_matter(self) -> None:
        (function,) = build_reward_functions([reward(type="regex", pattern="yes")], TOKENIZER)
        said = [{"role": "assistant", "content": "no"}, {"role": "assistant", "content": "yes"}]
        silent = [{"role": "assistant", "content": None}]
        assert function(["?", "?"], [said, silent], [[2], [2]], colour=["red", "red"], trainer_state=None) == [1, 0]

    def test_a_row_without_an_answer_is_not_judged_by_it(self) -> None:
        for kind in ("exact_match", "numeric_match"):
            (function,) = build_reward_functions([reward(type=kind)], TOKENIZER)
            assert function(["?", "?"], ["1", "1"], [[2], [2]], answer=[None, "1"]) == [None, 1]
            assert function(["?"], ["1"], [[2]]) == [None]

    def test_answers_are_needed_by_matches_alone(self) -> None:
        assert needs_answer([reward(type="length", max=3), reward(type="numeric_match")])
        assert needs_answer([reward(type="exact_match")])
        assert not needs_answer([reward(type="length", max=3), reward(type="model", model="org/judge")])

    def test_importing_them_imports_no_torch(self) -> None:
        program = (
            "import sys, worker.training.methods.rewards; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_rewards_that_are_equal_in_ten_steps_in_a_row_cost_one_warning_that_a_resume_does_not_repeat() -> None:
    lines: list[str] = []
    trainer: Any = object.__new__(RewardTrainerMixin)
    report = SimpleNamespace(message=lambda line, *, level: lines.append(f"{level}: {line}"))
    trainer.run = SimpleNamespace(state=RunState(), report=report)
    for shares in ([1.0] * 9, [0.5], [1.0] * 9):
        trainer._warn_of_equal_rewards(shares)
    assert lines == []
    trainer.run.state = RunState(**asdict(trainer.run.state))
    trainer._warn_of_equal_rewards([1.0])
    (line,) = lines
    assert line.startswith("warning: In 10 steps in a row") and "rlhf.temperature" in line
    for shares in ([1.0] * 5, [0.0], [1.0] * 20):
        trainer._warn_of_equal_rewards(shares)
    assert len(lines) == 1
