"""Slots: pieces hold every move once, fit their slots, and end up where moves say."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.plan.manifest import encode
from kvstow.route.blocks import Blocks
from kvstow.route.route import plan_route
from kvstow.transfer.peers.flight import when_quiet
from kvstow.transfer.slots import SLOTS, Stage, pieces
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, from_json, hybrid_layout, rows_for

LAYOUT = hybrid_layout()
WAY = plan_route(LAYOUT, LAYOUT)


def triples(copies):
    columns = (copies.source, copies.destination, copies.nbytes)
    return zip(*(column.tolist() for column in columns), strict=True)


@given(st.integers(1, 5000), st.integers(1, 30), st.integers(0, 1 << 20))
def test_pieces_hold_every_byte_of_the_moves_once_and_fit(slot_bytes, num_tokens, seed):
    source, target = (from_json(rows_for(LAYOUT, num_tokens, seed + i)) for i in range(2))
    moves = WAY.copies(source, target, num_tokens)
    expected = {d + i: s + i for s, d, n in triples(moves) for i in range(n)}
    found: dict[int, int] = {}
    for piece in pieces(moves, slot_bytes):
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
    assert pieces(WAY.copies(empty, empty, 0), 64) == []


def test_slots_are_handed_out_once_and_whoever_finds_none_waits():
    stage = Stage(4096, pinned=False)
    taken = [ended(stage.take()) for _ in range(SLOTS)]
    assert sorted(taken) == [i * 4096 for i in range(SLOTS)]
    waiting = stage.take()
    next(waiting)
    stage.give(taken[2])
    assert ended(waiting) == taken[2]
    assert stage.arena.nbytes >= SLOTS * 4096


def ended(routine):
    """The result of a story that need not wait."""
    with pytest.raises(StopIteration) as end:
        next(routine)
    return end.value.value


def test_slots_are_left_for_others_where_that_is_asked_for():
    stage = Stage(4096, pinned=False)
    taken = [ended(stage.take(leave=1)) for _ in range(SLOTS - 1)]
    waiting = stage.take(leave=1)
    next(waiting)
    ended(stage.take())
    stage.give(taken[0])
    next(waiting)
    stage.give(taken[1])
    assert ended(waiting) in taken


def test_two_agents_that_stage_for_each_other_do_not_wait_for_each_other_for_ever():
    """Each kept all its slots for what it gave, and had none for what it got."""
    layout, fabric = hybrid_layout(68), Fabric()
    options = {"direction": "slots", "slot_bytes": 64, "transfer_seconds": 20.0}
    nodes = [Node(encode(layout), fabric, name, options) for name in "ab"]
    rows = [rows_for(layout, 24, seed, (1, 20)) for seed in (1, 2)]
    into = [rows_for(layout, 24, 3, (at, at + 16)) for at in (20, 36, 52)]
    for node, listed, other in zip(nodes, rows, reversed(nodes), strict=True):
        node.fill(listed)
        node.path(other.address)
    tickets = [
        [node.offer(listed, 24) for _ in range(3)] for node, listed in zip(nodes, rows, strict=True)
    ]
    for theirs, node in zip(reversed(tickets), nodes, strict=True):
        for ticket, listed in zip(theirs, into, strict=True):
            node.begin_pull([ticket], listed)
    for node in nodes:
        assert [node.end_pull(number).get("error") for number in range(3)] == [None] * 3
    for node in nodes:
        node.close()


def test_a_peer_that_hangs_leaves_slots_for_others():
    """Two pulls from it that had failed kept all of them."""
    stage = Stage(4096, pinned=False)
    taken = [ended(stage.take("hung")) for _ in range(SLOTS - 1)]
    waiting = stage.take("hung")
    assert next(waiting) > 0
    for _ in range(3):
        stage.give(ended(stage.take("well")))
    assert stage.is_scarce
    assert next(waiting) > 0
    stage.give(taken[0])
    assert not stage.is_scarce
    ended(waiting)
    assert stage.is_scarce


def test_a_slot_is_given_back_when_the_last_copy_that_may_write_to_it_is_quiet():
    class Failed:
        def __init__(self) -> None:
            self.is_quiet = False
            self.calls: list[Any] = []

        def after(self, call: Any) -> None:
            self.calls.append(call)

        def land(self) -> None:
            self.is_quiet = True
            for call in self.calls:
                call()

    flights: list[Any] = [Failed(), Failed(), Failed()]
    given: list[int] = []
    flights[1].land()
    when_quiet(flights, lambda: given.append(1))
    flights[2].land()
    assert not given
    flights[0].land()
    assert given == [1]
