"""Figures of estimates by formula alone: no database, no model, no training."""

import time
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from anneal.contracts.schemas import estimates
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.validation import config_errors
from app.estimator import architecture, memory_planner
from app.estimator.activations import Precision, compute_activations
from app.estimator.architecture import Architecture, UnknownArchitecture
from app.estimator.flops import estimate_flops, uncounted_parts
from app.estimator.forward_pass import Batch
from app.estimator.memory import Components, estimate_memory, optimizer_state
from app.estimator.model_sizes import largest_model
from app.estimator.parameters import total_parameters, trainable_part
from app.estimator.steps import Data, attention_of, plan_steps
from tests.app.estimator.models import CHECKS, GIB, LLAMA, TINY, counted, effective


def operations(data: Data, *, model: Architecture | None = None, **fields: Any) -> Any:
    """What there is to do for a run."""
    config, model = effective(**fields), model or architecture.read_architecture(LLAMA)
    counted_work = estimate_flops(model, config, plan_steps(model, config, data), "off")
    assert counted_work is not None
    return counted_work


class TestStepsAndTokens:
    @pytest.mark.parametrize(
        ("fields", "steps", "tokens"),
        [
            ({"epochs": 1}, 7, 10_000),
            ({"epochs": 2.5}, 18, 2 * 10_000 + 4 * 16 * 100),
            ({"epochs": 0.0001}, 1, 16 * 100),
            ({"epochs": 1, "min_steps": 1000}, 1000, 142 * 10_000 + 6 * 16 * 100),
            ({"epochs": 1, "min_steps": 3}, 7, 10_000),
            ({"max_steps": 50}, 50, 7 * 10_000 + 16 * 100),
            ({"epochs": 1, "min_steps": 1000, "stop_at_step": 10}, 10, 10_000 + 3 * 16 * 100),
            ({"epochs": 1, "batch_size": 4096}, 1, 10_000),
            ({"epochs": 1, "packing": True, "max_seq_length": 2048, "batch_size": 4096}, 1, 10_000),
        ],
    )
    def test_tokens_are_those_of_all_steps(self, fields: dict[str, Any], steps: int, tokens: int) -> None:
        step_plan = plan_steps(architecture.read_architecture(LLAMA), effective(**fields), counted())
        assert (step_plan.steps, step_plan.tokens) == (steps, tokens)

    @pytest.mark.parametrize("method", ["dpo", "reward"])
    def test_tokens_of_a_pair_count_its_prompt_twice(self, method: str) -> None:
        """Prompts of 1,000 tokens, answers of 100."""
        model, config = architecture.read_architecture(LLAMA), effective(method=method, epochs=1)
        now: Any = {"tokenizer": "any", "rows": 1000, "sequences": 2000, "mean": 1100.0, "max": 1100}
        step_plan = plan_steps(model, config, Data(1000, None, now))
        assert (step_plan.tokens, step_plan.attended, step_plan.batch.length) == (2_200_000, 1100, 1100)
        # What an earlier version counted, and bytes, do not tell how long the prompts are; that is said.
        old = {"tokenizer": "any", "rows": 1000, "mean": 1200.0, "max": 1200}
        for data in (Data(1000, None, old), Data(1000, 4_800_000)):
            step_plan = plan_steps(model, config, data)
            assert step_plan.tokens == 2 * 1000 * 800
            assert any("prompt and the two answers of a pair are assumed" in said for said in step_plan.assumptions)
        assert plan_steps(model, config, Data(1000, None)).attended == 2048

    @pytest.mark.parametrize(("fields", "steps"), [({}, None), ({"max_steps": 50}, 50)])
    def test_steps_of_a_data_source_are_unknown(self, fields: dict[str, Any], steps: int | None) -> None:
        config = effective(extra={"data_source": {"type": "lake"}}, max_seq_length=512, **fields)
        model = architecture.read_architecture(LLAMA)
        step_plan = plan_steps(model, config, counted())
        assert (step_plan.steps, step_plan.tokens, step_plan.batch.tokens) == (steps, None, 4 * 512)
        assert estimate_flops(model, config, step_plan, "off") is None


