"""Promises about mixtures of experts on several devices: they train as one device does, the loss of the routers too."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.worker.training.test_ranks import losses, make_data, rows
from tests.worker.training.tiny import Forks, Outcome, make_job, make_tiny_model
from tests.worker.training.two_ranks import TwoRanks

Train = Callable[..., Outcome]

FULL = pytest.mark.full
_TOLERANCE = 1e-5
_COMMON: dict[str, Any] = {
    "learning_rate": 1e-3, "max_seq_length": 64, "max_steps": 5, "gradient_accumulation_steps": 2, "logging_steps": 1,
    "save_steps": 3, "eval_split": 0.2, "eval_steps": 3, "optim": "adamw_torch",
}  # fmt: skip
_ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 256, "bos_token_id": None, "router_aux_loss_coef": 0.5,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 16},
    "qwen2_moe": {
        "num_experts": 4, "intermediate_size": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "qwen3_moe": {"num_experts": 4, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns a tiny model of a family, whose routers have a large auxiliary loss."""
    folder = tmp_path_factory.mktemp("mixtures")
    dense = make_tiny_model(folder / "dense")

    def of(family: str, dropout: float = 0.0) -> Path:
        made = dense if family == "dense" else folder / f"{family}-{dropout}"
        if not made.exists():
            shutil.copytree(dense, made)
            tokenizer = AutoTokenizer.from_pretrained(made)
            config = AutoConfig.for_model(
                family, **_SIZES, **_FAMILIES[family], vocab_size=len(tokenizer), attention_dropout=dropout,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(made)
        return made

    return of


@pytest.fixture
def train(
    forks: Forks,
    two_ranks: TwoRanks,
    mixtures: Callable[..., Path],
    tmp_path: Path,
) -> Train:
    """Train a run on `devices`; of 42 rows 8 are held out, and the last step of an epoch has two rows."""
    number = 0

    def run(method: str, family: str, devices: int = 1, *, dropout: float = 0.0, **config: Any) -> Outcome:
        nonlocal number
        number += 1
        fields = {name: config.pop(name) for name in ("sharded", "sequence_parallel") if name in config}
        data, data_format = make_data(tmp_path, method, 42)
        adapter = {} if method == "full" else {"lora_r": 4, "lora_dropout": dropout, **_ATTENTION}
        shares = devices // fields.get("sequence_parallel", 1)
        config = {**_COMMON, "method": method, "batch_size": 4 // shares, **adapter, **config}
        job = make_job(tmp_path / str(number), mixtures(family, dropout), data, data_format=data_format, **config)
        job |= fields
        outcome = forks.run(job) if devices == 1 else two_ranks.run(job)
        assert outcome.code == 0, outcome.stderr[-3000:]
        return outcome

    return run


def assert_equal(found: Outcome, expected: Outcome, tolerance: float = _TOLERANCE) -> None:
    assert rows(found) == rows(expected) and len(rows(found)) == 5
    assert losses(found) == pytest.approx(losses(expected), abs=tolerance)
    norms = [[record["grad_norm"] for record in run.of("metric")] for run in (expected, found)]
    assert norms[1] == pytest.approx(norms[0], abs=tolerance, rel=1e-4)
    evaluations = [[record["metrics"]["eval_loss"] for record in run.of("eval")] for run in (expected, found)]
    assert evaluations[1] == pytest.approx(evaluations[0], abs=tolerance) and len(evaluations[0]) == 2
    (path,) = (path for path in expected.output.glob("*model.safetensors"))
    wanted, trained = load_file(path), load_file(found.output / path.name)
    assert trained.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert trained[name].allclose(weight, atol=10 * tolerance), name


@pytest.mark.parametrize(
    ("method", "family", "division"),
    [
        ("full", "qwen3_moe", {}),
        pytest.param("full", "mixtral", {}, marks=FULL),
        pytest.param("lora", "mixtral", {}, marks=FULL),
        pytest.param("dpo", "qwen3_moe", {}, marks=FULL),
        pytest.param("full", "qwen3_moe", {"sequence_parallel": 2}, marks=FULL),
        pytest.param("full", "mixtral", {"sharded": True}, marks=FULL),
        pytest.param("lora", "qwen3_moe", {"sharded": True, "sequence_parallel": 2}, marks=FULL),
    ],
)
def test_the_loss_of_the_routers_is_that_of_one_device(
    train: Train, method: str, family: str, division: dict[str, Any]
) -> None:
    """Also in evaluations, and where a step has fewer rows on one of the devices."""
    assert_equal(train(method, family, 2, **division), train(method, family))
