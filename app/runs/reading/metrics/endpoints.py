"""`GET /v1/runs/{id}/metrics`: training curves."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from sqlalchemy import select

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.common import OTHER_RUN_ID, RUN_ID
from anneal.contracts.schemas.runs.curves import RunCurve, RunCurves, RunMetrics
from app.api.dependencies import Snapshot
from app.api.errors import invalid
from app.runs.reading.metrics import clock as times
from app.runs.reading.metrics import curves
from app.runs.reading.metrics.dependencies import curve_read_slot
from app.tables.runs import Run

router = APIRouter(prefix="/runs", tags=["runs"])

_MOST_RUNS = 20


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
    clock: Annotated[bool, Query(description="Also return the times of some steps.")] = False,
) -> RunMetrics:
    """Get the curves of a run; thinned curves keep every extreme."""
    # The name of a metric in an evaluation is accepted for its series.
    parts = [name.strip() for name in names.split(",") if name.strip()] if names else []
    full_names = {name: f"eval.{name}" if name.startswith("eval_") else name for name in parts}
    selected = list(dict.fromkeys(full_names.values())) if names else None
    series = await curves.read_curves(session, run_id, selected, from_step, to_step, max_points)
    return RunMetrics(
        run_id=run_id,
        last_seq=await session.scalar(select(Run.event_seq).where(Run.id == run_id)) or 0,
        series={name: series[full] for name, full in full_names.items()} if full_names else series,
        clock=await times.read_clock(session, run_id) if clock else None,
    )


@router.get(
    "/curves",
    dependencies=[Depends(curve_read_slot, scope="function")],
    responses={404: {"description": "One of the runs does not exist."}},
)
async def get_curves(
    session: Snapshot,
    ids: Annotated[
        str,
        Query(
            max_length=2000, description="IDs of 1 to 20 runs, comma-separated.", examples=[f"{RUN_ID},{OTHER_RUN_ID}"]
        ),
    ],
    name: Annotated[
        str, Query(min_length=1, max_length=200, description="Series, as `names` of GET /v1/runs/{run_id}/metrics.")
    ] = "loss",
    max_points: Annotated[int, Query(ge=4, le=5000, description="Maximum number of points per run.")] = 500,
) -> RunCurves:
    """Get one curve of several runs; thinned curves keep every extreme."""
    run_ids = list(dict.fromkeys(part.strip() for part in ids.split(",") if part.strip()))
    if not 1 <= len(run_ids) <= _MOST_RUNS:
        message = f"name 1 to {_MOST_RUNS} different runs, separated by commas"
        raise invalid([FieldError(field="ids", code="wrong_number", message=message)])
    full = f"eval.{name}" if name.startswith("eval_") else name
    data = []
    for run_id in run_ids:
        series = await curves.read_curves(session, run_id, list(dict.fromkeys([full, "epoch"])), 0, None, max_points)
        data.append(
            RunCurve(
                run_id=run_id, series=series[full], epoch=series["epoch"], clock=await times.read_clock(session, run_id)
            )
        )
    return RunCurves(name=name, data=data)
