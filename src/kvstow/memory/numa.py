"""Host memory near a device, where the system has policies for it.

    set_mempolicy   while memory is mapped and pinned: what is filled then lies there
    mbind           what is filled later, by whichever thread, lies there too

Both only prefer the node: where it is full, memory comes from elsewhere. Nothing fails, and nothing
happens where neither may be called (some containers forbid it).
"""

import ctypes
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")

MAX_NODES = 1024
_PREFERRED = 1  # MPOL_PREFERRED
_CALLS = {  # mbind, set_mempolicy, get_mempolicy
    "x86_64": (237, 238, 239),
    "aarch64": (235, 237, 236),
}

_libc = ctypes.CDLL(None, use_errno=True)
_Mask = ctypes.c_ulong * (MAX_NODES // (8 * ctypes.sizeof(ctypes.c_ulong)))


def node_of(device: torch.device) -> int | None:
    """The node that a CUDA device hangs on; None for any other, and where nobody says."""
    if device.type != "cuda":
        return None
    facts = cast(Any, torch.cuda).get_device_properties(device)
    try:
        place = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        node = int((PCI / place / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


@contextmanager
def on_node(node: int | None) -> Generator[None]:
    """Memory that the calling thread fills meanwhile lies on the node, if it has room.

    Nothing happens for None, and where the system has no such node or no such policy.
    """
    mode, mask = ctypes.c_int(0), _Mask()
    get_policy = (ctypes.byref(mode), mask, MAX_NODES, ctypes.c_void_p(None), 0)
    is_set = (
        _exists(node) and _call(2, *get_policy) and _call(1, _PREFERRED, _mask(node), MAX_NODES)
    )
    try:
        yield
    finally:
        if is_set:
            _call(1, mode.value, mask, MAX_NODES)


def bind(address: int, nbytes: int, node: int | None) -> bool:
    """Pages of a mapping that are not filled yet will be on the node; whether that worked."""
    if not _exists(node):
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    start = address // page * page
    length = ctypes.c_size_t(address + nbytes - start)
    return _call(0, ctypes.c_void_p(start), length, _PREFERRED, _mask(node), MAX_NODES, 0)


def _exists(node: int | None) -> "TypeGuard[int]":
    return node is not None and (NODES / f"node{node}").exists()


def _mask(node: int) -> "ctypes.Array[ctypes.c_ulong]":
    mask, bits = _Mask(), 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    return mask


def _call(which: int, *arguments: object) -> bool:
    numbers = _CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if numbers is None:
        return False
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _libc.syscall(ctypes.c_long(numbers[which]), *wide) == 0
