"""Methods of `client.experiments`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from app.client.api_resource import ApiResource, without_none
from app.client.sync_async import M, call, stream
from app.contracts.schemas.experiments import ExperimentSummary, ExperimentView


class Experiments(ApiResource[M]):
    """Experiments: named groups of runs."""

    @call
    async def create(
        self, name: str, *, description: str | None = None, tags: Sequence[str] | None = None
    ) -> ExperimentView:
        """Create an experiment."""
        body = without_none(name=name, description=description, tags=tags)
        return await self._session.post(ExperimentView, "/experiments", body)

    @stream
    async def list(
        self, *, find: str | None = None, limit: int | None = None, after: str | None = None
    ) -> AsyncGenerator[ExperimentSummary]:
        """Iterate over experiments, newest first; pages are fetched on demand.

        `find` selects experiments whose id starts with this text, or whose name is it.
        """
        async with aclosing(self._items("/experiments", ExperimentSummary, {"find": find}, limit, after)) as items:
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
    ) -> ExperimentView:
        """Change the name, description or tags of an experiment."""
        body = without_none(name=name, description=description, tags=tags)
        return await self._patch(ExperimentView, f"/experiments/{experiment_id}", body)

    @call
    async def delete(self, experiment_id: str, *, cascade: bool = False) -> None:
        """Delete an experiment; `cascade` also deletes its runs, with their checkpoints and models.

        Raises `AnnealError` `experiment_not_empty` if it has runs and `cascade` is false.
        """
        params = {"cascade": "true"} if cascade else {}
        await self._session.request("DELETE", f"/experiments/{experiment_id}", params=params)
