"""Chats as tokens: the template that renders them, and which tokens the model is to learn."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from worker.training.failures import TrainingFailure

DEFAULT_TEMPLATE = (
    "{{% for message in messages %}}"
    "{{{{ '<|' + message['role'] + '|>\\n' }}}}"
    "{{% if message['role'] == 'assistant' %}}"
    "{{% generation %}}{{{{ message['content'] + '{eos}' }}}}{{% endgeneration %}}"
    "{{% else %}}{{{{ message['content'] }}}}{{% endif %}}"
    "{{{{ '\\n' }}}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|assistant|>\\n' }}}}{{% endif %}}"
)


class BadRow(Exception):
    """A row that cannot be used, and why."""


def ensure_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give a tokenizer without chat template a plain one; returns whether it needed it."""
    if tokenizer.chat_template:
        return False
    eos = str(tokenizer.eos_token).replace("\\", "\\\\").replace("'", "\\'")
    template = DEFAULT_TEMPLATE.format(eos=eos)
    if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]:
        template = "{{ bos_token }}" + template
    tokenizer.chat_template = template
    return True


class ChatEncoder:
    """Turns chats into token ids and labels (-100: not learned).

    `loss_on`: `all`, `completion` (the last answer) or `assistant` (every answer). Answers are found by the
    template's own `{% generation %}` marks, or else by rendering the chat up to each answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._marked = "generation %}" in str(tokenizer.chat_template).replace("-%}", "%}")
        if loss_on == "assistant" and not self._marked and not tokenizer.is_fast:
            raise TrainingFailure(
                "config_error",
                "`loss_on` = `assistant` needs a fast tokenizer, or a chat template with {% generation %} marks.",
            )

    def encode(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Ids and labels of one chat.

        Raises:
            BadRow: the template refuses the chat, or it holds no answer to learn.
        """
        messages = row["messages"]
        if self._loss_on == "assistant" and self._marked:
            return self._by_marks(messages, row.get("tools"))
        if self._loss_on == "assistant":
            return self._by_rendering(messages, row.get("tools"))
        ids = self._tokenise(messages, row.get("tools"))
        if self._loss_on == "all":
            return ids, list(ids)
        if messages[-1]["role"] != "assistant":
            raise BadRow("the last message is not the assistant's, so there is no completion to learn")
        prompt = self._tokenise(messages[:-1], row.get("tools"), add_generation_prompt=True)
        return ids, mask_prefix(prompt, ids)

    def _tokenise(self, messages: Sequence[Any], tools: Any, **more: Any) -> list[int]:
        text = self._render(messages, tools, **more)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, messages: Sequence[Any], tools: Any, **more: Any) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **more))
        except Exception as error:  # a template raises whatever it likes
            raise BadRow(f"the chat template refuses it: {str(error)[:200]}") from error

    def _by_marks(self, messages: Sequence[Any], tools: Any) -> tuple[list[int], list[int]]:
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:
            raise BadRow(f"the chat template refuses it: {str(error)[:200]}") from error
        ids, mask = list(encoded["input_ids"]), encoded["assistant_masks"]
        if 1 not in mask:
            raise BadRow("it has no answer of the assistant to learn")
        return ids, [token if learned else -100 for token, learned in zip(ids, mask, strict=True)]

    def _by_rendering(self, messages: Sequence[Any], tools: Any) -> tuple[list[int], list[int]]:
        whole = self._render(messages, tools)
        spans = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:place], tools, add_generation_prompt=True)
            after = self._render(messages[: place + 1], tools)
            if not (whole.startswith(after) and after.startswith(before)):
                raise TrainingFailure(
                    "config_error",
                    "The chat template renders a turn differently once others follow, so `loss_on` = `assistant` "
                    "cannot tell the answers apart. Use `completion`, or a template with {% generation %} marks.",
                )
            spans.append((len(before), len(after)))
        if not spans:
            raise BadRow("it has no answer of the assistant to learn")
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = list(encoded["input_ids"])
        labels = [
            token if any(start <= first < end for start, end in spans) else -100
            for token, (first, _) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
        return ids, labels


def mask_prefix(prompt: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Labels of `ids` without the part that it shares with `prompt`.

    Tokens may merge across the border, so what counts is where the two part, not the prompt's length.
    """
    shared = 0
    for ours, theirs in zip(prompt, ids, strict=False):
        if ours != theirs:
            break
        shared += 1
    return [-100] * shared + list(ids[shared:])
