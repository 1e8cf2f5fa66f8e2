"""Directories of stores: a damaged file costs rows or the store, never gives a wrong row."""

import shutil
from contextlib import closing, suppress
from random import Random

import numpy as np

from fuzzing import Reader, damaged_bytes, damaged_json, folder, fuzzed
from kvstow.errors import StoreError
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
    files = sorted(file for file in WHOLE.rglob("*") if file.is_file())
    return [str(file.relative_to(WHOLE)).encode() + b"\n" + file.read_bytes() for file in files]


def read(data: bytes) -> str:
    """The store with one of its files exchanged: opened, surveyed, read whole, added to."""
    name, _, content = data.partition(b"\n")
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(WHOLE, COPY)
    file = COPY / name.decode("latin").replace("..", "")
    if file.is_file() and COPY in file.parents:
        file.write_bytes(content)
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


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """Damage in the documents, and in the header and the rows of a row file."""
    name, _, content = data.partition(b"\n")
    theirs = other.partition(b"\n")[2]
    if name.endswith(b".json"):
        return name + b"\n" + damaged_json(random, content, theirs)
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
