"""Reward models (`reward`): pairs → model with a scalar head → trainer → run info → train → export."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trl import RewardConfig, RewardTrainer

from app.runs.config import Replacement
from worker.training import data, model, pairs, planning
from worker.training.pairs import Pairs
from worker.training.recipes import course, steps
from worker.training.run import Run
from worker.training.trainer import Faithful


class RewardModelTrainer(Faithful, RewardTrainer):  # type: ignore[misc]
    """A `RewardTrainer` on tokenized pairs."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "accuracy": "preference_accuracy",
        "margin": "reward_margin",
        "mean_reward": "reward_mean",
        "min_reward": "reward_min",
        "max_reward": "reward_max",
    }

    def usual_length(self, tokens_of_a_row: float) -> float:
        return tokens_of_a_row / 2


def train(run: Run, replaced: list[Replacement]) -> dict[str, Any]:
    """Train one run to its end or to a stop, and return the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    found, tokenizer = steps.begin(run)
    max_length = steps.longest(run, found, tokenizer, replaced)
    no_dropout = steps.no_dropout(run, replaced)
    steps.chat_template_if_needed(run, tokenizer)
    config = run.config

    cache = steps.token_cache(run)

    def read(source: dict[str, Any], chosen: list[int] | None, purpose: steps.Purpose) -> Pairs:
        return pairs.comparisons(steps.pairs_of(run, cache, source, chosen, purpose), tokenizer, max_length=max_length)

    training, held_out = steps.read_data(run, read)
    tokenized = steps.said_of_cache(run, training, held_out)
    total_steps = steps.steps_in_all(run, data.steps_in(training.dataset, config))
    planning.decide(run, replaced, found, training.dataset, max_length)
    with steps.weights(run, found) as start:
        network = steps.load(run, start, steps.highest_id(tokenizer, training, held_out), "reward")
        trainer = course.build(
            RewardModelTrainer,
            run,
            model=network,
            args=RewardConfig(
                **course.arguments(run, total_steps),
                max_length=None,  # pairs that are too long have been left out
                disable_dropout=no_dropout,
            ),
            train_dataset=steps.seen(run, training),
            eval_dataset=held_out.dataset if held_out else None,
            processing_class=tokenizer,
            peft_config=model.lora_config(config, start.revision, "reward"),
        )
        facts = course.tell(trainer, found, replaced, training, held_out, max_length=max_length, **tokenized)
        course.train(trainer)
        return course.finish(trainer, start, facts)
