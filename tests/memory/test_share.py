"""The arena of one process, mapped by another."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
from unittest import mock

import msgspec
import pytest
import torch

from kvstow.errors import NotShared
from kvstow.memory import share as memory_share
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.memory.share import (
    Mapping,
    SharedAllocation,
    SharedArena,
    SharedFile,
    mapped_counters,
    node,
    share,
)
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.models import model_layers
from kvstow.plan.pack import packed

CPU = torch.device("cpu")

PEER = """
import sys, msgspec, torch
from kvstow.memory.arena import Arena
from kvstow.memory.share import SharedCounters, share
sys.path.insert(0, {here!r})
from test_share import small
arena, counters = Arena(small()), SharedCounters(8)
arena.bytes[:] = (torch.arange(arena.nbytes) % 251).to(torch.uint8)
counters.numbers[:] = range(8)
print(msgspec.json.encode((share(arena), counters.file)).decode(), flush=True)
for line in sys.stdin:
    counters.numbers[int(line)] += 100
    arena.bytes[int(line)] = 7
    print("done", flush=True)
"""


def small(num_slabs: int = 8) -> Layout:
    return packed(grouped(model_layers("Llama-3.2-1B").layers), num_slabs=num_slabs)


class Peer:
    """A process with an arena of its own."""

    def __init__(self) -> None:
        here = os.path.dirname(__file__)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER.format(here=here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.shared, self.counters = msgspec.json.decode(line, type=tuple[SharedArena, SharedFile])

    def change(self, number: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.kill()
    for pipe in (made.process.stdin, made.process.stdout):
        assert pipe is not None
        pipe.close()


def expected(nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) % 251).to(torch.uint8)


def test_bytes_and_counters_of_another_process_are_seen_as_they_change(peer):
    mapping = Mapping(peer.shared, small(), CPU)
    counters = mapped_counters(peer.shared, peer.counters, 8)
    assert torch.equal(mapping.arena.bytes, expected(mapping.arena.nbytes))
    assert counters.tolist() == list(range(8))
    peer.change(5)
    assert counters.tolist() == [0, 1, 2, 3, 4, 105, 6, 7]
    assert mapping.arena.bytes[5] == 7
    mapping.close()


def test_rows_are_copied_out_of_a_mapping_and_nothing_else_is_touched(peer):
    mapping, ours = Mapping(peer.shared, small(), CPU), Arena(small(16))
    ours.bytes.fill_(255)
    copy(mapping.arena, ours, blocks=[3, 1], into=[9, 2]).wait()
    row = mapping.arena.layout.row_bytes(0)
    want = torch.full((ours.nbytes,), 255, dtype=torch.uint8)
    for block, place in ((3, 9), (1, 2)):
        want[place * row : (place + 1) * row] = mapping.arena.bytes[block * row : (block + 1) * row]
    assert torch.equal(ours.bytes, want)
    mapping.close()


def test_the_bytes_of_a_killed_process_stay_as_they_were(peer):
    mapping = Mapping(peer.shared, small(), CPU)
    assert not mapping.is_gone
    peer.kill()
    assert mapping.is_gone
    assert torch.equal(mapping.arena.bytes, expected(mapping.arena.nbytes))
    with pytest.raises(NotShared, match="No such process"):
        Mapping(peer.shared, small(), CPU)
    mapping.close()


def test_a_process_is_watched_whatever_the_number_of_its_descriptor(monkeypatch):
    """select() takes none above 1023, and the error ended the upkeep of all peers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = 1500
    if hard != resource.RLIM_INFINITY and hard <= high:
        pytest.skip("not so many descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, high + 100), hard))
    opened_low = os.pidfd_open

    def opened_high(process: int) -> int:
        low = opened_low(process)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, high)
        finally:
            os.close(low)

    monkeypatch.setattr(os, "pidfd_open", opened_high)
    arena = Arena(small())
    try:
        mapping = Mapping(share(arena), small(), CPU)
        assert mapping._process >= high
        assert not mapping.is_gone
        mapping.close()
    finally:
        arena.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_mapping_is_refused_in_one_word_for_each_reason(peer):
    def reason(num_slabs: int = 8, **changes: object) -> str:
        with pytest.raises(NotShared) as refused:
            Mapping(msgspec.structs.replace(peer.shared, **changes), small(num_slabs), CPU)
        return refused.value.reason

    file = peer.shared.arena
    assert reason(node="elsewhere") == "node"
    assert reason(user=os.geteuid() + 1) == "user"
    assert reason(process=2**22 + 1) == "process"
    assert reason(arena=SharedFile(file.descriptor, file.device, file.inode + 1)) == "process"
    assert reason(arena=SharedFile(9999, file.device, file.inode)) == "process"
    assert reason(4) == "memory"


def test_memory_without_a_file_is_not_shared():
    layout = small()
    for arena in (
        Arena(layout, huge_pages=True),
        Arena.over(layout, torch.zeros(layout.nbytes, dtype=torch.uint8)),
    ):
        with pytest.raises(NotShared) as refused:
            share(arena)
        assert refused.value.reason == "memory"


def test_a_process_maps_its_own_host_memory_and_the_file_is_closed_with_the_arena():
    arena = Arena(small())
    file = arena.file
    assert file is not None
    mapping = Mapping(share(arena), small(), CPU)
    arena.bytes[3] = 9
    assert mapping.arena.bytes[3] == 9
    arena.close()
    del arena
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert mapping.arena.bytes[3] == 9  # the mapping keeps the memory
    mapping.close()


def test_an_allocation_that_becomes_no_arena_does_not_stay_mapped(monkeypatch):
    """A handle of another process, as far as this one can tell: no device is needed."""
    device, opened = torch.device("cuda"), set[int]()
    monkeypatch.setattr(memory_share, "_gpu", lambda device: "gpu")
    monkeypatch.setattr(memory_share, "_open", lambda *_: opened.add(4096) or 4096)
    monkeypatch.setattr(memory_share, "_close", opened.remove)
    monkeypatch.setattr(memory_share, "bytes_at", mock.Mock(side_effect=RuntimeError("no")))
    layout = small()
    allocation = SharedAllocation("gpu", bytes(64), 0)
    shared = SharedArena(node(), os.geteuid(), os.getppid(), layout.nbytes, allocation)
    with pytest.raises(RuntimeError, match="no"):
        Mapping(shared, layout, device)
    assert not opened
