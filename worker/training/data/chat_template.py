"""Chats as tokens: the chat template that renders them, and the tokens that the model learns."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from anneal.contracts.training_config.fields import LossOn
from worker.training.data.chat_rendering import Chat, ChatRenderer, own_template, rejected_chat
from worker.training.data.remarks import Remark
from worker.training.data.tokenization import IGNORED, BadRow, Encoded, TextTokenizer, mask_prefix
from worker.training.failures import TrainingFailure

DEFAULT_TEMPLATE = (
    "{{% if tools %}}{{{{ '<|tools|>\\n' }}}}{{{{ tools | tojson }}}}{{{{ '\\n' }}}}{{% endif %}}"
    "{{% for message in messages %}}"
    "{{{{ '<|' + message['role'] + '|>\\n' }}}}"
    "{{% if message['role'] == 'assistant' %}}"
    "{{% set calls = message['tool_calls'] | tojson if message['tool_calls'] else '' %}}"
    "{{% generation %}}{{{{ (message['content'] or '') + calls + '{eos}' }}}}{{% endgeneration %}}"
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
"""Processor time in which a configured template renders a short chat."""
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
        with limited_time(_MOST_SECONDS):
            text = tokenizer.apply_chat_template(_SHORT_CHAT, tokenize=False)
    except TemplateSyntaxError as error:
        raise _bad_template(f"is not valid Jinja: {str(error.message)[:200]} (line {error.lineno})") from error
    except SecurityError as error:
        raise _bad_template(f"uses what a template may not: {str(error)[:200]}") from error
    except OutOfTime:
        raise _bad_template(f"takes more than {_MOST_SECONDS:g} s for a short chat; simplify it") from None
    except (MemoryError, RecursionError, OverflowError) as error:
        raise _bad_template(f"cannot be rendered: {type(error).__name__}; simplify it") from error
    except Exception:
        return  # it raises for this chat; rows that it rejects are reported with their numbers
    if len(text) > _MOST_CHARACTERS:
        raise _bad_template(f"makes {len(text):,} characters of a short chat; simplify it")


class OutOfTime(BaseException):
    """The processor time is used up; not an `Exception`, so that no library handles it."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` if the block takes more processor time; call it in the main thread, and do not nest it."""

    def raise_out_of_time(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, raise_out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds)
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
    if has_generation_markers(own_template(tokenizer)):
        return None
    try:
        template: str | None = get_training_chat_template(tokenizer)
    except Exception:  # it does not know the template, or the template rejects the chats that it is tested with
        return None
    return template


def trains_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return False if the marks of the template leave the token that ends an answer out of the loss."""
    template = training_template(tokenizer)
    if template is None and not has_generation_markers(own_template(tokenizer)):
        return True  # answers are located by rendering, with all that follows them
    return bool(is_chat_template_stop_token_trained(tokenizer, template))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the tokenizer's chat template ends an answer; None if there is none."""
    if not tokenizer.chat_template:
        return None
    try:
        text = str(tokenizer.apply_chat_template(_SHORT_CHAT, tokenize=False))
    except Exception:  # it requires other messages
        return None
    _, answer, after = text.rpartition(_SHORT_CHAT[-1]["content"])
    if not answer or not after:
        return None
    first = tokenizer(after, add_special_tokens=False)["input_ids"][0]
    added = tokenizer.added_tokens_decoder.get(first)
    return int(first) if added is not None and added.special else None


@dataclass(frozen=True)
class _Text:
    """A rendered chat, and the prompt before its last answer if only that answer is learned."""

    text: str
    prompt: str | None = None


@dataclass(frozen=True)
class _Spans:
    """A rendered chat with the character spans of some messages, which alone are learned, or alone are not."""

    text: str
    spans: list[tuple[int, int]]
    are_learned: bool


@dataclass(frozen=True)
class _Marked:
    """A chat whose template marks the answers, and the numbers of messages that are not learned."""

    chat: Chat
    unlearned: frozenset[int]


