import errno
import os
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.format import RECORD_BYTES, ChainLink, SlotRecord, decode_record
from kvstow.offload.disk.owners import Processes
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.rows import row_layout
from kvstow.offload.store import Store
from kvstow.plan.manifest import fingerprint
from kvstow.testing.faulty import Fails, FaultyFiles, Flips, Tears
from offloading import hybrid, key, random_rows, row_bytes

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


@pytest.mark.parametrize("order", [order for order in ORDERS if order.startswith("B")])
def test_a_store_of_one_order_fills_arenas_of_another(tmp_path, order):
    ours, theirs = hybrid(order="BLHNC"), hybrid(order=order, num_slabs=5)
    source, target = filled(ours, seed=1), Arena(theirs)
    with Store.open(tmp_path / "s", ours, capacity=4 * MIB) as store:
        for group in range(2):
            ids = blocks_of(ours, group)[:3]
            store.save_rows(source, group, ids, [key(group, int(i)) for i in ids])
    with Store.open(tmp_path / "s", theirs) as store:
        for group in range(2):
            ids = blocks_of(ours, group)[:3]
            there = blocks_of(theirs, group)[1:4]
            assert store.load_rows(target, group, [key(group, int(i)) for i in ids], there).all()
            for layer in ours.groups[group].group.layers:
                want = source.numpy(layer.name)[ids]
                assert (target.numpy(layer.name)[there].view(np.uint8) == want.view(np.uint8)).all()


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
    assert again.dropped == ()
    assert fingerprint(again.layout) == fingerprint(row_layout(layout))
    again.close()


def test_the_identity_of_a_store_does_not_depend_on_the_size_of_the_arena():
    assert row_layout(hybrid(num_slabs=3)) == row_layout(hybrid(num_slabs=17))


