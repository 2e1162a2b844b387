"""Choices of questions, from their prompt to their last token."""

from dataclasses import dataclass, field
from pathlib import Path

from anneal.contracts.attempt.answers import AnswerPiece, FinishReason, Question
from worker.training.serving.sampling import Sampler
from worker.training.serving.text_stream import TextStream


@dataclass(eq=False)
class OpenQuestion:
    """Question some of whose choices have not ended."""

    question: Question
    adapter_folder: Path | None
    number: int
    """Position in the order in which questions have arrived."""
    end_tokens: frozenset[int] = frozenset()
    sequences: list["Sequence"] = field(default_factory=list)
    """Choices that have not ended."""
    is_started: bool = False
    """True once a piece has been returned."""


class Sequence:
    """One choice of a question: the tokens of its prompt, and those that the model has added."""

    def __init__(self, owner: OpenQuestion, choice: int, prompt: list[int], most_tokens: int, text: TextStream) -> None:
        question = owner.question
        self.owner, self.choice, self.adapter = owner, choice, question.adapter
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.sampler = Sampler.of_choice(question, choice)
        self._most_tokens = most_tokens
        self._text = text
        self._unsent_tokens = 0

    @property
    def age(self) -> tuple[int, int]:
        """Order of arrival; that of a younger sequence is greater."""
        return self.owner.number, self.choice

    @property
    def remaining(self) -> int:
        """Maximum number of tokens that may be added."""
        return self.prompt_length + self._most_tokens - len(self.tokens)

    def extend(self, token: int) -> AnswerPiece | None:
        """Add the next token, and return what can be sent now; the last piece has a `finish_reason`."""
        self.tokens.append(token)
        self._unsent_tokens += 1
        text, reason = self._text.add(token), self._finish_reason(token)
        if reason is not None:
            text += self._text.finish()
            reason = "stop" if self._text.is_stopped else reason
            reason = "tool_calls" if reason == "stop" and self._text.tool_calls else reason
        if not text and reason is None:
            return None
        owner = self.owner
        piece = AnswerPiece(
            question_id=owner.question.id,
            choice=self.choice,
            text=text,
            tokens=self._unsent_tokens,
            prompt_tokens=None if owner.is_started else self.prompt_length,
            finish_reason=reason,
            tool_calls=[] if reason is None else self._text.tool_calls,
        )
        owner.is_started = True
        self._unsent_tokens = 0
        return piece

    def _finish_reason(self, token: int) -> FinishReason | None:
        if token in self.owner.end_tokens or self._text.is_stopped:
            return "stop"
        return "length" if self.remaining == 0 else None
