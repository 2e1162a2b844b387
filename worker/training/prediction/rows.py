"""Rows of a dataset as prompts: what the model receives, and the reference that its answer is compared with."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from anneal.contracts.reward_texts.templates import row_item
from worker.training.data.completions import Texts
from worker.training.data.remarks import Remark
from worker.training.data.tokenization import BadRow, Ints

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """Prompt of one row."""

    row: int
    """Number of the row, from 0."""
    content: str | Messages
    """Text or messages, as they are in the dataset."""
    reference: str | None
    """None: the row has no answer to compare with."""
    ids: Ints | None
    """Tokens; None: the model cannot answer."""
    received: str | Messages = ""
    """Messages for the model: `content`, with the system message of the options if it has none."""
    problem: str | None = None
    """Reason why the model cannot answer."""
    item: str = "{}"
    """Columns of the row that templates of rewards refer to, as JSON."""


class PromptEncoder:
    """Encoder of rows of the formats `chat`, `prompt_completion` and `prompt`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None,
        most_tokens: int,
        columns: Sequence[str] = (),
    ) -> None:
        """Prepare an encoder; a prompt of more than `most_tokens` has no answer. `columns` become its `item`."""
        self._texts = Texts(tokenizer)
        self._system_prompt = system_prompt
        self._most_tokens = most_tokens
        self._columns = columns

    def prepare(self, row: dict[str, Any], number: int) -> tuple[Prompt, bool, str]:
        """Return the prompt without its tokens, True for a chat, and the text that the model receives."""
        try:
            content, reference = split_row(row)
            messages = self._with_system_prompt(content)
        except BadRow as error:
            return Prompt(number, "", None, None, problem=str(error)), False, ""
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            problem = f"the row has no prompt that can be read ({type(error).__name__}: {error})"
            return Prompt(number, "", None, None, problem=problem), False, ""
        item = row_item(row, self._columns)
        if item.get("answer", "") is None:  # another format has it elsewhere
            item["answer"] = reference
        prompt = Prompt(number, content, reference, None, messages, item=json.dumps(item))
        if isinstance(messages, str):
            return prompt, False, messages
        opens = {"add_generation_prompt": True}
        try:
            if not messages:
                raise BadRow("there is no message before its answer")
            (chat,) = self._texts.chats.fit_chats(number, row, messages, **opens)
            text = self._texts.chats.render(chat.messages, chat.options, **opens)
        except BadRow as error:
            return replace(prompt, problem=str(error)), True, ""
        return prompt, True, text

    def _with_system_prompt(self, content: str | Messages) -> str | Messages:
        if self._system_prompt is None:
            return content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if messages and messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self._system_prompt}, *messages]
        return messages

    def encode(self, prepared: Sequence[tuple[Prompt, bool, str]]) -> list[Prompt]:
        """Return each prompt with its tokens, or with the reason why it has none."""
        prompts = []
        for prompt, is_chat, text in prepared:
            if prompt.problem is None:
                (ids,) = self._texts.token_ids([text], is_chat)
                if len(ids) == 0:
                    prompt = replace(prompt, problem="the prompt has no tokens")
                elif len(ids) > self._most_tokens:
                    why = f"the prompt has {len(ids):,} tokens, and may have {self._most_tokens:,}"
                    prompt = replace(prompt, problem=why)
                else:
                    prompt = replace(prompt, ids=ids)
            prompts.append(prompt)
        return prompts

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""
        return self._texts.chats.remarks(total)


def split_row(row: dict[str, Any]) -> tuple[str | Messages, str | None]:
    """Return the prompt of a row and its reference; the answer at the end of a chat is the reference.

    Raises:
        BadRow: The reference is neither a text nor a number.
    """
    if "messages" in row:
        return _split_chat(row["messages"])
    prompt, answer = row["prompt"], row.get("completion", row.get("answer"))
    if isinstance(prompt, list) and isinstance(answer, list):
        return _split_chat([*prompt, *answer])
    return prompt, _reference_text(answer)


def _split_chat(messages: Messages) -> tuple[Messages, str | None]:
    if messages[-1]["role"] != "assistant":
        return messages, None
    content = messages[-1].get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    return messages[:-1], _reference_text(content)


def _reference_text(answer: Any) -> str | None:
    """Return a reference as a text; uploads store numbers like that too."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return json.dumps(answer)
    if answer is not None and not isinstance(answer, str):
        raise BadRow(f"its reference is a {type(answer).__name__}, and must be a text")
    return answer
