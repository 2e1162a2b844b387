"""Attention: in 16 bits wherever a run computes it, and of each text of a sequence by itself, without a mask."""

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.worker.training.tiny import Forks, make_chat_dataset, make_job, make_pairs, make_prompts, make_rated
from worker.training.failures import TrainingFailure
from worker.training.model import attention

CONFIG: dict[str, Any] = {
    "max_seq_length": 64, "max_steps": 2, "logging_steps": 1, "batch_size": 4, "gradient_accumulation_steps": 1,
    "optim": "adamw_torch", "eval_split": 0.4, "eval_steps": 1, "gradient_checkpointing": True, "lora_r": None,
    "save_steps": 1,
}  # fmt: skip
SAMPLES = {"sample_steps": 1, "sample_prompts": ["2 + 2 ="], "sample_max_new_tokens": 4}
RLHF = {"num_generations": 2, "max_completion_length": 8, "rewards": [{"type": "length", "max": 20}]}


@pytest.mark.parametrize(
    ("method", "data_format", "make", "more"),
    [
        ("full", "chat", make_chat_dataset, SAMPLES),
        ("dpo", "preference", make_pairs, SAMPLES),
        pytest.param("kto", "rated", make_rated, SAMPLES, marks=pytest.mark.full),
        pytest.param("reward", "preference", make_pairs, {}, marks=pytest.mark.full),
        pytest.param("rlhf", "prompt", make_prompts, {"rlhf": RLHF}, marks=pytest.mark.full),
    ],
)
def test_no_pass_of_a_method_computes_attention_in_32_bits(
    method: str, data_format: str, make: Any, more: dict[str, Any], forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data = make(tmp_path / "data.jsonl", 20)
    job = make_job(tmp_path / "1", tiny_model, data, data_format=data_format, method=method, **CONFIG | more)
    first = forks.run(job, half_attention=True)
    assert first.result["outcome"] == "completed", (first.result, first.stderr[-3000:])
    passes = {(one["training"], one["gradients"]) for one in first.of("attention")}
    assert passes >= {(True, True), (False, False)}
    job = make_job(
        tmp_path / "2", tiny_model, data, data_format=data_format, method=method, attempt=2,
        resume_from=first.checkpoint(1), **CONFIG | more,
    )  # fmt: skip
    again = forks.run(job, half_attention=True)  # with the check of the restored weights
    assert again.result["outcome"] == "completed", (again.result, again.stderr[-3000:])


SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, **EXPERTS,
}  # fmt: skip
ALTERNATING = {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS),
    "gemma3 (windows)": lambda: Gemma3TextConfig(**SMALL, **ALTERNATING),
    "mistral (windows)": lambda: MistralConfig(**SMALL, sliding_window=6),
    "olmoe (ignores its window)": lambda: OlmoeConfig(**SMALL, **EXPERTS, sliding_window=6),
    "deepseek_v3 (narrower values)": lambda: DeepseekV3Config(**SMALL | LATENT),
    "gpt2": lambda: GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "opt (masks without positions)": lambda: OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    ),
}
LENGTHS = (9, 3, 17, 1, 12)


def texts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 128, (length,), generator=generator).tolist()} for length in LENGTHS]


def packed_batch(count: int = len(LENGTHS)) -> dict[str, Any]:
    """The first `count` texts in one sequence, made by the trainer's collator."""
    batch: dict[str, Any] = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(texts()[:count])
    return batch


def network(family: str, name: str = "varlen") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation=name).eval()


