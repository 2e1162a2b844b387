"""Promises about a run whose sequences are divided among devices: it trains as one device does, and resumes exactly."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.worker.training.many_ranks import ManyRanks
from tests.worker.training.test_ranks import losses, models, rows  # noqa: F401
from tests.worker.training.tiny import Forks, Outcome, make_job, write_rows
from tests.worker.training.two_ranks import TwoRanks

Train = Callable[..., Outcome]

_TOLERANCE = 1e-5
_MOST_ROUNDED, _ROUNDED_BY = 1e-3, 1e-4
"""Part of the weights that may differ by more, and by how much: a tenth of a step."""
_COMMON: dict[str, Any] = {
    "learning_rate": 1e-3, "max_seq_length": 64, "max_steps": 4, "batch_size": 4, "gradient_accumulation_steps": 2,
    "logging_steps": 1, "save_steps": 2, "eval_split": 0.2, "eval_steps": 2,
}  # fmt: skip
_WORDS = "the model learns from rows of text and tells what it saw in one or two of them".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-six chats with questions and answers of many lengths, also longer than half of a sequence."""
    folder = tmp_path_factory.mktemp("data")

    def chat(row: int) -> dict[str, Any]:
        question, answer = (" ".join((_WORDS * 3)[row % 7 : row % 7 + n]) for n in (1 + row % 5, 2 + row * 5 % 17))
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    return write_rows(folder / "chats.jsonl", map(chat, range(26)))


@pytest.fixture(scope="module")
def four_ranks(forks: Forks) -> Iterator[ManyRanks]:
    """Fresh training processes on four devices."""
    more = [forks.another() for _ in range(3)]
    yield ManyRanks([forks, *more])
    for server in more:
        server.close()


@pytest.fixture
def train(
    request: pytest.FixtureRequest,
    forks: Forks,
    two_ranks: TwoRanks,
    models: Callable[[float], Path],  # noqa: F811
    data: Path,
    tmp_path: Path,
) -> Train:
    """Train a run on `devices`, `parts` of which share each sequence; of 26 rows, 5 are held out."""
    number = 0

    def run(
        method: str, devices: int, parts: int = 1, *, dropout: float = 0.0, model: Path | None = None, **config: Any
    ) -> Outcome:
        nonlocal number
        number += 1
        sharded, task = config.pop("sharded", False), config.pop("task", "train")
        adapter = {} if method == "full" else {"lora_r": 4, "lora_dropout": dropout}
        config = {**_COMMON, "method": method, **adapter, **config}
        job = make_job(tmp_path / str(number), model or models(dropout), data, **config)
        job |= {"sharded": sharded, "sequence_parallel": parts, "task": task}
        if devices == 1:
            outcome = forks.run(job)
        elif devices == 2:
            outcome = two_ranks.run(job)
        else:
            outcome = request.getfixturevalue("four_ranks").run(job)
        assert outcome.code == 0, outcome.stderr[-3000:]
        return outcome

    return run


def numbers(outcome: Outcome, name: str) -> list[float]:
    return [record[name] for record in outcome.of("metric")]


def assert_equal(divided: Outcome, one_device: Outcome) -> None:
    assert rows(divided) == rows(one_device) and len(rows(one_device)) == 4
    assert losses(divided) == pytest.approx(losses(one_device), abs=_TOLERANCE)
    assert numbers(divided, "grad_norm") == pytest.approx(numbers(one_device, "grad_norm"), abs=_TOLERANCE, rel=1e-4)
    for expected, actual in zip(one_device.of("eval"), divided.of("eval"), strict=True):
        for name in ("eval_loss", "eval_token_accuracy", "eval_entropy"):
            assert actual["metrics"][name] == pytest.approx(expected["metrics"][name], abs=_TOLERANCE), name
    assert divided.result["metrics"]["tokens"] == one_device.result["metrics"]["tokens"]
    (path,) = (path for path in one_device.output.glob("*model.safetensors"))
    expected, actual = load_file(path), load_file(divided.output / path.name)
    assert actual.keys() == expected.keys()
    for key, weight in expected.items():
        differences = (actual[key] - weight).abs()
        # Adam divides a gradient by its size, so near 0 its rounding decides, which differs between processors.
        is_close = (differences > _TOLERANCE).float().mean() <= _MOST_ROUNDED and differences.max() < _ROUNDED_BY
        assert is_close, f"{key}: {differences.max():.1e}"


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("method", "more"),
    [
        pytest.param("lora", {}, marks=FULL),
        ("full", {"packing": True}),
        pytest.param("full", {}, marks=FULL),
        pytest.param("qlora", {}, marks=FULL),
        pytest.param("qlora", {"packing": True, "gradient_checkpointing": True}, marks=FULL),
        pytest.param("lora", {"packing": True, "extra": {"packing_strategy": "wrapped"}}, marks=FULL),
        pytest.param("full", {"gradient_checkpointing": True, "sharded": True, "optim": "adamw_torch"}, marks=FULL),
        pytest.param("lora", {"packing": True, "sharded": True}, marks=FULL),
    ],
)
def test_two_devices_that_share_sequences_train_as_one(train: Train, method: str, more: dict[str, Any]) -> None:
    """Also the last step of an epoch, which has fewer rows; sequences are padded to an even length."""
    alone = {name: value for name, value in more.items() if name != "sharded"}
    assert_equal(train(method, 2, 2, **more), train(method, 1, **alone))


