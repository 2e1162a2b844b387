"""Check that the operator allows the hosts that rewards call, and that their keys are stored."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import service_urls
from anneal.contracts.rewards import RewardHost, find_host
from anneal.contracts.training_config.rules import field_error
from app.api.errors import to_printable
from app.config import Settings
from app.tables.administration.secrets import Secret


async def reward_host_problems(
    session: AsyncSession, settings: Settings, config: Mapping[str, Any]
) -> list[FieldError]:
    """Return errors for rewards of a configuration whose hosts this server does not allow, or has no key for.

    A worker checks its own settings before a run, and the training process at each call.
    """
    urls = dict(service_urls(config))
    if not urls:
        return []
    allowed = settings.allowed_reward_hosts
    secrets = {host.secret for host in allowed if host.secret is not None}
    stored = set((await session.scalars(select(Secret.name).where(Secret.name.in_(secrets)))).all())
    problems = (_find_problem(field, url, allowed, stored) for field, url in urls.items())
    return [problem for problem in problems if problem is not None]


def _find_problem(field: str, url: str, hosts: list[RewardHost], stored: set[str]) -> FieldError | None:
    address, allowed = find_host(hosts, url)
    host = to_printable(address, 100)
    if allowed is None:
        message = (
            f"calls {host}, which the operator does not allow; ask for {host} in ANNEAL_REWARD_HOSTS, or in "
            "ANNEAL_REWARD_PRIVATE_HOSTS if it is inside the network"
        )
        return field_error(field, "host_not_allowed", message)
    if not (allowed.is_private or url.startswith("https://")):
        return field_error(field, "not_https", f"is not encrypted, and {host} is a public host; use https://")
    if allowed.secret is not None and allowed.secret not in stored:
        message = (
            f"calls {host}, whose key is not set; ask an admin to set it with `anneal secrets set {allowed.secret}`"
        )
        return field_error(field, "reward_key_missing", message)
    return None
