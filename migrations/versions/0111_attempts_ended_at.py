"""Index of attempts by their end: usage of a month reads only those of that month."""

from migrations import online

revision = "0111"
down_revision = "0110"


def upgrade() -> None:
    online.create_index("ix_run_attempts_ended_at", "run_attempts", ["ended_at"])
