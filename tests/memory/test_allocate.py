"""Memory for arenas: aligned, zeroed, unmapped at its end; shared names that only we can take."""

import gc
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvstow.errors import ArenaError
from kvstow.memory import allocate
from kvstow.memory.allocate import HUGE_PAGE_BYTES
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
    with pytest.raises(ArenaError, match=r"does not map .*\n\nhint: "):
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
            assert arena.huge_page_bytes >= HUGE_PAGE_BYTES
        assert int(arena.bytes.min()) == 7
    with Arena(layout) as arena:
        assert arena.address % layout.base_align == 0


# ── shared memory ─────────────────────────────────────────────────────────────────────

ATTACHER = """
import sys
from kvstow.memory.arena import Arena
from kvstow.plan.manifest import decode
layout = decode(open(sys.argv[2], "rb").read())
arena = Arena.attach(layout, sys.argv[1])
print(int(arena.bytes[5]))
arena.tensor("layers.1")[1].fill_(3.0)
"""


@pytest.fixture
def name():
    found = f"kvstow-test-{os.getpid()}"
    yield found
    assert not Path("/dev/shm", found).exists()


@pytest.mark.parametrize("base", [4096, 2 << 20])
def test_another_process_maps_a_shared_arena_and_both_see_each_others_writes(name, tmp_path, base):
    from kvstow.plan.manifest import encode

    layout = small(base=base)
    (tmp_path / "manifest.json").write_bytes(encode(layout))
    with Arena(layout, shared=name) as arena:
        arena.bytes[5] = 77
        run = subprocess.run(
            [sys.executable, "-c", ATTACHER, name, str(tmp_path / "manifest.json")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == "77"
        assert (arena.tensor("layers.1")[1] == 3.0).all()
        assert arena.address % base == 0


def test_a_shared_name_is_taken_once_and_goes_with_its_maker(name):
    arena = Arena(small(), shared=name)
    other = Arena.attach(small(), name)
    with pytest.raises(ArenaError, match="is there already"):
        Arena(small(), shared=name)
    other.close()
    assert Path("/dev/shm", name).exists()
    del arena
    gc.collect()
    assert not Path("/dev/shm", name).exists()


def test_a_forked_child_leaves_the_shared_name_alone(name):
    arena = Arena(small(), shared=name)
    child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path("/dev/shm", name).exists()
    arena.close()


def test_attaching_needs_memory_of_that_name_and_of_as_many_bytes(name):
    with pytest.raises(ArenaError, match="no shared memory"):
        Arena.attach(small(), name)
    longer = packed(grouped([attention("l", tokens=512)]), num_slabs=64)
    with Arena(small(), shared=name), pytest.raises(ArenaError, match="bytes, the layout"):
        Arena.attach(longer, name)


@pytest.mark.parametrize("bad", ["", "a/b", "..", "."])
def test_a_shared_name_cannot_leave_its_folder(bad):
    with pytest.raises(ArenaError, match="cannot be called"):
        Arena(small(), shared=bad)


# ── shared memory: whose it is ────────────────────────────────────────────────────────


@pytest.fixture
def shm(tmp_path, monkeypatch) -> Path:
    """A directory of our own in the place of the system's."""
    monkeypatch.setattr(allocate, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to pin for")
def test_a_shared_arena_that_cannot_be_pinned_leaves_no_shared_memory_behind(shm):
    before = mappings(shm)
    with pytest.raises(ArenaError, match="pinned only for a CUDA device"):
        Arena(small(), shared="rows", pinned=True)
    gc.collect()
    assert list(shm.iterdir()) == []
    assert mappings(shm) == before == 0


def mappings(folder: Path) -> int:
    """How often files of a folder are mapped, removed ones included."""
    return Path("/proc/self/maps").read_text().count(f" {folder}/")


@pytest.mark.parametrize("step", ["posix_fallocate", "_mapped"])
@pytest.mark.parametrize("error", [OSError(28, "no space"), MemoryError(), KeyboardInterrupt()])
def test_an_error_while_shared_memory_is_made_leaves_neither_name_nor_descriptor(
    shm, monkeypatch, step, error
):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(os if step == "posix_fallocate" else allocate, step, fails)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises((ArenaError, MemoryError, KeyboardInterrupt)):
        Arena(small(), shared="rows")
    assert list(shm.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_shared_memory_is_for_its_owner_alone_whatever_the_umask(shm):
    before = os.umask(0)
    try:
        with Arena(small(), shared="rows"):
            assert stat.S_IMODE((shm / "rows").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def planted(shm: Path, kind: str) -> str:
    """Something that lies under the name `rows`, as long as our memory would be."""
    rows, other = shm / "rows", shm / "other"
    other.write_bytes(bytes(allocate.align_up(small().nbytes, 4096)))
    other.chmod(0o600)
    match kind:
        case "link":
            rows.symlink_to(other)
            return "link"
        case "dangling link":
            rows.symlink_to(shm / "nothing")
            return "link"
        case "second name":
            os.link(other, rows)
            return "2 names"
        case "open to others":
            other.rename(rows)
            rows.chmod(0o660)
            return "0o660"
        case "fifo":
            os.mkfifo(rows, 0o600)
            return "no ordinary file"
        case _:
            rows.mkdir(0o700)
            return "no ordinary file"


PLANTED = ["link", "dangling link", "second name", "open to others", "fifo", "folder"]


@pytest.mark.parametrize("kind", PLANTED)
def test_what_was_planted_under_a_name_is_not_attached(shm, kind):
    reason = planted(shm, kind)
    with pytest.raises(ArenaError, match=reason):
        Arena.attach(small(), "rows")


@pytest.mark.parametrize("kind", PLANTED)
def test_what_was_planted_under_a_name_is_neither_taken_nor_removed(shm, kind):
    planted(shm, kind)
    before = sorted(shm.iterdir())
    with pytest.raises(ArenaError, match="is there already"):
        Arena(small(), shared="rows")
    assert sorted(shm.iterdir()) == before


def test_memory_of_another_user_is_not_attached_and_both_users_are_named(shm, monkeypatch):
    with Arena(small(), shared="rows"):
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(ArenaError, match=f"user {mine}, and we are user {mine + 1}"):
            Arena.attach(small(), "rows")
        monkeypatch.setattr(os, "geteuid", lambda: mine)


def test_an_arena_removes_its_own_memory_and_not_what_took_its_name_since(shm):
    arena = Arena(small(), shared="rows")
    (shm / "rows").unlink()
    other = Arena(small(), shared="rows")
    arena.close()
    assert (shm / "rows").exists()
    other.close()
    assert not (shm / "rows").exists()


@pytest.mark.parametrize("bad", ["a\0b", "/dev/null", "../x", "a b", "\ud800", "x" * 300, "-\n"])
def test_a_shared_name_is_letters_digits_dots_and_dashes(shm, bad):
    for act in (lambda: Arena(small(), shared=bad), lambda: Arena.attach(small(), bad)):
        with pytest.raises(ArenaError, match="cannot be called"):
            act()


# ── devices ───────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_a_device_that_is_not_there_is_refused_with_its_name(device):
    with pytest.raises(ArenaError, match=rf"device {device}: .*\n\nhint"):
        Arena(small(), device=device)


def test_a_device_that_torch_does_not_know_is_refused():
    with pytest.raises(ArenaError, match="'gpu' is no device"):
        Arena(small(), device="gpu")
