"""A prediction: a model answers the rows of a dataset, part by part in the order of the dataset."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from datasets import Dataset
from trl import SFTConfig

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.prompts import PredictOptions
from anneal.contracts.rewards import referenced_columns
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import reader
from worker.training.data.chat_template import ensure_template
from worker.training.data.remarks import NotedRows
from worker.training.failures import Stopped, TrainingFailure
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation
from worker.training.methods.preparation import Setup
from worker.training.methods.sft import SupervisedTrainer
from worker.training.model import adapter_init, loader
from worker.training.prediction.answers_file import AnsweredRow, AnswersFile
from worker.training.prediction.generation import Answer, Generator, fitting_tokens, plan_batches
from worker.training.prediction.rows import Prompt, PromptEncoder
from worker.training.prediction.scores import Scorer, Scores, Totals
from worker.training.reward_services.service_scorer import report_usage

_ROWS_OF_PART = 1_024
"""Rows that are sorted by length and divided into batches together."""
_SECONDS_BETWEEN_METRICS = 2.0


def predict_rows(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Answer the rows of the job's dataset with its weights, and return the fields of the result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    options = _options(run)
    setup = preparation.prepare_start(run, replaced)
    preparation.chat_template_if_needed(run, setup.tokenizer)
    ensure_template(setup.tokenizer)  # of chats among texts, or with a system prompt
    _load_base_in_compute_dtype(run)
    longest_prompt = setup.max_length - options.max_new_tokens
    if longest_prompt < 1:
        raise TrainingFailure(
            "config_error",
            f"`max_new_tokens` is {options.max_new_tokens:,}, but prompt and answer together may have at most "
            f"{setup.max_length:,} tokens with this model: lower it.",
        )
    total = run.dataset.rows or reader.count_rows(str(run.dataset.path))
    answers = AnswersFile(run, total)
    columns = referenced_columns(options.rewards)
    encoder = PromptEncoder(setup.tokenizer, options.system_prompt, longest_prompt, columns)
    with loaded_trainer(run, setup) as trainer:
        model = trainer.accelerator.unwrap_model(trainer.model).eval()
        # Before the batches, as its reward models take memory.
        scorer = Scorer(run, setup.tokenizer, options, lambda: _beat(run))
        tokens = options.batch_tokens or answers.batch_tokens or fitting_tokens(model)
        _set_batch_tokens(run, tokens)
        answers.batch_tokens = tokens
        facts = {"rows": total, "total_steps": total, "base_revision": setup.base.revision}
        run.report_config(replaced, loader.initial_run_info(trainer.model, run.machine) | facts)
        generator = Generator(model, setup.tokenizer, _options(run), run.config.seed, lambda: _beat(run))
        work = _Work(run, answers, encoder, generator, scorer)
        try:
            work.answer_all(trainer)
            metrics = _sum_up(run, answers, scorer.names)
        except Stopped:
            return _stop(run, answers)
    metrics |= {f"eval_{name}": value for name, value in run.state.reward_usage.items()}
    report_usage(run.report, run.state.reward_usage)
    output = answers.write_output(scorer.names)
    run.record_evaluation(total, 1.0, metrics)
    return {"outcome": "completed", "output": output, "step": total, "epoch": 1.0, "metrics": metrics}


def _options(run: TrainingContext) -> PredictOptions:
    options = run.config.trainer_options.predict
    if options is None:
        raise TrainingFailure("config_error", "The job has no `extra.predict`: create the run with /v1/runs/predict.")
    return options


def _load_base_in_compute_dtype(run: TrainingContext) -> None:
    """Let a base model on a GPU have the data type that it computes in: float32 is for weights that are trained.

    Weights of a run are loaded as it has trained them.
    """
    config = run.config
    is_base = run.job.weights is None and config.lora_r is None
    if is_base and run.machine.kind == "cuda" and config.dtype == "bfloat16":
        run.config = config.model_copy(update={"weights_dtype": config.dtype})


def _set_batch_tokens(run: TrainingContext, tokens: int) -> None:
    """Store the size of batches in the configuration in effect, which a repair halves."""
    options = _options(run).model_copy(update={"batch_tokens": tokens}).model_dump(mode="json")
    run.config = run.config.model_copy(update={"extra": {**run.config.extra, "predict": options}})


def _beat(run: TrainingContext) -> None:
    run.report.alive()
    run.raise_if_stopped()


@contextmanager
def loaded_trainer(run: TrainingContext, setup: Setup) -> Iterator[ServiceTrainerMixin]:
    """Provide a trainer of supervised fine-tuning, which never trains, with the weights of the job.

    It loads them as an evaluation does, so that answers are those of the evaluated model.
    """
    base, tokenizer, _ = setup
    with preparation.base_weights(run, base) as start:
        network = preparation.load_network(run, start, preparation.highest_id(tokenizer, []))
        trainer = pipeline.build_trainer(
            SupervisedTrainer,
            run,
            start,
            model=network,
            args=SFTConfig(
                **pipeline.trainer_arguments(run, 1), max_length=None, dataset_kwargs={"skip_prepare_dataset": True}
            ),
            train_dataset=Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]], "rows": [[0]]}),
            eval_dataset=None,
            processing_class=tokenizer,
            peft_config=adapter_init.adapter_config(run, network, start.revision),
        )
        if run.job.weights is not None:
            trainer.load_trained_weights(run.job.weights)
        yield trainer


class _Work:
    """Answers of one attempt, from the first row that is not answered yet."""

    def __init__(
        self,
        run: TrainingContext,
        answers: AnswersFile,
        encoder: PromptEncoder,
        generator: Generator,
        scorer: Scorer,
    ) -> None:
        self._run, self._answers, self._total = run, answers, answers.total
        self._encoder, self._generator, self._scorer = encoder, generator, scorer
        self._reported_at = time.monotonic()
        self._reported_rows = answers.answered
        self._tokens = 0

    def answer_all(self, trainer: ServiceTrainerMixin) -> None:
        """Answer all rows; between two batches, save a checkpoint if one is due.

        Raises:
            Stopped: a stop was requested; the rows of the current batch are not answered.
        """
        run, answers = self._run, self._answers
        start, total = answers.answered, self._total
        run.report.send({"type": "phase", "name": "predicting", "start_step": start, "total_steps": total})
        part: list[Prompt] = []
        for prompt in self._prompts():
            part.append(prompt)
            if len(part) == _ROWS_OF_PART or prompt.row == self._total - 1:
                self._answer_part(part, trainer)
                part = []

    def _prompts(self) -> Iterator[Prompt]:
        path, written = str(self._run.dataset.path), self._answers.written
        chosen = None if written == 0 else list(range(written, self._total))
        rows = reader.encode_rows(
            path, self._encoder, chosen=chosen, progress=lambda *_: _beat(self._run), purpose="prediction"
        )
        return (prompt for _, prompt in rows)

    def _answer_part(self, part: list[Prompt], trainer: ServiceTrainerMixin) -> None:
        answers, options = self._answers, _options(self._run)
        highest_id = max((int(prompt.ids.max()) for prompt in part if prompt.ids is not None), default=0)
        loader.check_vocabulary(trainer.model, highest_id)
        answerable = [prompt for prompt in part if prompt.ids is not None]
        # Of the whole part, so that they are the same after a resume; a batch is answered as a whole.
        for batch in plan_batches(answerable, options, answers.batch_tokens or 1):
            remaining = [prompt for prompt in batch if prompt.row not in answers.ahead]
            if remaining:
                with trainer.accelerator.autocast():  # without the scores: reward models compute in float32
                    generated = self._generator.answer_batch(remaining)
                scores = self._scorer.score_answers(remaining, generated)
                for prompt, answer, of_row in zip(remaining, generated, scores, strict=True):
                    answers.ahead[prompt.row] = _answered(prompt, answer, of_row)
                    self._tokens += len(answer.tokens)
                self._report_progress()
                answers.save_if_due()
        answers.append_rows([answers.ahead.get(prompt.row) or _skipped(prompt) for prompt in part])
        self._report_progress(is_last=answers.written == self._total)

    def _report_progress(self, *, is_last: bool = False) -> None:
        run, done, now = self._run, self._answers.answered, time.monotonic()
        run.report_progress("predicting", done, self._total)
        seconds = now - self._reported_at
        if seconds < _SECONDS_BETWEEN_METRICS and not is_last:
            return
        run.record_metric(
            {
                "step": done, "epoch": done / self._total, "loss": None, "learning_rate": None, "grad_norm": None,
                "gpu_memory_mb": None, "samples_per_second": (done - self._reported_rows) / max(seconds, 1e-6),
            },
            {"tokens_per_second": self._tokens / max(seconds, 1e-6), **run.state.reward_usage},
            self._total,
        )  # fmt: skip
        self._reported_at, self._reported_rows, self._tokens = now, done, 0


def _answered(prompt: Prompt, answer: Answer, scores: Scores) -> AnsweredRow:
    return {
        "row": prompt.row, "prompt": prompt.content, "reference": prompt.reference, "prediction": answer.text,
        "finish_reason": answer.finish_reason, "problem": None,
        "prompt_tokens": 0 if prompt.ids is None else len(prompt.ids), "completion_tokens": len(answer.tokens),
        "scores": scores,
    }  # fmt: skip


def _skipped(prompt: Prompt) -> AnsweredRow:
    return {
        "row": prompt.row, "prompt": prompt.content, "reference": prompt.reference, "prediction": None,
        "finish_reason": "skipped", "problem": prompt.problem, "prompt_tokens": 0, "completion_tokens": 0, "scores": {},
    }  # fmt: skip


def _stop(run: TrainingContext, answers: AnswersFile) -> TrainingResult:
    """Save the answers, if the stop asks for it, and return the fields of the result record."""
    request = run.stop_requested
    if request is None or request.saves_checkpoint:
        run.report.send({"type": "phase", "name": "saving"})
        answers.save("stop")
    why = request.why if request else "stop"
    return {
        "outcome": "stopped",
        "why": why,
        "output": None,
        "step": answers.answered,
        "epoch": answers.answered / answers.total,
    }


def _sum_up(run: TrainingContext, answers: AnswersFile, names: Sequence[str]) -> dict[str, float]:
    """Return the metrics of all answers, and report the rows that the model could not answer.

    Raises:
        TrainingFailure: `bad_data`: it could answer none.
        Stopped: a stop was requested.
    """
    totals, skipped, problem = Totals(names), NotedRows(), ""
    rows = answers.read_rows()
    while part := list(islice(rows, _ROWS_OF_PART)):
        totals.add_rows(part)
        _beat(run)
        for row in part:
            if row["prediction"] is None:
                skipped.add(row["row"])
                problem = problem or row["problem"] or ""
    if skipped.count == answers.total:
        raise TrainingFailure("bad_data", f"No row can be answered; the reason of the first: {problem}.")
    reason = "{n} rows have no answer: the prompt is too long for the model, or its chat template rejects it. Each has "
    for remark in skipped.remarks(answers.total, reason + "the reason as `problem` in the output."):
        run.report.message(remark["reason"], level="warning")
        run.report.send({"type": "skipped_rows", "data": "prediction", **remark})
    return totals.metrics()