def test_a_key_stored_twice_is_kept_once(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    row = random_rows(tier.layout.row_bytes(0), 1, 0)[0]
    assert tier.store(0, [b"a", b"a"], [row, row]).all()
    assert tier.store(0, [b"a"], [row]).all()
    assert tier.usage.rows == 1
    assert tier.counts.stored_rows == 1
    tier.close()


def test_one_key_in_two_groups_is_two_rows(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=4 * MIB)
    for group in range(2):
        tier.store(group, [b"same"], random_rows(tier.layout.row_bytes(group), 1, group))
    for group in range(2):
        found, got = loaded(tier, group, [b"same"])
        assert found.all()
        assert (got[0] == random_rows(tier.layout.row_bytes(group), 1, group)[0]).all()
    tier.close()


# ── refusals ──────────────────────────────────────────────────────────────────────────


def test_an_incompatible_layout_is_refused_with_the_difference(tmp_path):
    Store.open(tmp_path, hybrid(), capacity=MIB).close()
    with pytest.raises(StoreError, match="content"):
        Store.open(tmp_path, hybrid(content=16))
    with pytest.raises(StoreError, match="other model"):
        Store.open(tmp_path, hybrid(model="another"))


def test_another_block_size_is_refused_row_by_row_with_the_way_out(tmp_path):
    Store.open(tmp_path, hybrid(), capacity=MIB).close()
    layout = hybrid(block_tokens=8)
    with Store.open(tmp_path, layout) as store, pytest.raises(StoreError, match="load_request"):
        store.load_rows(Arena(layout), 0, [b"a"], [layout.groups[0].rows_per_slab])


@pytest.mark.parametrize(("bad", "what"), [(b"", "0 bytes"), (b"x" * 33, "33 bytes")])
def test_keys_have_one_to_thirty_two_bytes(tmp_path, bad, what):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    with pytest.raises(StoreError, match=what):
        tier.contains(0, [bad])
    with pytest.raises(StoreError, match="no group 9"):
        tier.contains(9, [b"a"])
    tier.close()


def test_rows_of_another_length_are_refused(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    with pytest.raises(StoreError, match="a row of 3 bytes"):
        tier.store(0, [b"a"], [np.zeros(3, np.uint8)])
    tier.close()


def test_a_capacity_below_one_row_is_refused_with_the_least(tmp_path):
    with pytest.raises(StoreError, match="hint: give at least"):
        DiskTier(tmp_path, hybrid(), capacity=4096)


def test_a_directory_without_a_store_is_refused_where_no_layout_is_given(tmp_path):
    with pytest.raises(StoreError, match="no store there"):
        DiskTier(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# ── bounds ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_a_full_store_stays_within_its_capacity_and_serves_only_what_it_kept(tmp_path, policy):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, policy=policy)
    rows = random_rows(tier.layout.row_bytes(0), 700, 1)
    keys = [key(0, i) for i in range(700)]
    for lo in range(0, 700, 50):
        tier.store(0, keys[lo : lo + 50], rows[lo : lo + 50])
    assert disk_space(tmp_path) <= MIB
    assert disk_space(tmp_path) == tier.usage.nbytes
    found, got = loaded(tier, 0, keys)
    assert 100 < found.sum() < 700
    assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
    assert found.sum() == tier.usage.rows == tier.contains(0, keys).sum()
    tier.close()


def test_the_row_that_was_read_stays_longer_than_the_one_that_was_not(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    room = sum(tier.segments.slots[0] for _ in range(MIB // tier.segments.segment_bytes))
    rows = random_rows(tier.layout.row_bytes(0), room + 10, 1)
    keys = [key(0, i) for i in range(room + 10)]
    tier.store(0, keys[:room], rows[:room])
    assert loaded(tier, 0, keys[:5])[0].all()
    tier.store(0, keys[room:], rows[room:])
    kept = tier.contains(0, keys)
    assert kept[:5].all()
    assert not kept[5:15].any()
    assert kept[15:].all()
    tier.close()


def test_the_order_of_use_survives_closing(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    room = tier.segments.slots[0] * (MIB // tier.segments.segment_bytes)
    keys, rows, _ = stored(tier, 0, room)
    loaded(tier, 0, keys[:5])
    tier.close()
    tier = DiskTier(tmp_path)
    tier.store(0, [b"new1", b"new2"], rows[:2])
    kept = tier.contains(0, keys)
    assert kept[:5].all()
    assert not kept[5:7].any()
    assert kept[7:].all()
    tier.close()


def test_a_data_file_passes_to_the_group_that_needs_it(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    stored(tier, 0, 400)
    keys, rows, kept = stored(tier, 1, 400)
    assert kept.sum() > 50
    found, got = loaded(tier, 1, keys)
    assert (found == kept).all()
    assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
    assert {group for _, group, _ in tier.index.segments()} == {1}
    tier.close()


def disk_space(path):
    return sum(file.stat().st_blocks * 512 for file in path.glob("segment-*.kv"))


def test_data_files_grow_with_the_rows_that_are_kept(tmp_path):
    layout = hybrid()
    tier = DiskTier(tmp_path, layout, capacity=64 * MIB)
    slot = tier.segments.slot_bytes[0]
    stored(tier, 0, 1)
    first = disk_space(tmp_path)
    assert slot <= first <= 4 * MIB < tier.segments.segment_bytes
    stored(tier, 0, 4 * MIB // slot + 1)
    assert first < disk_space(tmp_path) <= 8 * MIB
    assert tier.usage.nbytes == disk_space(tmp_path)
    tier.close()
    assert DiskTier(tmp_path).dropped == ()


@pytest.mark.parametrize("room", [0, 1, 2, 60])
def test_prune_keeps_the_rows_used_last_as_many_as_fit(tmp_path, room):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, rows, _ = stored(tier, 0, 200)
    recent = keys[10 : 10 + room]
    assert loaded(tier, 0, recent)[0].all()
    tier.close()
    tier = DiskTier(tmp_path)
    size = room * tier.segments.slot_bytes[0] + len(tier.index.segments()) * 4096
    assert tier.prune(size) == 200 - room
    assert disk_space(tmp_path) <= size
    assert tier.contains(0, recent).all()
    found, got = loaded(tier, 0, keys)
    assert found.sum() == room
    assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
    assert tier.store(0, keys, rows).all()
    found, got = loaded(tier, 0, keys)
    assert found.all()
    assert all((a == b).all() for a, b in zip(rows, got, strict=False))
    tier.close()


def test_prune_leaves_prefixes_that_can_be_used(tmp_path):
    import kvstow

    layout = kvstow.plan_model("gemma-3-1b", memory="32MiB").layout
    ledger, arena = kvstow.Ledger(kvstow.Pool(layout)), filled(layout)
    request = ledger.admit(800).request
    prompt, identity = kvstow.Prompt.of(range(800)), kvstow.Identity.unverified("a test")
    with kvstow.Store(disk=tmp_path, disk_bytes="256MiB", identity=identity) as store:
        store.save(arena, ledger.blocks(request), prompt)
    tier = DiskTier(tmp_path)
    needed = sum(tier.segments.slot_bytes[g] * len(tier.keys(g)) for g in (0, 1)) + 2 * 4096
    tier.prune(needed // 2)
    tier.close()
    assert disk_space(tmp_path) <= needed // 2
    with kvstow.Store(disk=tmp_path, identity=identity) as store:
        assert 200 < store.bind(layout).stored_tokens(prompt) <= 400


def test_prune_to_more_than_there_is_drops_nothing(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, _rows, _ = stored(tier, 0, 20)
    assert tier.prune(MIB) == 0
    assert tier.contains(0, keys).all()
    tier.close()


def test_prune_removes_whole_files_where_the_file_system_cannot_give_back_a_part(tmp_path):
    files = FaultyFiles(lambda op, n: Fails(errno.EOPNOTSUPP) if op == "deallocate" else None)
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    keys, rows, _ = stored(tier, 0, 200)
    dropped = tier.prune(MIB // 4)
    assert disk_space(tmp_path) <= MIB // 4
    found, got = loaded(tier, 0, keys)
    assert found.sum() == 200 - dropped
    assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
    assert tier.store(0, keys, rows).all()
    tier.close()


def test_prune_removes_a_data_file_whose_header_another_process_lost(tmp_path):
    """The medium said that it had written it."""
    files = FaultyFiles(lambda op, n: Tears(0) if (op, n) == ("write", 0) else None)
    writer = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    other = DiskTier(tmp_path)
    stored(writer, 0, 5)
    other.prune(20 << 10)
    keys, rows, kept = stored(other, 0, 5)
    assert kept.all()
    found, got = loaded(other, 0, keys)
    assert found.all()
    assert all((a == b).all() for a, b in zip(rows, got, strict=True))
    writer.close()
    other.close()


def test_evicted_rows_are_gone_and_their_slots_used_again(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, rows, _ = stored(tier, 0, 10)
    assert tier.evict(0, [*keys[:4], b"unknown"]) == 4
    assert tier.contains(0, keys).tolist() == [False] * 4 + [True] * 6
    before = tier.usage.nbytes
    assert tier.store(0, [b"new"], rows[:1]).all()
    assert tier.usage.nbytes == before
    tier.close()


# ── the file format ───────────────────────────────────────────────────────────────────


def test_a_slot_is_laid_out_as_the_reference_says(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=4 * MIB)
    row = random_rows(tier.layout.row_bytes(1), 1, 5)[0]
    tier.store(1, [b"the key"], [row], [ChainLink(7, b"parent")])
    tier.close()
    data = next(tmp_path.glob("segment-*.kv")).read_bytes()
    assert data[:8] == b"kvstowS1"
    segment_bytes, slot_bytes, group, slots = struct.unpack("<QQII", data[8:32])
    assert segment_bytes == len(data)
    assert group == 1
    assert slots == (len(data) - 4096) // slot_bytes
    assert data[32:64].hex() == fingerprint(row_layout(hybrid()))
    assert struct.unpack("<Q", data[64:72])[0] == xxhash.xxh3_64(data[:64]).intdigest()
    slot = data[4096 : 4096 + slot_bytes]
    assert slot[: len(row)] == row.tobytes()
    record = slot[-160:]
    assert record[:8] == b"kvstowR1"
    generation, nbytes, checksum, group, block, key_bytes, parent_bytes = struct.unpack(
        "<QQQIIHH", record[8:44]
    )
    assert generation > 0
    assert nbytes == len(row)
    assert checksum == xxhash.xxh3_64(row.tobytes()).intdigest()
    assert (group, block, key_bytes, parent_bytes) == (1, 7, 7, 6)
    assert record[48:80].rstrip(b"\0") == b"the key"
    assert record[80:112].rstrip(b"\0") == b"parent"
    assert record[44:48] + record[112:152] == bytes(44)
    assert struct.unpack("<Q", record[152:])[0] == xxhash.xxh3_64(record[:152]).intdigest()


def test_a_record_with_any_bit_flipped_is_no_record():
    record = SlotRecord(
        generation=1 << 40,
        group=3,
        key=b"k" * 32,
        row_bytes=99,
        checksum=1 << 31,
        link=ChainLink(2, b"p"),
    )
    data = record.encode()
    assert decode_record(data) == record
    for bit in range(8 * RECORD_BYTES):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        assert decode_record(bytes(torn)) is None


# ── faults of the medium ──────────────────────────────────────────────────────────────


def test_a_flipped_bit_on_the_way_in_is_a_miss_and_drops_the_row(tmp_path):
    files = FaultyFiles(lambda op, n: Flips(bit=1234) if op == "read" else None)
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    keys, _, _ = stored(tier, 0, 1)
    assert not loaded(tier, 0, keys)[0].any()
    assert tier.counts.failures == 1
    assert tier.usage.rows == 0
    files.fault = lambda op, n: None
    assert not loaded(tier, 0, keys)[0].any()
    tier.close()


@pytest.mark.parametrize("fault", [Tears(0), Tears(4096), Flips(77)])
def test_a_write_that_lies_is_found_out_when_the_row_is_read(tmp_path, fault):
    files = FaultyFiles()
    tier = DiskTier(tmp_path, hybrid(content=512), capacity=4 * MIB, files=files)
    stored(tier, 0, 1)
    files.fault = lambda op, n: fault if op == "write" else None
    rows = random_rows(tier.layout.row_bytes(0), 2, 8)
    assert tier.store(0, [b"a", b"b"], rows).all()
    files.fault = lambda op, n: None
    found, got = loaded(tier, 0, [b"a", b"b", key(0, 0)])
    assert found[2]
    assert not found.all()
    for i in np.flatnonzero(found[:2]):
        assert (got[i] == rows[i]).all()
    tier.close()


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_failed_write_raises_leaves_no_row_and_gives_the_slots_back(tmp_path, operation):
    files = FaultyFiles()
    layout = hybrid()
    with Store.open(tmp_path, layout, capacity=MIB, files=files) as store:
        arena = filled(layout)
        ids = blocks_of(layout, 0)[:2]
        store.save_rows(arena, 0, ids[:1], [b"first"])
        files.fault = lambda op, n: Fails() if op == operation else None
        with pytest.raises(StoreError, match="Input/output error") as caught:
            store.save_rows(arena, 0, ids, [b"a", b"b"])
        assert caught.value.blocks == tuple((0, int(i)) for i in ids)
        files.fault = lambda op, n: None
        assert store.contains(0, [b"first", b"a", b"b"]).tolist() == [True, False, False]
        leased = store.disk.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0")
        assert leased == [(0,)]
        assert store.save_rows(arena, 0, ids, [b"a", b"b"]).all()


def test_an_unreadable_slot_is_retired(tmp_path):
    files = FaultyFiles()
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    keys, rows, _ = stored(tier, 0, 1)
    files.fault = lambda op, n: Fails() if op == "read" else None
    assert not loaded(tier, 0, keys)[0].any()
    files.fault = lambda op, n: None
    place = tier.index.ask("SELECT place FROM slots WHERE owner = -1")
    assert len(place) == 1
    tier.store(0, keys, rows)
    assert tier.index.ask("SELECT place FROM rows") != place
    tier.close()


def test_no_space_for_a_data_file_evicts_instead_of_failing(tmp_path):
    files = FaultyFiles()
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB, files=files)
    stored(tier, 0, 1)
    files.fault = lambda op, n: Fails(28) if op == "allocate" else None
    rows = random_rows(tier.layout.row_bytes(0), 100, 4)
    keys = [key(5, i) for i in range(100)]
    kept = tier.store(0, keys, rows)
    found, _got = loaded(tier, 0, keys)
    assert (found == kept).all()
    assert 10 < kept.sum() < 100
    assert len(tier.index.segments()) == 1
    assert len(list(tmp_path.glob("segment-*.kv"))) == 1
    tier.close()


# ── healing ───────────────────────────────────────────────────────────────────────────


def test_a_missing_data_file_costs_its_rows_and_is_reported(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, rows, _ = stored(tier, 0, 100)
    tier.close()
    lost = sorted(tmp_path.glob("segment-*.kv"))[0]
    lost.unlink()
    tier = DiskTier(tmp_path)
    assert [d.what for d in tier.dropped] == [f"{lost.name} is missing"]
    found, got = loaded(tier, 0, keys)
    assert 100 - found.sum() == tier.dropped[0].rows > 0
    assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
    assert tier.store(0, keys, rows).all()
    tier.close()


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 4097, 30_000])
def test_a_data_file_cut_short_costs_what_was_behind_the_cut(tmp_path, nbytes):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, rows, _ = stored(tier, 0, 30)
    tier.close()
    os.truncate(tmp_path / "segment-000000.kv", nbytes)
    tier = DiskTier(tmp_path)
    found, got = loaded(tier, 0, keys)
    assert found.sum() == max(0, (nbytes - 4096) // tier.segments.slot_bytes[0])
    assert tier.dropped[0].rows == 30 - found.sum()
    assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
    assert tier.store(0, keys, rows).all()
    tier.close()


@pytest.mark.parametrize("damage", ["missing", "garbage", "middle"])
def test_a_lost_index_is_made_again_from_the_data_files(tmp_path, damage):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    keys, rows, _ = stored(tier, 0, 30)
    kept = [*keys]
    tier.evict(0, keys[:3])
    tier.store(0, [b"later"], rows[:1])
    tier.close()
    index = tmp_path / "index.db"
    match damage:
        case "missing":
            index.unlink()
        case "garbage":
            index.write_bytes(os.urandom(8192))
        case "middle":
            data = bytearray(index.read_bytes())
            data[4096:] = os.urandom(len(data) - 4096)
            index.write_bytes(data)
    tier = DiskTier(tmp_path, capacity=MIB)
    found, got = loaded(tier, 0, [*kept, b"later"])
    assert found[3:].all()
    for i in np.flatnonzero(found[:-1]):
        assert (got[i] == rows[i]).all()
    assert (got[-1] == rows[0]).all()
    assert tier.store(0, keys, rows).all()
    tier.close()


def test_a_broken_index_is_not_touched_while_another_process_may_use_the_store(tmp_path):
    first = DiskTier(tmp_path, hybrid(), capacity=MIB)
    first.index.ask("PRAGMA wal_checkpoint(TRUNCATE)")
    (tmp_path / "index.db").write_bytes(b"no database at all" * 1000)
    (tmp_path / "index.db-wal").unlink(missing_ok=True)
    with pytest.raises(StoreError, match="other processes have the store open"):
        DiskTier(tmp_path)
    assert not list(tmp_path.glob("*.broken"))


def test_slots_leased_by_a_dead_process_are_free_again(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    stored(tier, 0, 3)
    tier.close()
    with sqlite3.connect(tmp_path / "index.db") as index:
        index.execute("INSERT INTO owners VALUES (77, 999999999, 5, (SELECT 'x'), 0.0, '[]')")
        index.execute("UPDATE slots SET owner = 77")
    index.close()
    tier = DiskTier(tmp_path)
    assert tier.index.ask("SELECT COUNT(*) FROM slots WHERE owner <> 0") == [(0,)]
    tier.close()


class Elsewhere(Processes):
    """A process on a machine of its own: others know of it by what it last wrote."""

    def __init__(self, name):
        self._name = name

    def me(self):
        return 7, 7, self._name


def test_an_owner_that_was_taken_for_dead_is_one_again_and_its_later_leases_end_with_it(tmp_path):
    now = [1e9]
    quiet = DiskTier(
        tmp_path, hybrid(), capacity=MIB, clock=lambda: now[0], processes=Elsewhere("a")
    )
    now[0] += 200
    other = DiskTier(tmp_path, clock=lambda: now[0], processes=Elsewhere("b"))
    owners = "SELECT host FROM owners ORDER BY host"
    assert other.index.ask(owners) == [("b",)]
    quiet._allocator.lease(0, [1, 2], [(), ()])  # and dies here
    DiskTier(tmp_path, clock=lambda: now[0], processes=Elsewhere("c")).close()
    assert other.index.ask("SELECT COUNT(*) FROM slots WHERE owner > 0") == [(0,)]
    stored(quiet, 0, 1)  # or lives after all
    assert other.index.ask(owners) == [("a",), ("b",)]
    for tier in (quiet, other):
        tier.close()


def test_an_owner_whose_clock_was_ahead_is_not_taken_for_alive_until_then(tmp_path):
    now = [1e9 + 1e6]
    DiskTier(tmp_path, hybrid(), capacity=MIB, clock=lambda: now[0], processes=Elsewhere("a"))
    now[0] -= 1e6
    tier = DiskTier(tmp_path, clock=lambda: now[0], processes=Elsewhere("b"))
    assert tier.index.ask("SELECT host FROM owners") == [("b",)]
    tier.close()


def test_what_was_dropped_is_written_down_in_the_index(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    stored(tier, 0, 5)
    tier.close()
    Path(tmp_path / "segment-000000.kv").unlink()
    tier = DiskTier(tmp_path)
    assert tier.index.ask("SELECT what, rows FROM events") == [("segment-000000.kv is missing", 5)]
    tier.close()


# ── several processes, as several tiers ───────────────────────────────────────────────


def test_two_tiers_on_one_directory_see_each_others_rows(tmp_path):
    one = DiskTier(tmp_path, hybrid(), capacity=MIB)
    other = DiskTier(tmp_path)
    keys, rows, _ = stored(one, 0, 20)
    found, got = loaded(other, 0, keys)
    assert found.all()
    assert all((a == b).all() for a, b in zip(rows, got, strict=False))
    other.evict(0, keys[:5])
    assert one.contains(0, keys).tolist() == [False] * 5 + [True] * 15
    one.close()
    other.close()


def test_two_tiers_that_overflow_one_store_never_read_a_wrong_row(tmp_path):
    one = DiskTier(tmp_path, hybrid(), capacity=MIB)
    other = DiskTier(tmp_path)
    rows = random_rows(one.layout.row_bytes(0), 900, 6)
    keys = [key(0, i) for i in range(900)]
    for lo in range(0, 900, 60):
        tier, reader = (one, other) if lo % 120 else (other, one)
        tier.store(0, keys[lo : lo + 60], rows[lo : lo + 60])
        found, got = loaded(reader, 0, keys)
        assert found[lo : lo + 60].all()
        assert all((a == b).all() for a, b, ok in zip(rows, got, found, strict=False) if ok)
    assert one.counts.failures == other.counts.failures == 0
    one.close()
    other.close()


def test_a_lease_that_was_taken_away_enters_nothing(tmp_path):
    class Stealing(FaultyFiles):
        def sync(self, fd):
            super().sync(fd)
            with sqlite3.connect(tmp_path / "index.db") as index:
                index.execute("UPDATE slots SET owner = 0 WHERE owner > 0")
            index.close()

    tier = DiskTier(tmp_path, hybrid(), capacity=MIB)
    stored(tier, 0, 1)
    tier.close()
    tier = DiskTier(tmp_path, files=Stealing())
    assert not tier.store(0, [b"a"], random_rows(tier.layout.row_bytes(0), 1, 0)).any()
    assert not tier.contains(0, [b"a"]).any()
    tier.close()
