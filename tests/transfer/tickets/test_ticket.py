"""Tickets: whole or refused, small, and the same in both forms."""

import base64
import zlib
from dataclasses import replace
from hashlib import blake2b

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import TransferError
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.transfer.tickets.ticket import (
    PREFIX,
    Ticket,
    check_blocks,
    check_request,
    check_states,
    packed_ints,
    unpacked_ints,
)
from transfer_node import hybrid_layout

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
        identity=draw(st.sampled_from([b"", b"\x07" * 32])),
    )


def one(num_blocks: int = 3) -> Ticket:
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
        blocks={0: Blocks.first(ids)},
        generations={0: np.ones(num_blocks, np.int64)},
        identity=b"",
    )


def test_for_fewer_tokens_than_all_only_whole_blocks_are_good():
    ids = np.array([7, 8, 9])
    ticket = replace(one(), blocks={0: Blocks(ids, np.arange(3), partial=np.array([1]))})
    assert ticket.blocks_of(48)[0].ids.tolist() == [7, 8, 9]
    assert ticket.blocks_of(47)[0].ids.tolist() == [7, 9]


@given(tickets())
def test_both_forms_give_the_ticket_back(ticket):
    for again in (Ticket.from_bytes(ticket.to_bytes()), Ticket.parse(str(ticket))):
        assert again.body == ticket.body
        assert again.body == ticket.body
        assert again.identity == ticket.identity
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
    assert at >= 8, "its checksum was changed"
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
    with pytest.raises(TransferError, match="inflates to more than"):
        Ticket.from_bytes(bytes(24) + bomb)


SIGNATURE = bytes(16)


def packed(data: bytes) -> bytes:
    """A body as whoever can count checksums would send it."""
    checksum = blake2b(SIGNATURE + data, digest_size=8).digest()
    return checksum + SIGNATURE + zlib.compress(data)


def sealed(body: list) -> bytes:
    return packed(msgspec.msgpack.encode(body))


@given(st.binary(min_size=16, max_size=64))
def test_a_signature_is_of_this_body_and_this_key(key):
    ticket = Ticket.parse(str(one().signed(key)))
    assert ticket.is_signed_by(key)
    assert not ticket.is_signed_by(key[:-1] + bytes([key[-1] ^ 1]))
    assert not replace(ticket, lease=12).is_signed_by(key)
    assert not one().is_signed_by(key)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, "x" * 600),
        (2, "tcp://" + "y" * 600),
        (4, -1),
        (4, 2**63),
        (5, 0.0),
        (5, -1.0),
        (5, float("nan")),
        (5, float("inf")),
        (7, -1),
        (7, 2**41),
        (8, [[0, b"", b"", b""]] * 2),
        (8, [[-1, b"", b"", b""]]),
        (8, [[0, b"\1" * 7, b"", b""]]),
        (9, b"x" * 65),
        (8, [[0, packed_ints(np.array([-5])), b"\0" * 8, b"\0" * 8]]),
        (8, [[g, b"", b"", b""] for g in range(5000)]),
    ],
)
def test_a_field_out_of_its_bounds_is_refused(field, value):
    body = msgspec.msgpack.decode(one().body)
    body[field] = value
    with pytest.raises(TransferError, match="not a ticket"):
        Ticket.from_bytes(sealed(body))


def test_a_name_that_is_not_utf8_is_refused():
    body = one().body.replace(b"prefill", b"\xf3\x28efill")
    with pytest.raises(TransferError, match="not a ticket"):
        Ticket.from_bytes(packed(body))


def test_more_blocks_than_any_request_has_are_refused():
    many = np.zeros((1 << 18) + 1, "<i8")
    many[0] = 7
    body = msgspec.msgpack.decode(one().body)
    body[8] = [[0, many.tobytes(), b"", b""]]
    with pytest.raises(TransferError, match="262145 blocks, at most 262144"):
        Ticket.from_bytes(sealed(body))


def test_a_word_that_is_too_long_is_refused_before_it_is_decoded():
    with pytest.raises(TransferError, match="characters, at most 8388608"):
        Ticket.parse((PREFIX + "A" * (9 << 20))[: (8 << 20) + 1])
    with pytest.raises(TransferError, match="bytes, at most 4194304"):
        Ticket.parse((PREFIX + "A" * (9 << 20))[: 8 << 20])


def test_a_message_that_is_too_long_is_refused_before_it_is_inflated():
    with pytest.raises(TransferError, match="4194305 bytes, at most 4194304"):
        Ticket.from_bytes(one().to_bytes().ljust((4 << 20) + 1, b"\0"))
    with pytest.raises(TransferError, match="cut or changed"):
        Ticket.from_bytes(one().to_bytes().ljust(4 << 20, b"\0"))


