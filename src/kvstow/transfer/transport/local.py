"""The reference transport: peers in one process, bytes copied by the one who asks.

It does what `Transport` says and nothing cleverer, a bounded number of bytes per
`progress`, so that a test can stop the world between any two copies. Faults are real: a peer
that is killed is gone, a cable that is cut moves nothing until it is connected again. And so
are late bytes: a post that was given up goes on whenever this transport makes progress, until the
transport is closed.
"""

import ctypes
import secrets
from collections.abc import Callable

import msgspec

from kvstow.errors import TransferError
from kvstow.route.copies import Copies, cut
from kvstow.transfer.transport.base import (
    Direction,
    Kinds,
    Post,
    Region,
    disconnected,
    inside,
    lost,
)

STEP_BYTES = 64 << 20
MAX_METADATA = 1 << 20


class Fabric:
    """Where local transports find each other, and where their cables are cut.

    `lands` is asked before a copy of a post that was given up: whether its bytes land now.
    """

    def __init__(self, *, token: str = "", lands: Callable[[], bool] = lambda: True) -> None:
        self.members: dict[str, LocalTransport] = {}
        self.lands = lands
        self._token = token or secrets.token_hex(8)
        self._made = 0
        self._cut: set[frozenset[str]] = set()
        self.in_transit: list[_LocalPost] = []
        """Writes of engines that were killed."""

    def join(self, member: "LocalTransport") -> str:
        """A new member's name, which no other has had."""
        self._made += 1
        name = f"local-{self._token}-{self._made}"
        self.members[name] = member
        return name

    def kill(self, name: str) -> None:
        """The transport of that name is gone, as if its process had died: what it was writing may
        lie in sockets, and lands as long as the engine lives that it was for."""
        member = self.leave(name)
        if member is not None:
            self.in_transit += member.writes

    def arrives(self, post: "_LocalPost") -> bool:
        """Whether the next copy of a write in transit lands now."""
        return self.lands()

    def leave(self, name: str) -> "LocalTransport | None":
        """The transport of that name is gone, with all that was on its way to it."""
        self.in_transit = [post for post in self.in_transit if post.peer != name]
        return self.members.pop(name, None)

    def cut(self, one: str, other: str) -> None:
        """Nothing moves between the two, and nobody is told."""
        self._cut.add(frozenset((one, other)))

    def reconnect(self, one: str, other: str) -> None:
        """Copies go on where they stopped."""
        self._cut.discard(frozenset((one, other)))

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    regions: tuple[tuple[int, int], ...]


