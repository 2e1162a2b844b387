"""Fitting of runs to devices, and the reason why a pending run has none. No database."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from anneal.contracts.schemas.runs.placement import PendingReason, name_words


@dataclass(frozen=True)
class DeviceOffer:
    """Device of a worker, whether a run uses it or not."""

    memory_mb: int
    run_id: str | None = None
    paused: bool = False
    """True if it takes no run for a while, because of an error."""
    name: str = ""
    held_mb: int = 0
    """Memory that its run needs."""
    index: int = 0
    """Its index on the worker, which may leave some out."""


@dataclass(frozen=True)
class WorkerOffer:
    """Online worker with its devices, which are all of one kind."""

    worker_id: str
    backends: frozenset[str]
    kind: str
    device: str
    """Name of its devices."""
    devices: tuple[DeviceOffer, ...]
    labels: frozenset[str] = frozenset()
    host: str = ""
    gguf: bool = False
    """True if it can write GGUF files."""
    gguf_quantizer: bool = False
    """True if these may be quantized."""
    joins_hosts: bool = False
    """True if it trains runs together with workers of other hosts."""
    version: str = ""
    """Version of Anneal."""
    machine: str | None = None
    """Machine whose memory it shares with other workers, if its devices are CPUs."""

    @property
    def model(self) -> str:
        """Model of its devices; all CPUs count as alike."""
        return self.device if self.kind == "cuda" else self.kind

    @property
    def alike(self) -> tuple[str, str]:
        """Model of its devices and version, which all workers of a run share."""
        return self.model, self.version


@dataclass(frozen=True)
class RunningRun:
    """A run that trains."""

    run_id: str
    priority: int
    owner: str
    """Owner of the run (see `app.runs.queue.order`)."""
    devices: int
    seconds: float
    """Seconds since its attempt started."""


@dataclass(frozen=True)
class Pause:
    """Pause of the queue."""

    paused_at: datetime
    paused_by: str
    reason: str | None = None


@dataclass(frozen=True)
class Fleet:
    """Online workers, and the backends that have had a worker with a GPU lately."""

    workers: Sequence[WorkerOffer]
    gpu_backends: frozenset[str] = frozenset()
    """Backends of all workers with a GPU that have sent a heartbeat within an hour."""
    pause: Pause | None = None
    """Pause of the queue, during which no run starts."""


@dataclass(frozen=True)
class Needs:
    """Requirements of a run on the device that trains it."""

    backend: str
    kind: str | None = None
    gpu: str | None = None
    """Words of the name of the GPU that the user asks for."""
    memory_mb: int | None = None
    """Memory that the user asks for; None: `estimated_mb` counts."""
    estimated_mb: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Least memory by kind of device, as far as it can be estimated."""
    labels: frozenset[str] = frozenset()
    devices: int = 1
    hosts: int = 1
    """Workers that train it together, each with the same number of devices."""
    gguf: bool = False
    """True: it writes a GGUF file."""
    gguf_quantizer: bool = False
    """True: that file is quantized."""
    prefers_gpu: bool = False
    """True: a CPU takes it only where the backend has no GPU."""

    @classmethod
    def of(cls, backend: str, devices: int, hosts: int, requirements: Mapping[str, Any]) -> Self:
        """Read `runs.requirements`."""
        return cls(
            backend,
            requirements.get("kind"),
            requirements.get("gpu"),
            requirements.get("memory_mb"),
            requirements.get("estimated_mb") or {},
            frozenset(requirements.get("labels") or ()),
            devices,
            hosts,
            gguf=bool(requirements.get("gguf")),
            gguf_quantizer=bool(requirements.get("gguf_quantizer")),
            prefers_gpu=bool(requirements.get("prefers_gpu")),
        )

    @property
    def devices_each(self) -> int:
        """Devices that it needs of each worker."""
        return self.devices // self.hosts

    def memory_on(self, kind: str) -> int:
        """Return the memory that it needs on a kind of device, in MiB; 0 if that is not known."""
        return self.memory_mb if self.memory_mb is not None else self.estimated_mb.get(kind, 0)

    def has_gpu(self, device: DeviceOffer) -> bool:
        """Return True if a device is the GPU that it asks for, whatever its memory."""
        return self.gpu is None or f" {self.gpu} " in name_words(device.name)

    def fits(self, kind: str, device: DeviceOffer) -> bool:
        """Return True if a device of this kind is large enough for it, and is the GPU that it asks for."""
        return self.memory_on(kind) <= device.memory_mb and self.has_gpu(device)

    def fitting_devices(self, worker: WorkerOffer, gpu_backends: frozenset[str]) -> tuple[int, ...]:
        """Return the devices on which it fits, free or not, smallest first; none if the worker has too few of them."""
        if not self.allows_worker(worker, gpu_backends):
            return ()
        fitting = [index for index, device in enumerate(worker.devices) if self.fits(worker.kind, device)]
        fitting.sort(key=lambda index: worker.devices[index].memory_mb)
        return tuple(fitting) if len(fitting) >= self.devices_each else ()

    def allows_kind(self, kind: str, gpu_backends: frozenset[str]) -> bool:
        """Return True if it may train on this kind of device."""
        if self.kind is not None:
            return self.kind == kind
        return kind == "cuda" or not (self.prefers_gpu and self.backend in gpu_backends)

    def has_programs(self, worker: WorkerOffer) -> bool:
        """Return True if a worker has the programs for its GGUF file, if it writes one."""
        return self.gguf <= worker.gguf and self.gguf_quantizer <= worker.gguf_quantizer

    def allows_worker(self, worker: WorkerOffer, gpu_backends: frozenset[str]) -> bool:
        """Return True if a worker has its backend, kind, labels and programs, whatever the memory of its devices."""
        return (
            self.backend in worker.backends
            and self.allows_kind(worker.kind, gpu_backends)
            and self.labels <= worker.labels
            and self.has_programs(worker)
            and (self.hosts == 1 or worker.joins_hosts)
        )


