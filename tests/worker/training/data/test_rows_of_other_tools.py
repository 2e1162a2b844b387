"""Rows as OpenAI, TRL, Axolotl and Together have them: tokens and labels of plain TRL on the same rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, chat_template_utils

from anneal.contracts.rewards import Reward
from anneal.contracts.training_config.fields import TrainingConfig
from app.datasets import formats
from tests.worker.training.data.test_chat_template import tokenizer_of
from tests.worker.training.data.test_dataset import learned
from tests.worker.training.tiny import make_tiny_model, write_rows
from worker.training.data import dataset, preferences, reader
from worker.training.data.dataset import Tokens
from worker.training.data.reader import RowSource
from worker.training.data.token_cache import TokenCache
from worker.training.failures import TrainingFailure

LENGTH = 4000
USER = {"role": "user", "content": "what is two and two"}
ANSWER = {"role": "assistant", "content": "four"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add", "parameters": {"type": "object", "properties": {}}},
    }
]


def calling(arguments: Any, **content: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", **content, "tool_calls": [call]}
    return [USER, answer, {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "4"}, ANSWER]


OBJECT, TEXT = {"first": 2, "second": "ü"}, '{"first": 2, "second": "ü"}'
THINKING = [USER, {**ANSWER, "reasoning_content": "two twice"}]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "four"}]},
]
JOINED = [{"role": "user", "content": "what is two"}, ANSWER]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("others") / "model", bos=True)


@pytest.fixture(scope="module")
def network(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model)


def stored(rows: list[Any]) -> tuple[str, list[Any]]:
    """The format of rows, and the rows as an upload stores them."""
    format = formats.detect_format(rows[0])
    return format, [formats.validate_row(format, row) for row in rows]


def our_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path, rows: list[Any], **config: Any) -> Tokens:
    format, converted = stored(rows)
    return dataset.tokenize_file(
        str(write_rows(folder / "rows.jsonl", converted)), format, tokenizer,
        TrainingConfig(base_model="tiny", **config), max_length=LENGTH, chosen=None, progress=lambda done, total: None,
    )  # fmt: skip


def plain_tokens(
    tokenizer: PreTrainedTokenizerBase, network: PreTrainedModel, folder: Path, rows: list[Any], **options: Any
) -> list[tuple[list[int], list[int]]]:
    trainer = SFTTrainer(
        model=network, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        args=SFTConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, max_length=LENGTH, report_to="none", disable_tqdm=True,
            **options,
        ),
    )  # fmt: skip
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


ROWS: dict[str, tuple[str, list[Any], list[Any] | None]] = {
    # Names: template, rows, and the rows that plain TRL gets if its template does not take ours.
    "names": ("llama3", [{"messages": [{**USER, "name": "Ann"}, ANSWER]}], None),
    "null keys": ("qwen3", [{"messages": [{**USER, "tool_calls": None}, {**ANSWER, "refusal": None}]}], None),
    "null content": ("qwen3", [{"messages": calling(TEXT, content=None), "tools": TOOLS}], None),
    "no content": ("qwen3", [{"messages": calling(TEXT), "tools": TOOLS}], None),
    "text arguments": ("deepseekv3", [{"messages": calling(TEXT, content=""), "tools": TOOLS}], None),
    "object arguments": ("qwen2_5", [{"messages": calling(OBJECT, content=""), "tools": TOOLS}], None),
    "objects where text is taken": (
        "deepseekv3", [{"messages": calling(OBJECT, content="")}], [{"messages": calling(TEXT, content="")}],
    ),
    "text where objects are taken": (
        "qwen2_5", [{"messages": calling(TEXT, content="")}], [{"messages": calling(OBJECT, content="")}],
    ),
    "tools as text": ("qwen3", [{"messages": [USER, ANSWER], "tools": json.dumps(TOOLS)}], None),
    "parts": ("qwen2_5_vl", [{"messages": PARTS}], None),
    "parts where text is taken": ("llama3", [{"messages": PARTS}], [{"messages": JOINED}]),
    "reasoning": ("qwen3", [{"messages": THINKING}], None),
    "thinking": ("gptoss", [{"messages": [USER, {**ANSWER, "thinking": "two twice"}]}], None),
    "developer": ("gptoss", [{"messages": [{"role": "developer", "content": "Be brief."}, USER, ANSWER]}], None),
    "developer where it is unknown": (
        "qwen3", [{"messages": [{"role": "developer", "content": "Be brief."}, USER, ANSWER]}],
        [{"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]}],
    ),
    "template arguments": (
        "qwen3", [{"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}], None,
    ),
    "prompt and completion": ("qwen3", [{"prompt": [USER], "completion": [ANSWER]}], None),
    "prompt and completion with arguments": (
        "qwen3", [{"prompt": [USER], "completion": [ANSWER], "chat_template_kwargs": {"enable_thinking": False}}], None,
    ),
    "functions of the past": (
        "qwen2_5",
        [
            {
                "messages": [
                    USER, {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": TEXT}},
                    {"role": "function", "name": "add", "content": "4"},
                ],
                "functions": [TOOLS[0]["function"]],
            }
        ],
        [
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [
                        {"type": "function", "function": {"name": "add", "arguments": OBJECT}}]},
                    {"role": "tool", "name": "add", "content": "4"},
                ],
                "tools": TOOLS,
            }
        ],
    ),
    "a refusal": (
        "llama3", [{"messages": [USER, {"role": "assistant", "content": None, "refusal": "No."}]}],
        [{"messages": [USER, {"role": "assistant", "content": "No."}]}],
    ),
    "token ids": ("llama3", [{"input_ids": [5, 6, 7, 8]}], None),
    "token ids with labels": ("llama3", [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 9]}], None),
}  # fmt: skip


@pytest.mark.parametrize("loss_on", [None, "assistant"])
@pytest.mark.parametrize("kind", ROWS)
def test_tokens_and_labels_are_those_of_plain_trl(
    kind: str, loss_on: str | None, model: Path, network: PreTrainedModel, tmp_path: Path
) -> None:
    family, rows, theirs = ROWS[kind]
    if loss_on is not None and "messages" not in rows[0]:
        return  # the format has no such loss: a 422
    is_noted = kind in NOTED
    if loss_on is not None and family == "deepseekv3":
        # TRL's training template of this family takes objects, and writes JSON within JSON of a text.
        is_noted, theirs = kind == "text arguments", [{**rows[0], "messages": calling(OBJECT, content="")}]
    tokenizer = tokenizer_of(family, model)
    ours = our_tokens(tokenizer, tmp_path, rows, loss_on=loss_on)
    options = {"assistant_only_loss": True} if loss_on else {}
    plain = plain_tokens(tokenizer, network, tmp_path / "plain", theirs or rows, **options)
    assert [(row["input_ids"], row["labels"]) for row in ours.dataset] == plain
    # What is not rendered as it is in the row is reported, if it depends on the template.
    leaves_out_tools = family == "deepseekv3" and "tools" in rows[0]
    assert [remark["examples"] for remark in ours.remarks] == [[0]] * (is_noted + leaves_out_tools)


NOTED = {
    "objects where text is taken", "text where objects are taken", "parts where text is taken",
    "developer where it is unknown", "functions of the past",
}  # fmt: skip
"""Kinds of rows that are rendered in another form than they have."""


class TestMessagesOfTheWeight0:
    """As at OpenAI: answers alone are learned, without those of the weight 0."""

    CHAT = [USER, {"role": "assistant", "content": "five", "weight": 0}, {"role": "user", "content": "no"},
            {**ANSWER, "weight": 1}]  # fmt: skip

    @pytest.mark.parametrize("family", ["qwen3", "gptoss", "llama3", "deepseekv3", "llama3_1"])
    def test_are_left_out_of_the_labels_of_plain_trl(
        self, family: str, model: Path, network: PreTrainedModel, tmp_path: Path
    ) -> None:
        tokenizer = tokenizer_of(family, model)
        (ours,) = our_tokens(tokenizer, tmp_path, [{"messages": self.CHAT}], loss_on="assistant").dataset
        assert "four" in "".join(learned(tokenizer, ours)) and "five" not in "".join(learned(tokenizer, ours))
        if family == "llama3_1":
            return  # TRL has no training template of it
        rows = [{"messages": [{**message, "weight": None} for message in self.CHAT]}]
        ((ids, labels),) = plain_tokens(tokenizer, network, tmp_path / "plain", rows, assistant_only_loss=True)
        assert ours["input_ids"] == ids
        forgotten = [at for at, label in enumerate(labels) if label != ours["labels"][at]]
        assert "five" in tokenizer.decode([ids[at] for at in forgotten])
        assert forgotten == list(range(forgotten[0], forgotten[-1] + 1))

    @pytest.mark.parametrize("loss_on", ["all", "completion"])
    @pytest.mark.parametrize("family", ["qwen2_5", "llama3"])
    def test_are_not_learned_with_another_loss(self, family: str, loss_on: str, model: Path, tmp_path: Path) -> None:
        tokenizer = tokenizer_of(family, model)
        chats = [self.CHAT, [USER, ANSWER], [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "six"}]]
        tokenized = our_tokens(tokenizer, tmp_path, [{"messages": chat} for chat in chats], loss_on=loss_on)
        texts = ["".join(learned(tokenizer, row)) for row in tokenized.dataset]
        assert ["five" in text for text in texts] == [False] * 3
        assert ["four" in text for text in texts] == [True, True, False] and "six" in texts[2]
        assert ["what" in text for text in texts] == [loss_on == "all"] * 3

    def test_leave_out_a_row_of_nothing_else(self, model: Path, tmp_path: Path) -> None:
        tokenizer = tokenizer_of("llama3", model)
        rows = [{"messages": [USER, {**ANSWER, "weight": weight}]} for weight in (1, 0)]
        for loss_on in ("assistant", "completion"):
            tokenized = our_tokens(tokenizer, tmp_path, rows, loss_on=loss_on)
            assert (tokenized.rows, [remark["examples"] for remark in tokenized.remarks]) == (1, [[1]])

    def test_are_found_in_a_file(self, tmp_path: Path) -> None:
        plain, weighted = {"messages": [USER, ANSWER], "weight": 3}, {"messages": self.CHAT}
        assert not reader.has_weights(str(write_rows(tmp_path / "plain.jsonl", [plain])))
        assert reader.has_weights(str(write_rows(tmp_path / "weighted.jsonl", [plain, weighted])))
        assert not reader.has_weights(str(tmp_path / "removed.jsonl"))  # reported as `bad_data` when the rows are read


class TestTemplatesWithNames:
    """A tokenizer may have a template of its own for chats with tools."""

    @pytest.mark.parametrize("marked", ["default", "tool_use"])
    @pytest.mark.parametrize("loss_on", ["all", "assistant"])
    def test_are_used_as_in_transformers(self, loss_on: str, marked: str, model: Path, tmp_path: Path) -> None:
        tokenizer = tokenizer_of("qwen2_5", model)
        tokenizer.chat_template = {
            name: chat_template_utils.qwen2_5_training_chat_template if name == marked
            else chat_template_utils.qwen2_5_chat_template
            for name in ("default", "tool_use")
        }  # fmt: skip
        rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], "tools": TOOLS}]
        for encoded, row in zip(our_tokens(tokenizer, tmp_path, rows, loss_on=loss_on).dataset, rows, strict=True):
            text = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
            assert tokenizer.decode(encoded["input_ids"]) == text
            assert loss_on == "all" or [part.strip() for part in learned(tokenizer, encoded)] == ["four<|im_end|>"]

    def test_need_a_default(self, model: Path, tmp_path: Path) -> None:
        tokenizer = tokenizer_of("qwen2_5", model)
        tokenizer.chat_template = {"rag": tokenizer.chat_template}
        with pytest.raises(TrainingFailure, match="none is the `default`") as refused:
            our_tokens(tokenizer, tmp_path, [{"messages": [USER, ANSWER]}], loss_on="assistant")
        assert refused.value.code == "config_error"


class TestReasoning:
    """What a template leaves out is reported."""

    OLD = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"}

    @pytest.mark.parametrize(
        ("family", "chat", "is_dropped"),
        [
            ("qwen3", [USER, OLD], False),
            ("qwen3", [USER, OLD, USER, OLD], True),
            ("qwen3", [USER, {**OLD, "content": "<think>early</think>four"}, USER, ANSWER], True),
            ("qwen3", THINKING, False),
            ("llama3", [USER, OLD], False),
            ("llama3", THINKING, True),
        ],
    )
    def test_that_is_dropped_is_counted(
        self, family: str, chat: list[Any], is_dropped: bool, model: Path, tmp_path: Path
    ) -> None:
        rows = [{"messages": [USER, ANSWER]}, {"messages": chat}]
        remarks = our_tokens(tokenizer_of(family, model), tmp_path, rows).remarks
        assert [remark["examples"] for remark in remarks] == ([[1]] if is_dropped else [])
        assert all("`<think>`" in remark["reason"] for remark in remarks)


@pytest.mark.parametrize(("family", "is_dropped"), [("llama3", True), ("qwen2_5", False), ("llama3_1", False)])
def test_tools_and_calls_that_a_template_leaves_out_are_counted(
    family: str, is_dropped: bool, model: Path, tmp_path: Path
) -> None:
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER], "tools": TOOLS},
        {"messages": calling(OBJECT, content=""), "tools": TOOLS},
    ]
    remarks = our_tokens(tokenizer_of(family, model), tmp_path, rows).remarks
    dropped = {"tool calls of answers": [2], "descriptions of `tools`": [1, 2]}
    named = {what: remark["examples"] for remark in remarks for what in dropped if what in remark["reason"]}
    assert named == (dropped if is_dropped else {})


def test_padding_of_token_ids_is_removed_and_ids_outside_the_vocabulary_name_line_and_column(
    model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    padded = {"input_ids": [1, 5, 6, 7, 1, 1], "attention_mask": [0, 1, 1, 1, 0, 0]}
    rows = [padded, {**padded, "labels": [-100, -100, 6, 7, -100, -100]}]
    encoded = our_tokens(tokenizer, tmp_path, rows).dataset
    assert [(row["input_ids"], row["labels"]) for row in encoded] == [([5, 6, 7], [5, 6, 7]), ([5, 6, 7], [-100, 6, 7])]
    rows += [{"input_ids": [5, len(tokenizer)]}, {"input_ids": [5, 6], "labels": [-100, 70_000]}]
    with pytest.raises(TrainingFailure) as refused:
        our_tokens(tokenizer, tmp_path, rows)
    assert refused.value.code == "bad_data"
    for part in ("line 3: `input_ids`", "line 4: `labels`", "70000", "tokenize the rows with its tokenizer"):
        assert part in refused.value.message


@pytest.mark.parametrize("ids", [[5, 6.5], [5, 2**40], [5, None], ["5", "6"], [[5], [6]]], ids=str)
def test_token_ids_of_a_plugin_that_are_no_integers_are_refused(ids: list[Any], model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ids}])
    with pytest.raises(TrainingFailure, match="line 1: `input_ids` is not a list of") as refused:
        dataset.tokenize_file(
            str(path), "tokenized", AutoTokenizer.from_pretrained(model), TrainingConfig(base_model="tiny"),
            max_length=LENGTH, chosen=None, progress=lambda done, total: None,
        )  # fmt: skip
    assert refused.value.code == "bad_data"


PAIRS: dict[str, tuple[list[Any], list[Any] | None]] = {
    "implicit prompt": ([{"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "five"}]}], None),
    "implicit prompt of text": (
        [{"chosen": "two and two is four", "rejected": "two and two is five"}], None,
    ),
    "prompt within its answers": (
        [{"prompt": USER["content"], "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "five"}]}],
        [{"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "five"}]}],
    ),
    "template arguments": (
        [
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "five"}],
             "chat_template_kwargs": {"enable_thinking": False}}
        ], None,
    ),
    "openai": (
        [
            {"input": {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": True},
             "preferred_output": [ANSWER], "non_preferred_output": [{**ANSWER, "content": "five"}]}
        ],
        [{"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "five"}], "tools": TOOLS}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_tokens_of_pairs_are_those_of_plain_trl(
    kind: str, model: Path, network: PreTrainedModel, tmp_path: Path
) -> None:
    rows, theirs = PAIRS[kind]
    tokenizer = tokenizer_of("qwen3", model)
    format, converted = stored(rows)
    source = RowSource(
        str(write_rows(tmp_path / "rows.jsonl", converted)), format, None, None, "training", lambda done, total: None,
        TokenCache(),
    )  # fmt: skip
    (ours,) = preferences.read_preferences(source, tokenizer, max_length=LENGTH, truncation_mode="keep_start").dataset
    trainer = DPOTrainer(
        model=network, train_dataset=Dataset.from_list(theirs or rows), processing_class=tokenizer,
        args=DPOConfig(
            output_dir=str(tmp_path / "plain"), use_cpu=True, bf16=False, max_length=LENGTH, report_to="none",
            disable_tqdm=True,
        ),
    )  # fmt: skip
    (plain,) = trainer.train_dataset
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    assert [ours[name] for name in columns] == [plain[name] for name in columns]


def test_prompts_of_rlhf_keep_the_arguments_of_each_call(model: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3", model)
    prompts = [[*calling({name: 1}, content="")[:3], *PARTS[:1]] for name in ("first", "second")]
    path = write_rows(tmp_path / "rows.jsonl", stored([{"prompt": prompt} for prompt in prompts])[1])
    source = RowSource(str(path), "prompt", None, None, "training", lambda done, total: None, TokenCache())
    read = preferences.read_prompts(source, tokenizer, max_length=LENGTH, compared_by=())
    for row, prompt in zip(read.dataset, prompts, strict=True):
        assert row["prompt"][:3] == prompt[:3] and row["prompt"][3] == JOINED[0]
    assert [remark["count"] for remark in read.remarks] == [2]


def test_prompts_of_rlhf_have_the_columns_that_their_rewards_refer_to(model: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "1 + 1?"}], "solution": {"value": 2}, "other": 3}
    path = write_rows(tmp_path / "rows.jsonl", [formats.validate_row("prompt", row)])
    source = RowSource(str(path), "prompt", None, None, "training", lambda done, total: None, TokenCache())
    templates = {"input": "{{ item.messages.0.content }}", "reference": "{{ item.solution.value }}"}
    check: Any = TypeAdapter(Reward).validate_python({"type": "string_check", **templates})
    read = preferences.read_prompts(source, tokenizer_of("qwen3", model), max_length=LENGTH, compared_by=[check])
    (prompt,) = read.dataset
    assert json.loads(prompt["item"]) == {"messages": row["messages"], "solution": {"value": 2}}
