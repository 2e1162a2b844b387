"""Expert parallelism: the devices of a group have different experts, and exchange the tokens that are routed to them.

Between the passes, each rank of the run has an equal part of the experts, as `fully_shard` would divide their tensors,
so that the optimizer, clipping and checkpoints treat them as any other. In a pass, a rank computes the experts of its
place in its group; if there are several groups, it first gathers those of that place from the other groups.
The only module that uses the expert parallelism of transformers.
"""

from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import ParamWrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from transformers.distributed.expert_parallel import AllToAllEP

from anneal.contracts.training_config.expert_parallel import MODEL_TYPES, devices_message, fitting_groups
from worker.training.model.experts import expert_modules
from worker.wire.heartbeat import HeartbeatCallback


def divide_experts(model: torch.nn.Module, mesh: DeviceMesh, count: int, alive: HeartbeatCallback) -> set[Any]:
    """Divide the experts of each layer among the ranks, `count` of which share those of a forward pass.

    Returns their parameters, which nothing else may divide.
    """
    groups = init_device_mesh(
        mesh.device_type, (mesh.size() // count, count, 1), mesh_dim_names=("copies", "experts", "alone")
    )
    parameters: set[Any] = set()
    for module in expert_modules(model):
        _Experts(module, mesh, groups)
        parameters.update(module.parameters(recurse=False))
        alive()
    return parameters


def division_obstacle(model: Any, devices: int, count: int) -> str | None:
    """Return a clause that says why the experts of a model cannot be divided in this way; None if they can."""
    kind = getattr(model.config.get_text_config(), "model_type", None)
    if kind not in MODEL_TYPES:
        return f"this model ({kind}) has no experts that can be divided; only {', '.join(MODEL_TYPES)} have"
    numbers = {module.num_experts for module in expert_modules(model)}
    if not numbers:
        return "no layer of this model has experts"
    (number,) = numbers
    if count not in fitting_groups(devices, number):
        return f"it {devices_message(devices, number)}"
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        return "the adapter includes experts or routers; set `target_modules` to layers of attention"
    return None


class _Experts:
    """Experts of one layer, of which this rank computes those of its place in its group."""

    def __init__(self, module: Any, mesh: DeviceMesh, groups: DeviceMesh) -> None:
        self._module, self._compute_all = module, module.forward
        number, ranks, count = module.num_experts, mesh.size(), groups["experts"].size()
        self._own, self._ranks, self._copies = number // count, ranks, groups["copies"]
        each = number // ranks
        # Rank r keeps the r-th part of the experts; the ranks of the same place are `count` apart.
        part, within = torch.arange(number) // each, torch.arange(number) % each
        self._places = part % count * self._own + part // count * each + within
        for name, parameter in list(module.named_parameters(recurse=False)):
            first = mesh.get_local_rank() * each
            own_experts = parameter.detach()[first : first + each].to(mesh.device_type, copy=True)
            divided = DTensor.from_local(own_experts, mesh, [Shard(0)], run_check=False)
            setattr(module, name, torch.nn.Parameter(divided, requires_grad=parameter.requires_grad))
        self._exchange = AllToAllEP(module, groups["experts"], groups["alone"])
        self._exchange.num_local_experts = self._own
        self._exchange.experts_forward = self._compute_tokens
        module.forward = self._forward_tokens

    def _forward_tokens(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        places = self._places = self._places.to(experts.device)
        outputs: torch.Tensor = self._exchange(hidden_states, places[experts], weights)
        return outputs.to(hidden_states.dtype)

    def _compute_tokens(self, *inputs: torch.Tensor) -> Any:
        """Compute tokens with this rank's experts; gathered ones are released, and gathered again backward."""
        if self._copies.size() > 1 and torch.is_grad_enabled():
            return checkpoint(self._compute_own, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self._compute_own(*inputs)

    def _compute_own(self, *inputs: torch.Tensor) -> Any:
        module, number = self._module, self._module.num_experts
        parameters = dict(module._parameters)
        module._parameters.update(
            {name: _Gathered.apply(one.to_local(), self._copies, self._ranks) for name, one in parameters.items()}
        )
        module.num_experts = self._own
        try:
            return self._compute_all(*inputs)
        finally:
            module._parameters.update(parameters)
            module.num_experts = number


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """Gathers experts from the groups; their gradient is the mean over the ranks, as that of all other weights.

    The ranks of a group have sent their tokens to these experts, so the gradient is the sum of theirs already.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, copies: DeviceMesh, ranks: int) -> torch.Tensor:
        ctx.copies, ctx.ranks = copies, ranks
        if copies.size() == 1:
            return part.view_as(part)
        gathered = part.new_empty(copies.size() * len(part), *part.shape[1:])
        dist.all_gather_single(gathered, part.contiguous(), group=copies.get_group())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        count = ctx.copies.size()
        if count > 1:
            total = gradient.new_empty(len(gradient) // count, *gradient.shape[1:])
            dist.reduce_scatter_single(total, gradient.contiguous(), group=ctx.copies.get_group())
            gradient = total
        return gradient / ctx.ranks, None, None
