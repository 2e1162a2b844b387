"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`): data → model → trainer → run info → train → export."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from trl import SFTConfig, SFTTrainer

from app.runs.config import Replacement
from worker.training import data, metric_functions, model, planning
from worker.training.data import Tokens
from worker.training.metric_functions import Evaluation, Factories
from worker.training.recipes import course, steps
from worker.training.run import Run
from worker.training.trainer import Faithful


class SupervisedTrainer(Faithful, SFTTrainer):  # type: ignore[misc]
    """An `SFTTrainer` on tokenized data."""

    MEASURES: ClassVar[Mapping[str, str]] = {"mean_token_accuracy": "token_accuracy", "entropy": "entropy"}

    def __init__(self, run: Run, metric_functions: Factories, **options: Any) -> None:
        self._factories = metric_functions
        self._evaluation = Evaluation({})
        super().__init__(run, **options)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        self._evaluation = Evaluation(self._factories)
        return super().evaluate(*args, **options)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        found = super().prediction_step(model, inputs, *args, **options)
        if self._factories:
            # The loss is computed without the logits of a whole batch, so metrics need another forward pass.
            batch = self._prepare_inputs(inputs) | {"use_cache": False}
            labels = batch.pop("labels")
            with torch.no_grad(), self.compute_loss_context_manager():
                self._evaluation.update(model(**batch).logits, labels)
        return found

    def evaluated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = super().evaluated(metrics)
        reported["eval_perplexity"] = math.exp(min(reported["eval_loss"], 700.0))
        return {**reported, **self._evaluation.results(reported)}


def train(
    run: Run, replaced: list[Replacement], trainer_class: type[SupervisedTrainer] = SupervisedTrainer
) -> dict[str, Any]:
    """Train one run to its end or to a stop, and return the fields of its result record.

    A recipe installed by the operator may pass another trainer class.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    functions = metric_functions.load(run.config.trainer_options.metrics)
    found, tokenizer = steps.begin(run)
    max_length = steps.longest(run, found, tokenizer, replaced)
    config = run.config
    if "chat" in {one["format"] for one in (run.job["dataset"], run.job.get("eval_dataset")) if one}:
        steps.chat_template(run, tokenizer)

    cache = steps.token_cache(run)

    def read(source: dict[str, Any], chosen: list[int] | None, purpose: steps.Purpose) -> Tokens:
        return data.tokenise(
            source["path"], source["format"], tokenizer, config, max_length=max_length, chosen=chosen,
            purpose=purpose, progress=steps.tokenizing(run), sha256=source.get("sha256"), cache=cache,
        )  # fmt: skip

    training, held_out = steps.read_data(run, read)
    tokenized = steps.said_of_cache(run, training, held_out)
    total_steps = steps.steps_in_all(run, data.steps_in(training.dataset, config))
    planning.decide(run, replaced, found, training.dataset, max_length)
    with steps.weights(run, found) as start:
        network = steps.load(run, start, steps.highest_id(tokenizer, training, held_out))
        trainer = course.build(
            trainer_class,
            run,
            metric_functions=functions,
            model=network,
            args=SFTConfig(
                **course.arguments(run, total_steps),
                neftune_noise_alpha=config.neftune_noise_alpha,
                max_length=max_length,
                packing=config.packing,
                packing_strategy=config.trainer_options.packing_strategy,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=steps.seen(run, training),
            eval_dataset=held_out.dataset if held_out else None,
            processing_class=tokenizer,
            peft_config=model.lora_config(config, start.revision),
        )
        facts = course.tell(trainer, found, replaced, training, held_out, max_length=max_length, **tokenized)
        course.train(trainer)
        return course.finish(trainer, start, facts)
