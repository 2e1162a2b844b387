"""Settings of the service; the only module that reads the environment."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from anneal.contracts.gpus import find_gpu, gpu_names
from anneal.contracts.human_numbers import BYTES
from anneal.contracts.rewards import RewardHost
from anneal.settings import HomeSettings

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=-]{0,62}")
"""Label of a worker."""


def _split_list(text: str) -> list[str]:
    return [part for one in text.split(",") if (part := one.strip())]


REMOVED_SETTINGS = {
    "ANNEAL_CHECKPOINT_URL": "unset it, and set ANNEAL_STORAGE to that URL if checkpoints are to survive the loss of a "
    "machine, as docs/operations/remote-checkpoints.md describes",
}
"""Settings that no longer exist, with what to do instead. A server that ignored one would do less than its operator
expects."""
_REWARD_HOST = re.compile(
    r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<bracketed>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?|(?P<bare>[0-9a-f:.]+)"
)
_HOST = r"[A-Za-z0-9._-]+|[0-9a-f:.]+"
_ORIGIN = r"https?://(?:\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::[0-9]{1,5})?"
_SERVICE = rf"(?i:{_ORIGIN})(?:/[A-Za-z0-9._~/-]*)?"
"""URL of a service. Errors do not repeat one that does not match, since it may contain a token."""


class Settings(HomeSettings):
    """Server settings, each read from `ANNEAL_<NAME>`; the defaults run everything on one machine."""

    database_url: str | None = None
    """URL of your PostgreSQL (`postgresql://user:password@host/name`); unset: the embedded server."""
    redis_url: str | None = None
    """URL of your Redis or Valkey (`redis://…`, or `rediss://…` with TLS); unset: the embedded server."""
    host: str = "127.0.0.1"
    """Address that the API listens on."""
    port: int = Field(default=8700, ge=0, le=65535)
    """Port of the API; 0 selects any free port."""
    slots: int | None = Field(default=None, ge=1, le=256)
    """Number of devices of this worker, each of which trains one run at a time; unset: every GPU, or one device on a
    machine without GPUs. A smaller number leaves GPUs out; on a CPU each device has an equal share of the memory."""
    worker_labels: str = ""
    """Labels of this worker, comma-separated, such as `site-b, gpu=h100`; runs ask for them in `resources.labels`."""
    group_interface: str | None = None
    """Network interface over which this worker trains runs together with other hosts (`resources.hosts`), such as
    `eth1`: a private network, since nothing on it is authenticated. Unset: it trains none."""
    lease_seconds: float = Field(default=60.0, ge=1.0, le=3600.0)
    """Seconds that a run stays leased to an unresponsive worker; renewal, kill and grace times derive from it."""
    hang_seconds: float = Field(default=1800.0, ge=1.0)
    """Seconds without reports or output after which a trainer counts as hung: it is killed and its run retried."""
    preempt_after_seconds: float | None = Field(default=None, ge=0)
    """Seconds after which a waiting run preempts runs of lower priority, which save and return to the queue; unset:
    never."""
    preempt_min_seconds: float = Field(default=600.0, ge=0)
    """Seconds that a run trains before it may be preempted."""
    models_root: Path | None = None
    """Folder of local base models; `base_model` names them by their path relative to it."""
    extra_model_roots: str = ""
    """Further folders of local base models, as comma-separated absolute paths; `base_model` names those by full path,
    or relative to their folder where `models_root` has no such name.

    Links in `models_root` may lead into them."""
    storage: str | Path | None = None
    """Folder of datasets, checkpoints and outputs, shared by the API and all workers; or the URL of an object store
    (`s3://bucket/prefix`), of which each worker keeps a working copy in `cache`."""
    cache: Path | None = None
    """Folder of the working copy if `storage` is a URL; unset: `cache` in `home`."""
    cache_bytes: Annotated[int, Field(ge=0), BYTES] = 100 * 1024**3
    """Size limit of the working copy: least recently used datasets and attempts are removed from it, except what a run
    uses or what is not in the store yet."""
    delivery_seconds: float = Field(default=3600.0, ge=1.0)
    """Seconds for which a worker keeps a finished output, and the device of its run, while the object store of
    `storage` takes nothing; then the run returns to the queue and continues from its last checkpoint."""
    secret_key_file: Path | None = None
    """File of the keys that encrypt secrets, identical on every machine; unset: `secret.key` in `home`."""
    fake_backend: bool = False
    """For tests: offer a backend that simulates training, with faults and files of any size. Every key that can create
    runs can use it, so leave it off on a server for others."""
    trainer_journal: bool = False
    """For tests: training processes record each step, its exact loss and its rows in `journal.jsonl` of the run."""
    trainer_user: str | None = None
    """Unix user that training processes run as."""
    token_cache_bytes: Annotated[int, Field(ge=0), BYTES] = 10 * 1024**3
    """Size limit of the tokenized-data cache, per Unix user that trains; 0 disables the cache."""
    disk_reserve_bytes: Annotated[int, Field(ge=0), BYTES] = 1024**3
    """Bytes that must stay free on a disk: uploads that would use them are refused, checkpoints are skipped or fail
    their run, and printed lines are not stored while the disk of the embedded database has less."""
    launch: Literal["auto", "zygote", "cold"] = "auto"
    """Launch of training processes: forked from a preloaded process (`zygote`) or `cold`; `auto` prefers the zygote."""
    max_upload_bytes: Annotated[int, Field(ge=1), BYTES] = 4 * 1024**3
    """Maximum size of an uploaded file, and of the dataset stored from it, in bytes."""
    max_json_bytes: Annotated[int, Field(ge=1024), BYTES] = 1024**2
    """Maximum size of a JSON request body, in bytes."""
    max_line_bytes: Annotated[int, Field(ge=1024), BYTES] = 16 * 1024**2
    """Maximum size of one row of a dataset, in bytes."""
    serve_idle_seconds: float = Field(default=300.0, ge=1.0)
    """Seconds without a question after which a serving run ends, and frees its device."""
    engine_url: str | None = None
    """URL of an engine with OpenAI's API, such as vLLM (`http://vllm:8000`), that answers questions to the base models
    which it serves, and to adapters on them; unset: serving runs answer all."""
    engine_api_key: str | None = Field(default=None, repr=False)
    """Key of the engine (`--api-key` of vLLM)."""
    engine_storage: Path | None = None
    """Folder at which the engine sees the storage, from which it loads adapters; unset: that of `storage`, which the
    engine must then see under the same path."""
    streams_per_key: int = Field(default=500, ge=1)
    """Maximum number of streams of events and logs that a key may have open at each API process."""
    keep_events_days: float | None = Field(default=None, ge=0, le=36_500)
    """Days for which events are kept after a run ends, deleted by month; unset: forever. Metric curves stay longer."""
    keep_checkpoints_days: float | None = Field(default=None, ge=0, le=36_500)
    """Days after a run ends for which all its checkpoints are kept; later only the latest and the best are kept."""
    keep_runs_days: float | None = Field(default=None, ge=0, le=36_500)
    """Days after a run ends for which the run and all its data are kept; unset: forever."""
    trust_remote_code: bool = False
    """Allow models from the hub to run their own code; only the operator can enable this."""
    allow_hub: bool = True
    """Allow `base_model` to name a model, and an import to name a dataset, of the Hugging Face Hub."""
    allowed_models: str = ""
    """Allowed base models, as comma-separated patterns such as `qwen3-*, meta-llama/*`; unset: all."""
    mlflow_tracking_uri: str | None = None
    """URL of the MLflow server for runs with `report_to: ["mlflow"]` (`http(s)://…`); its token is set as a secret."""
    gpu_hour_price: float | None = Field(default=None, ge=0)
    """Price of a GPU hour, for the cost in estimates and usage; unset: they have no cost."""
    gpu_hour_prices: str = ""
    """Prices of an hour of single GPUs, comma-separated, such as `H100=2.9, A100 80GB=1.6`, before `gpu_hour_price`."""
    price_currency: str = Field(default="EUR", min_length=1, max_length=10)
    """Currency of `gpu_hour_price`."""
    gguf_converter: Path | None = None
    """Path of llama.cpp's converter of Hugging Face models on this worker (`…/llama.cpp/convert_hf_to_gguf.py`), or of
    a program that starts it; unset: runs with `gguf` are refused."""
    gguf_quantizer: Path | None = None
    """Path of llama.cpp's `llama-quantize` on this worker; unset: `build/bin/llama-quantize` beside the converter."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector that receives traces over HTTP (`http://collector:4318`); unset: no traces."""
    ray_url: str | None = None
    """URL of the dashboard of the Ray cluster for runs of backend `ray` (`http://ray-head:8265`); unset: none."""
    ray_token: str | None = Field(default=None, repr=False)
    """Token of a Ray cluster with `RAY_AUTH_MODE=token`."""
    log_format: Literal["json", "console"] | None = None
    """Log format of the API and workers; unset: `console` on a terminal, `json` otherwise."""
    webhook_private_hosts: str = ""
    """Hosts inside your network that webhooks may call, also over plain HTTP, as comma-separated names or addresses
    (`mattermost.internal, 10.1.2.3`); unset: webhooks call only public HTTPS addresses."""
    reward_hosts: str = ""
    """Public HTTPS hosts that rewards of runs may call, comma-separated, each with `=` and the name of the secret that
    it receives as a bearer token, if any (`api.openai.com=openai_key, scores.example.com:8443`); without a port only
    443 may be called; unset: none."""
    reward_private_hosts: str = ""
    """Hosts inside your network that rewards of runs may call, also over plain HTTP, as names or addresses, with
    ports and secrets as in `reward_hosts` (`judge.internal:8000=judge_key, 10.1.2.3`); without a port only that of the
    scheme may be called, 443 or 80; unset: none."""
    allowed_hosts: str = ""
    """Additional Host headers that the API accepts, comma-separated; loopback and `host` are always accepted."""
    allowed_origins: str = ""
    """Origins of other sites whose pages may call the API with a key or a stream ticket, comma-separated
    (`https://dashboards.example.com`); unset: none."""

    @field_validator("extra_model_roots")
    @classmethod
    def _check_roots(cls, roots: str) -> str:
        invalid = [root for root in _split_list(roots) if not Path(root).is_absolute() or Path(root) == Path("/")]
        if invalid:
            raise ValueError(f"{invalid[0][:200]!r} is not the absolute path of a folder; separate folders by commas")
        return roots

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: str) -> str:
        invalid = [origin for origin in _split_list(origins) if re.fullmatch(_ORIGIN, origin) is None]
        if invalid:
            raise ValueError(
                f"{invalid[0][:200]!r} is not an origin: write scheme, host and port as browsers send them, such as "
                "https://dashboards.example.com or http://localhost:3000, in lower case, without a path, and never *"
            )
        return origins

    @field_validator("webhook_private_hosts")
    @classmethod
    def _check_webhook_hosts(cls, hosts: str) -> str:
        invalid = [host for host in _split_list(hosts) if re.fullmatch(_HOST, host) is None]
        if invalid:
            raise ValueError(
                f"{invalid[0][:200]!r} is not a host: write names or addresses without scheme, port and path, such as "
                "mattermost.internal"
            )
        return hosts

    @field_validator("reward_hosts", "reward_private_hosts")
    @classmethod
    def _check_reward_hosts(cls, hosts: str) -> str:
        invalid = [host for host in _split_list(hosts) if not _is_reward_host(host)]
        if invalid:
            # A key in place of its name must not be in the log.
            raise ValueError(
                f"{invalid[0].partition('=')[0].strip()[:200]!r} is not a host, or what follows its = is not the name "
                "of a secret: write names or addresses without scheme and path, with a port if it is not that of the "
                "scheme, such as api.openai.com=openai_key or judge.internal:8000, and set the key with `anneal "
                "secrets set openai_key`"
            )
        return hosts

    @field_validator("gpu_hour_prices")
    @classmethod
    def _have_prices(cls, value: str) -> str:
        _parse_prices(value)
        return value

    @property
    def prices_by_gpu(self) -> dict[str, float]:
        """Prices of an hour by name of the GPU (`anneal.contracts.gpus`)."""
        return _parse_prices(self.gpu_hour_prices)

    def gpu_price(self, name: str | None) -> float | None:
        """Return the price of an hour of the GPU that a driver names so; None: it has none."""
        gpu = find_gpu(name)
        return self.gpu_hour_price if gpu is None else self.prices_by_gpu.get(gpu.name, self.gpu_hour_price)

    @field_validator("worker_labels")
    @classmethod
    def _check_labels(cls, labels: str) -> str:
        invalid = [label for label in _split_list(labels) if LABEL.fullmatch(label) is None]
        if invalid:
            raise ValueError(
                f"{invalid[0][:80]!r} is not a label: use up to 63 letters, digits and . _ : / = -, the first one a "
                "letter or digit, and commas between labels"
            )
        return labels

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_collector(cls, url: str | None) -> str | None:
        if url is not None and re.fullmatch(r"https?://[^\s@?#]+", url) is None:
            raise ValueError(
                "must be http(s)://host[:port][/path] without user and password; OTEL_EXPORTER_OTLP_HEADERS can have a "
                "token"
            )
        return url

    @field_validator("ray_url")
    @classmethod
    def _check_ray(cls, url: str | None) -> str | None:
        if url is not None and re.fullmatch(_SERVICE, url) is None:
            raise ValueError(
                "must be http(s)://host[:port][/path], the address of Ray's dashboard, without user, password and "
                "options; set ANNEAL_RAY_TOKEN to the cluster's token"
            )
        return url

    @field_validator("engine_url")
    @classmethod
    def _check_engine(cls, url: str | None) -> str | None:
        if url is not None and re.fullmatch(_SERVICE, url) is None:
            raise ValueError(
                "must be http(s)://host[:port][/path], the address of the engine, without user, password and options; "
                "set ANNEAL_ENGINE_API_KEY to its key"
            )
        return url

    @field_validator("engine_storage")
    @classmethod
    def _check_engine_storage(cls, folder: Path | None) -> Path | None:
        if folder is not None and not folder.is_absolute():
            raise ValueError(f"{str(folder)[:200]!r} is not an absolute path: write it as the engine sees it")
        return folder

    @field_validator("ray_token", "engine_api_key")
    @classmethod
    def _check_token(cls, token: str | None) -> str | None:
        if token is not None and re.fullmatch(r"[!-~]+", token) is None:
            raise ValueError("must be printable ASCII characters without spaces")
        return token

    @field_validator("mlflow_tracking_uri")
    @classmethod
    def _reject_credentials(cls, uri: str | None) -> str | None:
        # The URI is written to job files, which must not contain a password.
        if uri is not None and re.fullmatch(r"https?://[^\s@]+", uri) is None:
            raise ValueError(
                "must be http(s)://host[:port][/path] without user and password; set the secret mlflow_tracking_token"
            )
        return uri

    @field_validator("storage")
    @classmethod
    def _check_store_url(cls, url: str | Path | None) -> str | Path | None:
        # The URL appears in run logs; the storage libraries read credentials from the process's environment.
        is_url = isinstance(url, str) and "://" in url
        if is_url and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s@?#]+", str(url)) is None:
            raise ValueError(
                "must be a URL such as s3://bucket/prefix or file:///mnt/share, without user, password and options; "
                "set S3 credentials in the environment (AWS_ACCESS_KEY_ID and so on)"
            )
        return url

    @model_validator(mode="after")
    def _refuse_removed_settings(self) -> "Settings":
        set_names = {name.upper() for name, value in os.environ.items() if value}
        for name, advice in REMOVED_SETTINGS.items():
            if name in set_names:
                raise ValueError(f"{name} was removed: {advice}")
        return self

    @model_validator(mode="after")
    def _fill_derived_folders(self) -> "Settings":
        home = self.home
        object.__setattr__(self, "models_root", (self.models_root or home / "models").expanduser().absolute())
        if self.gguf_converter is not None:
            object.__setattr__(self, "gguf_converter", self.gguf_converter.expanduser().absolute())
            quantizer = self.gguf_quantizer or self.gguf_converter.parent / "build" / "bin" / "llama-quantize"
            object.__setattr__(self, "gguf_quantizer", quantizer.expanduser().absolute())
        if self.cache is not None:
            object.__setattr__(self, "cache", self.cache.expanduser().absolute())
        if self.storage_url is None:
            object.__setattr__(self, "storage", Path(self.storage or home / "storage").expanduser().absolute())
        for root in self.model_roots[1:]:
            # Training processes write to the storage, so a model there is not the operator's.
            real, storage = Path(os.path.realpath(root)), Path(os.path.realpath(self.storage_root))
            if real.is_relative_to(storage) or storage.is_relative_to(real):
                raise ValueError(f"ANNEAL_EXTRA_MODEL_ROOTS: {root} overlaps the storage {storage}; use another folder")
        return self

    @property
    def foreign_origins(self) -> tuple[str, ...]:
        """Origins of other sites whose pages may call the API."""
        return tuple(_split_list(self.allowed_origins))

    @property
    def private_webhook_hosts(self) -> frozenset[str]:
        """Hosts inside the network that webhooks may call."""
        return frozenset(_split_list(self.webhook_private_hosts.lower()))

    @property
    def allowed_reward_hosts(self) -> list[RewardHost]:
        """Hosts that rewards may call. Of two entries for one address the first decides."""
        return [
            *_parse_reward_hosts(self.reward_private_hosts, is_private=True),
            *_parse_reward_hosts(self.reward_hosts, is_private=False),
        ]

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of this worker, sorted."""
        return tuple(sorted(set(_split_list(self.worker_labels))))

    @property
    def storage_root(self) -> Path:
        """Folder of datasets, checkpoints and outputs on this machine: all of them, or the working copy of some."""
        if self.storage_url is not None:
            return self.cache or self.home / "cache"
        return Path(self.storage or self.home / "storage")

    @property
    def storage_url(self) -> str | None:
        """URL of the object store; None if the storage is a folder that all machines share."""
        return self.storage if isinstance(self.storage, str) and "://" in self.storage else None

    @property
    def models_folder(self) -> Path:
        """Folder of local base models."""
        return self.models_root or self.home / "models"

    @property
    def model_roots(self) -> tuple[Path, ...]:
        """All folders of local base models, `models_folder` first."""
        return (self.models_folder, *(Path(root) for root in _split_list(self.extra_model_roots)))

    @property
    def renew_seconds(self) -> float:
        """Seconds between two lease renewals."""
        return self.lease_seconds / 6

    @property
    def kill_after_seconds(self) -> float:
        """Seconds after the last sent renewal at which a trainer is killed, well before its lease can be reaped."""
        return self.lease_seconds * 2 / 3

    @property
    def save_after_seconds(self) -> float:
        """Seconds after the last renewal at which a trainer must save a checkpoint, while there is still time."""
        return self.lease_seconds / 2

    @property
    def save_grace_seconds(self) -> float:
        """Seconds that a training process has to save a checkpoint when it is asked to stop."""
        return self.lease_seconds * 2

    @property
    def secret_key_path(self) -> Path:
        """File of the keys that encrypt secrets."""
        return (self.secret_key_file or self.home / "secret.key").expanduser().absolute()

    def child_environment(self) -> dict[str, str]:
        """Return the environment for a service child process: this process's environment with these settings pinned."""
        pinned = {
            f"ANNEAL_{name.upper()}": str(value)
            for name, value in self.model_dump().items()
            if value is not None and value != ""
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ANNEAL_")}
        return {**inherited, **pinned}

    def trainer_environment(self) -> dict[str, str]:
        """Return the environment of the zygote and of training processes: an allowlist without credentials."""
        environment = {name: value for name, value in os.environ.items() if _is_trainer_variable(name)}
        # One thread is faster when runs share few cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
        # Importing numpy starts the threads of OpenBLAS, whose number is otherwise that of OpenMP, and a process with
        # threads cannot be forked. The threads of OpenMP, with which torch computes, start at the first computation.
        environment["OPENBLAS_NUM_THREADS"] = "1"
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        environment["PYTHONUNBUFFERED"] = "1"
        # By default, TRL reports every run to the hub (architecture, GPU, trainer), and W&B its errors to its vendor.
        environment.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        environment.setdefault("WANDB_ERROR_REPORTING", "false")
        if not self.allow_hub:
            # With `local_files_only`, transformers still queries the hub for adapters and waits for the response.
            environment["HF_HUB_OFFLINE"] = "1"
        # glibc returns every large block to the kernel at once and requests it again in the next step. With blocks
        # below 256 MiB kept, a step of a small model on a CPU took 0.18 s instead of 0.30 s.
        environment["MALLOC_MMAP_THRESHOLD_"] = environment["MALLOC_TRIM_THRESHOLD_"] = str(256 * 2**20)
        if not any(environment.get(name) for name in _ALLOCATOR_VARIABLES) and not _is_wsl():
            # Batches of different lengths fragment the memory of a GPU unless its blocks can grow.
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        # bitsandbytes queries the CUDA capability at import; NVML does so without creating a context.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return environment


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_TRAINER_VARIABLES = {
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", *_ALLOCATOR_VARIABLES,
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy",
    "https_proxy", "no_proxy", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PYTHONPATH", "PYTHONHASHSEED",
    "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_ERROR_REPORTING", "WANDB_MODE", "WANDB_PROJECT",
    "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK", "CC", "TRITON_CACHE_DIR", "XDG_CACHE_HOME",
}  # fmt: skip


_TRAINER_PREFIXES = ("LC_", "NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_", "NVIDIA_", "HF_XET_")


def _is_trainer_variable(name: str) -> bool:
    return name in _TRAINER_VARIABLES or name.startswith(_TRAINER_PREFIXES)


def _is_wsl() -> bool:
    """Return True in the Windows Subsystem for Linux, where some drivers refuse expandable segments."""
    return "microsoft" in platform.release().lower()


def placed_worker_environment(kind: str, devices: int, labels: Sequence[str]) -> dict[str, str]:
    """Return the environment of a worker that a cluster places: that of this process, with its devices and labels."""
    own = _split_list(os.environ.get("ANNEAL_WORKER_LABELS", ""))
    placed = {"ANNEAL_SLOTS": str(devices), "ANNEAL_WORKER_LABELS": ",".join([*own, *labels])}
    if kind == "cpu":
        placed["CUDA_VISIBLE_DEVICES"] = ""
    environment = {**os.environ, **placed}
    # Ray sets it for its actors, to the CPUs of the bundle or to 1. That of the node is in the process above.
    environment.pop("OMP_NUM_THREADS", None)
    import psutil  # clients read settings too, and need it for nothing

    above = psutil.Process().parent()
    if above is not None and (threads := above.environ().get("OMP_NUM_THREADS")):
        environment["OMP_NUM_THREADS"] = threads
    return environment


def postgres_environment() -> dict[str, str]:
    """Return the environment of the embedded PostgreSQL, without `PG*` and `ANNEAL_*` variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "ANNEAL_"))}
    return environment | {"LC_ALL": "C", "TZ": "UTC"}


def database_client_environment(password: str | None) -> dict[str, str]:
    """Return the environment of a PostgreSQL client program such as `pg_dump`, with English messages.

    A password is in it rather than in the program's arguments, which every user of the machine can read.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANNEAL_")}
    return environment | {"LC_ALL": "C"} | ({} if password is None else {"PGPASSWORD": password})


def visible_gpus() -> str | None:
    """Return the GPUs that the operator makes available (CUDA_VISIBLE_DEVICES); None means all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def hub_endpoint() -> str | None:
    """Return the URL of a Hugging Face Hub mirror (HF_ENDPOINT); None means the default endpoint."""
    return os.environ.get("HF_ENDPOINT")


def model_source_environment() -> dict[str, str]:
    """Return the variables that decide where this process finds models of the hub, and whether it reaches the hub."""
    return {name: value for name, value in sorted(os.environ.items()) if name in _MODEL_SOURCE_VARIABLES and value}


_MODEL_SOURCE_VARIABLES = {
    "HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
    "no_proxy",
}  # fmt: skip


def hub_is_offline() -> bool:
    """Return True if the operator forbids calls to the hub (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def wandb_mode() -> str:
    """Return the mode of Weights & Biases (WANDB_MODE); runs need a key if it is `online`, the default."""
    return os.environ.get("WANDB_MODE", "online")


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Return the settings of this process, read from the environment once."""
    return Settings()


def _parse_prices(text: str) -> dict[str, float]:
    prices: dict[str, float] = {}
    for part in _split_list(text):
        name, _, price = part.partition("=")
        if (gpu := find_gpu(name)) is None:
            raise ValueError(f"{name.strip()!r} is no known GPU; use one of {gpu_names()}")
        if not re.fullmatch(r" *[0-9]{1,6}(\.[0-9]{1,6})? *", price):
            raise ValueError(f"{part!r} has no price; write it as {gpu.name}=2.9")
        prices[gpu.name] = float(price)
    return prices


def _is_reward_host(text: str) -> bool:
    """Return True for `host`, `host:port`, `[IPv6]:port` or an IPv6 address, each with or without `=secret`."""
    address, equals, secret = (piece.strip() for piece in text.partition("="))
    match = _REWARD_HOST.fullmatch(address)
    if match is None or (equals and not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", secret)):
        return False
    return match["port"] is None or 0 < int(match["port"]) < 65536


def _parse_reward_hosts(text: str, *, is_private: bool) -> Iterator[RewardHost]:
    for part in _split_list(text):
        address, _, secret = (piece.strip() for piece in part.partition("="))
        if (match := _REWARD_HOST.fullmatch(address)) is not None:
            name = match["name"] or match["bracketed"] or match["bare"]
            port = int(match["port"]) if match["port"] else None
            yield RewardHost(name=name.lower(), port=port, is_private=is_private, secret=secret or None)