def pending_reason(needs: Needs, fleet: Fleet) -> PendingReason | None:
    """Return the reason why no online worker can take a run now or later; None if it only waits for its turn."""
    serving = [worker for worker in fleet.workers if needs.backend in worker.backends]
    if not serving:
        message = (
            f"No worker of backend `{needs.backend}` is online. Start one with `anneal worker` on a machine that "
            "shares database, Redis and storage, or restart `anneal up`."
        )
        return PendingReason(code="no_worker", message=message)
    allowed = [worker for worker in serving if needs.allows_kind(worker.kind, fleet.gpu_backends)]
    if not allowed:
        return PendingReason(code="no_device_of_kind", message=_no_kind(needs))
    if needs.gpu is not None:
        named = [replace(one, devices=tuple(filter(needs.has_gpu, one.devices))) for one in allowed]
        if not any(one.devices for one in named):
            return PendingReason(code="no_device_of_kind", message=_no_gpu(needs, allowed))
        allowed = [one for one in named if one.devices]
    labeled = [worker for worker in allowed if needs.labels <= worker.labels]
    if not labeled:
        labels = ", ".join(f"`{label}`" for label in sorted(needs.labels))
        message = (
            f"No online worker that could take the run has the labels {labels}. Start one with them in "
            "ANNEAL_WORKER_LABELS, or create the run with other `resources.labels`."
        )
        return PendingReason(code="no_worker_with_labels", message=message)
    equipped = [worker for worker in labeled if needs.has_programs(worker)]
    if not equipped:
        return PendingReason(code="no_gguf_converter", message=_no_gguf(needs))
    if needs.hosts > 1:
        equipped = [worker for worker in equipped if worker.joins_hosts]
        if len(equipped) < needs.hosts:
            return PendingReason(code="too_few_hosts", message=_too_few(needs, len(equipped)))
    fitting = [
        (worker, [device for device in worker.devices if needs.fits(worker.kind, device)]) for worker in equipped
    ]
    each = needs.devices_each
    large = [worker for worker, devices in fitting if len(devices) >= each]
    if len(large) < needs.hosts:
        return PendingReason(code="no_device_fits", message=_too_small(needs, equipped))
    by_model = Counter(worker.model for worker in large)
    if max(by_model.values()) < needs.hosts:
        return PendingReason(code="too_few_hosts", message=_too_few_alike(needs, by_model))
    alike = Counter(worker.alike for worker in large)
    if max(alike.values()) < needs.hosts:
        return PendingReason(code="too_few_hosts", message=_too_few_of_version(needs, alike))
    usable = Counter(
        worker.alike for worker, devices in fitting if sum(not device.paused for device in devices) >= each
    )
    if max(usable.values(), default=0) < needs.hosts:
        which = "Every device" if needs.hosts == 1 else "On all but too few workers, a device"
        message = (
            f"{which} that the run fits on is paused after an error. `anneal workers list` shows the errors; each "
            "device is tried again after its pause."
        )
        return PendingReason(code="devices_paused", message=message)
    return None


def pause_reason(pause: Pause) -> PendingReason:
    """Return the reason of every pending run while the queue is paused."""
    why = f" ({pause.reason})" if pause.reason else ""
    paused_at = f"{pause.paused_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    message = (
        f"`{pause.paused_by}` has paused the queue at {paused_at}{why}: no run starts, and those that train go on. An "
        "admin resumes it with `anneal queue resume`."
    )
    return PendingReason(code="queue_paused", message=message)


