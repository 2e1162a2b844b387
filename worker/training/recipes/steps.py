"""The steps of every recipe up to the loaded model, in the order in which it takes them; `course` has the rest."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import transformers
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.runs.config import Replacement
from worker.training import base, checkpoints, data, measuring, model, planning, plugins
from worker.training.base import Base
from worker.training.chat import ensure_template
from worker.training.failures import TrainingFailure
from worker.training.pairs import Source, converse
from worker.training.pulse import each, while_growing
from worker.training.rows import count_rows
from worker.training.run import Run
from worker.training.token_cache import TokenCache

Purpose = Literal["training", "evaluation"]


class Rows(Protocol):
    """Data that is ready to train on."""

    @property
    def dataset(self) -> Dataset:
        """One row for each thing that a batch holds."""

    @property
    def rows(self) -> int:
        """Rows of the file that it holds."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""

    @property
    def remarks(self) -> list[str]:
        """What the user should know: rows cut or left out."""

    @property
    def highest_id(self) -> int:
        """The highest token id in it."""

    @property
    def are_cached(self) -> bool:
        """An earlier run has made its tokens."""


Some = TypeVar("Some", bound=Rows)
Read = Callable[[dict[str, Any], list[int] | None, Purpose], Some]
"""Makes the rows with these numbers (None: all) of a data set ready to train on."""


def begin(run: Run) -> tuple[Base, PreTrainedTokenizerBase]:
    """Seed, a checkpoint that is whole, the base model's place and its tokenizer; loads no weight.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop came.
    """
    transformers.set_seed(run.config.seed)
    plugins.fetch(run)
    resume = run.resume_from
    if resume is not None:
        checkpoints.check(Path(resume["path"]), resume["manifest_sha256"], run.report.alive)
    run.report.phase("loading")
    run.report.progress("loading", 0, 2, "tokenizer and configuration")
    found = base.find_base(run.job, run.config)
    tokenizer = base.load_tokenizer(found)
    run.heed_stop()
    plugins.take_rows(run)
    return found, tokenizer


def longest(run: Run, found: Base, tokenizer: PreTrainedTokenizerBase, replaced: list[Replacement]) -> int:
    """Tokens that a sequence may have: as configured, and never more than the model can take."""
    own = getattr(found.architecture.get_text_config(), "max_position_embeddings", None)
    limit = own or min(tokenizer.model_max_length, 1_000_000)
    asked = run.config.max_seq_length
    if asked is None or asked <= limit:
        return asked or limit
    if "max_seq_length" in run.given:
        raise TrainingFailure(
            "config_error", f"`max_seq_length` is {asked}, but this model takes at most {limit} tokens."
        )
    replace(run, replaced, "max_seq_length", limit, f"The model takes at most {limit} tokens.")
    return int(limit)


def replace(run: Run, replaced: list[Replacement], field: str, used: Any, reason: str) -> None:
    """Put another value in the place of a default that cannot be honoured, and remember to tell it."""
    replaced.append(Replacement(field=field, requested=getattr(run.config, field), used=used, reason=reason))
    run.config = run.config.model_copy(update={field: used})


def no_dropout(run: Run, replaced: list[Replacement]) -> bool:
    """Whether to switch all dropout off, which pairs are compared without unless the user asked for some."""
    if run.config.lora_r is None:
        return True
    if "lora_dropout" not in run.given and run.config.lora_dropout > 0:
        replace(run, replaced, "lora_dropout", 0.0, "Dropout would be noise in the comparison of two answers.")
    return run.config.lora_dropout == 0


