"""Messages of the supervisor as a training process takes them, while further ones arrive."""

from collections import deque

from anneal.contracts.attempt.messages import ControlMessage, QuestionPart
from worker.wire.control import Control


def test_question_that_is_cancelled_while_questions_are_taken_comes_before_its_cancellation() -> None:
    control = Control()
    messages = [ControlMessage(question=QuestionPart("why?", is_last=True)), ControlMessage(cancelled_question="q")]

    class Racing(deque[str]):
        """Questions of which the first arrives, and is cancelled, just after it was looked how many there are."""

        def __len__(self) -> int:
            count = super().__len__()
            while messages:
                control._handle_message(messages.pop(0))
            return count

    control._questions = Racing()
    assert [control.take_questions(0) for _ in range(2)] == [([], []), (["why?"], ["q"])]
