"""Check of the patterns and schemas of rewards, in a process of limited memory and time."""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import rewards_of
from anneal.contracts.rewards import Reward, Rewards
from anneal.contracts.training_config.rules import field_error
from app.api.errors import ApiError
from app.config import Settings
from app.infra.process.sandbox import ChildFailed, SandboxProcess

_PROGRAM = "app.runs.creating.validation.reward_process"
_PROCESSOR_SECONDS = 5.0
"""For all patterns and schemas of a request; the longest valid schemas take half of that."""
_PROCESS_SECONDS = 30.0
_QUEUE_SECONDS = 60.0
# A pool of its own: requests without such rewards never wait for it, and as many processes run at a time.
_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="rewards")
_REWARDS: TypeAdapter[Any] = TypeAdapter(Rewards)
_COMPILED = {"pattern": "bad_pattern", "extract": "bad_pattern", "schema": "bad_schema"}
"""Fields of a reward that are compiled, with the code of their errors."""


def valid_rewards(config: Mapping[str, Any]) -> list[Reward]:
    """Return the rewards of a configuration, without those that have errors."""
    valid: list[Reward] = []
    for _, reward in rewards_of(config):
        with suppress(ValidationError):
            valid += _REWARDS.validate_python([dict(reward)])
    return valid


def reward_errors(rewards: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return code and message of each error of rewards, apart from their patterns and schemas."""
    try:
        _REWARDS.validate_python(rewards)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        return [(problem["type"], problem["msg"]) for problem in problems]
    return []


async def reward_problems(settings: Settings, config: Mapping[str, Any]) -> list[FieldError]:
    """Return errors of the patterns and schemas in a configuration whose lengths are within bounds.

    May take seconds: call it while the session has no connection. Raises a 503 `ApiError` if too many others wait.
    """
    places = _compiled_fields(config)
    if not places:
        return []
    try:
        async with asyncio.timeout(_QUEUE_SECONDS):
            call = asyncio.get_running_loop().run_in_executor(_POOL, _check_in_sandbox, settings, list(places.values()))
            reasons = await call
    except TimeoutError:
        detail = "This server is already checking too many patterns and schemas; send the request again a little later."
        raise ApiError(503, "too_many_checks", detail, headers={"Retry-After": "30"}) from None
    except ChildFailed as error:
        name = next(iter(places)).partition(".")[0] + ".rewards"
        message = f"has patterns and schemas that cannot be checked ({error}); simplify them"
        return [field_error(name, "bad_pattern", message)]
    return [
        field_error(name, _COMPILED[name.rpartition(".")[2]], reason)
        for name, reason in zip(places, reasons, strict=True)
        if reason is not None
    ]


def _compiled_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return patterns and schemas by field, without those of rewards that have other errors."""
    rewards = list(rewards_of(config))
    bad: set[tuple[int | str, ...]] = set()
    try:
        _REWARDS.validate_python([dict(reward) for _, reward in rewards])
    except ValidationError as error:
        bad = {one["loc"][:1] for one in error.errors(include_url=False, include_context=False, include_input=False)}
    if () in bad:  # all of them together are too long or too many
        return {}
    return {
        f"{place}.{name}": reward[name]
        for at, (place, reward) in enumerate(rewards)
        if (at,) not in bad
        for name in _COMPILED
        if reward.get(name) is not None
    }


def _check_in_sandbox(settings: Settings, compiled: list[Any]) -> list[str | None]:
    process = SandboxProcess(
        _PROGRAM, [str(_PROCESSOR_SECONDS)], settings, silent=_PROCESS_SECONDS, most_seconds=_PROCESS_SECONDS
    )
    try:
        process.send(json.dumps(compiled).encode() + b"\n")
        reasons: list[str | None] = json.loads(b"".join(iter(process.read, b"")))
        return reasons
    finally:
        process.close()
