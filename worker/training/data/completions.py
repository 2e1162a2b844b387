"""Prompts with completions as tokens: both texts, or both chats."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from worker.training.data.chat_rendering import ChatRenderer
from worker.training.data.remarks import Remark
from worker.training.data.tokenization import BadRow, Encoded, TextTokenizer, mask_prefix, with_eos


class CompletionEncoder:
    """Encoder of the format `prompt_completion`; with `loss_on` = `completion` only the completion is learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        self.masks = loss_on == "completion"
        self._texts = Texts(tokenizer)
        self._eos = str(tokenizer.eos_token)

    def prepare(self, row: dict[str, Any], number: int) -> tuple[bool, list[str]]:
        """Return True for a chat, and the texts: the prompt, and the prompt with the completion."""
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list):
            return True, self._texts.render_texts(number, row, prompt, completion)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise BadRow("prompt and completion must be two strings, or two lists of messages")
        return False, [prompt, prompt + with_eos(completion, self._eos)]

    def encode(self, prepared: Sequence[tuple[bool, list[str]]]) -> list[Encoded]:
        """Tokenize each row, prompt and completion as one text."""
        encoded: dict[int, Encoded] = {}
        for are_chats in (False, True):
            at = [number for number, (is_chat, _) in enumerate(prepared) if is_chat == are_chats]
            if not at:
                continue
            wholes = self._texts.token_ids([prepared[number][1][1] for number in at], are_chats)
            if self.masks:
                prompts = self._texts.token_ids([prepared[number][1][0] for number in at], are_chats)
                rows = [Encoded(ids, mask_prefix(prompt, ids)) for prompt, ids in zip(prompts, wholes, strict=True)]
            else:
                rows = [Encoded(ids, None) for ids in wholes]
            encoded.update(zip(at, rows, strict=True))
        return [encoded[number] for number in range(len(prepared))]

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""
        return self._texts.chats.remarks(total)


class Texts:
    """Converter of prompts with answers to texts, and of those to token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.chats = ChatRenderer(tokenizer)
        self._plain = TextTokenizer(tokenizer)
        # A chat template adds the special tokens itself.
        self._chat = TextTokenizer(tokenizer, add_special_tokens=False)

    def render_texts(self, number: int, row: dict[str, Any], prompt: Any, *answers: Any) -> list[str]:
        """Render a prompt of messages alone, and followed by each answer, as in TRL; a prompt may be empty.

        Raises:
            BadRow: the template rejects it, or it has the wrong type.
        """
        if not all(isinstance(answer, list) for answer in answers):
            raise BadRow("the prompt is a list of messages, and its answer is not")
        wholes = self.chats.fit_chats(number, row, *(prompt + answer for answer in answers))
        before = ""
        if prompt:
            messages, options = wholes[0].messages[: len(prompt)], wholes[0].options
            before = self.chats.render(messages, options, add_generation_prompt=True)
        return [before, *(self.chats.render(whole.messages, whole.options) for whole in wholes)]

    def token_ids(self, texts: list[str], are_chats: bool) -> list[Any]:
        """Return the token ids of each text."""
        return self._chat(texts) if are_chats else self._plain(texts)