class TestOperations:
    def test_grow_with_the_mean_row_and_not_with_the_longest(self) -> None:
        assert operations(counted(largest=100)).training == operations(counted(largest=2000)).training

    def test_operations_of_packed_texts_equal_those_of_each_text(self) -> None:
        fields = {"packing": True, "max_steps": 10}
        short, long = (operations(counted(10_000, mean), **fields).training for mean in (100.0, 2000.0))
        stream = operations(counted(10_000), **fields, extra={"packing_strategy": "wrapped"}).training
        assert short < long < stream * 1.001 and stream == pytest.approx(long, rel=0.01)

    def test_operations_of_a_reference_model_are_those_of_a_forward_pass(self) -> None:
        one_pass, two = (operations(counted(), method="dpo", epochs=epochs) for epochs in (1, 2))
        forward = 2 * total_parameters(architecture.read_architecture(LLAMA)) * one_pass.tokens
        assert one_pass.training - two.training / 2 == pytest.approx(forward, rel=0.1)

    def test_operations_of_a_kl_term_are_those_of_further_forward_passes(self) -> None:
        fields: dict[str, Any] = {"method": "kto", "epochs": 1}
        without, with_kl = (
            operations(counted(), **fields, kto={"loss_type": loss}) for loss in ("apo_zero_unpaired", "kto")
        )
        forward = 2 * total_parameters(architecture.read_architecture(LLAMA)) * without.tokens
        assert with_kl.training - without.training == pytest.approx(2 * forward, rel=0.1)
        beforehand, with_kl = (
            operations(counted(), **fields | {"epochs": 2}, kto={"loss_type": loss})
            for loss in ("apo_zero_unpaired", "kto")
        )
        assert with_kl.training - beforehand.training == pytest.approx(2 * forward, rel=0.1)

    def test_computed_beforehand_are_named(self) -> None:
        model = architecture.read_architecture(LLAMA)
        for epochs, said in ((1, 0), (2, 1)):
            config = effective(method="dpo", epochs=epochs)
            assert len(uncounted_parts(config, plan_steps(model, config, counted()))) == said

    def test_operations_of_generation_are_a_forward_pass_for_each_token(self) -> None:
        free, held = (
            operations(counted(), method="rlhf", rlhf={"rewards": CHECKS, "beta": beta}, max_steps=10)
            for beta in (0.0, 0.1)
        )
        forward = 2 * total_parameters(architecture.read_architecture(LLAMA)) * free.tokens
        assert free.writing == pytest.approx(forward, rel=0.1)
        assert held.training - free.training == pytest.approx(forward, rel=0.1)
        assert operations(counted()).writing == 0


@pytest.mark.parametrize(
    ("device", "dtype", "autocast", "base"),
    [
        ("cuda", "bfloat16", True, 2), ("cuda", "float16", True, 2), ("cuda", "float32", False, 4),
        ("cpu", "float32", False, 4), ("cpu", "bfloat16", True, 2),
    ],
)  # fmt: skip
def test_precision_follows_the_dtype_of_the_run(device: Any, dtype: Any, autocast: bool, base: int) -> None:
    config = TrainingConfig(base_model="any", method="lora", dtype=dtype)
    assert Precision.for_device(config, device) == Precision(device, autocast=autocast, base=base)


