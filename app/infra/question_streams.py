"""Names of the streams in Redis through which questions reach serving runs, and answers come back.

Each serving run has a stream of questions, and each API process one of answers. Workers never create a stream of
answers: where it is missing, the API process that has asked is gone.
"""

ALIVE_SECONDS = 10
"""Seconds after its last sign of life at which the supervisor of a serving run counts as lost."""
REPLY_SECONDS = 15
"""Seconds after which the stream of an API process that does not renew it is removed."""
QUESTION_SECONDS = 86_400
"""Seconds after its last question at which the stream of a run is removed."""

QUESTION, CANCEL = "question", "cancel"
"""Fields of the entries of a run's stream: a question as JSON with its `REPLY` stream, or the id of a cancelled one."""
REPLY = "reply"
TAKEN, ATTEMPT, PIECES = "taken", "attempt", "pieces"
"""Fields of the entries of a stream of answers: a question that an attempt has taken, or a list of pieces as JSON."""


def questions_stream(run_id: str) -> str:
    """Return the stream of the questions to a serving run."""
    return f"anneal:questions:{run_id}"


def answers_stream(process_id: str) -> str:
    """Return the stream of the answers to the questions of an API process."""
    return f"anneal:answers:{process_id}"


def alive_key(run_id: str) -> str:
    """Return the key that exists while the supervisor of a serving run passes questions on."""
    return f"anneal:serving:{run_id}"
