"""What the model is shown and what it learns: formats, loss masks, cutting and packing."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from anneal.contracts.training_config.fields import TrainingConfig
from tests.worker.training.tiny import make_chat_dataset, write_rows
from worker.training.data import dataset
from worker.training.data.chat_template import ensure_template, set_template
from worker.training.data.dataset import Tokens
from worker.training.failures import TrainingFailure

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # renders an answer otherwise once it is not the last: as templates do that drop old thoughts
    "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content[:2] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "second answer"},
]


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def tokens(
    tokenizer: PreTrainedTokenizerBase, path: Path, rows: list[Any], data_format: str, length: int = 200, **config: Any
) -> Tokens:
    return dataset.tokenize_file(
        str(write_rows(path / "rows.jsonl", rows)), data_format, tokenizer,
        TrainingConfig(base_model="tiny", **config), max_length=length, chosen=None, progress=lambda done, total: None,
    )  # fmt: skip


def learned(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[str]:
    """The stretches of text that a row teaches."""
    runs: list[list[int]] = []
    last = False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, -100)
        if label != -100:
            if not last:
                runs.append([])
            runs[-1].append(token)
        last = label != -100
    return [tokenizer.decode(run) for run in runs]


class TestLossMasks:
    def test_all_learns_every_token(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        ensure_template(tokenizer)
        (row,) = tokens(tokenizer, tmp_path, [{"messages": CHAT}], "chat").dataset
        assert row["labels"] == row["input_ids"]
        assert tokenizer.decode(row["input_ids"]) == (
            "<|user|>\none two\n<|assistant|>\nfirst answer<|end|>\n"
            "<|user|>\nthree\n<|assistant|>\nsecond answer<|end|>\n"
        )

    def test_assistant_learns_every_answer_and_where_it_ends(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        assert ensure_template(tokenizer)
        (row,) = tokens(tokenizer, tmp_path, [{"messages": CHAT}], "chat", loss_on="assistant").dataset
        assert learned(tokenizer, row) == ["first answer<|end|>", "second answer<|end|>"]

    def test_assistant_works_for_templates_without_generation_marks(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        tokenizer.chat_template = CHATML
        (row,) = tokens(tokenizer, tmp_path, [{"messages": CHAT}], "chat", loss_on="assistant").dataset
        assert learned(tokenizer, row) == ["first answer<|im_end|>\n", "second answer<|im_end|>\n"]

    def test_calls_of_tools_and_the_tools_reach_the_template(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        ensure_template(tokenizer)
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        rows = [{"messages": chat, "tools": [{"name": "add"}]}, {"messages": CHAT[:2]}]
        first, second = tokens(tokenizer, tmp_path, rows, "chat", loss_on="assistant").dataset
        unspaced = tokenizer.decode(first["input_ids"]).replace(" ", "")
        assert unspaced.startswith('<|tools|>\n[{"name":"add"}]\n<|user|>') and "add" in learned(tokenizer, first)[0]
        assert learned(tokenizer, second) == ["first answer<|end|>"]

    def test_assistant_is_refused_when_the_template_hides_where_answers_are(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        tokenizer.chat_template = FORGETFUL
        with pytest.raises(TrainingFailure, match="renders a turn differently") as refused:
            tokens(tokenizer, tmp_path, [{"messages": CHAT}], "chat", loss_on="assistant")
        assert refused.value.code == "config_error"

    @pytest.mark.parametrize("template", [None, CHATML])
    def test_completion_learns_the_last_answer(
        self, template: str | None, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        tokenizer.chat_template = template
        ensure_template(tokenizer)
        (row,) = tokens(tokenizer, tmp_path, [{"messages": CHAT}], "chat", loss_on="completion").dataset
        (text,) = learned(tokenizer, row)
        assert text.startswith("second answer")

    def test_a_chat_without_an_answer_is_named(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        ensure_template(tokenizer)
        rows = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": CHAT[:3]}]
        for loss_on, lines in (("assistant", ["line 2:"]), ("completion", ["line 2:", "line 3:"])):
            with pytest.raises(TrainingFailure) as refused:
                tokens(tokenizer, tmp_path, rows, "chat", loss_on=loss_on)
            assert refused.value.code == "bad_data"
            assert [line for line in ("line 1:", "line 2:", "line 3:") if line in refused.value.message] == lines

    def test_prompt_and_completion(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        rows = [{"prompt": "one two", "completion": " three"}]
        for loss_on in ("completion", "assistant"):  # the latter is the loss of a run on chats that evaluates on these
            (row,) = tokens(tokenizer, tmp_path, rows, "prompt_completion", loss_on=loss_on).dataset
            assert learned(tokenizer, row) == [" three<|end|>"]
        (row,) = tokens(tokenizer, tmp_path, rows, "prompt_completion", loss_on="all").dataset
        assert learned(tokenizer, row) == ["one two three<|end|>"]

    def test_only_the_completion_is_learned_by_default(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        (row,) = tokens(
            tokenizer, tmp_path, [{"prompt": "one two", "completion": " three"}], "prompt_completion"
        ).dataset
        assert learned(tokenizer, row) == [" three<|end|>"]

    def test_a_text_ends_with_the_end_token_once(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        tokenized = tokens(tokenizer, tmp_path, [{"text": "one"}, {"text": "one<|end|>"}], "text")
        assert [learned(tokenizer, row) for row in tokenized.dataset] == [["one<|end|>"]] * 2

    def test_a_tokenizer_with_a_template_keeps_it(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer.chat_template = CHATML
        assert not ensure_template(tokenizer)
        assert tokenizer.chat_template == CHATML


class TestATemplateOfTheConfiguration:
    def test_replaces_that_of_the_tokenizer_even_if_it_rejects_a_short_chat(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        tokenizer.chat_template = CHATML
        own = "{% if messages | length > 2 %}{{ messages[0].content }}{% else %}{{ raise_exception('x') }}{% endif %}"
        set_template(tokenizer, own)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == CHAT[0]["content"]

    @pytest.mark.parametrize(
        ("template", "says"),
        [
            ("{% for m in messages %}", r"is not valid Jinja: .*endfor.* \(line 1\)"),
            ("{{ ''.__class__.__mro__ }}", "uses what a template may not"),
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
            ("{{ 'a' * 2000000 }}", "makes 2,000,000 characters of a short chat"),
        ],
    )
    def test_is_rendered_in_a_sandbox_within_bounds(
        self, template: str, says: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("worker.training.data.chat_template._MOST_SECONDS", 0.2)
        with pytest.raises(TrainingFailure, match=f"^`chat_template` {says}") as refused:
            set_template(tokenizer, template)
        assert refused.value.code == "config_error"


class TestCutting:
    ROWS = [{"text": "one two three four five six seven eight"}, {"text": "a"}]

    def test_keep_start_and_keep_end(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        whole = tokens(tokenizer, tmp_path, self.ROWS, "text").dataset[0]["input_ids"]
        start = tokens(tokenizer, tmp_path, self.ROWS, "text", length=6)
        end = tokens(tokenizer, tmp_path, self.ROWS, "text", length=6, truncation_mode="keep_end")
        assert start.dataset[0]["input_ids"] == whole[:6]
        assert end.dataset[0]["input_ids"] == whole[-6:]
        assert start.remarks and end.remarks

    def test_rows_with_nothing_left_to_learn_are_left_out_and_reported(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        rows = [{"prompt": "one two three four five six seven", "completion": "x"}, {"prompt": "", "completion": "y"}]
        tokenized = tokens(tokenizer, tmp_path, rows, "prompt_completion", length=4, loss_on="completion")
        assert (tokenized.rows, tokenized.dataset[0]["rows"]) == (1, [1])
        assert any("left out" in remark["reason"] for remark in tokenized.remarks)

    def test_nothing_left_at_all_is_bad_data(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        rows = [{"prompt": "one two three four five six seven", "completion": "x"}]
        with pytest.raises(TrainingFailure, match="nothing to train on"):
            tokens(tokenizer, tmp_path, rows, "prompt_completion", length=4, loss_on="completion")

    def test_a_single_token_teaches_nothing(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailure, match="nothing to train on"):
            tokens(tokenizer, tmp_path, [{"text": ""}], "text")


class TestPacking:
    @pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
    def test_packed_sequences_hold_every_token_and_know_their_rows(
        self, strategy: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        ensure_template(tokenizer)
        rows = [json.loads(line) for line in make_chat_dataset(tmp_path / "c.jsonl", 30).read_text().splitlines()]
        loose = tokens(tokenizer, tmp_path, rows, "chat", loss_on="assistant").dataset
        tokenized = tokens(
            tokenizer, tmp_path, rows, "chat", length=128, loss_on="assistant", packing=True,
            extra={"packing_strategy": strategy},
        )  # fmt: skip
        packed = tokenized.dataset
        assert len(packed) < len(loose)
        assert all(len(row["input_ids"]) <= 128 for row in packed)
        for column in ("input_ids", "labels"):
            assert Counter(x for row in packed for x in row[column]) == Counter(x for row in loose for x in row[column])
        assert {number for row in packed for number in row["rows"]} == set(range(30))
        if strategy == "bfd":
            for row in packed:
                parts = [loose[number]["input_ids"] for number in row["rows"]]
                assert row["input_ids"] == [token for part in parts for token in part]
                assert row["seq_lengths"] == [len(part) for part in parts]

    def test_packed_rows_with_nothing_to_learn_are_bad_data_too(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        long = {"prompt": "one two three four five six seven", "completion": "x"}
        short = {"prompt": "a", "completion": " y"}
        cut = {"length": 4, "loss_on": "completion", "packing": True}
        with pytest.raises(TrainingFailure, match="nothing to train on") as refused:
            tokens(tokenizer, tmp_path, [long, long], "prompt_completion", **cut)
        assert refused.value.code == "bad_data"
        tokenized = tokens(tokenizer, tmp_path, [long, short], "prompt_completion", **cut)
        assert tokenized.rows == 1 and any("left out" in remark["reason"] for remark in tokenized.remarks)

    def test_a_stream_without_a_token_to_learn_is_bad_data(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        # Cut in pieces of two tokens, its one answer is the first token of a piece, which nothing predicts.
        tokenizer.add_tokens(["<long>"])
        wrapped = {"length": 2, "loss_on": "completion", "packing": True, "extra": {"packing_strategy": "wrapped"}}
        rows = [{"prompt": "<long><long>", "completion": "<|end|>"}]
        with pytest.raises(TrainingFailure, match="nothing to train on"):
            tokens(tokenizer, tmp_path, rows, "prompt_completion", **wrapped)
        rows = [{"prompt": "<long>", "completion": "<|end|>"}]
        assert len(tokens(tokenizer, tmp_path, rows, "prompt_completion", **wrapped).dataset) == 1

    def test_keep_end_holds_for_packed_rows_too(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        rows = [{"text": "one two three four five six seven eight"}]
        whole = tokens(tokenizer, tmp_path, rows, "text").dataset[0]["input_ids"]
        tokenized = tokens(tokenizer, tmp_path, rows, "text", length=6, packing=True, truncation_mode="keep_end")
        assert tokenized.dataset[0]["input_ids"] == whole[-6:]


class TestHeldOut:
    def test_a_split_is_disjoint_whole_and_the_same_for_the_same_seed(self) -> None:
        train, held = dataset.split_rows(100, 0.1, seed=3)
        assert len(held) == 10
        assert sorted(train + held) == list(range(100))
        assert dataset.split_rows(100, 0.1, seed=3) == (train, held)
        assert dataset.split_rows(100, 0.1, seed=4) != (train, held)

    def test_each_side_gets_at_least_one_row(self) -> None:
        assert [len(part) for part in dataset.split_rows(2, 0.999, seed=0)] == [1, 1]
        assert [len(part) for part in dataset.split_rows(50, 0.001, seed=0)] == [49, 1]
        with pytest.raises(TrainingFailure):
            dataset.split_rows(1, 0.5, seed=0)

    def test_chosen_rows_keep_their_numbers(self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "rows.jsonl", [{"text": f"row {n}"} for n in range(6)])
        tokenized = dataset.tokenize_file(
            str(path), "text", tokenizer, TrainingConfig(base_model="tiny"), max_length=50, chosen=[1, 4],
            progress=lambda done, total: None,
        )  # fmt: skip
        assert [row["rows"] for row in tokenized.dataset] == [[1], [4]]


class TestRows:
    def test_columns_that_the_format_does_not_name_are_skipped(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        ensure_template(tokenizer)
        formats: dict[str, dict[str, Any]] = {
            "chat": {"messages": CHAT},
            "text": {"text": "one"},
            "prompt_completion": {"prompt": "a", "completion": "b"},
        }
        for data_format, row in formats.items():
            more = {**row, "id": 7, "source": {"url": "x"}, "input_ids": [1], "labels": None, "rows": "none"}
            plain, extended = (
                tokens(tokenizer, tmp_path, [row, one], data_format).dataset.to_list() for one in (row, more)
            )
            assert plain == extended

    def test_the_first_twenty_rows_that_cannot_be_used_are_named_in_their_order(
        self, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        rows: list[Any] = [{"text": "good"} if row % 3 else {"text": row} for row in range(300)]
        rows[9], rows[21] = "no object", {"txt": "none"}
        with pytest.raises(TrainingFailure) as refused:
            tokens(tokenizer, tmp_path, rows, "text")
        named = [int(line) for line in re.findall(r"line (\d+):", refused.value.message)]
        assert named == list(range(1, 60, 3)) and refused.value.message.endswith("(and 80 more)")
        for reported in (
            "line 10: not an object",
            "line 22: field 'text' is missing",
            "line 4: its text is not a string",
        ):
            assert reported in refused.value.message

    @pytest.mark.parametrize("loss_on", ["all", "assistant"])
    def test_a_chat_that_cannot_be_tokenised_is_found_among_those_that_are_encoded_with_it(
        self, loss_on: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        ensure_template(tokenizer)
        no_text = [CHAT[0], {"role": "assistant", "content": ["a", "b"]}]
        rows = [{"messages": CHAT}] * 5 + [{"messages": no_text}] + [{"messages": CHAT}] * 5 + [{"messages": []}]
        with pytest.raises(TrainingFailure) as refused:
            tokens(tokenizer, tmp_path, rows, "chat", loss_on=loss_on)
        assert re.findall(r"line (\d+):", refused.value.message) == ["6", "12"]

    @pytest.mark.parametrize("template", [None, CHATML])
    @pytest.mark.parametrize("loss_on", ["all", "completion", "assistant"])
    def test_rows_encoded_together_come_out_as_each_alone(
        self, loss_on: str, template: str | None, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
    ) -> None:
        tokenizer.chat_template = template
        ensure_template(tokenizer)
        rows = [json.loads(line) for line in make_chat_dataset(tmp_path / "c.jsonl", 70).read_text().splitlines()]
        rows[3]["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        together = tokens(tokenizer, tmp_path, rows, "chat", loss_on=loss_on).dataset
        for row, encoded in zip(rows, together, strict=True):
            (alone,) = tokens(tokenizer, tmp_path, [row], "chat", loss_on=loss_on).dataset
            assert (alone["input_ids"], alone["labels"]) == (encoded["input_ids"], encoded["labels"])
