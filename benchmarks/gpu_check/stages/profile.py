"""Where the time of one step goes: kernels on a GPU, operators on a CPU, by group, and when the GPU waits."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.jobs import Job, run_job
from benchmarks.gpu_check.models import shaped_model
from benchmarks.gpu_check.stages.throughput import Cell, job_of

CELL = Cell("qlora", "long", 0.05)
STEP = 3
"""Profiled step, from 1; those before it choose kernels and allocate memory."""
GROUPS = (
    ("attention", ("flash", "fmha", "sdpa", "attention", "varlen")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "wgmma", "cublas", "xmma", "aten::mm", "addmm", "bmm", "linear")),
    ("dequantize", ("dequant",)),
    ("dropout", ("dropout", "bernoulli", "philox")),
    ("norm, rope, SwiGLU", ("rms", "norm", "rope", "swiglu", "silu")),
    ("loss head", ("_forward_kernel", "_backward_kernel", "chunkedlogprob", "log_softmax")),
    ("optimizer", ("adam", "multi_tensor")),
    ("copy and cast", ("copy", "memcpy", "memset", "aten::to")),
    ("reduce", ("reduce", "sum")),
)
"""Parts of kernel names, in lower case; the first group that matches counts."""
_MOST_KERNELS = 25


def run(check: Check) -> None:
    path = check.folder("step") / "kernels.json"
    spec = job_of(check, shaped_model(check), CELL, STEP + 1)
    seconds = max(min(55.0 if check.on_gpu else 240.0, check.seconds_left - 2), 1)
    finished = run_job(check, Job(CELL.name, spec, profiled_step, (str(path), STEP), seconds))
    if not finished.completed or not path.exists():
        check.record("step", "failed", finished.problem[:400] or "no step was profiled")
        return
    profiled = json.loads(path.read_text())
    kernels: dict[str, list[float]] = profiled["kernels"]
    groups: Counter[str] = Counter()
    for name, (milliseconds, _) in kernels.items():
        groups[group_of(name)] += milliseconds  # type: ignore[assignment]
    total = sum(groups.values())
    if not total:
        check.record("step", "failed", "the profiler recorded no kernel")
        return
    check.record("step", text=CELL.name, milliseconds=round(total, 1), in_effect=finished.in_effect)
    for group, milliseconds in groups.most_common():
        check.record(group, milliseconds=round(milliseconds, 1), share=round(milliseconds / total, 3))
    if "idle_ms" in profiled:
        check.record("idle", milliseconds=profiled["idle_ms"], of_milliseconds=profiled["span_ms"])
        print("\n".join(profiled["gaps"]))
    slowest = sorted(kernels.items(), key=lambda item: -item[1][0])[:_MOST_KERNELS]
    print("\n".join(f"{values[0]:10.2f} ms {values[1]:6.0f} × {name[:110]}" for name, values in slowest))


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    name = kernel.lower()
    return next((group for group, parts in GROUPS if any(part in name for part in parts)), "elementwise and other")


@contextmanager
def profiled_step(path: str, number: int) -> Iterator[None]:
    """Write milliseconds and calls of each kernel from the begin of one step of the training to that of the next."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from worker.training.loop.callbacks import StepCallback

    cuda = torch.cuda.is_available()
    profiler = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    begin = StepCallback.on_step_begin

    def on_step_begin(callback: Any, args: Any, state: Any, *rest: Any, **more: Any) -> None:
        if state.global_step == number:
            if cuda:
                torch.cuda.synchronize()
            profiler.stop()
            Path(path).write_text(
                json.dumps({"kernels": _kernels(profiler, cuda), **(_idle(profiler) if cuda else {})})
            )
        if state.global_step == number - 1:
            profiler.start()
        begin(callback, args, state, *rest, **more)

    StepCallback.on_step_begin = on_step_begin
    yield


def _kernels(profiler: Any, cuda: bool) -> dict[str, tuple[float, int]]:
    """Return milliseconds and calls by name."""
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if getattr(event, name) > 0]
    if cuda:
        events = [event for event in events if event.device_type.name == "CUDA"]
    return {event.key: (getattr(event, name) / 1e3, event.count) for event in events}


def _idle(profiler: Any) -> dict[str, Any]:
    """Return how long the GPU waited in a step, and the longest gaps with the kernels on both sides."""
    events = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    )
    gaps: list[tuple[float, float, str]] = []
    end, last = events[0][0], ""
    for start, until, name in events:
        if start > end:
            gaps.append(((start - end) / 1e6, (end - events[0][0]) / 1e6, f"{last[:60]} | {name[:60]}"))
        if until > end:
            end, last = until, name
    gaps.sort(reverse=True)
    return {
        "idle_ms": round(sum(gap for gap, *_ in gaps), 1),
        "span_ms": round((end - events[0][0]) / 1e6, 1),
        "gaps": [f"{gap:8.2f} ms idle at {at:8.1f} ms: {names}" for gap, at, names in gaps[:_MOST_KERNELS]],
    }
