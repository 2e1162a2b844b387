"""Output of a run: adapter or model in Hugging Face format, tokenizer, model card, metrics."""

import json
import shutil
from pathlib import Path
from typing import Any

from worker.checkpoint_files import manifest
from worker.training.failures import classify
from worker.training.loop.memory import write_profile
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.model.base_model import ADAPTER_CONFIG, BaseModelSource
from worker.training.model.loader import versions
from worker.training.output.model_card import model_card
from worker.training.output.pruning import prune_smallest
from worker.wire.heartbeat import heartbeat_while_growing

OUTPUT = "output"


def export(trainer: ServiceTrainerMixin, base: BaseModelSource, facts: dict[str, Any]) -> str:
    """Write `output/` to the attempt's folder, atomically, and return its name relative to that folder.

    Raises:
        TrainingFailure: `disk_full`.
    """
    run = trainer.run
    run.report.phase("exporting")
    final = run.folder / OUTPUT
    staging = run.folder / f".{OUTPUT}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        fraction = run.config.trainer_options.prune_fraction
        if fraction is not None:
            zeros, weights = prune_smallest(trainer.model, fraction, run.report.alive)
            run.report.message(
                f"The output is pruned: {zeros:,} of the {weights:,} weights of its linear layers are zero. The "
                "evaluations of this run were made before that."
            )
        with heartbeat_while_growing(run.report.alive, staging):
            trainer.model.save_pretrained(staging)
        trainer.processing_class.save_pretrained(staging)
        if base.merged is not None and (staging / ADAPTER_CONFIG).is_file():
            # The adapter is only valid with the exact weights it was trained on, which exist only here.
            base.merged.rename(staging / "base_model")
            _name_base(staging, final / "base_model")
        run.history.copy_to(staging)
        run.trackers.copy_files(staging)
        if run.config.trainer_options.distributions_steps:
            run.distributions.copy_to(staging)
        if run.config.trainer_options.memory_profile:
            write_profile(run, staging)
        where = run.config.push_to_hub or str(final)
        card = model_card(run.job, run.config, facts, versions(), run.state, where, run.method.eval_metric)
        (staging / "README.md").write_text(card)
        manifest.commit(staging, final, run.report.alive)
    except Exception as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise classify(error) from error
    return OUTPUT


def _name_base(folder: Path, base: Path) -> None:
    path = folder / ADAPTER_CONFIG
    described = json.loads(path.read_text())
    described["base_model_name_or_path"] = str(base)
    path.write_text(json.dumps(described, indent=2, sort_keys=True))
