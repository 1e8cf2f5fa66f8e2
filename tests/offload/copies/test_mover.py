import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from faulty import Fails, FaultyFiles
from kvstow.blocks.pool import Pool
from kvstow.errors import BlockError, OutOfBlocks, StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.offload.copies.jobs import JobKind, JobQueue, MoverJob
from kvstow.offload.copies.mover import Limits, Mover
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.offload.tier import Counts, Usage
from offloading import IDENTITY, hybrid, key, row_bytes
from waiting import wait_for

KIB, MIB = 1 << 10, 1 << 20


class Slow:
    """A tier below that waits for a signal before it serves, and remembers what it served."""

    name = "slow"

    def __init__(self, layout):
        self.layout, self.rows, self.go = layout, {}, threading.Event()
        self.loads, self.stores, self.fail = [], [], None
        self.go.set()
        self.usage, self.counts = Usage(rows=0, nbytes=0, capacity=0), Counts()

    def contains(self, group, keys):
        return np.array([(group, k) in self.rows for k in keys], bool)

    def store(self, group, keys, rows, links=()):
        assert self.go.wait(20)
        if self.fail:
            raise self.fail
        self.stores += keys
        self.rows |= {(group, k): row.copy() for k, row in zip(keys, rows, strict=True)}
        return np.ones(len(keys), bool)

    def load(self, group, keys, rows):
        assert self.go.wait(20)
        if self.fail:
            raise self.fail
        self.loads += keys
        for k, row in zip(keys, rows, strict=True):
            if (group, k) in self.rows:
                row[:] = self.rows[group, k]
        return self.contains(group, keys)

    def evict(self, group, keys):
        return sum(self.rows.pop((group, k), None) is not None for k in keys)

    def close(self):
        pass


@pytest.fixture
def setting():
    layout = hybrid(num_slabs=12)
    arena = Arena(layout)
    memory = arena.bytes.numpy()
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)
    host = HostTier(layout, capacity=256 * KIB)
    below = Slow(host.layout)
    movers = []

    def mover(**options):
        movers.append(Mover(arena, host, *options.pop("below", [below]), **options))
        return movers[-1]

    yield layout, arena, host, below, mover
    below.go.set()
    for made in movers:
        made.close()
    host.check()


def ids_of(layout, group, count, start=0):
    first = layout.groups[group].rows_per_slab + start
    return np.arange(first, first + count)


def keys_of(group, ids):
    return [key(group, int(i)) for i in ids]


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC", "LBNHC", "BLNHC", "BHLNC"])
def test_layer_compact_arenas_are_moved_through_a_route(order):
    layout = hybrid(order=order)
    arena = Arena(layout)
    memory = arena.bytes.numpy()
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), dtype=np.uint8)
    host = HostTier(layout, capacity=256 * KIB)
    mover = Mover(arena, host)
    for group in range(len(layout.groups)):
        ids = ids_of(layout, group, 3)
        want = {
            layer.name: arena.numpy(layer.name)[ids].copy()
            for layer in layout.groups[group].group.layers
        }
        assert mover.store(group, ids, keys_of(group, ids)).result(20).all()
        arena.zero(group, ids)
        assert mover.load(group, keys_of(group, ids), ids).result(20).all()
        for name, value in want.items():
            assert (arena.numpy(name)[ids].view(np.uint8) == value.view(np.uint8)).all()
    mover.close()


def test_stored_rows_go_on_to_the_tier_below_and_return_when_the_host_forgot_them(setting):
    layout, arena, host, below, make = setting
    mover = make()
    ids = ids_of(layout, 0, 4)
    want = row_bytes(layout, 0, int(ids[0]), arena.bytes.numpy()).copy()
    mover.store(0, ids, keys_of(0, ids)).result(20)
    assert mover.drain(20)
    assert sorted(below.stores) == sorted(keys_of(0, ids))
    host.evict(0, keys_of(0, ids))
    arena.zero(0, ids)
    assert mover.load(0, keys_of(0, ids), ids).result(20).all()
    assert (row_bytes(layout, 0, int(ids[0]), arena.bytes.numpy()) == want).all()
    assert host.contains(0, keys_of(0, ids)).all()


