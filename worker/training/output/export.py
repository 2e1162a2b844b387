"""Output of a run: adapter or model in Hugging Face format, tokenizer, model card, metrics."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import align_special_tokens

from anneal.contracts.attempt.job import EXPORT, MERGED_BASE
from anneal.contracts.attempt.messages import OutputWeights
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.infra.files.tree import remove_tree
from worker.checkpoint_files import manifest
from worker.training.checkpointing.snapshot import save_weights
from worker.training.context import TrainingContext
from worker.training.failures import OUT_OF_MEMORY, Stopped, classify_error
from worker.training.loop.sampling import end_answers_at_turns
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.measurement.memory import write_profile
from worker.training.model import loader
from worker.training.model.adapter_init import convert_to_unchanged_base, save_first_values
from worker.training.model.base_model import ADAPTER_CONFIG, BaseModelSource
from worker.training.model.merging import merge_adapter
from worker.training.output import gguf
from worker.training.output.model_card import model_card
from worker.training.output.pruning import prune_smallest
from worker.training.overrides import keep_published_generation_config
from worker.wire.heartbeat import heartbeat_while_growing

OUTPUT = "output"
_MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", ADAPTER_CONFIG, "*.py",
)  # fmt: skip


@dataclass(frozen=True)
class ExportedWeights:
    """Weights that an output contains, and why these were chosen."""

    which: Literal["best", "last", "checkpoint"]
    step: int
    reason: str
    save: Callable[[Path], None]
    """Writes the weights with their configuration into a folder."""

    @property
    def text(self) -> str:
        """Description for users."""
        name = "weights of the checkpoint" if self.which == "checkpoint" else f"{self.which} weights"
        return f"{name} of step {self.step}, {self.reason}"


def export_output(trainer: ServiceTrainerMixin, base: BaseModelSource, facts: dict[str, Any]) -> str:
    """Write `output/` with the best or the last weights of a run that has ended, and describe them.

    Raises:
        TrainingFailure: `disk_full`.
        Stopped: the worker drains while the GGUF file is written; the run's next attempt exports again.
    """
    return write_output(trainer.run, _choose_weights(trainer), trainer.processing_class, base, facts)


def copy_weights(checkpoint: Path, folder: Path) -> None:
    """Copy the model or the adapter, with its configuration, from a checkpoint."""
    for pattern in _MODEL_FILES:
        for path in checkpoint.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def write_output(
    run: TrainingContext,
    chosen: ExportedWeights,
    tokenizer: PreTrainedTokenizerBase,
    base: BaseModelSource,
    facts: dict[str, Any],
) -> str:
    """Write `output/` to the attempt's folder, atomically, report it, and return a description of its weights.

    Args:
        run: context of the run.
        chosen: weights to export, and the reason.
        tokenizer: tokenizer of the model.
        base: weights that the run started from.
        facts: initial run info, for the model card.

    Raises:
        TrainingFailure: `disk_full`, or an export cannot write its GGUF file.
        Stopped: a stop was requested while the GGUF file was written.
    """
    run.report.send({"type": "phase", "name": "exporting"})
    weights = chosen.text
    about: OutputWeights = {"weights": chosen.which, "step": chosen.step, "reason": chosen.reason}
    final = run.folder / OUTPUT
    staging = run.folder / f".{OUTPUT}.tmp"
    remove_tree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        with heartbeat_while_growing(run.report.alive, staging):
            chosen.save(staging)
            convert_to_unchanged_base(staging)
            if run.config.output == "merged":
                _merge_output(run, base, staging, tokenizer)
            if run.config.trainer_options.prune_fraction is not None:
                _prune_weights(run, staging, run.config.trainer_options.prune_fraction)
        tokenizer.save_pretrained(staging)
        gguf.add_gguf(run, staging, tokenizer)
        if base.merged is not None and (staging / ADAPTER_CONFIG).is_file():
            # The adapter is only valid with the exact weights it was trained on, which exist only here.
            base.merged.rename(staging / MERGED_BASE)
            _name_base(staging, MERGED_BASE)
        run.history.copy_to(staging)
        run.trackers.copy_files(staging)
        if run.config.trainer_options.distributions_steps:
            run.distributions.copy_to(staging)
        if run.config.trainer_options.memory_profile:
            write_profile(run, staging)
        has_own_base = (staging / MERGED_BASE).is_dir()
        has_gguf = (staging / gguf.FILE).is_file()
        card = model_card(run, facts, loader.library_versions(), weights, has_own_base=has_own_base, has_gguf=has_gguf)
        (staging / "README.md").write_text(card)
        (staging / EXPORT).write_text(json.dumps(about, indent=1))
        manifest.commit(staging, final, run.report.alive)
    except Stopped:
        remove_tree(staging, ignore_errors=True)
        raise
    except Exception as error:
        remove_tree(staging, ignore_errors=True)
        raise classify_error(error) from error
    run.report.send({"type": "export", **about, "output": run.config.output})
    return weights


def _choose_weights(trainer: ServiceTrainerMixin) -> ExportedWeights:
    """Return the best evaluated weights if the run asks for them and there are any, else the last ones."""
    run, method, step = trainer.run, trainer.run.method, trainer.state.global_step
    last = partial(_save_last, trainer)
    if run.config.export == "last":
        return ExportedWeights("last", step, "because `export` is `last`", last)
    name, best = method.eval_metric, run.best_checkpoint
    current = run.state.objective if run.state.eval_step == step else None
    if best is None and current is None:
        return ExportedWeights("last", step, "because no saved weights were evaluated", last)
    if best is None or (current is not None and method.to_score(current) <= method.to_score(best.metric)):
        return ExportedWeights("best", step, f"with the best `{name}`, {current:.6g}, which are also the last", last)
    problems = manifest.verify(best.path, best.manifest_sha256, run.report.alive)
    if problems:
        run.report.message(
            f"The best checkpoint, that of step {best.step}, cannot be exported: {'; '.join(problems[:3])}. The last "
            "weights are exported instead.",
            level="warning",
        )
        return ExportedWeights("last", step, f"because the best checkpoint (step {best.step}) is damaged", last)
    return ExportedWeights(
        "best", best.step, f"with the best `{name}`, {best.metric:.6g}", partial(copy_weights, best.path)
    )


def _save_last(trainer: ServiceTrainerMixin, folder: Path) -> None:
    save_weights(trainer.model, folder, trainer.whole_weights)
    save_first_values(trainer.first_values, folder)


def _prune_weights(run: TrainingContext, folder: Path, fraction: float) -> None:
    """Set a fraction of the weights in a folder to zero, those of the smallest magnitude."""
    head: loader.Head = "reward" if run.method.has_reward_head else "causal"
    model = loader.load_saved(folder, head, trust_remote_code=run.job.trust_remote_code)
    zeros, total = prune_smallest(model, fraction, run.report.alive)
    model.save_pretrained(folder)
    run.report.message(
        f"The output is pruned: {zeros:,} of the {total:,} weights of its linear layers are zero. The "
        "evaluations of this run were made before that."
    )


def _merge_output(
    run: TrainingContext, base: BaseModelSource, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Replace the adapter in a folder by the whole model, merged in the data type of the base.

    On a GPU it is merged there, and on the CPU if the GPU lacks the memory for it. Its configurations name the special
    tokens of `tokenizer`, and the end of a turn, as those of the trained model do: it was trained to end with them.
    """
    adapter = folder / "adapter"
    adapter.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(adapter / path.name)
    merged = _merged_on_gpu(run, base, adapter) if run.machine.kind == "cuda" else None
    if merged is None:
        merged = _merged_model(run, base, adapter, DeviceCapabilities(kind="cpu", bf16=True))
    if getattr(base.architecture, "tie_word_embeddings", False) and not merged.config.tie_word_embeddings:
        run.report.message(
            "The adapter changes the input or the output embeddings, which are one matrix in the base model: the "
            "merged output has both, each as trained."
        )
    loader.name_base(merged, run.job.base_model.portable_name)
    align_special_tokens(merged, tokenizer)
    end_answers_at_turns(run, merged, tokenizer)
    keep_published_generation_config(merged)
    merged.save_pretrained(folder)
    remove_tree(adapter)


def _merged_on_gpu(run: TrainingContext, base: BaseModelSource, adapter: Path) -> PreTrainedModel | None:
    """Return the merged model on the GPU of the run; None, with a message, if the GPU lacks the memory for it."""
    try:
        return _merged_model(run, base, adapter, run.machine)
    except Exception as error:
        if classify_error(error).code != OUT_OF_MEMORY:
            raise
    run.report.message(
        "The GPU has too little free memory for the whole model beside the trained one: the adapter is merged on the "
        "CPU, which takes longer.",
        level="warning",
    )
    return None


def _merged_model(
    run: TrainingContext, base: BaseModelSource, adapter: Path, machine: DeviceCapabilities
) -> PreTrainedModel:
    head: loader.Head = "reward" if run.method.has_reward_head else "causal"
    whole = loader.load_for_merge(base, run.config, machine, head)
    return merge_adapter(whole, adapter, "The adapter of this run")


def _name_base(folder: Path, name: str) -> None:
    path = folder / ADAPTER_CONFIG
    described = json.loads(path.read_text())
    described["base_model_name_or_path"] = name
    path.write_text(json.dumps(described, indent=2, sort_keys=True))
