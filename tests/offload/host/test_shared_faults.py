"""A host tier shared by real processes, some of which are killed.

Rows are a function of their key, so whoever reads one can tell whether it is right.
"""

import os
import platform
import random
import signal
import textwrap
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from forks import Program
from kvstow.memory.arena import Arena
from kvstow.offload.host import processes as near
from kvstow.offload.host.processes import SharedReader, SharedTiers
from kvstow.offload.host.shared import parts, remove
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.mover import Mover
from offloading import hybrid
from offloading import numbered_key as key
from offloading import numbered_row as row

HERE = Path(__file__).parents[2]
CAPACITY = 1 << 20

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="shared host tiers need x86-64"
)

COMMON = f"""
import sys, time
sys.path[:0] = [{str(HERE)!r}]
import numpy as np
from offloading import hybrid, numbered_key as key, numbered_row as row
from kvstow.offload.host.tier import HostTier

tier = HostTier(hybrid(content=256), capacity={CAPACITY}, shared=sys.argv[1])
"""

HALF_WAY = COMMON + textwrap.dedent("""
    tier.store(0, [key(n) for n in range(20)], [row(tier, 0, n) for n in range(20)])
    reservation = tier.reserve(0, [key(n) for n in range(100, 104)])
    for n, view in zip(range(100, 104), tier.views(0, reservation.ids)):
        view[: len(view) // 2] = row(tier, 0, n)[: len(view) // 2]
    print("half", flush=True)
    time.sleep(60)
""")

CHURN = COMMON + textwrap.dedent("""
    dice = np.random.default_rng(int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        group = int(dice.integers(2))
        numbers = np.unique(dice.integers(0, 400, 24)).tolist()
        tier.store(group, [key(n) for n in numbers], [row(tier, group, n) for n in numbers])
""")


@pytest.fixture
def name(monkeypatch):
    monkeypatch.setattr(near, "LOOK_SECONDS", 0.0)
    name = f"kvstow-test-{uuid.uuid4().hex[:12]}"
    yield name
    remove(name)
    assert not list(parts(name)), "somebody still writes a part"


@contextmanager
def process(code, *arguments):
    """A process that has said its first line; it is killed at the end if not before."""
    child = Program(code, *arguments)
    try:
        line = child.stdout.readline()
        assert line.strip() in ("half", "ready"), line + child.stdout.read()
        yield child
    finally:
        child.close()


def found(tier, group, numbers):
    """Which rows a tier returns, once each is known to be the right one."""
    rows = [np.full(tier.layout.row_bytes(group), 0xEE, np.uint8) for _ in numbers]
    mask = tier.load(group, [key(n) for n in numbers], rows)
    for n, got, ok in zip(numbers, rows, mask, strict=True):
        assert not ok or (got == row(tier, group, n)).all(), f"group {group}: not row {n}"
    return mask


def opened(name):
    return HostTier(hybrid(content=256), capacity=CAPACITY, shared=name)


def test_a_process_killed_amid_a_store_leaves_its_whole_rows_and_no_others(name):
    mine = None
    with process(HALF_WAY, name) as child:
        mine = opened(name)
        assert mine.part == f"{name}.1"  # the other lives
        beside = SharedTiers(mine)
        assert found(beside, 0, range(20)).all()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert found(beside, 0, range(20)).all()  # the memory is still there
    assert not beside.contains(0, [key(n) for n in range(100, 104)]).any()
    assert not found(beside, 0, range(100, 104)).any()
    mine.store(1, [key(5)], [row(mine, 1, 5)])  # and we go on
    assert found(mine, 1, [5]).all()
    again = opened(name)
    assert again.part == f"{name}.0"  # what the dead process wrote, now ours
    assert found(again, 0, range(20)).all()
    assert not found(again, 0, range(100, 104)).any()
    again.check()
    more = range(100, 140)
    assert again.store(0, [key(n) for n in more], [row(again, 0, n) for n in more]).all()
    assert found(beside, 0, more).all()  # the reader sees the new writer's rows
    again.check()
    for tier in (mine, again, beside):
        tier.close()


def test_readers_and_heirs_of_processes_killed_anywhere_see_only_whole_rows(name):
    dice = random.Random(3)
    for round in range(3):
        with process(CHURN, name, round) as child:
            reader, hits = SharedReader(f"{name}.0"), 0
            end = time.monotonic() + dice.uniform(0.3, 0.9)
            while time.monotonic() < end or hits < 50:
                numbers = sorted(dice.sample(range(400), 24))
                hits += int(found(reader, dice.randrange(2), numbers).sum())
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            assert sum(found(reader, group, range(400)).sum() for group in range(2)) > 0
            reader.close()
        heir = opened(name)
        assert heir.part == f"{name}.0"
        heir.check()
        assert heir.usage.rows > 0
        for group in range(2):
            there = heir.contains(group, [key(n) for n in range(400)])
            assert (found(heir, group, range(400)) == there).all()
        heir.close()


def test_two_processes_store_at_once_and_a_third_loads_from_both(name):
    mine = opened(name)
    arena = Arena(hybrid(content=256, num_slabs=64))
    beside = SharedTiers(mine)
    mover = Mover(arena, mine, beside)
    hits = 0
    with process(CHURN, name, 1), process(CHURN, name, 2):
        assert len(list(parts(name))) == 3
        dice = random.Random(5)
        while hits < 200:
            group = dice.randrange(2)
            numbers = dice.sample(range(400), 8)
            first = arena.layout.groups[group].rows_per_slab
            ids = np.arange(first, first + 8)
            moved = mover.load(group, [key(n) for n in numbers], ids).result(20)
            for block, n, ok in zip(ids, numbers, moved, strict=True):
                (run,) = arena.layout.runs(group, int(block))
                got = arena.bytes.numpy()[run.offset : run.end]
                assert not ok or (got == row(mine, group, n)).all()
            hits += int(moved.sum())
            mine.evict(group, [key(n) for n in numbers])
            mover.reap()
    mover.close()
    for tier in (mine, beside):
        tier.close()


@pytest.mark.parametrize("nbytes", [0, 4096])
def test_a_part_whose_rows_were_cut_short_is_not_taken_over(name, nbytes):
    first = HostTier(hybrid(), capacity=CAPACITY, shared=name)
    first.store(0, [key(1)], [row(first, 0, 1)])
    first.close()
    os.truncate(f"/dev/shm/{name}.0.rows", nbytes)
    tier = HostTier(hybrid(), capacity=CAPACITY, shared=name)
    assert tier.part == f"{name}.1"
    assert tier.store(0, [key(1)], [row(tier, 0, 1)]).all()
    tier.close()


@pytest.mark.parametrize("nbytes", [0, 4096, 100_000])
def test_what_a_process_left_that_died_while_it_made_a_part_is_replaced_and_not_made_shorter(
    name, nbytes
):
    index = Path(f"/dev/shm/{name}.0.index")
    index.touch(mode=0o600)
    os.truncate(index, nbytes)
    with index.open("rb") as file:  # somebody has it open, and may have mapped it
        tier = HostTier(hybrid(), capacity=CAPACITY, shared=name)
        assert tier.part == f"{name}.0"
        assert nbytes == 0 or os.fstat(file.fileno()).st_size == nbytes
    assert tier.store(0, [key(1)], [row(tier, 0, 1)]).all()
    tier.close()
