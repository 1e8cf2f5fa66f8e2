import errno
import os
from contextlib import closing

import numpy as np
import pytest

from faulty import Fails, FaultyFiles
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.tier import FILE_BYTES, DiskTier
from kvstow.offload.disk.tree import BLOCK_NANOSECONDS
from kvstow.offload.rows import row_layout
from kvstow.offload.store import Store
from kvstow.offload.tier import ChainLink, Counts
from kvstow.plan.manifest import fingerprint
from offloading import hybrid, key, numbered_key, numbered_row, random_rows, row_bytes, row_files

MIB = 1 << 20
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def filled(layout, seed=0):
    arena = Arena(layout)
    memory = arena.bytes.numpy()
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), dtype=np.uint8)
    return arena


def blocks_of(layout, group):
    return np.arange(layout.groups[group].rows_per_slab, layout.num_blocks(group))


def stored(tier, group, count, seed=1):
    rows = random_rows(tier.layout.row_bytes(group), count, seed)
    keys = [key(group, i) for i in range(count)]
    kept = tier.store(group, keys, rows)
    return keys, rows, kept


def loaded(tier, group, keys):
    rows = [np.full(tier.layout.row_bytes(group), 0xEE, np.uint8) for _ in keys]
    return tier.load(group, keys, rows), rows


# ── round trips ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_come_back_to_an_arena_of_any_order_with_nothing_else_touched(tmp_path, order):
    layout = hybrid(order=order)
    source = filled(layout, seed=3)
    with Store.open(tmp_path / "s", layout, capacity=4 * MIB) as store:
        for group in range(len(layout.groups)):
            ids = blocks_of(layout, group)[:3]
            keys = [key(group, int(i)) for i in ids]
            assert store.save_rows(source, group, ids, keys).all()
            target = filled(layout, seed=9)
            expected = target.bytes.numpy().copy()
            for start, block in zip(ids, ids[::-1], strict=True):
                for a, b in zip(
                    layout.runs(group, int(start)), layout.runs(group, int(block)), strict=False
                ):
                    expected[b.offset : b.end] = source.bytes.numpy()[a.offset : a.end]
            assert store.load_rows(target, group, keys, ids[::-1]).all()
            got = target.bytes.numpy()
            for block in ids:
                assert (
                    row_bytes(layout, group, int(block), got)
                    == row_bytes(layout, group, int(block), expected)
                ).all()
            owned = np.zeros(len(got), bool)
            for block in ids:
                for run in layout.runs(group, int(block)):
                    owned[run.offset : run.end] = True
            assert (got[~owned] == expected[~owned]).all()


def test_rows_survive_closing_and_the_capacity_and_layout_are_remembered(tmp_path):
    layout = hybrid()
    tier = DiskTier(tmp_path, layout, capacity=4 * MIB)
    keys, rows, kept = stored(tier, 1, 7)
    tier.close()
    again = DiskTier(tmp_path)
    found, got = loaded(again, 1, keys)
    assert kept.all()
    assert found.all()
    assert all((a == b).all() for a, b in zip(rows, got, strict=False))
    assert again.usage.capacity == 4 * MIB
    assert fingerprint(again.layout) == fingerprint(row_layout(layout))
    again.close()


# ── refusals ──────────────────────────────────────────────────────────────────────────


def test_another_block_size_is_refused_row_by_row_with_the_way_out(tmp_path):
    Store.open(tmp_path, hybrid(), capacity=MIB).close()
    layout = hybrid(block_tokens=8)
    with (
        Store.open(tmp_path, layout) as store,
        pytest.raises(StoreError, match="convert the store"),
    ):
        store.load_rows(Arena(layout), 0, [b"a"], [layout.groups[0].rows_per_slab])


@pytest.mark.parametrize(("bad", "what"), [(b"", "0 bytes"), (b"x" * 33, "33 bytes")])
def test_keys_have_one_to_thirty_two_bytes(tmp_path, bad, what):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    with pytest.raises(StoreError, match=what):
        tier.contains(0, [bad])
    with pytest.raises(StoreError, match="no group 9"):
        tier.contains(9, [b"a"])
    tier.close()


