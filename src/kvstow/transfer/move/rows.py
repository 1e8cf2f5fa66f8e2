"""Rows are read whole and cut here, where that is cheaper than many small reads.

    producer   rows ═══ read, one piece a row ═══▶ slot ──copy──▶ rows   consumer

The producer sees reads and nothing else, so fence and digests come after them as after any read:
what is cut has been read. Slots are memory of the consumer's own, of the arena's kind.
"""

from typing import TYPE_CHECKING

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.route.price import LinkSpeed, prefers_rows
from kvstow.route.rows import RowReads, row_reads
from kvstow.transfer.loop import Story, together
from kvstow.transfer.move.copies import moved
from kvstow.transfer.move.staged import PIECES_AT_ONCE, copied, when_quiet
from kvstow.transfer.options import Way
from kvstow.transfer.peers.probe import measured_copies, measured_reads

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint, Flight
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
    link = yield from measured_reads(endpoint, source.peer, source.card)
    here = yield from measured_copies(endpoint)
    engines = endpoint.transport.num_engines(source.card.engine)
    return rows if _is_cheaper(rows, copies, link, here, engines) else None


def _is_cheaper(
    rows: RowReads, copies: Copies, link: LinkSpeed, here: LinkSpeed, engines: int
) -> bool:
    """Whether rows pay. Long reads are shared out to all engines, those into slots are not."""
    direct = link.seconds(len(copies), copies.total) / engines
    through = link.seconds(len(rows.reads), rows.reads.total)
    return prefers_rows(direct, through + here.seconds(len(copies), copies.total))


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
