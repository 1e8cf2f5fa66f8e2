"""Device memory of one process as memory of another, by CUDA IPC.

A handle stands for one whole allocation. torch's allocator and `cudaMalloc` make such; memory of
CUDA's virtual memory interface (expandable segments, vLLM's sleep mode) has none.
"""

import ctypes
from functools import cache

import torch

from kvstow.errors import NotShared
from kvstow.memory.cuda import runtime

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def exported(address: int, nbytes: int) -> tuple[bytes, int]:
    """The handle of the allocation that holds these bytes, and where in it they begin. NotShared
    where they are no part of a single allocation, or it cannot be exported."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _succeed("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    offset = address - base.value
    if offset + nbytes > size.value:
        raise NotShared("memory", f"{nbytes} bytes of several allocations, the first {size.value}")
    _succeed("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
    return bytes(handle), offset


def opened(handle: bytes, device: torch.device) -> int:
    """The address at which another process's allocation lies here, until it is closed."""
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        runtime().cudaFree(None)  # makes the device's context this thread's
        _succeed(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            _LAZY_PEER_ACCESS,
        )
    return address.value


def close(address: int) -> None:
    """Unmap an allocation. Whoever reads it then fails, so nothing may."""
    _succeed("cuIpcCloseMemHandle", address)


@cache
def _driver() -> ctypes.CDLL:
    torch.cuda.init()
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    driver.cuMemGetAddressRange_v2.argtypes = [pointer, pointer, number]
    driver.cuIpcGetMemHandle.argtypes = [pointer, number]
    driver.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [number]
    return driver


def _succeed(call: str, *arguments: object) -> None:
    status = getattr(_driver(), call)(*arguments)
    if status:
        raise NotShared("memory", f"{call}: CUDA error {status}")
