"""Bytes to build an arena on: host memory mapped by hand, device memory from torch.

Host memory is one mapping at an address that is a multiple of what the plan asks for. It
lives as long as any tensor over it: the tensor keeps the mapping's owner, and the owner's end
unpins and unmaps.
"""

import ctypes
import mmap
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from kvstow.errors import ArenaError
from kvstow.plan.view import align_up

HUGE_PAGE_BYTES = 2 << 20
SHARED_MEMORY = Path("/dev/shm")

_NO_ACCESS = 0  # what <sys/mman.h> has and Python's mmap lacks
_FIXED = 0x10
_NO_RESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                       ctypes.c_long]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def host_bytes(nbytes: int, *, align: int, huge_pages: bool, pinned: bool) -> torch.Tensor:
    """Fresh zeroed host memory of this process, its base a multiple of `align`."""
    return _mapped(nbytes, align, -1, huge_pages=huge_pages, pinned=pinned)


def shared_bytes(
    name: str, nbytes: int, *, align: int, huge_pages: bool, pinned: bool
) -> torch.Tensor:
    """Fresh zeroed host memory that other processes attach to by name."""
    path = shared_path(name)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ArenaError(
            f"shared memory {name!r} is there already\n\nhint: Arena.attach maps what another "
            f"process made; what a dead process left behind is {path}"
        ) from None
    try:
        os.posix_fallocate(file, 0, align_up(nbytes, mmap.PAGESIZE))
        return _mapped(nbytes, align, file, huge_pages=huge_pages, pinned=pinned)
    except OSError as error:
        path.unlink()
        raise ArenaError(f"shared memory {name!r}: {nbytes} bytes: {error.strerror}") from error
    finally:
        os.close(file)


def attached_bytes(name: str, nbytes: int, *, align: int, pinned: bool) -> torch.Tensor:
    """Host memory that another process made under this name and for as many bytes."""
    try:
        file = os.open(shared_path(name), os.O_RDWR)
    except FileNotFoundError:
        raise ArenaError(f"there is no shared memory {name!r}") from None
    try:
        found, wanted = os.fstat(file).st_size, align_up(nbytes, mmap.PAGESIZE)
        if found != wanted:
            raise ArenaError(
                f"shared memory {name!r} has {found} bytes, the layout needs {wanted}\n\n"
                f"hint: both processes must use the same layout"
            )
        return _mapped(nbytes, align, file, huge_pages=False, pinned=pinned)
    finally:
        os.close(file)


def remove_shared(name: str, maker: int) -> None:
    """Take a name away, in the process that made it; a forked child leaves it alone."""
    if os.getpid() == maker:
        shared_path(name).unlink(missing_ok=True)


def shared_path(name: str) -> Path:
    """Where the system keeps shared memory of that name."""
    if not name or "/" in name or name in (".", ".."):
        raise ArenaError(f"shared memory cannot be called {name!r}")
    return SHARED_MEMORY / name


def device_bytes(nbytes: int, device: torch.device, *, align: int) -> torch.Tensor:
    """Fresh zeroed memory of a device, its base a multiple of `align`."""
    whole = torch.zeros(nbytes + align - 1, dtype=torch.uint8, device=device)
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
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def huge_page_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of the mapping that holds a host tensor lie on huge pages by now."""
    address, found = tensor.data_ptr(), 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            start, end = (int(bound, 16) for bound in bounds.groups())
            inside = start < address + tensor.nbytes and address < end
        elif inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
            found += int(line.split()[1]) * 1024
    return found


def _mapped(nbytes: int, align: int, file: int, *, huge_pages: bool, pinned: bool) -> torch.Tensor:
    step = max(align, mmap.PAGESIZE, HUGE_PAGE_BYTES if huge_pages else 1)
    length = align_up(nbytes, mmap.PAGESIZE)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _mmap(None, length + step, _NO_ACCESS, private | _NO_RESERVE, -1)
    address = align_up(reserved, step)
    flags = private if file < 0 else mmap.MAP_SHARED
    # A class of its own: only such arrays can be watched for their end.
    pages = cast(Any, type("Pages", (ctypes.c_uint8 * nbytes,), {})).from_address(address)
    # The last finalizer runs first: unpinned before unmapped. Neither runs at exit, where
    # other threads may still be at work on the memory and the system clears up anyway.
    weakref.finalize(pages, _libc.munmap, reserved, length + step).atexit = False
    _mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, file)
    if huge_pages:
        _libc.madvise(address, length, mmap.MADV_HUGEPAGE)
    if pinned:
        weakref.finalize(pages, *_pinned(address, length)).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8)


def _mmap(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, length, protection, flags, file, 0)
    if found == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise ArenaError(f"the system does not map {length} bytes: {reason}")
    return found


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