def test_two_loads_of_one_row_read_it_once(setting):
    layout, arena, host, below, make = setting
    below.rows[0, b"row"] = np.full(host.layout.row_bytes(0), 5, np.uint8)
    mover = make()
    below.go.clear()
    ids = ids_of(layout, 0, 2)
    jobs = [mover.load(0, [b"row"], ids[i : i + 1]) for i in range(2)]
    below.go.set()
    assert all(job.result(20).all() for job in jobs)
    assert below.loads == [b"row"]
    for i in ids:
        assert (row_bytes(layout, 0, int(i), arena.bytes.numpy()) == 5).all()


def test_a_row_being_stored_cannot_be_handed_out(setting):
    layout, _arena, host, _below, make = setting
    pool = Pool(layout)
    mover = make(pool=pool)
    blocks = pool.hold(0, pool.num_free(0))
    host_rows = host.reserve  # the store waits here until the test lets it go
    inside, go = threading.Event(), threading.Event()

    def slow(*arguments):
        inside.set()
        assert go.wait(20)
        return host_rows(*arguments)

    host.reserve = slow
    job = mover.store(0, blocks[:3], keys_of(0, blocks[:3]))
    assert inside.wait(20)
    pool.release(0, blocks)  # the request ends; its rows are still being stored
    assert (pool.holds(0, blocks[:3]) == 1).all()
    with pytest.raises(OutOfBlocks):
        pool.hold(0, len(blocks))
    assert not set(pool.hold(0, len(blocks) - 3).tolist()) & set(blocks[:3].tolist())
    go.set()
    job.result(20)
    assert mover.reap() == (job,)
    assert (pool.holds(0, blocks[:3]) == 0).all()
    pool.check()


def test_a_failed_load_names_its_blocks_and_the_mover_goes_on(setting):
    layout, _, host, below, make = setting
    mover = make()
    below.rows[0, b"row"] = np.zeros(host.layout.row_bytes(0), np.uint8)
    below.fail = OSError(5, "Input/output error")
    ids = ids_of(layout, 0, 1)
    job = mover.load(0, [b"row"], ids)
    with pytest.raises(StoreError, match="Input/output error") as caught:
        job.result(20)
    assert caught.value.blocks == ((0, int(ids[0])),)
    assert job.error is not None
    below.fail = None
    assert mover.load(0, [b"row"], ids).result(20).all()


def test_a_disk_that_fails_while_rows_are_demoted_leaves_the_store_whole(tmp_path, setting):
    layout, arena, _host, _, make = setting
    files = FaultyFiles(lambda op, n: Fails() if op == "write" and n > 2 else None)
    disk = DiskTier(tmp_path, layout, capacity=MIB, files=files)
    mover = make(below=[disk])
    ids = ids_of(layout, 0, 20)
    for i in ids:
        mover.store(0, [i], keys_of(0, [i])).result(20)
    assert mover.drain(20)
    files.fault = lambda op, n: None
    rows = [np.zeros(disk.layout.row_bytes(0), np.uint8) for _ in ids]
    found = disk.load(0, keys_of(0, ids), rows)
    assert 0 < found.sum() < 20
    for i, row, ok in zip(ids, rows, found, strict=True):
        assert not ok or (row == row_bytes(layout, 0, int(i), arena.bytes.numpy())).all()
    mover.close()
    disk.close()


def test_a_cancelled_job_begins_no_further_part_and_frees_its_blocks(setting):
    layout, _, host, below, make = setting
    pool = Pool(layout)
    limits = Limits(workers=1, part_bytes=1)
    mover = make(pool=pool, limits=limits)
    blocks = pool.hold(0, 6)
    below.rows |= {(0, b"%d" % i): np.zeros(host.layout.row_bytes(0), np.uint8) for i in range(6)}
    below.go.clear()
    job = mover.load(0, [b"%d" % i for i in range(6)], blocks)
    other = mover.load(0, [b"%d" % i for i in range(6)], blocks)
    other.cancel()
    job.cancel()
    below.go.set()
    assert job.wait(20)
    assert other.wait(20)
    assert other.over
    assert other.error is None
    assert not other.moved.any()
    assert job.moved.sum() <= 1
    mover.reap()
    assert (pool.holds(0, blocks) == 1).all()


