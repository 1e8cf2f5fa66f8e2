"""The reference transport: peers in one process, bytes copied by the one who asks.

It does what `Transport` says and nothing cleverer, a bounded number of bytes per
`progress`, so that a test can stop the world between any two copies. Faults are real:
a peer that is killed is gone, a cable that is cut moves nothing until it is healed.
"""

import ctypes
import secrets
from collections.abc import Callable

import msgspec

from kvstow.errors import TransferError
from kvstow.transfer.transport.base import Direction, Kinds, Post, Region, Spans, inside, lost

STEP_BYTES = 64 << 20
MAX_METADATA = 1 << 20


class Fabric:
    """Where local transports find each other, and where their cables are cut."""

    def __init__(self) -> None:
        self.members: dict[str, LocalTransport] = {}
        self._cut: set[frozenset[str]] = set()

    def kill(self, name: str) -> None:
        """The transport of that name is gone, as if its process had died."""
        self.members.pop(name, None)

    def cut(self, one: str, other: str) -> None:
        """Nothing moves between the two, and nobody is told."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
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
    test does there happens in the middle of a transfer.
    """

    def __init__(
        self,
        fabric: Fabric,
        *,
        step_bytes: int = STEP_BYTES,
        before_copy: Callable[[int], None] | None = None,
    ) -> None:
        self._fabric = fabric
        self._name = f"local-{secrets.token_hex(8)}"
        self._step_bytes = step_bytes
        self._before_copy = before_copy
        self._regions: list[Region] = []
        self._peers: set[str] = set()
        self._posts: list[_LocalPost] = []
        fabric.members[self._name] = self

    @property
    def name(self) -> str:
        return self._name

    @property
    def regions(self) -> list[Region]:
        return self._regions

    def register(self, region: Region) -> None:
        if region.kind != "DRAM":
            raise TransferError(f"local: {region.kind} is not host memory", kind="transport")
        self._regions.append(region)

    def metadata(self) -> bytes:
        regions = tuple((r.address, r.nbytes) for r in self._regions)
        return msgspec.msgpack.encode(_Metadata(self._name, regions))

    def connect(self, metadata: bytes) -> str:
        try:
            peer = msgspec.msgpack.decode(metadata[:MAX_METADATA], type=_Metadata).name
        except msgspec.DecodeError as error:
            raise TransferError(f"local: metadata are not whole: {error}", kind="refused") from None
        if peer not in self._fabric.members:
            raise lost(peer, "no such member of the fabric")
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)
        for post in self._posts:
            if post.peer == peer:
                post.fail(lost(peer, "disconnected here"))

    def prepare(self, direction: Direction, peer: str, kinds: Kinds, spans: Spans) -> Post:
        if peer not in self._peers:
            raise lost(peer, "not connected")
        return _LocalPost(self, direction, peer, spans)

    def begin(self, post: "_LocalPost") -> None:
        """Let a post copy from now on."""
        if post.peer not in self._peers:
            raise lost(post.peer, "not connected")
        self._posts.append(post)

    def progress(self) -> None:
        for post in self._posts:
            self._advance(post)
        self._posts = [post for post in self._posts if not post.ended]

    @property
    def another(self) -> None:
        return None

    def close(self) -> None:
        self._fabric.kill(self._name)
        self._posts.clear()
        self._peers.clear()

    def _advance(self, post: "_LocalPost") -> None:
        budget = self._step_bytes
        while not post.ended and budget > 0:
            there = self._fabric.members.get(post.peer)
            if there is None:
                post.fail(lost(post.peer, "it left the fabric"))
            elif self._fabric.is_cut(self._name, post.peer):
                return
            else:
                if self._before_copy is not None:
                    self._before_copy(post.done)
                budget -= post.copy(self._regions, there.regions)


class _LocalPost:
    """Copies of one post, one after the other."""

    def __init__(self, owner: LocalTransport, direction: Direction, peer: str, spans: Spans):
        self.peer = peer
        self.done = 0
        self._owner = owner
        self._direction: Direction = direction
        self._spans = spans
        self._error: TransferError | None = None

    @property
    def ended(self) -> bool:
        return self._error is not None or self.done == len(self._spans)

    def fail(self, error: TransferError) -> None:
        if not self.ended:
            self._error = error

    def copy(self, here: list[Region], there: list[Region]) -> int:
        """Make the next copy; the bytes it moved."""
        local, remote = int(self._spans.local[self.done]), int(self._spans.remote[self.done])
        nbytes = int(self._spans.nbytes[self.done])
        if not inside(here, local, nbytes) or not inside(there, remote, nbytes):
            self.fail(TransferError(
                f"peer {self.peer!r}: {nbytes} bytes at {local:#x} here and {remote:#x} there are "
                f"not registered", kind="transport", peer=self.peer))  # fmt: skip
            return 0
        target, source = (local, remote) if self._direction == "read" else (remote, local)
        ctypes.memmove(target, source, nbytes)
        self.done += 1
        return nbytes

    def start(self) -> None:
        self.done = 0
        self._owner.begin(self)

    def poll(self) -> bool:
        if not self.ended:
            self._owner.progress()
        if self._error is not None:
            raise self._error
        return self.ended

    def release(self) -> None:
        """Nothing to free: a post that has not ended goes on, as in a real engine."""
