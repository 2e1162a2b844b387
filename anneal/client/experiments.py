"""Methods of `client.experiments`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from anneal.client.api_resource import UNSET, ApiResource, Unset, without_none, without_unset
from anneal.client.sync_async import M, call, stream
from anneal.contracts.schemas.experiments import ExperimentSummary, ExperimentView


class Experiments(ApiResource[M]):
    """Experiments: named groups of runs."""

    @call
    async def create(
        self,
        name: str,
        *,
        description: str | None = None,
        tags: Sequence[str] | None = None,
        max_devices: int | None = None,
    ) -> ExperimentView:
        """Create an experiment; `max_devices` is the number of devices that its runs may use at a time."""
        body = without_none(name=name, description=description, tags=tags, max_devices=max_devices)
        return await self._session.post(ExperimentView, "/experiments", body)

    @stream
    async def list(
        self, *, find: str | None = None, limit: int | None = None, after: str | None = None
    ) -> AsyncGenerator[ExperimentSummary]:
        """Iterate over experiments, newest first; pages are fetched on demand.

        `find` selects experiments whose id starts with this text, or whose name is it.
        """
        async with aclosing(
            self._iterate_items("/experiments", ExperimentSummary, {"find": find}, limit, after)
        ) as items:
            async for item in items:
                yield item

    @call
    async def get(self, experiment_id: str) -> ExperimentView:
        """Return an experiment with the number of its runs per status and its best run."""
        return await self._session.get(ExperimentView, f"/experiments/{experiment_id}")

    @call
    async def update(
        self,
        experiment_id: str,
        *,
        name: str | None = None,
        description: str | None = None,
        tags: Sequence[str] | None = None,
        max_devices: int | Unset | None = UNSET,
    ) -> ExperimentView:
        """Change the name, description, tags or quota of devices of an experiment.

        `max_devices` is the number of devices that its runs may use at a time; None removes the quota.
        """
        body = without_none(name=name, description=description, tags=tags) | without_unset(max_devices=max_devices)
        return await self._send_patch(ExperimentView, f"/experiments/{experiment_id}", body)

    @call
    async def delete(self, experiment_id: str, *, cascade: bool = False) -> None:
        """Delete an experiment; `cascade` also deletes its runs, with their checkpoints and models.

        Raises `AnnealError` `experiment_not_empty` if it has runs and `cascade` is false.
        """
        params = {"cascade": "true"} if cascade else {}
        await self._session.request("DELETE", f"/experiments/{experiment_id}", params=params)
