"""Command `anneal runs compare`."""

from typing import Any

from app.cli.console import AsJson, connected, document, note, table, value_text
from app.cli.names import RunIds
from app.cli.runs.state_text import status_text


def compare(
    run_ids: RunIds,
    as_json: AsJson = False,
) -> None:
    """Compare the configuration and the metrics of runs.

    Example: `anneal runs compare run_01k3x9m6q2v8s4t0w7y5z1a3b6 run_01k3x9m6q2v8s4t0w7y5z1a3c7`
    """
    with connected() as client:
        found = client.runs.compare(run_ids)
        if as_json:
            document(found)
            return
        ids = [run.run_id for run in found.runs]
        facts: dict[str, list[Any]] = {
            "name": [run.name for run in found.runs],
            "method": [run.method for run in found.runs],
            "status": [status_text(run.status) for run in found.runs],
            "step": [f"{run.current_step}/{run.total_steps or '?'}" for run in found.runs],
            "seconds": [run.seconds for run in found.runs],
            "best loss": [run.best_loss for run in found.runs],
        }
        for name in dict.fromkeys(name for run in found.runs for name in run.metrics):
            facts[name] = [reached.last if (reached := run.metrics.get(name)) else None for run in found.runs]
        for name, values in found.differences.items():
            facts[name] = [values[id] for id in ids]
        table(["", *ids], [[name, *map(value_text, values)] for name, values in facts.items()])
        if found.caution is not None:
            note(found.caution)
