"""Rules of a run whose sequences are divided among devices (`resources.sequence_parallel`)."""

from app.contracts.methods import METHODS
from app.contracts.training_config.fields import TrainingConfig

_PLUGINS = ("model_factory", "collator", "metrics")


def sequence_parallel_obstacles(config: TrainingConfig) -> list[str]:
    """Return the reasons, as clauses, why the sequences of a run cannot be divided among devices."""
    found = []
    if not METHODS[config.method].is_supervised:
        names = ", ".join(f"`{name}`" for name, method in METHODS.items() if method.is_supervised)
        found.append(f"`{config.method}` needs whole sequences on each device; only {names} can divide them")
    if config.neftune_noise_alpha is not None:
        found.append("`neftune_noise_alpha` depends on the length of the whole sequence")
    if config.attn_implementation == "eager":
        found.append("`attn_implementation: eager` cannot be divided; use `sdpa`")
    for name in _PLUGINS:
        if config.extra.get(name):
            found.append(f"`extra.{name}` needs whole sequences on one device")
    return found


def fitting_divisions(devices: int, heads: int | None) -> list[int]:
    """Return the numbers of devices that can share a sequence: those that divide `devices` and the attention heads."""
    return [one for one in range(1, devices + 1) if devices % one == 0 and (heads is None or heads % one == 0)]
