"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`): data → model → trainer → facts → train → export."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from trl import SFTConfig, SFTTrainer

from app.runs.config import Replacement
from worker.training import data, model
from worker.training.data import Tokens
from worker.training.recipes import steps
from worker.training.run import Run
from worker.training.trainer import Faithful


class SupervisedTrainer(Faithful, SFTTrainer):  # type: ignore[misc]
    """An `SFTTrainer` on tokenised data."""

    MEASURES: ClassVar[Mapping[str, str]] = {"mean_token_accuracy": "token_accuracy", "entropy": "entropy"}

    def evaluated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        told = super().evaluated(metrics)
        return {**told, "eval_perplexity": math.exp(min(told["eval_loss"], 700.0))}


def train(run: Run, replaced: list[Replacement]) -> dict[str, Any]:
    """Train one run to its end or to a stop; returns the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop came before there was anything to save.
    """
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
    with steps.weights(run, found) as start:
        network = steps.load(run, start, steps.highest_id(tokenizer, training, held_out))
        trainer = steps.build(
            SupervisedTrainer,
            run,
            model=network,
            args=SFTConfig(
                **steps.arguments(run, total_steps),
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
        facts = steps.tell(trainer, found, replaced, training, held_out, max_length=max_length, **tokenized)
        steps.train(trainer)
        return steps.finish(trainer, start, facts)
