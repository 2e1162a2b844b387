"""Command `anneal runs compare`."""

from typing import Any

from app.cli.console import AsJson, open_client, print_json, print_note, print_table, value_text
from app.cli.names import RunIds
from app.cli.runs.state_text import status_text


def compare(
    run_ids: RunIds,
    as_json: AsJson = False,
) -> None:
    """Compare the configuration and the metrics of runs.

    Example: `anneal runs compare run_01k3x9m6q2v8s4t0w7y5z1a3b6 run_01k3x9m6q2v8s4t0w7y5z1a3c7`
    """
    with open_client() as client:
        comparison = client.runs.compare(run_ids)
        if as_json:
            print_json(comparison)
            return
        ids = [run.run_id for run in comparison.runs]
        facts: dict[str, list[Any]] = {
            "name": [run.name for run in comparison.runs],
            "method": [run.method for run in comparison.runs],
            "status": [status_text(run.status) for run in comparison.runs],
            "step": [f"{run.current_step}/{run.total_steps or '?'}" for run in comparison.runs],
            "seconds": [run.seconds for run in comparison.runs],
            "best loss": [run.best_loss for run in comparison.runs],
        }
        for name in dict.fromkeys(name for run in comparison.runs for name in run.metrics):
            facts[name] = [reached.last if (reached := run.metrics.get(name)) else None for run in comparison.runs]
        for name, values in comparison.differences.items():
            facts[name] = [values[id] for id in ids]
        print_table(["", *ids], [[name, *map(value_text, values)] for name, values in facts.items()])
        if comparison.caution is not None:
            print_note(comparison.caution)
