"""Staging: pieces hold every move once, fit their slots, and end up where moves say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.route.blocks import Blocks
from kvstow.route.route import route
from kvstow.transfer.path import chosen
from kvstow.transfer.staging import SLOTS, Stage, pieces
from transfer_node import from_json, hybrid_layout, rows_for

LAYOUT = hybrid_layout()
WAY = route(LAYOUT, LAYOUT)


@given(st.integers(1, 5000), st.integers(1, 30), st.integers(0, 1 << 20))
def test_pieces_hold_every_byte_of_the_moves_once_and_fit(slot_bytes, num_tokens, seed):
    source, target = (from_json(rows_for(LAYOUT, num_tokens, seed + i)) for i in range(2))
    moves = WAY.copies(source, target, num_tokens)
    expected = {
        d + i: s + i
        for s, d, n in zip(moves.source.tolist(), moves.destination.tolist(),
                           moves.nbytes.tolist(), strict=True)
        for i in range(n)
    }  # fmt: skip
    found: dict[int, int] = {}
    for piece in pieces(WAY, source, target, (0, num_tokens), slot_bytes):
        assert piece.at[0] == 0
        assert (np.diff(piece.at) == piece.nbytes[:-1]).all()
        assert 0 < piece.at[-1] + piece.nbytes[-1] <= slot_bytes
        for s, d, n in zip(piece.source.tolist(), piece.destination.tolist(),
                           piece.nbytes.tolist(), strict=True):  # fmt: skip
            for i in range(n):
                assert d + i not in found
                found[d + i] = s + i
    assert found == expected


def test_nothing_to_move_is_no_piece():
    empty = {g: Blocks.first([]) for g in range(len(LAYOUT.groups))}
    assert pieces(WAY, empty, empty, (0, 0), 64) == []


def test_slots_are_handed_out_once():
    stage = Stage(4096, pinned=False)
    taken = [stage.take() for _ in range(SLOTS)]
    assert sorted(taken) == [i * 4096 for i in range(SLOTS)]
    assert stage.take() is None
    stage.give(taken[2])
    assert stage.take() == taken[2]
    assert stage.arena.nbytes >= SLOTS * 4096


@pytest.mark.parametrize(
    ("read", "write", "staged", "expected"),
    [
        (5.0, 5.0, 0.0, "read"),
        (5.0, 9.0, 0.0, "read"),
        (0.48, 144.0, 3.0, "write"),  # one H200, device to device
        (0.44, 0.6, 3.2, "staged"),  # one H200, device to host
        (5.0, 0.0, 9.0, "read"),
        (0.0, 0.0, 0.0, "read"),
    ],
)
def test_the_fastest_way_is_chosen_and_the_simpler_one_where_there_is_little_to_gain(
    read, write, staged, expected
):
    assert chosen(read, write, staged).direction == expected
    assert chosen(read, write, staged, "write").direction == "write"
