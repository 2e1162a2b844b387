"""`GET /v1/runs/{id}/metrics`: training curves."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from app.api.dependencies import Snapshot
from app.contracts.schemas.runs import RunMetrics
from app.runs.metrics import curves
from app.runs.metrics.dependencies import curve_read_slot

router = APIRouter(prefix="/runs", tags=["runs"])


@router.get("/{run_id}/metrics", dependencies=[Depends(curve_read_slot, scope="function")])
async def get_metrics(
    run_id: str,
    session: Snapshot,
    names: Annotated[
        str | None,
        Query(
            max_length=2000,
            description="Series, comma-separated: `loss`, `learning_rate`, … of the metrics, `extra.<name>` of their "
            "`extra`, `eval.<name>` of the evaluations (`eval_loss` is short for `eval.eval_loss`). Default: all "
            "series of the run. A series that it does not have is empty.",
            examples=["loss,extra.tokens_per_second,eval.eval_loss"],
        ),
    ] = None,
    max_points: Annotated[
        int,
        Query(
            ge=4,
            le=100_000,
            description="Maximum number of points per series; fewer if all series have more than 500,000 points.",
        ),
    ] = 1000,
    from_step: Annotated[int, Query(ge=0, le=2**53)] = 0,
    to_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> RunMetrics:
    """Get the curves of a run; thinned curves keep every extreme."""
    # The name of a metric in an evaluation is accepted for its series.
    parts = [name.strip() for name in names.split(",") if name.strip()] if names else []
    asked = {name: f"eval.{name}" if name.startswith("eval_") else name for name in parts}
    wanted = list(dict.fromkeys(asked.values())) if names else None
    found = await curves.curves(session, run_id, wanted, from_step, to_step, max_points)
    return RunMetrics(run_id=run_id, series={name: found[full] for name, full in asked.items()} if asked else found)