def test_a_full_queue_refuses_and_changes_nothing(setting):
    layout, _, host, below, make = setting
    pool = Pool(layout)
    mover = make(pool=pool, limits=Limits(workers=1, max_bytes=host.layout.row_bytes(0) * 3))
    below.go.clear()
    below.rows[0, b"a"] = np.zeros(host.layout.row_bytes(0), np.uint8)
    blocks = pool.hold(0, 4)
    first = mover.load(0, [b"a"], blocks[:1])
    with pytest.raises(StoreError, match="queue is full") as caught:
        mover.load(0, [b"a"] * 3, blocks[1:])
    assert len(caught.value.blocks) == 3
    assert (pool.holds(0, blocks[1:]) == 1).all()
    below.go.set()
    assert first.result(20).all()


def test_a_load_waits_for_the_stream_unless_told_otherwise(setting, monkeypatch):
    layout, _, _, _, make = setting
    mover = make()
    recorded = []
    monkeypatch.setattr(mover._order, "record", recorded.append)
    ids = ids_of(layout, 0, 2)
    stored = mover.store(0, ids, keys_of(0, ids))
    assert stored.result(20).all()
    behind = mover.load(0, keys_of(0, ids), ids)
    beside = mover.load(0, keys_of(0, ids), ids, after_stream=False)
    assert behind.result(20).all()
    assert beside.result(20).all()
    assert recorded == [stored, behind]


def queue_of():
    return JobQueue(max_bytes=1 << 40)


def put(queue, count, rows_per_part=100):
    job = MoverJob(JobKind.LOAD, 0, [b"k"] * count, np.arange(count))
    queue.put(job, 10, rows_per_part)
    return job


def test_a_small_job_overtakes_a_large_one_that_has_begun():
    queue = queue_of()
    large = put(queue, 9, rows_per_part=3)
    taken = [queue.take()]
    small = put(queue, 2)
    taken += [queue.take() for _ in range(3)]
    assert [part.job for part in taken] == [large, small, large, large]
    assert [part.positions for part in taken if part.job is large] == [
        slice(0, 3),
        slice(3, 6),
        slice(6, 9),
    ]
    for part in taken:
        queue.done(part)
    assert len(queue) == 0
    assert queue.wait_empty(0)


def test_a_large_job_is_overtaken_by_no_more_bytes_than_it_has():
    queue = queue_of()
    large = put(queue, 50, rows_per_part=10)
    overtaken = 0
    for _ in range(100):  # a small job comes whenever a part has been taken
        put(queue, 2)
        part = queue.take()
        queue.done(part)
        if part.job is large:
            break
        overtaken += part.nbytes
    assert part.job is large
    assert overtaken <= 50 * 10


def test_without_workers_a_mover_moves_only_when_it_is_told_to():
    before = set(threading.enumerate())
    layout = hybrid()
    arena, host, below = (
        Arena(layout),
        HostTier(layout, capacity=MIB),
        HostTier(layout, capacity=MIB),
    )
    arena.bytes.fill_(7)
    mover = Mover(arena, host, below, limits=Limits(workers=0))
    blocks = np.arange(4) + layout.groups[0].rows_per_slab
    keys = [key(0, int(block)) for block in blocks]
    job = mover.store(0, blocks, keys)
    assert set(threading.enumerate()) <= before
    assert not job.over
    assert not host.contains(0, keys).any()
    assert mover.step()
    assert job.result(0).all()
    assert not below.contains(0, keys).any()
    assert mover.step()  # the demotion
    assert below.contains(0, keys).all()
    assert not mover.step()
    host.evict(0, keys)
    arena.bytes.fill_(0)
    job = mover.load(0, keys, blocks)
    assert mover.drain(0)
    assert job.result(0).all()
    for block in blocks:
        assert (row_bytes(layout, 0, int(block), arena.bytes.numpy()) == 7).all()
    mover.close()


