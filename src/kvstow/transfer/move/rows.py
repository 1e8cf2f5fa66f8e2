"""Rows are read whole and cut here, where that is cheaper than many small reads.

    producer   rows ═══ read, one piece a row ═══▶ slot ──copy──▶ rows   consumer

The producer sees reads and nothing else, so fence and digests come after them as after any read:
what is cut has been read. Slots are memory of the consumer's own, of the arena's kind.
"""

from typing import TYPE_CHECKING

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.route.rows import RowReads, row_reads
from kvstow.route.ways import Amount, Way, prefers_rows
from kvstow.transfer.loop import Story, together
from kvstow.transfer.move.copies import moved
from kvstow.transfer.move.staged import PIECES_AT_ONCE, copied, when_quiet
from kvstow.transfer.peers.probe import measured_copies, measured_reads

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.peers.flight import Flight
    from kvstow.transfer.source import Source


def chosen_rows(
    endpoint: "Endpoint", source: "Source", copies: Copies, forced: Way | None
) -> Story[RowReads | None]:
    """How to read whole rows instead, if that is forced, or cheaper by what was measured.

    Places of the copies are offsets in the two arenas.
    """
    blocks = source.ticket.blocks
    if forced == "rows":
        return row_reads(source.layout, blocks, copies)
    if forced is not None or len(copies) <= sum(map(len, blocks.values())):
        return None  # another way is forced, or rows are equal
    rows = row_reads(source.layout, blocks, copies)
    try:
        scratch = endpoint.scratch()
    except TransferError:
        return None
    if len(rows.reads) == len(copies) or scratch.num_free < PIECES_AT_ONCE:
        return None  # nothing to gain, or others are at it
    reading = yield from measured_reads(endpoint, source.peer, source.card)
    cutting = yield from measured_copies(endpoint)
    pieces, whole = (Amount(len(each), each.total) for each in (copies, rows.reads))
    return rows if prefers_rows(reading, cutting, pieces, whole) else None


def read_and_cut(endpoint: "Endpoint", source: "Source", rows: RowReads) -> Story[None]:
    """Read piece after piece into slots and copy from there; return when all is in its place."""
    scratch, card = endpoint.scratch(), source.card
    kinds = endpoint.kinds(card)

    def one(piece: RowReads) -> Story[None]:
        slot = yield from scratch.taken()
        flights: list[Flight] = []
        try:
            reads = piece.reads.moved(card.base, scratch.arena.address + slot)
            yield from moved(endpoint, "read", card.engine, kinds, reads, flights=flights)
            yield from copied(scratch.arena, endpoint.arena, piece.cuts.moved(slot, 0))
        finally:
            source.flights.extend(flights)
            when_quiet(flights, lambda: scratch.give(slot))

    pieces = rows.pieces(scratch.slot_bytes)
    yield from together(*map(one, pieces), at_once=PIECES_AT_ONCE)
