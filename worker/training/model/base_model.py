"""Base model of a run: its location, identity and tokenizer; no weights are loaded before `merged`."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from peft import PeftConfig
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from anneal.contracts.attempt.job import JobSpec, ModelSource
from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.stored_quantization import StoredQuantization, stored_quantization
from app.infra.files.tree import remove_tree
from worker.checkpoint_files import resume_fidelity
from worker.training.failures import TrainingFailure, one_line
from worker.training.model.checked_weights import load_pretrained
from worker.training.model.merging import dequantize_model, merge_adapter, options_of_stored
from worker.wire.heartbeat import HeartbeatCallback, heartbeat_while_growing

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
_HUB_ADVICE = (
    " Check the name, and that the worker reaches the hub; or put the model's folder below ANNEAL_MODELS_ROOT, where "
    "it is found without the hub."
)
_CONFIG_ERRORS = (huggingface_hub.errors.StrictDataclassError, ArithmeticError, KeyError, TypeError)
"""Exceptions raised for a config.json whose fields have the wrong type or are inconsistent."""


@dataclass(frozen=True)
class BaseModelSource:
    """Location and identity of the weights that a run starts from."""

    source: str
    """Folder or hub name for `from_pretrained`, also written to the adapter's configuration."""
    tokenizer_source: str
    options: dict[str, Any]
    """Revision, offline and trust options, the same for configuration, weights and tokenizer."""
    architecture: Any
    """The transformers configuration, without weights."""
    identity: str
    """Fingerprint of the weights: a commit of the hub, or a digest of the folder."""
    revision: str | None = None
    """Commit of a hub model, to which a requested branch or tag was resolved."""
    adapter: Path | None = None
    """Adapter to merge into `source` to get the base."""
    merged: Path | None = None
    """Private folder of a merged base."""
    from_scratch: bool = False
    """True if the folder has an architecture without weights; they are initialized randomly with the seed."""
    name: str = ""
    """Name of the model or adapter as the user wrote it."""

    @property
    def stored_quantization(self) -> StoredQuantization | None:
        """Quantization of the weights in the files; None if there is none."""
        return stored_quantization(self.architecture.to_dict())

    @property
    def folder(self) -> Path:
        """Folder of the files, also while they are downloaded; for a hub model its part of the hub's cache."""
        if self.revision is None:
            return Path(self.source)
        return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=self.source, repo_type="model")


def find_base(job: JobSpec, config: TrainingConfig, commit: str | None = None) -> BaseModelSource:
    """Locate the base model and pin its identity: a hub model to one commit, for all its parts.

    Args:
        job: job of the attempt.
        config: configuration in effect.
        commit: commit of a hub model that another rank has resolved its name to.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    named, options = job.base_model, _load_options(job)
    if named.path is None:
        return _pin_revision(named.name, named.hub or named.name, options, commit or named.revision or config.revision)
    folder = named.path
    if config.revision is not None:
        raise TrainingFailure("config_error", "`revision` applies to hub models only, and the base model is a folder.")
    if not folder.is_dir():
        raise TrainingFailure("model_not_found", f"The base model {named.name} no longer exists.")
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapter_base(folder, named, options, commit)
    return replace(
        _pin_revision(named.name, str(folder), options, None),
        from_scratch=_has_no_weights(folder, named.name, config),
    )


def is_folder_of_weights(named: ModelSource) -> bool:
    """Return True if a base model is a folder, and not an adapter, whose own base may be on the hub."""
    return named.path is not None and not (named.path / ADAPTER_CONFIG).is_file()


def find_other_model(job: JobSpec, named: ModelSource, what: str) -> BaseModelSource:
    """Locate a model that the options of the method name, such as a `reward model`, and pin its identity.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    if named.path is None:
        return _pin_revision(named.name, named.hub or named.name, _load_options(job), named.revision)
    folder = named.path
    if not folder.is_dir():
        raise TrainingFailure("model_not_found", f"The {what} {named.name} no longer exists.")
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapter_base(folder, named, _load_options(job))
    return _pin_revision(named.name, str(folder), _load_options(job), None)


