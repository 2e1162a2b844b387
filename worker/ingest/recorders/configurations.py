"""Recorder of the configuration that a trainer actually uses."""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, update

from anneal.contracts.attempt.messages import ConfigRecord
from anneal.contracts.attempt.run_facts import invalid_facts
from anneal.contracts.training_config.fields import TrainingConfig
from app.runs.events.log import NewEvent
from app.tables.runs import Run
from worker.claimed_run import ClaimedRun
from worker.ingest.attempt_state import AttemptState
from worker.ingest.record_parser import validate_record
from worker.ingest.sink import EventSink
from worker.ingest.spool import RunUpdate


class ConfigurationRecorder:
    """Recorder of the effective configuration and the facts of one attempt."""

    def __init__(
        self, run: ClaimedRun, sink: EventSink, state: AttemptState, log_line: Callable[[str, str], None]
    ) -> None:
        self._run, self._sink, self._state, self._log_line = run, sink, state, log_line

    def record_configuration(self, record: dict[str, Any], ts: float) -> None:
        """Store the configuration with the run, and the event with its facts; what is invalid is left out."""
        reported = validate_record(ConfigRecord, record)
        effective, facts = reported["effective"], reported["facts"]
        if ignored := invalid_facts(facts):  # estimates of other users' runs compute with them
            self._log_line(f"invalid facts of the run are ignored: {', '.join(ignored)}", "warning")
            record["facts"] = {name: value for name, value in facts.items() if name not in ignored}
        event = NewEvent.from_payload(record.pop("type"), ts, record)
        try:
            TrainingConfig.model_validate(effective)
        except ValidationError as error:  # repairs and post-mortems compute with it
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            self._log_line(f"the reported configuration is invalid and not used (`{where}`: {first['msg']})", "warning")
            self._sink.enqueue_item(event)
            return
        self._state.effective = effective

        def store_effective_config(connection: Connection) -> None:
            connection.execute(
                update(Run)
                .where(Run.id == self._run.id, Run.lease_epoch == self._run.lease_epoch)
                .values(effective_config=effective)
            )

        self._sink.enqueue_item(RunUpdate(store_effective_config, event))
