"""Directories of stores: a damaged file costs rows or the store, never gives a wrong row."""

import shutil
import sqlite3
from contextlib import closing, suppress
from random import Random

import numpy as np
import pytest

from fuzzing import Reader, damaged_bytes, damaged_json, folder, fuzzed
from kvstow.errors import StoreError
from kvstow.offload.disk.format import decode_header, decode_record
from kvstow.offload.disk.inspect import survey, verify
from kvstow.offload.disk.tier import DiskTier
from offloading import hybrid, key, numbered_row

WHOLE, COPY = folder() / "whole", folder() / "copy"
CAPACITY = 256 << 10
ROWS = 5
LAYOUT = hybrid()


def make() -> list[bytes]:
    """A store of a few rows per group; every file of it, as `name`, newline, content."""
    with closing(DiskTier(WHOLE, LAYOUT, capacity=CAPACITY, threads=0)) as tier:
        for group in range(len(LAYOUT.groups)):
            keys = [key(group, number) for number in range(ROWS)]
            rows = [numbered_row(tier, group, number) for number in range(ROWS)]
            tier.store(group, keys, rows)
    files = sorted(file for file in WHOLE.iterdir() if file.name != "lock")
    return [file.name.encode() + b"\n" + file.read_bytes() for file in files]


def read(data: bytes) -> str:
    """The store with one of its files exchanged: opened, surveyed, read whole, added to."""
    name, _, content = data.partition(b"\n")
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(WHOLE, COPY)
    if (COPY / name.decode("latin").replace("/", "-")).exists():
        (COPY / name.decode("latin")).write_bytes(content)
    with suppress(StoreError):
        survey(COPY)
    try:
        with closing(DiskTier(COPY, LAYOUT, capacity=CAPACITY, threads=0)) as tier:
            missing = sum(check_rows(tier, group) for group in range(len(LAYOUT.groups)))
            verify(tier)
            survey(COPY)
            add_row(tier)
    except StoreError as error:
        return f"refused: store | {error}"
    return "accepted" if not missing else "refused: rows"


def check_rows(tier: DiskTier, group: int) -> int:
    """Every row that is found is the one that was stored; how many are not found."""
    into = [np.zeros(tier.layout.row_bytes(group), np.uint8) for _ in range(ROWS + 1)]
    found = tier.load(group, [key(group, number) for number in range(ROWS + 1)], into)
    for number in np.flatnonzero(found).tolist():
        assert number < ROWS, "nobody stored that row"
        assert (into[number] == numbered_row(tier, group, number)).all()
    return ROWS - int(found.sum())


def add_row(tier: DiskTier) -> None:
    """A row that is stored now is there afterwards, as it was given."""
    row = numbered_row(tier, 0, ROWS)
    stored = tier.store(0, [key(0, ROWS)], [row])
    into = np.zeros_like(row)
    if stored.all() and tier.load(0, [key(0, ROWS)], [into]).all():
        assert (into == row).all()


VALUES = (
    -1,
    0,
    1,
    2,
    1 << 24,
    1 << 31,
    1 << 40,
    1 << 62,
    -(1 << 63),
    0.5,
    "x",
    "",
    b"",
    b"\xff" * 40,
)


def damaged_index(random: Random, content: bytes) -> bytes:
    """An index in which one value is another, or a row is gone; as it is where SQLite fails."""
    file = COPY.parent / "damaged.db"
    file.write_bytes(content)
    with (
        suppress(sqlite3.Error, ValueError),
        closing(sqlite3.connect(file, isolation_level=None)) as sql,
    ):
        tables = sql.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        table = random.choice(sorted(name for (name,) in tables) or ["meta"])
        columns = [row[1] for row in sql.execute(f"PRAGMA table_info({table})")]
        rowids = [rowid for (rowid,) in sql.execute(f"SELECT rowid FROM {table}")]
        where = f"WHERE rowid = {random.choice(rowids or [0])}"
        if random.randrange(8):
            change = f"UPDATE {table} SET {random.choice(columns or ['x'])} = ? {where}"
            sql.execute(change, (random.choice(VALUES),))
        else:
            sql.execute(f"DELETE FROM {table} {where if random.randrange(2) else ''}")
        sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file.read_bytes()


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """Damage in the document; in the header, the rows and records of a data file; in an index."""
    name, _, content = data.partition(b"\n")
    theirs = other.partition(b"\n")[2]
    if name == b"layout.json":
        return name + b"\n" + damaged_json(random, content, theirs)
    if name == b"index.db" and random.randrange(3):
        return name + b"\n" + damaged_index(random, content)
    size = random.choice((max(1, len(content)), 4096, 8192, 256))
    at = random.randrange(0, max(1, len(content)), size)
    part = content[at : at + size]
    instead = damaged_bytes(random, part, theirs)
    if random.randrange(4):  # what comes behind it stays where it is
        instead = instead[: len(part)].ljust(len(part), b"\0")
    return name + b"\n" + content[:at] + instead + content[at + size :]


READER = Reader(name="stores", read=read, valid=make, mutate=mutate, times=2)


@fuzzed(READER)
def test_a_damaged_store_gives_its_own_rows_or_none(data):
    READER.outcome(data)


@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 71, 72, 159, 160, 161, 4096])
@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"kvstowR1", b"kvstowS1"])
def test_no_bytes_of_any_length_are_taken_for_a_header_or_a_record(size, fill):
    data = (fill * size)[:size]
    assert decode_header(data) is None
    assert decode_record(data) is None
