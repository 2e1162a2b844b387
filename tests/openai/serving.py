"""A serving run without a model: the relay of a worker, whose process is the test."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from redis import Redis
from sqlalchemy import Engine, select

from anneal.contracts.attempt.messages import ControlMessage
from app.infra.storage import Storage
from app.tables.runs import Run
from tests.factories import Trainer, make_dataset, make_model, make_run
from tests.rows import add_worker
from tests.server import ApiServer
from tests.waiting import eventually
from worker.presence.question_relay import QuestionRelay


def prepare_models(api: ApiServer, engine: Engine) -> None:
    """Create the base model `tiny`, and a worker that takes serving runs."""
    make_model(api.settings, "tiny")
    far = datetime.now(UTC) + timedelta(minutes=10)
    add_worker(engine, backends=["celery"], memory_mb=[100_000], heartbeat_at=far)


def trained(api: ApiServer, engine: Engine, config: dict[str, Any], name: str, format: str = "chat") -> tuple[str, str]:
    """A completed run with an output; its id and that of a checkpoint."""
    columns = ["prompt", "chosen", "rejected"] if format == "preference" else ["messages"]
    dataset = make_dataset(engine, format, columns)
    run_id: str = make_run(api.client, dataset, config=config, backend="celery", name=name)["id"]
    trainer = Trainer(engine, run_id).begin()
    saved = trainer.checkpoint(20)
    trainer.complete()
    trainer.write_output(Storage(api.settings))
    return run_id, saved


def serving_runs(engine: Engine) -> list[Any]:
    """The serving runs, the oldest first."""
    with engine.connect() as connection:
        query = select(Run.__table__).where(Run.task == "serve").order_by(Run.id)
        return list(connection.execute(query).all())


class Serving:
    """Process of a serving run, which a test lets answer."""

    def __init__(self, relay: QuestionRelay, trainer: Trainer) -> None:
        self.relay, self.trainer = relay, trainer
        self.messages: SimpleQueue[ControlMessage] = SimpleQueue()

    def send(self, message: ControlMessage) -> bool:
        self.messages.put(message)
        return True

    def next_question(self) -> dict[str, Any]:
        """The next question, with the folder of its adapter as `folder`."""
        text = ""
        while True:
            part = self.messages.get(timeout=30).question
            if part is None:
                continue
            text += part.text
            if part.is_last:
                envelope = json.loads(text)
                return {**envelope["question"], "folder": envelope["adapter_folder"]}

    def next_cancelled(self) -> str:
        """The id of the next question that is cancelled."""
        while (cancelled := self.messages.get(timeout=30).cancelled_question) is None:
            pass
        return cancelled

    def write(
        self, question: dict[str, Any], *texts: str, choice: int = 0, end: str | None = "stop", **last: Any
    ) -> None:
        """Write pieces of a choice, the last of which ends it unless `end` is None."""
        for number, text in enumerate(texts):
            piece = {"question_id": question["id"], "choice": choice, "text": text, "tokens": 1}
            if number == 0 and choice == 0:
                piece["prompt_tokens"] = 7
            if number == len(texts) - 1 and end is not None:
                piece |= {"finish_reason": end, **last}
            self.relay.publish([piece])

    def fail(self, question: dict[str, Any], code: str, message: str = "It cannot be answered: change it.") -> None:
        """Answer with an error."""
        self.relay.publish([{"question_id": question["id"], "error": {"code": code, "message": message}}])

    @property
    def is_idle(self) -> bool:
        """True if no message waits."""
        try:
            self.messages.put(self.messages.get_nowait())
        except Empty:
            return True
        return False


@contextmanager
def serving(api: ApiServer, engine: Engine, run_id: str | None = None, *, begins: bool = True) -> Iterator[Serving]:
    """Serve the only serving run that waits, which a question is about to create."""
    if run_id is None:
        waiting = eventually(
            lambda: [run for run in serving_runs(engine) if run.status == "pending"], what="a serving run"
        )
        run_id = str(waiting[0].id)
    trainer = Trainer(engine, run_id)
    if begins:
        trainer.begin(total=None)
    with Redis.from_url(api.settings.redis_url or "", decode_responses=True, socket_timeout=1) as redis:
        relay = QuestionRelay(redis, run_id, trainer.attempt, lambda model: Path("/adapters") / model, lambda: False)
        process = Serving(relay, trainer)
        with relay.running(process.send):
            yield process
