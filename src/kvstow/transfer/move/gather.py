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
from kvstow.memory.cuda import warm_up
from kvstow.plan.layout import Layout
from kvstow.route.copies import Copies, merged, num_stretches
from kvstow.route.route import route
from kvstow.route.ways import Amount, counted, gathers
from kvstow.transfer.loop import NOW_AND_THEN, Story, result_of, together
from kvstow.transfer.move.copies import moved
from kvstow.transfer.move.staged import PIECES_AT_ONCE, Piece, Stage, copied, in_slots, when_quiet

if TYPE_CHECKING:
    from kvstow.transfer.channel.messages import Card
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.peers.flight import Flight

PATIENCE = 0.25
"""Seconds in which nobody got a slot after which a piece is written as it lies: all of them may
belong to consumers that have died."""

LONG_REQUEST = 1 << 16
"""Tokens of a request that is gathered if any between the same two layouts is."""


def ready_to_gather(endpoint: "Endpoint", layout: Layout) -> Story[None]:
    """Make ready what the first pull into such a layout would have to wait for: slots, and the
    kernel that copies into them. Nothing, where no pull would be gathered."""
    between = route(endpoint.layout, layout)
    counts = counted(between, LONG_REQUEST)
    if not _is_gathered(endpoint, counts.pieces, counts.num_stretches):
        return
    endpoint.scratch()
    if endpoint.kind == "VRAM":
        compiling = endpoint.worker.submit(warm_up, endpoint.arena.bytes, between)
        compiling.add_done_callback(lambda _: endpoint.wake())
        yield from result_of(compiling)


def _is_gathered(endpoint: "Endpoint", pieces: Amount, num_stretches: int) -> bool:
    """Whether pieces that fill so many stretches are gathered: where that pays, unless somebody
    has decided."""
    if endpoint.gathers is not None:
        return endpoint.gathers
    return gathers(pieces, num_stretches, on_device=endpoint.kind == "VRAM")


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
        pieces = Amount(len(copies), copies.total)
        if not _is_gathered(self.endpoint, pieces, num_stretches(copies)):
            return None
        try:
            return self.endpoint.scratch()
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
