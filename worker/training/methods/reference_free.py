"""Trainer on preference pairs whose loss needs no reference model; `orpo` and `simpo` each add their loss."""

from typing import Any, ClassVar, NamedTuple

import torch
from trl import DPOTrainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods.pairs import PairMixin, train_on_pairs
from worker.training.overrides import ReferenceFreeOverrides


class PairScores(NamedTuple):
    """Log-probabilities of the pairs of a micro-batch under the model that is trained."""

    chosen: torch.Tensor
    """Mean over the tokens of each better answer."""
    rejected: torch.Tensor
    """Mean over the tokens of each worse answer."""
    chosen_texts: torch.Tensor
    """Each token of the better answers; and of their prompts, if the trainer learns prompts."""


class ReferenceFreeTrainer(PairMixin, ReferenceFreeOverrides, ServiceTrainerMixin, DPOTrainer):  # type: ignore[misc]
    """A trainer on tokenized pairs, with the data and the output layer of TRL's `DPOTrainer`."""

    LEARNS_PROMPTS: ClassVar[bool] = False
    """True if `pair_loss` needs the log-probabilities of the prompts, before the better answers."""

    def pair_loss(self, scores: PairScores) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        raise NotImplementedError

    def mean_of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of values of the tokens of a micro-batch, in training of the micro-batches of all devices.

        What a device returns is its part: the loss of a step is the mean over the devices, each by its number of rows.
        """
        ranks = self.run.ranks
        if not self.model.training or ranks.size == 1:
            return values.mean()
        is_filler = self.row_share == 0
        tokens = sum(ranks.gather_values(0 if is_filler else values.numel()))
        return values.sum() * (0.0 if is_filler else ranks.size / (tokens * self.row_share))

    def loss_of_pairs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a micro-batch, and record its metrics."""
        answers = inputs["completion_mask"]
        pairs = len(answers) // 2
        scored = answers
        if self.LEARNS_PROMPTS:
            scored = torch.cat([inputs["attention_mask"][:pairs], answers[pairs:]])
        passed = {name: value for name, value in inputs.items() if name != "completion_mask"}
        if self.aux_loss_enabled:
            passed["output_router_logits"] = True
        labels = inputs["input_ids"].masked_fill(scored == 0, -100)
        outputs = model(**passed, labels=labels, use_cache=False, fused_lm_head=True)
        # The first token of a sequence is never predicted.
        answers, scored = answers[:, 1:].bool(), scored[:, 1:].bool()
        means = (outputs.log_probs * answers).sum(dim=1) / answers.sum(dim=1).clamp(min=1)
        chosen, rejected = means.chunk(2)
        scores = PairScores(chosen, rejected, outputs.log_probs[:pairs][scored[:pairs]])
        loss = self.pair_loss(scores)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        with torch.no_grad():
            self._record_metrics(scores, outputs, answers)
        if self.model.training:
            tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum()
            self._total_train_tokens += int(tokens)
        return loss

    def _record_metrics(self, scores: PairScores, outputs: Any, answers: torch.Tensor) -> None:
        rewards = self.beta * scores.chosen, self.beta * scores.rejected
        of_pairs = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).float(),
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": scores.chosen,
            "logps/rejected": scores.rejected,
        }
        better = answers[: len(answers) // 2]
        sums = torch.stack(
            [
                (outputs.entropy * answers).sum(),
                answers.sum(),
                (outputs.is_top1[: len(better)] * better).sum(),
                better.sum(),
            ]
        )
        means = self.accelerator.gather_for_metrics(torch.stack(list(of_pairs.values()), dim=1)).mean(dim=0)
        entropy, tokens, correct, targets = (
            self.accelerator.gather_for_metrics(sums.float().unsqueeze(0)).sum(dim=0).tolist()
        )
        measured = dict(zip(of_pairs, means.tolist(), strict=True))
        measured |= {"entropy": entropy / max(tokens, 1), "mean_token_accuracy": correct / max(targets, 1)}
        for name, value in measured.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)


def train_without_reference(
    run: TrainingContext, replaced: list[Replacement], make: type[ReferenceFreeTrainer], beta: float
) -> TrainingResult:
    """Train one run on preference pairs; result and errors are those of `pipeline.train_on_tokens`."""
    # Log-probabilities that are precomputed let TRL load no reference model; the rows are left as they are.
    return train_on_pairs(run, replaced, make, lambda: {"beta": beta, "precompute_ref_log_probs": True})
