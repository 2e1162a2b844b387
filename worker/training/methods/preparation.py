"""Steps of every training method up to the loaded model, in the order of use; `pipeline.py` has the rest."""

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar, get_args

import torch
import transformers
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from anneal.contracts.attempt.job import DataSource
from anneal.contracts.training_config.fields import Attention, TrainingConfig
from anneal.contracts.training_config.masked_model import masked_model_warning
from anneal.contracts.training_config.optimizers import OPTIMIZERS
from anneal.contracts.training_config.padding import SEPARATES_TEXTS, is_padding_free
from anneal.contracts.training_config.resolution import (
    LONGEST_SEQUENCE,
    Replacement,
    length_replacement,
    match_stored_quantization,
)
from anneal.contracts.training_config.stored_quantization import stored_quantization_conflicts
from worker.training.checkpointing import saver
from worker.training.context import TrainingContext
from worker.training.data import dataset as data
from worker.training.data.chat_template import ensure_template, set_template
from worker.training.data.preferences import is_conversational
from worker.training.data.reader import RowSource, count_rows
from worker.training.data.remarks import Remark
from worker.training.data.token_cache import TokenCache
from worker.training.data.tokenization import tokenizer_digest
from worker.training.failures import TrainingFailure
from worker.training.loop import probe
from worker.training.loop.evaluation import MAIN
from worker.training.model import base_model, loader
from worker.training.model.attention import VARLEN, batch_texts, kernel_failure, supports_kernel
from worker.training.model.base_model import BaseModelSource
from worker.training.model.checked_weights import check_finite
from worker.training.model.kernels import use_liger
from worker.training.model.tiled_mlp import tile_mlps
from worker.training.overrides import mark_for_sharding
from worker.training.plugins import hooks
from worker.training.plugins.checkpoint_engines import restore_replica
from worker.wire.heartbeat import heartbeat_while_growing, with_heartbeat


class Rows(Protocol):
    """Protocol of data that is ready to train on."""

    @property
    def dataset(self) -> Dataset:
        """Dataset with one row per batch element."""

    @property
    def rows(self) -> int:
        """Number of rows of the file that are in it."""

    @property
    def tokens(self) -> int:
        """Total number of tokens."""

    @property
    def remarks(self) -> list[Remark]:
        """Warnings for the user: rows cut or left out."""

    @property
    def highest_id(self) -> int:
        """Highest token id in the data."""

    @property
    def are_cached(self) -> bool:
        """True if an earlier run made the tokens."""


_LENGTH_MULTIPLE = 64
"""Padded lengths on a GPU are multiples of it."""

_READ = "read"
"""Start of the flag of a rank whose data is tokenized."""

Some = TypeVar("Some", bound=Rows)
TokenizeRows = Callable[[RowSource], Some]
"""Function that prepares rows of a dataset for training."""


@dataclass(frozen=True)
class RunData(Generic[Some]):
    """Data of a run, ready to train and to evaluate on."""

    training: Some
    held_out: Some | None
    """Evaluation data that decisions depend on."""
    extra: Mapping[str, Some] = field(default_factory=dict)
    """Further evaluation sets by name."""

    @property
    def parts(self) -> list[Some]:
        """All of the data."""
        return [one for one in (self.training, self.held_out, *self.extra.values()) if one is not None]

    @property
    def evaluated(self) -> dict[str, Dataset] | None:
        """Rows to evaluate on as `ServiceTrainerMixin` takes them, by the start of the names of their metrics."""
        if self.held_out is None:
            return None
        return {MAIN: self.held_out.dataset, **{f"{MAIN}_{name}": one.dataset for name, one in self.extra.items()}}


