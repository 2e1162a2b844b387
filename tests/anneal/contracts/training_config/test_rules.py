"""Configurations of methods that are not supervised: which fields apply to these methods, rewards included."""

import json
import time
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from anneal.contracts.methods import OPTION_GROUPS
from anneal.contracts.rewards import Reward, metric_names
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from anneal.contracts.training_config.validation import config_errors
from tests.properties import examples

ANSWER = {"type": "exact_match"}


def conflicts_of(config: dict[str, Any], has_eval_dataset: bool = False) -> dict[str, tuple[str, str]]:
    """Code and sentence of each problem, by field."""
    reported = config_errors({"base_model": "tiny", **config}, has_eval_dataset=has_eval_dataset)
    assert len({problem.field for problem in reported}) == len(reported)
    return {problem.field: (problem.code, problem.message) for problem in reported}


def rlhf(*rewards: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A configuration of method `rlhf`."""
    return {"method": "rlhf", "rlhf": {"rewards": [*rewards], **options}}


CONFIGS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in ("dpo", "kto", "orpo", "simpo", "reward")},
    "rlhf": rlhf(ANSWER),
    "gkd": {"method": "gkd", "gkd": {"teacher": "larger"}},
}


@pytest.mark.parametrize("memory_profile", [{}, {"memory_profile": "steps"}])
def test_bound_of_allocations_without_their_profile_is_refused(memory_profile: dict[str, Any]) -> None:
    ((field, (code, message)),) = conflicts_of({"extra": {"memory_profile_entries": 5000, **memory_profile}}).items()
    assert (field, code) == ("extra.memory_profile_entries", "conflict")
    assert "unless `extra.memory_profile` is true" in message
    assert conflicts_of({"extra": {"memory_profile_entries": "2k", "memory_profile": True}}) == {}


@pytest.mark.parametrize("method", CONFIGS)
class TestEveryMethod:
    def test_defaults_will_do(self, method: str) -> None:
        assert conflicts_of(CONFIGS[method]) == {}

    @pytest.mark.parametrize(
        ("fields", "four_bit", "rank"),
        [
            ({}, True, 16), ({"load_in_8bit": True}, False, 16), ({"load_in_4bit": False}, False, 16),
            ({"lora_r": None}, False, None),
        ],
    )  # fmt: skip
    def test_weights_train_as_for_sft(
        self, method: str, fields: dict[str, Any], four_bit: bool, rank: int | None
    ) -> None:
        config = {"base_model": "tiny", **CONFIGS[method], **fields}
        resolved = resolve_config(TrainingConfig.model_validate(config), given_fields(config), DeviceCapabilities())
        assert (resolved.config.load_in_4bit, resolved.config.lora_r, resolved.problems) == (four_bit, rank, [])

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"packing": True}, "packing"), ({"loss_on": "assistant"}, "loss_on"),
            ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
            ({"extra": {"packing_strategy": "wrapped"}}, "extra.packing_strategy"),
        ],
    )  # fmt: skip
    def test_fields_of_supervised_methods_are_refused_for_other_methods(
        self, method: str, fields: dict[str, Any], field: str
    ) -> None:
        ((name, (code, message)),) = conflicts_of({**CONFIGS[method], **fields}).items()
        assert (name, code) == (field, "conflict") and f"`{method}`" in message

    def test_keeping_the_end_is_for_pairs_that_are_cut(self, method: str) -> None:
        assert set(conflicts_of({**CONFIGS[method], "truncation_mode": "keep_end"})) == (
            set() if method in ("dpo", "orpo", "simpo", "gkd") else {"truncation_mode"}
        )

    def test_options_of_another_one_are_refused(self, method: str) -> None:
        others = {group: {"beta": 0.2} for group in OPTION_GROUPS}
        others.pop(method, None)
        assert set(conflicts_of({**CONFIGS[method], **others})) == set(others)

    def test_a_scorer_may_train_its_head_and_features_of_supervised_methods_may_be_off(self, method: str) -> None:
        assert conflicts_of({**CONFIGS[method], "modules_to_save": ["score"], "packing": False, "loss_on": "all"}) == {}


class TestDpo:
    @pytest.mark.parametrize("loss", ["robust", "exo_pair", "aot", "aot_unpaired"])
    def test_label_smoothing_is_for_four_losses(self, loss: str) -> None:
        assert conflicts_of({"method": "dpo", "dpo": {"loss_type": loss, "label_smoothing": 0.1}}) == {}

    @pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "apo_zero", "sigmoid_norm"])
    def test_label_smoothing_is_refused_for_other_losses_naming_those_that_take_it(self, loss: str) -> None:
        reported = conflicts_of({"method": "dpo", "dpo": {"loss_type": loss, "label_smoothing": 0.1}})
        assert set(reported) == {"dpo.label_smoothing"} and "`robust`" in reported["dpo.label_smoothing"][1]
        assert conflicts_of({"method": "dpo", "dpo": {"loss_type": loss}}) == {}

    def test_exo_pair_cannot_do_without(self) -> None:
        assert set(conflicts_of({"method": "dpo", "dpo": {"loss_type": "exo_pair"}})) == {"dpo.loss_type"}

    @pytest.mark.parametrize("loss", ["sft", "discopop", "rpo"])
    def test_losses_that_need_further_options_are_unknown(self, loss: str) -> None:
        assert conflicts_of({"method": "dpo", "dpo": {"loss_type": loss}})["dpo.loss_type"][0] == "unknown_value"

    def test_half_of_the_pairs_cannot_be_wrong(self) -> None:
        options = {"loss_type": "robust", "label_smoothing": 0.5}
        assert conflicts_of({"method": "dpo", "dpo": options})["dpo.label_smoothing"][0] == "out_of_range"


class TestKto:
    def test_a_micro_batch_needs_two_rows(self) -> None:
        code, message = conflicts_of({"method": "kto", "batch_size": 1})["batch_size"]
        assert code == "conflict" and "`kto`" in message and message.endswith("set it to 2 or more.")
        assert (
            conflicts_of({"method": "kto", "batch_size": 2}) == conflicts_of({"method": "dpo", "batch_size": 1}) == {}
        )

    @pytest.mark.parametrize(
        ("options", "field", "code"),
        [
            ({"beta": 0}, "kto.beta", "out_of_range"),
            ({"desirable_weight": -1}, "kto.desirable_weight", "out_of_range"),
            ({"undesirable_weight": "1"}, "kto.undesirable_weight", "wrong_type"),
            ({"loss_type": "bco"}, "kto.loss_type", "unknown_value"),
            ({"label_smoothing": 0.1}, "kto.label_smoothing", "unknown_field"),
        ],
    )
    def test_options_out_of_bounds_are_refused(self, options: dict[str, Any], field: str, code: str) -> None:
        assert conflicts_of({"method": "kto", "kto": options})[field][0] == code

    def test_options_of_both_losses_are_accepted(self) -> None:
        options = {"beta": 0.2, "loss_type": "apo_zero_unpaired", "desirable_weight": 1.5, "undesirable_weight": 0}
        assert conflicts_of({"method": "kto", "kto": options, "truncation_mode": "keep_start"}) == {}


class TestRlhf:
    @pytest.mark.parametrize("rewards", [[], [{**ANSWER, "weight": 0.0}]])
    def test_without_a_reward_there_is_nothing_to_learn(self, rewards: list[dict[str, Any]]) -> None:
        assert conflicts_of(rlhf(*rewards)) == {
            "rlhf.rewards": (
                "needs_rewards",
                "`rlhf.rewards` needs at least one reward with a non-zero weight: without one there is nothing to "
                "learn.",
            )
        }

    @pytest.mark.parametrize(
        ("batch", "steps", "generations", "says"),
        [
            (4, 3, 8, "`gradient_accumulation_steps` to 2 or 4, or `rlhf.num_generations` to 6 or 12"),
            (1, 4, 8, "`gradient_accumulation_steps` to 8, or `rlhf.num_generations` to 4"),
            (1, 1, 2, "`gradient_accumulation_steps` to 2"),
            (6, 5, 4, "`gradient_accumulation_steps` to 4 or 6, or `rlhf.num_generations` to 3 or 5"),
        ],
    )
    def test_a_step_holds_whole_groups_and_the_nearest_values_are_named(
        self, batch: int, steps: int, generations: int, says: str
    ) -> None:
        config = {
            **rlhf(ANSWER, num_generations=generations), "batch_size": batch, "gradient_accumulation_steps": steps,
        }  # fmt: skip
        ((field, (code, message)),) = conflicts_of(config).items()
        assert (field, code) == ("rlhf.num_generations", "conflict")
        assert message.endswith(f"set {says}.")

    def test_so_does_an_evaluation_whose_size_was_given(self) -> None:
        config = {**rlhf(ANSWER), "eval_steps": 5, "extra": {"eval_batch_size": 12}}
        assert set(conflicts_of(config, has_eval_dataset=True)) == {"extra.eval_batch_size"}
        assert conflicts_of({**config, "extra": {"eval_batch_size": 16}}, has_eval_dataset=True) == {}
        assert conflicts_of({**config, "extra": {}}, has_eval_dataset=True) == {}

    def test_beside_the_completion_there_must_be_room_for_a_prompt(self) -> None:
        config = {**rlhf(ANSWER, max_completion_length=256), "max_seq_length": 256}
        assert set(conflicts_of(config)) == {"rlhf.max_completion_length"}
        assert conflicts_of({**config, "max_seq_length": 257}) == {}
        assert conflicts_of({**config, "max_seq_length": None}) == {}

    def test_refused_rewards_are_the_only_error(self) -> None:
        assert set(conflicts_of(rlhf({"type": "regex"}, num_generations=7))) == {"rlhf.rewards.0.pattern"}


GOOD: list[dict[str, Any]] = [
    {"type": "exact_match"}, {"type": "exact_match", "ignore_case": True, "strip": False, "extract": r"= (\w+)"},
    {"type": "numeric_match", "relative_tolerance": 0.01, "absolute_tolerance": 0.0},
    {"type": "regex", "pattern": r"(?i)\\boxed\{.{1,100}\}", "mode": "fullmatch", "weight": -0.5},
    {"type": "regex", "pattern": r"^.{0,500}\(\(x{300}[)(]{300}.{0,500}(?#()$"},
    {"type": "regex", "pattern": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"},
    {"type": "json_schema", "schema": {}}, {"type": "length", "max": 10}, {"type": "length", "min": 1},
    {"type": "json_schema", "schema": {"$ref": "#/$defs/a~1b/properties/x", "$defs": {
        "a/b": {"properties": {"x": {"$ref": "#"}}}}}},
    {"type": "json_schema", "schema": {"properties": {"pattern": {"type": "string"}, "$ref": {"type": "string"}}}},
    {"type": "length", "min": 5, "max": 5, "unit": "words", "slack": 3},
    {"type": "format", "sections": ["think", "answer"]}, {"type": "model", "model": "org/judge"},
    {"type": "model", "model": "run_01k0000000000000000000000a", "weight": 2.0},
    {"type": "http", "url": "https://scores.example.com", "rows_per_request": 1, "timeout_seconds": 5.0},
    {"type": "http", "url": "http://[fd00::1]:8080/v1/score_(a);b=c", "weight": -1.0},
    {"type": "judge", "url": "https://api.example.com/v1", "model": "org/grader", "rubric": "10: polite, 1: {rude}."},
    {"type": "judge", "url": "https://host", "model": "m", "rubric": "r", "scale": [-1, 2], "parameters": {"seed": 7}},
    {"type": "judge", "url": "https://host", "model": "m", "labels": ["very good", "bad"], "passing_labels": ["bad"],
     "messages": [{"role": "user", "content": "{{ item.a-b.0 }}: {{ sample.output_json }}"}]},
    {"type": "string_check", "reference": "yes"},
    {"type": "string_check", "input": "{{ sample.output_json.a }}", "reference": "{{ item.a }}", "operation": "ilike"},
    {"type": "text_similarity", "reference": "{{ item.answer }}", "evaluation_metric": "rouge_2"},
]  # fmt: skip
JUDGE = {"type": "judge", "url": "https://host", "model": "m", "rubric": "r"}
BAD: list[tuple[Any, str, str, str]] = [
    ({"type": "magic"}, ".type", "unknown_value", "'numeric_match'"),
    ({"weight": 1.0}, ".type", "missing", "required"),
    ("exact_match", "", "wrong_type", "object"),
    ({**ANSWER, "pattern": "a"}, ".pattern", "unknown_field", "not a field"),
    ({**ANSWER, "weight": float("nan")}, ".weight", "not_finite", "finite"),
    ({**ANSWER, "ignore_case": 1}, ".ignore_case", "wrong_type", "boolean"),
    ({"type": "regex"}, ".pattern", "missing", "required"),
    ({"type": "regex", "pattern": ""}, ".pattern", "out_of_range", "at least 1"),
    ({"type": "regex", "pattern": "a" * 1001}, ".pattern", "out_of_range", "1000"),
    ({"type": "numeric_match", "relative_tolerance": 1.0}, ".relative_tolerance", "out_of_range", "less than 1"),
    ({"type": "json_schema"}, ".schema", "missing", "required"),
    ({"type": "json_schema", "schema": "{}"}, ".schema", "wrong_type", "dictionary"),
    ({"type": "json_schema", "schema": {"title": "a" * 20_000}}, ".schema", "bad_schema", "20,000"),
    ({"type": "length"}, "", "bad_bounds", "`min` or `max`"),
    ({"type": "length", "min": 2, "max": 1}, "", "bad_bounds", "`min` above its `max`"),
    ({"type": "length", "max": 1, "unit": "bytes"}, ".unit", "unknown_value", "words"),
    ({"type": "format", "sections": []}, ".sections", "out_of_range", "at least 1"),
    ({"type": "format", "sections": ["a", "a"]}, "", "bad_bounds", "twice"),
    ({"type": "format", "sections": ["a b"]}, ".sections.0", "invalid_name", "characters"),
    ({"type": "model"}, ".model", "missing", "required"),
    ({"type": "model", "model": "../judge"}, ".model", "invalid_name", "not a path outside the models root"),
    ({"type": "http"}, ".url", "missing", "required"),
    *(
        ({"type": "http", "url": url}, ".url", "bad_url", "without user, password")
        for url in (
            "", "scores.example.com", "ftp://scores.example.com", "https://", "https://ada:key@host",
            "https://host?key=k", "https://host/#k", "https://host:70000", "https://host:0", "https://ho st",
            "https://host/a b", "https://host\\@other", "https://[::1", "https://host/\n", "https://hóst/",
            "HTTPS://host", "https://[host]/",
        )
    ),
    ({"type": "http", "url": "https://host/" + "a" * 2000}, ".url", "out_of_range", "2000"),
    ({"type": "http", "url": "https://host", "rows_per_request": 0}, ".rows_per_request", "out_of_range", "greater"),
    ({"type": "http", "url": "https://host", "timeout_seconds": 601}, ".timeout_seconds", "out_of_range", "600"),
    ({"type": "http", "url": "https://host", "api_key": "k"}, ".api_key", "unknown_field", "not a field"),
    ({"type": "string_check"}, ".reference", "missing", "required"),
    ({"type": "string_check", "reference": "{{ answer }}"}, ".reference", "bad_template", "`{{ item.column }}`"),
    ({"type": "string_check", "reference": "{{ item.a"}, ".reference", "bad_template", "without `}}`"),
    ({"type": "text_similarity", "reference": "a", "evaluation_metric": "cosine"}, ".evaluation_metric",
     "unknown_value", "fuzzy_match"),
    ({"type": "judge", "url": "https://host", "model": "m"}, "", "bad_instructions", "`rubric` or `messages`"),
    ({**JUDGE, "messages": [{"role": "user", "content": "a"}]}, "", "bad_instructions", "not both"),
    ({**JUDGE, "labels": ["a", "b"]}, "", "bad_instructions", "`passing_labels`"),
    ({**JUDGE, "labels": ["a", "b"], "passing_labels": ["c"]}, "", "bad_instructions", "has `c`"),
    ({**JUDGE, "labels": ["a\nb", "b"], "passing_labels": ["b"]}, ".labels.0", "invalid_name", "characters"),
    ({**JUDGE, "rubric": ""}, ".rubric", "out_of_range", "at least 1"),
    ({**JUDGE, "rubric": "r" * 8001}, ".rubric", "out_of_range", "8000"),
    ({**JUDGE, "scale": [1]}, ".scale", "out_of_range", "at least 2"),
    ({**JUDGE, "scale": [2, 2]}, "", "bad_bounds", "lowest mark is not below"),
    ({**JUDGE, "parameters": {"stream": True}}, "", "bad_parameters", "`stream` in `parameters`"),
    ({**JUDGE, "parameters": {"a": float("nan")}}, "", "bad_parameters", "not JSON"),
    ({**JUDGE, "parameters": {"a": "x" * 8000}}, "", "bad_parameters", "8,000"),
]  # fmt: skip


FIELDS = st.sampled_from([
    "pattern", "extract", "schema", "min", "max", "slack", "unit", "sections", "model", "url", "weight", "mode", "$ref",
    "$defs", "properties", "patternProperties", "multipleOf", "type", "#", "#/$defs/model", "a{2,3}", "[[:a:]]",
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | FIELDS | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(
    [
        "exact_match",
        "numeric_match",
        "regex",
        "json_schema",
        "length",
        "format",
        "string_check",
        "text_similarity",
        "model",
        "http",
        "judge",
        "x",
    ]
)


class TestRewards:
    @pytest.mark.parametrize("reward", GOOD, ids=str)
    def test_a_good_one_is_kept_as_it_was_written(self, reward: dict[str, Any]) -> None:
        assert conflicts_of(rlhf(reward)) == {}
        config = TrainingConfig.model_validate({"base_model": "tiny", **rlhf(reward)})
        dumped = config.model_dump(mode="json")
        assert reward.items() <= dumped["rlhf"]["rewards"][0].items()
        assert TrainingConfig.model_validate(dumped) == config

    @pytest.mark.parametrize(("reward", "field", "code", "says"), BAD, ids=[str(bad[0])[:80] for bad in BAD])
    def test_a_bad_one_is_refused_by_place_field_and_reason(
        self, reward: Any, field: str, code: str, says: str
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ((name, reported),) = conflicts_of(rlhf(ANSWER, reward)).items()
        assert (name, reported[0]) == (f"rlhf.rewards.1{field}", code)
        assert says in reported[1] and reported[1].endswith(".")

    def test_all_of_them_are_reported_at_once(self) -> None:
        reported = conflicts_of(rlhf({"type": "regex", "pattern": ""}, ANSWER, {"type": "format"}))
        assert set(reported) == {"rlhf.rewards.0.pattern", "rlhf.rewards.2.sections"}

    def test_together_they_are_short(self) -> None:
        schemas = [{"type": "json_schema", "schema": {"title": "a" * 19_900, "minimum": at}} for at in range(4)]
        assert conflicts_of(rlhf(*schemas[:3])) == {}
        ((name, (code, message)),) = conflicts_of(rlhf(*schemas)).items()
        assert (name, code) == ("rlhf.rewards", "out_of_range") and "65,536 bytes" in message
        assert set(conflicts_of(rlhf(*schemas * 5))) == {"rlhf.rewards"}

    def test_what_is_short_enough_stays_so_with_all_defaults_written_out(self) -> None:
        def patterns(spare: int) -> list[dict[str, Any]]:
            many = [{"type": "exact_match", "extract": "\N{GRINNING FACE}" * 300} for _ in range(18)]
            return [*many, {"type": "regex", "pattern": "a" * (64 * 1024 - 18 * (300 * 12 + 2) - 2 - spare)}]

        longest = patterns(0)
        dumped = TrainingConfig.model_validate({"base_model": "tiny", **rlhf(*longest)}).model_dump(mode="json")
        assert len(json.dumps(dumped)) > 64 * 1024
        assert TrainingConfig.model_validate(dumped).model_dump(mode="json") == dumped
        assert set(conflicts_of(rlhf(*patterns(-1)))) == {"rlhf.rewards"}

    @pytest.mark.parametrize("reward", [
        {"type": "regex", "pattern": "(?i)" + r"[ -\uffff]" * 99}, {"type": "numeric_match", "extract": "("},
        {"type": "json_schema", "schema": {"pattern": "(?i)" + r"[ -\uffff]" * 390}},
    ], ids=["pattern", "extract", "schema"])  # fmt: skip
    def test_reward_patterns_are_not_compiled_when_config_is_parsed(self, reward: dict[str, Any]) -> None:
        began = time.thread_time()
        assert conflicts_of(rlhf(reward)) == {}
        assert time.thread_time() - began < 0.3

    def test_each_has_a_name_of_its_own(self) -> None:
        kinds = ["length", "regex", "length", "length"]
        adapter: TypeAdapter[Any] = TypeAdapter(Reward)
        rewards = [adapter.validate_python({"type": it, **({"max": 1} if it == "length" else {"pattern": "a"})})
                   for it in kinds]  # fmt: skip
        assert metric_names(rewards) == ["length", "regex", "length_2", "length_3"]

    @given(st.lists(st.builds(lambda kind, rest: {**rest, "type": kind}, KINDS, st.dictionaries(FIELDS, VALUES))))
    @examples(50)
    def test_no_reward_however_odd_raises_and_what_is_said_of_it_is_json(self, rewards: list[dict[str, Any]]) -> None:
        reported = config_errors({"base_model": "tiny", **rlhf(*rewards)}, has_eval_dataset=False)
        json.dumps([problem.model_dump() for problem in reported], ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "full"}, None),
        ({"method": "sft", "lora_r": None}, None),
        ({"method": "qlora", "output": "merged"}, None),
        ({"method": "qlora"}, "set `output` to `merged`"),
        ({"method": "lora", "output": "adapter"}, "set `output` to `merged`"),
        ({"method": "reward", "output": "merged"}, "models that generate text"),
    ],
)
def test_a_gguf_file_has_a_whole_model_that_generates_text(config: dict[str, Any], says: str | None) -> None:
    conflicts = conflicts_of({**config, "gguf": "f16"})
    assert list(conflicts) == ([] if says is None else ["gguf"])
    assert says is None or says in conflicts["gguf"][1]


@pytest.mark.parametrize(
    ("name", "stored"), [("Q4_K_M", "Q4_K_M"), ("q4_k_m", "Q4_K_M"), ("Q5_K", "Q5_K_M"), ("f16", "F16")]
)
def test_a_gguf_type_may_be_an_alias_of_llama_cpp_in_any_case(name: Any, stored: str) -> None:
    assert TrainingConfig(base_model="tiny", gguf=name).gguf == stored


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("IQ2_XXS", "needs_importance_matrix", "use `Q2_K`"),
        ("q2_k_s", "needs_importance_matrix", "is `Q2_K_S`"),
        ("Q4_K_L", "unknown_value", "'Q4_K_M'"),
        ("q4", "unknown_value", "perhaps `Q4_K_M`"),
        (4, "unknown_value", "'Q4_K_M'"),
    ],
)
def test_a_gguf_type_that_a_run_cannot_write_is_refused(name: Any, code: str, says: str) -> None:
    conflicts = conflicts_of({"method": "full", "gguf": name})
    assert conflicts["gguf"][0] == code and says in conflicts["gguf"][1]
