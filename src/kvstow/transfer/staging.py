"""Staging: rows that have no direct path go through host memory, piece by piece.

    producer   rows ──copy──▶ slot ═══ read ═══▶ slot ──copy──▶ rows   consumer
               (device)      (host)             (host)         (device)

A side whose rows are in host memory needs no slot: they are read, or written, where they
lie. Both sides cut the same moves into the same pieces, so only numbers of pieces travel.
A producer says that it is done when it has heard that the last piece was fetched: a
consumer that hears this knows that no slot was reused while it was reading.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

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
from kvstow.route.copies import Copies
from kvstow.route.route import Route

SLOTS = 4
DEVICE_SLOT_BYTES = 32 << 20
"""Slots of an agent whose arena is on a device; others have none unless they ask."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some moves that fit a slot: `nbytes[i]` bytes lie at `at[i]` in it."""

    source: Ints
    destination: Ints
    nbytes: Ints
    at: Ints

    @property
    def total(self) -> int:
        return int(self.nbytes.sum())


def pieces(
    route: Route,
    source: Mapping[int, Blocks],
    into: Mapping[int, Blocks],
    tokens: tuple[int, int],
    slot_bytes: int,
) -> list[Piece]:
    """The moves of a request, in order of destination, cut into pieces."""
    moves = route.copies(source, into, tokens[1], start_token=tokens[0])
    order = np.argsort(moves.destination, kind="stable")
    cuts = -(-moves.nbytes[order] // slot_bytes)
    which = np.repeat(order, cuts)
    part = (np.arange(len(which)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * slot_bytes
    nbytes = np.minimum(slot_bytes, moves.nbytes[which] - part)
    starts, destinations = moves.source[which] + part, moves.destination[which] + part
    ends = np.cumsum(nbytes)
    found: list[Piece] = []
    lo = 0
    while lo < len(ends):
        before = int(ends[lo] - nbytes[lo])
        hi = int(np.searchsorted(ends, before + slot_bytes, side="right"))
        cut = slice(lo, hi)
        at = ends[cut] - nbytes[cut] - before
        found.append(Piece(starts[cut], destinations[cut], nbytes[cut], at))
        lo = hi
    return found


class Stage:
    """Slots in host memory, pinned where there is a device."""

    def __init__(self, slot_bytes: int, *, pinned: bool) -> None:
        self.slot_bytes = slot_bytes
        self.arena = Arena(_flat(SLOTS * slot_bytes), pinned=pinned)
        self._free = deque(range(SLOTS))

    def take(self) -> int | None:
        """The offset of a free slot, or None while all are in use."""
        return self._free.popleft() * self.slot_bytes if self._free else None

    def give(self, offset: int) -> None:
        self._free.append(offset // self.slot_bytes)

    def gather(self, rows: Arena, piece: Piece, slot: int) -> CopyHandle:
        """Start to copy a piece's rows into a slot."""
        return copy(rows, self.arena, Copies(piece.source, slot + piece.at, piece.nbytes))

    def scatter(self, rows: Arena, piece: Piece, slot: int) -> CopyHandle:
        """Start to copy a slot to a piece's rows."""
        return copy(self.arena, rows, Copies(slot + piece.at, piece.destination, piece.nbytes))


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


def over(running: CopyHandle) -> bool:
    """Whether a copy has ended; TransferError if it failed."""
    try:
        return running.poll()
    except CopyError as error:
        raise TransferError(f"staging: {error}", kind="transport") from error
