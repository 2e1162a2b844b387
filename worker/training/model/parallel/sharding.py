"""Sharding: weights, gradients and optimizer state of a run divided among its devices.

With `expert_parallel`, the only module that uses torch's interfaces for it: `fully_shard`, `DTensor` and
`torch.distributed.checkpoint`.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.trainer import OPTIMIZER_NAME

from worker.training.model.parallel.expert_parallel import divide_experts
from worker.training.ranks import NEVER
from worker.wire.heartbeat import HeartbeatCallback

OPTIMIZER_FOLDER = "optimizer"
"""Folder of torch.distributed.checkpoint in a checkpoint of a sharded run: optimizer state by parameter name."""
_PIECE_BYTES = 64 * 2**20
"""Size of the messages in which a file is sent."""


class PartNotWritten(RuntimeError):
    """A rank could not write its part of a checkpoint; raised on every rank."""


class Sharding:
    """Division of one model among the ranks of its run; every rank makes the same calls in the same order."""

    def __init__(
        self, model: torch.nn.Module, device: torch.device, alive: HeartbeatCallback, experts: int = 1
    ) -> None:
        """Move the model to the device layer by layer, and keep only this rank's part of each.

        A layer is whole on the device while it computes; embeddings and head are from a forward pass to the end of
        its backward pass. `experts` is the number of ranks that share the experts of a layer instead.
        """
        self._model = model
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        divided = divide_experts(model, mesh, experts, alive) if experts > 1 else set()
        whole = model.get_base_model() if isinstance(model, PeftModel) else model
        layers = set(getattr(whole, "_no_split_modules", None) or ())
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, ignored_params=divided)
                alive()
        fully_shard(model, mesh=mesh, ignored_params=divided)
        if isinstance(model, PeftModel) and hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")  # it calls the model inside, and not this one
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        # For threads that write checkpoints: the loop uses the other groups meanwhile.
        self._writers = dist.new_group(backend="gloo", timeout=NEVER)
        self._writers_mesh = DeviceMesh.from_group(self._writers, "cpu")

    def reshard(self) -> None:
        """Keep only this rank's part of what a forward pass without a backward pass has left whole."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_weights(self, keep: bool, alive: HeartbeatCallback) -> dict[str, torch.Tensor]:
        """Gather the weights by name, or those of the adapter alone, in host memory; without `keep` return none.

        Every rank takes part. One tensor at a time is whole on the devices.
        """
        self.reshard()
        gathered: dict[int, torch.Tensor] = {}
        names: dict[str, int] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor) or (
                isinstance(self._model, PeftModel) and not tensor.requires_grad
            ):
                continue
            names[name] = id(tensor)  # tied weights have several names
            if id(tensor) not in gathered:
                whole = gather_full(tensor.detach())
                alive()
                gathered[id(tensor)] = whole.to("cpu", copy=True) if keep else torch.empty(0)
        return {name: gathered[one] for name, one in names.items()} if keep else {}

    def optimizer_parts(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], "Layouts"]:
        """Return this rank's part of the optimizer state by parameter name, and the layout of the whole."""
        state = {
            f"{self._names[parameter]}.{part}": value
            for parameter, parts in optimizer.state.items()
            for part, value in parts.items()
        }
        layouts = {
            name: (value.placements, value.shape, value.stride())
            for name, value in state.items()
            if isinstance(value, DTensor)
        }
        return {name: local_part(value) for name, value in state.items()}, layouts

    def save_optimizer(self, parts: Mapping[str, torch.Tensor], layouts: "Layouts", folder: Path) -> None:
        """Write the parts of all ranks, in host memory, to a checkpoint; any thread may, with its peers on all ranks.

        Raises:
            PartNotWritten: a rank could not write its part.
            OSError: raised on one rank alone, which cannot send its part to another host, or on rank 0, which cannot
                keep it there.
        """
        state: dict[str, Any] = {}
        for name, part in parts.items():
            state[name] = part = part.cpu()
            if name in layouts:
                placements, shape, stride = layouts[name]
                state[name] = DTensor.from_local(
                    part, self._writers_mesh, placements, run_check=False, shape=shape, stride=stride
                )
        try:
            dcp.save(state, checkpoint_id=str(folder / OPTIMIZER_FOLDER), process_group=self._writers)
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise PartNotWritten(f"Rank {rank} could not write its part of the checkpoint: {cause}") from cause
        _bring_to_rank_0(folder / OPTIMIZER_FOLDER, self._writers)


