"""Backend for simulated runs: real processes and events without training, for tests and trials without torch."""

from app.backends.base import BackendCapabilities, Rules
from app.backends.celery import CeleryBackend
from app.backends.fake_options import FakeOptions
from app.runs.config import TrainingMethod


class FakeBackend(CeleryBackend):
    """Backend with the same workers but a simulated trainer: any model name is valid, `extra` controls the behavior."""

    rules = Rules(
        capabilities=BackendCapabilities(
            name="fake",
            supports_local=True,
            supports_remote=True,
            supports_distributed=False,
            supported_methods=tuple(TrainingMethod),
            max_model_size_b=None,
            supported_quantization=("4bit", "8bit"),
            supports_streaming_logs=True,
        ),
        options=FakeOptions,
        machine_matters=False,
        loads_model=False,
    )