def losses_and_gradients(model: Any, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sum of the losses of all tokens, and its gradients."""
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        labels = batch["labels"][:, 1:]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
        total = total + cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    total.backward()
    return total.detach(), [one.grad.clone() for one in model.parameters() if one.grad is not None]


def test_compiled_layers_are_not_compiled_again_for_other_numbers_and_lengths_of_texts() -> None:
    model, counter = network("llama").train(), CompileCounter()
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend=counter)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    compiled = []
    for count in (4, 5, 2, 3):
        loss, _ = losses_and_gradients(model, [collate(texts()[:count])])
        expected, _ = losses_and_gradients(network("llama").train(), [collate(texts()[:count])])
        torch.testing.assert_close(loss, expected)
        compiled.append(counter.frame_count)
    assert compiled[0] > 0 and compiled == [compiled[0]] * 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("half", [False, True], ids=["32 bits", "16 bits"])
def test_texts_of_a_sequence_have_the_losses_and_gradients_that_they_have_alone_or_padded(
    family: str, half: bool
) -> None:
    model = network(family)
    padded = DataCollatorForLanguageModeling(pad_token_id=0)(texts())
    alone = [DataCollatorForLanguageModeling(pad_token_id=0)([text]) for text in texts() if len(text["input_ids"]) > 1]
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss, gradients = losses_and_gradients(model, [packed_batch()])
        others = [losses_and_gradients(model, batches) for batches in ([padded], alone)]
        model.set_attn_implementation("sdpa")
        others += [losses_and_gradients(model, batches) for batches in ([padded], alone)]
    loss_within, gradients_within = (3e-3, 5e-2) if half else (1e-6, 1e-5)
    for other_loss, other_gradients in others:
        torch.testing.assert_close(loss, other_loss, rtol=loss_within, atol=0)
        difference = total_norm([one - other for one, other in zip(gradients, other_gradients, strict=True)])
        assert difference <= gradients_within * total_norm(gradients)


def total_norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors))


class SquareTensors(TorchDispatchMode):
    """Counts the tensors that are made with all pairs of the tokens of a sequence, or as many elements."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.count = tokens, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and list(leaf.shape).count(self.tokens) > 1:
                self.count += 1
        return results


class DeviceReads(TorchDispatchMode):
    """Counts the operations for whose result the host would wait for a GPU."""

    READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(function).startswith(self.READS)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]], ids=["several texts", "one text"])
@pytest.mark.parametrize("family", ["llama", "gemma3 (windows)", "gpt2"])
def test_a_pass_over_known_texts_reads_nothing_from_the_device_and_has_the_same_loss_and_gradients(
    family: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(family)
    batch = packed_batch(len(lengths))
    borders = [0, *accumulate(lengths)]
    with DeviceReads() as reads_before:
        expected = losses_and_gradients(model, [batch])
    read = Mock()  # these dispatch nothing on a CPU
    with monkeypatch.context() as patched:
        for name in ("tolist", "cpu", "numpy"):
            patched.setattr(torch.Tensor, name, read)
        with DeviceReads() as reads, attention.known_texts(borders, batch["cu_seq_lens_q"]):
            known = losses_and_gradients(model, [batch])
    assert reads_before.count > reads.count == read.call_count == 0
    torch.testing.assert_close(known, expected, rtol=0, atol=0)
    with DeviceReads() as reads_after:
        losses_and_gradients(model, [batch])
    assert reads_after.count == reads_before.count


@pytest.mark.parametrize(("name", "has_masks"), [("varlen", False), ("sdpa", True)])
@pytest.mark.parametrize("family", ["llama", "gemma3 (windows)"])
def test_no_tensor_has_all_pairs_of_the_tokens_of_a_packed_batch(family: str, name: str, has_masks: bool) -> None:
    """With `sdpa` some have, so the test would notice."""
    model = network(family, name)
    with SquareTensors(sum(LENGTHS)) as squares:
        losses_and_gradients(model, [packed_batch()])
    assert (squares.count > 0) is has_masks


def test_padding_after_the_texts_needs_no_mask_and_padding_before_them_does() -> None:
    model, counts, logits = network("llama"), {}, {}
    for side in ("right", "left"):
        rows = [[*text["input_ids"], *[0] * (max(LENGTHS) - len(text["input_ids"]))] for text in texts()]
        ids = torch.tensor([row if side == "right" else row[::-1] for row in rows])
        with SquareTensors(max(LENGTHS)) as squares, torch.no_grad():
            logits[side] = model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).logits
        counts[side] = squares.count
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            same = model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).logits
        model.set_attn_implementation("varlen")
        torch.testing.assert_close(logits[side][ids != 0], same[ids != 0])
    assert counts["right"] == 0 < counts["left"]