def _bring_to_rank_0(folder: Path, group: dist.ProcessGroup) -> None:
    """Send the files of a checkpoint that rank 0 does not see to it: those of hosts that share no folder with it.

    Every rank takes part. A rank whose files were sent keeps none of them.

    Raises:
        OSError: Rank 0 could not write a file; raised there alone.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    written: list[dict[str, int]] = [{} for _ in range(size)]
    own = {path.name: path.stat().st_size for path in sorted(folder.glob(f"__{rank}_*"))}
    dist.all_gather_object(written, own, group)
    unseen = [[name for files in written for name in files if not (folder / name).is_file()]]
    dist.broadcast_object_list(unseen, 0, group)
    failure: OSError | None = None
    for source, files in enumerate(written):
        for name in (name for name in files if name in unseen[0]):
            if rank == source:
                _send_file(folder / name, files[name], group)
            elif rank == 0:
                failure = _receive_file(folder / name, files[name], source, group, failure)
    if failure is not None:
        raise failure
    if own and unseen[0]:
        with suppress(OSError):  # another rank of this host is still sending, or rank 0 writes more into it
            folder.rmdir()
            folder.parent.rmdir()


def _send_file(path: Path, size: int, group: dist.ProcessGroup) -> None:
    with path.open("rb") as file:
        for begin in range(0, size, _PIECE_BYTES):
            piece = bytearray(file.read(min(_PIECE_BYTES, size - begin)))
            dist.send(torch.frombuffer(piece, dtype=torch.uint8), group=group, group_dst=0)
    path.unlink()


def _receive_file(
    path: Path, size: int, source: int, group: dist.ProcessGroup, failure: OSError | None
) -> OSError | None:
    """Receive a file to its end, even if it cannot be written; return that failure, or the one before."""
    staging = path.with_name(f".{path.name}.tmp")
    for begin in range(0, size, _PIECE_BYTES):
        piece = torch.empty(min(_PIECE_BYTES, size - begin), dtype=torch.uint8)
        dist.recv(piece, group=group, group_src=source)
        if failure is None:
            try:
                with staging.open("ab") as file:
                    file.write(piece.numpy().data)
            except OSError as error:
                failure = error
    if failure is None:
        staging.rename(path)
    return failure


Layouts = Mapping[str, tuple[Any, torch.Size, tuple[int, ...]]]
"""Placements, shape and stride of the whole of each divided tensor."""


def has_parts(checkpoint: Path) -> bool:
    """Return True if a sharded run has made the checkpoint."""
    return (checkpoint / OPTIMIZER_FOLDER).is_dir()


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load the optimizer state of a checkpoint for parameters that are sharded, or were when it was made.

    The contents of a checkpoint must have been verified: its metadata is a pickle.
    """
    if not has_parts(checkpoint):
        _distribute_state(optimizer, torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
        return
    reader = dcp.FileSystemReader(str(checkpoint / OPTIMIZER_FOLDER))
    saved = reader.read_metadata().state_dict_metadata
    parameters = dict(model.named_parameters())
    state: dict[str, Any] = {}
    for key, about in saved.items():
        like = parameters[key.rpartition(".")[0]]
        dtype = about.properties.dtype
        is_like = about.size == like.shape
        state[key] = torch.empty_like(like, dtype=dtype) if is_like else torch.empty(about.size, dtype=dtype)
    is_sharded = any(isinstance(one, DTensor) for one in parameters.values())
    dcp.load(state, storage_reader=reader, no_dist=not is_sharded)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in state.items():
        name, _, part = key.rpartition(".")
        parameter = parameters[name]
        optimizer.state[parameter][part] = _place_value(value, part, parameter, groups[parameter])


def _distribute_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give each rank its part of the whole optimizer state that a run on one device, or on replicas, has saved."""
    for group, numbers in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            for part, value in saved["state"].get(number, {}).items():
                if value.shape == parameter.shape:
                    whole = value.to(parameter.device)
                    value = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                optimizer.state[parameter][part] = _place_value(value, part, parameter, group)


def _place_value(value: torch.Tensor, part: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return a part of the state where the optimizer expects it, as `Optimizer.load_state_dict` places it.

    Fused and capturable optimizers count steps on the device of the parameter, all others on the CPU.
    """
    if part == "step" and (group.get("fused") or group.get("capturable")):
        return value.to(parameter.device, torch.float32)
    return value


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, or all of one that is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_full(tensor: Any) -> Any:
    """Gather a divided tensor on every rank; return anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
