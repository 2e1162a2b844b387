"""`client.actions`: requests to a run while it trains."""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from anneal.client.api_resource import ApiResource, without_none
from anneal.client.sync_async import M, call, stream
from anneal.contracts.schemas.actions import ActionRead

Name = Literal["checkpoint", "evaluate", "sample", "set_learning_rate", "extend"]


class Actions(ApiResource[M]):
    """Actions, which a run performs between two optimizer steps."""

    @call
    async def create(
        self,
        run_id: str,
        action: Name | Mapping[str, Any],
        *,
        pin: bool | None = None,
        prompts: Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        learning_rate: float | None = None,
        max_steps: int | None = None,
        epochs: float | None = None,
        idempotency_key: str | None = None,
    ) -> ActionRead:
        """Request an action of a run: its name and parameters, or both in one mapping, as in the HTTP API.

        Actions and their parameters: `checkpoint` (pin), `evaluate`, `sample` (prompts, max_new_tokens, temperature),
        `set_learning_rate` (learning_rate) and `extend` (max_steps or epochs). The run performs the action at the end
        of a step; the result is in an `action` event and in `get`.
        """
        body = without_none(
            pin=pin, prompts=prompts, max_new_tokens=max_new_tokens, temperature=temperature,
            learning_rate=learning_rate, max_steps=max_steps, epochs=epochs,
        )  # fmt: skip
        key = idempotency_key or str(uuid.uuid4())
        named = {"action": action} if isinstance(action, str) else action
        return await self._session.post(ActionRead, f"/runs/{run_id}/actions", {**named, **body}, key=key)

    @stream
    async def list(
        self, run_id: str, *, limit: int | None = None, after: str | None = None
    ) -> AsyncGenerator[ActionRead]:
        """Iterate over the actions of a run, newest first."""
        async with aclosing(self._iterate_items(f"/runs/{run_id}/actions", ActionRead, {}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get(self, run_id: str, action_id: str) -> ActionRead:
        """Return an action with its result."""
        return await self._session.get(ActionRead, f"/runs/{run_id}/actions/{action_id}")
