"""Row objects of remote stores: a damaged one is not taken for a row, whole or in parts."""

from random import Random

import numpy as np

from fuzzing import Reader, damaged_bytes, fuzzed
from kvstow.offload.remote.directory import WriterLayout
from kvstow.offload.remote.objects import BadObject, RowObjects
from offloading import random_rows
from remote_stores import layout_of

KEY = bytes(range(32))
OBJECTS = WriterLayout.of(layout_of()).objects(0)
ROW = random_rows(OBJECTS.row_bytes, 1, 5)[0]
BANDS = np.array([0, OBJECTS.num_bands - 1])


def read(data: bytes) -> str:
    blob = np.frombuffer(data, np.uint8)
    parts = [blob[start:end] for start, end in OBJECTS.ranges_with_head(BANDS)]
    some = OBJECTS.read_parts(KEY, parts, BANDS)
    if not isinstance(some, BadObject):
        for start, end in OBJECTS.ranges(BANDS):
            assert (some[start:end] == ROW[start:end]).all()
    whole = OBJECTS.read(KEY, blob)
    if isinstance(whole, BadObject):
        return f"refused: {whole}"
    assert (whole == ROW).all()
    return "accepted"


def valid() -> list[bytes]:
    """The row; after it, objects of other keys, groups and layouts."""
    other = WriterLayout.of(layout_of(order="BHLNC")).objects(0)
    foreign: list[tuple[RowObjects, bytes]] = [(OBJECTS, KEY[::-1]), (OBJECTS, b"k"), (other, KEY)]
    return [
        OBJECTS.written(KEY, ROW).tobytes(),
        *(objects.written(key, ROW).tobytes() for objects, key in foreign),
    ]


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """Damage anywhere, or in the head, which is the smaller part."""
    cut = random.choice((len(data), 160, OBJECTS.row_start))
    return damaged_bytes(random, data[:cut], other) + data[cut:]


READER = Reader(name="objects", read=read, valid=valid, mutate=mutate)


@fuzzed(READER)
def test_a_damaged_object_is_the_row_or_none(data):
    READER.outcome(data)


def test_of_valid_objects_only_the_row_is_accepted():
    assert [READER.outcome(data) for data in READER.valid()] == [
        "accepted",
        "refused: foreign",
        "refused: foreign",
        "refused: foreign",
    ]