def test_a_tier_below_that_keeps_another_computations_rows_is_refused():
    layout = hybrid()
    other = layout.identified(replace(IDENTITY, weights="02" * 16))
    host, below = HostTier(layout, capacity=MIB), HostTier(other, capacity=MIB)
    with pytest.raises(StoreError, match="another computation"):
        Mover(Arena(layout), host, below)


# ── both directions at once ───────────────────────────────────────────────────────────────


@pytest.fixture
def copies(monkeypatch):
    """Every copy of a mover calls `copies.before(source, destination)` first."""

    class Copies:
        before = staticmethod(lambda source, destination: None)

    def watched(source, destination, *arguments, **options):
        Copies.before(source, destination)
        return copy(source, destination, *arguments, **options)

    monkeypatch.setattr("kvstow.offload.copies.mover.copy", watched)
    return Copies


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_more_parts_than_workers_are_under_way_in_a_direction(setting, copies, workers):
    layout, _, _, _, make = setting
    mover = make(below=[], limits=Limits(workers=workers, part_bytes=1))
    now, most, lock = {}, {}, threading.Lock()

    def before(source, destination):
        with lock:
            now[source] = now.get(source, 0) + 1
            most[source] = max(most.get(source, 0), now[source])
        time.sleep(0.002)
        with lock:
            now[source] -= 1

    copies.before = before
    ids = ids_of(layout, 0, 20)
    assert mover.store(0, ids, keys_of(0, ids)).result(20).all()
    jobs = [mover.load(0, keys_of(0, ids), ids), mover.store(0, ids, keys_of(1, ids))]
    assert all(job.result(20).all() for job in jobs)
    assert max(most.values()) <= workers
    assert len(most) == 2


def test_blocked_stores_do_not_hold_up_a_load(setting, copies):
    layout, _, host, _, make = setting
    mover = make(below=[], limits=Limits(workers=2, part_bytes=1))
    ids = ids_of(layout, 0, 12)
    mover.store(0, ids[:4], keys_of(0, ids[:4])).result(20)
    go = threading.Event()
    copies.before = lambda source, destination: destination is not host.arena or go.wait(20)
    store = mover.store(0, ids, keys_of(1, ids))
    try:
        for _ in range(5):
            assert mover.load(0, keys_of(0, ids[:4]), ids[:4]).result(10).all()
        assert not store.moved.any()
        assert not store.over
    finally:
        go.set()
    assert store.result(20).all()


def test_blocked_demotion_does_not_hold_up_a_store(setting):
    layout, _, _, below, make = setting
    mover = make(limits=Limits(workers=2, part_bytes=1))
    ids = ids_of(layout, 0, 12)
    below.go.clear()
    for i in ids:
        assert mover.store(0, [i], keys_of(0, [i])).result(10).all()
    assert below.stores == []
    below.go.set()
    assert mover.drain(20)
    assert sorted(below.stores) == sorted(keys_of(0, ids))


def test_each_direction_has_bounds_of_its_own(setting, copies):
    layout, _, host, _, make = setting
    row = host.layout.row_bytes(0)
    mover = make(below=[], limits=Limits(workers=1, max_bytes=3 * row, part_bytes=1))
    ids = ids_of(layout, 0, 4)
    mover.store(0, ids[:3], keys_of(0, ids[:3])).result(20)
    assert mover.drain(20)
    go = threading.Event()
    copies.before = lambda source, destination: go.wait(20)
    try:
        store = mover.store(0, ids[:3], keys_of(1, ids[:3]))
        with pytest.raises(StoreError, match="queue is full"):
            mover.store(0, ids[:1], [b"more"])
        load = mover.load(0, keys_of(0, ids[:3]), ids[1:])
        with pytest.raises(StoreError, match="queue is full"):
            mover.load(0, keys_of(0, ids[:1]), ids[:1])
    finally:
        go.set()
    assert store.result(20).all()
    assert load.result(20).all()


