"""Row objects: the format to the byte, and every way in which one is not the row it should be."""

import hashlib
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import LayoutError
from kvstow.offload.remote.directory import WriterLayout
from kvstow.offload.remote.objects import BadObject
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from offloading import IDENTITY, random_rows
from planning import attention, element_bytes, layouts
from remote_stores import layout_of

KEY = bytes(range(32))


def objects_of(layout=None, group=0):
    return WriterLayout.of(layout or layout_of()).objects(group)


def row_of(objects, seed=0):
    return random_rows(objects.row_bytes, 1, seed)[0]


def test_an_object_is_header_checksums_digest_and_row():
    objects = objects_of(layout_of(order="BHLNC"))
    row = row_of(objects)
    blob = objects.written(KEY, row).tobytes()
    cell = 32  # keys and values of 8 half floats; 4 tokens per block, 4 heads, 3 layers
    bands = [
        row[(head * 3 + layer) * 4 * cell :][: 4 * cell] for layer in range(3) for head in range(4)
    ]
    checksums = [xxhash.xxh3_64_intdigest(band.tobytes()) for band in bands]
    head = struct.pack("<8sHHIQ", b"kvstow\0r", 1, 0, 12, objects.row_bytes)
    head += objects.fingerprint + KEY + bytes([32]) + bytes(39)
    head += struct.pack("<12Q", *checksums)
    head += hashlib.blake2b(head, digest_size=16).digest()
    assert blob[: len(head)] == head
    start = -(-len(head) // 64) * 64
    assert blob[start:] == row.tobytes()
    assert len(blob) == objects.nbytes


def test_a_whole_object_gives_back_its_row():
    objects = objects_of()
    row = row_of(objects)
    assert (objects.read(KEY, objects.written(KEY, row)) == row).all()


def test_any_flipped_byte_that_a_field_owns_is_noticed():
    objects = objects_of()
    blob = objects.written(KEY, row_of(objects))
    for at in range(objects.nbytes):
        damaged = blob.copy()
        damaged[at] ^= 0x10
        found = objects.read(KEY, damaged)
        padding = 128 + 8 * objects.num_bands + 16 <= at < objects.row_start
        assert isinstance(found, BadObject) or padding, at


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 200, 400, -1])
def test_an_object_that_was_cut_is_not_a_row(nbytes):
    objects = objects_of()
    blob = objects.written(KEY, row_of(objects))
    assert isinstance(objects.read(KEY, blob[:nbytes]), BadObject)
    assert objects.read(KEY, np.append(blob, np.uint8(0))) is BadObject.FOREIGN


def test_an_object_of_another_key_group_layout_or_version_is_not_the_row():
    objects = objects_of()
    blob = objects.written(KEY, row_of(objects))
    assert objects.read(KEY[:31], blob) is BadObject.FOREIGN
    assert objects.read(KEY[::-1], blob) is BadObject.FOREIGN
    other = objects_of(layout_of(order="BHLNC"))
    assert other.nbytes == objects.nbytes
    assert other.read(KEY, blob) is BadObject.FOREIGN
    newer = blob.copy()
    newer[8] = 2
    assert objects.read(KEY, newer) is BadObject.VERSION
    assert objects.read(KEY, np.zeros(objects.nbytes, np.uint8)) is BadObject.FOREIGN


@given(layouts(), st.data())
def test_some_bands_come_back_as_they_were_and_damage_in_them_is_noticed(layout, data):
    layout = layout.identified(IDENTITY)
    group = data.draw(st.sampled_from(range(len(layout.groups))))
    try:
        objects = objects_of(layout, group)
    except LayoutError:
        return
    row = row_of(objects, 1)
    blob = objects.written(b"k", row)
    wanted = data.draw(st.sets(st.integers(0, objects.num_bands - 1), min_size=1))
    bands = np.array(sorted(wanted))
    ranges = objects.ranges_with_head(bands)
    parts = [blob[start:end] for start, end in ranges]
    got = objects.read_parts(b"k", parts, bands)
    for start, end in objects.ranges(bands):
        assert (got[start:end] == row[start:end]).all()
    flipped = [part.copy() for part in parts]
    which = data.draw(st.integers(1, len(parts) - 1))
    flipped[which][data.draw(st.integers(0, len(parts[which]) - 1))] ^= 1
    assert objects.read_parts(b"k", flipped, bands) is BadObject.DAMAGED
    short = [*parts[:which], parts[which][:-1], *parts[which + 1 :]]
    assert objects.read_parts(b"k", short, bands) is BadObject.TRUNCATED


@given(layouts(), st.data())
def test_touched_bands_are_those_whose_bytes_are_meant(layout, data):
    layout = layout.identified(IDENTITY)
    group = data.draw(st.sampled_from(range(len(layout.groups))))
    objects = objects_of(layout, group)
    owner = np.full(objects.row_bytes, -1)
    for band in range(objects.num_bands):
        for start, end in objects.ranges(np.array([band])):
            assert (owner[start:end] == -1).all()
            owner[start:end] = band
    start = data.draw(st.integers(0, objects.row_bytes - 1))
    nbytes = data.draw(st.integers(1, objects.row_bytes - start))
    meant = np.unique(owner[start : start + nbytes])
    found = objects.touched(np.array([start]), np.array([nbytes]))
    assert found.tolist() == [band for band in meant.tolist() if band >= 0]


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC", "LBHNC"])
@pytest.mark.parametrize("value_section", [0, 1])
def test_every_byte_of_every_field_belongs_to_one_band(order, value_section):
    layers = [attention(f"l.{i}", heads=3, value_section=value_section) for i in range(3)]
    layout = packed(grouped(layers), num_slabs=4, site=Site(model="m", order=order))
    objects = objects_of(layout.identified(IDENTITY))
    owner = np.zeros(objects.row_bytes, int)
    for band in range(objects.num_bands):
        for start, end in objects.ranges(np.array([band])):
            owner[start:end] += 1
    rows = objects.layout
    for name in rows.layers:
        for field in ("k", "v"):
            assert (owner[[*element_bytes(rows, name, field, 0)]] == 1).all()
    assert objects.num_bands == 3 * 3 * (1 + value_section)
