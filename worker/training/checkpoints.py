"""Checkpoints of a trainer: written whole or not at all, and restored so that training goes on exactly."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from worker.training import fidelity, manifest, plugins, probe
from worker.training.failures import TrainingFailure, classify
from worker.training.pulse import Alive, nobody, while_growing

if TYPE_CHECKING:
    from worker.training.trainer import Faithful


def save(trainer: "Faithful") -> None:
    """Write `checkpoint-<step>` into the attempt's folder and report it once it is on disk for good.

    Raises:
        TrainingFailure: `disk_full`; nothing half-written stays.
    """
    run, step = trainer.run, trainer.state.global_step
    run.report.phase("saving")
    name = f"checkpoint-{step}"
    staging = run.folder / f".{name}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        with while_growing(run.report.alive, staging):
            _write(trainer, staging)
        facts = {
            "run_id": run.job["run_id"],
            "attempt": run.job["attempt"],
            fidelity.FINGERPRINT: run.fingerprint,
            fidelity.PROBE: probe.measure(trainer, trainer.pinned_text()).hex(),
            "sampler": {"epoch": trainer.state.epoch, "samples": run.state.samples, "seed": run.config.seed},
        }
        sha256 = manifest.write_manifest(staging, step, facts, run.report.alive)
        size = manifest.size_of(staging)
        manifest.commit(staging, run.folder / name, run.report.alive)
    except Exception as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise classify(error) from error
    run.journal.save(step)
    run.report.checkpoint(
        name,
        step=step,
        kind=run.save_kind,
        bytes=size,
        manifest_sha256=sha256,
        epoch=trainer.state.epoch,
        metrics={
            "loss": run.state.loss,
            "best_loss": run.state.best_loss,
            # Of these very weights, or of none: it says which checkpoint is the best.
            trainer.OBJECTIVE: run.state.objective if run.state.eval_step == step else None,
            f"best_{trainer.OBJECTIVE}": run.state.best_objective,
        },
    )
    trainer.saved_step = step
    plugins.keep(run, run.folder / name)


def check(path: Path, manifest_sha256: str, alive: Alive = nobody) -> None:
    """Refuse a checkpoint of which a single byte is not as it was written."""
    problems = manifest.verify(path, manifest_sha256, alive)
    if problems:
        raise TrainingFailure("internal", f"{path.name} cannot be resumed: {'; '.join(problems[:5])}")


def restore_dtypes(model: torch.nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give the trained parameters back the types they had: a loaded adapter always arrives in 32 bits.

    Without this a resumed QLoRA run would train its adapter with another rounding than before.
    """
    for name, parameter in model.named_parameters():
        if name in dtypes and parameter.dtype != dtypes[name]:
            parameter.data = parameter.data.to(dtypes[name])


def trained_dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    """Types of the parameters that train, by name."""
    return {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}


def reapply_rates(trainer: Any, weight_decays: list[float]) -> None:
    """Let the configuration's learning rate and weight decay hold after a load, not the checkpoint's.

    `weight_decays` are those of the optimizer's groups before the load. With unchanged values this computes the
    same floats that the checkpoint holds.
    """
    scheduler = trainer.lr_scheduler
    rate = trainer.args.learning_rate
    scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
    rates = []
    for group, decay, factor in zip(trainer.optimizer.param_groups, weight_decays, scheduler.lr_lambdas, strict=True):
        group["weight_decay"] = decay
        group["initial_lr"] = rate
        group["lr"] = rate * factor(scheduler.last_epoch)
        rates.append(group["lr"])
    scheduler._last_lr = rates


def _write(trainer: "Faithful", folder: Path) -> None:
    trainer.store_flos()
    trainer.save_model(str(folder), _internal_call=True)
    trainer._save_optimizer_and_scheduler(str(folder))
    trainer._save_scaler(str(folder))
    trainer._save_rng_state(str(folder))
    trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
    trainer.remember_averages()
    trainer.run.state.save(folder)
    for history in trainer.run.histories:
        history.copy_to(folder)
    # A pickle of arguments that nothing here reads; none is to be loaded by anyone else either.
    (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