@contextmanager
def merged_base(
    base: BaseModelSource, target: Path, dtype: torch.dtype, alive: HeartbeatCallback
) -> Iterator[BaseModelSource]:
    """Yield the base with its adapter merged in, stored in the folder `target` until the block ends.

    A base without an adapter is yielded unchanged.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    if base.adapter is None:
        yield base
        return
    try:
        with heartbeat_while_growing(alive, base.folder, target):
            whole = _merge_into_folder(base, base.adapter, target, dtype)
        yield whole
    finally:
        remove_tree(target, ignore_errors=True)


def load_tokenizer(base: BaseModelSource) -> PreTrainedTokenizerBase:
    """Load the base's tokenizer, and set a padding token if it has none.

    Raises:
        TrainingFailure: it cannot be loaded, or it has no end-of-sequence token.
    """
    return complete_tokenizer(_load_tokenizer_files(base.tokenizer_source, base.options))


def load_tokenizer_of(named: ModelSource, base: BaseModelSource, job: JobSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer of another model than the base, and set a padding token if it has none.

    Raises:
        TrainingFailure: it cannot be loaded, has no end-of-sequence token, or has more tokens than the base.
    """
    source = named.portable_name if named.path is None else str(named.path)
    tokenizer = complete_tokenizer(_load_tokenizer_files(source, _load_options(job)))
    highest = max(tokenizer.get_vocab().values())
    rows = getattr(base.architecture.get_text_config(), "vocab_size", None)
    if rows is not None and highest >= rows:
        raise TrainingFailure(
            "config_error",
            f"The tokenizer of {named.name} has token ids up to {highest}, but {base.name} has embeddings for {rows} "
            f"tokens (0 to {rows - 1}): leave `tokenizer` out, or use a tokenizer whose tokens are among those of the "
            "model.",
        )
    return tokenizer


def _load_tokenizer_files(source: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        raise load_failure(error, source, "tokenizer") from error
    return tokenizer


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Set a padding token if the tokenizer has none, and return it.

    Raises:
        TrainingFailure: it has no end-of-sequence token.
    """
    if tokenizer.eos_token is None:
        raise TrainingFailure(
            "config_error", "The tokenizer has no end-of-sequence token; set `eos_token` in its configuration."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_options(job: JobSpec) -> dict[str, Any]:
    return {"local_files_only": not job.hub_allowed, "trust_remote_code": job.trust_remote_code}


def load_failure(error: Exception, source: str, what: str) -> TrainingFailure:
    """Convert an exception of `from_pretrained` to a `TrainingFailure`."""
    name = source if not Path(source).is_absolute() else Path(source).name
    missing = (OSError, huggingface_hub.errors.HFValidationError)
    text = one_line(error)
    if _is_access_denied(error):
        return TrainingFailure(
            "model_not_found",
            f"The hub denied access to the {what} {name}: it is gated, private or does not exist. The operator can set "
            "the token of an account with access: `anneal secrets set hf_token`.",
        )
    if isinstance(error, SafetensorError):
        problem = _corrupt_file(Path(source)) or "a file of its weights is empty or damaged"
        return TrainingFailure(
            "config_error", f"The {what} {name} cannot be loaded: {problem} ({text}). Copy or download it again."
        )
    if isinstance(error, missing):
        advice = "" if Path(source).is_absolute() else _HUB_ADVICE
        if what == "model" and any(Path(source).glob("*.bin")):
            advice = (
                " Pickled weights (.bin) are never loaded, because a pickle can run arbitrary code: load the model "
                "elsewhere and save it as safetensors (`save_pretrained`)."
            )
        return TrainingFailure("model_not_found", f"The {what} {name} cannot be loaded: {text.rstrip('.')}.{advice}")
    message = f"The {what} {name} cannot be used: {type(error).__name__}: {text.rstrip('.')}."
    is_config_problem = what in ("configuration", "architecture") or isinstance(error, _CONFIG_ERRORS)
    return TrainingFailure(
        "config_error", f"{message} Check the model's config.json." if is_config_problem else message
    )


def _corrupt_file(folder: Path) -> str | None:
    """Describe the first weights file in a folder whose header cannot be read; None if there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError):
            return f"{path.name} is {'damaged' if path.stat().st_size else 'empty'}"
    return None


