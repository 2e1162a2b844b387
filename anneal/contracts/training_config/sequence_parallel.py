"""Rules of a run whose sequences are divided among devices (`resources.sequence_parallel`)."""

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig

_PLUGINS = ("model_factory", "collator", "metrics")


def sequence_parallel_obstacles(config: TrainingConfig) -> list[str]:
    """Return the reasons, as clauses, why the sequences of a run cannot be divided among devices."""
    obstacles = []
    if not METHODS[config.method].is_supervised:
        names = ", ".join(f"`{name}`" for name, method in METHODS.items() if method.is_supervised)
        obstacles.append(f"`{config.method}` needs whole sequences on each device; only {names} can divide them")
    if config.neftune_noise_alpha is not None:
        obstacles.append("`neftune_noise_alpha` depends on the length of the whole sequence")
    if config.torch_compile:
        obstacles.append("`torch_compile` compiles attention over whole sequences")
    if config.attn_implementation == "eager":
        obstacles.append("`attn_implementation: eager` cannot be divided; use `sdpa`")
    for name in _PLUGINS:
        if config.extra.get(name):
            obstacles.append(f"`extra.{name}` needs whole sequences on one device")
    return obstacles


def division_obstacle(count: int, devices: int, heads: int | None) -> str | None:
    """Return a clause that says what `count` devices for each sequence do not divide, and which numbers do.

    `devices` are those of the run, and `heads` the attention heads of its model; None: their number is not known.
    """
    unfit = []
    if devices % count:
        unfit.append(f"the {devices} {'device' if devices == 1 else 'devices'} of the run")
    if heads is not None and heads % count:
        unfit.append(f"the {heads} attention heads of the model")
    if not unfit:
        return None
    fitting = [one for one in range(1, devices + 1) if devices % one == 0 and (heads is None or heads % one == 0)]
    use = "1" if fitting == [1] else f"one of {', '.join(map(str, fitting))}"
    # With other devices, a number that does not divide the heads would not fit either.
    otherwise = ", or change `resources.devices`" if heads is None or heads % count == 0 else ""
    return f"does not divide {' or '.join(unfit)}: use {use}{otherwise}"