def chat_template(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without chat template a plain one, and say so."""
    if ensure_template(tokenizer):
        run.report.message(
            "The tokenizer has no chat template; a plain one (<|user|>, <|assistant|>) is used and saved with the "
            "output.",
            level="warning",
        )


def read_data(run: Run, read: Read[Some]) -> tuple[Some, Some | None]:
    """The data to train on and the data held out, made ready before any weight is loaded.

    Raises:
        TrainingFailure: `bad_data` that names the rows.
    """
    run.report.phase("tokenizing")
    config, source, other = run.config, run.job["dataset"], run.job.get("eval_dataset")
    try:
        chosen = held = None
        if config.eval_split > 0:
            chosen, held = data.split(count_rows(source["path"]), config.eval_split, config.seed)
        training = read(source, chosen, "training")
        rest = source if held else other
        held_out = read(rest, held, "evaluation") if rest else None
    except FileNotFoundError as error:
        raise TrainingFailure("bad_data", "The data set's file is not there any more.") from error
    plugins.drop_rows(run)
    for one in (training, held_out):
        for remark in one.remarks if one else []:
            run.report.message(remark, level="warning")
    return training, held_out


def seen(run: Run, training: Rows) -> Dataset:
    """What of the data is trained on: all, or the rows of one step again and again."""
    if run.config.overfit_first_batch:
        return data.first_batch(training.dataset, run.config)
    return measuring.longest_rows(training.dataset, run.config) if run.is_probe else training.dataset


def chat_template_if_needed(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """`chat_template`, where the pairs or prompts of a data set are messages."""
    if any(converse(one["path"]) for one in (run.job["dataset"], run.job.get("eval_dataset")) if one):
        chat_template(run, tokenizer)


def said_of_cache(run: Run, *some: Rows | None) -> dict[str, str]:
    """Tell whether an earlier run has made all of the tokens; returns the fact about it."""
    if not all(one.are_cached for one in some if one):
        return {"tokenized": "now"}
    run.report.message("An earlier run has tokenised this data in the same way: its tokens are used again.")
    return {"tokenized": "cached"}


def pairs_of(run: Run, cache: TokenCache, source: dict[str, Any], chosen: list[int] | None, purpose: Purpose) -> Source:
    """The rows of a data set, for `worker.training.pairs`."""
    return Source(source["path"], source.get("sha256"), chosen, purpose, tokenizing(run), cache)


def token_cache(run: Run) -> TokenCache:
    """What earlier runs have tokenised, where the job names a place for it."""

    def alive() -> None:
        run.heed_stop()
        run.report.alive()

    return TokenCache.of_job(run.job, warn=lambda text: run.report.message(text, level="warning"), alive=alive)


def tokenizing(run: Run) -> Callable[[int, int], None]:
    """What tells how far the data is, and heeds a stop."""
    return lambda done, total: run.progress("tokenizing", done, total)


def steps_in_all(run: Run, steps_in_a_pass: int) -> int:
    """Optimizer steps of the whole run, as the trainer counts them; of a probe, its own."""
    run.steps_in_a_pass = steps_in_a_pass
    return measuring.STEPS if run.is_probe else configured_steps(run)


def configured_steps(run: Run) -> int:
    """Optimizer steps of the whole run, of which a probe takes only the first few; call behind `steps_in_all`."""
    steps = run.config.max_steps or math.ceil(run.config.epochs * run.steps_in_a_pass)
    return max(steps, run.config.min_steps or 0)


@contextmanager
def weights(run: Run, found: Base) -> Iterator[Base]:
    """Where the weights to start from are for as long as the block lasts: an adapter is merged into its base."""
    alive = run.report.alive
    # transformers shows a bar wherever it goes through many weights: loading them, writing them.
    transformers.utils.logging.set_tqdm_hook(
        lambda bar, what, options: bar(*(each(things, alive) for things in what), **options)
    )
    run.report.phase("loading")
    dtype = model.weights_dtype(run.config, run.machine)
    with base.merged(found, run.folder / "base_model", dtype, alive) as start:
        yield start


def load(run: Run, start: Base, highest_id: int, head: model.Head = "causal") -> PreTrainedModel:
    """The model on its device, able to take every token of the data."""
    if start.from_scratch and run.resume_from is None:
        run.report.message(
            f"The folder {run.job['base_model']['name']} holds no weights: they start as random numbers drawn with "
            f"seed {run.config.seed}, and the model is trained from scratch."
        )
    with while_growing(run.report.alive, start.folder):
        network = plugins.model(run, lambda: model.load_model(start, run.config, run.machine, head))
    run.config = run.config.model_copy(update={"attn_implementation": network.config._attn_implementation})
    if run.config.gradient_checkpointing == "selective":
        planning.checkpoint_every_second_layer(network)
    model.check_vocabulary(network, highest_id)
    run.heed_stop()
    return network


def highest_id(tokenizer: PreTrainedTokenizerBase, *some: Rows | None) -> int:
    """The highest token id that the model will be given."""
    return max([int(tokenizer.pad_token_id or 0), *(one.highest_id for one in some if one)])
