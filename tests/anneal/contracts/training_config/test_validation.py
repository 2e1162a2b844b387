"""What a training configuration accepts, and refuses by name."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anneal.contracts.methods import TrainingMethod
from anneal.contracts.run_status import TrainingStatus
from anneal.contracts.training_config.field_traits import CHANGEABLE_ON_RESUME
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities, sharding_obstacles
from anneal.contracts.training_config.sequence_parallel import sequence_parallel_obstacles
from anneal.contracts.training_config.validation import config_errors, resume_problems
from tests.anneal.contracts.training_config.configurations import CPU, GPU, OLD_GPU, codes, effective
from tests.properties import examples

FIELDS = st.sampled_from([*TrainingConfig.model_fields, "beta", "rewards", "type", "max_grad_norm", "a.b", ""])
NAMES = FIELDS | st.text(st.characters(exclude_categories=[]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
CONFIGS = st.dictionaries(NAMES, VALUES, max_size=6)
"""Whatever a client can send as JSON: any names, lone surrogates among them, and any values."""


class TestDtype:
    @pytest.mark.parametrize(("machine", "expected"), [(CPU, "float32"), (GPU, "bfloat16"), (OLD_GPU, "float16")])
    def test_default_follows_from_the_device(self, machine: DeviceCapabilities, expected: str) -> None:
        assert effective(machine).config.dtype == expected

    @pytest.mark.parametrize(
        ("dtype", "machine"), [("bfloat16", CPU), ("float32", CPU), ("float16", GPU), ("float32", GPU)]
    )
    def test_quantized_layers_compute_in_the_dtype_that_was_set(self, dtype: str, machine: DeviceCapabilities) -> None:
        resolved = effective(machine, dtype=dtype)
        assert (resolved.config.bnb_4bit_compute_dtype, resolved.problems) == (dtype, [])

    @pytest.mark.parametrize(("dtype", "machine"), [("bfloat16", OLD_GPU), ("float16", CPU)])
    def test_dtype_that_the_device_lacks_is_refused(self, dtype: str, machine: DeviceCapabilities) -> None:
        (error,) = effective(machine, dtype=dtype).problems
        assert (error.field, error.code) == ("dtype", "not_on_this_machine") and "leave it out" in error.message

    def test_unsupported_data_type_for_4_bit_layers_is_refused(self) -> None:
        config = {"dtype": "bfloat16", "bnb_4bit_compute_dtype": "float32"}
        assert codes(config) == {("bnb_4bit_compute_dtype", "conflict")}

    def test_flash_attention_in_32_bits_is_refused(self) -> None:
        config = {"dtype": "float32", "attn_implementation": "flash_attention_2"}
        assert codes(config) == {("attn_implementation", "conflict")}


class TestWeightsDtype:
    """`weights_dtype`: weights that are trained in bfloat16."""

    FULL = {"method": "full", "weights_dtype": "bfloat16"}

    def test_optimizer_and_computation_follow(self) -> None:
        resolved = effective(CPU, **self.FULL)
        assert (resolved.config.optim, resolved.config.dtype) == ("adamw_torch_8bit", "bfloat16")
        assert [(one.field, one.requested) for one in resolved.replaced if one.field == "optim"] == [
            ("optim", "paged_adamw_8bit")
        ]

    @pytest.mark.parametrize(
        ("fields", "error"),
        [
            ({"method": "lora", "weights_dtype": "bfloat16"}, ("weights_dtype", "conflict")),
            ({**FULL, "optim": "adamw_torch"}, ("optim", "conflict")),
            ({**FULL, "extra": {"optimizer": {"type": "mine"}}}, ("weights_dtype", "conflict")),
            ({**FULL, "dtype": "float32"}, ("dtype", "conflict")),
            ({**FULL, "weights_dtype": "float16"}, ("weights_dtype", "unknown_value")),
            ({**FULL, "machine": OLD_GPU}, ("weights_dtype", "not_on_this_machine")),
        ],
    )
    def test_weights_dtype_that_would_lose_updates_is_refused(
        self, fields: dict[str, Any], error: tuple[str, str]
    ) -> None:
        machine = fields.get("machine")
        config = {name: value for name, value in fields.items() if name != "machine"}
        assert codes(config, machine=machine) == {error}

    def test_model_with_own_weights_dtype_cannot_be_sharded(self) -> None:
        config = TrainingConfig(base_model="tiny", **self.FULL)
        (obstacle,) = sharding_obstacles(config, {"weights_dtype"})
        assert "`weights_dtype`" in obstacle


class TestFieldsAndDefaults:
    def test_every_default_is_the_contracts(self) -> None:
        config = TrainingConfig(base_model="tiny").model_dump(mode="json")
        contract = {
            "method": "qlora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": None,
            "learning_rate": 2e-4, "batch_size": 4, "gradient_accumulation_steps": 4, "epochs": 3,
            "max_steps": None, "warmup_ratio": 0.03, "weight_decay": 0.01, "load_in_4bit": True,
            "load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": "nf4",
            "optim": "adamw_torch_fused", "lr_scheduler_type": "cosine", "gradient_checkpointing": "auto",
            "save_steps": 100, "save_total_limit": 3, "logging_steps": 10, "max_seq_length": 2048,
            "packing": False, "seed": 42, "extra": {}, "eval_steps": None, "eval_split": 0.0, "loss_on": None,
            "truncation_mode": "keep_start", "time_limit_seconds": None, "stop_at_step": None, "min_steps": None,
            "early_stopping_patience": None, "tokenizer": None, "layers_to_transform": None,
            "trainable_token_indices": None, "init_lora_weights": "default",
            "wandb_project": None, "wandb_entity": None, "wandb_name": None,
            "wandb_group": None, "on_non_finite": "stop", "on_spike": "ignore",
            "on_out_of_memory": "repair", "max_eval_rows": None, "export": "best", "output": "adapter", "gguf": None,
            "sample_steps": None, "sample_prompts": [], "sample_max_new_tokens": 64, "sample_temperature": 1.0,
            "chat_template": None, "dtype": None, "weights_dtype": "float32",
            "overfit_first_batch": False, "attn_implementation": None, "torch_compile": False,
            "activation_offload": False, "use_rslora": False, "use_dora": False, "modules_to_save": None,
            "neftune_noise_alpha": None, "revision": None, "report_to": [], "push_to_hub": None,
            "dpo": {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0},
            "kto": {"beta": 0.1, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
            "orpo": {"beta": 0.1}, "simpo": {"beta": 2.0, "gamma": 1.0},
            "gkd": {"teacher": None, "lmbda": 0.5, "beta": 0.5, "temperature": 1.0, "seq_kd": False,
                    "max_completion_length": 256},
            "rlhf": {"algorithm": "grpo", "rewards": [], "num_generations": 8, "max_completion_length": 256,
                     "temperature": 1.0, "beta": 0.0},
        }  # fmt: skip
        assert config == {"base_model": "tiny", **contract}

    @pytest.mark.parametrize(
        ("fields", "rate", "optim"),
        [
            ({}, 2e-4, "adamw_torch_fused"),
            ({"method": "full"}, 2e-5, "paged_adamw_8bit"),
            ({"method": "sft"}, 2e-4, "adamw_torch_fused"),
            ({"method": "sft", "lora_r": None}, 2e-5, "paged_adamw_8bit"),
            ({"method": "dpo"}, 5e-6, "adamw_torch_fused"),
            ({"method": "dpo", "lora_r": None}, 1e-6, "paged_adamw_8bit"),
            ({"method": "kto"}, 5e-6, "adamw_torch_fused"),
            ({"method": "orpo"}, 2e-5, "adamw_torch_fused"),
            ({"method": "reward"}, 1e-4, "adamw_torch_fused"),
            ({"method": "rlhf"}, 1e-5, "adamw_torch_fused"),
            ({"method": "dpo", "learning_rate": 2e-4, "optim": "sgd"}, 2e-4, "sgd"),
        ],
    )
    def test_rate_and_optimizer_are_those_of_the_method_unless_they_are_given(
        self, fields: dict[str, Any], rate: float, optim: str
    ) -> None:
        config = TrainingConfig.model_validate({"base_model": "tiny", **fields})
        assert (config.learning_rate, config.optim) == (rate, optim)

    def test_methods_and_statuses_are_the_contracts(self) -> None:
        assert {*TrainingMethod} == {
            "full",
            "lora",
            "qlora",
            "dpo",
            "kto",
            "orpo",
            "simpo",
            "reward",
            "rlhf",
            "sft",
            "gkd",
        }
        assert [*TrainingStatus] == [
            "pending", "initializing", "running", "checkpointing", "completed", "failed", "cancelled",
        ]  # fmt: skip

    def test_config_survives_json(self) -> None:
        config = TrainingConfig(base_model="owner/model", method=TrainingMethod.lora, target_modules=["q_proj"])
        assert TrainingConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config

    def test_every_field_has_a_description_and_the_model_an_example(self) -> None:
        schema = TrainingConfig.model_json_schema()
        assert all(schema["properties"][name].get("description") for name in TrainingConfig.model_fields)
        assert codes(schema["example"]) == set()

    def test_importing_it_imports_no_torch(self) -> None:
        program = (
            "import sys, anneal.contracts.training_config.validation; "
            "sys.exit(any(m in sys.modules for m in ('torch', 'fastapi')))"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class TestEachFieldIsChecked:
    @pytest.mark.parametrize(
        ("fields", "field", "code"),
        [
            ({"learning_rate": -1e-4}, "learning_rate", "out_of_range"),
            ({"learning_rate": 0}, "learning_rate", "out_of_range"),
            ({"learning_rate": 1e9}, "learning_rate", "out_of_range"),
            ({"learning_rate": float("nan")}, "learning_rate", "not_finite"),
            ({"learning_rate": float("inf")}, "learning_rate", "not_finite"),
            ({"learning_rate": True}, "learning_rate", "wrong_type"),
            ({"learning_rate": "1e-4"}, "learning_rate", "wrong_type"),
            ({"batch_size": True}, "batch_size", "wrong_type"),
            ({"batch_size": 0}, "batch_size", "out_of_range"),
            ({"logging_steps": -1}, "logging_steps", "out_of_range"),
            ({"batch_size": 10**30}, "batch_size", "out_of_range"),
            ({"batch_size": "4 "}, "batch_size", "bad_count"),
            ({"lora_dropout": "0.1"}, "lora_dropout", "wrong_type"),
            ({"save_total_limit": True}, "save_total_limit", "wrong_type"),
            ({"report_to": ["wandb"], "wandb_project": "a/b"}, "wandb_project", "invalid_name"),
            ({"wandb_group": "runs of today"}, "wandb_group", "conflict"),
            ({"batch_size": 4.5}, "batch_size", "wrong_type"),
            ({"batch_size": None}, "batch_size", "wrong_type"),
            ({"epochs": 0}, "epochs", "out_of_range"),
            ({"lora_dropout": 1.0}, "lora_dropout", "out_of_range"),
            ({"lora_r": 0}, "lora_r", "out_of_range"),
            ({"eval_split": 1.0}, "eval_split", "out_of_range"),
            ({"seed": -1}, "seed", "out_of_range"),
            ({"method": "magic"}, "method", "unknown_value"),
            ({"method": 3}, "method", "unknown_value"),
            ({"optim": "adam"}, "optim", "unknown_value"),
            ({"loss_on": "prompt"}, "loss_on", "unknown_value"),
            ({"gradient_checkpointing": "yes"}, "gradient_checkpointing", "wrong_type"),
            ({"target_modules": []}, "target_modules", "out_of_range"),
            ({"target_modules": ["a b"]}, "target_modules.0", "invalid_name"),
            ({"rlhf": {"rewards": [{"type": "x"}]}}, "rlhf.rewards.0.type", "unknown_value"),
            ({"dpo": {"gamma": 1}}, "dpo.gamma", "unknown_field"),
            ({"learning_rte": 1e-4}, "learning_rte", "unknown_field"),
            ({"lone \ud800": 1}, "lone ?", "unknown_field"),
            ({"a.b": 1}, "a.b", "unknown_field"),
            ({"learning_rate.x": 1}, "learning_rate.x", "unknown_field"),
            ({"": 1}, '""', "unknown_field"),
            ({"n" * 300: 1}, "n" * 200, "unknown_field"),
            ({"batch_size": 10**5000}, "batch_size", "out_of_range"),
            ({"extra": {"\ud800": 1}}, "extra", "invalid"),
            ({"extra": {"zero": 1}}, "extra.zero", "unknown_field"),
            ({"extra": {"max_grad_norm": "1"}}, "extra.max_grad_norm", "wrong_type"),
            ({"extra": {"memory_profile": "all"}}, "extra.memory_profile", "wrong_type"),
            ({"base_model": ""}, "base_model", "out_of_range"),
        ],
    )
    def test_a_bad_value_is_refused_by_name(self, fields: dict[str, Any], field: str, code: str) -> None:
        assert codes(fields) == {(field, code)}

    @pytest.mark.parametrize(
        "name",
        [
            "../secret",
            "a/../../b",
            "/",
            "/../etc",
            "/srv/../etc",
            "//etc",
            "a//b",
            "~/m",
            "a\\b",
            "a\0b",
            "a/.",
            ".hidden",
            "a\n",
            "%2e%2e/x",
            " a",
            "a ",
            "a /b",
        ],
    )
    def test_a_base_model_cannot_leave_the_models_root(self, name: str) -> None:
        assert codes({"base_model": name}) == {("base_model", "invalid_name")}

    @pytest.mark.parametrize(
        "name",
        [
            "tiny",
            "owner/model-1.5B",
            "run_01k0000000000000000000000a",
            "a/b/c",
            "a..b",
            "my model/v 2",
            "/srv/models/tiny",
        ],
    )
    def test_folders_hub_names_and_runs_are_names(self, name: str) -> None:
        assert codes({"base_model": name}) == set()

    def test_a_missing_base_model_is_said(self) -> None:
        assert ("base_model", "missing") in {(p.field, p.code) for p in config_errors({}, has_eval_dataset=False)}

    @pytest.mark.parametrize("config", [None, [], "x", 3])
    def test_something_that_is_no_object_is_refused(self, config: Any) -> None:
        assert codes(config) == {("config", "wrong_type")}

    def test_any_number_of_wrong_fields_is_answered_with_the_first_two_hundred(self) -> None:
        assert len(codes({f"wrong{n}": n for n in range(1000)})) == 200

    @given(CONFIGS)
    @examples(50)
    def test_no_json_object_however_odd_raises_and_what_is_said_of_it_is_json(self, config: dict[str, Any]) -> None:
        errors = config_errors(config, has_eval_dataset=False, dataset_format="chat", machine=CPU)
        json.dumps([problem.model_dump() for problem in errors], ensure_ascii=False).encode()
        assert {problem.field.split(".")[0] for problem in errors} or TrainingConfig.model_validate(config)

    def test_a_metric_function_has_a_name(self) -> None:
        fields = {"eval_split": 0.1, "eval_steps": 1}
        assert codes({**fields, "extra": {"metrics": ["a b"]}}) == {("extra.metrics.0", "invalid_name")}
        assert codes({**fields, "extra": {"metrics": ["brier"]}}) == set()
        assert codes({**fields, "method": "dpo", "extra": {"metrics": ["brier"]}}) == set()

    @pytest.mark.parametrize(
        ("steps", "code"),
        [("epoch", None), ("1k", None), (5, None), ("epochs", "bad_count"), (0, "out_of_range"), (True, "wrong_type"),
         ([1], "wrong_type")],
    )  # fmt: skip
    def test_an_interval_is_a_number_of_steps_or_an_epoch(self, steps: Any, code: str | None) -> None:
        for name in ("save_steps", "eval_steps", "sample_steps"):
            fields = {"eval_split": 0.1, "eval_steps": 1, "sample_steps": 1, "sample_prompts": ["why"], name: steps}
            assert {problem for problem in codes(fields) if problem[0] == name} == ({(name, code)} if code else set())
        (problem,) = config_errors({"base_model": "m", "save_steps": "epochs"}, has_eval_dataset=False)
        assert problem.message == "`save_steps` must be a number of steps or \"epoch\", not 'epochs'."
        assert given_fields({"save_steps": "1e2"}) == set() and given_fields({"save_steps": "epoch"}) == {"save_steps"}

    @pytest.mark.parametrize(
        ("prompts", "problem"),
        [
            ([], ("sample_prompts", "missing")),
            ("why", ("sample_prompts", "wrong_type")),
            (["why"] * 9, ("sample_prompts", "out_of_range")),
            ([""], ("sample_prompts.0", "out_of_range")),
            (["x" * 4001], ("sample_prompts.0", "out_of_range")),
            (["x" * 4000] * 3, ("sample_prompts", "out_of_range")),
            ([3], ("sample_prompts.0", "wrong_type")),
            ([[]], ("sample_prompts.0", "out_of_range")),
            (["why", [{"role": "user"}]], ("sample_prompts.1.0.content", "missing")),
            ([[{"role": "boss", "content": "why"}]], ("sample_prompts.0.0.role", "unknown_value")),
            ([[{"role": "user", "content": "why", "name": "me"}]], ("sample_prompts.0.0.name", "unknown_field")),
        ],
    )
    def test_bad_prompts_are_refused_by_place(self, prompts: Any, problem: tuple[str, str]) -> None:
        assert codes({"sample_steps": 5, "sample_prompts": prompts}) == {problem}

    def test_a_near_miss_names_the_field_that_was_meant(self) -> None:
        (problem,) = config_errors({"base_model": "m", "learning_rat": 1}, has_eval_dataset=False)
        assert "`learning_rate`" in problem.message

    def test_all_problems_come_at_once_conflicts_included(self) -> None:
        config = {"method": "full", "load_in_8bit": True, "batch_size": -1, "nonsense": 1, "extra": {"no": 1},
                  "eval_steps": 5}  # fmt: skip
        assert codes(config) == {
            ("batch_size", "out_of_range"), ("nonsense", "unknown_field"), ("extra.no", "unknown_field"),
            ("load_in_8bit", "conflict"), ("eval_steps", "needs_eval_data"),
        }  # fmt: skip


class TestConflicts:
    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"method": "full", "load_in_8bit": True}, "load_in_8bit"),
            ({"method": "full", "lora_r": 8}, "lora_r"),
            ({"method": "full", "use_dora": True}, "use_dora"),
            ({"method": "full", "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
            ({"method": "lora", "load_in_8bit": True}, "load_in_8bit"),
            ({"method": "lora", "lora_r": None}, "lora_r"),
            ({"method": "qlora", "load_in_4bit": False}, "load_in_4bit"),
            ({"method": "sft", "lora_r": None, "load_in_8bit": True}, "load_in_8bit"),
            ({"method": "sft", "lora_r": None, "lora_dropout": 0.1}, "lora_dropout"),
            ({"load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
            ({"target_modules": ["lm_head"]}, "target_modules"),
            ({"dpo": {"beta": 0.2}}, "dpo"),
            ({"sample_prompts": ["why"]}, "sample_prompts"),
            ({"sample_max_new_tokens": 8}, "sample_max_new_tokens"),
            ({"method": "reward", "sample_steps": 5, "sample_prompts": ["why"]}, "sample_steps"),
            ({"rlhf": {"beta": 0.2}}, "rlhf"),
            ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "warmup_ratio"),
            ({"max_steps": 5, "min_steps": 6}, "min_steps"),
            ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-7}, "learning_rate"),
            ({"base_model": "run_1", "revision": "main"}, "revision"),
            ({"packing": True, "max_seq_length": None}, "packing"),
            ({"optim": "sgd", "extra": {"adam_beta1": 0.5}}, "extra.adam_beta1"),
            ({"optim": "lion_8bit", "extra": {"adam_epsilon": 1e-6}}, "extra.adam_epsilon"),
            ({"optim": "adafactor", "extra": {"adam_beta1": 0.5}}, "extra.adam_beta1"),
            ({"extra": {"optim_args": {"momentum": 0.5}}}, "extra.optim_args.momentum"),
            ({"extra": {"lr_scheduler_kwargs": {"min_lr": 1e-6}}}, "extra.lr_scheduler_kwargs.min_lr"),
            (
                {"lr_scheduler_type": "cosine_with_min_lr", "extra": {"lr_scheduler_kwargs": {"min_lr": 1e-3}}},
                "learning_rate",
            ),
            ({"extra": {"packing_strategy": "wrapped"}}, "extra.packing_strategy"),
            ({"packing": True, "extra": {"padding_free": True}}, "extra.padding_free"),
            ({"packing": True, "extra": {"padding_free": False}}, "extra.padding_free"),
            ({"attn_implementation": "sdpa", "extra": {"padding_free": True}}, "extra.padding_free"),
            ({"neftune_noise_alpha": 5.0, "extra": {"padding_free": True}}, "extra.padding_free"),
            ({"method": "dpo", "extra": {"padding_free": True}}, "extra.padding_free"),
            (
                {"packing": True, "extra": {"packing_strategy": "wrapped"}, "truncation_mode": "keep_end"},
                "truncation_mode",
            ),
        ],
    )
    def test_fields_that_contradict_each_other_are_refused(self, fields: dict[str, Any], field: str) -> None:
        assert codes(fields) == {(field, "conflict")}

    @pytest.mark.parametrize(
        "fields",
        [
            {"method": "full"}, {"method": "full", "lora_r": None}, {"method": "lora"}, {"method": "qlora"},
            {"method": "sft"}, {"method": "sft", "lora_r": None}, {"method": "sft", "load_in_4bit": False},
            {"method": "qlora", "load_in_8bit": True}, {"method": "qlora", "load_in_4bit": False, "load_in_8bit": True},
            {"extra": {"max_grad_norm": 0.5}}, {"packing": True, "extra": {"packing_strategy": "wrapped"}},
            {"lr_scheduler_type": "constant"},
            {"optim": "sgd", "extra": {"optim_args": {"momentum": 0.9, "nesterov": True}}},
            {"lr_scheduler_type": "cosine_with_min_lr", "extra": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}},
            {"lr_scheduler_type": "warmup_stable_decay", "extra": {"lr_scheduler_kwargs": {"num_decay_steps": "1k"}}},
        ],
    )  # fmt: skip
    def test_fields_that_go_together_are_accepted(self, fields: dict[str, Any]) -> None:
        assert codes(fields) == set()

    def test_schedule_without_its_required_fields_is_refused(self) -> None:
        missing = {("extra.lr_scheduler_kwargs", "missing")}
        assert codes({"lr_scheduler_type": "warmup_stable_decay"}) == missing
        assert codes({"lr_scheduler_type": "cosine_with_min_lr"}) == missing
        both = {"lr_scheduler_kwargs": {"min_lr": 1e-6, "min_lr_rate": 0.1}}
        assert codes({"lr_scheduler_type": "cosine_with_min_lr", "extra": both}) == missing

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"optim": "lomo"}, "backward pass"),
            ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "a resumed run"),
            ({"optim": "galore_adafactor"}, "use `adafactor`"),
            ({"optim": "galore_adamw"}, "use `paged_adamw_8bit`"),
            ({"optim": "galore_adamw_8bit"}, "`paged_adamw_8bit`"),
            ({"optim": "apollo_adamw"}, "`paged_adamw_8bit`"),
            ({"optim": "grokadamw"}, "`adamw_torch_fused`"),
            ({"optim": "stable_adamw"}, "`extra.optimizer`"),
        ],
    )
    def test_a_name_of_transformers_that_is_not_supported_says_why(self, fields: dict[str, Any], says: str) -> None:
        (problem,) = config_errors({"base_model": "tiny", **fields}, has_eval_dataset=False)
        assert problem.code == "unknown_value" and says in problem.message

    @pytest.mark.parametrize(
        ("extra", "field", "code"),
        [
            ({"optim_args": {"momentum": 2}}, "extra.optim_args.momentum", "out_of_range"),
            ({"optim_args": "momentum=0.9"}, "extra.optim_args", "wrong_type"),
            ({"lr_scheduler_kwargs": {"speed": 1}}, "extra.lr_scheduler_kwargs.speed", "unknown_field"),
            ({"lr_scheduler_kwargs": [1]}, "extra.lr_scheduler_kwargs", "wrong_type"),
            ({"optim_target_modules": ["q_proj"]}, "extra.optim_target_modules", "unknown_field"),
        ],
    )
    def test_bad_options_of_both_are_refused_by_name(self, extra: dict[str, Any], field: str, code: str) -> None:
        assert (field, code) in codes({"extra": extra})

    def test_evaluation_needs_both_data_and_an_interval(self) -> None:
        assert codes({"eval_steps": 5}) == {("eval_steps", "needs_eval_data")}
        assert codes({"max_eval_rows": 5}) == {("max_eval_rows", "needs_eval_data")}
        assert codes({"max_eval_rows": None}) == set()
        assert codes({"max_eval_rows": "1k", "eval_steps": 5}, has_eval_dataset=True) == set()
        assert codes({"max_eval_rows": 0, "eval_steps": 5, "eval_split": 0.1}) == {("max_eval_rows", "out_of_range")}
        assert codes({"eval_split": 0.1}) == {("eval_steps", "needs_eval_steps")}
        assert codes({}, has_eval_dataset=True) == {("eval_steps", "needs_eval_steps")}
        assert codes({"early_stopping_patience": 2}) == {("early_stopping_patience", "needs_eval_steps")}
        assert codes({"eval_steps": 5, "eval_split": 0.1}, has_eval_dataset=True) == {("eval_split", "conflict")}
        assert codes({"eval_steps": 5, "eval_split": 0.1}) == set()
        assert codes({"eval_steps": 5, "early_stopping_patience": 1}, has_eval_dataset=True) == set()

    def test_what_is_learned_must_exist_in_the_data(self) -> None:
        assert codes({"loss_on": "assistant"}, dataset_format="text") == {("loss_on", "conflict")}
        assert codes({"loss_on": "assistant"}, dataset_format="prompt_completion") == {("loss_on", "conflict")}
        assert codes({"loss_on": "completion"}, dataset_format="text") == {("loss_on", "conflict")}
        assert codes({"loss_on": "completion"}, dataset_format="chat") == set()
        assert codes({"loss_on": "assistant"}, dataset_format="chat") == set()
        for name, value in (("loss_on", "all"), ("loss_on", "assistant"), ("chat_template", "{{ messages }}")):
            assert codes({name: value}, dataset_format="tokenized") == {(name, "conflict")}
        assert codes({"loss_on": None, "packing": True}, dataset_format="tokenized") == set()

    @pytest.mark.parametrize(
        ("method", "dataset_format", "config", "used"),
        [
            ("full", "prompt_completion", {}, "completion"), ("qlora", "prompt_completion", {}, "completion"),
            ("full", "chat", {}, "all"), ("full", "text", {}, "all"),
            ("full", "prompt_completion", {"loss_on": "all"}, "all"),
            ("full", "chat", {"loss_on": "assistant"}, "assistant"),
            ("dpo", "preference", {}, None), ("full", None, {}, None),
        ],
    )  # fmt: skip
    def test_without_loss_on_the_format_of_the_data_decides_what_is_learned(
        self, method: str, dataset_format: str | None, config: dict[str, Any], used: str | None
    ) -> None:
        parsed = TrainingConfig.model_validate({"base_model": "tiny", "method": method, **config})
        assert resolve_config(parsed, set(config), None, dataset_format=dataset_format).config.loss_on == used

    def test_a_stored_default_of_an_older_version_stays(self) -> None:
        stored = TrainingConfig.model_validate({"base_model": "tiny", "loss_on": "all"})
        assert resolve_config(stored, set(), None, dataset_format="prompt_completion").config.loss_on == "all"

    @pytest.mark.parametrize("field", ["torch_compile", "activation_offload"])
    def test_method_that_generates_refuses_what_its_trainer_cannot_do(self, field: str) -> None:
        config = {"method": "rlhf", "rlhf": {"rewards": [{"type": "exact_match"}]}, field: True}
        assert codes(config) == {(field, "conflict")}

    def test_offloaded_activations_need_a_gpu_and_are_recomputed_there_by_default(self) -> None:
        config = {"activation_offload": True}
        assert codes(config, machine=CPU) == {("activation_offload", "not_on_this_machine")}
        assert codes(config, machine=GPU) == set()
        assert effective(GPU, **config).config.gradient_checkpointing is True
        assert effective(GPU, **config, gradient_checkpointing=False).config.gradient_checkpointing is False

    def test_compiled_layers_can_be_neither_sharded_nor_divided_by_sequence(self) -> None:
        config = TrainingConfig(base_model="tiny", method="lora", torch_compile=True)
        for obstacles in (sharding_obstacles(config, {"torch_compile"}), sequence_parallel_obstacles(config)):
            assert any("`torch_compile`" in obstacle for obstacle in obstacles)

    def test_a_given_value_that_the_machine_cannot_honor_is_refused(self) -> None:
        refused = ("not_on_this_machine",)
        assert codes({"optim": "paged_adamw_32bit"}, machine=CPU) == {("optim", *refused)}
        assert codes({"attn_implementation": "flash_attention_2"}, machine=GPU) == {("attn_implementation", *refused)}
        second = DeviceCapabilities(kind="cuda", bf16=True, flash_attention=True)
        assert codes({"attn_implementation": "flash_attention_2"}, machine=second) == set()
        assert codes({"attn_implementation": "flash_attention_3"}, machine=second) == {
            ("attn_implementation", *refused)
        }
        assert codes({"bnb_4bit_compute_dtype": "float16"}, machine=CPU) == {("bnb_4bit_compute_dtype", *refused)}
        assert codes({"use_dora": True, "load_in_8bit": True}, machine=CPU) == {("use_dora", *refused)}
        assert codes({"optim": "paged_adamw_32bit"}, machine=GPU) == set()
        assert codes({}, machine=CPU) == set()


class TestResume:
    def test_lengths_limits_and_rates_may_change_and_nothing_else(self) -> None:
        parent = TrainingConfig(base_model="tiny").model_dump(mode="json")
        for name, field in TrainingConfig.model_fields.items():
            refused = resume_problems(parent, {name: object()})
            assert (refused == []) == (name in CHANGEABLE_ON_RESUME), field
        assert resume_problems(parent, {"seed": 42, "max_steps": 7}) == []
        assert resume_problems(parent, {"batch_size": "2**2", "max_seq_length": "2_048", "max_steps": "10k"}) == []
        assert [p.code for p in resume_problems(parent, {"lora_r": 8})] == ["not_changeable_on_resume"]