def test_rows_that_a_full_queue_keeps_from_the_tier_below_are_counted(setting):
    layout, _, host, below, make = setting
    mover = make(limits=Limits(workers=2, max_bytes=2 * host.layout.row_bytes(0), part_bytes=1))
    ids = ids_of(layout, 0, 4)
    below.go.clear()
    for i in range(4):
        assert mover.store(0, ids[i : i + 1], keys_of(0, ids[i : i + 1])).result(20).all()
    wait_for(lambda: mover.dropped_rows)
    below.go.set()
    assert mover.drain(20)
    assert len(below.stores) + mover.dropped_rows == 4


def test_rows_come_past_a_host_tier_that_has_no_room(setting):
    layout, arena, host, below, make = setting
    below.rows[0, b"row"] = np.full(host.layout.row_bytes(0), 3, np.uint8)
    mover = make()
    filler = host.reserve(0, [key(0, 10_000 + i) for i in range(10_000)])
    rest = host.reserve(1, [key(1, 10_000 + i) for i in range(10_000)])
    ids = ids_of(layout, 0, 1)
    assert mover.load(0, [b"row"], ids).result(20).all()
    assert (row_bytes(layout, 0, int(ids[0]), arena.bytes.numpy()) == 3).all()
    host.abandon(filler)
    host.abandon(rest)


def test_misuse_is_refused_before_anything_moves(setting):
    _layout, _, _, _, make = setting
    mover = make()
    with pytest.raises(StoreError, match="2 keys for 1 blocks"):
        mover.store(0, [1], [b"a", b"b"])
    with pytest.raises(BlockError):
        mover.load(0, [b"a"], [10**6])
    with pytest.raises(StoreError, match="not done after"):
        MoverJob(JobKind.LOAD, 0, [b"a"], np.array([1])).result(0)


@pytest.mark.parametrize("between", ["nothing", "a tier"])
def test_a_tier_below_of_another_order_is_refused_though_its_rows_are_as_long(tmp_path, between):
    """A directory keeps the order that it was made with. A host tier made for the arena's order
    took its rows for its own: every byte of them arrived in the wrong place."""
    DiskTier(tmp_path / "s", hybrid(order="BLHNC"), capacity=MIB).close()
    layout = hybrid(order="BHLNC")
    below = DiskTier(tmp_path / "s", layout)
    host = HostTier(layout, capacity=MIB)
    try:
        assert host.layout.row_bytes(0) == below.layout.row_bytes(0)
        with pytest.raises(StoreError, match=r"other rows .* order BLHNC, above BHLNC"):
            Mover(Arena(layout), host, *[Slow(host.layout)][: between == "a tier"], below)
    finally:
        below.close()
        host.close()


def test_an_empty_job_is_over_at_once(setting):
    _, _, _, _, make = setting
    mover = make()
    job = mover.load(0, [], [])
    assert job.result(5).tolist() == []
    assert job in mover.reap()


def test_a_closed_mover_takes_no_jobs_and_leaves_none_hanging(setting):
    layout, _, host, below, make = setting
    mover = make(limits=Limits(workers=1, part_bytes=1))
    below.rows |= {(0, b"%d" % i): np.zeros(host.layout.row_bytes(0), np.uint8) for i in range(9)}
    below.go.clear()
    job = mover.load(0, [b"%d" % i for i in range(9)], ids_of(layout, 0, 9))
    threading.Timer(0.2, below.go.set).start()
    mover.close()
    assert job.over
    with pytest.raises(StoreError, match="closed"):
        mover.load(0, [b"1"], ids_of(layout, 0, 1))


def test_a_job_that_ends_before_its_submission_returns_is_reaped_once(setting):
    layout, _, _host, _, make = setting
    pool = Pool(layout)
    mover = make(pool=pool)
    queue = mover._queues[JobKind.STORE]
    put = queue.put

    def slow_put(job, *arguments):
        put(job, *arguments)
        assert job.wait(20)  # a worker was faster than the thread that submits

    queue.put = slow_put
    blocks = pool.hold(0, 2)
    job = mover.store(0, blocks, keys_of(0, blocks))
    assert mover.reap() == (job,)
    assert (pool.holds(0, blocks) == 1).all()