@FULL
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("lora", {}),
        ("full", {"packing": True}),
        ("qlora", {"packing": True}),
        ("full", {"sharded": True, "optim": "adamw_torch"}),
    ],
)
def test_two_pairs_of_devices_train_as_one_with_twice_the_batch(
    train: Train, method: str, more: dict[str, Any]
) -> None:
    alone = {name: value for name, value in more.items() if name != "sharded"}
    assert_equal(train(method, 4, 2, batch_size=2, **more), train(method, 1, batch_size=4, **alone))


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2, "sliding_window": 9},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 2},
    "gemma3_text": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {"n_head": 4, "n_layer": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "qwen3_moe": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "falcon": {"num_attention_heads": 4, "num_hidden_layers": 2},
    "recurrent_gemma": {
        "num_attention_heads": 2, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
}  # fmt: skip


@pytest.fixture
def variant(models: Callable[[float], Path], tmp_path: Path) -> Callable[..., Path]:  # noqa: F811
    """A function that makes a tiny model of another family, with the tokenizer of the others."""

    def make(family: str, **more: Any) -> Path:
        folder = Path(shutil.copytree(models(0.0), tmp_path / family))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
        config = AutoConfig.for_model(
            family, **{**sizes, "max_position_embeddings": 256, **VARIANTS[family], **more},
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "devices"),
    [
        ("mistral", 2),
        *(pytest.param(family, 2, marks=FULL) for family in ("llama", "qwen3", "gemma3_text", "gpt2", "qwen3_moe")),
        *(pytest.param(family, 4, marks=FULL) for family in ("llama", "mistral", "gemma3_text")),
    ],
)
def test_models_of_other_families_train_as_on_one_device(
    train: Train, variant: Callable[..., Path], family: str, devices: int
) -> None:
    """With fewer heads of keys and values than devices, and with sliding windows that cross the borders."""
    more = {"model": variant(family), "optim": "adamw_torch", "packing": family != "gpt2" and devices == 2}
    assert_equal(train("full", devices, devices, **more), train("full", 1, **more))


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        ("recurrent_gemma", {}, "pass a state from position to position; set it to 1."),
        pytest.param("falcon", {}, "computes something else once a sequence is divided", marks=FULL),
        pytest.param(
            "llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "is 2, but it does not divide the 3 attention heads of the model: use 1.", marks=FULL,
        ),
        pytest.param(
            "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depend on the length of the sequence; set it to 1.", marks=FULL,
        ),
    ],
)  # fmt: skip
def test_a_model_whose_attention_cannot_be_divided_is_refused(
    two_ranks: TwoRanks, variant: Callable[..., Path], data: Path, tmp_path: Path, family: str, more: Any, says: str
) -> None:
    job = make_job(tmp_path / "run", variant(family, **more), data, **_COMMON, method="full", optim="adamw_torch")
    done = two_ranks.run_to_end_of_first(job | {"sequence_parallel": 2})
    assert (done.result["outcome"], done.of("metric")) == ("failed", [])
    assert done.result["error"]["code"] == "config_error" and says in done.result["error"]["message"], done.result


