"""The base model of a run: where it lies, what it is, and its tokenizer; nothing here loads a weight before `merge`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from app.runs.config import TrainingConfig, TrainingMethod
from worker.training import fidelity
from worker.training.failures import TrainingFailure, in_one_line
from worker.training.pulse import Alive, while_growing

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
_OF_A_CONFIG = (huggingface_hub.errors.StrictDataclassError, ArithmeticError, KeyError, TypeError)
"""What a config.json raises whose fields have the wrong type, or do not go together."""


@dataclass(frozen=True)
class Base:
    """Where the weights that a run starts from lie."""

    source: str
    """Folder or hub name that `from_pretrained` and the adapter's own configuration name."""
    tokenizer_source: str
    options: dict[str, Any]
    """Revision, offline and trust options, the same for configuration, weights and tokenizer."""
    architecture: Any
    """The transformers configuration, without weights."""
    identity: str
    """What tells these weights from others: a commit of the hub, or a digest of the folder."""
    revision: str | None = None
    """The commit of a hub model, whichever branch or tag was asked for."""
    adapter: Path | None = None
    """An adapter that is to be merged into `source` before it is the base."""
    merged: Path | None = None
    """The private folder of a merged base."""
    from_scratch: bool = False
    """The folder holds an architecture without weights: they start as random numbers drawn with the seed."""

    @property
    def folder(self) -> Path:
        """Where its files are, or come to be while it is downloaded: of a hub model its part of the hub's cache."""
        if self.revision is None:
            return Path(self.source)
        return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=self.source, repo_type="model")


def find_base(job: dict[str, Any], config: TrainingConfig) -> Base:
    """Locate the base model and pin what it is: of a hub model the commit, for all its parts.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    named, options = job["base_model"], _options(job)
    if named.get("path") is None:
        return _pinned(named["hub"], options, named.get("revision") or config.revision)
    folder = Path(named["path"])
    if config.revision is not None:
        raise TrainingFailure("config_error", "`revision` belongs to a hub model, and the base is a folder.")
    if not folder.is_dir():
        raise TrainingFailure("model_not_found", f"The base model {named['name']} is not there any more.")
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapted(folder, named["name"], options)
    return replace(
        _pinned(str(folder), options, None),
        from_scratch=_has_no_weights(folder, named["name"], config),
    )


def find_reward_model(job: dict[str, Any], named: dict[str, Any]) -> Base:
    """Locate a reward model (name, path, hub, revision) and pin what it is.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    if named.get("path") is None:
        return _pinned(named["hub"], _options(job), named.get("revision"))
    folder = Path(named["path"])
    if not folder.is_dir():
        raise TrainingFailure("model_not_found", f"The reward model {named['name']} is not there any more.")
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapted(folder, named["name"], _options(job))
    return _pinned(str(folder), _options(job), None)


