"""A serving run: its process answers the questions that its supervisor passes on, until none comes for a while."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anneal.contracts.attempt.answers import AnswerError, AnswerPiece, Question
from anneal.contracts.attempt.messages import QuestionEnvelope, TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.methods import preparation
from worker.training.methods.preparation import Setup
from worker.training.model import loader
from worker.training.prediction.predict import loaded_trainer
from worker.training.serving.answer_records import answer_records
from worker.training.serving.engine import AnswerEngine

_LOOK_SECONDS = 0.25
"""Seconds for which an idle process waits for a question before it looks for a request to stop."""


def serve_questions(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Load the model of the job and answer questions to it and to adapters on it; return the result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before the model was loaded.
    """
    config = run.config
    if config.lora_r is None and run.machine.kind == "cuda" and config.dtype == "bfloat16":
        # In the data type of the computation: float32 is for weights that are trained.
        run.config = config.model_copy(update={"weights_dtype": config.dtype})
    setup = preparation.prepare_start(run, replaced)
    preparation.chat_template(run, setup.tokenizer)
    with _loaded_model(run, setup) as model:
        facts = {"base_revision": setup.base.revision}
        run.report_config(replaced, loader.initial_run_info(model, run.machine) | facts)
        run.report.send({"type": "phase", "name": "serving"})
        trust_remote_code = run.job.trust_remote_code
        return _answer_questions(run, AnswerEngine(model, setup.tokenizer, trust_remote_code=trust_remote_code))


@contextmanager
def _loaded_model(run: TrainingContext, setup: Setup) -> Iterator[Any]:
    """Provide the base model without an adapter, or with the weights of the job as a prediction loads them."""
    if run.job.weights is not None:
        with loaded_trainer(run, setup) as trainer:
            yield trainer.accelerator.unwrap_model(trainer.model)
    else:
        with preparation.base_weights(run, setup.base) as start:
            yield preparation.load_network(run, start, preparation.highest_id(setup.tokenizer, []))


def _answer_questions(run: TrainingContext, engine: AnswerEngine) -> TrainingResult:
    idle_since = time.monotonic()
    while True:
        run.report.alive()
        request = run.stop_requested
        # If the device is needed, the open answers are written first; if a user stops the run, they are not.
        if request is not None and (request.why == "stop" or not engine.open_questions):
            return {"outcome": "stopped", "why": request.why, "output": None}
        questions, cancelled = run.control.take_questions(0.0 if engine.open_questions else _LOOK_SECONDS)
        pieces = [error for question in questions if (error := _submit(engine, question)) is not None]
        for question_id in cancelled:
            engine.cancel(question_id)
        if engine.open_questions:
            pieces += engine.step()
            idle_since = time.monotonic()
        for record in answer_records(pieces):
            run.report.send(record)
        if time.monotonic() - idle_since >= run.job.serve_idle_seconds:
            return {"outcome": "completed", "output": None}


def _submit(engine: AnswerEngine, text: str) -> AnswerPiece | None:
    """Pass a question to the engine; return the error of one that a newer API has sent."""
    envelope: QuestionEnvelope = json.loads(text)
    try:
        question = Question.model_validate(envelope["question"])
    except ValidationError as error:
        message = f"This worker does not understand the question ({error.errors()[0]['msg']}): upgrade the worker."
        question_id = str(envelope["question"].get("id"))
        return AnswerPiece(question_id=question_id, error=AnswerError(code="internal", message=message))
    folder = envelope["adapter_folder"]
    engine.submit(question, None if folder is None else Path(folder))
    return None
