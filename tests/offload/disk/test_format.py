"""Bytes of a row file: as the reference says, and nothing else is taken for one."""

import struct

import numpy as np
import pytest
import xxhash

from kvstow.offload.disk.format import (
    MAX_ROWS,
    ChainLink,
    Header,
    RowEntry,
    decode_header,
    file_bytes,
)
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.rows import row_layout
from kvstow.plan.manifest import fingerprint
from offloading import hybrid, random_rows, row_files


def header(rows=3):
    entries = tuple(RowEntry(b"key %d" % k, k << 40, ChainLink(k, b"parent")) for k in range(rows))
    return Header(bytes(range(32)), 5, 768, entries)


def test_a_file_is_laid_out_as_the_reference_says(tmp_path):
    tier = DiskTier(tmp_path, hybrid(), capacity=4 << 20)
    rows = random_rows(tier.layout.row_bytes(1), 2, 5)
    tier.store(1, [b"one", b"the other"], rows, [ChainLink(7, b"parent"), ChainLink(8, b"one")])
    tier.close()
    layout = row_layout(hybrid())
    names = [f"{b.hex()[0]}/{b.hex()}" for b in (b"one", b"the other")]
    root = tmp_path / f"rows-{fingerprint(layout)[:16]}" / "1"
    assert row_files(tmp_path) == sorted(root / name for name in names)
    assert {file.stat().st_nlink for file in row_files(tmp_path)} == {2}
    data = row_files(tmp_path)[0].read_bytes()
    nbytes = layout.row_bytes(1)
    assert len(data) == 4096 + -(-2 * nbytes // 4096) * 4096 == file_bytes(nbytes, 2)
    assert struct.unpack("<8sQII", data[:24]) == (b"kvstowF1", nbytes, 1, 2)
    assert data[24:56].hex() == fingerprint(layout)
    assert data[56:64] == bytes(8)
    own = xxhash.xxh3_64(data[:4088]).intdigest()
    assert struct.unpack("<Q", data[4088:4096]) == (own,)
    for k, (key, block, parent) in enumerate([(b"one", 7, b"parent"), (b"the other", 8, b"one")]):
        entry = data[64 + 80 * k :][:80]
        row = data[4096 + k * nbytes :][:nbytes]
        assert row == rows[k].tobytes()
        assert struct.unpack("<QIHH", entry[:16]) == (
            xxhash.xxh3_64(row).intdigest(),
            block,
            len(key),
            len(parent),
        )
        assert entry[16:48] == key.ljust(32, b"\0")
        assert entry[48:] == parent.ljust(32, b"\0")


@pytest.mark.parametrize("rows", [1, 2, MAX_ROWS])
def test_a_header_comes_back(rows):
    assert decode_header(header(rows).encode()) == header(rows)


def test_one_bit_less_is_no_header():
    data = np.frombuffer(header().encode(), np.uint8)
    for bit in range(8 * len(data)):
        spoilt = data.copy()
        spoilt[bit // 8] ^= 1 << bit % 8
        assert decode_header(spoilt.tobytes()) is None


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4095, 4096, 4097])
@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"kvstowF1"])
def test_no_bytes_of_any_length_are_taken_for_a_header(size, fill):
    assert decode_header((fill * size)[:size]) is None
    assert (decode_header(header().encode()[:size]) is None) == (size < 4096)


@pytest.mark.parametrize(
    ("start", "value"),
    [*((20, struct.pack("<I", rows)) for rows in (0, MAX_ROWS + 1, 1 << 31)), (0, b"kvstowF2")],
    ids=["no rows", "a row too many", "many rows", "another format"],
)
def test_a_header_that_is_not_ours_is_none_though_its_checksum_is_right(start, value):
    data = bytearray(header().encode())
    data[start : start + len(value)] = value
    data[4088:] = struct.pack("<Q", xxhash.xxh3_64(bytes(data[:4088])).intdigest())
    assert decode_header(bytes(data)) is None
