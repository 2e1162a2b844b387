"""Page of the service's settings: every environment variable with its type, default and description."""

import ast
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

import anneal.settings
import app.config
from docs.generator import markdown

_INTRO = """\
Every process reads its settings from environment variables. An empty one counts as unset. The defaults run
everything on one machine.

"""
_OTHERS = """\
## Variables of other libraries

| variable | default | meaning |
| --- | --- | --- |
| `OMP_NUM_THREADS` | `1` | Threads of a training process on the CPU. On a dedicated machine set it to the number of cores per slot. |
| `HF_ENDPOINT` | the hub's own | Mirror of the Hugging Face Hub for models, datasets and `push_to_hub`. |
| `HF_HUB_DISABLE_TELEMETRY` | `1` in training processes | `0` lets TRL report each run (architecture, GPU, kind of trainer) to the Hugging Face Hub, unless `DO_NOT_TRACK` is set. |
| `WANDB_ERROR_REPORTING` | `false` in training processes | `true` lets `wandb` report its own errors to its vendor. |
| `HF_XET_*` | | Tuning of downloads from the hub, such as `HF_XET_HIGH_PERFORMANCE`; set them for workers. |
| `PYTORCH_ALLOC_CONF` | `expandable_segments:True` in training processes | torch's allocator of GPU memory; set it for workers. The default is empty in WSL2, or if `PYTORCH_CUDA_ALLOC_CONF` is set. |
| `CC`, `TRITON_CACHE_DIR`, `XDG_CACHE_HOME` | | C compiler and caches of compiled GPU kernels; set them for workers. |
| `WANDB_BASE_URL`, `WANDB_ENTITY`, `WANDB_PROJECT`, `WANDB_MODE` | W&B's own; project `anneal` | Destination of runs with `report_to: ["wandb"]`, as read by `wandb`; set them for workers. |
| `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL` | | Credentials and endpoint for `ANNEAL_STORAGE=s3://…`, set for API and workers. |
| `CUDA_VISIBLE_DEVICES` | all | GPUs that a worker uses, by index or UUID; MIG instances by UUID (`nvidia-smi -L`). |
"""


def page() -> str:
    """Return the page."""
    text = markdown.header("Service settings", "`app/config.py` and `anneal/settings.py`") + _INTRO
    text += "## API and workers\n\n" + _table(app.config.Settings)
    text += "## Command line and Python client\n\n" + _table(anneal.settings.ClientSettings)
    return text + _OTHERS


def _table(model: type[BaseSettings]) -> str:
    described = _attribute_docstrings()
    rows = []
    schema = model.model_json_schema()
    for name, field in schema["properties"].items():
        meaning = field.get("description") or described.get(name, "")
        if not meaning:
            raise ValueError(f"the setting {name} has no description")
        kind = markdown.type_text(field, schema.get("$defs", {})).removesuffix(" or null")
        rows.append(
            (f"`ANNEAL_{name.upper()}`", kind, _default(name, field), markdown.escape(" ".join(meaning.split())))
        )
    return markdown.table(("variable", "type", "default", "meaning"), rows)


def _default(name: str, field: dict[str, Any]) -> str:
    derived = {
        "home": "`~/.anneal`",
        "models_root": "`$ANNEAL_HOME/models`",
        "storage": "`$ANNEAL_HOME/storage`",
        "cache": "`$ANNEAL_HOME/cache`",
    }
    if name in derived:
        return derived[name]
    value = field.get("default")
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _attribute_docstrings() -> dict[str, str]:
    """Return the string that follows each attribute of the settings."""
    descriptions = {}
    modules = (anneal.settings, app.config)
    for node in (node for module in modules for node in ast.walk(ast.parse(Path(module.__file__).read_text()))):
        if isinstance(node, ast.ClassDef):
            for statement, following in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and isinstance(following, ast.Expr)
                    and isinstance(following.value, ast.Constant)
                ):
                    descriptions[statement.target.id] = str(following.value.value)
    return descriptions