def reason_of_quota(run: Any, by_key: int = 0, by_experiment: int = 0) -> PendingReason | None:
    """Return the reason of a run that waits for a quota; None if it does not.

    `run` has the rooms of `app.runs.queue.order`. Runs before it will take `by_key` devices of that of its key,
    and `by_experiment` of that of its experiment.
    """
    if run.key_spent_budget is not None:
        return budget_reason(run.owner, *run.key_spent_budget)
    if run.key_room is not None and run.devices_needed > run.key_room - by_key:
        return quota_reason(run.devices_needed, None, run.key_devices)
    if run.experiment_room is not None and run.devices_needed > run.experiment_room - by_experiment:
        return quota_reason(run.devices_needed, run.experiment_name, run.experiment_devices)
    return None


def budget_reason(key_id: str, most: float, used: float, renewed_on: str) -> PendingReason:
    """Return the reason of a run whose API key has used up its budget of `most` device-hours a month."""
    # In steps: each change of the number is an event of every run that waits.
    step = most / 10 or 1.0
    message = (
        f"The API key has used at least {used // step * step:,.4g} of its {most:,.4g} device-hours of this month. Its "
        f"runs that train go on, and no other starts before {renewed_on} 00:00 UTC, when the budget is renewed, unless "
        f"an admin raises it with `anneal keys edit {key_id} --max-device-hours`."
    )
    return PendingReason(code="budget", message=message)


def quota_reason(devices: int, experiment: str | None, most: int) -> PendingReason:
    """Return the reason of a run that waits for a quota of `most` devices: of an experiment, or of its API key."""
    whose = "its API key" if experiment is None else f"experiment {experiment}"
    needed, allowed = (f"{number} {'device' if number == 1 else 'devices'}" for number in (devices, most))
    message = f"The run needs {needed}. The quota of {whose} is {allowed} at a time, "
    if devices > most:
        fewer = "create it with fewer devices, or " if most > 0 else ""
        raise_it = "raise it with `anneal experiments edit --max-devices`"
        larger = "ask an admin for a larger quota" if experiment is None else raise_it
        message += f"so it cannot start: {fewer}{larger}."
    else:  # without the number in use: each change of it would be an event of every run that waits
        message += "and other runs use too many of these: it starts when enough of them have ended."
    return PendingReason(code="quota", message=message)


def kept_quota_reason(run_id: str) -> PendingReason:
    """Return the reason of a run that would take the quota for which an earlier run waits."""
    message = (
        f"The quota of its API key or its experiment is kept for run {run_id}, which precedes it in the queue and "
        "needs several devices. It starts once that run has its devices; a run that is predicted to end before that, "
        "or that leaves enough of the quota, starts at once."
    )
    return PendingReason(code="quota", message=message)


def reserved_reason(needs: Needs, workers: Sequence[tuple[str, str]]) -> PendingReason:
    """Return the reason of a run that waits for devices of workers, given by host and id, reserved for it."""
    plural = "device" if needs.devices_each == 1 else "devices"
    alike = Counter(host for host, _ in workers)
    names = ", ".join(host if alike[host] == 1 else f"{host} ({worker_id})" for host, worker_id in workers)
    where = f"of worker {names}" if needs.hosts == 1 else f"of each of the workers {names}"
    verb = "is" if needs.devices_each == 1 else "are"
    message = (
        f"The run waits until {needs.devices_each} {plural} {where} {verb} free. They are reserved for it: of the runs "
        "behind it in the queue, only those start there that do not delay it."
    )
    return PendingReason(code="reserved", message=message)


def _no_gguf(needs: Needs) -> str:
    if not needs.gguf_quantizer:
        return (
            "The run writes a GGUF file (`gguf`), and no online worker that could take it has the converter of "
            "llama.cpp. Set ANNEAL_GGUF_CONVERTER on one and start it again, or create the run without `gguf`."
        )
    return (
        "The run writes a quantized GGUF file (`gguf`), and no online worker that could take it has the converter and "
        "the quantizer of llama.cpp. Set ANNEAL_GGUF_CONVERTER and ANNEAL_GGUF_QUANTIZER on one and start it again, or "
        "create the run with `gguf: Q8_0`, which needs only the converter, or without `gguf`."
    )


