"""Questions as token ids: chats as the chat template of their model renders them, and prompts as they are."""

from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from anneal.contracts.attempt.answers import AnswerErrorCode, Question
from worker.training.data.chat_template import OutOfTime, ensure_template, limited_time
from worker.training.data.completions import Texts
from worker.training.data.tokenization import BadRow, tokenizer_digest
from worker.training.failures import TrainingFailure, one_line
from worker.training.loop.sampling import end_tokens
from worker.training.model.base_model import complete_tokenizer, load_failure
from worker.training.prediction.generation import stop_tokens
from worker.training.serving.text_stream import TextStream
from worker.training.serving.tool_calls import ToolCallStream, response_template

_MOST_FOLDERS = 64
_MOST_SECONDS = 2.0
"""Processor time in which a chat template renders a question, since no other one is answered meanwhile."""
_MOST_CHARACTERS = 8_000_000
"""Length of a rendered chat, which is longer than the context of any model."""


class AnswerFailure(Exception):
    """A question that cannot be answered, with a stable code and a sentence that says what to do next."""

    def __init__(self, code: AnswerErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: AnswerErrorCode = code
        self.message = message


class QuestionEncoder:
    """Encoder of questions to a model, or to an adapter with a tokenizer of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: list[int], token_count: int) -> None:
        """Prepare an encoder for a model with `token_count` embeddings, whose answers end at the tokens `ends`."""
        self._tokenizer = tokenizer
        self._texts = Texts(tokenizer)
        self._ends, self._token_count = ends, token_count

    def end_tokens(self, question: Question) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return frozenset([*self._ends, *stop_tokens(self._tokenizer, question.stop)])

    def encode(self, question: Question) -> list[int]:
        """Return the token ids of the prompt.

        Raises:
            AnswerFailure: the question has no valid prompt for this model.
        """
        try:
            ids = self._token_ids(question)
        except AnswerFailure:
            raise
        except BadRow as error:
            raise AnswerFailure("invalid_prompt", f"The messages cannot be used: {error}. Change them.") from error
        except TrainingFailure as error:
            raise AnswerFailure("unusable_model", error.message) from error
        except Exception as error:  # a message can lack anything
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise AnswerFailure("invalid_prompt", f"The prompt cannot be read ({reason}): check its form.") from error
        if not ids:
            raise AnswerFailure("invalid_prompt", "The prompt has no tokens: it must have at least one.")
        if min(ids) < 0 or max(ids) >= self._token_count:
            raise AnswerFailure(
                "invalid_prompt",
                f"The prompt has token ids from {min(ids)} to {max(ids)}, and the model has those from 0 to "
                f"{self._token_count - 1}: send the ids of its own tokenizer.",
            )
        return ids

    @cached_property
    def _response_template(self) -> dict[str, Any] | None:
        return response_template(self._tokenizer)

    def new_text(self, question: Question, prompt: list[int]) -> TextStream:
        """Return a converter of the tokens of one answer to text."""
        if question.tools and self._response_template is not None:
            return ToolCallStream(self._tokenizer, question, prompt, self._response_template)
        return TextStream(self._tokenizer, question.stop)

    def _token_ids(self, question: Question) -> list[int]:
        if isinstance(question.prompt, list):
            return question.prompt
        is_chat = question.prompt is None
        text = self._render(question) if is_chat else str(question.prompt)
        (ids,) = self._texts.token_ids([text], is_chat)
        return [int(token) for token in ids]

    def _render(self, question: Question) -> str:
        """Render a chat; its template is part of the output of a run, and may be as slow as its user has written it."""
        try:
            with limited_time(_MOST_SECONDS):
                text = self._render_chat(question)
        except OutOfTime:
            raise AnswerFailure(
                "invalid_prompt",
                f"The chat template of this model takes more than {_MOST_SECONDS:g} s for these messages: send fewer "
                "or shorter ones, or ask a model with a simpler template.",
            ) from None
        if len(text) > _MOST_CHARACTERS:
            raise AnswerFailure(
                "context_length_exceeded",
                f"The chat template of this model makes {len(text):,} characters of these messages, and at most "
                f"{_MOST_CHARACTERS:,} are read: send fewer or shorter ones.",
            )
        return text

    def _render_chat(self, question: Question) -> str:
        chats, opens = self._texts.chats, {"add_generation_prompt": True}
        (chat,) = chats.fit_chats(0, {"tools": question.tools}, question.messages, **opens)
        text = chats.render(chat.messages, chat.options, **opens)
        if question.tools and text == chats.render(chat.messages, {**chat.options, "tools": None}, **opens):
            raise AnswerFailure(
                "tools_not_supported",
                "The chat template of this model leaves out `tools`, so the model would not see them: leave them out, "
                "or ask a model whose template has them.",
            )
        return text


class QuestionEncoders:
    """Encoders of a model and of its adapters, which may have tokenizers of their own, such as other chat templates."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool) -> None:
        self._model, self._trust_remote_code = model, trust_remote_code
        self._token_count: int = model.get_input_embeddings().weight.shape[0]
        self._by_folder: dict[Path, QuestionEncoder] = {}
        """In the order of their last use."""
        # The outputs of most runs have the tokenizer of the base, which may take a hundred megabytes.
        self._by_digest: WeakValueDictionary[str, QuestionEncoder] = WeakValueDictionary()
        self._own = self._encoder_of(tokenizer)

    def of_adapter(self, folder: Path | None) -> QuestionEncoder:
        """Return the encoder of the adapter in a folder; None is the model itself.

        Raises:
            AnswerFailure: the tokenizer in the folder cannot be loaded.
        """
        if folder is None or not (folder / "tokenizer_config.json").is_file():
            return self._own
        encoder = self._by_folder.pop(folder, None) or self._load(folder)
        self._by_folder[folder] = encoder
        if len(self._by_folder) > _MOST_FOLDERS:
            del self._by_folder[next(iter(self._by_folder))]
        return encoder

    def _load(self, folder: Path) -> QuestionEncoder:
        try:
            tokenizer = complete_tokenizer(
                AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=self._trust_remote_code)
            )
        except TrainingFailure as error:
            raise AnswerFailure("unusable_model", error.message) from error
        except Exception as error:
            raise AnswerFailure("unusable_model", load_failure(error, str(folder), "tokenizer").message) from error
        return self._encoder_of(tokenizer)

    def _encoder_of(self, tokenizer: PreTrainedTokenizerBase) -> QuestionEncoder:
        """Return an encoder with this tokenizer, or an existing one whose tokenizer is the same."""
        ensure_template(tokenizer)
        digest = tokenizer_digest(tokenizer, is_dated=False)
        encoder = self._by_digest.get(digest)
        if encoder is None:
            encoder = QuestionEncoder(tokenizer, end_tokens(self._model, tokenizer), self._token_count)
            self._by_digest[digest] = encoder
        return encoder