class Setup(NamedTuple):
    """Base model, tokenizer and sequence length of a run."""

    base: BaseModelSource
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Maximum sequence length in tokens."""


def prepare_start(run: TrainingContext, replaced: list[Replacement]) -> Setup:
    """Set the seed, verify the checkpoint, locate the base model, load its tokenizer, limit the length.

    No weights are loaded. A maximum sequence length that the model cannot take is added to `replaced`.

    Raises:
        TrainingFailure: with a stable code; `config_error` if the user set a length above the model's limit.
        Stopped: a stop was requested.
    """
    _check_optimizer(run.config)
    transformers.set_seed(run.config.seed)
    if run.ranks.is_first:
        restore_replica(run)
        if (resume := run.resume_from) is not None:
            saver.verify_checkpoint(resume.path, resume.manifest_sha256, run.report.alive)
    run.report.send({"type": "phase", "name": "loading"})
    what = "tokenizer and configuration"
    run.report.send({"type": "progress", "phase": "loading", "done": 0, "total": 2, "message": what})
    base = _find_base(run)
    _match_stored_quantization(run, base, replaced)
    if (warning := masked_model_warning(base.architecture.architectures, run.method)) is not None:
        run.report.message(warning, level="warning")
    tokenizer = hooks.load_tokenizer(run, lambda: _load_tokenizer(run, base))
    base_model.complete_tokenizer(tokenizer)
    template = hooks.chat_template(run, tokenizer)
    if template is not None:
        set_template(tokenizer, template)
    run.raise_if_stopped()
    if run.ranks.size > 1:
        _compare_models(run, base, tokenizer)
    if run.ranks.is_first:
        hooks.write_source_rows(run)
    shared = run.ranks.broadcast_value(run.job)  # with the checkpoint and the rows that rank 0 has put elsewhere
    if run.job.shares_folder:
        run.job = shared
    return Setup(base, tokenizer, _max_sequence_length(run, base, tokenizer, replaced))


def _load_tokenizer(run: TrainingContext, base: BaseModelSource) -> PreTrainedTokenizerBase:
    named = run.job.tokenizer
    return base_model.load_tokenizer(base) if named is None else base_model.load_tokenizer_of(named, base, run.job)


def _find_base(run: TrainingContext) -> BaseModelSource:
    """Locate the base model; rank 0 resolves a branch of the hub to a commit, for all ranks."""
    is_known = run.ranks.is_first or base_model.is_folder_of_weights(run.job.base_model)
    base = base_model.find_base(run.job, run.config) if is_known else None
    commit = run.ranks.broadcast_value(None if base is None else base.revision)
    return base or base_model.find_base(run.job, run.config, commit)


def _match_stored_quantization(run: TrainingContext, base: BaseModelSource, replaced: list[Replacement]) -> None:
    """Set the quantization that the base's files have in the configuration in effect.

    Raises:
        TrainingFailure: `config_error`: it contradicts the configuration, or cannot be trained.
    """
    stored = base.stored_quantization
    if stored is None or run.config.trainer_options.model_factory is not None:
        return
    problems = stored_quantization_conflicts(stored, run.job.config, trains=not run.is_inference)
    if base.adapter is not None:  # merged into the dequantized weights
        if not stored.is_supported:
            raise TrainingFailure("config_error", problems[0].message)
        return
    if problems:
        raise TrainingFailure("config_error", " ".join(problem.message for problem in problems))
    run.config, as_stored = match_stored_quantization(run.config, stored)
    replaced += as_stored


def _compare_models(run: TrainingContext, base: BaseModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that every rank has found the same models.

    Raises:
        TrainingFailure: `config_error` that names the ranks and what each has found.
    """
    rewards = [base_model.find_other_model(run.job, one, "reward model").identity for one in run.job.reward_models]
    digests = {
        "base models": base.identity,
        "tokenizers": tokenizer_digest(tokenizer, is_dated=False),
        "reward models": ", ".join(rewards),
        "teachers": teacher_identity(run) or "",
    }
    run.ranks.check_same(digests, "Give every host the same files of these, and resume the run.")


def teacher_identity(run: TrainingContext) -> str | None:
    """Return the fingerprint of the teacher's weights; None if the run has no teacher."""
    teacher = run.job.teacher
    return None if teacher is None else base_model.find_other_model(run.job, teacher, "teacher").identity


