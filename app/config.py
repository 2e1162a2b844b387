"""Settings of every process, and the only place that reads the environment."""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class _AtHome(BaseSettings):
    """What servers and clients have in common."""

    model_config = SettingsConfigDict(env_prefix="ANNEAL_", extra="ignore", frozen=True, validate_default=True)

    home: Path = Field(default_factory=lambda: Path.home() / ".anneal")
    """Data of the embedded servers, `connection.json`, and storage unless that is set."""

    @field_validator("home")
    @classmethod
    def _make_absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @property
    def connection_file(self) -> Path:
        """Where a running `anneal up` tells url, key and process ids (mode 0600)."""
        return self.home / "connection.json"


class ClientSettings(_AtHome):
    """Where the command line and the Python client find the service, unless they are told."""

    url: str | None = None
    """Of the service; unset: the one that `connection.json` names."""
    api_key: str | None = Field(default=None, repr=False)
    """What `anneal keys create` printed."""


class Settings(_AtHome):
    """What can be set for a server, each as `ANNEAL_<NAME>`; the defaults run everything on one machine."""

    database_url: str | None = None
    """Your own PostgreSQL (`postgresql://user:password@host/name`); unset: the embedded server."""
    redis_url: str | None = None
    """Your own Redis or Valkey (`redis://…`); unset: the embedded server."""
    host: str = "127.0.0.1"
    port: int = Field(default=8700, ge=0, le=65535)
    """Port of the API; 0 takes any free one."""
    slots: int | None = Field(default=None, ge=1, le=256)
    """Runs at a time on this worker; unset: one per GPU, or one on a machine without."""
    lease_seconds: float = Field(default=60.0, ge=1.0, le=3600.0)
    """How long a run belongs to a worker that has gone silent; renewal, kill and grace times follow from it."""
    hang_seconds: float = Field(default=1800.0, ge=1.0)
    """A trainer that neither reports nor prints anything for this long hangs: it is killed and its run tried again."""
    models_root: Path | None = None
    """Folder of local base models, named in `base_model` by their path below it."""
    storage: Path | None = None
    """Folder of data sets, checkpoints and outputs, shared by API and workers."""
    secret_key_file: Path | None = None
    """Keys with which secrets are sealed, the same file on every machine; unset: `secret.key` below `home`."""
    trainer_user: str | None = None
    """Unix user that training processes run as."""
    token_cache_bytes: int = Field(default=10 * 1024**3, ge=0)
    """Room for tokenised data that later runs take up again, of each user that trains; 0 keeps none."""
    disk_reserve_bytes: int = Field(default=1024**3, ge=0)
    """Bytes below the storage that checkpoints leave free: one that would take them is left out, or fails its run."""
    checkpoint_url: str | None = None
    """Where workers keep a second copy of each checkpoint (`s3://bucket/prefix`, `file:///share`); unset: nowhere."""
    launch: Literal["auto", "zygote", "cold"] = "auto"
    """How training processes start: forked from a warm process, or cold; auto prefers warm."""
    max_upload_bytes: int = Field(default=4 * 1024**3, ge=1)
    max_json_bytes: int = Field(default=1024**2, ge=1024)
    max_line_bytes: int = Field(default=16 * 1024**2, ge=1024)
    """Longest line (one row) that a data set may have."""
    keep_events_days: float | None = Field(default=None, ge=0, le=36_500)
    """Days after the end of a run for which its events stay, by the month; unset: for ever. Its curves stay longer."""
    keep_checkpoints_days: float | None = Field(default=None, ge=0, le=36_500)
    """Days after the end of a run for which it keeps all its checkpoints, not just the furthest and the best."""
    keep_runs_days: float | None = Field(default=None, ge=0, le=36_500)
    """Days after its end for which a run stays, with everything that belongs to it; unset: for ever."""
    trust_remote_code: bool = False
    """Let models from the hub bring their own code; only the operator can switch this on."""
    allow_hub: bool = True
    """Let `base_model` name a model of the Hugging Face hub, and an import a data set of it."""
    allowed_models: str = ""
    """Which base models may be named, as patterns such as `qwen3-*, meta-llama/*`, comma-separated; unset: all."""
    mlflow_tracking_uri: str | None = None
    """MLflow server that runs with `report_to: ["mlflow"]` are told to, `http(s)://…`; its token is a secret."""
    gpu_hour_price: float | None = Field(default=None, ge=0)
    """What an hour of a GPU costs, for the cost of estimates; unset: none is told."""
    price_currency: str = Field(default="EUR", min_length=1, max_length=10)
    """Of `gpu_hour_price`."""
    log_format: Literal["json", "console"] | None = None
    """How API and workers log; unset: for people on a terminal, as JSON anywhere else."""
    allowed_hosts: str = ""
    """Further Host headers that the API answers to, comma-separated, beside loopback and `host`."""

    @field_validator("mlflow_tracking_uri")
    @classmethod
    def _keep_credentials_out(cls, uri: str | None) -> str | None:
        # It stands in job files, which are no place for a password.
        if uri is not None and re.fullmatch(r"https?://[^\s@]+", uri) is None:
            raise ValueError(
                "must be http(s)://host[:port][/path] without user and password; set the secret mlflow_tracking_token"
            )
        return uri

    @field_validator("checkpoint_url")
    @classmethod
    def _name_a_place_alone(cls, url: str | None) -> str | None:
        # It is shown in the logs of runs; the libraries of the stores find credentials in the worker's environment.
        if url is not None and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s@?#]+", url) is None:
            raise ValueError(
                "must be a URL such as s3://bucket/prefix or file:///mnt/share, without user, password and options; "
                "credentials of S3 belong into the worker's environment (AWS_ACCESS_KEY_ID and so on)"
            )
        return url

    @model_validator(mode="after")
    def _fill_derived_folders(self) -> "Settings":
        home = self.home
        object.__setattr__(self, "models_root", (self.models_root or home / "models").expanduser().absolute())
        object.__setattr__(self, "storage", (self.storage or home / "storage").expanduser().absolute())
        return self

    @property
    def storage_root(self) -> Path:
        """Folder of data sets, checkpoints and outputs."""
        return self.storage or self.home / "storage"

    @property
    def models_folder(self) -> Path:
        """Folder of local base models."""
        return self.models_root or self.home / "models"

    @property
    def renew_seconds(self) -> float:
        """Time between two renewals of a lease."""
        return self.lease_seconds / 6

    @property
    def kill_after_seconds(self) -> float:
        """A trainer is killed this long after the last renewal was sent, well before its lease can be reaped."""
        return self.lease_seconds * 2 / 3

    @property
    def save_after_seconds(self) -> float:
        """A trainer is asked for a checkpoint this long after the last renewal, while there is time to write one."""
        return self.lease_seconds / 2

    @property
    def save_grace_seconds(self) -> float:
        """Time that a training process gets to save when it is asked to stop."""
        return self.lease_seconds * 2

    @property
    def secret_key_path(self) -> Path:
        """Keys with which secrets are sealed."""
        return (self.secret_key_file or self.home / "secret.key").expanduser().absolute()

    def child_environment(self) -> dict[str, str]:
        """The environment of a child process of ours: this process's own, with these settings pinned."""
        pinned = {
            f"ANNEAL_{name.upper()}": str(value)
            for name, value in self.model_dump().items()
            if value is not None and value != ""
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ANNEAL_")}
        return {**inherited, **pinned}

    def trainer_environment(self) -> dict[str, str]:
        """The environment of the zygote and of training processes: an allow-list without any credential."""
        kept = {name: value for name, value in os.environ.items() if _trainer_may_see(name)}
        # A fork of a process with OpenMP threads hangs, and one thread is faster beside other runs on few cores.
        kept.setdefault("OMP_NUM_THREADS", "1")
        kept.setdefault("TOKENIZERS_PARALLELISM", "false")
        kept["PYTHONUNBUFFERED"] = "1"
        if not self.allow_hub:
            # Being told of local files only, transformers still asks the hub for adapters, and waits for its answer.
            kept["HF_HUB_OFFLINE"] = "1"
        # glibc gives every large block back to the kernel at once and asks for it again in the next step: with
        # blocks below 256 MiB kept, a step of a small model on a CPU took 0.18 s in place of 0.30 s.
        kept["MALLOC_MMAP_THRESHOLD_"] = kept["MALLOC_TRIM_THRESHOLD_"] = str(256 * 2**20)
        # bitsandbytes asks CUDA for its capability at import; NVML answers without creating a context.
        kept["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return kept


_TRAINER_VARIABLES = {
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
    "https_proxy", "no_proxy", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PYTHONPATH", "PYTHONHASHSEED",
    "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT",
}  # fmt: skip


def _trainer_may_see(name: str) -> bool:
    return name in _TRAINER_VARIABLES or name.startswith(("LC_", "NCCL_", "NVIDIA_"))


def postgres_environment() -> dict[str, str]:
    """The environment of the embedded PostgreSQL: nothing of another server's settings, nothing of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "ANNEAL_"))}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


def visible_gpus() -> str | None:
    """Which GPUs the operator leaves to us (CUDA_VISIBLE_DEVICES); None: all of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def hub_endpoint() -> str | None:
    """Where the Hugging Face hub is, when it is a mirror (HF_ENDPOINT); None: the usual place."""
    return os.environ.get("HF_ENDPOINT")


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read from the environment once."""
    return Settings()
