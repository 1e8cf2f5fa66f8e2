"""What an engine must do to move bytes for us: register, connect, prepare, start, poll.

A transport knows memory and addresses; it knows nothing of blocks, tickets or layouts.
All calls come from one thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstow.errors import TransferError
from kvstow.route.copies import Copies, cut

Ints = npt.NDArray[np.int64]

MemoryKind = Literal["DRAM", "VRAM"]
Direction = Literal["read", "write"]


class Region(NamedTuple):
    """Memory of one process: `nbytes` from `address`, on the host or on a device."""

    address: int
    nbytes: int
    kind: MemoryKind = "DRAM"
    device: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Copies to make: `nbytes[i]` bytes at `local[i]` here and `remote[i]` there.

    Addresses, not offsets. The arrays are equally long.
    """

    local: Ints
    remote: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        return int(np.add.reduce(self.nbytes))

    def part(self, start: int, stop: int) -> "Spans":
        """Copies `[start, stop)`."""
        cut = slice(start, stop)
        return Spans(self.local[cut], self.remote[cut], self.nbytes[cut])


def merged(spans: Spans) -> Spans:
    """The same copies in the fewest pieces: neighbours on both sides become one.

    Sorts by local address where that is needed to see the neighbours.
    """
    if len(spans) < 2:
        return spans
    local, remote, nbytes = spans.local, spans.remote, spans.nbytes
    if (local[1:] < local[:-1]).any():
        order = np.argsort(local, kind="stable")
        local, remote, nbytes = local[order], remote[order], nbytes[order]
    joins = (local[:-1] + nbytes[:-1] == local[1:]) & (remote[:-1] + nbytes[:-1] == remote[1:])
    if not joins.any():
        return Spans(local, remote, nbytes)
    heads = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    return Spans(local[heads], remote[heads], np.add.reduceat(nbytes, heads))


def chunks(spans: Spans, nbytes: int) -> list[Spans]:
    """The copies in pieces of about equal size, none of them empty: of at most `nbytes` where
    copies are much shorter, of at most twice as many otherwise. Longer copies are cut."""
    total = spans.total
    if len(spans) and total <= nbytes:
        return [spans]
    even = -(-total // -(-total // nbytes)) if total else nbytes
    spans = _cut(spans, even)
    number = (spans.nbytes.cumsum() - spans.nbytes) // even
    cuts = ((number[1:] != number[:-1]).nonzero()[0] + 1).tolist()
    return [spans.part(lo, hi) for lo, hi in pairwise([0, *cuts, len(spans)]) if lo < hi]


def _cut(spans: Spans, most: int) -> Spans:
    """The same copies, each of at most `most` bytes."""
    if not np.logical_or.reduce(spans.nbytes > most):
        return spans
    pieces = cut(Copies(spans.local, spans.remote, spans.nbytes), most)
    return Spans(pieces.source, pieces.destination, pieces.nbytes)


class Post(Protocol):
    """Copies that the engine knows of: prepared, then started, then over, then perhaps started
    again."""

    def start(self) -> None:
        """Begin to copy; not while it copies. Raises TransferError if the engine refuses."""
        ...

    def poll(self) -> bool:
        """Whether all bytes have arrived. Raises TransferError if they never will."""
        ...

    def release(self) -> None:
        """Forget it. A post that has not ended may still write: disconnect its peer."""
        ...


class Transport(Protocol):
    """An engine in one process."""

    @property
    def name(self) -> str:
        """Unique among all transports that ever meet: fresh at every start."""
        ...

    def register(self, region: Region) -> None:
        """Let peers read and write this memory."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to connect; after the last `register`."""
        ...

    def connect(self, metadata: bytes) -> str:
        """The name of the peer whose metadata this is, connected from now on.

        Raises TransferError for metadata that are not whole, before the engine sees them.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer: no post of ours reads or writes any more, ended or not."""
        ...

    def prepare(self, direction: Direction, peer: str, kinds: "Kinds", spans: Spans) -> Post:
        """Copies to be started: `read` from there to here, `write` from here to there."""
        ...

    def progress(self) -> None:
        """Do what is due, for our posts and for peers that work on our memory."""
        ...

    @property
    def another(self) -> "Callable[[], Transport] | None":
        """What makes an engine of the same kind, to be used in another thread; None where two
        would not copy faster than one."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Kinds(NamedTuple):
    """Kind and device of the memory on the two sides of a post."""

    local: MemoryKind = "DRAM"
    local_device: int = 0
    remote: MemoryKind = "DRAM"
    remote_device: int = 0


def inside(regions: list[Region], address: int, nbytes: int) -> bool:
    """Whether one of the regions holds all of the bytes."""
    return any(r.address <= address and address + nbytes <= r.address + r.nbytes for r in regions)


def lost(peer: str, why: str) -> TransferError:
    """The error for a peer that has gone."""
    return TransferError(f"peer {peer!r} is gone: {why}", kind="peer", peer=peer)
