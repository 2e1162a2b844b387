"""Chats as tokens: the chat template that renders them, and the tokens that the model learns."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_stop_token_trained,
)

from app.contracts.training_config.fields import LossOn
from worker.training.data.tokenization import IGNORED, BadRow, Encoded, TextTokenizer, mask_prefix
from worker.training.failures import TrainingFailure

DEFAULT_TEMPLATE = (
    "{{% if tools %}}{{{{ '<|tools|>\\n' }}}}{{{{ tools | tojson }}}}{{{{ '\\n' }}}}{{% endif %}}"
    "{{% for message in messages %}}"
    "{{{{ '<|' + message['role'] + '|>\\n' }}}}"
    "{{% if message['role'] == 'assistant' %}}"
    "{{% set calls = message['tool_calls'] | tojson if message['tool_calls'] else '' %}}"
    "{{% generation %}}{{{{ message['content'] + calls + '{eos}' }}}}{{% endgeneration %}}"
    "{{% else %}}{{{{ message['content'] }}}}{{% endif %}}"
    "{{{{ '\\n' }}}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|assistant|>\\n' }}}}{{% endif %}}"
)


def ensure_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Set a plain chat template if the tokenizer has none; return True if it was needed."""
    if tokenizer.chat_template:
        return False
    tokenizer.chat_template = default_template(tokenizer)
    return True


def default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a plain chat template with the tokenizer's special tokens."""
    eos = str(tokenizer.eos_token).replace("\\", "\\\\").replace("'", "\\'")
    template = DEFAULT_TEMPLATE.format(eos=eos)
    if tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]:
        template = "{{ bos_token }}" + template
    return template


_MOST_SECONDS = 5.0
_MOST_CHARACTERS = 1_000_000
_SHORT_CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Set the configured chat template, and render a short chat with it in the sandbox of transformers.

    An error that the template raises itself is not one here: it may require other messages.

    Raises:
        TrainingFailure: `config_error`: it is not valid Jinja, or it costs too much time or memory.
    """
    tokenizer.chat_template = template
    try:
        with _limited_time():
            text = tokenizer.apply_chat_template(_SHORT_CHAT, tokenize=False)
    except TemplateSyntaxError as error:
        raise _bad_template(f"is not valid Jinja: {str(error.message)[:200]} (line {error.lineno})") from error
    except SecurityError as error:
        raise _bad_template(f"uses what a template may not: {str(error)[:200]}") from error
    except _OutOfTime:
        raise _bad_template(f"takes more than {_MOST_SECONDS:g} s for a short chat; simplify it") from None
    except (MemoryError, RecursionError, OverflowError) as error:
        raise _bad_template(f"cannot be rendered: {type(error).__name__}; simplify it") from error
    except Exception:
        return  # it raises for this chat; rows that it rejects are reported with their numbers
    if len(text) > _MOST_CHARACTERS:
        raise _bad_template(f"makes {len(text):,} characters of a short chat; simplify it")


class _OutOfTime(BaseException):
    """The processor time is used up; not an `Exception`, so that no library handles it."""


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raise `_OutOfTime` if the block takes too much processor time; call it in the main thread."""

    def end(*_: Any) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, _MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _bad_template(why: str) -> TrainingFailure:
    return TrainingFailure("config_error", f"`chat_template` {why}.")


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return TRL's training template of the tokenizer's family, which has `{% generation %}` marks.

    None: the tokenizer's own template has them, or TRL does not know it.
    """
    if has_generation_markers(tokenizer.chat_template):
        return None
    try:
        template: str | None = get_training_chat_template(tokenizer)
    except Exception:  # it does not know the template, or the template rejects the chats that it is tested with
        return None
    return template


def trains_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return False if the marks of the template leave the token that ends an answer out of the loss."""
    template = training_template(tokenizer)
    if template is None and not has_generation_markers(tokenizer.chat_template):
        return True  # answers are located by rendering, with all that follows them
    return bool(is_chat_template_stop_token_trained(tokenizer, template))


