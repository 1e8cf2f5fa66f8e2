"""Memory near a device: by policy where the system has one, else by first touch.

    set_mempolicy   while memory is mapped, pinned or set aside: what is filled then lies there
    mbind           what is filled later, by whichever thread, lies there too

Both only prefer the node: a node that is full sends memory elsewhere, and nothing fails. Where
neither may be called (some containers forbid it), the thread runs on the node's processors
meanwhile, so that what it touches first lies there.
"""

import ctypes
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

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


def processors(node: int) -> set[int]:
    """The processors of a node; none where the system has no such node."""
    try:
        text = (NODES / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


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

    Nothing happens for None, and where the system has no such node.
    """
    if node is None or not (NODES / f"node{node}").exists():
        yield
        return
    before = _policy()
    if before is None or not _call(1, _PREFERRED, _mask(node), MAX_NODES):
        with _among(processors(node)):
            yield
        return
    try:
        yield
    finally:
        _call(1, before[0], before[1], MAX_NODES)


def bind(address: int, nbytes: int, node: int | None) -> bool:
    """Pages of a mapping that are not filled yet will be on the node; whether that worked."""
    if node is None or not (NODES / f"node{node}").exists():
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    start = address // page * page
    length = ctypes.c_size_t(address + nbytes - start)
    return _call(0, ctypes.c_void_p(start), length, _PREFERRED, _mask(node), MAX_NODES, 0)


def _policy() -> "tuple[int, ctypes.Array[ctypes.c_ulong]] | None":
    """The thread's policy and its nodes; None where the system does not say."""
    mode, mask = ctypes.c_int(0), _Mask()
    worked = _call(2, ctypes.byref(mode), mask, MAX_NODES, ctypes.c_void_p(None), 0)
    return (mode.value, mask) if worked else None


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


@contextmanager
def _among(near: set[int]) -> Generator[None]:
    """The calling thread runs on these processors, as far as it may run on any of them."""
    before = os.sched_getaffinity(0)
    if not near & before:
        yield
        return
    os.sched_setaffinity(0, near & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
