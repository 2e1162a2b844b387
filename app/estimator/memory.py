"""Memory of a training run by component, and the peak within a step."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.optimizers import OPTIMIZERS
from app.estimator.activations import Activations, Checkpointing, Precision, compute_activations
from app.estimator.architecture import Architecture
from app.estimator.forward_pass import Attention, Batch
from app.estimator.parameters import SCORE, Trained, Weight, distinct_weights, trainable_part

CONTEXT = {"cuda": 600 * 2**20, "cpu": 700 * 2**20}
"""Assumed bytes of a process before any tensor: the CUDA context and its libraries; a CPU process with torch."""
_BLOCK = 64
"""Weights per 4-bit quantization constant."""
_BLOCKS = 256
"""Constants per block of double quantization, and elements per block of an 8-bit optimizer."""
_BLOCK_4BIT = 128
"""Elements per block of a 4-bit optimizer."""
_PLUGIN_OPTIMIZER = "adamw_torch"
_SMALLEST_8BIT = 4096
"""Tensors with fewer elements have 32-bit optimizer state."""


@dataclass(frozen=True)
class Division:
    """Division of a model among the devices of a run."""

    shards: int = 1
    """Number of devices that weights, gradients and optimizer state are divided among."""
    experts: int = 1
    """Number of these devices that share the experts of a layer, so that none has all of them."""


WHOLE = Division()


@dataclass(frozen=True)
class Components:
    """Bytes on the device by purpose; not all of them are allocated at the same time."""

    weights: int
    quantization_constants: int
    adapter: int
    """Adapters, and copies of fully trained modules (`modules_to_save`)."""
    reference: int
    """Reference copy of the base model, used by methods that generate, without an adapter."""
    gradients: int
    optimizer: int
    activations: int
    logits: int
    """Tensors of the loss, including the logits tile."""
    workspace: int
    """Temporary tensors of the backward pass or the optimizer, whichever is larger; if the run is sharded, also the
    layers that are whole for a moment."""
    generation: int
    """KV cache of the completions that the model generates."""
    context: int


@dataclass(frozen=True)
class Memory:
    """Memory requirement of a run, in bytes."""

    components: Components
    peak: int
    """Peak within a step, tensors and context."""
    activations: Activations

    @property
    def tensors(self) -> int:
        """Peak without the context, as torch reports allocated GPU memory."""
        return self.peak - self.components.context

    def as_megabytes(self) -> dict[str, float]:
        """Return each component and `total`, in MiB."""
        return {name: round(value / 2**20, 1) for name, value in asdict(self.components).items()} | {
            "total": round(self.peak / 2**20, 1)
        }


def estimate_memory(
    model: Architecture,
    config: TrainingConfig,
    precision: Precision,
    batch: Batch,
    checkpointing: Checkpointing | int,
    attention: Attention,
    division: Division = WHOLE,
) -> Memory:
    """Compute the memory of a run under an effective configuration with micro-batches no larger than `batch`.

    `checkpointing` may be the number of recomputed layers. The result is the memory of each device of those that the
    model is divided among.

    Raises:
        CannotTrain: The model cannot be trained with this configuration.
    """
    trainable, shards = trainable_part(model, config), division.shards
    held = compute_activations(model, config, precision, batch, checkpointing, attention, shards)
    whole, constants = _base_bytes(model, config, precision)
    gathered = _gathered_bytes(model, config, whole, precision, division) if shards > 1 else 0
    base, gradients = -(-whole // shards), -(-trainable.count * precision.trained // shards)
    adapter = 0 if config.lora_r is None else gradients
    optim = counted_optimizer(config)
    optimizer = -(-optimizer_state(trainable.tensors, config) // shards)
    dequantized = _dequantized_bytes(model, config, precision) + gathered
    optimizer_workspace = -(-_optimizer_workspace(trainable, optim, precision) // shards)
    generation = _generation_bytes(model, config, precision)
    copied = config.generation is not None and config.generation.beta > 0 and config.lora_r is None
    reference = base if copied else 0
    static = base + constants + adapter + reference + optimizer
    accumulated = gradients if config.gradient_accumulation_steps > 1 else 0
    copied_head = _copied_head(model, trainable, precision)
    backward = held.peak + held.mask + accumulated + gathered + copied_head
    tensors, logits = held.kept_bytes + held.mask + held.again, held.head + held.head_workspace
    temporary = max(dequantized, optimizer_workspace, backward - tensors - logits - gradients)
    context = CONTEXT[precision.device]
    # A 4-bit model is divided once it is on the device; any other comes there layer by layer.
    loading = whole + constants if shards > 1 and config.load_in_4bit else 0
    return Memory(
        Components(
            weights=base,
            quantization_constants=constants,
            adapter=adapter,
            reference=reference,
            gradients=gradients,
            optimizer=optimizer,
            activations=tensors,
            logits=logits,
            workspace=temporary,
            generation=generation,
            context=context,
        ),
        max(static + max(backward, gradients + optimizer_workspace, generation), loading) + context,
        held,
    )


def counted_optimizer(config: TrainingConfig) -> str:
    """Return the optimizer whose state is counted; for a plugin, AdamW (two 32-bit moments) is assumed."""
    return config.optim if config.trainer_options.optimizer is None else _PLUGIN_OPTIMIZER


def _copied_head(model: Architecture, trainable: Trained, precision: Precision) -> int:
    """Return the bytes of a head with trained tokens, and of its gradient, which are whole matrices in each step.

    Only a head that is one matrix with the embeddings has them. The embeddings themselves are whole where little else
    is there: at the start of the forward and at the end of the backward pass.
    """
    has_tokens = trainable.tokens is not None and model.tied
    return 2 * model.vocabulary * model.hidden * precision.base if has_tokens else 0


def _base_bytes(model: Architecture, config: TrainingConfig, precision: Precision) -> tuple[int, int]:
    """Return the bytes of the loaded weights and of their quantization constants."""
    reward = METHODS[config.method].has_reward_head
    doubled = config.trainer_options.double_quant
    base = constants = 0
    for weight, number in distinct_weights(model, reward_head=reward):
        if not _is_quantized(weight, config):
            base += number * weight.count * precision.base
            continue
        bias = (weight.count - weight.weights) * precision.base
        if config.load_in_8bit:
            base += number * (weight.weights + bias)
            constants += number * weight.rows * 4
            continue
        base += number * (-(-weight.weights // 2) + bias)
        blocks = -(-weight.weights // _BLOCK)
        constants += number * (blocks + -(-blocks // _BLOCKS) * 4 + 1024 + 4 if doubled else blocks * 4)
        constants += number * 16 * 4
    return base, constants


def _gathered_bytes(
    model: Architecture, config: TrainingConfig, whole: int, precision: Precision, division: Division
) -> int:
    """Return the bytes of divided weights, and of their gradients, that are whole on each device at once.

    These are the embeddings and the head from the forward to the end of the backward pass, and two layers: one that
    computes, and the next one. Shared experts are gathered only from other groups, those of one layer at a time.
    """
    every = distinct_weights(model)
    ends = sum(number * one.count for one, number in every if one.kind == "embedding" or one.name.startswith("lm_head"))
    of_experts = sum(number * one.count for one, number in every if one.kind == "experts" and division.experts > 1)
    layers = max(model.layers, 1)
    layer = max(whole - (ends + of_experts) * precision.base, 0) // layers
    experts = of_experts * precision.base // layers // division.experts if division.experts < division.shards else 0
    gradients = ends * 4 + layer + experts if config.lora_r is None else 0
    return ends * precision.base + 2 * layer + experts + gradients


def _is_quantized(weight: Weight, config: TrainingConfig) -> bool:
    is_requested = config.load_in_4bit or config.load_in_8bit
    return is_requested and weight.kind == "linear" and weight.name not in ("lm_head", SCORE)


def _optimizer_moments(config: TrainingConfig, optim: str) -> int:
    """Return the values of the optimizer state per trained weight."""
    optimizer = OPTIMIZERS[optim]
    return optimizer.moments + ("momentum" in optimizer.options and bool(config.trainer_options.optim_args.momentum))


def optimizer_state(tensors: Iterable[tuple[str, int, int]], config: TrainingConfig) -> int:
    """Return the bytes of the optimizer state of trained tensors, each as in `Trained.tensors`."""
    optim = counted_optimizer(config)
    moments, total = _optimizer_moments(config, optim), 0
    for kind, rows, columns in tensors:
        count = rows * columns
        if OPTIMIZERS[optim].rounds_stochastically and count >= _SMALLEST_8BIT:
            values, block = (count, _BLOCKS) if "8bit" in optim else (-(-count // 2), _BLOCK_4BIT)
            total += moments * (values + 4 * -(-count // block))
        elif optim == "adafactor":
            total += 4 * (rows + columns if columns > 1 else count)
        elif "8bit" in optim and count >= _SMALLEST_8BIT and kind != "embedding":
            total += moments * (count + 4 * -(-count // _BLOCKS))
        elif "torch" in optim or optim in ("rmsprop", "adagrad"):
            total += moments * count * 4 + 4
        else:
            total += moments * count * 4
    return total


def _optimizer_workspace(trainable: Trained, optim: str, precision: Precision) -> int:
    """Return the bytes of temporary tensors of an optimizer step; on a GPU, torch processes all weights at once."""
    sizes = [rows * columns * 4 for _, rows, columns in trainable.tensors]
    if optim in ("adamw_torch", "rmsprop", "adagrad"):
        return sum(sizes) if precision.device == "cuda" else max(sizes, default=0)
    return 2 * max(sizes, default=0) if optim == "adafactor" else 0


def _dequantized_bytes(model: Architecture, config: TrainingConfig, precision: Precision) -> int:
    """Return the bytes of the largest quantized matrix, dequantized to 16 or 32 bits for the backward pass."""
    size = 2 if precision.autocast else 4
    sizes = (weight.weights * size for weight, _ in distinct_weights(model) if _is_quantized(weight, config))
    return max(sizes, default=0)


def _generation_bytes(model: Architecture, config: TrainingConfig, precision: Precision) -> int:
    if config.generation is None:
        return 0
    written = config.batch_size * config.gradient_accumulation_steps
    length = min(config.max_seq_length or 2**31, model.longest or 2**31)
    size = 2 if precision.autocast else 4
    return 2 * written * length * model.kv_heads * model.head_width * model.layers * size
