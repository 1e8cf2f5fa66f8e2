"""The side channel's bytes: whatever comes in, a frame or a counted refusal comes out."""

import struct
import zlib
from functools import reduce
from operator import or_
from typing import Any, get_args
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.transfer.channel import framing, messages
from kvstow.transfer.channel.framing import (
    Frame,
    Session,
    Unreadable,
    answered,
    decode,
    encode,
)
from kvstow.transfer.channel.messages import Begin, End, Refused, Renew, TellPrefix, Why

FRAME = Frame(5, 9, Renew((1, 2, 2**63 - 1)))


def sealed(body: bytes) -> bytes:
    """A frame around any body, as whoever can count would make it."""
    header = struct.pack(">4sHQQI", b"KVSW", framing.VERSION, 1, 1, len(body))
    return header + struct.pack(">I", zlib.crc32(header + body)) + body


def any_message() -> st.SearchStrategy[messages.AnyMessage]:
    ints = st.integers(0, 2**63 - 1)
    return st.one_of(
        st.builds(Renew, st.tuples(ints, ints)),
        st.builds(End, ints, ints, st.sampled_from(["accepted", "failed", "aborted"])),
        st.builds(messages.Refused, ints, st.just("ticket"), st.tuples(st.text(max_size=9))),
        st.builds(
            Begin,
            ints,
            ints,
            st.binary(max_size=16),
            st.none(),
            st.none() | st.builds(messages.Write, st.just(()), ints, ints),
            ints,
            st.just(()),
        ),
        st.builds(messages.TellProbe, ints, st.floats(allow_nan=False)),
    )


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), any_message())
def test_a_frame_comes_back(session, sequence, message):
    assert decode(encode(Frame(session, sequence, message))) == Frame(session, sequence, message)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(Unreadable):
        decode(data)


@given(st.binary(max_size=100))
def test_a_garbage_body_is_refused(body):
    try:
        frame = decode(sealed(body))
    except Unreadable:
        return
    assert encode(frame) == sealed(body)


@given(st.data())
def test_a_cut_frame_is_refused(data):
    whole = encode(FRAME)
    with pytest.raises(Unreadable) as caught:
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert caught.value.reason == "truncated"


def test_a_longer_frame_is_refused():
    with pytest.raises(Unreadable) as caught:
        decode(encode(FRAME) + b"\0")
    assert caught.value.reason == "truncated"


def test_another_version_is_refused_with_both_numbers():
    data = bytearray(encode(FRAME))
    data[4:6] = struct.pack(">H", 77)
    with pytest.raises(Unreadable, match="77 is not 3") as caught:
        decode(bytes(data))
    assert (caught.value.reason, caught.value.version) == ("version", 77)


def test_an_oversized_frame_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(framing, "MAX_FRAME", 64)
    with pytest.raises(Unreadable, match="100 bytes, at most 64") as caught:
        decode(b"\0" * 100)
    assert caught.value.reason == "oversized"


@pytest.mark.parametrize(
    "body",
    [
        ["no such message", 1],
        ["renew"],
        ["renew", [1, "two"]],
        ["renew", [1], "more"],
        ["end", 1, 2, "maybe"],
        ["refused", 1, "no such kind", []],
        {"renew": 1},
        [[[[[[]]]]]],
        None,
    ],
)
def test_a_body_that_is_no_message_is_refused(body):
    data = msgspec.msgpack.encode(body)
    with pytest.raises(Unreadable) as caught:
        decode(sealed(data))
    assert caught.value.reason == "body"


def test_deeply_nested_bodies_do_not_exhaust_the_stack():
    data = b"\x91" * 100_000
    with pytest.raises(Unreadable) as caught:
        decode(sealed(data))
    assert caught.value.reason == "body"


def test_the_header_is_where_the_documentation_says():
    data = encode(FRAME)
    assert data[:4] == b"KVSW"
    assert int.from_bytes(data[4:6], "big") == 3
    assert int.from_bytes(data[6:14], "big") == 5
    assert int.from_bytes(data[14:22], "big") == 9
    assert int.from_bytes(data[22:26], "big") == len(data) - 30
    assert int.from_bytes(data[26:30], "big") == zlib.crc32(data[:26] + data[30:])
    assert msgspec.msgpack.decode(data[30:]) == ["renew", [1, 2, 2**63 - 1]]


@given(any_message(), st.data())
def test_a_bit_that_was_turned_over_anywhere_is_noticed(message, data):
    whole = bytearray(encode(Frame(5, 9, message)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Unreadable):
        decode(bytes(whole))


# ── reasons, which older agents do not know ───────────────────────────────────────────

SAID = (
    Why(7, "evicted"),
    TellPrefix(7, b""),
    Why(8, messages.NOT_YET),
    Refused(8, "ticket", ("lease 8: never given out here",)),
)


def heard(said: Any) -> tuple[list[Any], list[str]]:
    """What a client takes in of what a server says, and why it drops the rest."""
    server, client, dropped = Session(5), Session(0), list[str]()
    frames = [server.framed(message) for message in said]
    taken = [answered(client, frame, lambda why, _: dropped.append(why)) for frame in frames]
    return taken, dropped


def test_an_agent_that_knows_no_reasons_drops_them_and_takes_what_they_are_for():
    kinds = [kind for kind in get_args(messages.AnyMessage) if kind is not Why]
    older = msgspec.msgpack.Decoder(reduce(or_, kinds))
    with mock.patch.object(framing, "_decoder", older):
        assert heard(SAID) == ([None, SAID[1], None, SAID[3]], ["body", "body"])
    assert heard(SAID) == (list(SAID), [])


def test_what_reasons_are_for_has_the_bytes_that_it_always_had():
    body = struct.calcsize(">4sHQQI") + 4
    for message, before in (
        (SAID[1], b"\x93\xabtell-prefix\x07\xc4\x00"),
        (SAID[3], b"\x94\xa7refused\x08\xa6ticket\x91\xbdlease 8: never given out here"),
    ):
        assert encode(Frame(5, 9, message))[body:] == before
        assert decode(sealed(before)).message == message
