"""Check of a device before it gets runs: one training step of a tiny model, loaded and computed as that of a run."""

import math
import sys
from tempfile import TemporaryDirectory

import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer import add_fused_lm_head

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from worker.training.failures import DEVICE_ERROR, OUT_OF_MEMORY, classify_error, one_line
from worker.training.model import loader
from worker.training.model.base_model import BaseModelSource
from worker.training.model.kernels import use_kernels, use_liger

_SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
_LOSS = math.log(_SHAPE.vocab_size)
"""Loss of random weights, in nats per token."""
_MOST_OFF = 0.5


def check_device(device: AssignedDevice) -> None:
    """Take one QLoRA step on the device: 4-bit weights, attention, mixed precision, and the loss kernels of a run.

    A lack of memory is no failure: other programs use it, which the worker notices before each run. A device that fails
    only with 4-bit weights is logged and takes runs: those with other weights train.

    Raises:
        TrainingFailure: `device_error`, as in a run: the device does not work, or the host cannot compile the kernels.
        RuntimeError: The step fails, or its results are wrong.
    """
    try:
        _take_step(device, TrainingMethod.qlora)
    except Exception as error:
        failure = classify_error(error)
        if failure.code == OUT_OF_MEMORY:
            return
        if failure.code == DEVICE_ERROR:
            raise failure from error
        _take_step(device, TrainingMethod.lora)
        sys.stderr.write(f"4-bit weights do not work on device {device.id}: {one_line(error)}\n")


def _take_step(device: AssignedDevice, method: TrainingMethod) -> None:
    machine = loader.machine_of(device)
    config = resolve_config(TrainingConfig(base_model="check", method=method), set(), machine).config
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(_SHAPE).save_pretrained(folder)
        base = BaseModelSource(folder, folder, {"local_files_only": True}, _SHAPE, identity="")
        network = loader.load_model(base, config, machine)
        use_liger(network, machine)
        # TRL's trainers compute the loss with it: on a GPU by Triton kernels, compiled on the host at their first use.
        add_fused_lm_head(network, outputs=("log_probs", "entropy", "is_top1"))
        model = get_peft_model(network, loader.lora_config(config))
    loader.keep_full_precision(model)
    use_kernels(model)
    ids = torch.arange(64, device=machine.kind).reshape(2, 32)
    with torch.autocast(machine.kind, dtype=torch.bfloat16 if machine.bf16 else torch.float16):
        loss = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not abs(loss.item() - _LOSS) < _MOST_OFF or not 0 < norm < math.inf:
        raise RuntimeError(
            f"a training step of a tiny model gives wrong results: a loss of {loss.item():.3g} instead of about "
            f"{_LOSS:.3g}, and gradients of norm {norm:.3g}"
        )


if __name__ == "__main__":
    check_device(AssignedDevice("cuda", 0, sys.argv[1]))
