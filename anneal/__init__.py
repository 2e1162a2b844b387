"""The Python client of Anneal.

    from anneal import Anneal

    with Anneal() as client:  # the local service; or Anneal("http://host:8700", "anneal_…")
        dataset = client.datasets.upload("chats.jsonl")
        run = client.runs.create({"dataset_id": dataset.id, "config": {"base_model": "Qwen/Qwen3-0.6B"}})
        for event in client.runs.events(run.id):
            if event.type == "metric":
                print(event.step, event.loss)

`Anneal` is for scripts and notebooks, `AsyncAnneal` for programs with an event loop; both have the same calls.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anneal.client.client import Anneal, AsyncAnneal
    from anneal.client.errors import AnnealError

__all__ = ["Anneal", "AnnealError", "AsyncAnneal"]


def __getattr__(name: str) -> Any:
    """Import the client when it is used: the service imports the contracts without it."""
    if name == "AnnealError":
        from anneal.client import errors

        return errors.AnnealError
    if name in __all__:
        from anneal.client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
