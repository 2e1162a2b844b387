"""Find what is wrong with patterns and schemas of rewards, in a process whose argument is a number of seconds.

Standard input is one line of JSON: a list of texts (patterns) and objects (schemas). The process prints the list of
reasons, null where there is none. The first one that exceeds SECONDS of processor time in total ends the check.
"""

import json
import os
import signal
import sys
from typing import Any, NoReturn

from anneal.contracts.reward_texts.patterns import pattern_error, schema_error
from app.infra.process.sandbox import run_confined


class _OutOfTime(BaseException):
    """The processor time is used up; not an `Exception`, so that no library handles it."""


def _raise_timeout(*_: Any) -> NoReturn:
    raise _OutOfTime


def _check_items(seconds: float) -> None:
    checked = json.loads(sys.stdin.buffer.readline())
    reasons: list[str | None] = [None] * len(checked)
    at = 0
    signal.signal(signal.SIGPROF, _raise_timeout)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        for at, item in enumerate(checked):
            reasons[at] = pattern_error(item) if isinstance(item, str) else schema_error(item)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTime:
        reasons[at] = f"takes more than {seconds:g} seconds to compile, with those before it; simplify it"
    sys.stdout.write(json.dumps(reasons))


if __name__ == "__main__":
    os.nice(5)  # requests of other clients come first
    sys.exit(run_confined(lambda: _check_items(float(sys.argv[1]))))
