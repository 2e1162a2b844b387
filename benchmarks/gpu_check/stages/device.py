"""Check that a worker makes of each device; fused adapters and variable-length attention beside their alternatives."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anneal.contracts.attempt.device import AssignedDevice
from benchmarks.gpu_check import processes
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.processes import Call

LENGTHS = (2048, 700, 31, 1200, 17, 96, 2048)
HEADS, KV_HEADS, WIDTH = 32, 8, 128
LARGEST_ERROR = 2e-2
"""Relative difference that rounding to bfloat16 explains."""


def run(check: Check) -> None:
    folder = check.folder("device check")
    end = processes.run(Call(_check_device, folder, (check.job_device,), 90))
    stderr = (folder / "stderr").read_text()
    limits = [line for line in stderr.splitlines() if "do not work" in line]
    text = " ".join(limits) if end.code == 0 else stderr[-300:]
    check.record("device check", "failed" if text else "ok", text, seconds=round(end.seconds, 1))
    _record(check, "fused adapters", _compare_adapters)
    if check.on_gpu:
        _record(check, "variable-length attention", _compare_attention)
        _record(check, "attention of equal lengths", _compare_equal_lengths)
    else:
        check.record("variable-length attention", "skipped", "needs a GPU")
        check.record("attention of equal lengths", "skipped", "needs a GPU")


def _record(check: Check, name: str, compare: Callable[[str, str], None]) -> None:
    """Record what a function measures, which takes the kind of device and the path of its result.

    Values whose name ends with `error` are relative differences, of which none may exceed `LARGEST_ERROR`.
    """
    folder = check.folder(name)
    end = processes.run(Call(compare, folder, (check.device.kind, str(folder / "result.json")), 60))
    if end.code != 0:
        check.record(name, "failed", (folder / "stderr").read_text()[-300:])
        return
    measured = json.loads((folder / "result.json").read_text())
    wrong = [key for key, value in measured.items() if key.endswith("error") and not value <= LARGEST_ERROR]
    text = f"above {LARGEST_ERROR}: {', '.join(wrong)}" if wrong else ""
    check.record(name, "failed" if wrong else "ok", text, **measured)


def _check_device(device: dict[str, Any]) -> None:
    from worker.training.model.device_check import check_device

    check_device(AssignedDevice(**device))


def _compare_adapters(kind: str, path: str) -> None:
    """Compare the fused layer with that of peft, and check its dropout: relative errors of results and gradients.

    The two draw other masks. With its mask, the layer is linear in `x` and in both factors of the adapter, so the inner
    product of each gradient with its argument is known from the result alone: with another mask in the backward pass,
    it would be another.
    """
    import torch
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model

    from worker.training.model.fused_lora import fuse_lora_layers

    measured = {}
    for name, layer in (
        ("16-bit", torch.nn.Linear(512, 768, bias=False).bfloat16()),
        ("4-bit", Linear4bit(512, 768, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")),
    ):
        config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.25, target_modules=["0"], init_lora_weights=False)
        model = get_peft_model(torch.nn.Sequential(layer).to(kind), config)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for weight in weights:
            weight.data = weight.data.float()
        x = torch.randn(2, 300, 512, device=kind, dtype=torch.bfloat16, requires_grad=True)

        def results(model: Any = model, inputs: Any = (x, *weights)) -> list[Any]:
            with torch.autocast(kind, dtype=torch.bfloat16):
                out = model(inputs[0])
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]

        expected = results(model.eval())
        assert fuse_lora_layers(model) == "fused"
        errors = [
            float((tensor.float() - other.float()).norm() / other.float().norm())
            for tensor, other in zip(results(), expected, strict=True)
        ]
        measured[f"{name}_error"], measured[f"{name}_gradient_error"] = errors[0], max(errors[1:])
        with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16), model.disable_adapter():
            without_adapter = model(x).double()
        out, *gradients = results(model.train())
        adapter = 2 * float((out.double() * (out.double() - without_adapter)).sum())
        products = [2 * float(out.double().square().sum()), adapter, adapter]
        measured[f"{name}_dropout_error"] = max(
            abs(float((gradient.double() * tensor.double()).sum()) / product - 1)
            for gradient, tensor, product in zip(gradients, (x, *weights), products, strict=True)
        )
    Path(path).write_text(json.dumps(measured))


def _compare_attention(kind: str, path: str) -> None:
    """Compare torch's kernel with one call per text and with a dense mask: errors, and forward and backward times."""
    import inspect

    import torch
    import torch.nn.functional as F
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(kind)
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


def _compare_equal_lengths(kind: str, path: str) -> None:
    """Compare what a run computes for long texts of equal length with the kernel for several lengths.

    `check_ms` is the time of the check before the first use, and `equal_first_ms` that of the first pass, in which
    cuDNN prepares its plans. `kept_mb` is what the forward pass leaves, and `peak_mb` the most that a pass allocates.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import LlamaConfig

    from worker.training.model import attention

    torch.manual_seed(0)
    device, count, length = torch.device(kind, torch.cuda.current_device()), 4, 4096
    architecture = LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HEADS * WIDTH)
    borders = tuple(range(0, (count + 1) * length, length))
    texts = attention.Texts(borders, torch.tensor(borders, dtype=torch.int32, device=device), length, None)
    states = [
        torch.randn(1, count * length, heads, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    gradient = torch.randn_like(states[0])
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // KV_HEADS

    def forward() -> Any:
        return attention.compute_attention(module, *(state.transpose(1, 2) for state in states), texts)[0]

    def results() -> list[Any]:
        out = forward()
        return [out.detach(), *torch.autograd.grad(out, states, gradient)]

    def milliseconds(compute: Callable[[], Any], passes: int) -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(passes):
            compute()
        torch.cuda.synchronize()
        return round((time.monotonic() - began) * 1000 / passes, 2)

    def measure(name: str) -> dict[str, float]:
        first = milliseconds(results, 1)
        milliseconds(results, 3)
        before = torch.cuda.memory_allocated()
        out = forward()
        kept_bytes = torch.cuda.memory_allocated() - before
        del out
        torch.cuda.reset_peak_memory_stats()
        pass_ms = milliseconds(results, 10)
        peak = torch.cuda.max_memory_allocated() - before
        return {
            f"{name}_first_ms": first, f"{name}_ms": pass_ms, f"{name}_kept_mb": round(kept_bytes / 2**20, 1),
            f"{name}_peak_mb": round(peak / 2**20, 1),
        }  # fmt: skip

    measured: dict[str, Any] = {"kernel_failure": attention.kernel_failure(device), **measure("varlen")}
    expected = results()
    began = time.monotonic()
    failure = attention.batch_texts(device, architecture, length)
    if failure is not None:
        raise RuntimeError(failure)
    measured |= {"check_ms": round((time.monotonic() - began) * 1000, 1), **measure("equal")}
    measured["is_batch"] = attention.batched_length() == length
    errors = [
        float((tensor - other).float().norm() / other.float().norm())
        for tensor, other in zip(results(), expected, strict=True)
    ]
    measured |= {"error": errors[0], "gradient_error": max(errors[1:])}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        results()
        torch.cuda.synchronize()
    names = [str(event.key) for event in profiled.key_averages()]
    measured["is_cudnn"] = any("cudnn" in name for name in names)
    print("\n".join(names))
    Path(path).write_text(json.dumps(measured))