class ChatEncoder:
    """Encoder of chats to token ids and labels.

    `loss_on`: `all`, `completion` (the last answer) or `assistant` (every answer). A message of the weight 0 is never
    learned, as at OpenAI. Answers are located by `{% generation %}` marks, those of the tokenizer's template or of
    TRL's training template of the family, or else by rendering the chat up to each answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, has_weights: bool = False) -> None:
        """Prepare an encoder; `has_weights`: messages may have a `weight`."""
        self.masks = loss_on != "all" or has_weights
        self.training_template = training_template(tokenizer) if loss_on == "assistant" else None
        """Template that renders the chats instead of the tokenizer's own, which the output keeps."""
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._ids = TextTokenizer(tokenizer, add_special_tokens=False)
        self._lock = threading.Lock()
        self._chats = ChatRenderer(tokenizer, self.training_template)

    def prepare(self, row: dict[str, Any], number: int) -> _Text | _Spans | _Marked:
        """Render a chat, with what is learned of it.

        A chat whose template marks the answers is returned unrendered: `encode` renders it with its marks.
        """
        (chat,) = self._chats.fit_chats(number, row, row["messages"])
        messages, options = chat.messages, chat.options
        unlearned = frozenset(at for at, message in enumerate(messages) if message.get("weight") == 0)
        if self._loss_on == "assistant":
            if self._chats.is_marked(chat):
                return _Marked(chat, unlearned)
            answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
            if not answers:
                raise BadRow("it has no assistant message to learn")
            return self._with_spans(chat, [at for at in answers if at not in unlearned], are_learned=True)
        if self._loss_on == "all":
            if unlearned:
                return self._with_spans(chat, sorted(unlearned), are_learned=False)
            return _Text(self._chats.render(messages, options))
        if messages[-1]["role"] != "assistant":
            raise BadRow("the last message is not from the assistant, so there is no completion to learn")
        text = self._chats.render(messages, options)
        if len(messages) - 1 in unlearned:
            return _Spans(text, [], are_learned=True)
        return _Text(text, self._chats.render(messages[:-1], options, add_generation_prompt=True))

    def encode(self, prepared: Sequence[_Text | _Spans | _Marked]) -> list[Encoded]:
        """Tokenize the chats; raise `BadRow` for a chat without an answer to learn."""
        encoded: dict[int, Encoded] = {}
        encoders: tuple[tuple[type, Callable[[Any], list[Encoded]]], ...] = (
            (_Text, self._by_texts), (_Spans, self._by_spans), (_Marked, self._by_marks),
        )  # fmt: skip
        for kind, encode in encoders:
            at = [number for number, item in enumerate(prepared) if isinstance(item, kind)]
            if at:
                encoded.update(zip(at, encode([prepared[number] for number in at]), strict=True))
        return [encoded[number] for number in range(len(prepared))]

    def remarks(self, total: int) -> list[Remark]:
        """Return remarks about the rows that were prepared, of `total`."""
        return self._chats.remarks(total)

    def _by_texts(self, chats: Sequence[_Text]) -> list[Encoded]:
        wholes = self._ids([chat.text for chat in chats])
        if self._loss_on == "all":
            return [Encoded(ids, ids if self.masks else None) for ids in wholes]
        prompts = self._ids([str(chat.prompt) for chat in chats])
        return [Encoded(ids, mask_prefix(prompt, ids)) for prompt, ids in zip(prompts, wholes, strict=True)]

    def _with_spans(self, chat: Chat, places: Sequence[int], *, are_learned: bool) -> _Spans:
        """Return the chat as text, and the start and end character of the messages at `places`."""
        if not self._tokenizer.is_fast:
            raise TrainingFailure(
                "config_error",
                f"`loss_on` = `{self._loss_on}` needs a fast tokenizer to locate messages, or a chat template with "
                "{% generation %} marks.",
            )
        messages, options = chat.messages, chat.options
        whole = self._chats.render(messages, options)
        spans = []
        for place in places:
            opens = messages[place]["role"] == "assistant"
            before = self._chats.render(messages[:place], options, add_generation_prompt=opens) if place else ""
            after = self._chats.render(messages[: place + 1], options)
            if not (whole.startswith(after) and after.startswith(before)):
                raise TrainingFailure(
                    "config_error",
                    "The chat template renders a turn differently if other turns follow, so `loss_on` = "
                    f"`{self._loss_on}` cannot locate the messages. Use `completion`, or `assistant` with a template "
                    "that has {% generation %} marks.",
                )
            spans.append((len(before), len(after)))
        return _Spans(whole, spans, are_learned)

    def _by_spans(self, chats: Sequence[_Spans]) -> list[Encoded]:
        with self._lock:
            batch = self._tokenizer(
                [chat.text for chat in chats], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        encoded = []
        for ids, offsets, chat in zip(batch["input_ids"], batch["offset_mapping"], chats, strict=True):
            firsts = np.array(offsets, np.int64).reshape(-1, 2)[:, 0]
            inside = np.zeros(len(ids), bool)
            for start, end in chat.spans:
                inside |= (start <= firsts) & (firsts < end)
            encoded.append(_masked_encoding(ids, inside if chat.are_learned else ~inside))
        return encoded

    def _by_marks(self, chats: Sequence[_Marked]) -> list[Encoded]:
        if len(chats) > 1 and any(item.unlearned or item.chat.options != {"tools": None} for item in chats):
            return [self._by_marks([item])[0] for item in chats]  # one call takes one set of options
        try:
            with self._lock:
                batch = self._tokenizer.apply_chat_template(
                    [item.chat.messages for item in chats],
                    chat_template=self.training_template,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    **chats[0].chat.options,
                )
        except Exception as error:
            raise rejected_chat(error) from error
        encoded = []
        for row, (ids, mask, item) in enumerate(zip(batch["input_ids"], batch["assistant_masks"], chats, strict=True)):
            if 1 not in mask:
                raise BadRow("it has no assistant message to learn")
            learned = np.array(mask, bool)
            for start, end in self._unlearned_marks(item):
                last = batch.char_to_token(row, end - 1)
                learned[batch.char_to_token(row, start) : None if last is None else last + 1] = False
            encoded.append(_masked_encoding(ids, learned))
        return encoded

    def _unlearned_marks(self, item: _Marked) -> list[tuple[int, int]]:
        """Return the marked parts of the text that belong to messages which are not learned."""
        messages, options = item.chat.messages, item.chat.options
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if item.unlearned.isdisjoint(answers):
            return []
        blocks = self._chats.generation_spans(messages, options)
        if len(blocks) == len(answers):
            counts = list(range(1, len(answers) + 1))
        else:  # a message may have several marks: as many as there are more after it than before
            counts = [len(self._chats.generation_spans(messages[: at + 1], options)) for at in answers]
        if counts != sorted(counts) or counts[-1] != len(blocks):
            raise TrainingFailure(
                "config_error",
                "The chat template does not mark each answer with {% generation %}, so the answers whose `weight` is 0 "
                "cannot be located. Use another `chat_template`, or remove the weights.",
            )
        ends = dict(zip(answers, zip([0, *counts], counts, strict=False), strict=True))
        return [block for at in item.unlearned & ends.keys() for block in blocks[slice(*ends[at])]]


def _masked_encoding(ids: Sequence[int], learned: npt.NDArray[np.bool_]) -> Encoded:
    values = np.array(ids, np.int32)
    return Encoded(values, np.where(learned, values, np.int32(IGNORED)))
