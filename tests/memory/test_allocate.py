"""Memory for arenas: aligned, zeroed, unmapped at its end."""

import ctypes
import gc
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvstow.errors import ArenaError
from kvstow.memory.allocate import HUGE_PAGE_BYTES, node_of, prefer_node
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Alignment, Site, packed
from planning import attention


def small(**alignment: int) -> Layout:
    layers = [attention(f"layers.{i}", heads=2, dim=4, tokens=2) for i in range(2)]
    return packed(grouped(layers), num_slabs=4, site=Site(alignment=Alignment(**alignment)))


# ── memory ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("base", [1, 64, 4096, 12288, 2 << 20])
def test_an_arena_has_the_planned_bytes_zeroed_at_a_multiple_of_the_planned_alignment(base):
    layout = small(base=base)
    with Arena(layout) as arena:
        assert arena.bytes.numel() == arena.nbytes == layout.nbytes
        assert arena.address % layout.base_align == 0
        assert arena.bytes.dtype == torch.uint8
        assert not arena.bytes.any()


def test_memory_outlives_the_arena_while_a_view_does_and_is_unmapped_after_that():
    arena = Arena(small())
    view = arena.tensor("layers.1")
    address = arena.address
    arena.close()
    del arena
    gc.collect()
    view.fill_(1.0)
    assert mapped(address)
    del view
    gc.collect()
    assert not mapped(address)


def mapped(address: int) -> bool:
    """Whether the system still maps this address for us to write."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, mode, *_ = line.split()
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high and mode.startswith("rw"):
            return True
    return False


def test_memory_that_the_system_does_not_have_is_refused():
    layout = small()
    absurd = replace(layout, nbytes=1 << 62)
    with pytest.raises(ArenaError, match=r"cannot map .*\n\nhint: "):
        Arena(absurd)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to pin for")
def test_pinning_without_a_cuda_device_is_refused():
    with pytest.raises(ArenaError, match="pinned only for a CUDA device"):
        Arena(small(), pinned=True)


def test_huge_pages_are_used_where_the_system_grants_them():
    granted = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    layout = packed(grouped([attention("l", tokens=512, dim=512)]), num_slabs=8)
    with Arena(layout, huge_pages=True) as arena:
        assert arena.address % HUGE_PAGE_BYTES == 0
        arena.bytes.fill_(7)
        if granted.exists() and "[never]" not in granted.read_text():
            assert huge_page_bytes(arena.address) >= HUGE_PAGE_BYTES
        assert int(arena.bytes.min()) == 7
    with Arena(layout) as arena:
        assert arena.address % layout.base_align == 0


def huge_page_bytes(address: int) -> int:
    """What the system says of the mapping that begins at the address."""
    smaps = Path("/proc/self/smaps").read_text()
    sizes = re.search(rf"^{address:x}-.*?AnonHugePages: +(\d+) kB", smaps, re.DOTALL | re.MULTILINE)
    return int(sizes[1]) * 1024 if sizes else 0


# ── devices ───────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_a_device_that_is_not_there_is_refused_with_its_name(device):
    with pytest.raises(ArenaError, match=rf"device {device}: .*\n\nhint"):
        Arena(small(), device=device)


def test_memory_near_a_device_is_preferred_there_and_no_other_node_is_an_error():
    with Arena(small(), numa_node=9999) as arena:
        assert not prefer_node(arena.address, arena.nbytes, 9999)
    with Arena(small(), numa_node=0) as arena:
        if not prefer_node(arena.address, arena.nbytes, 0):
            pytest.skip("the system has no memory policies, or forbids them")
        mode, address = ctypes.c_int(-1), ctypes.c_void_p(arena.address)
        nodes, most, of_address = (ctypes.c_ulong * 16)(), ctypes.c_long(1024), ctypes.c_long(2)
        get_mempolicy = ctypes.c_long({"x86_64": 239, "aarch64": 236}[platform.machine()])
        libc = ctypes.CDLL(None)
        assert (
            libc.syscall(get_mempolicy, ctypes.byref(mode), nodes, most, address, of_address) == 0
        )
        assert (mode.value, nodes[0]) == (1, 1)
    assert node_of(torch.device("cpu")) is None