def _check_optimizer(config: TrainingConfig) -> None:
    package = OPTIMIZERS[config.optim].package
    if package is None or config.trainer_options.optimizer is not None:
        return
    if importlib.util.find_spec(package) is None:
        remedy = "use another optimizer" if config.weights_dtype == "float32" else "leave `weights_dtype` out"
        raise TrainingFailure(
            "config_error",
            f"`optim` is `{config.optim}`, whose package is not installed on this worker: run `pip install {package}` "
            f"there, or {remedy}.",
        )


def _max_sequence_length(
    run: TrainingContext, base: BaseModelSource, tokenizer: PreTrainedTokenizerBase, replaced: list[Replacement]
) -> int:
    """Return the maximum sequence length in tokens, and store it in the configuration in effect.

    It is the configured one, limited by what the model can take.
    """
    limit = _position_limit(base, tokenizer)
    requested = run.config.max_seq_length
    if requested is None:
        run.config = run.config.model_copy(update={"max_seq_length": limit})
        return limit
    if requested <= limit:
        return requested
    if "max_seq_length" in run.user_set_fields:
        raise TrainingFailure(
            "config_error", f"`max_seq_length` is {requested}, but this model takes at most {limit} tokens."
        )
    replace_default(run, replaced, length_replacement(run.config, limit))
    return limit


