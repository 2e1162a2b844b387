"""Learning from rewards (`rlhf`, GRPO or RLOO): the model generates completions of prompts, and rewards rate them.

Its rows are prompts, not sequences of tokens, so its `train` calls the steps of `pipeline.py` itself.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.rewards import HttpReward, JudgeReward, ModelReward, PluginReward, Reward, metric_names
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import preferences
from worker.training.data.preferences import Pairs, PromptEncoder
from worker.training.data.reader import RowSource
from worker.training.data.token_cache import TokenCache
from worker.training.failures import TrainingFailure
from worker.training.loop import probe
from worker.training.loop.anomalies import Anomaly
from worker.training.loop.steps import StepMixin
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation, rewards
from worker.training.model import adapter_init
from worker.training.model.merging import options_of_stored
from worker.training.model.reward_scorer import RewardScorer
from worker.training.overrides import RewardOverrides
from worker.training.planning import memory_plan
from worker.training.planning.step_planning import plan_step
from worker.training.plugins import hooks
from worker.training.reward_services.judge import Judge
from worker.training.reward_services.scoring_service import ScoringService
from worker.training.reward_services.service_client import CallContext, take_keys
from worker.training.reward_services.service_scorer import ServiceScorer, add_usage, report_usage, take_usage

_MOST_EQUAL_STEPS = 10
"""Steps in a row without a difference between rewards after which a run warns."""
_NON_FINITE_ERROR = "probability tensor contains either"
"""Part of torch's error when it samples from non-finite probabilities."""


