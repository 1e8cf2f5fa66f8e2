"""Slots: many pieces travel as few long ones.

    producer   rows ──copy──▶ slot ═══ read whole ═══▶ slot ──copy──▶ rows   consumer

For unequal layouts over a network, and for devices without a direct path: slots lie in host memory.
Both sides cut the same copies into the same pieces of slots, so only numbers travel. A producer
says that it is done when it has heard that the last slot was fetched: a consumer that hears this
knows that no slot was reused while it was reading. Nothing but a copy of its own ever writes to the
consumer's rows.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import separate
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.plan.view import Ints
from kvstow.route.copies import Copies, cut
from kvstow.transfer.channel.messages import Fetched, Staged, Written
from kvstow.transfer.loop import NOW_AND_THEN, Routine, together
from kvstow.transfer.peers.flight import Flight, move_copies, when_quiet
from kvstow.transfer.transport.base import Kinds
from kvstow.transfer.transport.mapped import copied

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.serve import Serving
    from kvstow.transfer.source import Source

SLOTS = 4
KEPT_TO_FETCH = 1
"""Slots that a producer leaves for what it fetches itself: peers may wait for that."""

PIECES_AT_ONCE = 2
"""Pieces that a consumer works on at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Copies between two arenas that fit a slot: those of copy `i` lie at `at[i]` in it."""

    copies: Copies
    at: Ints

    def into_slot(self, slot: int) -> Copies:
        """From the source's rows to a slot at this place."""
        return Copies(self.copies.source, slot + self.at, self.copies.nbytes)

    def out_of_slot(self, slot: int) -> Copies:
        """From a slot at this place to the destination's rows."""
        return Copies(slot + self.at, self.copies.destination, self.copies.nbytes)


def pieces(copies: Copies, slot_bytes: int) -> list[Piece]:
    """The copies of a request, in order of destination, in pieces that fit a slot."""
    copies = cut(copies.ascending(), slot_bytes)
    ends = copies.nbytes.cumsum()
    result: list[Piece] = []
    first = 0
    while first < len(copies):
        before = int(ends[first] - copies.nbytes[first])
        end = int(np.searchsorted(ends, before + slot_bytes, side="right"))
        part = copies.part(first, end)
        result.append(Piece(part, ends[first:end] - part.nbytes - before))
        first = end
    return result


class Stage:
    """Slots in host memory, pinned where there is a device."""

    def __init__(self, slot_bytes: int, *, pinned: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.arena = Arena(_flat(SLOTS * slot_bytes), pinned=pinned)
        self._free = deque(range(SLOTS))
        self._filled_by: dict[int, str] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_scarce(self) -> bool:
        """Whether so few are free that we can stage nothing."""
        return len(self._free) <= KEPT_TO_FETCH

    def take(self, peer: str = "", *, leave: int = 0) -> Routine[int]:
        """Wait for a free slot, and for so many more; its offset. Where it is to be filled from a
        peer, that one gets no more than a producer ever stages at once: if it hangs, slots are left
        for the others."""
        while len(self._free) <= leave or (peer and self._share(peer) >= SLOTS - KEPT_TO_FETCH):
            yield NOW_AND_THEN
        slot = self._free.popleft()
        if peer:
            self._filled_by[slot] = peer
        return slot * self.slot_bytes

    def _share(self, peer: str) -> int:
        return list(self._filled_by.values()).count(peer)

    def give(self, offset: int) -> None:
        """Nobody reads or writes this slot any more."""
        slot = offset // self.slot_bytes
        self._filled_by.pop(slot, None)
        self._free.append(slot)


@lru_cache(maxsize=8)
def _flat(nbytes: int) -> Layout:
    """Just bytes: what an arena needs to be allocated."""
    page = LayerSpec(
        name="stage",
        retention=Full(),
        block_tokens=1,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(Field("bytes", DType.UINT8, (Extent.whole("content", nbytes // 2),)),),
    )
    return separate(grouped([page]), num_slabs=2)


# ── the producer ──────────────────────────────────────────────────────────────────────


def stage_pieces(endpoint: "Endpoint", parts: list[Piece], serving: "Serving") -> Routine[None]:
    """Put piece after piece into slots, each kept until it was fetched."""
    fetched: set[int] = set()
    stage, mailbox = endpoint.stage, serving.mailbox

    def stage_one(number: int, piece: Piece) -> Routine[None]:
        slot = yield from stage.take(leave=KEPT_TO_FETCH)
        try:
            yield from copied(endpoint.arena, stage.arena, piece.into_slot(slot))
            serving.peer.send(Staged(serving.begin.transfer, number, slot))
            while number not in fetched:
                while mailbox.has(Fetched):
                    fetched.add(mailbox.take(Fetched).piece)
                if number not in fetched:
                    yield NOW_AND_THEN
        finally:
            stage.give(slot)

    yield from together(*(stage_one(*each) for each in enumerate(parts)), at_once=SLOTS)


# ── the consumer ──────────────────────────────────────────────────────────────────────


def fetch_pieces(endpoint: "Endpoint", source: "Source", parts: list[Piece]) -> Routine[None]:
    """Fetch every piece, in the order in which the producer stages them."""
    one = (_fetch_one(endpoint, source, parts) for _ in parts)
    yield from together(*one, at_once=PIECES_AT_ONCE)
    yield from source.mailbox.wait(Written)


def _fetch_one(endpoint: "Endpoint", source: "Source", parts: list[Piece]) -> Routine[None]:
    """Fetch the next piece that is staged; our slot is free when it is quiet."""
    staged = yield from source.mailbox.wait(Staged)
    there = _address(source, staged, parts)
    piece, stage, engine = parts[staged.piece], endpoint.stage, source.card.engine
    slot = yield from stage.take(engine)
    flights: list[Flight] = []
    try:
        whole = Copies.one(there, stage.arena.address + slot, piece.copies.total)
        yield from move_copies(endpoint, "read", engine, Kinds(), whole, flights=flights)
        yield from copied(stage.arena, endpoint.arena, piece.out_of_slot(slot))
    finally:
        source.flights.extend(flights)
        when_quiet(flights, lambda: stage.give(slot))
    source.peer.send(Fetched(source.id, staged.piece))


def _address(source: "Source", staged: Staged, parts: list[Piece]) -> int:
    """The address at which the producer has staged a piece."""
    if not 0 <= staged.piece < len(parts):
        raise source.fault(f"piece {staged.piece} is not one of {len(parts)}", "transport")
    stage = source.card.stage
    if not 0 <= staged.slot <= stage.nbytes - parts[staged.piece].copies.total:
        raise source.fault(f"slot {staged.slot} is not inside {stage.nbytes} bytes", "transport")
    return stage.address + staged.slot
