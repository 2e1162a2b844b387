"""Promises about mixtures of experts on several devices: they train as one device does, the loss of the routers too."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.worker.training.many_ranks import ManyRanks
from tests.worker.training.test_ranks import losses, make_data, rows
from tests.worker.training.tiny import Forks, Outcome, make_job, make_tiny_model
from tests.worker.training.two_ranks import TwoRanks

Train = Callable[..., Outcome]

FULL = pytest.mark.full
_TOLERANCE = 1e-5
_COMMON: dict[str, Any] = {
    "learning_rate": 1e-3, "max_seq_length": 64, "max_steps": 5, "gradient_accumulation_steps": 2, "logging_steps": 1,
    "save_steps": 3, "eval_split": 0.22, "eval_steps": 3, "optim": "adamw_torch",
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
    dense = make_tiny_model(folder / "dense", layers=2)

    def of(family: str, dropout: float = 0.0) -> Path:
        model_folder = dense if family == "dense" else folder / f"{family}-{dropout}"
        if not model_folder.exists():
            shutil.copytree(dense, model_folder)
            tokenizer = AutoTokenizer.from_pretrained(model_folder)
            config = AutoConfig.for_model(
                family, **_SIZES, **_FAMILIES[family], vocab_size=len(tokenizer), attention_dropout=dropout,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(model_folder)
        return model_folder

    return of


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
    mixtures: Callable[..., Path],
    tmp_path: Path,
) -> Train:
    """Train a run on `devices`; of 42 rows 9 are held out, and the last step of an epoch has one row."""
    number = 0

    def run(method: str, family: str, devices: int = 1, *, dropout: float = 0.0, **config: Any) -> Outcome:
        nonlocal number
        number += 1
        fields = {
            name: config.pop(name)
            for name in ("sharded", "sequence_parallel", "expert_parallel", "task")
            if name in config
        }
        data, data_format = make_data(tmp_path, method, 42)
        adapter = {} if method == "full" else {"lora_r": 4, "lora_dropout": dropout, **_ATTENTION}
        shares = devices // fields.get("sequence_parallel", 1)
        config = {**_COMMON, "method": method, "batch_size": 4 // shares, **adapter, **config}
        job = make_job(tmp_path / str(number), mixtures(family, dropout), data, data_format=data_format, **config)
        job |= fields | {"sharded": fields.get("sharded", False) or "expert_parallel" in fields}
        if devices == 1:
            outcome = forks.run(job)
        elif devices == 2:
            outcome = two_ranks.run(job)
        else:
            outcome = request.getfixturevalue("four_ranks").run(job)
        assert outcome.code == 0, outcome.stderr[-3000:]
        return outcome

    return run


def assert_equal(actual: Outcome, expected: Outcome, tolerance: float = _TOLERANCE) -> None:
    assert rows(actual) == rows(expected) and len(rows(actual)) == 5
    assert losses(actual) == pytest.approx(losses(expected), abs=tolerance)
    norms = [[record["grad_norm"] for record in run.of("metric")] for run in (expected, actual)]
    assert norms[1] == pytest.approx(norms[0], abs=tolerance, rel=1e-4)
    evaluations = [[record["metrics"]["eval_loss"] for record in run.of("eval")] for run in (expected, actual)]
    assert evaluations[1] == pytest.approx(evaluations[0], abs=tolerance) and len(evaluations[0]) == 2
    (path,) = (path for path in expected.output.glob("*model.safetensors"))
    expected_weights, trained = load_file(path), load_file(actual.output / path.name)
    assert trained.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
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


@pytest.mark.parametrize(
    ("method", "family", "devices", "division"),
    [
        ("lora", "mixtral", 2, {}),
        pytest.param("full", "mixtral", 2, {}, marks=FULL),
        pytest.param("full", "qwen2_moe", 2, {}, marks=FULL),
        pytest.param("full", "qwen3_moe", 2, {"gradient_checkpointing": True}, marks=FULL),
        pytest.param("full", "qwen3_moe", 2, {"packing": True}, marks=FULL),
        pytest.param("full", "qwen3_moe", 4, {"expert_parallel": 4}, marks=FULL),
        pytest.param("full", "mixtral", 4, {}, marks=FULL),
        pytest.param("lora", "mixtral", 4, {"gradient_checkpointing": True}, marks=FULL),
        pytest.param("full", "qwen3_moe", 2, {"sequence_parallel": 2}, marks=FULL),
        pytest.param("full", "qwen3_moe", 2, {"sequence_parallel": 2, "packing": True}, marks=FULL),
        pytest.param("full", "mixtral", 4, {"sequence_parallel": 2}, marks=FULL),
        pytest.param("lora", "qwen3_moe", 4, {"sequence_parallel": 2, "expert_parallel": 4}, marks=FULL),
        pytest.param("full", "qwen2_moe", 4, {"sequence_parallel": 4, "packing": True}, marks=FULL),
        pytest.param("lora", "mixtral", 4, {"sequence_parallel": 4, "gradient_checkpointing": True}, marks=FULL),
    ],
)
def test_devices_that_share_experts_train_as_one(
    train: Train, method: str, family: str, devices: int, division: dict[str, Any]
) -> None:
    """With gradients that are clipped; on four devices in pairs, each pair has all experts.

    They may share sequences too, in groups of any size; in the last step, one of two such groups has no row.
    """
    alone = {name: value for name, value in division.items() if not name.endswith("_parallel")}
    more = {"extra": {"max_grad_norm": 0.1}}
    divided = train(method, family, devices, **{"expert_parallel": 2, **division}, **more)
    assert_equal(divided, train(method, family, **alone, **more))


@pytest.mark.parametrize(
    ("method", "devices", "config"),
    [
        pytest.param("full", 2, {}, marks=FULL),
        pytest.param("lora", 2, {}, marks=FULL),
        pytest.param("full", 4, {}, marks=FULL),
        pytest.param("full", 2, {"sequence_parallel": 2}, marks=FULL),
        pytest.param("lora", 4, {"sequence_parallel": 2, "packing": True}, marks=FULL),
    ],
)
def test_resumes_exactly_with_dropout(train: Train, method: str, devices: int, config: dict[str, Any]) -> None:
    more = {"dropout": 0.1, "expert_parallel": 2, **config}
    whole = train(method, "qwen3_moe", devices, **more)
    rest = train(method, "qwen3_moe", devices, **more, resume_from=whole.checkpoint(3), attempt=2)
    assert rest.steps == {step: done for step, done in whole.steps.items() if step > 3} and len(rest.steps) == 2
    facts = rest.of("config")[-1]["facts"]
    assert (facts["fidelity"], facts["fidelity_reasons"]) == ("exact", [])
    (path,) = whole.output.glob("*model.safetensors")
    assert (rest.output / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 1), (1, 1, 1)),
        pytest.param((1, 1, 1), (2, 2, 1), marks=FULL),
        pytest.param((4, 2, 1), (2, 2, 1), marks=FULL),
        pytest.param((4, 4, 1), (4, 2, 1), marks=FULL),
        pytest.param((4, 2, 2), (1, 1, 1), marks=FULL),
        pytest.param((4, 4, 1), (2, 2, 2), marks=FULL),
    ],
)
def test_another_division_resumes_with_the_same_rows(
    train: Train, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    """The checkpoint has whole weights, and the state of the optimizer by the names of the parameters."""

    def on(division: tuple[int, int, int], **more: Any) -> Outcome:
        devices, experts, parts = division
        divided = {"expert_parallel": experts} if experts > 1 else {}
        return train("full", "mixtral", devices, **divided, sequence_parallel=parts, **more)

    whole = on(before)
    rest = on(after, resume_from=whole.checkpoint(3), attempt=2)
    assert rows(rest) == {step: trained for step, trained in rows(whole).items() if step > 3}
    assert losses(rest) == pytest.approx({step: losses(whole)[step] for step in (4, 5)}, abs=_TOLERANCE)
    facts = rest.of("config")[-1]["facts"]
    assert facts["fidelity"] == "approximate"
    for place, shared in ((1, "the experts of a layer"), (2, "each sequence")):
        if before[place] != after[place]:
            changed = f"was {before[place]} at the checkpoint and is {after[place]} now."
            assert f"The number of devices that share {shared} {changed}" in facts["fidelity_reasons"]


@FULL
@pytest.mark.parametrize("division", [{"expert_parallel": 2}, {"expert_parallel": 2, "sequence_parallel": 2}])
def test_samples_and_evaluations_without_training_equal_those_of_one_device(
    train: Train, division: dict[str, int]
) -> None:
    sampling = {"sample_prompts": ["the model learns", "row"], "sample_steps": 3, "sample_max_new_tokens": 6}
    trained = [train("full", "mixtral", **sampling), train("full", "mixtral", 2, **division, **sampling)]
    assert [one["completion"] for one in trained[1].of("sample")] == [
        one["completion"] for one in trained[0].of("sample")
    ]
    one_device, two_devices = (
        train("lora", "qwen3_moe", task="evaluate"),
        train("lora", "qwen3_moe", 2, **division, task="evaluate"),
    )
    (expected,), (actual,) = one_device.of("eval"), two_devices.of("eval")
    assert actual["metrics"]["eval_loss"] == pytest.approx(expected["metrics"]["eval_loss"], abs=_TOLERANCE)


@FULL
@pytest.mark.parametrize(
    ("family", "config", "says"),
    [
        ("dense", {"method": "full"}, "this model (llama) has no experts"),
        ("qwen2_moe", {"method": "full", "expert_parallel": 3}, "does not divide the 2 devices"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    two_ranks: TwoRanks,
    mixtures: Callable[..., Path],
    tmp_path: Path,
    family: str,
    config: dict[str, Any],
    says: str,
) -> None:
    data, data_format = make_data(tmp_path, "full", 8)
    experts = config.get("expert_parallel", 2)
    config = {name: value for name, value in config.items() if name != "expert_parallel"}
    job = make_job(tmp_path / "run", mixtures(family), data, data_format=data_format, max_steps=1, **config)
    done = two_ranks.run_to_end_of_first(job | {"sharded": True, "expert_parallel": experts})
    assert (done.result["outcome"], done.of("metric")) == ("failed", [])
    assert done.result["error"]["code"] == "config_error" and says in done.result["error"]["message"], done.result


@FULL
def test_one_device_resumes_exactly(train: Train) -> None:
    """Files of a checkpoint have a tensor for each expert, and the model one for all of a layer."""
    whole = train("full", "qwen3_moe", dropout=0.1)
    rest = train("full", "qwen3_moe", dropout=0.1, resume_from=whole.checkpoint(3), attempt=2)
    assert rest.steps == {step: done for step, done in whole.steps.items() if step > 3} and len(rest.steps) == 2
    assert rest.of("config")[-1]["facts"]["fidelity"] == "exact"
