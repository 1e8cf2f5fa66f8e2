"""Staging: pieces hold every move once, fit their slots, and end up where moves say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.route.blocks import Blocks
from kvstow.route.route import route
from kvstow.transfer.move.staged import SLOTS, Stage, pieces
from transfer_node import from_json, hybrid_layout, rows_for

LAYOUT = hybrid_layout()
WAY = route(LAYOUT, LAYOUT)


def triples(copies):
    columns = (copies.source, copies.destination, copies.nbytes)
    return zip(*(column.tolist() for column in columns), strict=True)


@given(st.integers(1, 5000), st.integers(1, 30), st.integers(0, 1 << 20))
def test_pieces_hold_every_byte_of_the_moves_once_and_fit(slot_bytes, num_tokens, seed):
    source, target = (from_json(rows_for(LAYOUT, num_tokens, seed + i)) for i in range(2))
    moves = WAY.copies(source, target, num_tokens)
    expected = {d + i: s + i for s, d, n in triples(moves) for i in range(n)}
    found: dict[int, int] = {}
    for piece in pieces(WAY, source, target, (0, num_tokens), slot_bytes):
        assert piece.at[0] == 0
        copies = piece.copies
        assert (np.diff(piece.at) == copies.nbytes[:-1]).all()
        assert 0 < piece.at[-1] + copies.nbytes[-1] <= slot_bytes
        for s, d, n in triples(copies):
            for i in range(n):
                assert d + i not in found
                found[d + i] = s + i
    assert found == expected


def test_nothing_to_move_is_no_piece():
    empty = {g: Blocks.first([]) for g in range(len(LAYOUT.groups))}
    assert pieces(WAY, empty, empty, (0, 0), 64) == []


def test_slots_are_handed_out_once_and_whoever_finds_none_waits():
    stage = Stage(4096, pinned=False)
    taken = [ended(stage.taken()) for _ in range(SLOTS)]
    assert sorted(taken) == [i * 4096 for i in range(SLOTS)]
    waiting = stage.taken()
    next(waiting)
    stage.give(taken[2])
    assert ended(waiting) == taken[2]
    assert stage.arena.nbytes >= SLOTS * 4096


def ended(story):
    """The result of a story that need not wait."""
    with pytest.raises(StopIteration) as end:
        next(story)
    return end.value.value
