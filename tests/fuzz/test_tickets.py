"""Tickets: whatever word arrives is a ticket of blocks that can be, or a TransferError."""

import base64
import zlib
from hashlib import blake2b
from random import Random

import numpy as np

from fuzzing import Reader, damaged_bytes, damaged_msgpack, fuzzed
from kvstow.errors import TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.tickets.ticket import Ticket


def ticket(num_blocks: int, identity: bytes = b"\x07" * 32) -> Ticket:
    ids = np.arange(7, 7 + num_blocks, dtype=np.int64)
    return Ticket(
        agent="prefill",
        start="kvstow-1",
        address="tcp://127.0.0.1:5555",
        key="",
        lease=11,
        lease_seconds=30.0,
        fingerprint="ab" * 32,
        num_tokens=48,
        blocks={0: Blocks.first(ids), 2: Blocks(ids[1:], np.arange(num_blocks)[1:])},
        generations={0: np.ones(num_blocks, np.int64), 2: np.arange(num_blocks)[1:]},
        identity=identity,
    )


def read(data: bytes) -> str:
    text = data.decode("utf-8", "surrogateescape")
    try:
        found = Ticket.parse(text)
    except TransferError as error:
        return f"refused: {error.kind} | {error}"
    assert set(found.blocks) == set(found.generations)
    for group, blocks in found.blocks.items():
        index = blocks.index.tolist()
        assert index == sorted(set(index))
        assert all(number >= 0 for number in (*index, *blocks.ids.tolist()))
        assert len(index) == len(blocks.ids) == len(found.generations[group])
    again = Ticket.parse(str(found))
    assert (again.body, again.signature) == (found.body, found.signature)
    assert again.num_blocks == found.num_blocks
    return "accepted"


def sealed(body: bytes) -> bytes:
    signed = bytes(16) + body
    checksum = blake2b(signed, digest_size=8).digest()
    data = checksum + bytes(16) + zlib.compress(body, 1)
    return b"kvt3." + base64.urlsafe_b64encode(data).rstrip(b"=")


def opened(word: bytes) -> bytes:
    try:
        data = base64.urlsafe_b64decode(word[5:] + b"=" * (-len(word[5:]) % 4))
        return zlib.decompress(data[24:])
    except (ValueError, zlib.error):
        return word


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """Damage in the body, with a checksum that matches it; or in the word."""
    if not random.randrange(5):
        return damaged_bytes(random, data, other)
    return sealed(damaged_msgpack(random, opened(data), opened(other)))


READER = Reader(
    name="tickets",
    read=read,
    valid=lambda: (
        [str(ticket(count)).encode() for count in (1, 2, 40)] + [str(ticket(2, b"")).encode()]
    ),
    mutate=mutate,
)


@fuzzed(READER)
def test_a_damaged_ticket_is_a_ticket_or_refused(data):
    READER.outcome(data)
