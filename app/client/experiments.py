"""`client.experiments`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from app.client.modes import M, call, stream
from app.client.resource import ApiResource, given
from app.experiments.schemas import ExperimentSummary, ExperimentView


class Experiments(ApiResource[M]):
    """Named groups of runs."""

    @call
    async def create(
        self, name: str, *, description: str | None = None, tags: Sequence[str] | None = None
    ) -> ExperimentView:
        """Make a group to compare runs in."""
        body = given(name=name, description=description, tags=tags)
        return await self._session.post(ExperimentView, "/experiments", body)

    @stream
    async def list(self, *, limit: int | None = None, after: str | None = None) -> AsyncGenerator[ExperimentSummary]:
        """Experiments, newest first; page after page is fetched as you go on."""
        async with aclosing(self._items("/experiments", ExperimentSummary, {}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get(self, experiment_id: str) -> ExperimentView:
        """How the runs of an experiment stand, and which is best."""
        return await self._session.get(ExperimentView, f"/experiments/{experiment_id}")

    @call
    async def update(
        self,
        experiment_id: str,
        *,
        name: str | None = None,
        description: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> ExperimentView:
        """Give an experiment another name, description or other tags."""
        body = given(name=name, description=description, tags=tags)
        return await self._patch(ExperimentView, f"/experiments/{experiment_id}", body)

    @call
    async def delete(self, experiment_id: str) -> None:
        """Delete an experiment of which no run is live."""
        await self._session.request("DELETE", f"/experiments/{experiment_id}")