@contextmanager
def merged(base: Base, target: Path, dtype: torch.dtype, alive: Alive) -> Iterator[Base]:
    """The base with its adapter merged in, in the folder `target` for as long as the block lasts.

    A base that is no adapter comes as it is.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    if base.adapter is None:
        yield base
        return
    try:
        with while_growing(alive, base.folder, target):
            whole = _merge(base, base.adapter, target, dtype)
        yield whole
    finally:
        shutil.rmtree(target, ignore_errors=True)


def load_tokenizer(base: Base) -> PreTrainedTokenizerBase:
    """The base's tokenizer, with a padding token.

    Raises:
        TrainingFailure: there is none, or it cannot say where a text ends.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.tokenizer_source, **base.options)
    except Exception as error:
        raise not_loaded(error, base.tokenizer_source, "tokenizer") from error
    if tokenizer.eos_token is None:
        raise TrainingFailure(
            "config_error", "The tokenizer has no end-of-sequence token; set `eos_token` in its configuration."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _options(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "local_files_only": bool(job.get("offline")),
        "trust_remote_code": bool(job.get("trust_remote_code")),
    }


def not_loaded(error: Exception, source: str, what: str) -> TrainingFailure:
    """The failure that an exception of `from_pretrained` means."""
    name = source if not Path(source).is_absolute() else Path(source).name
    missing = (OSError, huggingface_hub.errors.HFValidationError)
    text = in_one_line(error)
    if _is_refused(error):
        return TrainingFailure(
            "model_not_found",
            f"The hub does not give out the {what} {name}: it is gated, private or not there. The operator can give "
            "runs the token of an account that may read it: `anneal secrets set hf_token`.",
        )
    if isinstance(error, SafetensorError):
        told = _damaged(Path(source)) or "a file of its weights is empty or damaged"
        return TrainingFailure(
            "config_error", f"The {what} {name} cannot be loaded: {told} ({text}). Copy or download it again."
        )
    if isinstance(error, missing):
        return TrainingFailure("model_not_found", f"The {what} {name} cannot be loaded: {text}")
    told = f"The {what} {name} cannot be used: {type(error).__name__}: {text.rstrip('.')}."
    is_described_wrongly = what in ("configuration", "architecture") or isinstance(error, _OF_A_CONFIG)
    return TrainingFailure(
        "config_error", f"{told} Look at config.json of the model." if is_described_wrongly else told
    )


def _damaged(folder: Path) -> str | None:
    """What the matter is with the first file of weights in a folder whose header cannot be read."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError):
            return f"{path.name} is {'damaged' if path.stat().st_size else 'empty'}"
    return None


def _is_refused(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, huggingface_hub.errors.RepositoryNotFoundError):  # gated ones among them
            return True
        if isinstance(error, huggingface_hub.errors.HfHubHTTPError) and error.response is not None:
            return error.response.status_code in (401, 403)
        error = error.__cause__ or error.__context__
    return False


def _pinned(source: str, options: dict[str, Any], revision: str | None) -> Base:
    """A folder, or a hub model at the commit that `revision` (None: its main branch) means now."""
    commit = None
    try:
        if not Path(source).is_dir():
            offline = options["local_files_only"]
            path = huggingface_hub.hf_hub_download(source, "config.json", revision=revision, local_files_only=offline)
            commit = Path(path).parent.name  # the hub's cache has a folder for each commit
            options = {**options, "revision": commit}
        architecture = AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        raise not_loaded(error, source, "configuration") from error
    identity = f"commit {commit}" if commit else fidelity.identity(Path(source))
    return Base(source, source, options, architecture, identity, revision=commit)


def _adapted(folder: Path, name: str, options: dict[str, Any]) -> Base:
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        raise TrainingFailure(
            "model_not_found",
            f"The adapter {name} has no {_ADAPTER_WEIGHTS}. Weights in a pickle (adapter_model.bin) are never loaded, "
            "since that runs whatever code is in it: save the adapter again as safetensors.",
        )
    try:
        described = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise not_loaded(error, name, "adapter") from error
    if not described.base_model_name_or_path:
        raise TrainingFailure("model_not_found", f"The adapter {name} does not name its base model.")
    base = _pinned(described.base_model_name_or_path, options, described.revision)
    own_tokenizer = (folder / "tokenizer_config.json").is_file()
    return replace(
        base,
        adapter=folder,
        tokenizer_source=str(folder) if own_tokenizer else base.source,
        identity=f"{fidelity.identity(folder, ADAPTER_CONFIG)} on {base.identity}",
    )


def _merge(base: Base, adapter: Path, target: Path, dtype: torch.dtype) -> Base:
    try:
        model = AutoModelForCausalLM.from_pretrained(base.source, dtype=dtype, use_safetensors=True, **base.options)
        whole = PeftModel.from_pretrained(model, str(adapter), is_trainable=False).merge_and_unload()
        tokenizer = AutoTokenizer.from_pretrained(base.tokenizer_source, **base.options)
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:
        raise not_loaded(error, base.source, "base of the adapter") from error
    whole.save_pretrained(target)
    tokenizer.save_pretrained(target)
    options = {name: value for name, value in base.options.items() if name != "revision"}
    return replace(base, source=str(target), options=options, revision=None, merged=target)


def _has_no_weights(folder: Path, name: str, config: TrainingConfig) -> bool:
    """Whether the folder holds an architecture alone, which only `full` can start from."""
    if any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        return False
    if config.method is not TrainingMethod.full:
        raise TrainingFailure(
            "config_error",
            f"The folder {name} holds a configuration but no weights, and `{config.method}` needs some to start from: "
            "put them there, or train the model from scratch with method `full` first and name that run.",
        )
    return True