@pytest.mark.parametrize("family", ["llama", "gemma3 (windows)", "gpt2"])
def test_generated_texts_are_those_of_sdpa(family: str) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9, 10, 11], [3, 4, 5, 9, 8, 7, 12, 13, 14]])
    generated = [
        network(family, name).generate(
            ids, attention_mask=(ids != 0).long(), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        for name in ("varlen", "sdpa")
    ]
    assert generated[0].shape == (2, 21)
    assert torch.equal(*generated)


def test_a_model_that_cannot_separate_texts_is_refused_rather_than_trained_wrongly() -> None:
    """Such as one of whose layers the mask has other holes."""
    batch = packed_batch() | {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}
    batch["attention_mask"][0, 0] = 0
    with pytest.raises(TrainingFailure, match="does not separate the texts"):
        losses_and_gradients(network("llama"), [batch])


def reference_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, same: torch.Tensor,
    longest: int, same_longest: int, *, window_size: tuple[int, int] = (-1, 0), is_causal: bool = True,
    scale: float | None = None, enable_gqa: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """The kernel of torch, which needs a GPU, according to its documentation; without `enable_gqa`, of torch 2.11."""
    assert query.shape[-1] == value.shape[-1] and borders.dtype == torch.int32 and is_causal and window_size[1] == 0
    assert longest == same_longest == int(borders.diff().max()) and same is borders
    is_grouped = query.shape[1] != key.shape[1]
    assert enable_gqa in (None, is_grouped)
    parts = []
    for first, end in pairwise(borders.tolist()):
        distance = torch.arange(end - first)[:, None] - torch.arange(end - first)
        mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        states = (tensor[first:end].transpose(0, 1)[None] for tensor in (query, key, value))
        attended = scaled_dot_product_attention(*states, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


@torch.library.custom_op("anneal_tests::texts", mutates_args=())  # type: ignore[untyped-decorator]
def _opaque_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, longest: int
) -> torch.Tensor:
    return reference_kernel(query, key, value, borders, borders, longest, longest)


@_opaque_kernel.register_fake  # type: ignore[untyped-decorator]
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query)


def opaque_kernel(*arguments: Any, **_: Any) -> torch.Tensor:
    """The reference as an operation that a compiler does not look into, as torch's kernel is one."""
    result: torch.Tensor = _opaque_kernel(*arguments[:4], arguments[5])
    return result


