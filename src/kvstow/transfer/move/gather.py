"""A producer gathers short copies before it writes them, where that saves many small writes.

    producer   rows ──copy──▶ slot ═══ write, one piece a stretch ═══▶ rows   consumer

The copies of a slot lie in the order of their destinations, so those that fill neighbouring bytes
are one write. Such a stretch never leaves an allocation of the consumer's: each begins with block
0, which nobody can order. The consumer sees writes and nothing else. Slots are memory of the
producer's own, of the arena's kind.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstow.errors import TransferError
from kvstow.route.copies import Copies, merged, num_stretches
from kvstow.route.ways import Amount, gathers
from kvstow.transfer.loop import NOW_AND_THEN, Story, together
from kvstow.transfer.move.copies import moved
from kvstow.transfer.move.staged import PIECES_AT_ONCE, Piece, Stage, copied, in_slots, when_quiet

if TYPE_CHECKING:
    from kvstow.transfer.channel.messages import Card
    from kvstow.transfer.peers.endpoint import Endpoint, Flight

PATIENCE = 0.25
"""Seconds in which nobody got a slot after which a piece is written as it lies: all of them may
belong to consumers that have died."""


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """What one producer writes into one consumer's rows, at most `chunk` bytes in a post."""

    endpoint: "Endpoint"
    card: "Card"
    flights: "list[Flight]"
    chunk: int

    def all(self, copies: Copies) -> Story[int]:
        """Write all copies, gathered where that pays; the number of writes, once they have
        arrived. Places are offsets in the two arenas. Raises TransferError."""
        scratch = self._slots(copies)
        if scratch is None:
            return (yield from self._as_they_lie(copies))
        pieces = (self._gathered(scratch, each) for each in in_slots(copies, scratch.slot_bytes))
        return sum((yield from together(*pieces, at_once=PIECES_AT_ONCE)))

    def _slots(self, copies: Copies) -> Stage | None:
        """The slots to gather in; None where that does not pay or there is no memory for them."""
        endpoint, is_gathered = self.endpoint, self.endpoint.gathers
        if is_gathered is None:
            pieces, on_device = Amount(len(copies), copies.total), endpoint.kind == "VRAM"
            is_gathered = gathers(pieces, num_stretches(copies), on_device=on_device)
        try:
            return endpoint.scratch() if is_gathered else None
        except TransferError:
            return None

    def _gathered(self, scratch: Stage, piece: Piece) -> Story[int]:
        """Copy a piece into a slot and write it from there; the slot is free when it is quiet."""
        endpoint = self.endpoint
        while not scratch.num_free:
            if endpoint.clock() > scratch.taken_at + PATIENCE:
                return (yield from self._as_they_lie(piece.copies))
            yield NOW_AND_THEN
        slot = yield from scratch.taken()
        scratch.taken_at = endpoint.clock()
        flights: list[Flight] = []
        try:
            yield from copied(endpoint.arena, scratch.arena, piece.into_slot(slot))
            writes = merged(piece.out_of_slot(slot).moved(scratch.arena.address, self.card.base))
            return (yield from self._put(writes, flights))
        finally:
            self.flights.extend(flights)
            when_quiet(flights, lambda: scratch.give(slot))

    def _as_they_lie(self, copies: Copies) -> Story[int]:
        return self._put(copies.moved(self.endpoint.card.base, self.card.base), self.flights)

    def _put(self, writes: Copies, flights: "list[Flight]") -> Story[int]:
        endpoint, card = self.endpoint, self.card
        how = endpoint, "write", card.engine, endpoint.kinds(card)
        yield from moved(*how, writes, flights=flights, chunk=self.chunk)
        return len(writes)