def _is_access_denied(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, huggingface_hub.errors.RepositoryNotFoundError):  # also raised for gated ones
            return True
        if isinstance(error, huggingface_hub.errors.HfHubHTTPError) and error.response is not None:
            return error.response.status_code in (401, 403)
        error = error.__cause__ or error.__context__
    return False


def _pin_revision(name: str, source: str, options: dict[str, Any], revision: str | None) -> BaseModelSource:
    """Describe a folder, or a hub model at the current commit of `revision` (None: its main branch)."""
    commit = None
    try:
        if not Path(source).is_dir():
            offline = options["local_files_only"]
            path = huggingface_hub.hf_hub_download(source, "config.json", revision=revision, local_files_only=offline)
            commit = Path(path).parent.name  # the hub's cache has a folder for each commit
            options = {**options, "revision": commit}
        architecture = AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        raise load_failure(error, source, "configuration") from error
    identity = f"commit {commit}" if commit else resume_fidelity.model_fingerprint(Path(source))
    return BaseModelSource(source, source, options, architecture, identity, revision=commit, name=name)


def _adapter_base(
    folder: Path, named: ModelSource, options: dict[str, Any], commit: str | None = None
) -> BaseModelSource:
    name = named.name
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise TrainingFailure(
            "model_not_found",
            f"The adapter {name} has no {ADAPTER_WEIGHTS}. Pickled weights (adapter_model.bin) are never loaded, "
            "because a pickle can run arbitrary code: save the adapter again as safetensors.",
        )
    try:
        described = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise load_failure(error, name, "adapter") from error
    if described.is_prompt_learning:
        raise TrainingFailure(
            "config_error",
            f"The adapter {name} ({described.peft_type.value}) is no change of weights and cannot be merged into its "
            "base model: use its base, or an adapter such as LoRA.",
        )
    if not described.base_model_name_or_path:
        raise TrainingFailure("model_not_found", f"The adapter {name} does not name its base model.")
    # The output of a run names its base as a user does, and the worker has located it.
    place = str(named.base.path or named.base.hub) if named.base else described.base_model_name_or_path
    base = _pin_revision(name, place, options, commit or described.revision)
    own_tokenizer = (folder / "tokenizer_config.json").is_file()
    return replace(
        base,
        adapter=folder,
        tokenizer_source=str(folder) if own_tokenizer else base.source,
        identity=f"{resume_fidelity.model_fingerprint(folder, ADAPTER_CONFIG)} on {base.identity}",
    )


def _merge_into_folder(base: BaseModelSource, adapter: Path, target: Path, dtype: torch.dtype) -> BaseModelSource:
    try:
        options = base.options | options_of_stored(base.stored_quantization)
        model = load_pretrained(
            AutoModelForCausalLM, base.source, f"The base of the adapter {base.name}", dtype=dtype, **options
        )
        try:
            whole = merge_adapter(dequantize_model(model, dtype), adapter, f"The adapter {base.name}")
        except ValueError as error:  # peft rejects the configuration of an adapter with it
            raise TrainingFailure(
                "config_error", f"The adapter {base.name} does not fit its base model: {one_line(error)}"
            ) from error
        tokenizer = AutoTokenizer.from_pretrained(base.tokenizer_source, **base.options)
    except (RuntimeError, MemoryError, TrainingFailure):
        raise
    except Exception as error:
        raise load_failure(error, base.source, "base of the adapter") from error
    whole.save_pretrained(target)
    tokenizer.save_pretrained(target)
    options = {name: value for name, value in base.options.items() if name != "revision"}
    architecture = copy.deepcopy(base.architecture)  # with the data type of the base
    architecture.tie_word_embeddings = whole.config.tie_word_embeddings
    for part in (architecture, architecture.get_text_config()):
        vars(part).pop("quantization_config", None)
    return replace(base, source=str(target), options=options, architecture=architecture, revision=None, merged=target)


def _has_no_weights(folder: Path, name: str, config: TrainingConfig) -> bool:
    """Return True if the folder has an architecture without weights, which only `full` can start from."""
    if any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        return False
    if METHODS[config.method].adapter != "forbidden":
        raise TrainingFailure(
            "config_error",
            f"The folder {name} contains a configuration but no weights, and method `{config.method}` needs weights: "
            "add them, or first train the model from scratch with method `full` and use that run as the base model.",
        )
    return True
