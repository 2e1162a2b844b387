"""Generalized knowledge distillation (`gkd`): the next-token probabilities of a teacher model are learned.

A part of the micro-batches, `lmbda`, has answers that the model generates itself, so that it learns from the teacher
where it goes itself. Paper: https://arxiv.org/abs/2306.13649.
"""

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from trl import SFTConfig, SFTTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.trainer.utils import pad

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset
from worker.training.data.dataset import Tokens
from worker.training.data.rank_share import IGNORED
from worker.training.data.reader import RowSource
from worker.training.failures import TrainingFailure
from worker.training.loop.sampling import end_tokens, evaluation_mode
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation
from worker.training.model.teacher import load_teacher, logit_options


class DivergenceTrainer(SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer` with the loss of TRL's experimental `GKDTrainer`: the divergence from a teacher.

    TRL's kernel computes it of the hidden states of both models, without the logits of either.
    """

    def __init__(self, teacher: Any, beta: float, **options: Any) -> None:
        super().__init__(**options)
        self.teacher = teacher
        self.aux_loss_enabled = False  # the teacher is all that is learned
        # The loss divides by the tokens of the step itself, whatever the model's own loss takes.
        self.model_accepts_loss_kwargs = True
        _add_divergence(self.accelerator.unwrap_model(self.model), teacher, beta)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        mode = "train" if self.model.training else "eval"
        learned = inputs["labels"][:, 1:] != IGNORED
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            states = self.teacher.base_model(**tokens, use_cache=False).last_hidden_state[:, :-1][learned]
        divergence, entropy = model(**tokens, labels=inputs["labels"], teacher_states=states)
        items = learned.sum() if num_items_in_batch is None else num_items_in_batch
        loss = divergence.sum() / torch.as_tensor(items).clamp(min=1)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the tokens are those of all devices, the gradients a mean
        counts = (entropy.detach().sum(), learned.sum(), inputs["attention_mask"].sum())
        sums = torch.stack([count.float() for count in counts]).unsqueeze(0)
        summed, count, passed = self.accelerator.gather_for_metrics(sums).sum(dim=0).tolist()
        self._metrics[mode]["entropy"].append(summed / max(count, 1))
        if mode == "train":
            self._total_train_tokens += int(passed)
        return (loss, None) if return_outputs else loss


def _add_divergence(model: Any, teacher: Any, beta: float) -> None:
    """Let a model compute the divergence of the tokens to learn, if it gets the teacher's hidden states of them."""
    network = model.get_base_model() if hasattr(model, "get_base_model") else model
    original, theirs, ours = network.forward, logit_options(teacher), logit_options(network)
    # Models of a family may have more rows of embeddings than tokens, and not all the same number.
    rows = min(one.get_output_embeddings().weight.shape[0] for one in (network, teacher))

    @functools.wraps(type(network).forward)  # whose parameters `generate` reads
    def forward(self: Any, *args: Any, teacher_states: Any = None, labels: Any = None, **options: Any) -> Any:
        if teacher_states is None:
            return original(*args, **({} if labels is None else {"labels": labels}), **options)
        states = self.base_model(*args, **options, use_cache=False).last_hidden_state[:, :-1]
        head, their_head = self.get_output_embeddings(), teacher.get_output_embeddings()
        return ChunkedDivergenceFunction.apply(
            states[labels[:, 1:] != IGNORED],
            head.weight[:rows],
            None if head.bias is None else head.bias[:rows],
            teacher_states,
            their_head.weight[:rows],
            None if their_head.bias is None else their_head.bias[:rows],
            beta,
            1.0,
            ours.scale,
            ours.softcap,
            theirs.scale,
            theirs.softcap,
        )

    network.forward = MethodType(forward, network)


class DistillationTrainer(ServiceTrainerMixin, DivergenceTrainer):
    """A trainer on tokenized rows, whose answers may be replaced by generated ones before each step."""

    MEASURES: ClassVar[Mapping[str, str]] = {"entropy": "entropy", "completions/mean_length": "completion_length"}
    NOT_COUNTED: ClassVar[str] = "the teacher's forward passes, and generating answers"

    def __init__(self, run: TrainingContext, **options: Any) -> None:
        self.options = run.config.gkd
        max_length = run.config.max_seq_length or 0
        if run.job.teacher is None:
            raise TrainingFailure(
                "config_error", "`gkd.teacher` must be set: the model whose probabilities are learned."
            )
        teacher = load_teacher(run, run.job.teacher, options["processing_class"], max_length)
        super().__init__(run, teacher=teacher, beta=self.options.beta, **options)
        student = self.accelerator.unwrap_model(self.model)
        network = student.get_base_model() if hasattr(student, "get_base_model") else student
        # Generating takes long, so each token sends a heartbeat, as with the teacher.
        network.register_forward_pre_hook(lambda *_: run.report.alive())
        self._pending: list[Any] = []
        """Micro-batches of the next step, before answers have been generated for it."""
        self._items: int | None = None
        """Tokens to learn of the current step on all devices; None: those of the data."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._pending, self._items = batches, None
        return batches, items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        # Not with the batches: a resumed run restores its random numbers after it has read these.
        pending, self._pending = self._pending, []
        if pending and not self.skips_step:
            written = [self._write_answers(batch) for batch in pending]
            learned = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in pending)
            every = self.run.ranks.gather_values((any(written), learned))
            if any(was_written for was_written, _ in every):
                self._items = sum(tokens for _, tokens in every)
        return super().training_step(model, inputs, num_items_in_batch if self._items is None else self._items)

    def _write_answers(self, batch: Any) -> bool:
        """Replace the answers of a micro-batch by generated ones, if it is its turn; return True if it was."""
        is_own = random.random() < self.options.lmbda
        if not (is_own or self.options.seq_kd) or not self.rows_of(batch):
            return False
        answers = batch["labels"] != IGNORED
        prompts = [
            ids[is_token & ~is_answer]
            for ids, is_token, is_answer in zip(
                batch["input_ids"], batch["attention_mask"].bool(), answers, strict=True
            )
        ]
        writer = self.accelerator.unwrap_model(self.model) if is_own else self.teacher
        # The teacher is loaded in the data type that it computes in.
        autocast = self.accelerator.autocast() if is_own else nullcontext()
        with evaluation_mode(writer), torch.no_grad(), autocast:
            texts = self._generate_answers(writer, prompts)
        self._metrics["train"]["completions/mean_length"].append(sum(map(len, texts)) / len(texts))
        written = self.data_collator(
            [
                {"input_ids": [*prompt.tolist(), *text], "labels": [IGNORED] * len(prompt) + text, "rows": []}
                for prompt, text in zip(prompts, texts, strict=True)
            ]
        )
        batch.update({name: written[name] for name in ("input_ids", "attention_mask", "labels")})
        return True

    def _generate_answers(self, writer: Any, prompts: list[torch.Tensor]) -> list[list[int]]:
        """Return the tokens that a model writes after each prompt, up to the one that ends a text."""
        ends, filler = end_tokens(writer, self.processing_class), int(self.processing_class.pad_token_id)
        device = self.args.device
        ids = pad([prompt.to(device) for prompt in prompts], padding_value=filler, padding_side="left")
        mask = pad([torch.ones_like(prompt, device=device) for prompt in prompts], padding_side="left")
        # A learned token remains of each row, so at least one fits behind the longest prompt.
        room = (self.run.config.max_seq_length or 0) - ids.shape[1]
        options = GenerationConfig(
            max_new_tokens=min(self.options.max_completion_length, room),
            do_sample=True,
            temperature=self.options.temperature,
            # Without effect: a value that is not set is that of the model's published configuration.
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            typical_p=1.0,
            epsilon_cutoff=0.0,
            eta_cutoff=0.0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            use_cache=True,
            eos_token_id=ends,
            pad_token_id=filler,
        )
        written = writer.generate(input_ids=ids, attention_mask=mask, generation_config=options)
        return [_up_to_end(text, set(ends)) for text in written[:, ids.shape[1] :].tolist()]

    def eval_terms(self, inputs: Any) -> int:
        return int((inputs["labels"][:, 1:] != IGNORED).sum())

    def update_own_metrics(self, model: Any, inputs: Any) -> None:
        batch = self._prepare_inputs(inputs)
        tokens = {name: batch[name] for name in ("input_ids", "attention_mask")}
        self.own_metrics.update(model(**tokens, use_cache=False).logits, batch["labels"])


def _up_to_end(text: list[int], ends: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(text) if token in ends), len(text) - 1)
    return text[: end + 1]


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on the probabilities of its teacher; result and errors are those of `pipeline.train_on_tokens`."""
    setup = preparation.prepare_start(run, replaced)
    preparation.chat_template_if_needed(run, setup.tokenizer)
    max_length = setup.max_length
    # Only the completions are learned, of a chat its last answer: what a model could have generated.
    config = run.config.model_copy(update={"loss_on": "completion"})

    def tokenize_rows(rows: RowSource) -> Tokens:
        return dataset.tokenize_file(
            rows.path, rows.format, setup.tokenizer, config, max_length=max_length, chosen=rows.chosen,
            purpose=rows.purpose, progress=rows.progress, sha256=rows.sha256, cache=rows.cache,
        )  # fmt: skip

    def arguments(shared: dict[str, Any]) -> SFTConfig:
        return SFTConfig(
            **shared,
            max_length=max_length,
            pad_to_multiple_of=preparation.padding_multiple(run, setup),
            dataset_kwargs={"skip_prepare_dataset": True},
        )

    return pipeline.train_on_tokens(run, replaced, setup, tokenize_rows, DistillationTrainer, arguments)
