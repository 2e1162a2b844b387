"""Rules of a run whose experts are divided among devices (`resources.expert_parallel`)."""

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import wants_adapter

MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Architectures whose experts can be divided, by `model_type`."""


def expert_parallel_obstacles(config: TrainingConfig) -> list[str]:
    """Return the reasons, as clauses, why the experts of a run cannot be divided among devices."""
    obstacles, method = [], METHODS[config.method]
    if not method.is_supervised:
        obstacles.append(f"`{config.method}` cannot divide experts; only `full`, `lora` and `sft` can")
    adapter = wants_adapter(config)
    if adapter and method.quantization != "forbidden" and (config.load_in_4bit or config.load_in_8bit):
        way = "use `method: lora`" if method.quantization == "required" else "set `load_in_4bit` to false"
        obstacles.append(f"a model in 4 or 8 bits cannot divide experts; {way}")
    if adapter and config.target_modules is None:
        obstacles.append(
            "an adapter of all linear layers includes the experts; set `target_modules` to layers of attention, such "
            "as `q_proj`, `k_proj`, `v_proj` and `o_proj`"
        )
    return obstacles


def fitting_groups(devices: int, experts: int | None) -> list[int]:
    """Return the numbers of devices that can share the experts: those that divide `devices`, which divide the experts.

    1 is always among them. None: the number of experts is not known.
    """
    if experts is not None and experts % devices:
        return [1]
    return [one for one in range(1, devices + 1) if devices % one == 0]


def devices_message(devices: int, experts: int | None) -> str:
    """Return the part of a message that says which numbers fit a run on these devices."""
    if experts is not None and experts % devices:
        fitting = ", ".join(str(one) for one in range(2, experts + 1) if experts % one == 0)
        return f"needs a number of devices that divides the {experts} experts of the model: {fitting}"
    fitting = ", ".join(map(str, fitting_groups(devices, experts)))
    return f"does not divide the {devices} devices of the run: use one of {fitting}"