@pytest.mark.parametrize("call", [DiskTier.store, DiskTier.load])
def test_rows_of_another_length_or_number_are_refused(tmp_path, call):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    with pytest.raises(StoreError, match="a row of 3 bytes"):
        call(tier, 0, [b"a"], [np.zeros(3, np.uint8)])
    with pytest.raises(StoreError, match="2 keys for 1 rows"):
        call(tier, 0, [b"a", b"b"], [numbered_row(tier, 0, 0)])
    tier.close()


def test_a_capacity_below_one_row_is_refused_with_the_least(tmp_path):
    with pytest.raises(StoreError, match="hint: give at least"):
        DiskTier(tmp_path, hybrid(), capacity=4096)


def test_a_directory_without_a_store_is_refused_where_no_layout_is_given(tmp_path):
    with pytest.raises(StoreError, match="no store there"):
        DiskTier(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# ── several rows in a file ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", [8, 256, 4096, 16384])
def test_rows_of_every_size_come_back_in_any_selection_and_order(tmp_path, content):
    """From rows of which fifty share a file to rows that have files of their own."""
    layout = hybrid(content=content)
    tier = DiskTier(tmp_path, layout, capacity=256 * MIB)
    count = 120 if content < 4096 else 7
    keys, rows, kept = stored(tier, 0, count)
    assert kept.all()
    files = {file.stat().st_ino for file in row_files(tmp_path)}
    alone = 2 * tier.layout.row_bytes(0) > FILE_BYTES
    assert (len(files) == count) == alone == (content == 16384)
    dice = np.random.default_rng(5)
    for _ in range(10):
        at = dice.permutation(count)[: int(dice.integers(1, count))].tolist()
        found, got = loaded(tier, 0, [*(keys[i] for i in at), b"none", keys[at[0]]])
        assert found.tolist() == [True] * len(at) + [False, True]
        for i, row in zip(at, got, strict=False):
            assert (row == rows[i]).all()
        assert (got[-1] == rows[at[0]]).all()
    tier.close()


@pytest.mark.parametrize("shift", [0, 1])
def test_memory_that_direct_input_cannot_use_is_filled_as_well(tmp_path, shift):
    tier = DiskTier(tmp_path, hybrid(content=16384), capacity=64 * MIB)
    nbytes = tier.layout.row_bytes(0)
    assert 2 * nbytes > FILE_BYTES  # it has a file of its own
    memory = np.full(nbytes + 8192, 0xEE, np.uint8)
    start = -memory.__array_interface__["data"][0] % 4096 + shift
    row = memory[start : start + nbytes]
    row[:] = numbered_row(tier, 0, 1)
    assert tier.store(0, [b"a"], [row]).all()
    row[:] = 0
    assert tier.load(0, [b"a"], [row]).all()
    assert (row == numbered_row(tier, 0, 1)).all()
    assert (memory[:start] == 0xEE).all()
    assert (memory[start + nbytes :] == 0xEE).all()
    tier.close()


def test_a_row_that_was_evicted_is_gone_though_its_file_stays(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, _rows, _ = stored(tier, 0, 20)
    assert len({file.stat().st_ino for file in row_files(tmp_path)}) == 1
    assert tier.evict(0, [*keys[:5], b"unknown"]) == 5
    assert loaded(tier, 0, keys)[0].tolist() == [False] * 5 + [True] * 15
    assert tier.usage.rows == 15
    assert tier.evict(0, keys) == 15
    assert tier.usage.nbytes == disk_space(tmp_path) == 0
    tier.close()


def test_a_file_is_closed_once_its_rows_were_read(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, _rows, _ = stored(tier, 0, 20)
    before = os.listdir("/proc/self/fd")
    assert loaded(tier, 0, keys)[0].all()
    assert os.listdir("/proc/self/fd") == before
    tier.close()


def test_a_file_that_was_read_counts_as_used_now_by_its_first_block(tmp_path):
    times = iter([10.0, 20.0])
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, clock=lambda: next(times))
    keys = [key(0, i) for i in range(3)]
    links = [ChainLink(block=block) for block in (5, 6, 7)]
    tier.store(0, keys, random_rows(tier.layout.row_bytes(0), 3, 1), links)
    assert [file.used for file in tier.row_files()] == [10**10 - 5 * BLOCK_NANOSECONDS]
    assert loaded(tier, 0, keys)[0].all()
    assert [file.used for file in tier.row_files()] == [2 * 10**10 - 5 * BLOCK_NANOSECONDS]
    tier.close()


def test_a_file_under_the_name_of_a_row_that_is_not_in_it_is_no_hit(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, _rows, _ = stored(tier, 0, 2)
    os.link(tier.tree.name(0, keys[0]), tier.tree.name(0, key(0, 9)))
    assert loaded(tier, 0, [key(0, 9), *keys])[0].tolist() == [False, True, True]
    assert tier.contains(0, [key(0, 9)]).tolist() == [False]
    tier.close()


def test_a_damaged_row_is_dropped_and_its_neighbours_stay(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, rows, _ = stored(tier, 0, 20)
    damage(row_files(tmp_path)[0], 4096 + 7 * tier.layout.row_bytes(0) + 3)
    found, got = loaded(tier, 0, keys)
    assert np.flatnonzero(~found).tolist() == [7]
    assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=True) if ok)
    assert tier.counts == Counts(
        hits=19,
        misses=1,
        loaded_rows=19,
        failures=1,
        loaded_bytes=19 * len(rows[0]),
        stored_rows=20,
        stored_bytes=20 * len(rows[0]),
    )
    assert tier.contains(0, keys).tolist() == found.tolist()
    assert tier.store(0, keys[7:8], rows[7:8]).all()
    assert loaded(tier, 0, keys)[0].all()
    tier.close()


def damage(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# ── bounds ────────────────────────────────────────────────────────────────────────────


def disk_space(path):
    files = {file.stat().st_ino: file.stat().st_size for file in row_files(path)}
    return sum(files.values())


def ticking(start=1e9):
    """A clock that goes on by a second each time."""
    now = [start]

    def clock():
        now[0] += 1
        return now[0]

    return clock


@pytest.mark.parametrize("reopened", [False, True])
def test_the_rows_that_waited_longest_go_first(tmp_path, reopened):
    clock = ticking()
    tier = DiskTier(tmp_path, hybrid(content=64), capacity=MIB, clock=clock)
    nbytes = tier.layout.row_bytes(0)
    count = MIB // (4096 + -(-nbytes // 4096) * 4096)
    rows = random_rows(nbytes, count + 1, 1)
    keys = [key(0, i) for i in range(count + 1)]
    for i in range(count):
        assert tier.store(0, keys[i : i + 1], rows[i : i + 1]).all()
    assert loaded(tier, 0, keys[:5])[0].all()
    if reopened:
        tier.close()
        tier = DiskTier(tmp_path, clock=clock)
    tier.store(0, keys[count:], rows[count:])
    kept = tier.contains(0, keys)
    assert kept[:5].all()
    gone = np.flatnonzero(~kept).tolist()
    assert gone == list(range(5, 5 + len(gone)))
    assert 0 < len(gone) <= count // 8
    tier.close()


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_was_set_costs_no_row_but_by_eviction(tmp_path, jump):
    now = [1e9]
    tier = DiskTier(tmp_path, hybrid(content=64), capacity=MIB, clock=lambda: now[0])
    for i in range(400):
        now[0] += jump if i == 200 else 1
        row = numbered_row(tier, 0, i)
        assert tier.store(0, [numbered_key(i)], [row]).all()
        found, got = loaded(tier, 0, [numbered_key(i)])
        assert found.all()
        assert (got[0] == row).all()
        assert disk_space(tmp_path) <= MIB
    assert tier.counts.failures == 0
    tier.close()


@pytest.mark.parametrize("room", [0, 1, 2, 30])
def test_prune_keeps_the_rows_used_last_as_many_as_fit(tmp_path, room):
    clock = ticking()
    tier = DiskTier(tmp_path, hybrid(content=64), capacity=4 * MIB, clock=clock)
    rows = random_rows(tier.layout.row_bytes(0), 60, 1)
    keys = [key(0, i) for i in range(60)]
    for k, row in zip(keys, rows, strict=True):
        assert tier.store(0, [k], [row]).all()
    recent = keys[10 : 10 + room]
    for k in recent:
        assert loaded(tier, 0, [k])[0].all()
    size = room * (disk_space(tmp_path) // 60)
    assert tier.prune(size) == 60 - room
    assert disk_space(tmp_path) <= size
    assert loaded(tier, 0, keys)[0].tolist() == [k in recent for k in keys]
    assert tier.store(0, keys, rows).all()
    assert tier.prune(4 * MIB) == 0
    assert loaded(tier, 0, keys)[0].all()
    tier.close()


def test_prune_leaves_prefixes_that_can_be_used(tmp_path):
    import kvstow

    layout = kvstow.plan_model("gemma-3-1b", memory="32MiB").layout
    ledger, arena = kvstow.Ledger(kvstow.Pool(layout)), filled(layout)
    request = ledger.admit(800).request
    prompt, identity = kvstow.Prompt.of(range(800)), kvstow.Identity.unverified("a test")
    with kvstow.Store(disk=tmp_path, disk_bytes="256MiB", identity=identity) as store:
        store.bind(layout).disk._clock = lambda: 1e9  # however long saving takes
        store.save(arena, ledger.blocks(request), prompt)
    tier = DiskTier(tmp_path)
    needed = tier.usage.nbytes
    tier.prune(needed // 2)
    tier.close()
    assert disk_space(tmp_path) <= needed // 2
    with kvstow.Store(disk=tmp_path, identity=identity) as store:
        assert 200 < store.bind(layout).stored_tokens(prompt) <= 400


def test_a_row_that_is_evicted_while_it_is_read_is_whole(tmp_path):
    tier = DiskTier(tmp_path, hybrid(content=4096), capacity=64 * MIB)
    other = DiskTier(tmp_path)
    row = numbered_row(tier, 0, 1)
    tier.store(0, [b"a"], [row])

    class Evicting(FaultyFiles):
        def read(self, fd, parts, offset):
            other.evict(0, [b"a"])
            return super().read(fd, parts, offset)

    tier.close()
    tier = DiskTier(tmp_path, files=Evicting())
    found, got = loaded(tier, 0, [b"a"])
    assert found.all()
    assert (got[0] == row).all()
    assert tier.counts.failures == 0
    assert not other.contains(0, [b"a"]).any()
    for each in (tier, other):
        each.close()


# ── several processes ─────────────────────────────────────────────────────────────────


# ── what goes wrong ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "link"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_errors_of_the_system_while_rows_are_stored_are_store_errors(tmp_path, operation, number):
    files = FaultyFiles(lambda op, n: Fails(number) if op == operation else None)
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    keys = [numbered_key(n) for n in range(10)]
    rows = [numbered_row(tier, 0, n) for n in range(10)]
    with pytest.raises(StoreError, match=f"10 of 10 rows were not written: {os.strerror(number)}"):
        tier.store(0, keys, rows)
    assert tier.counts.failures == 10
    files.fault = lambda op, n: None
    assert not list((tmp_path / "new").glob("*/*"))
    assert tier.store(0, keys, rows).all()
    assert loaded(tier, 0, keys)[0].all()
    tier.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM])
def test_a_row_that_cannot_be_read_is_a_miss_and_stays_unless_its_bytes_are_lost(tmp_path, number):
    files = FaultyFiles()
    tier = DiskTier(tmp_path, hybrid(content=4096), capacity=64 * MIB, files=files)
    keys, _, _ = stored(tier, 0, 2)
    files.fault = lambda op, n: Fails(number) if op == "read" else None
    assert not loaded(tier, 0, keys)[0].any()
    files.fault = lambda op, n: None
    is_lost = number == errno.EIO
    assert loaded(tier, 0, keys)[0].all() != is_lost
    assert tier.counts.failures == 2 * is_lost
    tier.close()


def test_a_medium_that_is_read_only_serves(tmp_path):
    files = FaultyFiles()
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    keys, _, _ = stored(tier, 0, 3)
    files.fault = lambda op, n: None if op in ("open", "read") else Fails(errno.EROFS)
    assert loaded(tier, 0, keys)[0].all()
    tier.close()


def test_a_file_that_cannot_get_all_its_names_keeps_none_and_takes_no_room(tmp_path):
    """A name that stayed would keep bytes that nobody counts: the store would outgrow itself."""
    files = FaultyFiles()
    with closing(DiskTier(tmp_path, hybrid(content=64), capacity=320 << 10, files=files)) as tier:
        rows = [numbered_row(tier, 1, n) for n in range(2)]
        files.fault = lambda operation, _: Fails(errno.EIO, 0) if operation == "rename" else None
        with pytest.raises(StoreError, match="2 of 2 rows were not written"):
            tier.store(1, [numbered_key(n) for n in range(2)], rows)
        assert "link" in files.counts, "both rows lie in one file"
        assert row_files(tmp_path) == []
