"""Ids of things that there are, so that what is generated meets them; they come from answers, and go with deletions."""

import json
import random
import re
from collections import OrderedDict
from typing import Any

_ID = re.compile(r"\b(?:exp|ds|run|ckpt|key|act)_[0-9a-hjkmnp-tv-z]{26}\b")
_KIND = {"experiment": "exp", "dataset": "ds", "eval_dataset": "ds", "run": "run", "parent_run": "run",
         "checkpoint": "ckpt", "key": "key", "action": "act"}  # fmt: skip
_MOST = 200


class Pool:
    """What answers have named, by kind, newest last; `protected` never goes."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._ids: dict[str, OrderedDict[str, None]] = {}
        self.protected: set[str] = set()
        self.of_run: dict[str, str] = {}
        """The run of a checkpoint or action: both are in the path."""

    def learn(self, text: str) -> None:
        """Take the ids out of an answer."""
        for id in _ID.findall(text):
            self.add(id)

    def add(self, id: str) -> None:
        """One more thing that there is."""
        known = self._ids.setdefault(id.partition("_")[0], OrderedDict())
        known[id] = None
        if len(known) > _MOST:
            for old in known:
                if old not in self.protected:
                    del known[old]
                    break

    def forget(self, id: str) -> None:
        """It was deleted."""
        self._ids.get(id.partition("_")[0], OrderedDict()).pop(id, None)

    def pick(self, name: str) -> str | None:
        """An id that fits a parameter or field called `name`, such as `run_id`; None when there is none."""
        kind = _KIND.get(name.removesuffix("_id"))
        known = list(self._ids.get(kind or "", ()))
        return self._chance.choice(known) if known else None

    def fill(self, value: Any) -> Any:
        """The same value with every id of the examples replaced by one of a thing that there is."""
        text = json.dumps(value)

        def another(found: re.Match[str]) -> str:
            known = list(self._ids.get(found[0].partition("_")[0], ()))
            return self._chance.choice(known) if known else found[0]

        return json.loads(_ID.sub(another, text))
