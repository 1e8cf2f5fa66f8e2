"""Tickets: whole or refused, small, and the same in both forms."""

import base64
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.ticket import PREFIX, Ticket, packed_ints, unpacked_ints

IDS = st.lists(st.integers(0, 2**62), max_size=9, unique=True)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    groups = draw(st.dictionaries(st.integers(0, 7), IDS, max_size=3))
    return Ticket(
        agent=draw(st.text(max_size=8)),
        start=draw(st.text(max_size=8)),
        address="tcp://127.0.0.1:5555",
        key="",
        lease=draw(st.integers(0, 2**63 - 1)),
        lease_seconds=draw(st.floats(0.01, 1e6) | st.integers(1, 600)),
        fingerprint="00" * 32,
        num_tokens=draw(st.integers(0, 2**40)),
        blocks={g: Blocks.first(ids) for g, ids in groups.items()},
        generations={g: np.arange(len(ids), dtype=np.int64) - 1 for g, ids in groups.items()},
    )


def one(num_blocks: int = 3) -> Ticket:
    ids = np.arange(7, 7 + num_blocks, dtype=np.int64)
    return Ticket(
        agent="prefill", start="kvstow-1", address="tcp://127.0.0.1:5555", key="", lease=11,
        lease_seconds=30.0, fingerprint="ab" * 32, num_tokens=48, blocks={0: Blocks.first(ids)},
        generations={0: np.ones(num_blocks, np.int64)},
    )  # fmt: skip


@given(tickets())
def test_both_forms_give_the_ticket_back(ticket):
    for again in (Ticket.from_bytes(ticket.to_bytes()), Ticket.parse(str(ticket))):
        assert again.body == ticket.body
        assert again.digest == ticket.digest
        for g, blocks in ticket.blocks.items():
            assert (again.blocks[g].ids == blocks.ids).all()
            assert (again.blocks[g].index == blocks.index).all()
            assert (again.generations[g] == ticket.generations[g]).all()


@given(tickets(), st.data())
def test_a_changed_byte_is_noticed(ticket, data):
    whole = bytearray(ticket.to_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        again = Ticket.from_bytes(bytes(whole))
    except TransferError:
        return
    assert again.body == ticket.body  # two ways to deflate the same body


@given(tickets(), st.data())
def test_a_cut_ticket_is_refused(ticket, data):
    whole = ticket.to_bytes()
    with pytest.raises(TransferError, match="not a ticket"):
        Ticket.from_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=64))
def test_garbage_is_refused(data):
    with pytest.raises(TransferError, match="not a ticket"):
        Ticket.from_bytes(data)


@given(st.text(max_size=40))
def test_other_text_is_refused(text):
    for word in (text, PREFIX + text):
        with pytest.raises(TransferError, match="not a ticket"):
            Ticket.parse(word)


def test_the_printed_form_is_one_word_for_headers_and_urls():
    word = str(one())
    assert set(word.removeprefix(PREFIX)) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    )


def test_a_ticket_of_4096_neighbouring_blocks_is_below_a_kilobyte():
    assert len(str(one(4096))) < 1000


def test_a_small_message_that_inflates_to_gigabytes_is_refused():
    bomb = zlib.compress(b"\0" * (80 << 20), 9)
    with pytest.raises(TransferError, match="checksum"):
        Ticket.from_bytes(b"\0" * 8 + bomb)


def test_a_body_with_wrong_numbers_is_refused():
    body = msgspec.msgpack.decode(one().body)
    body[8][0][3] = packed_ints(np.zeros(2, np.int64))  # two generations for three blocks
    data = msgspec.msgpack.encode(body)
    from hashlib import blake2b

    whole = blake2b(data, digest_size=8).digest() + zlib.compress(data)
    with pytest.raises(TransferError, match="2 generations for 3 blocks"):
        Ticket.from_bytes(whole)
    with pytest.raises(TransferError, match="2 generations"):
        Ticket.parse(PREFIX + base64.urlsafe_b64encode(whole).decode().rstrip("="))


@given(st.lists(st.integers(-(2**62), 2**62), max_size=20))
def test_packed_numbers_come_back(values):
    array = np.array(values, np.int64)
    assert (unpacked_ints(packed_ints(array)) == array).all()
