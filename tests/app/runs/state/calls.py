"""What one process may ask of the database about a run: each call as a value, and how it is made for real."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, insert, update
from sqlalchemy.exc import IntegrityError

from anneal.contracts.run_status import LIVE
from app.infra.ids import new_id
from app.runs.events.log import LeaseFenced, NewEvent, Progress, append_events
from app.runs.queue.claim import claim_run
from app.runs.state import machine
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run

LEASE = 600.0
REAP_LEASE = 0.3
"""So small that a Postgres of tests has been up for long enough."""
START_STEP = 7


@dataclass(frozen=True)
class Offer:
    """What a worker has to give."""

    id: str
    backends: tuple[str, ...]
    kind: str
    memory_mb: int | None
    devices: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One transaction: `verb` for the run with the `epoch` that the caller believes in, or for a worker."""

    verb: str
    run: str = ""
    lease_epoch: int = 0
    worker: Offer | None = None
    save: bool = True
    delay: float = 0.0
    limit: int = 0
    first: int = 0
    """Number of the first event of an `append`, and …"""
    count: int = 0
    """… how many there are."""
    step: int = 0
    values: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        values = {it.name: getattr(self, it.name) for it in fields(self) if getattr(self, it.name) != it.default}
        return " ".join(f"{name}={value}" if name != "verb" else value for name, value in values.items())

    def make(self, connection: Connection, fixed: dict[str, Any]) -> Any:
        """Do it on this connection, without a commit; answers what the caller learns, in the model's terms."""
        try:
            return _MAKE[self.verb](self, connection, fixed)
        except LeaseFenced:
            return "fenced"
        except RuntimeError:
            return "gap"
        except IntegrityError:
            return "refused"


def line(call_epoch: int, number: int) -> str:
    """What the trainer of an epoch says as its event of this number."""
    return f"{call_epoch}.{number}"


def _moved(rows: Any) -> list[tuple[Any, ...]]:
    return sorted((row.id, row.from_status, row.status, row.lease_epoch, row.attempt, row.event_seq) for row in rows)


def _transition(statement: Callable[["Call"], Any]) -> Callable[["Call", Connection, dict[str, Any]], Any]:
    def make(call: Call, connection: Connection, _: dict[str, Any]) -> Any:
        return _moved(connection.execute(statement(call)).all())

    return make


def _create(call: Call, connection: Connection, fixed: dict[str, Any]) -> Any:
    values = {**fixed, **dict(call.values), "id": call.run}
    row = connection.execute(machine.create(values)).one_or_none()
    return row.status if row else "refused"


def _claim(call: Call, connection: Connection, _: dict[str, Any]) -> Any:
    worker = call.worker
    assert worker
    row = claim_run(connection, worker.id, LEASE)
    return (*_moved([row])[0], sorted(row.device_indexes)) if row else None


def _renew(call: Call, connection: Connection, _: dict[str, Any]) -> Any:
    row = connection.execute(machine.renew(call.run, call.lease_epoch, LEASE)).one_or_none()
    return (row.stop_mode not in (None, "epoch_end"), row.stop_mode != "discard") if row else None


def _hint(call: Call, connection: Connection, _: dict[str, Any]) -> Any:
    return sorted(connection.execute(machine.mark_notified(call.limit)).scalars())


def _append(call: Call, connection: Connection, _: dict[str, Any]) -> Any:
    numbers = range(call.first, call.first + call.count)
    new = [NewEvent.from_payload("log", 1_700_000_000.0 + n, {"line": line(call.lease_epoch, n)}) for n in numbers]
    progress = Progress(call.step, call.step / 10, 100, 1 / (call.step + 1)) if call.step else None
    append_events(connection, call.run, call.lease_epoch, call.first, new, progress)
    return "stored"


def _checkpoint(call: Call, connection: Connection, _: dict[str, Any]) -> Any:
    event = NewEvent.from_payload("checkpoint", 1_700_000_000.0, {"line": line(call.lease_epoch, call.first)})
    append_events(connection, call.run, call.lease_epoch, call.first, [event])
    row = {"id": new_id("ckpt"), "run_id": call.run, "attempt": 1, "name": f"checkpoint-{call.step}"}
    reported = {"step": call.step, "epoch": 0.5, "kind": "periodic", "bytes": 1, "manifest_sha256": "0" * 64}
    connection.execute(insert(Checkpoint).values(**row, **reported))
    connection.execute(
        update(Run)
        .where(Run.id == call.run, Run.lease_epoch == call.lease_epoch, Run.status.in_(LIVE))
        .values(lost_count=0, checkpoint_step=call.step)
    )
    return "stored"


_MAKE: dict[str, Callable[[Call, Connection, dict[str, Any]], Any]] = {
    "create": _create,
    "claim": _claim,
    "renew": _renew,
    "hint_due": _hint,
    "append": _append,
    "checkpoint": _checkpoint,
    "begin": _transition(lambda it: machine.begin(it.run, it.lease_epoch, START_STEP, 0.5, 100, None)),
    "saving": _transition(lambda it: machine.begin_save(it.run, it.lease_epoch)),
    "saved": _transition(lambda it: machine.end_save(it.run, it.lease_epoch)),
    "complete": _transition(lambda it: machine.complete(it.run, it.lease_epoch, 1, "all steps done")),
    "fail": _transition(lambda it: machine.fail(it.run, it.lease_epoch, "bad_data", "row 3 is empty")),
    "cancel": _transition(lambda it: machine.cancel(it.run, it.lease_epoch)),
    "release": _transition(lambda it: machine.release(it.run, it.lease_epoch, "drain")),
    "retry": _transition(lambda it: machine.retry(it.run, it.lease_epoch, "trainer lost", it.delay)),
    "reap": _transition(lambda _: machine.reap(REAP_LEASE)),
    "reap_dead": _transition(lambda it: machine.reap_dead([it.worker.id if it.worker else ""])),
    "request_stop_at_epoch_end": _transition(lambda it: machine.request_stop_at_epoch_end(it.run)),
    "request_stop": _transition(lambda it: machine.request_stop(it.run, "checkpoint" if it.save else "discard")),
}
