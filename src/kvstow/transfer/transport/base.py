"""What an engine must do to move bytes for us: register, connect, prepare, start, poll.

A transport knows memory and addresses; it knows nothing of blocks, tickets or layouts.
All calls come from one thread.

When is memory quiet, so that nothing of a post writes to it any more? Only two things say so:

    post.ended     the bytes have arrived, or the post never started, or the engine has said
                   that it writes no more for this very post
    close()        the engine that could still write no longer exists

Nothing else does. A post that was released, or whose peer was disconnected, may write much
later: a peer that was only stopped goes on where it was. An error may concern one copy of a
post while its siblings are still under way.
"""

from typing import Literal, NamedTuple, Protocol

from kvstow.errors import TransferError
from kvstow.route.copies import Copies

MemoryKind = Literal["DRAM", "VRAM"]
Direction = Literal["read", "write"]


class Region(NamedTuple):
    """Memory of one process: `nbytes` from `address`, on the host or on a device."""

    address: int
    nbytes: int
    kind: MemoryKind = "DRAM"
    device: int = 0


class Kinds(NamedTuple):
    """Kind and device of the memory on the two sides of a post."""

    local: MemoryKind = "DRAM"
    local_device: int = 0
    remote: MemoryKind = "DRAM"
    remote_device: int = 0


class Post(Protocol):
    """Copies that the engine knows of: prepared, then started, then over, then perhaps started
    again."""

    def start(self) -> None:
        """Begin to copy; not while it copies. Raises TransferError if the engine refuses."""
        ...

    def poll(self) -> bool:
        """Whether all bytes have arrived. Raises TransferError if they never will."""
        ...

    @property
    def ended(self) -> bool:
        """Whether this post certainly writes no more: see the module. Changes in `start`,
        `poll` and the transport's `progress`; false after an error unless the engine vouches
        for every copy of the post."""
        ...

    def release(self) -> None:
        """Forget it. One that has not ended may still write until the transport is closed."""
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

    def connect(self, peer: str, metadata: bytes) -> None:
        """Connect to the peer of that name. Raises TransferError for metadata that are not whole
        or are another's, before the engine sees them."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer: nothing new starts to it or from it, and its posts fail.

        Says nothing about bytes under way: see the module.
        """
        ...

    def prepare(self, direction: Direction, peer: str, kinds: Kinds, copies: Copies) -> Post:
        """Copies between addresses, to be started: `read` from there to here, so that sources
        are the peer's, `write` from here to there."""
        ...

    def progress(self) -> None:
        """Do what is due, for our posts and for peers that work on our memory."""
        ...

    def fresh(self) -> "Transport":
        """A new engine of the same kind under a new name, with nothing registered.

        It takes the place of one that is closed because too much memory waits for posts that
        may never end.
        """
        ...

    def close(self) -> None:
        """Destroy the engine: when this returns, nothing of it writes any more."""
        ...


def inside(regions: list[Region], address: int, nbytes: int) -> bool:
    """Whether one of the regions holds all of the bytes."""
    return any(r.address <= address and address + nbytes <= r.address + r.nbytes for r in regions)


def disconnected(peer: str) -> TransferError:
    """The error of a post to a peer that we have disconnected: that peer may be well."""
    return TransferError(f"peer {peer!r} is not connected here", kind="transport", peer=peer)


def lost(peer: str, why: str) -> TransferError:
    """The error for a peer that has gone."""
    return TransferError(f"peer {peer!r} is gone: {why}", kind="peer", peer=peer)
