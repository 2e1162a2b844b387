"""Metric series as data frames of pandas."""

from collections.abc import Mapping
from typing import Any

from anneal.contracts.schemas.runs.curves import RunMetrics


def metrics_frame(metrics: RunMetrics | Mapping[str, RunMetrics]) -> Any:
    """Return a row for each step and a column for each series; of several runs, the index begins with the key.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("`client.runs.data_frame` needs pandas; install it with `pip install pandas`.") from error
    if isinstance(metrics, RunMetrics):
        columns = {
            name: pandas.Series(series.values, index=series.steps, dtype="float64")
            for name, series in metrics.series.items()
        }
        return pandas.DataFrame(columns).rename_axis("step").sort_index()
    frames = {run_id: metrics_frame(of_run) for run_id, of_run in metrics.items()}
    return pandas.concat(frames, names=["run_id", "step"])
