"""Promises about the optimizer state that a checkpoint of a sharded run holds."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers.trainer import OPTIMIZER_NAME

from worker.training.model.parallel.sharding import OPTIMIZER_FOLDER, load_optimizer


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize(("option", "device"), [("fused", "meta"), ("capturable", "meta"), (None, "cpu")])
def test_steps_are_counted_where_the_optimizer_expects_them(
    tmp_path: Path, option: str | None, device: str, is_sharded: bool
) -> None:
    """The default optimizer is fused; on a GPU it refuses counts that are on the CPU."""
    if is_sharded:
        dcp.save({"weight.step": torch.tensor(3.0)}, checkpoint_id=str(tmp_path / OPTIMIZER_FOLDER), no_dist=True)
    else:
        saved = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]}
        torch.save(saved, tmp_path / OPTIMIZER_NAME)
    model = torch.nn.Linear(2, 2, bias=False, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    if option is not None:
        optimizer.param_groups[0][option] = True
    load_optimizer(model, optimizer, tmp_path)
    step = optimizer.state[model.weight]["step"]
    assert (step.device.type, step.dtype) == (device, torch.float32)
