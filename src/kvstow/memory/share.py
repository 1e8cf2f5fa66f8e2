"""The arena of one process as memory of another one of the same node, and of the same user.

    share(arena) ─▶ SharedArena, a few hundred bytes ─▶ Mapping(shared, layout).arena

Host memory is mapped by the descriptor of its file in memory, device memory by CUDA IPC, whose
handles stand for whole allocations. torch's allocator and `cudaMalloc` make such; memory of CUDA's
virtual memory interface (expandable segments, vLLM's sleep mode) has none. A mapping keeps the
memory alive: the process that shared it may end, and the bytes stay as they were, and stay
allocated, until the mapping is closed.
"""

import ctypes
import os
import select
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import torch

from kvstow.errors import NotShared
from kvstow.memory.allocate import bytes_at, host_bytes, mapped_bytes
from kvstow.memory.arena import Arena
from kvstow.memory.cuda import runtime
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_NAMESPACES = ("ipc", "pid", "user")

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class SharedFile(msgspec.Struct, frozen=True, array_like=True, tag="file"):
    """A file in memory: an open descriptor of a process, and the file that it stands for."""

    descriptor: _Number
    device: _Number
    inode: _Number


class SharedAllocation(msgspec.Struct, frozen=True, array_like=True, tag="allocation"):
    """Device memory: the handle of one allocation, and where in it the arena begins."""

    gpu: Annotated[str, msgspec.Meta(max_length=64)]
    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: _Number


class SharedArena(msgspec.Struct, frozen=True, array_like=True):
    """What another process needs to map an arena and the counters beside it.

    `node` names the machine and the namespaces that process ids and handles belong to.
    """

    node: Annotated[str, msgspec.Meta(max_length=256)]
    user: _Number
    process: _Number
    nbytes: _Number
    arena: SharedFile | SharedAllocation


def share(arena: Arena) -> SharedArena:
    """What another process needs to map an arena; NotShared for memory that none can map."""
    return SharedArena(node(), os.geteuid(), os.getpid(), arena.nbytes, _shared_memory(arena))


def _shared_memory(arena: Arena) -> SharedFile | SharedAllocation:
    if arena.device.type == "cuda":
        return SharedAllocation(_gpu(arena.device), *_exported(arena.address, arena.nbytes))
    if arena.file is None:
        raise NotShared("memory", "host memory that was adopted, or lies on huge pages")
    return shared_file(arena.file)


def shared_file(file: int) -> SharedFile:
    """An open file in memory, as another process of this user finds it."""
    facts = os.fstat(file)
    return SharedFile(file, facts.st_dev, facts.st_ino)


class SharedCounters:
    """Whole numbers that other processes can read, all 0 at first."""

    def __init__(self, count: int) -> None:
        host = host_bytes(max(1, count) * 8, align=8)
        assert host.file is not None
        self.numbers: Ints = host.memory.numpy().view(np.int64)[:count]
        self.file = shared_file(host.file)


class Mapping:
    """The arena of another process, as an arena here that nobody here writes to.

    Raises NotShared where it cannot be mapped, with the reason. Close it when nothing here
    reads it any more.
    """

    def __init__(self, shared: SharedArena, layout: Layout, device: torch.device) -> None:
        check_same_node(shared)
        if shared.nbytes != layout.nbytes:
            raise NotShared("memory", f"{shared.nbytes} bytes, the layout has {layout.nbytes}")
        try:
            self._process = os.pidfd_open(shared.process)
        except OSError as error:
            reason = f"process {shared.process}: {error.strerror}"
            raise NotShared("process", reason) from None
        self._allocation: int | None = None
        try:
            self.arena = Arena.over(layout, self._memory(shared, device))
        except BaseException:
            os.close(self._process)
            self._close_allocation()
            raise

    @property
    def is_gone(self) -> bool:
        """Whether that process has ended, whoever has its number by now."""
        ends = select.poll()  # select() takes no descriptor above 1023
        ends.register(self._process, select.POLLIN)
        return bool(ends.poll(0))

    def _memory(self, shared: SharedArena, device: torch.device) -> torch.Tensor:
        match shared.arena:
            case SharedFile():
                if device.type != "cpu":
                    raise NotShared("memory", f"it is host memory, ours is on {device}")
                return mapped_file(shared.process, shared.arena, shared.nbytes)
            case SharedAllocation(gpu, handle, offset):
                if device.type != "cuda" or gpu != _gpu(device):
                    raise NotShared("memory", f"it is on GPU {gpu}, ours is on {device}")
                if shared.process == os.getpid():
                    raise NotShared("process", "a process cannot map its own device memory")
                self._allocation = _open(handle, device)
                return bytes_at(self._allocation + offset, shared.nbytes, device)

    def close(self) -> None:
        """Let go of the memory. Nothing may be reading it."""
        self.arena.close()
        os.close(self._process)
        self._close_allocation()

    def _close_allocation(self) -> None:
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            _close(allocation)


def mapped_counters(shared: SharedArena, file: SharedFile, count: int) -> Ints:
    """The counters of another process, as it changes them. Raises NotShared."""
    check_same_node(shared)
    return mapped_file(shared.process, file, max(1, count) * 8).numpy().view(np.int64)[:count]


def mapped_file(process: int, file: SharedFile, nbytes: int) -> torch.Tensor:
    """A file in memory that a process has open. NotShared if it is not that very file."""
    try:
        ours = os.open(f"/proc/{process}/fd/{file.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        reason = f"file {file.descriptor} of process {process}: {error.strerror}"
        raise NotShared("process", reason) from None
    try:
        facts = os.fstat(ours)
        if (facts.st_dev, facts.st_ino) != (file.device, file.inode) or facts.st_size < nbytes:
            raise NotShared("process", f"process {process} has another file there")
        return mapped_bytes(ours, nbytes)
    finally:
        os.close(ours)


def check_same_node(shared: SharedArena) -> None:
    """NotShared unless both processes are on one node, of one user."""
    if shared.node != node():
        raise NotShared("node", f"it is on {shared.node}, we are on {node()}")
    if shared.user != os.geteuid():
        raise NotShared("user", f"it is of user {shared.user}, we are of user {os.geteuid()}")


@cache
def node() -> str:
    """This machine since it was started, and the namespaces of this process. Raises NotShared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except OSError as error:
        raise NotShared("node", f"the system does not say which node this is: {error}") from None
    return " ".join((boot, *spaces))


def _gpu(device: torch.device) -> str:
    properties = cast(Any, torch.cuda.get_device_properties)  # pyright: ignore[reportUnknownMemberType]
    return str(properties(device).uuid)


# ── device memory: CUDA IPC ───────────────────────────────────────────────────────────────


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def _exported(address: int, nbytes: int) -> tuple[bytes, int]:
    """The handle of the allocation that holds these bytes, and where in it they begin. NotShared
    where they are no part of a single allocation, or it cannot be exported."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _succeed("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    offset = address - base.value
    if offset + nbytes > size.value:
        raise NotShared("memory", f"{nbytes} bytes of several allocations, the first {size.value}")
    _succeed("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
    return bytes(handle), offset


def _open(handle: bytes, device: torch.device) -> int:
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


def _close(address: int) -> None:
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
