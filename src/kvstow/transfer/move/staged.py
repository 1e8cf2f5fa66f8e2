"""Rows that have no direct path go through host memory, piece by piece.

    producer   rows ──copy──▶ slot ═══ read ═══▶ slot ──copy──▶ rows   consumer
               (device)      (host)             (host)         (device)

A side whose rows are in host memory needs no slot: they are read, or written, where they
lie. Both sides cut the same copies into the same pieces, so only numbers of pieces travel.
A producer says that it is done when it has heard that the last piece was fetched: a
consumer that hears this knows that no slot was reused while it was reading.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstow.errors import CopyError, TransferError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import CopyHandle, copy
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import separate
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies, ascending, cut, merged
from kvstow.route.route import Route
from kvstow.transfer.channel.messages import Card, Fetched, Staged
from kvstow.transfer.loop import NOW_AND_THEN, SOON, Mailbox, Story, together
from kvstow.transfer.move.copies import moved
from kvstow.transfer.transport.base import Kinds

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstow.transfer.channel.messages import AnyMessage
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.peers.flight import Flight

SLOTS = 4
PIECES_AT_ONCE = 2
"""Pieces that each side works on at a time."""


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


def pieces(
    route: Route,
    source: Mapping[int, Blocks],
    into: Mapping[int, Blocks],
    tokens: tuple[int, int],
    slot_bytes: int,
) -> list[Piece]:
    """The copies of a request, in order of destination, in pieces that fit a slot."""
    return in_slots(route.copies(source, into, tokens[1], start_token=tokens[0]), slot_bytes)


def in_slots(copies: Copies, slot_bytes: int) -> list[Piece]:
    """The copies in order of destination, in pieces that fit a slot."""
    copies = cut(ascending(copies), slot_bytes)
    ends = copies.nbytes.cumsum()
    found: list[Piece] = []
    first = 0
    while first < len(copies):
        before = int(ends[first] - copies.nbytes[first])
        end = int(np.searchsorted(ends, before + slot_bytes, side="right"))
        part = copies.part(first, end)
        found.append(Piece(part, ends[first:end] - part.nbytes - before))
        first = end
    return found


class Stage:
    """Slots in host memory, pinned where there is a device; or in a device's own."""

    def __init__(
        self, slot_bytes: int, *, pinned: bool = False, device: str | torch.device = "cpu"
    ) -> None:
        self.slot_bytes = slot_bytes
        self.arena = Arena(_flat(SLOTS * slot_bytes), pinned=pinned, device=device)
        self._free = deque(range(SLOTS))
        self.taken_at = 0.0
        """When a producer last got one to gather in."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def taken(self, *, leave: int = 0) -> Story[int]:
        """Wait for a free slot, and for so many more; its offset."""
        while len(self._free) <= leave:
            yield NOW_AND_THEN
        return self._free.popleft() * self.slot_bytes

    def give(self, offset: int) -> None:
        """Nobody reads or writes this slot any more."""
        self._free.append(offset // self.slot_bytes)


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


def copied(source: Arena, destination: Arena, copies: Copies) -> Story[None]:
    """Copy inside this machine; TransferError if that fails. Leaves nothing under way."""
    running: CopyHandle | None = None
    try:
        running = copy(source, destination, copies)
        while not running.poll():
            yield SOON
        running = None
    except CopyError as error:
        raise TransferError(f"staging: {error}", kind="transport") from error
    finally:
        if running is not None:
            with suppress(CopyError):
                running.wait()


# ── the producer ──────────────────────────────────────────────────────────────────────


def gathered(
    endpoint: "Endpoint",
    parts: list[Piece],
    mailbox: Mailbox,
    send: "Callable[[AnyMessage], None]",
    transfer: int,
) -> Story[None]:
    """Put piece after piece into slots, each kept until it was fetched."""
    fetched: set[int] = set()

    def gather(number: int, piece: Piece) -> Story[None]:
        stage = endpoint.stage
        assert stage is not None
        slot = yield from stage.taken(leave=1)  # for what we fetch: peers may wait for that
        try:
            yield from copied(endpoint.arena, stage.arena, piece.into_slot(slot))
            send(Staged(transfer, number, slot))
            while number not in fetched:
                while mailbox.has(Fetched):
                    fetched.add(mailbox.take(Fetched).piece)
                if number not in fetched:
                    yield NOW_AND_THEN
        finally:
            stage.give(slot)

    yield from together(*(gather(*each) for each in enumerate(parts)), at_once=SLOTS)


# ── the consumer ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """What one consumer fetches from one producer. `is_told` says that the producer stages, and
    tells which piece lies where; otherwise its rows are read where they are."""

    endpoint: "Endpoint"
    card: Card
    pieces: list[Piece]
    mailbox: Mailbox
    send: "Callable[[AnyMessage], None]"
    transfer: int
    flights: "list[Flight]"

    @property
    def is_told(self) -> bool:
        return self.card.stage is not None

    def all(self) -> Story[int]:
        """Fetch every piece; the number of descriptors that it took."""
        counts = yield from together(
            *map(self.one, range(len(self.pieces))), at_once=PIECES_AT_ONCE
        )
        return sum(counts)

    def one(self, number: int) -> Story[int]:
        """Fetch one piece, the next one that is staged."""
        there = self.card.base
        if self.is_told:
            told = yield from self.mailbox.wait(Staged)
            number, there = told.piece, self._checked(told)
        piece = self.pieces[number]
        stage = self.endpoint.stage
        if stage is None:
            count = yield from self._read(piece, there, None, self.flights)
        else:
            slot = yield from stage.taken()
            count = yield from self._through(stage, piece, there, slot)
        if self.is_told:
            self.send(Fetched(self.transfer, number))
        return count

    def _checked(self, told: Staged) -> int:
        """The address at which the producer has staged a piece."""
        stage = self.card.stage
        assert stage is not None
        if not 0 <= told.piece < len(self.pieces):
            raise self._wrong(f"piece {told.piece} is not one of {len(self.pieces)}")
        if not 0 <= told.slot <= stage.nbytes - self.pieces[told.piece].copies.total:
            raise self._wrong(f"slot {told.slot} is not inside {stage.nbytes} bytes")
        return stage.address + told.slot

    def _wrong(self, what: str) -> TransferError:
        agent = self.card.agent
        return TransferError(f"peer {agent!r}: {what}", kind="transport", peer=agent)

    def _through(self, stage: Stage, piece: Piece, there: int, slot: int) -> Story[int]:
        """Read into a slot of ours and copy from there; the slot is free when it is quiet."""
        flights: list[Flight] = []
        try:
            count = yield from self._read(piece, there, stage.arena.address + slot, flights)
            yield from copied(stage.arena, self.endpoint.arena, piece.out_of_slot(slot))
        finally:
            self.flights.extend(flights)
            when_quiet(flights, lambda: stage.give(slot))
        return count

    def _read(
        self, piece: Piece, there: int, slot: int | None, flights: "list[Flight]"
    ) -> Story[int]:
        """Read from the producer's slot, or rows, into ours."""
        source = there + (piece.at if self.is_told else piece.copies.source)
        endpoint, card = self.endpoint, self.card
        here = endpoint.card.base + piece.copies.destination if slot is None else slot + piece.at
        copies = merged(Copies(source, here, piece.copies.nbytes))
        kinds = Kinds(
            *(("DRAM", 0) if slot is not None else (endpoint.kind, endpoint.device)),
            *(("DRAM", 0) if self.is_told else (card.kind, card.device)),
        )
        yield from moved(endpoint, "read", card.engine, kinds, copies, flights=flights)
        return len(copies)


def when_quiet(flights: "list[Flight]", then: "Callable[[], None]") -> None:
    """Call `then` once, when the last of the flights is quiet."""
    left = [flight for flight in flights if not flight.is_quiet]
    if left:
        left[0].after(lambda: when_quiet(left, then))
    else:
        then()