class LocalTransport:
    """One member of a fabric.

    `before_copy` is called before every single copy with its index in the post: what a
    test does there happens in the middle of a transfer. A TransferError that it raises is the
    engine's: the post has failed, the rest of its copies go on. `piece_bytes` cuts copies, so
    that half of one may be there. `after_copy` is told where so many bytes have arrived, and
    may spoil them.
    """

    def __init__(
        self,
        fabric: Fabric,
        *,
        step_bytes: int = STEP_BYTES,
        piece_bytes: int = 0,
        before_copy: Callable[[int], None] | None = None,
        after_copy: Callable[[int, int], None] | None = None,
    ) -> None:
        self.fabric = fabric
        self.step_bytes = step_bytes
        self.piece_bytes = piece_bytes
        self.before_copy = before_copy
        self.after_copy = after_copy
        self.is_closed = False
        self._name = fabric.join(self)
        self._regions: list[Region] = []
        self._peers: set[str] = set()
        self._posts: list[_LocalPost] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def peers(self) -> frozenset[str]:
        """Who is connected."""
        return frozenset(self._peers)

    def register(self, region: Region) -> None:
        if region.kind != "DRAM":
            raise TransferError(f"local: {region.kind} is not host memory", kind="transport")
        self._regions.append(region)

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is registered."""
        return tuple(self._regions)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are registered."""
        return inside(self._regions, address, nbytes)

    def metadata(self) -> bytes:
        regions = tuple((r.address, r.nbytes) for r in self._regions)
        return msgspec.msgpack.encode(_Metadata(self._name, regions))

    def connect(self, peer: str, metadata: bytes) -> None:
        try:
            name = msgspec.msgpack.decode(metadata[:MAX_METADATA], type=_Metadata).name
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(
                f"local: metadata are incomplete: {error}", kind="refused", peer=peer
            ) from None
        if name != peer:
            raise TransferError(
                f"local: metadata are those of {name!r}, not of {peer!r}", kind="refused", peer=peer
            )
        if peer not in self.fabric.members:
            raise lost(peer, "no such member of the fabric")
        self._peers.add(peer)

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)
        for post in self._posts:
            if post.peer == peer:
                post.give_up(disconnected(peer))

    def prepare(self, direction: Direction, peer: str, kinds: Kinds, copies: Copies) -> Post:
        self.check_connected(peer)
        if self.piece_bytes:
            copies = cut(copies, self.piece_bytes)
        return _LocalPost(self, direction, peer, copies)

    def check_connected(self, peer: str) -> None:
        """TransferError unless posts to that peer may start."""
        if peer not in self._peers:
            raise disconnected(peer)

    @property
    def writes(self) -> "list[_LocalPost]":
        """Posts under way that write to peers."""
        return [post for post in self._posts if post.is_write and not post.is_over]

    def begin(self, post: "_LocalPost") -> None:
        """Let a post copy from now on."""
        self._posts.append(post)

    def progress(self) -> None:
        for post in self.fabric.in_transit:
            while post.peer == self._name and not post.is_over and self.fabric.arrives(post):
                post.copy(self)
        for post in self._posts:
            self._advance(post)
        self._posts = [post for post in self._posts if not post.is_over]

    def fresh(self) -> "LocalTransport":
        return LocalTransport(
            self.fabric,
            step_bytes=self.step_bytes,
            piece_bytes=self.piece_bytes,
            before_copy=self.before_copy,
            after_copy=self.after_copy,
        )

    def close(self) -> None:
        self.fabric.leave(self._name)
        self.is_closed = True
        self._posts.clear()
        self._peers.clear()

    def _advance(self, post: "_LocalPost") -> None:
        budget = self.step_bytes
        while not post.is_over and budget > 0:
            there = self.fabric.members.get(post.peer)
            if self.fabric.members.get(self._name) is not self:
                return
            if there is None:
                post.die(lost(post.peer, "it left the fabric"))
            elif self.fabric.is_cut(self._name, post.peer) or (
                post.was_given_up and not self.fabric.lands()
            ):
                return
            else:
                budget -= self._copy(post, there)

    def _copy(self, post: "_LocalPost", there: "LocalTransport") -> int:
        if self.before_copy is not None:
            try:
                self.before_copy(post.done)
            except TransferError as error:
                post.give_up(error)
                post.done += 1
                return 0
        return post.copy(there)


class _LocalPost:
    """Copies of one post, one after the other."""

    def __init__(self, owner: LocalTransport, direction: Direction, peer: str, copies: Copies):
        self.peer = peer
        self.done = len(copies)
        self._owner = owner
        self._direction: Direction = direction
        self._copies = copies
        self._dead = False
        self._error: TransferError | None = None

    @property
    def is_write(self) -> bool:
        return self._direction == "write"

    @property
    def was_given_up(self) -> bool:
        """Whether it has failed for its owner while its bytes may still land."""
        return self._error is not None and not self._dead

    @property
    def is_over(self) -> bool:
        """Whether no copy is left to make, whoever knows."""
        return self._dead or self.done >= len(self._copies)

    @property
    def ended(self) -> bool:
        return self._owner.is_closed or (self.is_over and not self.was_given_up)

    def give_up(self, error: TransferError) -> None:
        """Fail; its copies go on."""
        if not self.is_over:
            self._error = self._error or error

    def die(self, error: TransferError) -> None:
        """Fail and never copy again."""
        self._dead = True
        self._error = self._error or error

    def copy(self, there: LocalTransport) -> int:
        """Make the next copy; the bytes it moved."""
        source = int(self._copies.source[self.done])
        destination = int(self._copies.destination[self.done])
        nbytes = int(self._copies.nbytes[self.done])
        reads = self._direction == "read"
        local, remote = (destination, source) if reads else (source, destination)
        if not self._owner.holds(local, nbytes) or not there.holds(remote, nbytes):
            self.die(
                TransferError(
                    f"peer {self.peer!r}: {nbytes} bytes at {local:#x} here and {remote:#x} there "
                    f"are not registered",
                    kind="transport",
                    peer=self.peer,
                )
            )
            return 0
        ctypes.memmove(destination, source, nbytes)
        if self._owner.after_copy is not None:
            self._owner.after_copy(destination, nbytes)
        self.done += 1
        return nbytes

    def start(self) -> None:
        if self._error is not None:
            raise self._error
        self._owner.check_connected(self.peer)
        self.done = 0
        self._owner.begin(self)

    def poll(self) -> bool:
        if not self.is_over and self._error is None:
            self._owner.progress()
        if self._error is not None:
            raise self._error
        return self.is_over

    def release(self) -> None:
        """Nothing to free: a post that has not ended goes on, as in a real engine."""