def _no_kind(needs: Needs) -> str:
    if needs.kind is None:
        return (
            "No worker with a GPU is online, but one was within the last hour, so the run waits for it. Start it "
            "again, or create the run with `resources.kind: cpu` to train on a CPU."
        )
    if needs.gpu is not None:
        return (
            f"The run asks for the GPU `{needs.gpu}` (`resources.gpu`), and no online worker of backend "
            f"`{needs.backend}` has a GPU. Start a worker with such a GPU, or create the run without `resources.gpu`, "
            "with `resources.kind: cpu` and settings that a CPU allows."
        )
    return (
        f"The run needs a device of kind `{needs.kind}`, and no online worker of backend `{needs.backend}` has one. "
        "Start such a worker, or create the run with another `resources.kind` and settings that allow it."
    )


def _no_gpu(needs: Needs, workers: Sequence[WorkerOffer]) -> str:
    names = ", ".join(f"`{name}`" for name in sorted({one.name for worker in workers for one in worker.devices}))
    return (
        f"The run asks for the GPU `{needs.gpu}` (`resources.gpu`), and online workers of backend `{needs.backend}` "
        f"have {names}. Start a worker with such a GPU, or create the run with another `resources.gpu`."
    )


def _too_few(needs: Needs, count: int) -> str:
    workers = "worker joins" if count == 1 else "workers join"
    labels = ", ".join(f"`{label}`" for label in sorted(needs.labels))
    those = f"{workers} such runs"
    if labels:
        those += f" and {'has' if count == 1 else 'have'} the labels {labels}"
    return (
        f"The run needs {needs.hosts} workers that train it together, and {count} online {those}. Start others with "
        f"ANNEAL_GROUP_INTERFACE{' and these labels' if labels else ''}, or create the run with fewer "
        "`resources.hosts`."
    )


def _too_few_alike(needs: Needs, by_model: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} with {model}" for model, count in sorted(by_model.items()))
    return (
        f"The run needs {needs.hosts} workers whose devices are of one model, and of those that it fits and that join "
        f"such runs, there are {counts}. Start others with the same devices, or create the run with fewer "
        "`resources.hosts`."
    )


def _too_few_of_version(needs: Needs, alike: Mapping[tuple[str, str], int]) -> str:
    counts = ", ".join(f"{count} with {model} and version {of}" for (model, of), count in sorted(alike.items()))
    return (
        f"The run needs {needs.hosts} workers of one model of devices and one version of Anneal, and of those that it "
        f"fits and that join such runs, there are {counts}. Install the same version on all of them, or create the run "
        "with fewer `resources.hosts`."
    )


def _too_small(needs: Needs, workers: Sequence[WorkerOffer]) -> str:
    """Return why too few of these workers have enough devices, or devices of enough memory."""
    each = needs.devices_each
    devices = "device" if each == 1 else "devices"
    conditions = [] if needs.gpu is None else [f"the GPU `{needs.gpu}` (`resources.gpu`)"]
    if needs.labels:
        conditions.append(f"the labels {', '.join(f'`{one}`' for one in sorted(needs.labels))} (`resources.labels`)")
    such = f" with {' and '.join(conditions)}" if conditions else ""
    enough = [worker for worker in workers if len(worker.devices) >= each]
    if len(enough) < needs.hosts:
        if needs.hosts == 1:
            most = max(len(worker.devices) for worker in workers)
            lacks = f"{devices} of one worker{such}, and no online worker has more than {most}"
        else:
            has = "has" if len(enough) == 1 else "have"
            lacks = f"{devices} of each of {needs.hosts} workers{such}, and only {len(enough)} online {has} so many"
        return (
            f"The run needs {each} {lacks}. Start a worker with more devices, or create the run with fewer "
            "`resources.devices`."
        )

    # Of each worker the last device that the run would take; where memory is estimated, it differs by kind.
    lasts = [(one, sorted(one.devices, key=lambda device: -device.memory_mb)[each - 1]) for one in enough]
    lasts.sort(key=lambda last: needs.memory_on(last[0].kind) - last[1].memory_mb)
    worker, device = lasts[needs.hosts - 1]
    need = needs.memory_on(worker.kind)
    which = "the largest device" if not conditions else "the largest such device"
    if needs.devices > 1:
        which = f"of the {needs.devices} largest that could train it together, the smallest"
    smallest = f"{which}, {device.name or worker.device} of {worker.host or worker.worker_id}, "
    smallest += f"has {device.memory_mb:,} MiB"
    if needs.memory_mb is not None:
        return (
            f"The run asks for {need:,} MiB of device memory (`resources.memory_mb`){such}, and {smallest}. Start a "
            "worker with a larger device, or create the run with a smaller value."
        )
    return (
        f"The run needs about {need:,} MiB of device memory{such}, and {smallest}. Start a worker with a larger "
        "device, or create the run with settings that need less; `anneal runs estimate` names some. If the estimate is "
        "wrong, set `resources.memory_mb`."
    )