def _position_limit(base: BaseModelSource, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that a model takes at most."""
    own = getattr(base.architecture.get_text_config(), "max_position_embeddings", None)
    return int(own or min(tokenizer.model_max_length, LONGEST_SEQUENCE))


def replace_default(run: TrainingContext, replaced: list[Replacement], replacement: Replacement) -> None:
    """Replace a default that cannot be used with another value, and record the replacement to report it."""
    replaced.append(replacement)
    run.config = run.config.model_copy(update={replacement.field: replacement.used})


def must_disable_dropout(run: TrainingContext, replaced: list[Replacement]) -> bool:
    """Return True if all dropout must be disabled: pairs are compared without it unless the user set some."""
    if run.config.lora_r is None:
        return True
    if "lora_dropout" not in run.user_set_fields and run.config.lora_dropout > 0:
        why = "Dropout would add noise to the comparison of two answers."
        rate = run.config.lora_dropout
        replace_default(run, replaced, Replacement(field="lora_dropout", requested=rate, used=0.0, reason=why))
    return run.config.lora_dropout == 0


def resolve_padding(run: TrainingContext) -> bool:
    """Return True if the rows of a micro-batch are concatenated, and store it in the configuration in effect.

    Call with the model loaded, whose attention it depends on. Packed rows are concatenated anyway.

    Raises:
        TrainingFailure: `config_error`: the user wants it, and the attention of this model cannot separate the rows.
    """
    config = run.config
    if config.packing:
        return False
    is_free = is_padding_free(config, config.attn_implementation)
    if is_free and config.attn_implementation not in SEPARATES_TEXTS:
        raise TrainingFailure(
            "config_error",
            "`extra.padding_free` is true, but the attention of this model cannot separate the rows of a micro-batch: "
            "leave it out.",
        )
    run.config = config.model_copy(update={"extra": {**config.extra, "padding_free": is_free}})
    return is_free


def padding_multiple(run: TrainingContext, setup: Setup) -> int | None:
    """Return a number of which padded lengths are multiples on a GPU, where each new length costs the kernels a plan.

    None: any length. The noise of NEFTune depends on the padded length, and positions may not exceed the model's limit.
    """
    if run.machine.kind != "cuda" or run.config.neftune_noise_alpha is not None:
        return None
    longest = math.ceil(setup.max_length / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    return _LENGTH_MULTIPLE if longest <= _position_limit(setup.base, setup.tokenizer) else None


def chat_template(run: TrainingContext, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set a plain chat template if the tokenizer has none, and report it."""
    if ensure_template(tokenizer):
        run.report.message(
            "The tokenizer has no chat template; a plain one (<|user|>, <|assistant|>) is used and saved with the "
            "output.",
            level="warning",
        )


def read_data(run: TrainingContext, tokenize_rows: TokenizeRows[Some], cache: TokenCache) -> RunData[Some]:
    """Prepare the training data and all evaluation data, before any weights are loaded.

    A run that only evaluates has one dataset, which is returned as training and as held-out data.

    Progress is reported, and a stop request interrupts it.

    Raises:
        TrainingFailure: `bad_data` that names the rows.
    """

    def read_rows(file: DataSource, chosen: list[int] | None, purpose: str) -> Some:
        progress = partial(run.report_progress, "tokenizing")
        return tokenize_rows(RowSource(str(file.path), file.format, file.sha256, chosen, purpose, progress, cache))

    def first_rows(file: DataSource) -> list[int] | None:
        most = run.config.max_eval_rows
        return None if most is None else list(range(count_rows(str(file.path))))[:most]

    run.report.send({"type": "phase", "name": "tokenizing"})
    config, source, other = run.config, run.dataset, run.job.eval_dataset
    try:
        if run.is_inference:
            evaluated = read_rows(source, first_rows(source), "evaluation")
            _finish_reading(run, {"evaluation": evaluated})
            return RunData(evaluated, evaluated)
        chosen = held = None
        if config.eval_split > 0:
            chosen, held = data.split_rows(count_rows(str(source.path)), config.eval_split, config.seed)
        training = read_rows(source, chosen, "training")
        held_out = None
        if held:
            held_out = read_rows(source, held[: config.max_eval_rows], "evaluation")
        elif other is not None:
            held_out = read_rows(other, first_rows(other), "evaluation")
        extra = {
            name: read_rows(file, first_rows(file), f"`{name}` evaluation")
            for name, file in run.job.extra_eval_datasets.items()
        }
    except FileNotFoundError as error:
        raise TrainingFailure("bad_data", "The dataset's file no longer exists.") from error
    named = {f"evaluation.{name}": one for name, one in extra.items()}
    _finish_reading(run, {"training": training, "evaluation": held_out, **named})
    return RunData(training, held_out, extra)


def _finish_reading(run: TrainingContext, read: Mapping[str, Rows | None]) -> None:
    """Delete the rows that a data source has written, and report the remarks about each data."""
    ranks = run.ranks
    ranks.set_flag(f"{_READ} {ranks.rank}")
    if ranks.is_first and run.config.trainer_options.data_source is not None:
        for rank in range(1, ranks.size):
            ranks.wait_for_flag(f"{_READ} {rank}")
        hooks.delete_source_rows(run)
    for name, rows in read.items():
        for remark in rows.remarks if rows else []:
            run.report.message(remark["reason"], level="warning")
            run.report.send({"type": "skipped_rows", "data": name, **remark})


def training_rows(run: TrainingContext, training: Rows) -> Dataset:
    """Return the rows to train on: all, the rows of one step only, or in a probe the longest rows."""
    if run.config.overfit_first_batch or run.is_inference:  # a trainer needs some, even if it never trains
        return data.first_batch(training.dataset, run.config, run.ranks.data_parallel_size)
    if run.is_probe:
        return probe.longest_rows(training.dataset, run.config, run.ranks.data_parallel_size)
    return training.dataset


def chat_template_if_needed(run: TrainingContext, tokenizer: PreTrainedTokenizerBase) -> None:
    """Call `chat_template` if the rows of a dataset are messages."""
    if any(source.format == "chat" or is_conversational(str(source.path)) for source in run.job.datasets):
        chat_template(run, tokenizer)


def cache_messages(run: TrainingContext, some: Iterable[Rows]) -> dict[str, str]:
    """Report whether an earlier run made all of the tokens, and return the run info about it."""
    if not all(one.are_cached for one in some):
        return {"tokenized": "now"}
    run.report.message("An earlier run tokenized this data with the same settings: its tokens are reused.")
    return {"tokenized": "cached"}


def token_cache(run: TrainingContext) -> TokenCache:
    """Open the cache of tokenized data that the job names, or one that keeps nothing.

    What no earlier run has tokenized is tokenized by the first rank, and the others then find its tokens.
    """
    ranks = run.ranks
    first = 0 if run.job.shares_folder else ranks.first_on_host
    wait = None if ranks.rank == first else partial(ranks.wait_for_flag, f"{_READ} {first}")

    def alive() -> None:
        run.raise_if_stopped()
        run.report.alive()

    if run.config.trainer_options.tokenizer is not None:
        return TokenCache()  # what the tokens of a plugin depend on is not known
    return TokenCache.of_job(
        run.job, warn=lambda text: run.report.message(text, level="warning"), alive=alive, wait_for_maker=wait
    )


def total_steps(run: TrainingContext, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole run, as the trainer counts them; for a probe, its own number."""
    run.steps_per_epoch = steps_per_epoch
    if run.is_inference:
        return 1  # no trainer accepts 0, and it is never asked to train
    return probe.STEPS if run.is_probe else configured_steps(run)


def configured_steps(run: TrainingContext) -> int:
    """Return the optimizer steps of the whole run, even for a probe; call after `total_steps`."""
    steps = run.config.max_steps or math.ceil(run.config.epochs * run.steps_per_epoch)
    return max(steps, run.config.min_steps or 0)


@contextmanager
def base_weights(run: TrainingContext, base: BaseModelSource) -> Iterator[BaseModelSource]:
    """Provide the weights to start from while the block runs; an adapter is merged into its base."""
    alive = run.report.alive
    # transformers shows a progress bar when it loads or writes many weights; each item sends a heartbeat.
    transformers.utils.logging.set_tqdm_hook(
        lambda bar, what, options: bar(*(with_heartbeat(things, alive) for things in what), **options)
    )
    run.report.send({"type": "phase", "name": "loading"})
    dtype = loader.weights_dtype(run.config, run.machine)
    # Each rank merges for itself, so that none has to keep the weights for the others.
    name = "base_model" if run.ranks.is_first else f"base_model.{run.ranks.rank}"
    with base_model.merged_base(base, run.folder / name, dtype, alive) as start:
        yield start


def load_network(
    run: TrainingContext, start: BaseModelSource, highest_id: int, head: loader.Head = "causal"
) -> PreTrainedModel:
    """Load the model onto its device, and check that it has an embedding for every token of the data."""
    if start.from_scratch and run.resume_from is None:
        run.report.message(
            f"The folder {run.job.base_model.name} contains no weights: they are initialized randomly with "
            f"seed {run.config.seed}, and the model is trained from scratch."
        )
    with heartbeat_while_growing(run.report.alive, start.folder):
        network = hooks.load_model(
            run, lambda: loader.load_model(start, run.config, run.machine, head, in_host_memory=run.is_sharded)
        )
        if run.config.trainer_options.model_factory is not None:
            check_finite(network, "The model of `extra.model_factory`")
    if run.is_sharded:
        mark_for_sharding(network)
    used = network.config._attn_implementation
    if used in get_args(Attention):  # a model of a plugin may have its own
        run.config = run.config.model_copy(update={"attn_implementation": used})
    if used == VARLEN and run.machine.kind == "cuda":
        _check_attention_kernels(run, network)
    if not run.config.torch_compile:  # the compiler fuses the same operations, and cannot trace those of Liger
        use_liger(network, run.machine)
    if run.config.trainer_options.tiled_mlp:
        tile_mlps(network)
    loader.check_vocabulary(network, highest_id)
    run.raise_if_stopped()
    return network


def _check_attention_kernels(run: TrainingContext, network: PreTrainedModel) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if not supports_kernel(device):
        return
    if (why := kernel_failure(device)) is not None:
        run.report.message(
            f"Torch's attention kernel for several texts is not used on this GPU: {why}. Each text is a call of "
            "sdpa, which is slower. Install flash-attn or another version of torch to avoid that.",
            level="warning",
        )
    elif (why := batch_texts(device, network.config, run.config.max_seq_length or 0)) is not None:
        run.report.message(
            f"cuDNN's attention kernel for texts of equal length is not used on this GPU: {why}. That for texts of "
            "several lengths is, which is slower. Install another version of torch to avoid that.",
            level="warning",
        )


def highest_id(tokenizer: PreTrainedTokenizerBase, some: Iterable[Rows]) -> int:
    """Return the highest token id that the model will receive."""
    return max([int(tokenizer.pad_token_id or 0), *(one.highest_id for one in some)])