class TestMemory:
    def test_weights_in_bfloat16_halve_weights_and_gradients(self) -> None:
        model = architecture.read_architecture(LLAMA)

        def parts(**fields: Any) -> Any:
            config = effective(method="full", optim="adamw_torch_8bit", **fields)
            batch = plan_steps(model, config, counted()).batch
            precision = Precision.for_device(config, "cuda")
            return estimate_memory(model, config, precision, batch, "full", attention_of(model, config))

        precise, half = parts(), parts(weights_dtype="bfloat16")
        assert half.components.weights * 2 == precise.components.weights
        assert half.components.gradients * 2 == precise.components.gradients
        assert half.components.optimizer == precise.components.optimizer
        saved = precise.components.weights + precise.components.gradients
        assert precise.peak - half.peak >= saved // 2

    def test_dropout_of_adapters_in_32_bits_takes_what_torch_needs_as_no_kernel_computes_it(self) -> None:
        model = architecture.read_architecture(LLAMA)

        def peak(dtype: str, dropout: float) -> int:
            config = effective(method="lora", dtype=dtype, lora_dropout=dropout)
            return estimate_memory(
                model, config, Precision.for_device(config, "cuda"), Batch(1, 4096), "full", "sdpa"
            ).peak

        mib = 2**20
        assert peak("bfloat16", 0.05) - peak("bfloat16", 0.0) < mib < peak("float32", 0.05) - peak("float32", 0.0)

    def test_trained_tokens_of_tied_embeddings_take_a_copy_of_the_head_and_its_gradient(self) -> None:
        def peak(tied: bool, **tokens: Any) -> int:
            model = architecture.read_architecture({**LLAMA, "tie_word_embeddings": tied})
            config = effective(method="lora", **tokens)
            return estimate_memory(
                model, config, Precision.for_device(config, "cuda"), Batch(1, 4096), "full", "sdpa"
            ).peak

        tokens, matrix, mib = [*range(4)], 128256 * 4096 * 2, 2**20
        assert peak(True, trainable_token_indices=tokens) - peak(True) == pytest.approx(2 * matrix, abs=mib)
        assert 0 < peak(False, trainable_token_indices=tokens) - peak(False) < mib

    @pytest.mark.parametrize(("optim", "bits"), [("adamw_torch_8bit", 8), ("adamw_torch_4bit", 4)])
    def test_state_of_optimizers_of_torchao_has_their_bits(self, optim: str, bits: int) -> None:
        rows, columns = 1024, 4096
        state = optimizer_state([("embedding", rows, columns)], effective(method="full", optim=optim))
        assert 2 * rows * columns * bits / 8 < state < 2.2 * rows * columns * bits / 8

    @pytest.mark.parametrize(
        ("fields", "sequences", "length"),
        [
            ({}, 1, 100 * 100),
            ({"eval_split": 0.1}, 1, 90 * 100),
            ({"extra": {"padding_free": False}}, 100, 100),
            ({"attn_implementation": "sdpa"}, 100, 100),
            ({"neftune_noise_alpha": 5.0}, 100, 100),
            ({"method": "dpo"}, 200, 100),
            ({"packing": True, "max_seq_length": 1024}, 1, 10 * 1024),
            ({"packing": True, "max_seq_length": 1024, "extra": {"packing_strategy": "wrapped"}}, 10, 1024),
        ],
        ids=str,
    )
    def test_no_micro_batch_has_more_than_the_rows_there_are(
        self, fields: dict[str, Any], sequences: int, length: int
    ) -> None:
        batch = plan_steps(architecture.read_architecture(LLAMA), effective(batch_size=4096, **fields), counted()).batch
        assert (batch.sequences, batch.length) == (sequences, length)

    def test_without_an_adapter_a_reference_is_a_second_base(self) -> None:
        model = architecture.read_architecture(LLAMA)

        def needed(**fields: Any) -> Any:
            config = effective(method="rlhf", **fields)
            batch = plan_steps(model, config, counted()).batch
            return estimate_memory(
                model, config, Precision.for_device(config, "cuda"), batch, "full", attention_of(model, config)
            )

        free, held = (needed(rlhf={"rewards": CHECKS, "beta": beta}, lora_r=None) for beta in (0.0, 0.1))
        assert held.peak - free.peak == held.components.reference == held.components.weights
        assert held.components.reference / GIB == pytest.approx(29.9, abs=0.1)
        adapter = needed(rlhf={"rewards": CHECKS, "beta": 0.1})
        assert adapter.components.reference == 0, "with an adapter the base is its own reference"

    def test_an_optimizer_of_the_operator_is_not_taken_for_an_8_bit_one(self) -> None:
        model, state = architecture.read_architecture(LLAMA), []
        for more in ({}, {"extra": {"optimizer": {"type": "mine"}}}):
            config = effective(method="full", **more)
            batch = plan_steps(model, config, counted()).batch
            estimated = estimate_memory(model, config, Precision.for_device(config, "cuda"), batch, "full", "sdpa")
            state.append(estimated.components.optimizer / total_parameters(model))
        assert state[0] < 4 and state[1] == pytest.approx(8, rel=0.01)

    def test_the_documented_example_is_what_the_code_says(self) -> None:
        model, config = architecture.read_architecture(LLAMA), effective(epochs=1)
        planned = plan_steps(model, config, counted(12_640, 173.56, 320))
        shown: Any = estimates.EXAMPLE
        device, precision = shown["device"], Precision.for_device(config, "cuda")
        choice = memory_planner.choose_checkpointing(
            model, config, precision, planned.batch, device["memory_mb"] * 2**20
        )
        todo = estimate_flops(model, config, planned, choice.checkpointing)
        assert shown["memory_mb"] == choice.memory.as_megabytes()
        assert shown["parameters"] == {
            "total": total_parameters(model),
            "trainable": trainable_part(model, config).count,
        }
        assert (shown["steps"], shown["tokens"]) == (planned.steps, planned.tokens)
        assert todo is not None and shown["flops"] == pytest.approx(todo.training)
        assert shown["fits"][0]["reason"] == choice.reason
        assert shown["fits"][0]["total_mb"] == shown["memory_mb"]["total"]


