"""Check that a worker makes of each device, and variable-length attention beside its alternatives."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.contracts.attempt.device import AssignedDevice
from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.processes import Call

LENGTHS = (2048, 700, 31, 1200, 17, 96, 2048)
HEADS, KV_HEADS, WIDTH = 32, 8, 128


def run(check: Check) -> None:
    folder = check.folder("device check")
    end = processes.run(Call(_check_device, folder, (check.job_device,), 90))
    stderr = (folder / "stderr").read_text()
    limits = [line for line in stderr.splitlines() if "do not work" in line]
    text = " ".join(limits) if end.code == 0 else stderr[-300:]
    check.record("device check", "failed" if text else "ok", text, seconds=round(end.seconds, 1))
    if not check.on_gpu:
        check.record("variable-length attention", "skipped", "needs a GPU")
        return
    folder = check.folder("attention")
    end = processes.run(Call(_compare_attention, folder, (str(folder / "result.json"),), 60))
    if end.code == 0:
        check.record("variable-length attention", **json.loads((folder / "result.json").read_text()))
    else:
        check.record("variable-length attention", "failed", (folder / "stderr").read_text()[-300:])


def _check_device(device: dict[str, Any]) -> None:
    from worker.training.model.device_check import check_device

    check_device(AssignedDevice(**device))


def _compare_attention(path: str) -> None:
    """Compare torch's kernel with one call per text and with a dense mask: errors, and forward and backward times."""
    import inspect

    import torch
    import torch.nn.functional as F
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    tokens, longest = sum(LENGTHS), max(LENGTHS)
    q, k, v = (
        torch.randn(tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    causal = (
        {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}
    )
    text = torch.repeat_interleave(torch.arange(len(LENGTHS), device="cuda"), offsets.diff().long())
    mask = (text[:, None] == text[None]) & torch.ones(tokens, tokens, device="cuda", dtype=torch.bool).tril()

    def varlen() -> Any:
        return varlen_attn(q, k, v, offsets, offsets, longest, longest, **causal, **grouped)

    def per_text() -> Any:
        bounds = offsets.tolist()
        parts = []
        for first, end in itertools.pairwise(bounds):
            heads = (tensor[first:end].transpose(0, 1)[None] for tensor in (q, k, v))
            part = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    def dense() -> Any:
        heads = (tensor.transpose(0, 1)[None].repeat_interleave(HEADS // tensor.shape[1], 1) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask[None, None])[0].transpose(0, 1)

    def error(value: Any, expected: Any) -> float:
        return float((value - expected).float().norm() / expected.float().norm())

    gradient = torch.randn(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)

    def gradients(attention: Callable[[], Any]) -> Any:
        return torch.autograd.grad(attention(), (q, k, v), gradient)

    def milliseconds(attention: Callable[[], Any]) -> float:
        for _ in range(3):
            gradients(attention)
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(10):
            gradients(attention)
        torch.cuda.synchronize()
        return round((time.monotonic() - began) * 100, 2)

    pairs = zip(gradients(varlen), gradients(per_text), strict=True)
    measured = {
        "error": error(varlen(), per_text()),
        "gradient_error": max(error(value, expected) for value, expected in pairs),
        "varlen_ms": milliseconds(varlen),
        "per_text_ms": milliseconds(per_text),
        "dense_mask_ms": milliseconds(dense),
    }
    Path(path).write_text(json.dumps(measured))