class TestKernel:
    @pytest.mark.parametrize("window", [None, 6])
    @pytest.mark.parametrize("value_width", [16, 8])
    @pytest.mark.parametrize("scaling", [None, 0.5])
    @pytest.mark.parametrize("repeats_keys", [False, True])
    @pytest.mark.parametrize(
        "parameters",
        [{"scale", "window_size", "enable_gqa"}, {"scale", "window_size"}, {"is_causal"}],
        ids=["torch 2.13", "torch 2.11", "torch 2.10"],
    )
    def test_is_called_with_what_each_version_of_torch_takes_and_gives_what_each_text_alone_does(
        self, parameters: set[str], repeats_keys: bool, scaling: float | None, value_width: int, window: int | None
    ) -> None:
        if window is not None and "window_size" not in parameters:
            return  # then each text is computed by itself
        total, borders = sum(LENGTHS), (0, *accumulate(LENGTHS))
        query, key, value = (
            torch.randn(1, heads, total, width) for heads, width in ((4, 16), (2, 16), (2, value_width))
        )
        texts = attention.Texts(borders, torch.tensor(borders, dtype=torch.int32), max(LENGTHS), window)
        module = torch.nn.Module()
        module.num_key_value_groups = 2
        expected, _ = attention.compute_attention(module, query, key, value, texts, 0.0, scaling)

        def kernel(*tensors: Any, **options: Any) -> torch.Tensor:
            assert set(options) == parameters - ({"enable_gqa"} if repeats_keys else set())
            assert tensors[1].shape[1] == (4 if repeats_keys else 2)
            return reference_kernel(*tensors, **options)

        result = attention._at_once(
            query, key, value, texts, scaling, repeats_keys=repeats_keys, kernel=kernel,
            parameters=frozenset(parameters),
        )  # fmt: skip
        torch.testing.assert_close(result, expected)

    @pytest.mark.parametrize(
        ("kernel", "failure"),
        [
            (reference_kernel, None),
            (lambda *states, **options: 1.1 * reference_kernel(*states, **options), "its results differ by"),
            (lambda *states, **options: math.nan * reference_kernel(*states, **options), "its results differ by"),
            (varlen_attn, "it fails: "),  # without a GPU
        ],
        ids=["right", "wrong", "not a number", "failing"],
    )
    def test_is_used_only_where_it_computes_what_sdpa_does(self, kernel: Any, failure: str | None) -> None:
        state = torch.get_rng_state()
        reason = attention.kernel_failure(torch.device("cpu"), kernel)
        assert torch.equal(torch.get_rng_state(), state)
        assert (reason is None) == (failure is None) and (reason or "").startswith(failure or "")

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "autocast"])
    def test_gets_the_tensors_of_the_model_and_returns_their_gradients_without_a_copy(self, dtype: Any) -> None:
        states = [
            torch.randn(1, 20, 4, 16, dtype=dtype, requires_grad=True).transpose(1, 2) for _ in range(3)
        ]  # fmt: skip
        with Copies() as copies, torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = attention._at_once(
                *states, texts_of(9, 11), None, kernel=lambda query, key, value, *_, **__: query * key * value
            )
            torch.autograd.grad(result, states, torch.ones_like(result))
        assert copies.count == 0

    @pytest.mark.parametrize("shared", ["wrong", "failing"])
    def test_gets_repeated_keys_where_it_is_right_only_with_as_many_heads_of_them(self, shared: str) -> None:
        def kernel(query: torch.Tensor, key: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
            if query.shape[1] == key.shape[1]:
                return reference_kernel(query, key, *more, **options)
            if shared == "failing":
                raise RuntimeError("heads of keys must be as many as those of queries")
            return 1.1 * reference_kernel(query, key, *more, **options)

        device = torch.device("cpu")
        assert attention.kernel_failure(device, kernel) is None
        assert attention._form_failure(device, False, kernel) is not None
        assert attention._form_failure(device, True, kernel) is None

    def test_is_compiled_once_for_all_numbers_and_lengths_of_texts(self) -> None:
        counter = CompileCounter()
        call = torch.compile(attention._at_once, backend=counter, dynamic=True, fullgraph=True)
        for count in (4, 5, 2, 3):
            borders = (0, *accumulate(LENGTHS[:count]))
            texts = attention.Texts(borders, torch.tensor(borders, dtype=torch.int32), max(LENGTHS[:count]), None)
            states = [torch.randn(1, heads, borders[-1], 16) for heads in (4, 2, 2)]
            parameters = frozenset({"scale", "window_size", "enable_gqa"})
            result = call(*states, texts, None, kernel=opaque_kernel, parameters=parameters)
            torch.testing.assert_close(result, attention._at_once(*states, texts, None, kernel=reference_kernel))
        assert counter.frame_count == 1

    def test_is_checked_outside_of_what_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        call = torch.compile(
            lambda x: x + 1 if attention._kernel_works(x.device) else x - 1, backend="eager", fullgraph=True
        )
        assert call(torch.zeros(())) == -1  # the kernel fails on a CPU

    def test_of_the_installed_torch_takes_what_one_of_these_versions_does(self) -> None:
        names = {"scale", "window_size", "enable_gqa", "is_causal"} & attention._PARAMETERS
        assert names in ({"scale", "window_size", "enable_gqa"}, {"scale", "window_size"}, {"is_causal"})


def texts_of(*lengths: int, window: int | None = None) -> attention.Texts:
    borders = (0, *accumulate(lengths))
    return attention.Texts(borders, torch.tensor(borders, dtype=torch.int32), max(lengths), window)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as on a GPU, where texts of 8 tokens are computed as a batch; the kernel for others is the reference."""

    def at_once(*states: Any, **_: Any) -> torch.Tensor:
        return own(*states, kernel=reference_kernel)

    own = attention._at_once
    monkeypatch.setattr(attention, "_batched_length", 8)
    monkeypatch.setattr(attention, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "_at_once", at_once)


class TestBatch:
    """Of texts of equal length."""

    @pytest.mark.parametrize("width", [64, 128])
    @pytest.mark.parametrize("scaling", [None, 0.3])
    @pytest.mark.parametrize("kv_heads", [4, 2, 1])
    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
    def test_has_the_results_and_gradients_of_each_text_alone_and_copies_nothing(
        self, count: int, kv_heads: int, scaling: float | None, width: int, heads_first: bool
    ) -> None:
        torch.manual_seed(0)
        states = [
            torch.randn(1, heads, 8 * count, width) if heads_first
            else torch.randn(1, 8 * count, heads, width).transpose(1, 2)
            for heads in (4, kv_heads, kv_heads)
        ]  # fmt: skip
        module = torch.nn.Module()
        module.num_key_value_groups = 4 // kv_heads
        gradient = torch.randn(1, 8 * count, 4, width)

        def results(compute: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
            leaves = [state.detach().requires_grad_() for state in states]
            out = compute(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

        alone = results(lambda *leaves: attention._one_by_one(module, *leaves, texts_of(*[8] * count), 0.0, scaling))
        with Copies() as copies:
            batch = results(lambda *leaves: attention._as_batch(*leaves, 8, scaling))
        for tensor, other in zip(batch, alone, strict=True):
            assert tensor.shape == other.shape
            assert float((tensor - other).norm()) <= 1e-6 * float(other.norm())
        assert copies.count == 0

    def test_gives_the_kernel_one_layout_of_the_gradient_whatever_the_model_returns(self) -> None:
        """The plan that torch keeps for a shape is made for the layout of the first one."""
        states = [torch.randn(1, 4, 16, 64, requires_grad=True) for _ in range(3)]
        results = []
        for layout in (torch.randn(1, 16, 4, 64), torch.randn(1, 4, 16, 64).transpose(1, 2)):
            out = attention._as_batch(*states, 8, None)
            strides: list[Any] = []
            out.grad_fn.register_prehook(lambda gradients, strides=strides: strides.append(gradients[0].stride()))
            out.backward(layout)
            results.append(strides)
        assert results[0] == results[1] == [(16 * 4 * 64, 4 * 64, 64, 1)]

    @pytest.mark.parametrize(
        ("texts", "width", "value_width", "is_batch"),
        [
            (texts_of(8, 8, 8), 16, 16, True),
            (texts_of(8), 16, 16, True),
            (texts_of(8, 8, window=8), 16, 16, True),
            (texts_of(8, 8, window=7), 16, 16, False),
            (texts_of(8, 7, 8), 16, 16, False),
            (texts_of(16, 16), 16, 16, False),
            (texts_of(4, 4), 16, 16, False),
            (texts_of(8, 8), 16, 8, False),
            (texts_of(8, 8), 136, 136, False),
        ],
        ids=[
            "several", "single", "wide window", "window", "unequal", "longer", "shorter", "narrow values", "wide heads",
        ],
    )  # fmt: skip
    def test_is_made_of_texts_that_all_have_its_length_and_no_window_within_it(
        self, texts: attention.Texts, width: int, value_width: int, is_batch: bool, on_gpu: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        total, batches = texts.borders[-1], []
        own = attention._as_batch
        monkeypatch.setattr(attention, "_as_batch", lambda *states: batches.append(states[3]) or own(*states))
        states = [
            torch.randn(1, heads, total, size) for heads, size in ((4, width), (2, width), (2, value_width))
        ]  # fmt: skip
        module = torch.nn.Module()
        module.num_key_value_groups = 2
        result, _ = attention.compute_attention(module, *states, texts)
        torch.testing.assert_close(result, attention._one_by_one(module, *states, texts, 0.0, None))
        assert batches == ([8] if is_batch else [])

    def test_is_not_made_with_dropout(self, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "_as_batch", None)
        states = [torch.randn(1, 4, 16, 16) for _ in range(3)]
        result, _ = attention.compute_attention(torch.nn.Module(), *states, texts_of(8, 8), 0.5)
        assert result.shape == (1, 16, 4, 16)

    @pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed by reentry"])
    @pytest.mark.parametrize("lengths", [(8, 8, 8), (8,), (9, 3, 8)])
    def test_gives_a_model_the_losses_and_gradients_that_it_has_without(
        self, lengths: tuple[int, ...], reentrant: bool | None, on_gpu: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = [{"input_ids": torch.randint(3, 128, (length,), generator=generator).tolist()} for length in lengths]
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        model = network("qwen3").train()
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss, gradients = losses_and_gradients(model, [collate(rows)])
        monkeypatch.undo()
        expected, others = losses_and_gradients(network("qwen3"), [collate(rows)])
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        difference = total_norm([tensor - other for tensor, other in zip(gradients, others, strict=True)])
        assert difference <= 1e-5 * total_norm(others)

    def test_is_compiled_once_for_all_lengths_and_once_for_its_own(self, on_gpu: None) -> None:
        counter = CompileCounter()
        call = torch.compile(
            lambda query, value, texts: query + 1 if attention._are_batch(query, value, texts) else query - 1,
            backend=counter, dynamic=True, fullgraph=True,
        )  # fmt: skip
        for lengths in ((9, 3), (9, 3, 17), (5, 12, 9, 2), (8, 8), (8, 8, 8), (8, 8, 8, 8), (8, 4)):
            states = torch.zeros(1, 4, sum(lengths), 16)
            result = call(states, states, texts_of(*lengths))
            assert bool((result > 0).all()) is (set(lengths) == {8})
        assert counter.frame_count <= 4  # longest text too long or too short, of its length, and all of it

    @pytest.mark.parametrize(
        ("length", "capability", "cudnn", "is_used"),
        [
            (1024, (9, 0), 91900, True), (4096, (9, 0), 91501, True), (1000, (9, 0), 91900, False),
            (896, (9, 0), 91900, False), (0, (9, 0), 91900, False), (4096, (8, 0), 91900, False),
            (4096, (10, 0), 91900, False), (4096, (9, 0), 91002, False), (4096, (9, 0), None, False),
            (4096, (9, 0), RuntimeError("incompatible"), False),
        ],
    )  # fmt: skip
    def test_is_made_of_long_texts_on_gpus_of_a_generation_that_gains_by_it(
        self, length: int, capability: tuple[int, int], cudnn: int | RuntimeError | None, is_used: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(attention, "_batched_length", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", Mock(side_effect=[cudnn]))
        state = torch.get_rng_state()
        assert attention.batch_texts(torch.device("cpu"), FAMILIES["qwen3"](), length) is None
        assert torch.equal(torch.get_rng_state(), state)
        assert attention.batched_length() == (length if is_used else None)

    @pytest.mark.parametrize(
        ("kernel", "reason"),
        [
            (lambda *states, **options: 1.1 * scaled_dot_product_attention(*states, **options), "its results differ"),
            (lambda *states, **options: scaled_dot_product_attention(*states, **options | {"is_causal": False}), ""),
            (lambda *_, **__: _fail(), "it fails: no valid execution plans"),
        ],
        ids=["wrong", "not causal", "failing"],
    )
    def test_is_not_made_where_its_kernel_computes_something_else(
        self, kernel: Any, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = attention._as_batch

        def as_batch(*arguments: Any) -> torch.Tensor:
            with monkeypatch.context() as patch:
                patch.setattr(attention.functional, "scaled_dot_product_attention", kernel)
                return own(*arguments)

        monkeypatch.setattr(attention, "_batched_length", None)
        monkeypatch.setattr(attention, "_gains_by_batches", lambda *_: True)
        monkeypatch.setattr(attention, "_as_batch", as_batch)
        failure = attention.batch_texts(torch.device("cpu"), FAMILIES["llama"](), 1024)
        assert failure is not None and failure.startswith(reason)
        assert attention.batched_length() is None


def _fail() -> torch.Tensor:
    raise RuntimeError("no valid execution plans")


class Copies(TorchDispatchMode):
    """Counts the tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in (
            "clone", "copy_", "_to_copy", "constant_pad_nd", "select_backward", "slice_backward",
        )  # fmt: skip
        return function(*args, **(kwargs or {}))
