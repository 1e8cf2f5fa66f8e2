"""Bytes to build an arena on: host memory mapped by hand, device memory from torch.

Host memory is one mapping at an address that is a multiple of what the plan asks for. It
lives as long as any tensor over it: the tensor keeps the mapping's owner, and the owner's end
unpins, unmaps and closes the file. Unless it lies on huge pages, it is the mapping of a file in
memory, which other processes of this user can map too (`share`). It can be near a device: `mbind`
makes the system prefer a node for pages that are not there yet, whoever fills or pins them. Where
the node is full, memory comes from elsewhere, and nothing fails where `mbind` is forbidden.
"""

import ctypes
import mmap
import os
import platform
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from kvstow.errors import ArenaError
from kvstow.plan.view import align_up

HUGE_PAGE_BYTES = 2 << 20

_NO_ACCESS = 0  # what <sys/mman.h> has and Python's mmap lacks
_FIXED = 0x10
_NO_RESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_MBIND = {("Linux", "x86_64"): ctypes.c_long(237), ("Linux", "aarch64"): ctypes.c_long(235)}
_PREFERRED = ctypes.c_long(1)  # MPOL_PREFERRED
_MAX_NODES = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostBytes(NamedTuple):
    """Host memory, and the open file that it maps; None where it maps none."""

    memory: torch.Tensor
    file: int | None


def host_bytes(
    nbytes: int,
    *,
    align: int,
    huge_pages: bool = False,
    pinned: bool = False,
    numa_node: int | None = None,
) -> HostBytes:
    """Fresh zeroed host memory, its base a multiple of `align`, on a node if it has room.

    Files in memory get no huge pages from most systems: those are of this process alone.
    """
    if huge_pages:
        return HostBytes(_mapped(nbytes, align, -1, pinned=pinned, numa_node=numa_node), None)
    file = os.memfd_create("kvstow", os.MFD_CLOEXEC)
    try:
        os.truncate(file, align_up(nbytes, mmap.PAGESIZE))
        memory = _mapped(nbytes, align, file, pinned=pinned, numa_node=numa_node, close=True)
    except BaseException:
        os.close(file)
        raise
    return HostBytes(memory, file)


def mapped_bytes(file: int, nbytes: int) -> torch.Tensor:
    """Host memory over an open file, which may be closed: the mapping stays."""
    return _mapped(nbytes, 1, file)


# ── devices, and memory of others ─────────────────────────────────────────────────────────


def device_bytes(nbytes: int, device: torch.device, *, align: int) -> torch.Tensor:
    """Fresh zeroed memory of a device, its base a multiple of `align`."""
    try:
        whole = torch.zeros(nbytes + align - 1, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ArenaError(
            f"device {device}: the layout needs {nbytes} bytes, {free} of {total} are free\n\n"
            f"hint: plan for less memory"
        ) from error
    except (RuntimeError, AssertionError) as error:  # torch has no such device
        raise ArenaError(
            f"device {device}: {error}\n\nhint: device='cpu' is always there"
        ) from error
    start = -whole.data_ptr() % align
    return whole[start : start + nbytes]


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A tensor over memory that somebody else keeps alive."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    return torch.as_tensor(_Foreign(address, nbytes), device=device)


class _Foreign:
    """Device memory, as other libraries hand it to torch."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, object] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _mapped(
    nbytes: int,
    align: int,
    file: int,
    *,
    pinned: bool = False,
    numa_node: int | None = None,
    close: bool = False,
) -> torch.Tensor:
    """A mapping of a file, or of fresh memory on huge pages where `file` is negative; with `close`,
    the file is closed when the mapping ends."""
    step = max(align, mmap.PAGESIZE, HUGE_PAGE_BYTES if file < 0 else 1)
    length = align_up(nbytes, mmap.PAGESIZE)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _mmap(None, length + step, _NO_ACCESS, private | _NO_RESERVE, -1)
    address = align_up(reserved, step)
    # A class of its own: only such arrays can be watched for their end.
    pages = cast(Any, type("Pages", (ctypes.c_uint8 * nbytes,), {})).from_address(address)
    # The last finalizer runs first: unpinned before unmapped. Neither runs at exit, where
    # other threads may still be at work on the memory and the system clears up anyway.
    unmap = weakref.finalize(pages, _libc.munmap, reserved, length + step)
    unmap.atexit = False
    try:
        flags = private if file < 0 else mmap.MAP_SHARED
        _mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, file)
        if file < 0:
            _libc.madvise(address, length, mmap.MADV_HUGEPAGE)
        if numa_node is not None:
            prefer_node(address, length, numa_node)
        if pinned:
            weakref.finalize(pages, *_pinned(address, length)).atexit = False
        if close:
            weakref.finalize(pages, os.close, file).atexit = False
    except BaseException:
        unmap()
        raise
    return torch.frombuffer(pages, dtype=torch.uint8)


def prefer_node(address: int, length: int, node: int) -> bool:
    """Have pages of a mapping that are not there yet on a node; whether the system agrees."""
    if (platform.system(), platform.machine()) not in _MBIND or not 0 <= node < _MAX_NODES:
        return False
    mask = (_MAX_NODES + 63) // 64 * [0]
    mask[node // 64] = 1 << node % 64
    number = _MBIND[platform.system(), platform.machine()]
    nodes = (ctypes.c_ulong * len(mask))(*mask)
    rest = (_PREFERRED, nodes, ctypes.c_long(_MAX_NODES), ctypes.c_long(0))
    return _libc.syscall(number, ctypes.c_void_p(address), ctypes.c_long(length), *rest) == 0


def node_of(device: torch.device) -> int | None:
    """The node that a CUDA device hangs on; None for any other, and where nobody says."""
    if device.type != "cuda":
        return None
    facts = cast(Any, torch.cuda).get_device_properties(device)
    try:
        place = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _mmap(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    mapped = _libc.mmap(address, length, protection, flags, file, 0)
    if mapped == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise ArenaError(
            f"the system cannot map {length} bytes: {reason}\n\nhint: plan for less memory"
        )
    return mapped


def _pinned(address: int, length: int) -> tuple[Callable[[int], object], int]:
    """Pins pages for every CUDA device; what unpins them again."""
    if not torch.cuda.is_available():
        raise ArenaError("host memory can be pinned only for a CUDA device, and there is none")
    cudart = cast(Any, torch.cuda.cudart())
    portable_and_mapped = 3
    status = int(cudart.cudaHostRegister(address, length, portable_and_mapped))
    if status:
        raise ArenaError(f"pinning {length} bytes of host memory: CUDA error {status}")
    return cudart.cudaHostUnregister, address