class TestLiger:
    """With liger-kernel, a layer keeps fewer tensors; the shape is that of Qwen3-8B."""

    QWEN = {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "head_dim": 128,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    TEXTS = Batch(1, 4 * 4096, texts=4, positions_each=True)

    def needed(self, recomputed: Any, *, has_liger: bool, **fields: Any) -> Any:
        model, config = architecture.read_architecture(self.QWEN), effective(**{"method": "qlora", **fields})
        precision = Precision.for_device(config, "cuda", has_liger=has_liger)
        return estimate_memory(model, config, precision, self.TEXTS, recomputed, attention_of(model, config))

    def test_a_layer_keeps_inputs_of_norms_and_products_and_what_attention_needs(self) -> None:
        hidden, keys, inner, heads, kv_heads = 4096, 1024, 12_288, 32, 8
        in_16_bits = (
            2 * hidden  # inputs of both norms
            + 2 * hidden  # their results: inputs of products
            + (hidden + keys)  # inputs of the norms of queries and keys
            + (hidden + 2 * keys)  # what attention multiplies
            + hidden  # its result
            + 3 * inner  # gate, up, and their product
            + 7 * 16  # what adapters of rank 16 project to
        )
        in_32_bits = 2 + heads + kv_heads + heads  # reciprocals of norms, sums of attention
        seeds = 7 * 8  # of dropout
        expected = self.TEXTS.tokens * (2 * in_16_bits + 4 * in_32_bits) + seeds
        recomputed = self.TEXTS.tokens * 2 * hidden
        less, more = (self.needed(layers, has_liger=True).activations.kept_bytes for layers in (11, 10))
        assert more - less == expected - recomputed

    @pytest.mark.parametrize("method", ["qlora", "lora", "full"])
    def test_less_is_kept_and_the_peak_is_lower(self, method: str) -> None:
        with_liger, without = (self.needed("off", has_liger=has, method=method) for has in (True, False))
        assert with_liger.activations.kept_bytes < 0.8 * without.activations.kept_bytes
        assert without.peak - with_liger.peak > 0.9 * (
            without.activations.kept_bytes - with_liger.activations.kept_bytes
        )

    def test_a_cpu_does_not_use_it(self) -> None:
        config = effective(method="lora")
        assert Precision.for_device(config, "cpu", has_liger=True) == Precision.for_device(config, "cpu")

    @pytest.mark.parametrize(("family", "method"), [("gpt2", "lora"), ("phi", "lora"), ("gemma3_text", "reward")])
    def test_a_model_that_it_lacks_takes_as_much_as_without(self, family: str, method: str) -> None:
        model, config = architecture.read_architecture({"model_type": family, **TINY}), effective(method=method)
        batch = plan_steps(model, config, counted()).batch
        with_liger, without = (
            estimate_memory(model, config, Precision.for_device(config, "cuda", has_liger=has), batch, "off", "sdpa")
            for has in (True, False)
        )
        assert with_liger == without

    def test_the_gated_layers_of_a_model_with_experts_keep_as_much_as_without(self) -> None:
        config = effective(method="full")
        batch = Batch(2, 64)

        def kept_bytes(layers_without_experts: list[int], *, has_liger: bool) -> int:
            file = {"model_type": "qwen3_moe", **TINY, "mlp_only_layers": layers_without_experts}
            precision = Precision.for_device(config, "cuda", has_liger=has_liger)
            return compute_activations(
                architecture.read_architecture(file), config, precision, batch, "off", "sdpa"
            ).kept_bytes

        dense, sparse = (
            kept_bytes(layers, has_liger=False) - kept_bytes(layers, has_liger=True) for layers in ([0], [])
        )
        assert dense == sparse > 0

    def test_a_number_of_recomputed_layers_means_what_its_name_does(self) -> None:
        for name, layers in (("off", 0), ("selective", 18), ("full", 36)):
            assert self.needed(name, has_liger=True) == self.needed(layers, has_liger=True)
        peaks = [self.needed(layers, has_liger=True).peak for layers in (0, 5, 10, 18, 36)]
        assert peaks == sorted(peaks, reverse=True)


class TestAdvice:
    @pytest.mark.parametrize("gigabytes", [8, 12, 24, 40])
    @pytest.mark.parametrize(
        "fields",
        [
            {"method": "full"},
            {"method": "lora"},
            {"method": "sft", "lora_r": None},
            {"method": "sft", "load_in_4bit": False},
            {"method": "dpo", "lora_r": None},
            {"method": "dpo", "load_in_8bit": True},
            {"method": "reward", "lora_r": None},
            {"method": "rlhf", "lora_r": None, "rlhf": {"rewards": CHECKS}},
            {"method": "rlhf", "lora_r": 16, "rlhf": {"rewards": CHECKS}, "max_seq_length": 400},
        ],
        ids=str,
    )
    def test_never_changes_what_a_run_learns_towards(self, fields: dict[str, Any], gigabytes: int) -> None:
        model, config = architecture.read_architecture(LLAMA), effective(**fields)
        (said,) = memory_planner.MemoryAdvice(
            model, config, Precision.for_device(config, "cuda"), 1024, None
        ).advise_within(gigabytes * GIB)
        if fields["method"] not in ("full", "lora"):
            assert "method:" not in said
        changed = {"base_model": "any", **fields, **_named(said)}
        if "lora_r: 16" in said or "load_in_4bit: true" in said:
            changed.pop("load_in_8bit", None)
        assert config_errors(changed, has_eval_dataset=False) == [], said

    def test_names_an_adapter_where_every_weight_of_a_preference_run_trains(self) -> None:
        model, config = architecture.read_architecture(LLAMA), effective(method="dpo", lora_r=None, batch_size=1)
        precision = Precision.for_device(config, "cuda")
        advice = memory_planner.MemoryAdvice(model, config, precision, 512, None)
        said = [advice.advise_within(gigabytes * GIB)[0] for gigabytes in (40, 14)]
        assert "`lora_r: 16` with `load_in_4bit: false`" in said[0]
        assert "`lora_r: 16` with `load_in_4bit: true`" in said[1]

    def test_advice_keeps_two_rows_for_a_method_that_compares_rows(self) -> None:
        model, config = architecture.read_architecture(LLAMA), effective(method="kto", batch_size=8)
        advice = memory_planner.MemoryAdvice(model, config, Precision.for_device(config, "cuda"), 2048, None)
        said = [advice.advise_within(gigabytes * GIB)[0] for gigabytes in range(4, 40)]
        sizes = {_named(one).get("batch_size", 8) for one in said}
        assert min(sizes) == 2

    @pytest.mark.parametrize("steps", [256, 30_000, 65_536])
    def test_advice_stays_within_the_bounds_of_a_field(self, steps: int) -> None:
        model = architecture.read_architecture(LLAMA)
        config = effective(batch_size=4096, gradient_accumulation_steps=steps)
        advice = memory_planner.MemoryAdvice(model, config, Precision.for_device(config, "cuda"), 2048, None)
        for gigabytes in (1000, 80, 24, 12):
            (said,) = advice.advise_within(gigabytes * GIB)
            assert config_errors({"base_model": "any", **_named(said)}, has_eval_dataset=False) == [], said

    @pytest.mark.parametrize("gigabytes", [1, 79])
    def test_comes_with_a_reason_that_stands_by_itself(self, gigabytes: int) -> None:
        model, config = architecture.read_architecture(LLAMA), effective(gradient_checkpointing=False)
        batch = plan_steps(model, config, counted()).batch
        reason = memory_planner.choose_checkpointing(
            model, config, Precision.for_device(config, "cuda"), batch, gigabytes * GIB
        ).reason
        assert reason.startswith("The run needs about ")


@pytest.mark.parametrize("memory_mb", [1, 24_000, 8 * 2**20, 2**31 - 1])
def test_largest_model_is_known_for_any_memory(memory_mb: int) -> None:
    assert (largest_model("cuda", memory_mb) > 0) == (memory_mb > 1)


class TestTime:
    """Hundreds of names of modules once made an estimate of a deep model thirty times as slow as a plain one."""

    def test_time_of_an_estimate_hardly_depends_on_the_number_of_module_names(self) -> None:
        model = architecture.read_architecture(LLAMA | {"num_hidden_layers": 80})
        layers = [f"layers.{at}.mlp" for at in range(80)]
        targets = [f"{layer}.{name}" for layer in layers for name in ("up_proj", "gate_proj")][:100]
        many = {"target_modules": [*targets, *[f"{layers[-1]}.down_proj"] * 100], "modules_to_save": layers[:20] * 10}
        plain, named = (_seconds_of_advice(model, effective(**asked)) for asked in ({}, many))
        assert named < 8 * plain

    def test_time_of_an_estimate_is_bounded_by_the_number_of_layers(self) -> None:
        with pytest.raises(UnknownArchitecture, match="513 layers exceed the supported maximum"):
            architecture.read_architecture(LLAMA | {"num_hidden_layers": 513})


def _seconds_of_advice(model: Architecture, config: TrainingConfig) -> float:
    """Processor time until all changes have been tried, none of which makes the run fit."""
    advice = memory_planner.MemoryAdvice(model, config, Precision.for_device(config, "cuda"), 2048, None)
    started = time.process_time()
    advice.advise_within(1)
    return time.process_time() - started


def _named(said: str) -> dict[str, Any]:
    """The fields that a sentence of advice names, with their values."""
    words = said.replace("`", " ").replace(":", " ").replace(",", " ").split()
    values: dict[str, Any] = {"true": True, "false": False}
    named = {}
    for name, value in pairwise(words):
        if name in TrainingConfig.model_fields:
            value = value.rstrip(".")
            if value.isdigit() or value in values or name == "method":
                named[name] = int(value) if value.isdigit() else values.get(value, value.rstrip(")"))
    return named


def test_memory_is_walked_through_once_for_each_way_of_checkpointing() -> None:
    walked: list[str] = []

    def needs(checkpointing: Any) -> Any:
        walked.append(checkpointing)
        return estimate_memory(
            model, config, Precision.for_device(config, "cuda"), planned.batch, checkpointing, "sdpa"
        )

    model, config = architecture.read_architecture({"model_type": "llama", **TINY}), effective()
    planned = plan_steps(model, config, counted())
    assert not memory_planner.first_that_fits(needs, 1, memory_planner.CHOICES).fits
    assert walked == ["off", "selective", "full"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("method", ["full", "dpo"])
def test_layers_that_are_alike_come_to_the_same_whether_walked_through_or_not(family: str, method: str) -> None:
    config = effective(method=method, lora_dropout=0.0) if method == "dpo" else effective(method=method)
    precision = Precision.for_device(config, "cuda")

    def needed(layers: int) -> Any:
        names = ("num_hidden_layers", "n_layer")
        model = architecture.read_architecture({"model_type": family, **TINY, **dict.fromkeys(names, layers)})
        batch = plan_steps(model, config, counted()).batch
        return compute_activations(model, config, precision, batch, "off", attention_of(model, config))

    # Of two layers both are walked through, of more only these: what all share is kept by the first.
    of_1, of_2, of_9 = map(needed, (1, 2, 9))
    assert of_9.kept_bytes - of_2.kept_bytes == 7 * (of_2.kept_bytes - of_1.kept_bytes)
    assert of_9.operations - of_2.operations == 7 * (of_2.operations - of_1.operations)


def test_advice_for_several_devices_walks_through_each_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Any] = []

    def counting(*arguments: Any) -> Any:
        walked.append(arguments)
        return estimate_memory(*arguments)

    monkeypatch.setattr(memory_planner, "estimate_memory", counting)
    model, config = architecture.read_architecture(LLAMA), effective(method="full")
    advice = memory_planner.MemoryAdvice(model, config, Precision.for_device(config, "cuda"), 512, None)
    said = [advice.advise_within(gigabytes * GIB)[0] for gigabytes in (40, 24, 1)]
    most = len(walked)
    assert said == [advice.advise_within(gigabytes * GIB)[0] for gigabytes in (40, 24, 1)] and len(walked) == most
    assert "adapter" in said[0] and "smaller model" in said[2]


@pytest.mark.parametrize("document", [{}, {"parameters": 3}, {**estimates.EXAMPLE, "fits": [{"device": None}]}])
def test_an_estimate_of_another_version_is_none(document: dict[str, Any]) -> None:
    assert estimates.parse_stored(document) is None
    assert estimates.parse_stored(dict(estimates.EXAMPLE)) is not None


def test_memory_comes_in_the_order_of_the_model_however_it_was_kept() -> None:
    memory: Any = estimates.MEMORY
    parsed = estimates.parse_stored({**estimates.EXAMPLE, "memory_mb": dict(sorted(memory.items(), reverse=True))})
    assert parsed is not None and parsed.memory_mb is not None
    assert list(parsed.memory_mb) == [*(one.name for one in fields(Components)), "total"]
