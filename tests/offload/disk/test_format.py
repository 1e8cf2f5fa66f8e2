"""Records and headers: each says exactly what it is, and nothing else is taken for one."""

from dataclasses import replace

import pytest
import xxhash

from kvstow.offload.disk.format import (
    RECORD_BYTES,
    ChainLink,
    SegmentHeader,
    SlotRecord,
    checksum,
    decode_header,
    decode_record,
    slot_bytes,
)

RECORD = SlotRecord(
    generation=1 << 40,
    group=3,
    key=b"k" * 31,
    row_bytes=99,
    checksum=-(1 << 31),
    link=ChainLink(2, b"p"),
)
HEADER = SegmentHeader(1 << 20, 4096, 2, 255, b"f" * 32)
HEADER_BYTES = 72


def test_a_checksum_is_xxh3_as_a_signed_number():
    sums = [checksum(bytes([n])) for n in range(64)]
    assert sums == [
        int.from_bytes(xxhash.xxh3_64_digest(bytes([n])), "big", signed=True) for n in range(64)
    ]
    assert min(sums) < 0 < max(sums)


@pytest.mark.parametrize(("row", "slot"), [(1, 4096), (3936, 4096), (3937, 8192), (8192, 12288)])
def test_a_slot_holds_row_and_record_in_whole_blocks(row, slot):
    assert slot_bytes(row) == slot


def test_a_record_names_the_same_write_wherever_it_stands_in_its_sequence():
    assert RECORD.names(RECORD.encode())
    assert RECORD.names(replace(RECORD, link=ChainLink(9, b"another")).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 5},
        {"group": 2},
        {"key": b"k" * 30 + b"j"},
        {"key": b"k" * 31 + b"\0"},
        {"row_bytes": 98},
        {"checksum": 1 << 31},
    ],
    ids=str,
)
def test_a_record_of_another_write_is_not_named(change):
    other = replace(RECORD, **change)
    assert other.names(other.encode())
    assert not RECORD.names(other.encode())


@pytest.mark.parametrize("generation", [-1, -(1 << 63), 1 << 64, 0.5, "x"])
def test_numbers_that_no_record_can_hold_name_nothing(generation):
    assert not replace(RECORD, generation=generation).names(RECORD.encode())


def test_a_record_with_any_bit_flipped_is_not_named():
    data = RECORD.encode()
    for bit in range(8 * RECORD_BYTES):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        assert not RECORD.names(bytes(torn)), bit


def test_a_record_has_one_length():
    data = RECORD.encode()
    assert decode_record(data) == RECORD
    for wrong in (b"", data[:-1], data + b"\0", data[:-8]):
        assert decode_record(wrong) is None


def test_a_header_comes_back_and_with_any_bit_flipped_is_none():
    data = HEADER.encode()[:HEADER_BYTES]
    assert decode_header(data) == HEADER
    assert decode_header(data + b"anything") == HEADER
    for short in range(HEADER_BYTES):
        assert decode_header(data[:short]) is None
    for bit in range(8 * HEADER_BYTES):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        assert decode_header(bytes(torn)) is None, bit
