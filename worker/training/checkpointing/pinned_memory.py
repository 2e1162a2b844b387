"""Host memory that a state is copied into before a thread writes it; reused from one checkpoint to the next."""

import contextlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ALIGNED = 64
"""Alignment of copies in bytes: each takes a multiple of this."""
_PIECE_BYTES = 16 * 2**20
_MAX_THREADS = 4
"""More threads copy no faster than the memory allows, and other runs need processors too."""
_MARGIN_BYTES = 256 * 2**20
_MARGIN_DIVISOR = 20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class InsufficientHostMemory(Exception):
    """A copy would leave the machine too little memory for everything else; the text says so in a sentence."""


class PinnedMemory:
    """One block of memory, as large as the largest state so far.

    Fresh memory takes several times as long as the copy itself, because the kernel clears each page. So a thread
    prepares the memory while training continues, and every later copy reuses it. Reuse is safe once the previous copy
    is on the disk, and not earlier.
    """

    def __init__(self, processes: int = 1) -> None:
        """Hold nothing yet; on this machine, `processes` copy states of about the same size at the same time."""
        self._processes = processes
        self._map: mmap.mmap | None = None
        self._is_pinned, self._may_pin = False, True
        self._preparing: threading.Thread | None = None

    @property
    def bytes(self) -> int:
        """Size of the memory held."""
        return 0 if self._map is None else len(self._map)

    def prepare_memory(self, size: int) -> None:
        """Prepare memory for a state of `size` bytes in the background, if there is enough of it."""
        if size <= self.bytes or memory_shortage(size):
            return
        try:
            self._hold_map(size)
        except InsufficientHostMemory:
            return  # reported when the copy itself is made
        self._preparing = threading.Thread(target=self._touch_pages, args=[_own_gpu()], name="host memory", daemon=True)
        self._preparing.start()

    def copy_tensors(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return copies of `tensors`, by the `id` of each: same shape, type, order of elements and Python attributes.

        Tensors that share memory share a copy. Copies use the memory held here: the next call overwrites them.

        Raises:
            InsufficientHostMemory: nothing was copied.
        """
        distinct: dict[Any, torch.Tensor] = {}
        places: dict[int, Any] = {}
        for tensor in tensors:
            key = _storage_key(tensor)
            distinct.setdefault(key, tensor)
            places[id(tensor)] = key
        memory = self._allocate_map(sum(map(_aligned_bytes, distinct.values())))
        copies: dict[Any, torch.Tensor] = {}
        start = 0
        for key, tensor in distinct.items():
            copies[key] = _copy_target(tensor, memory, start)
            start += _aligned_bytes(tensor)
        _copy_all([(copies[key], tensor) for key, tensor in distinct.items()])
        return {name: copies[key] for name, key in places.items()}

    def _allocate_map(self, size: int) -> mmap.mmap:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._map is None or len(self._map) < size:
            if why := memory_shortage((size - self.bytes) * self._processes):
                raise InsufficientHostMemory(why)
            self._hold_map(size)
        self._pin_map(_own_gpu())
        assert self._map is not None  # noqa: S101 - held above
        return self._map

    def release(self) -> None:
        """Free the memory held; its copies must not be used any more."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._map is not None and self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(torch.frombuffer(self._map, dtype=torch.uint8).data_ptr())
        self._map, self._is_pinned, self._may_pin = None, False, True

    def _hold_map(self, size: int) -> None:
        self.release()  # frees the old one first
        try:
            self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        except OSError as error:  # a limit on the address space, or a kernel that does not overcommit
            raise InsufficientHostMemory(
                f"a copy of the state takes {size / 2**20:,.0f} MiB of host memory, which the system refuses ({error})"
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def _touch_pages(self, gpu: int | None) -> None:
        """Make the kernel allocate every page, piece by piece; torch lets other threads run meanwhile."""
        for piece in torch.frombuffer(self._map, dtype=torch.uint8).split(_PIECE_BYTES):
            piece.zero_()
        self._pin_map(gpu)

    def _pin_map(self, gpu: int | None) -> None:
        """Pin the memory, so that a GPU writes at the speed of the bus. If refused, copies are slower but correct."""
        if gpu is None or self._is_pinned or not self._may_pin:
            return
        # The current GPU of a new thread is the first one, on which each rank would create a context.
        with torch.cuda.device(gpu):
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
            refused = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
            self._is_pinned = self._may_pin = not refused
            if refused:
                # CUDA raises the refusal at this thread's next check for errors: make it here, not in a training step.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")


def _own_gpu() -> int | None:
    """Return the GPU on which the calling thread trains; None on a CPU."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def memory_shortage(size: int) -> str | None:
    """Return the reason why this machine cannot spare `size` bytes of memory; None if it can."""
    total, available = host_memory()
    margin = max(_MARGIN_BYTES, total // _MARGIN_DIVISOR)
    if size + margin <= available:
        return None
    return (
        f"a copy of the state takes {size / 2**20:,.0f} MiB of host memory, and {margin / 2**20:,.0f} MiB of the "
        f"{available / 2**20:,.0f} MiB available must stay free"
    )


def host_memory() -> tuple[int, int]:
    """Return total and available memory in bytes: of the machine, or of the tightest cgroup of this process.

    A container is a cgroup, and so is a systemd service or a cluster job; each may be nested in others.
    """
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name] = int(value.split()[0]) * 1024
    total, available = facts["MemTotal"], facts["MemAvailable"]
    for limit, used in _cgroup_limits():
        total, available = min(total, limit), min(available, limit - used)
    return total, max(available, 0)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each cgroup of this process with a limit, from its own up to the outermost."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, place = line.split(":", 2)
        if number == "0" and not controllers:
            roots, names = [_CGROUPS, _CGROUPS / "unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            roots, names = [_CGROUPS / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for root in roots:
            inner = root / place.lstrip("/")
            # The path may be outside of what is mounted here, or named differently: then the mount is the own group.
            groups = [inner, *inner.parents] if ".." not in inner.parts else [root]
            for group in groups:
                if group.is_relative_to(root) and (limit := _cgroup_limit(group, *names)):
                    yield limit


def _cgroup_limit(group: Path, limit_name: str, used_name: str) -> tuple[int, int] | None:
    try:
        limit = (group / limit_name).read_text().strip()
        used = int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # Cached files that the kernel drops under pressure; cgroup v1 counts those of inner groups under `total_…`.
    return int(limit), used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _storage_key(tensor: torch.Tensor) -> Any:
    return (
        tensor.device, tensor.data_ptr() or id(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()),
        tuple(sorted(vars(tensor))),
    )  # fmt: skip


def _aligned_bytes(tensor: torch.Tensor) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNED) * ALIGNED


def _copy_target(tensor: torch.Tensor, memory: mmap.mmap, start: int) -> torch.Tensor:
    if tensor.numel() == 0:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        size = tensor.numel() * tensor.element_size()
        # With a separate storage: saving a tensor writes all of its storage.
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(tensor.dtype)
        copy = torch.as_strided(flat, tensor.shape, torch.empty_like(tensor, device="meta").stride())
    # Optimizers of bitsandbytes set attributes on their tensors, which are saved with them.
    vars(copy).update(vars(tensor))
    return copy


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        pieces = [piece for pair in pairs for piece in _chunk_pairs(*pair)]
        if any(source.is_cuda for _, source in pieces):
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            return
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS, len(pieces))
        if threads < 2 or sum(target.nbytes for target, _ in pieces) < _PIECE_BYTES:
            for target, source in pieces:
                target.copy_(source)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda pair: pair[0].detach().copy_(pair[1].detach()), pieces))


def _chunk_pairs(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if source.nbytes <= _PIECE_BYTES or not (source.is_contiguous() and target.is_contiguous()):
        yield target, source
        return
    length = _PIECE_BYTES // source.element_size()
    yield from zip(target.view(-1).split(length), source.detach().view(-1).split(length), strict=True)
