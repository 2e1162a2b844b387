"""Adapters beside one base model: loaded when they are first needed, and unloaded when others need their place."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer

from worker.training.failures import DEVICE_ERROR, OUT_OF_MEMORY, TrainingFailure, classify_error, one_line
from worker.training.model.adapter_init import FIRST_VALUES
from worker.training.model.base_model import ADAPTER_WEIGHTS
from worker.training.model.checked_weights import checked_adapters

_BASE = "__base__"
"""Name by which peft knows the model without an adapter, in a batch of several."""


@dataclass(frozen=True)
class LoadedAdapter:
    """Adapter in memory."""

    name: str
    """Name that peft has for it."""
    mixes: bool


class AdapterSet:
    """Adapters of one base model by their keys, and which of them the model computes with."""

    def __init__(self, model: Any, most: int) -> None:
        """Prepare for at most `most` adapters; a model that has one already takes no others."""
        self.model = model.get_base_model() if isinstance(model, PeftModel) else model
        """Model that computes the batches."""
        self._takes_adapters = not isinstance(model, PeftModel)
        self._most = most
        self._peft: PeftModel | None = None
        self._loaded: dict[str, LoadedAdapter] = {}
        """In the order of their last use."""
        self._names_created = 0
        self._names_of_rows: list[str] | None = None
        """Adapter of each row of a batch of several; None: the active one, or the base model, computes all rows."""
        self._layers: set[LoraLayer] = set()
        self._active: str | None = None
        self._is_active_set = True

    def load(self, key: str, folder: Path, in_use: Collection[str]) -> bool:
        """Load an adapter from its folder, if it is not in memory; return False as long as all places are in use.

        Raises:
            TrainingFailure: `config_error`: it cannot be used with this model.
        """
        if key not in self._loaded:
            if len(self._loaded) >= self._most:
                removable_key = next((other for other in self._loaded if other not in in_use), None)
                if removable_key is None:
                    return False
                self._unload(removable_key)
            with torch.inference_mode(False):  # peft sets whether its parameters have gradients
                adapter = self._load(folder)
        else:
            adapter = self._loaded.pop(key)
        self._loaded[key] = adapter
        return True

    def mixes(self, key: str) -> bool:
        """Return True if rows of a loaded adapter may be in a batch with rows of others."""
        return self._loaded[key].mixes

    def activate(self, keys: Sequence[str | None]) -> None:
        """Let the next forward passes compute a batch whose rows have these adapters; None is the base model."""
        first = next((key for key in keys if key is not None), None)
        if self._peft is not None and (self._active != first or not self._is_active_set):
            tuner = self._peft.base_model
            if first is None:
                tuner.disable_adapter_layers()
            else:
                self._peft.set_adapter(self._loaded[first].name, inference_mode=True)
                tuner.enable_adapter_layers()
            self._active, self._is_active_set = first, True
        self._names_of_rows = None
        if any(key != first for key in keys):
            self._names_of_rows = [_BASE if key is None else self._loaded[key].name for key in keys]

    def _load(self, folder: Path) -> LoadedAdapter:
        config = self._read_config(folder)
        # Their first values are drawn and then overwritten; those of PiSSA and others would change the base.
        config.init_lora_weights = True
        config.inference_mode = True
        self._names_created += 1
        # None is a part of another: peft finds the tensors of an adapter by its name in theirs.
        name = f"adapter_{self._names_created:08}"
        self._is_active_set = False
        try:
            with checked_adapters("The adapter"):
                if self._peft is None:
                    self._peft = PeftModel(self.model, config, adapter_name=name)
                else:
                    self._peft.add_adapter(name, config)
                self._peft.load_adapter(str(folder), name, torch_device=str(self.model.device))
        except Exception as error:
            failure = classify_error(error)
            if failure.code == DEVICE_ERROR:
                raise
            self._remove_failed(name)
            if failure.code in ("config_error", OUT_OF_MEMORY):
                raise failure from error
            raise TrainingFailure(
                "config_error", f"The adapter cannot be used with this base model: {one_line(error)}"
            ) from error
        self._peft.eval()
        self._hook_new_layers()
        has_whole_parts = config.modules_to_save or config.target_parameters
        # Such as DoRA, whose layers do not compute several adapters at once.
        has_variant = any(name in layer.lora_variant for layer in self._layers)
        return LoadedAdapter(name, mixes=not (has_whole_parts or has_variant))

    def _hook_new_layers(self) -> None:
        """Let the layers with adapters receive the adapter of each row.

        `PeftModel.forward` finds and hooks all of them for every pass, and with them modules that are trained as a
        whole, which fail for the adapters that have none. Checked with peft 0.21.
        """
        for module in self.model.modules():
            if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper) and module not in self._layers:
                module.register_forward_pre_hook(self._pass_names, with_kwargs=True)
                self._layers.add(module)

    def _pass_names(self, _: LoraLayer, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._names_of_rows is None:
            return None
        return arguments, {**options, "adapter_names": self._names_of_rows}

    def _read_config(self, folder: Path) -> LoraConfig:
        if not self._takes_adapters:
            raise TrainingFailure("config_error", "This model has an adapter of its own and takes no others beside it.")
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise TrainingFailure("config_error", f"The adapter has no {ADAPTER_WEIGHTS}: export its run again.")
        if (folder / FIRST_VALUES).is_file():
            raise TrainingFailure(
                "config_error",
                "This checkpoint belongs to changed base weights, and cannot be used beside other adapters: ask the "
                "output of its run.",
            )
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except Exception as error:
            raise TrainingFailure(
                "config_error", f"The configuration of the adapter cannot be read: {one_line(error)}"
            ) from error
        if type(config) is not LoraConfig:
            raise TrainingFailure(
                "config_error", f"The adapter is of the type {config.peft_type}, and only LoRA can be used here."
            )
        if config.trainable_token_indices:
            raise TrainingFailure(
                "config_error",
                "The adapter trains the embeddings of single tokens, and peft loads no other one beside it: merge it "
                "with an export of its run, whose `output` is `merged`.",
            )
        return config

    def _remove_failed(self, name: str) -> None:
        """Remove what is there of an adapter that could not be loaded."""
        if self._peft is not None:
            if name in self._peft.peft_config:
                self._delete(name)
        elif any(isinstance(module, BaseTunerLayer) for module in self.model.modules()):
            raise RuntimeError("an adapter was only partly added to the base model, which has to be loaded again")

    def _unload(self, key: str) -> None:
        self._delete(self._loaded.pop(key).name)

    def _delete(self, name: str) -> None:
        self._is_active_set = False
        with warnings.catch_warnings(action="ignore"):  # peft activates another adapter, and warns about it
            if self._peft is not None:
                self._peft.delete_adapter(name)
