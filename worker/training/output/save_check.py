"""Trial of what a checkpoint and the output need, before the first step: hours later, training would be lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from app.infra.files.tree import remove_tree
from worker.checkpoint_files.disk_space import DiskSpace
from worker.training.checkpointing.snapshot import save_without_weights
from worker.training.failures import TrainingFailure, classify_error, one_line
from worker.training.output import gguf
from worker.training.overrides import keep_published_generation_config
from worker.training.trainer_protocol import ServiceTrainer

_FOLDER = ".save_check"
_TEXT = "Hello, world! 1234567890 ÄÖÜ ß 漢字 🙂\n\n\tdef f(x):  return x  # a comment\n"
"""Text of several scripts with runs of spaces, which tokenizers that were saved wrongly encode otherwise."""


def check_saves(trainer: ServiceTrainer) -> None:
    """Save everything but the weights into a folder that is deleted, and load the tokenizer from there.

    Raises:
        TrainingFailure: `config_error`, with what the model's files contain that cannot be saved; `disk_full`.
    """
    run = trainer.run
    folder = run.folder / _FOLDER
    remove_tree(folder, ignore_errors=True)
    try:
        with _naming_part("model"):
            folder.mkdir(parents=True)
            size = save_without_weights(trainer.model, folder)
            if run.config.output == "merged" and isinstance(trainer.model, PeftModel):
                size += _save_merged_without_weights(trainer.model, folder)
            else:
                size *= 2
            if run.config.gguf is not None:
                stored_type = "F32" if _is_float32(trainer.model) else "BF16"
                size += gguf.needed_bytes(run.config.gguf, _count_weights(trainer.model), stored_type)
        with _naming_part("tokenizer"):
            trainer.save_constant_files(folder)
        if (folder / "config.json").is_file():
            gguf.check_conversion(run, folder)
        if run.config.trainer_options.tokenizer is None:
            _check_saved_tokenizer(trainer, folder)
    finally:
        remove_tree(folder, ignore_errors=True)
    _report_generation_config(trainer)
    # The state of the optimizer comes on top. A resumed run has checkpoints that it replaces.
    lacking = DiskSpace(run.folder, run.job.disk_reserve_bytes).shortage_reason(size)
    if lacking is not None and run.resume_from is None:
        raise TrainingFailure(
            "disk_full", f"A checkpoint and the output of this run do not fit on the disk: {lacking}."
        )


@contextmanager
def _naming_part(what: str) -> Iterator[None]:
    """During the block, convert what refuses to save a part of the model into a failure that names the part."""
    try:
        yield
    except Exception as error:
        failure = classify_error(error)
        if failure.code == "internal":
            message = (
                f"The {what} cannot be saved, so the run ends before its first step: {one_line(error).rstrip('.')}. "
                "Correct that in the files of the base model."
            )
            failure = TrainingFailure("config_error", message)
        raise failure from error


def _save_merged_without_weights(model: PeftModel, folder: Path) -> int:
    """Save the configuration of the base as a merged output has it; return the bytes of its weights."""
    base: PreTrainedModel = model.get_base_model()
    if base.is_remote_code():
        custom_object_save(base, str(folder), config=base.config)
    base.config.save_pretrained(folder)
    if base.can_generate():
        keep_published_generation_config(base)
        base.generation_config.save_pretrained(folder)
    return (4 if _is_float32(base) else 2) * _count_weights(base)


def _is_float32(model: Any) -> bool:
    # `save_pretrained` leaves the name of the data type in the place of the data type.
    return str(model.config.get_text_config().dtype).removeprefix("torch.") == "float32"


def _count_weights(model: torch.nn.Module) -> int:
    """Return the number of weights of a model without those of its adapter."""
    return sum(_weights_in(parameter) for name, parameter in model.named_parameters() if "lora_" not in name)


def _weights_in(parameter: torch.nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)  # of a 4-bit weight, which packs two in a byte
    return int(parameter.numel() if state is None else state.shape.numel())


def _check_saved_tokenizer(trainer: ServiceTrainer, folder: Path) -> None:
    """Load the saved tokenizer as users of the output will.

    Raises:
        TrainingFailure: `config_error`: it cannot be loaded.
    """
    tokenizer: Any = trainer.processing_class
    try:
        saved = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trainer.run.job.trust_remote_code
        )
    except Exception as error:
        raise TrainingFailure(
            "config_error",
            "The tokenizer cannot be loaded again once it is saved, so the output of this run could not be used: "
            f"{one_line(error).rstrip('.')}. Correct that in the files of the base model.",
        ) from error
    text = _TEXT + "".join(tokenizer.all_special_tokens)
    if saved(text)["input_ids"] != tokenizer(text)["input_ids"] or saved.chat_template != tokenizer.chat_template:
        trainer.run.report.message(
            "The tokenizer encodes text otherwise once it is saved and loaded again: use the base model's tokenizer "
            "with the output.",
            level="warning",
        )


def _report_generation_config(trainer: ServiceTrainer) -> None:
    """Report a generation configuration that contradicts itself, which whole models keep as it was published."""
    config = getattr(trainer.model, "generation_config", None)
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError as error:
        trainer.run.report.message(
            "The base model's generation_config.json contradicts itself, and outputs that are whole models keep it so: "
            f"{one_line(error)}",
            level="warning",
        )
