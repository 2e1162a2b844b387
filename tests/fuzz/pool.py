"""Pool of ids of existing objects for generated cases, filled from responses."""

import json
import random
import re
from collections import OrderedDict
from typing import Any

_ID = re.compile(r"\b(?:(?:exp|ds|run|ckpt|key|act|whk|whd)_|(?:file|ftjob)-)[0-9a-hjkmnp-tv-z]{26}\b")
_KIND = {"experiment": "exp", "dataset": "ds", "eval_dataset": "ds", "run": "run", "parent_run": "run",
         "checkpoint": "ckpt", "key": "key", "action": "act",
         "webhook": "whk", "delivery": "whd", "file": "file", "job": "ftjob", "model": "run"}  # fmt: skip
_MOST = 200
_CHARACTERS = 27
"""Length of an id without its prefix, with the sign between them."""


class Pool:
    """Ids from responses by kind, newest last; ids in `protected` are never evicted."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._ids: dict[str, OrderedDict[str, None]] = {}
        self.protected: set[str] = set()
        self.of_run: dict[str, str] = {}
        """Run id of a checkpoint or action, because paths need both."""

    def learn(self, text: str) -> None:
        """Add the ids in a response."""
        for id in _ID.findall(text):
            self.add(id)

    def add(self, id: str) -> None:
        """Add an id; evict the oldest if there are too many."""
        known = self._ids.setdefault(id[:-_CHARACTERS], OrderedDict())
        known[id] = None
        if len(known) > _MOST:
            for old in known:
                if old not in self.protected:
                    del known[old]
                    break

    def forget(self, id: str) -> None:
        """Remove the id of a deleted object."""
        self._ids.get(id[:-_CHARACTERS], OrderedDict()).pop(id, None)

    def pick(self, name: str) -> str | None:
        """Return an id for the parameter or field `name`, such as `run_id`, or None."""
        kind = _KIND.get(name.removesuffix("_id"))
        known = list(self._ids.get(kind or "", ()))
        return self._chance.choice(known) if known else None

    def fill(self, value: Any) -> Any:
        """Return the value with every example id replaced by an id of an existing object."""
        text = json.dumps(value)

        def another(match: re.Match[str]) -> str:
            known = list(self._ids.get(match[0][:-_CHARACTERS], ()))
            return self._chance.choice(known) if known else match[0]

        return json.loads(_ID.sub(another, text))