def test_what_cannot_be_divided_is_refused_with_what_to_change(
    forks: Forks,
    models: Callable[[float], Path],  # noqa: F811
    data: Path,
    tmp_path: Path,
) -> None:
    """The API refuses it too, but a run may come from another version of it."""
    job = make_job(tmp_path, models(0.0), data, **_COMMON, method="full", neftune_noise_alpha=5.0)
    message = forks.run(job | {"sequence_parallel": 2}).result["error"]["message"]
    assert "is 2, which does not divide the 1 device of the run: use 1, or change `resources.devices`." in message
    assert message.endswith("Change that, or set `resources.sequence_parallel` to 1.")


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("lora", {"packing": True}),
        pytest.param("full", {}, marks=FULL),
        pytest.param("qlora", {}, marks=FULL),
        pytest.param("full", {"sharded": True}, marks=FULL),
    ],
)
def test_resumes_exactly_with_dropout_in_the_middle_of_an_epoch(
    train: Train, method: str, more: dict[str, Any]
) -> None:
    more = {"dropout": 0.1, "optim": "adamw_torch", "gradient_accumulation_steps": 1, **more}
    whole = train(method, 2, 2, **more)
    rest = train(method, 2, 2, **more, resume_from=whole.checkpoint(2), attempt=2)
    assert rest.steps == {step: done for step, done in whole.steps.items() if step > 2} and len(rest.steps) == 2
    facts = rest.of("config")[-1]["facts"]
    assert (facts["fidelity"], facts["fidelity_reasons"]) == ("exact", [])
    (path,) = whole.output.glob("*model.safetensors")
    assert (rest.output / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), pytest.param((1, 1), (2, 2), marks=FULL)])
def test_another_division_resumes_with_the_same_rows(
    train: Train, before: tuple[int, int], after: tuple[int, int]
) -> None:
    whole = train("lora", *before)
    rest = train("lora", *after, resume_from=whole.checkpoint(2), attempt=2)
    assert rows(rest) == {step: trained for step, trained in rows(whole).items() if step > 2}
    assert losses(rest) == pytest.approx({step: losses(whole)[step] for step in (3, 4)}, abs=_TOLERANCE)
    facts = rest.of("config")[-1]["facts"]
    assert facts["fidelity"] == "approximate"
    shared = f"devices that share each sequence was {before[1]} at the checkpoint and is {after[1]} now."
    assert f"The number of {shared}" in facts["fidelity_reasons"]


@FULL
def test_a_stop_in_an_evaluation_ends_it_on_both_devices(
    two_ranks: TwoRanks,
    models: Callable[[float], Path],  # noqa: F811
    data: Path,
    tmp_path: Path,
) -> None:
    config = {"method": "lora", "max_steps": 4, "batch_size": 1, "eval_split": 0.4, "eval_steps": 2, "save_steps": 100}
    job = make_job(tmp_path / "run", models(0.0), data, **config) | {"sequence_parallel": 2}
    stopped = two_ranks.run_to_end_of_first(job, course={"drain_at_evaluation": 1})
    assert (stopped.result["outcome"], stopped.of("eval")) == ("stopped", [])
    again = make_job(
        tmp_path / "run", models(0.0), data, attempt=2, resume_from=stopped.checkpoint(2), **config
    )  # fmt: skip
    rest = two_ranks.run_to_end_of_first(again | {"sequence_parallel": 2})
    assert (rest.result["outcome"], [one["step"] for one in rest.of("eval")]) == ("completed", [2, 4])


def test_samples_and_evaluations_without_training_equal_those_of_one_device(train: Train) -> None:
    """Each device generates whole texts, so the first one samples alone."""
    sampling = {
        "sample_prompts": ["the model learns"], "sample_steps": 1, "sample_max_new_tokens": 6, "max_steps": 1,
    }  # fmt: skip
    trained = [train("lora", devices, devices, packing=True, **sampling) for devices in (1, 2)]
    assert [one["completion"] for one in trained[1].of("sample")] == [
        one["completion"] for one in trained[0].of("sample")
    ]
    one_device, two_devices = (train("lora", devices, devices, task="evaluate") for devices in (1, 2))
    (expected,), (actual,) = one_device.of("eval"), two_devices.of("eval")
    for name in ("eval_loss", "eval_token_accuracy", "eval_entropy"):
        assert actual["metrics"][name] == pytest.approx(expected["metrics"][name], abs=_TOLERANCE), name