class RewardTrainerMixin(RewardOverrides, ServiceTrainerMixin):
    """Overrides shared by `GRPOTrainer` and `RLOOTrainer`.

    An optimizer step is one round: completions are generated once, for all of its micro-batches. So a run can stop
    after any step and resume exactly.
    """

    MEASURES: ClassVar[Mapping[str, str]] = {
        "reward": "reward",
        "reward_std": "reward_std",
        "frac_reward_zero_std": "rewards_all_equal",
        "kl": "kl",
        "entropy": "entropy",
        "completions/mean_length": "completion_length",
        "completions/clipped_ratio": "completions_cut",
    }
    NOT_COUNTED: ClassVar[str] = "generating the completions, and reward models"

    def has_reference_pass(self) -> bool:
        return bool(self.beta)

    def usual_length(self, tokens_of_a_row: float) -> float:
        """Return an upper bound, since completions are not known before they are generated."""
        return tokens_of_a_row + float(self.max_completion_length)

    def get_train_dataloader(self) -> Any:
        # TRL's own: its rounds are whole, and their rows follow one another, those of each device together.
        return super(StepMixin, self).get_train_dataloader()

    def generate_completions(self, original: Callable[[], Any]) -> Any:
        """Return the completions of a round.

        Raises:
            TrainingFailure: the model's output became non-finite in training.
        """
        generated, failure = None, None
        # With an adapter, generation calls the base model's own forward, which nothing else puts under mixed precision.
        # Fully trained modules are in 32 bits and would not match the 16-bit modules around them.
        with self.accelerator.autocast():
            try:
                generated = original()
            except RuntimeError as error:
                if _NON_FINITE_ERROR not in str(error) or not self.model.training:
                    raise
                failure = error
        if self.model.training:
            every = self.run.ranks.gather_values((failure is not None, self.step_rows))
            if any(failed for failed, _ in every):
                self.step_rows = [row for _, rows in every for row in rows]
                description = "the model's output became non-finite while it generated completions"
                raise self.anomaly_failure(Anomaly("non_finite", description)) from failure
        return generated

    def exclude_unscored(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the rewards of a round (completions x functions); completions that a service did not score have none.

        TRL leaves completions without any reward out of their group, and does not learn from them.
        """
        services = self._service_columns()
        if not services:
            return rewards
        if self.model.training:  # an evaluation is counted at its end: until then each rank is alone
            self._count_usage()
        return rewards.masked_fill(rewards[:, services].isnan().any(dim=1, keepdim=True), torch.nan)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self._warn_of_equal_rewards(self._metrics["train"]["frac_reward_zero_std"])
        super().log(logs, start_time)

    def _warn_of_equal_rewards(self, shares: Sequence[float]) -> None:
        """Warn once if the rewards of many steps in a row teach nothing; `shares` are of steps not yet counted."""
        state = self.run.state
        for share in shares:
            if state.equal_reward_steps >= _MOST_EQUAL_STEPS:
                return
            state.equal_reward_steps = state.equal_reward_steps + 1 if share >= 1 else 0
        if state.equal_reward_steps >= _MOST_EQUAL_STEPS:
            self.run.report.message(
                f"In {_MOST_EQUAL_STEPS} steps in a row all completions of each prompt had the same reward, so the "
                "model learned nothing from the rewards. Compare the rewards of the samples: if all are 0, check the "
                "reward and its answers, or start with easier prompts; if all are the highest, take harder prompts. A "
                "higher `rlhf.temperature` or `rlhf.num_generations` makes completions that differ.",
                level="warning",
            )

    def named_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        named = super().named_metrics(metrics)
        if self._service_columns():
            self._count_usage()
            if self.run.is_inference:
                named |= {f"eval_{name}": value for name, value in self.run.state.reward_usage.items()}
        return named

    def _service_columns(self) -> list[int]:
        return [at for at, function in enumerate(self.reward_funcs) if isinstance(function, ServiceScorer)]

    def _count_usage(self) -> None:
        """Add what the rewards of all ranks have cost to the state of the run."""
        state = self.run.state
        for usage in self.run.ranks.gather_values(take_usage(self.reward_funcs)):
            state.reward_usage = add_usage(state.reward_usage, usage)

    def update_own_metrics(self, model: Any, inputs: Any) -> None:
        """Do nothing: the metric functions got the completions when they were generated."""

    def collate_with_rows(self, collate: Any) -> Any:
        return collate  # a batch is the list of its rows

    def take_rows(self, inputs: Any) -> list[int]:
        if self._micro_losses:
            return []  # every micro-batch carries the rows of the whole round
        return list(dict.fromkeys(row for one in inputs for row in one["rows"]))

    def rows_of(self, batch: Any) -> list[int]:
        return [row for one in batch for row in one["rows"]]

    def skip_step(self) -> None:
        self._step += 1  # TRL decides with it when to generate the next round

    def sequences_of(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return []  # the anomaly is in the completions, not in the prompts

    def metric_names(self) -> Mapping[str, str]:
        own = {f"rewards/{name}/mean": f"reward_{name}" for name in self.reward_func_names}
        return {**self.MEASURES, **own}

    def pinned_text(self) -> list[int]:
        encoder = PromptEncoder(self.processing_class)
        ((_, ids),) = encoder.encode([encoder.prepare(self.train_dataset[0], 0)])
        return [int(token) for token in ids]

    def trained_tokens(self) -> int:
        """Return the number of prompt and completion tokens trained on so far."""
        return int(self.state.num_input_tokens_seen)

    def report_samples(self) -> None:
        """Report the completions with the highest and the lowest advantage of the last round."""
        logs = self._logs
        advantages = list(logs["advantages"])
        if not advantages:
            return
        best, worst = advantages.index(max(advantages)), advantages.index(min(advantages))
        for at in dict.fromkeys((best, worst)):
            self.run.report.send(
                {
                    "type": "sample",
                    "step": self.state.global_step,
                    "prompt": self._as_text(logs["prompt"][at]),
                    "completion": self._as_text(logs["completion"][at]),
                    "rewards": {name: values[at] for name, values in logs["rewards"].items()},
                    "advantage": advantages[at],
                }
            )

    def _as_text(self, text: Any) -> str:
        return text if isinstance(text, str) else "\n".join(str(message["content"]) for message in text)


class GroupTrainer(RewardTrainerMixin, GRPOTrainer):  # type: ignore[misc]
    """Group relative policy optimization; `GRPOTrainer.compute_loss` of TRL computes the loss."""


class LeaveOneOutTrainer(RewardTrainerMixin, RLOOTrainer):  # type: ignore[misc]
    """REINFORCE with the mean reward of the other completions as baseline.

    `RLOOTrainer.compute_loss` of TRL computes the loss.
    """


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run to its end or to a stop, and return the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    base, tokenizer, max_length = preparation.prepare_start(run, replaced)
    preparation.chat_template_if_needed(run, tokenizer)
    config, rlhf = run.config, run.config.rlhf
    longest_prompt = max_length - rlhf.max_completion_length
    if longest_prompt < 1:
        raise TrainingFailure(
            "config_error",
            f"`rlhf.max_completion_length` is {rlhf.max_completion_length}, but prompt and completion together may "
            f"have at most {max_length} tokens: lower it.",
        )

    def tokenize_rows(rows: RowSource) -> Pairs:
        return preferences.read_prompts(rows, tokenizer, max_length=longest_prompt, compared_by=rlhf.rewards)

    data = preparation.read_data(run, tokenize_rows, TokenCache())
    training = data.training
    completions_in_a_step = config.batch_size * config.gradient_accumulation_steps * run.ranks.size
    prompts_in_a_step = completions_in_a_step // rlhf.num_generations
    steps_per_epoch = len(training.dataset) // prompts_in_a_step
    if steps_per_epoch < 1 and not run.is_inference:
        raise TrainingFailure(
            "bad_data",
            f"A step takes {prompts_in_a_step} prompts, but there are only {len(training.dataset)}: lower `batch_size` "
            "or `gradient_accumulation_steps`, or add prompts.",
        )
    total_steps = preparation.total_steps(run, steps_per_epoch)
    seen = training.dataset
    if config.overfit_first_batch or run.is_inference:
        seen = seen.select(range(min(prompts_in_a_step, len(seen))))
    elif run.is_probe:
        seen = probe.longest_rows(seen, config, run.ranks.size, tokenizer)
    memory_plan.choose_checkpointing(run, replaced, base, training.dataset, max_length)
    with preparation.base_weights(run, base) as start:
        network = preparation.load_network(run, start, preparation.highest_id(tokenizer, data.parts))
        # Generation takes long, so each token sends a heartbeat.
        network.register_forward_pre_hook(lambda *_: run.report.alive())
        functions = build_rewards(run, rlhf.rewards, tokenizer, max_length)
        arguments = pipeline.trainer_arguments(run, total_steps) | {
            "num_generations": rlhf.num_generations,
            "max_completion_length": rlhf.max_completion_length,
            "temperature": rlhf.temperature,
            "beta": rlhf.beta,
            "reward_weights": [one.weight for one in rlhf.rewards],
            "steps_per_generation": config.gradient_accumulation_steps,
        }
        if run.is_probe:
            arguments |= probe.probe_generation_args(rlhf)
        if rlhf.beta > 0 and config.lora_r is None:
            # TRL loads the reference model itself, from the same weights as the policy.
            options = start.options | options_of_stored(start.stored_quantization)
            arguments["model_init_kwargs"] = {**options, "use_safetensors": True}
        if config.trainer_options.eval_batch_size is None:  # a multiple of the group size
            groups = max(config.batch_size // rlhf.num_generations, 1)
            arguments["per_device_eval_batch_size"] = groups * rlhf.num_generations
        trainer: RewardTrainerMixin = pipeline.build_trainer(
            GroupTrainer if rlhf.algorithm == "grpo" else LeaveOneOutTrainer,
            run,
            start,
            model=network,
            # RLOO learns almost nothing from advantages that are not normalized.
            args=GRPOConfig(**arguments)
            if rlhf.algorithm == "grpo"
            else RLOOConfig(**arguments, normalize_advantages=True),
            reward_funcs=functions,
            train_dataset=seen,
            eval_dataset=data.evaluated,
            processing_class=tokenizer,
            peft_config=adapter_init.adapter_config(run, network, start.revision),
        )
        fingerprints = [one.identity for one in functions if isinstance(one, RewardScorer)]
        plan_step(trainer, replaced)
        facts = pipeline.report_run_info(
            trainer, base, replaced, data, max_length=max_length, reward_models=fingerprints or None
        )
        if run.is_inference:
            return pipeline.evaluate_weights(trainer)
        pipeline.train_to_end(trainer)
        report_usage(run.report, run.state.reward_usage)
        return pipeline.finish_run(trainer, start, facts)


def build_rewards(
    run: TrainingContext,
    configured: Sequence[Reward],
    tokenizer: Any,
    max_length: int | None,
    alive: Callable[[], None] | None = None,
) -> list[Any]:
    """Create one function for each reward of the configuration, in its order.

    Reward models must accept texts of `max_length` tokens; with None, they give none to longer ones than they accept.
    `alive` is called during long work instead of the heartbeat of the run.
    """
    warn = partial(run.report.message, level="warning")
    alive = alive or run.report.alive
    built_in = iter(rewards.build_reward_functions(configured, tokenizer, alive, warn))
    located = iter(run.job.reward_models)
    hosts = run.job.reward_hosts
    context = CallContext(hosts, take_keys(hosts), alive, warn, lambda: run.stop_requested is not None)

    def build(reward: Reward, name: str) -> Any:
        match reward:
            case ModelReward():
                return RewardScorer(next(located), name, run, max_length)
            case PluginReward():
                return hooks.Reward(reward, name)
            case JudgeReward():
                return Judge(reward, name, context)
            case HttpReward():
                return ScoringService(reward, name, context)
            case _:
                return next(built_in)

    return [build(reward, name) for reward, name in zip(configured, metric_names(configured), strict=True)]
