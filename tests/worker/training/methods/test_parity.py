"""Beside plain TRL on the same data, seed and settings: the same losses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template

from tests.worker.training.data.test_dataset import CHATML
from tests.worker.training.methods import plain_trl
from tests.worker.training.tiny import CORPUS, Forks, make_job, make_tiny_model, write_rows

STEPS = 8


plain_losses = partial(plain_trl.plain_losses, "sft", steps=STEPS, batch_size=2, lora_dropout=0.05)
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "optim": "adamw_torch",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, whose random numbers depend on how the texts of a batch are laid out."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "plain", layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("adapter", "ours", "theirs"),
    [
        ("full", {"method": "full", "max_seq_length": 40}, {"max_length": 40}),
        pytest.param("full", {"method": "full", "max_seq_length": 128}, {"max_length": 128}, marks=pytest.mark.full),
        ("full", {"method": "full", "max_seq_length": 128, "extra": {"padding_free": False}}, {"max_length": 128}),
        ("full", {"method": "full", "max_seq_length": 250}, {"max_length": None, "padding_free": True}),
        ("lora", {"method": "lora", "max_seq_length": 128, "packing": True}, {"max_length": 128, "packing": True}),
        ("qlora", {"method": "qlora", "max_seq_length": 60}, {"max_length": 60}),
        ("8bit", {"method": "sft", "max_seq_length": 60, "load_in_8bit": True}, {"max_length": 60}),
        *(
            pytest.param(
                "lora",
                {"method": "lora", "max_seq_length": 60, **fields},
                {"max_length": 60, "peft_options": peft_options},
                marks=marks,
            )
            for fields, peft_options, marks in (
                ({"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa"}, ()),
                ({"init_lora_weights": "olora"}, {"init_lora_weights": "olora"}, pytest.mark.full),
                (
                    {"init_lora_weights": "gaussian", "layers_to_transform": [1], "trainable_token_indices": [5, 9]},
                    {
                        "init_lora_weights": "gaussian",
                        "layers_to_transform": [1],
                        "trainable_token_indices": [5, 9],
                        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                    },
                    (),
                ),
            )
        ),
    ],
)
def test_losses_equal_plain_trls(
    adapter: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    forks: Forks,
    model: Path,
    chats: Path,
    tmp_path: Path,
) -> None:
    job = make_job(tmp_path, model, chats, logging_steps=1, **SETTINGS, **ours)
    done = forks.run(job)
    assert done.result["outcome"] == "completed", done.result
    losses = [float.fromhex(loss) for loss, _ in done.steps.values()]
    assert losses == pytest.approx(plain_losses(model, chats, tmp_path / "plain", adapter, **theirs), rel=1e-6)


def test_losses_on_prompts_and_completions_equal_plain_trls_with_the_defaults_of_both(
    forks: Forks, model: Path, tmp_path: Path
) -> None:
    pairs = ({"prompt": f"what is row {n}\n", "completion": CORPUS[n % 40][: 20 + n % 50]} for n in range(40))
    path = write_rows(tmp_path / "pairs.jsonl", pairs)

    def losses(name: str, used: str, **config: str) -> list[float]:
        job = make_job(
            tmp_path / name, model, path, data_format="prompt_completion", method="full", max_seq_length=128,
            **SETTINGS, **config,
        )  # fmt: skip
        done = forks.run(job)
        assert done.result["outcome"] == "completed", done.result
        assert done.of("config")[0]["effective"]["loss_on"] == used
        return [float.fromhex(loss) for loss, _ in done.steps.values()]

    plain = partial(plain_losses, model, path, adapter="full", max_length=128)
    ours = losses("ours", "completion")
    assert ours == pytest.approx(plain(folder=tmp_path / "plain"), abs=1e-6)
    on_all = losses("all", "all", loss_on="all")
    assert on_all == pytest.approx(plain(folder=tmp_path / "plain-all", completion_only_loss=False), abs=1e-6)
    assert ours != pytest.approx(on_all, abs=1e-3)


def test_losses_on_several_answers_equal_plain_trls_and_the_output_keeps_its_template(
    forks: Forks, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", chat_template=qwen3_chat_template)
    path = write_rows(
        tmp_path / "chats.jsonl",
        (
            {
                "messages": [
                    {"role": role, "content": CORPUS[(n + turn) % 40][: 8 + n % 7]}
                    for turn, role in enumerate(("user", "assistant") * 2)
                ]
            }
            for n in range(40)
        ),
    )
    job = make_job(tmp_path, model, path, method="full", max_seq_length=256, loss_on="assistant", **SETTINGS)
    done = forks.run(job)
    assert done.result["outcome"] == "completed", done.result
    plain = plain_losses(model, path, tmp_path / "plain", "full", max_length=256, assistant_only_loss=True)
    assert [float.fromhex(loss) for loss, _ in done.steps.values()] == pytest.approx(plain, rel=1e-6)
    assert AutoTokenizer.from_pretrained(done.output).chat_template == qwen3_chat_template
    said = [record["line"] for record in done.of("message")]
    assert any("TRL's training template" in text for text in said)
    # The tokenizer here has no token for `<|im_end|>`, as a model of that family has.
    assert any("may not learn to stop" in text for text in said)


def _row_of_other_tools(data_format: str, number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"what is row {number}"}
    answer = {"role": "assistant", "content": CORPUS[number % 40][: 20 + number % 50]}
    ids = list(range(20, 30 + number % 9))
    return {
        "chat": {"messages": [question, {**answer, "weight": 1}]},
        "prompt_completion": {"prompt": [question], "completion": [answer]},
        "tokenized": {"input_ids": [5 + number, *ids], "labels": [-100, *ids]},
    }[data_format]


@pytest.mark.parametrize(
    ("data_format", "theirs", "used"),
    [
        ("chat", {"assistant_only_loss": True}, "assistant"), ("prompt_completion", {}, "completion"),
        ("tokenized", {}, "all"),
    ],
)  # fmt: skip
def test_losses_on_rows_of_other_tools_equal_plain_trls(
    data_format: str, theirs: dict[str, Any], used: str, forks: Forks, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", chat_template=qwen3_chat_template)
    path = write_rows(tmp_path / "rows.jsonl", (_row_of_other_tools(data_format, number) for number in range(40)))
    job = make_job(tmp_path, model, path, data_format=data_format, method="full", max_seq_length=128, **SETTINGS)
    done = forks.run(job)
    assert done.result["outcome"] == "completed", done.result
    (config,) = done.of("config")
    assert config["effective"]["loss_on"] == used
    assert ("loss_on" in [item["field"] for item in config["replaced"]]) == (data_format == "chat")
    plain = plain_losses(model, path, tmp_path / "plain", "full", max_length=128, **theirs)
    assert [float.fromhex(loss) for loss, _ in done.steps.values()] == pytest.approx(plain, rel=1e-6)
