"""The side channel's bytes: whatever comes in, a message or a counted refusal comes out."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.transfer.channel import framing, messages
from kvstow.transfer.channel.framing import Unreadable, decode_message, encode_message
from kvstow.transfer.channel.messages import Begin, End, Renew

MESSAGE = Renew((1, 2, 2**63 - 1))


def sealed(body: bytes) -> bytes:
    """A frame around any body."""
    return struct.pack(">4sH", b"KVSW", framing.VERSION) + body


def any_message() -> st.SearchStrategy[messages.AnyMessage]:
    ints = st.integers(0, 2**61)
    return st.one_of(
        st.builds(Renew, st.tuples(ints, ints)),
        st.builds(End, ints, ints, st.sampled_from(["accepted", "failed", "aborted"]), ints),
        st.builds(messages.Refused, st.just("ticket"), st.tuples(st.text(max_size=9))),
        st.builds(messages.Failed, ints, st.just("ticket"), st.text(max_size=9)),
        st.builds(
            Begin,
            ints,
            ints,
            st.binary(max_size=16),
            st.sampled_from(["mapped", "read", "write", "slots"]),
            st.none(),
            st.none() | st.builds(messages.Write, st.just(()), ints, ints),
            ints,
            st.just(()),
        ),
        st.builds(messages.TellProbe, st.tuples(*[st.floats(allow_nan=False)] * 2)),
    )


@given(any_message())
def test_a_message_comes_back(message):
    assert decode_message(encode_message(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(Unreadable):
        decode_message(data)


@given(st.binary(max_size=100))
def test_a_garbage_body_is_refused(body):
    try:
        message = decode_message(sealed(body))
    except Unreadable:
        return
    assert decode_message(encode_message(message)) == message


def test_another_version_is_refused_with_both_numbers():
    data = bytearray(encode_message(MESSAGE))
    data[4:6] = struct.pack(">H", 77)
    with pytest.raises(Unreadable, match=f"77, {framing.VERSION} is spoken here") as caught:
        decode_message(bytes(data))
    assert caught.value.reason == "version"


def test_an_oversized_frame_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(framing, "MAX_FRAME", 64)
    with pytest.raises(Unreadable, match="100 bytes, at most 64") as caught:
        decode_message(b"\0" * 100)
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
    with pytest.raises(Unreadable) as caught:
        decode_message(sealed(msgspec.msgpack.encode(body)))
    assert caught.value.reason == "body"


def test_deeply_nested_bodies_do_not_exhaust_the_stack():
    with pytest.raises(Unreadable) as caught:
        decode_message(sealed(b"\x91" * 100_000))
    assert caught.value.reason == "body"


def test_the_header_is_where_the_documentation_says():
    data = encode_message(MESSAGE)
    assert data[:4] == b"KVSW"
    assert int.from_bytes(data[4:6], "big") == framing.VERSION
    assert msgspec.msgpack.decode(data[6:]) == ["renew", [1, 2, 2**63 - 1]]