class ChatEncoder:
    """Encoder of chats to token ids and labels.

    `loss_on`: `all`, `completion` (the last answer) or `assistant` (every answer). Answers are located by
    `{% generation %}` marks, those of the tokenizer's template or of TRL's training template of the family, or else by
    rendering the chat up to each answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> None:
        self.masks = loss_on != "all"
        self.training_template = training_template(tokenizer) if loss_on == "assistant" else None
        """Template that renders the chats instead of the tokenizer's own, which the output keeps."""
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._ids = TextTokenizer(tokenizer, add_special_tokens=False)
        self._lock = threading.Lock()
        self._marked = self.training_template is not None or has_generation_markers(tokenizer.chat_template)
        if loss_on == "assistant" and not self._marked and not tokenizer.is_fast:
            raise TrainingFailure(
                "config_error",
                "`loss_on` = `assistant` needs a fast tokenizer, or a chat template with {% generation %} marks.",
            )

    def prepare(self, row: dict[str, Any]) -> Any:
        """Render a chat, with the prompt before its last answer or the character spans of all answers.

        A chat whose template marks the answers is returned unrendered: `encode` renders it with its marks.
        """
        messages, tools = row["messages"], row.get("tools")
        if self._loss_on == "assistant":
            if not self._marked:
                return self._with_spans(messages, tools)
            if not isinstance(messages, list) or not messages:
                raise BadRow("`messages` is not a non-empty list")
            return messages, tools
        text = self._render(messages, tools)
        if self._loss_on == "all":
            return text, None
        if messages[-1]["role"] != "assistant":
            raise BadRow("the last message is not from the assistant, so there is no completion to learn")
        return text, self._render(messages[:-1], tools, add_generation_prompt=True)

    def encode(self, prepared: Sequence[Any]) -> list[Encoded]:
        """Tokenize the chats; raise `BadRow` for a chat without an answer to learn."""
        if self._loss_on == "assistant":
            return self._by_marks(prepared) if self._marked else self._by_spans(prepared)
        wholes = self._ids([text for text, _ in prepared])
        if self._loss_on == "all":
            return [Encoded(ids, None) for ids in wholes]
        prompts = self._ids([prompt for _, prompt in prepared])
        return [Encoded(ids, mask_prefix(prompt, ids)) for prompt, ids in zip(prompts, wholes, strict=True)]

    def _render(self, messages: Sequence[Any], tools: Any, **more: Any) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **more))
        except Exception as error:  # a template can raise anything
            raise BadRow(f"the chat template rejects it: {str(error)[:200]}") from error

    def _with_spans(self, messages: Sequence[Any], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the chat as text, and the start and end character of each answer."""
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
                    "The chat template renders a turn differently if other turns follow, so `loss_on` = `assistant` "
                    "cannot locate the answers. Use `completion`, or a template with {% generation %} marks.",
                )
            spans.append((len(before), len(after)))
        if not spans:
            raise BadRow("it has no assistant message to learn")
        return whole, spans

    def _by_spans(self, chats: Sequence[tuple[str, list[tuple[int, int]]]]) -> list[Encoded]:
        texts = [text for text, _ in chats]
        with self._lock:
            found = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        encoded = []
        for ids, offsets, (_, spans) in zip(found["input_ids"], found["offset_mapping"], chats, strict=True):
            firsts = np.array(offsets, np.int64).reshape(-1, 2)[:, 0]
            learned = np.zeros(len(ids), bool)
            for start, end in spans:
                learned |= (start <= firsts) & (firsts < end)
            encoded.append(_masked(ids, learned))
        return encoded

    def _by_marks(self, chats: Sequence[tuple[list[Any], Any]]) -> list[Encoded]:
        if len(chats) > 1 and any(tools is not None for _, tools in chats):
            return [self._by_marks([chat])[0] for chat in chats]  # one call takes one set of tools
        try:
            with self._lock:
                found = self._tokenizer.apply_chat_template(
                    [messages for messages, _ in chats],
                    tools=chats[0][1],
                    chat_template=self.training_template,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
        except Exception as error:
            raise BadRow(f"the chat template rejects it: {str(error)[:200]}") from error
        encoded = []
        for ids, mask in zip(found["input_ids"], found["assistant_masks"], strict=True):
            if 1 not in mask:
                raise BadRow("it has no assistant message to learn")
            encoded.append(_masked(ids, np.array(mask, bool)))
        return encoded


def _masked(ids: Sequence[int], learned: npt.NDArray[np.bool_]) -> Encoded:
    values = np.array(ids, np.int32)
    return Encoded(values, np.where(learned, values, np.int32(IGNORED)))
