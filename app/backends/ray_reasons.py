"""Reasons why a run of backend `ray` waits, in sentences with what to do."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from anneal.contracts.schemas.runs.placement import PendingReason
from app.backends.ray_api import Node, RayError


def kind_of(run: Any) -> str:
    """Return the kind of device that a run needs: GPUs, unless it asks for CPUs."""
    return run.requirements.get("kind") or "cuda"


def labels_of(run: Any) -> list[str]:
    """Return the labels that the node of a run must have."""
    return run.requirements.get("labels") or []


def not_configured() -> PendingReason:
    """Return the reason if the cluster's URL was removed from the settings."""
    message = "The API has no ANNEAL_RAY_URL any more. An operator sets it and restarts the API, or stop the run."
    return PendingReason(code="ray_not_configured", message=message)


def queued_reason(most_waiting: int, most_alike: int, turn_seconds: float) -> PendingReason:
    """Return the reason if other runs have all places for jobs."""
    message = (
        f"Other runs wait for Ray to place them: at most {most_waiting}, and {most_alike} of an owner that need the "
        "same devices, have a job at a time, those of higher priority first. The job of this run is submitted when one "
        f"of them starts, ends, or has waited for {turn_seconds / 60:.0f} minutes."
    )
    return PendingReason(code="ray_queued", message=message)


def unreachable_reason(error: RayError) -> PendingReason:
    """Return the reason if the cluster does not respond as Ray does; the URL is only for the operator."""
    message = (
        f"The Ray cluster of ANNEAL_RAY_URL does not respond ({error}). The run waits, and its job is submitted "
        "once it does; an operator checks the cluster and the setting, and finds the URL in the log of the API."
    )
    return PendingReason(code="ray_unreachable", message=message)


def placing_reason(job: Any, job_id: str, nodes: Sequence[Node] | None) -> PendingReason:
    """Return the reason if Ray has the job; `nodes` are those of the cluster, None if they are not known."""
    suffices = [
        node for node in nodes or () if _device_count(node, job) >= job.devices_needed and _has_labels(node, job)
    ]
    if nodes is not None and not suffices:
        return _no_node(job, job_id, nodes)
    message = (
        f"Ray job {job_id} waits for a node with {_count_text(job, job.devices_needed, ' free')}{_and_labels(job)}"
    )
    message += ", or its worker is starting. `ray status` shows what the cluster has."
    if kind_of(job) == "cuda":
        message += " In a cluster without GPUs, create the run with resources.kind `cpu`."
    return PendingReason(code="ray_placing", message=message)


def failed_reason(job_id: str, why: str, again_at: datetime, losses: tuple[int, int] | None) -> PendingReason:
    """Return the reason if the job ended without a worker; `losses` are the restarts that count, and their limit."""
    count = "" if losses is None else f" ({losses[0]} of {losses[1]} restarts)"
    message = (
        f"Ray job {job_id} ended before a worker claimed the run: {why}. It is tried again at {again_at:%H:%M:%S} UTC"
        f"{count}. If that does not help, an operator reads `ray job logs {job_id}` and corrects the settings "
        "of that Ray node."
    )
    return PendingReason(code="ray_job_failed", message=message)


def _no_node(job: Any, job_id: str, nodes: Sequence[Node]) -> PendingReason:
    most = max((_device_count(node, job) for node in nodes if _has_labels(node, job)), default=None)
    if most is None:
        lack, change = f"No node of the Ray cluster has {_label_list(job)}", "other `resources.labels`"
    else:
        lack = f"No node of the Ray cluster has {_count_text(job, job.devices_needed)}{_and_labels(job)}: "
        lack += f"the most is {most:g}" if most else "there are none"
        change = "fewer `resources.devices`" if most else "another `resources.kind`"
    message = (
        f"{lack}. Ray job {job_id} waits until such a node joins, for example from an autoscaler. Otherwise, "
        f"stop the run and create it with {change}."
    )
    return PendingReason(code="ray_no_node", message=message)


def _device_count(node: Node, job: Any) -> float:
    return node.resources.get("CPU" if kind_of(job) == "cpu" else "GPU", 0.0)


def _has_labels(node: Node, job: Any) -> bool:
    return all(node.labels.get(key) == value for key, _, value in (label.partition("=") for label in labels_of(job)))


def _count_text(job: Any, count: int, what: str = "") -> str:
    return f"{count}{what} {'CPU' if kind_of(job) == 'cpu' else 'GPU'}{'' if count == 1 else 's'}"


def _label_list(job: Any) -> str:
    listed = ", ".join(f"`{label}`" for label in labels_of(job))
    return f"the label{'' if len(labels_of(job)) == 1 else 's'} {listed}"


def _and_labels(job: Any) -> str:
    return f" and {_label_list(job)}" if labels_of(job) else ""
