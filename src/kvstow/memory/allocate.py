"""Bytes to build an arena on: host memory mapped by hand, device memory from torch.

Host memory is one mapping at an address that is a multiple of what the plan asks for. It
lives as long as any tensor over it: the tensor keeps the mapping's owner, and the owner's end
unpins, unmaps and closes the file. Unless it lies on huge pages, it is the mapping of a file in
memory, which other processes of this user can map too (`share`).
"""

import ctypes
import mmap
import os
import re
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

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostBytes(NamedTuple):
    """Host memory, and the open file that it maps; None where it maps none."""

    memory: torch.Tensor
    file: int | None


def host_bytes(nbytes: int, *, align: int, huge_pages: bool, pinned: bool) -> HostBytes:
    """Fresh zeroed host memory, its base a multiple of `align`.

    Files in memory get no huge pages from most systems: those are of this process alone.
    """
    if huge_pages:
        return HostBytes(_mapped(nbytes, align, -1, huge_pages=True, pinned=pinned), None)
    file = os.memfd_create("kvstow", os.MFD_CLOEXEC)
    try:
        os.truncate(file, align_up(nbytes, mmap.PAGESIZE))
        memory = _mapped(nbytes, align, file, huge_pages=False, pinned=pinned, close=True)
    except BaseException:
        os.close(file)
        raise
    return HostBytes(memory, file)


def file_bytes(file: int, nbytes: int) -> torch.Tensor:
    """Host memory over an open file, which may be closed: the mapping stays."""
    return _mapped(nbytes, 1, file, huge_pages=False, pinned=False)


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


def huge_page_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of the mapping that holds a host tensor lie on huge pages by now."""
    address, total = tensor.data_ptr(), 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            start, end = (int(bound, 16) for bound in bounds.groups())
            inside = start < address + tensor.nbytes and address < end
        elif inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
            total += int(line.split()[1]) * 1024
    return total


def _mapped(
    nbytes: int, align: int, file: int, *, huge_pages: bool, pinned: bool, close: bool = False
) -> torch.Tensor:
    """A mapping of a file, or of fresh memory where `file` is negative; with `close`, the file is
    closed when the mapping ends."""
    step = max(align, mmap.PAGESIZE, HUGE_PAGE_BYTES if huge_pages else 1)
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
        if huge_pages:
            _libc.madvise(address, length, mmap.MADV_HUGEPAGE)
        if pinned:
            weakref.finalize(pages, *_pinned(address, length)).atexit = False
        if close:
            weakref.finalize(pages, os.close, file).atexit = False
    except BaseException:
        unmap()
        raise
    return torch.frombuffer(pages, dtype=torch.uint8)


def _mmap(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    mapped = _libc.mmap(address, length, protection, flags, file, 0)
    if mapped == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise ArenaError(
            f"the system does not map {length} bytes: {reason}\n\nhint: plan less memory"
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