def test_a_body_with_wrong_numbers_is_refused():
    body = msgspec.msgpack.decode(one().body)
    body[8][0][3] = packed_ints(np.zeros(2, np.int64))  # two generations for three blocks
    whole = sealed(body)
    with pytest.raises(TransferError, match="2 generations for 3 blocks"):
        Ticket.from_bytes(whole)
    with pytest.raises(TransferError, match="2 generations"):
        Ticket.parse(PREFIX + base64.urlsafe_b64encode(whole).decode().rstrip("="))


@given(st.lists(st.integers(-(2**62), 2**62), max_size=20))
def test_packed_numbers_come_back(values):
    array = np.array(values, np.int64)
    assert (unpacked_ints(packed_ints(array)) == array).all()


def test_lists_nested_without_end_are_refused():
    body = msgspec.msgpack.decode(one().body)
    body[8][0].append("deep")
    nested = msgspec.msgpack.encode(body).replace(b"\xa4deep", b"\x91" * 50_000 + b"\x90")
    with pytest.raises(TransferError, match="not a ticket"):
        Ticket.from_bytes(packed(nested))


def test_logical_blocks_that_wrap_around_are_refused():
    body = msgspec.msgpack.decode(one(2).body)
    body[8][0][2] = np.array([2**63 - 1, 1], "<i8").tobytes()
    with pytest.raises(TransferError, match="do not ascend"):
        Ticket.from_bytes(sealed(body))


def test_a_ticket_with_something_behind_it_or_without_its_last_byte_is_refused():
    whole = one().to_bytes()
    for data in (whole + b"\0", whole + whole, whole[:-1]):
        with pytest.raises(TransferError, match="cut or changed"):
            Ticket.from_bytes(data)


def test_a_body_as_long_as_the_limit_is_read_and_one_byte_more_is_not():
    ticket = one(40)
    assert Ticket.from_bytes(ticket.to_bytes(), max_body_bytes=len(ticket.body)).num_blocks == 40
    with pytest.raises(TransferError, match="inflates to more"):
        Ticket.from_bytes(ticket.to_bytes(), max_body_bytes=len(ticket.body) - 1)


def test_blocks_are_of_groups_that_the_layout_has_and_among_their_rows():
    layout = hybrid_layout()
    rows = [np.arange(group.rows_per_slab, 2 * group.rows_per_slab) for group in layout.groups]
    every = {g: Blocks.first(ids) for g, ids in enumerate(rows)}
    check_blocks(layout, every, whose="ours")
    for g in (-1, len(rows)):
        with pytest.raises(TransferError, match=f"ours: group {g} is not one of {len(rows)}"):
            check_blocks(layout, {g: every[0]}, whose="ours")
    for g, group in enumerate(layout.groups):
        for id in (0, layout.num_blocks(g)):
            with pytest.raises(TransferError, match=f"ours: group {group.group.name!r}") as error:
                check_blocks(layout, {g: Blocks.first([id])}, whose="ours")
            assert error.value.kind == "ticket"
    with pytest.raises(TransferError, match="blocks are list, not by group"):
        check_blocks(layout, [1, 2], whose="ours")


def test_a_request_is_for_tokens_that_every_ticket_of_it_has():
    layout, ticket = hybrid_layout(), one()

    def checked(*tickets: Ticket, start: int = 0, tokens: int | None = None) -> int:
        return check_request(layout, tickets, (0,), start, tokens, b"")

    assert checked(ticket, ticket) == checked(ticket, tokens=48, start=47) == 48
    assert checked(ticket, tokens=20) == 20
    for tickets, start, tokens, words in (
        ((), 0, None, "at least one ticket"),
        ((ticket, replace(ticket, num_tokens=47)), 0, None, r"\[47, 48\] tokens are not of one"),
        ((ticket,), 0, 49, "49 tokens were requested, the ticket is for 48"),
        ((ticket,), 48, None, r"\[48, 48\) are none"),
        ((ticket,), -1, None, "are none"),
        ((replace(ticket, identity=bytes(32)),), 0, None, "of computation 0000"),
    ):
        with pytest.raises(TransferError, match=words):
            checked(*tickets, start=start, tokens=tokens)


def test_a_recurrent_state_is_had_of_all_tokens_or_not_at_all():
    layout = hybrid_layout()
    (state,) = (
        g for g, rows in enumerate(layout.groups) if isinstance(rows.group.retention, State)
    )
    others = [g for g in range(len(layout.groups)) if g != state]
    check_states(layout, (state,), 48, 48)
    check_states(layout, others, 47, 48)
    with pytest.raises(TransferError, match="that after 48 tokens, not after 47"):
        check_states(layout, (*others, state), 47, 48)
