"""Names inside libraries that this trainer overrides or uses, though they are no part of their interface.

Any version of a library may change them. `tests/worker/training/test_overrides.py` names those that the installed
version lacks, or has with other parameters. A class here overrides the private methods of one library and does only
what belongs to the override; longer work is done by a public method of the trainer, which gets the library's own method
as `original`.
"""

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
import trl.trainer.utils as trl_utils
from transformers import Trainer

_TRANSFORMERS = "transformers 5.23.0"
_TRL = "trl 1.16.0"
_SACREBLEU = "sacrebleu 2.6.0"

# Methods of trainers


class TrainerOverrides(Trainer):  # type: ignore[misc]
    """Private methods of the trainer of transformers, in the order in which a resumed run calls them first."""

    CHECKED_WITH: ClassVar[str] = _TRANSFORMERS

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.load_checkpoint_weights(
            resume_from_checkpoint, partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self.check_loaded_keys(load_result.missing_keys, load_result.unexpected_keys)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> Any:
        place = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        # The checkpoint contains its own intervals; those of this run's configuration take precedence.
        self.state.compute_steps(self.args, max_steps)
        return place

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.load_optimizer_and_scheduler(checkpoint, partial(super()._load_optimizer_and_scheduler, checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self.load_rng_states(checkpoint, partial(super()._load_rng_state, checkpoint))

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return nullcontext()  # each micro-batch is reduced, so that no device holds the gradients of all weights

    def _clip_grad_norm(self, model: Any) -> Any:
        return None if self.skips_step else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # The last point before the optimizer: a step that would corrupt the weights is never taken.
        if self.skips_step:
            self.skip_optimizer_step()
            return None
        return self.close_step(super()._get_grad_norm(model, grad_norm=grad_norm))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_checkpoint()

    def _save_rng_state(self, output_dir: str) -> None:
        self.save_rng_states(output_dir, partial(super()._save_rng_state, output_dir))


class SupervisedOverrides(Trainer):  # type: ignore[misc]
    """Private method of the trainer of transformers, for supervised fine-tuning."""

    CHECKED_WITH: ClassVar[str] = _TRANSFORMERS

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if self.sequences is not None and not self._loss_shifts_labels:
            # Of models whose loss transformers does not know by name, such as GPT-2, it counts the first label of each
            # row too, and divides the loss by that.
            batch_samples = [{**batch, "shift_labels": batch["labels"]} for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)


class ReferenceOverrides(Trainer):  # type: ignore[misc]
    """Private methods of TRL's trainers with a reference model, `DPOTrainer` and `KTOTrainer`."""

    CHECKED_WITH: ClassVar[str] = _TRL

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return dataset  # its rows are tokenized

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        original = partial(super()._precompute_ref_logps, dataset, name, batch_size)
        return self.compute_reference(dataset, name, batch_size, original)


class ReferenceFreeOverrides(Trainer):  # type: ignore[misc]
    """Private methods of TRL's `DPOTrainer`, for losses of pairs without a reference model."""

    CHECKED_WITH: ClassVar[str] = _TRL

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return dataset  # its rows are tokenized

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        return dataset  # there is no reference model

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        loss = self.loss_of_pairs(model, inputs)
        return (loss, None) if return_outputs else loss


class RatedAnswerOverrides(Trainer):  # type: ignore[misc]
    """Private method of TRL's `KTOTrainer`."""

    CHECKED_WITH: ClassVar[str] = _TRL

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        # The KL term is the mean over the devices of the means of their rows, which may be of different numbers.
        logps = super()._compute_kl_logps(model, batch)
        return logps if logps is None or not self.model.training else logps * self.row_share


class RewardOverrides(Trainer):  # type: ignore[misc]
    """Private methods of TRL's `GRPOTrainer` and `RLOOTrainer`."""

    CHECKED_WITH: ClassVar[str] = _TRL

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        # Each epoch draws its order from the sampler's own generator, whose state is not in checkpoints. A resumed run
        # therefore repeats the draws of the finished epochs.
        if self.saved_step > 0:
            prompts_in_a_step = self.args.generation_batch_size // self.num_generations
            for _ in range(self.saved_step // (sampler.num_samples // prompts_in_a_step)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        return self.generate_completions(partial(super()._generate_single_turn, *arguments, **options))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if not self.model.training:
            self.own_metrics.update_completions(prompts, completions, rewards)
        return self.exclude_unscored(rewards)


# Functions and attributes


def avoid_weight_hash(trainer_module: ModuleType) -> None:
    """Let a module of TRL name its file of reference log-probabilities by a random number.

    TRL names it by a hash of the weights, which takes minutes for gigabytes. The folder belongs to this process alone,
    so a random name is enough.
    """
    trainer_module.hash_module = lambda _module: uuid.uuid4().hex  # type: ignore[attr-defined]


def replace_log_probabilities(function: type) -> None:
    """Let the heads that TRL adds to models compute log-probabilities with `function.apply`."""
    trl_utils._ChunkedLogProbFunction = function


def mark_for_sharding(network: Any) -> None:
    """Make the trainer of transformers leave a model where it is, and not wrap it for replicas."""
    network._is_distributed_loading_by_transformers = True


def keep_published_generation_config(model: Any) -> None:
    """Let a generation configuration that contradicts itself be saved, as one of a published model that is unchanged.

    transformers refuses it once TRL and its own trainer have set the tokenizer's special tokens in it.
    """
    config = getattr(model, "generation_config", None)
    if config is not None:
        config._original_object_hash = hash(config)


def drop_weight_conversions(model: Any, is_dropped: Callable[[Any], bool]) -> None:
    """Let a model be saved without the inverse of some conversions that read its stored weights."""
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [each for each in conversions if not is_dropped(each)] or None


class InternalName(NamedTuple):
    """Name that `worker/training` reads, calls or replaces, other than by an override above."""

    owner: str
    """Module, or module and class, as in `transformers:Trainer`."""
    name: str
    parameters: str | None = None
    """Names of the parameters, for a function that is called or replaced; None: an attribute."""
    checked_with: str = _TRANSFORMERS


_TRL_TRAINERS = ("sft", "dpo", "kto", "reward", "grpo", "rloo")

INTERNAL_NAMES = (
    InternalName("transformers.trainer", "_train_batch_size"),
    InternalName("transformers.trainer", "_loss_shifts_labels"),
    InternalName("transformers:Trainer", "_prepare_inputs", "self, inputs"),
    InternalName("transformers:Trainer", "_save_scaler", "self, output_dir"),
    InternalName("transformers:Trainer", "set_initial_training_values", "self, args, dataloader"),
    InternalName("transformers.models.auto.auto_factory", "_model_mapping"),
    InternalName("transformers.configuration_utils", "_attn_implementation"),
    InternalName("transformers.configuration_utils", "_name_or_path"),
    InternalName("transformers.core_model_loading", "_weight_conversions"),
    InternalName("transformers.core_model_loading:WeightTransform", "materialize_tensors", "self"),
    InternalName("transformers.distributed.mixin", "_is_distributed_loading_by_transformers"),
    InternalName("transformers.integrations.moe", "_is_expert_parallel"),
    InternalName("transformers.generation.configuration_utils", "_original_object_hash"),
    InternalName(
        "transformers.models.mixtral.modeling_mixtral",
        "load_balancing_loss_func",
        "gate_logits, num_experts, top_k, attention_mask",
    ),
    InternalName("transformers.modeling_utils", "safe_save_file"),
    InternalName("peft.peft_model", "safe_save_file", checked_with="peft 0.21.2"),
    InternalName("peft.utils.loftq_utils:_SafetensorLoader", "__init__", "self, peft_model, model_path", "peft 0.21.2"),
    InternalName("accelerate.data_loader", "_drop_last", checked_with="accelerate 1.15.0"),
    InternalName("accelerate.state", "_shared_state", checked_with="accelerate 1.15.0"),
    InternalName("datasets.arrow_dataset", "_fingerprint", checked_with="datasets 5.2.0"),
    *(
        InternalName(f"trl.trainer.{method}_trainer", name, checked_with=_TRL)
        for method in _TRL_TRAINERS
        for name in ("_metrics", "_total_train_tokens")
    ),
    *(
        InternalName(f"trl.trainer.{method}_trainer", name, checked_with=_TRL)
        for method in ("grpo", "rloo")
        for name in ("_step", "_logs")
    ),
    InternalName("trl.trainer.utils", "hash_module", "module", _TRL),
    InternalName("trl.trainer.dpo_trainer", "hash_module", checked_with=_TRL),
    InternalName("trl.trainer.kto_trainer", "hash_module", checked_with=_TRL),
    InternalName("trl.trainer.utils", "_ChunkedLogProbFunction", checked_with=_TRL),
    *(
        InternalName("trl.kernels.chunked_logprob", name, checked_with=_TRL)
        for name in ("_BLOCK_SIZE", "_forward_kernel", "_backward_kernel", "_forward_tile", "_backward_tile")
    ),
    InternalName("trl.kernels.chunked_logprob", "_use_triton", "device", _TRL),
    # `corpus_score` calls these two, with all texts in memory.
    InternalName(
        "sacrebleu.metrics.base:Metric", "_extract_corpus_statistics", "self, hypotheses, references", _SACREBLEU
    ),
    InternalName("sacrebleu.metrics.base:Metric", "_aggregate_and_compute", "self, stats", _SACREBLEU),
)
