"""Answers in chats: tokens and labels equal those of plain TRL, for each family that it has a training template of."""

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer, chat_template_utils

from tests.worker.training.data.test_dataset import CHAT, CHATML, tokens
from tests.worker.training.tiny import make_tiny_model
from worker.training.data.chat_template import ensure_template, training_template, trains_end_of_turn

_ENDING = "_training_chat_template"
_OF_PICTURES = {"idefics3", "llava_next", "smolvlm"}
"""Families whose templates render no text that is not in a list with pictures."""
FAMILIES = sorted(
    {name.removesuffix(_ENDING) for name in vars(chat_template_utils) if name.endswith(_ENDING)}
    - _OF_PICTURES
    - {"get"}
)
LENGTH = 4000
"""Some templates start every chat with a page of instructions."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("families") / "model", bos=True)


@pytest.fixture(scope="module")
def network(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model)


def tokenizer_of(family: str, model: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with the template of a family, in which each of its control words is a token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = getattr(chat_template_utils, f"{family}_chat_template")
    words = set(re.findall(r"<[|\uff5ca-z_/][^<>\s'\"{}]*>", tokenizer.chat_template))
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(words), "bos_token": "<|begin|>"})
    return tokenizer


def plain_tokens(
    tokenizer: PreTrainedTokenizerBase, network: PreTrainedModel, rows: list[Any], folder: Path
) -> list[tuple[list[int], list[int]]]:
    trainer = SFTTrainer(
        model=network,
        args=SFTConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, assistant_only_loss=True, max_length=LENGTH,
            report_to="none", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


@pytest.mark.parametrize("family", FAMILIES)
def test_several_turns_of_every_family_that_trl_knows_are_tokens_and_labels_of_plain_trl(
    family: str, model: Path, network: PreTrainedModel, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(family, model)
    own = tokenizer.chat_template
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    ours = tokens(tokenizer, tmp_path, rows, "chat", length=LENGTH, loss_on="assistant").dataset
    encoded = [(row["input_ids"], row["labels"]) for row in ours]
    assert encoded == plain_tokens(tokenizer, network, rows, tmp_path / "plain")
    assert tokenizer.chat_template == own, "the output keeps the template of the model"


def test_each_answer_of_qwen3_is_learned_with_its_end(model: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3", model)
    (row,) = tokens(tokenizer, tmp_path, [{"messages": CHAT}], "chat", length=LENGTH, loss_on="assistant").dataset
    learned = tokenizer.decode(
        [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
    )
    no_thoughts = "<think>\n\n</think>\n\n"
    assert learned == f"{no_thoughts}first answer<|im_end|>\n{no_thoughts}second answer<|im_end|>\n"
    assert trains_end_of_turn(tokenizer)


@pytest.mark.parametrize("loss_on", ["all", "completion"])
def test_other_losses_are_of_the_models_own_template(loss_on: str, model: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3", model)
    (row,) = tokens(tokenizer, tmp_path, [{"messages": CHAT}], "chat", length=LENGTH, loss_on=loss_on).dataset
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_templates_with_marks_and_those_that_trl_does_not_know_need_none(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ensure_template(tokenizer)
    assert training_template(tokenizer) is None and trains_end_of_turn(tokenizer)
    for tokenizer.chat_template in (CHATML, "{{ raise_exception('never') }}", "{{ 1 / 0 }}"):
        assert training_template(tokenizer) is None and trains_end_of_turn(tokenizer)


def test_marks_that_leave_out_the_end_of_an_answer_are_noticed(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    )
    assert not trains_end_of_turn(tokenizer)
