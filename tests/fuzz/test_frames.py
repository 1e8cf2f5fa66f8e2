"""Frames of the side channel: whatever arrives is a message, or is dropped by a named rule."""

from random import Random
from typing import get_args

import pytest

from fuzzing import Reader, damaged_bytes, damaged_msgpack, fuzzed
from kvstow.transfer.channel import messages as say
from kvstow.transfer.channel.framing import (
    MAGIC,
    VERSION,
    Unreadable,
    decode_message,
    encode_message,
)

HEADER = MAGIC + VERSION.to_bytes(2)
REGION = say.RegionCard(1 << 40, 4096, "DRAM", 0)
CARD = say.Card(
    "decode",
    "start",
    "engine",
    b'{"kvstow":1}',
    b"meta",
    1 << 40,
    "DRAM",
    0,
    (1, 2),
    REGION,
    REGION,
)
IDS = say.Ids(0, b"\x01" * 8, b"\0" * 8)
BOX = ((0, 2), (0, 4))
BEGIN = say.Begin(
    1,
    7,
    b"d" * 16,
    "write",
    (say.Claim(("layers.0",), (("k", (BOX,)),)),),
    say.Write((IDS,), 0, 16),
    0,
    (say.Sample(("layers.0",), (0, 2), 0, 16, 1, 0),),
)
MESSAGES = (
    say.Hello(CARD, 3),
    say.Welcome(CARD, b"memory", "", bytes(32)),
    say.Refused("refused", ("a", "b")),
    say.UnknownSession(),
    BEGIN,
    say.Begun(1),
    say.Written(1, 4096, 2),
    say.Staged(1, 0, 4096),
    say.Fetched(1, 0),
    say.Failed(1, "fence", "reused"),
    say.End(1, 7, "accepted", 1 << 40),
    say.Stopped(1),
    say.Renew((7, 8)),
    say.Alive((7,)),
    say.TellDigest(1, (2**63, 1)),
    say.AskProbe(1 << 20),
    say.TellProbe((0.5, 0.7)),
    say.AskPrefix(9, bytes(32), 16, bytes(64)),
    say.TellPrefix(9, b"ticket"),
    say.TellPrefix(9, b"", "evicted"),
    say.AskStatus(),
    say.TellStatus(b"{}"),
)


def read(data: bytes) -> str:
    try:
        message = decode_message(data)
    except Unreadable as error:
        return f"refused: {error.reason} | {error}"
    again = encode_message(message)
    assert encode_message(decode_message(again)) == again
    assert type(decode_message(again)) is type(message)
    return "accepted"


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """Damage in the body; or anywhere."""
    if not random.randrange(4):
        return damaged_bytes(random, data, other)
    return HEADER + damaged_msgpack(random, data[len(HEADER) :], other[len(HEADER) :])


READER = Reader(
    name="frames",
    read=read,
    valid=lambda: [encode_message(message) for message in MESSAGES],
    mutate=mutate,
)


@fuzzed(READER)
def test_a_damaged_frame_is_a_message_or_dropped(data):
    READER.outcome(data)


def test_every_kind_of_message_is_among_the_documents():
    assert {type(message) for message in MESSAGES} == set(get_args(say.AnyMessage))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_is_read_as_it_was_written(message):
    assert decode_message(encode_message(message)) == message
