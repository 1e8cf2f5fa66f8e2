"""A post of ours, from its start until its memory is quiet: nothing writes to it any more.

It is quiet when the post has ended or when its engine was closed; a failed or abandoned post may
write much later. Copies are started a few posts at a time, so that a stop is never far.
"""

from collections import deque
from collections.abc import Callable
from logging import getLogger
from typing import TYPE_CHECKING

from kvstow.errors import TransferError
from kvstow.route.copies import Copies, chunks
from kvstow.transfer.loop import AT_ONCE, NOW_AND_THEN, SOON, Routine
from kvstow.transfer.transport.base import Direction, Kinds, Post

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint

log = getLogger(__name__)

IN_FLIGHT = 3
LEAST_CHUNK = 16 << 20
USUAL_CHUNK = 256 << 20
MOST_CHUNK = 1 << 30
CHUNK_SECONDS = 0.08
"""A post may block its caller while it copies: it shall not be longer than about this."""

STALLED_SECONDS = 8 * CHUNK_SECONDS
"""After so long without one that ended, posts are looked at only now and then."""


class Flight:
    """A post of ours, from its start until its memory is quiet."""

    def __init__(self, endpoint: "Endpoint", peer: str, post: Post) -> None:
        self.peer = peer
        self.is_quiet = False
        self._endpoint = endpoint
        self._post: Post | None = post
        self.failed_at: float | None = None
        self._then: list[Callable[[], None]] = []
        self._error: TransferError | None = None

    def start(self) -> None:
        """Begin to copy. Raises TransferError."""
        assert self._post is not None
        self._endpoint.flights[self] = None
        try:
            self._post.start()
        except TransferError as error:
            self._fail(error)
            raise

    def poll(self) -> bool:
        """Whether all bytes have arrived. Raises TransferError if they never will."""
        arrived = self._post is None
        if self._post is not None:
            if self._error is None:
                arrived = self._look(self._post)
            if self._post.ended:
                self.land()
        if self._error is not None:
            raise self._error
        return arrived

    def _look(self, post: Post) -> bool:
        try:
            return post.poll()
        except TransferError as error:
            self._fail(error)
            return False

    def _fail(self, error: TransferError) -> None:
        self.give_up(error)
        self._endpoint.broken.add(self.peer)
        if error.kind == "peer":
            self._endpoint.note_gone(self.peer)

    def give_up(self, error: TransferError) -> None:
        """Fail, which by itself says nothing about the peer; what is under way may still land."""
        if self._error is None:
            self._error, self.failed_at = error, self._endpoint.clock()

    def after(self, call: Callable[[], None]) -> None:
        """Call this when the memory is quiet, which it is not yet."""
        self._then.append(call)

    def drop(self) -> None:
        """Forget a post that was never started."""
        if self not in self._endpoint.flights:
            self.land()

    def land(self) -> None:
        """Nothing of this post writes any more: it has ended, or its engine is gone."""
        post, self._post = self._post, None
        if post is None:
            return
        self.is_quiet = True
        self._endpoint.flights.pop(self, None)
        try:
            post.release()
        except TransferError as error:
            log.warning("agent %s: %s", self._endpoint.name, error)
        for call in self._then:
            call()


# ── many of them ──────────────────────────────────────────────────────────────────────


def when_quiet(flights: list[Flight], then: Callable[[], None]) -> None:
    """Call `then` once, when the last of the flights is quiet."""
    left = [flight for flight in flights if not flight.is_quiet]
    if left:
        left[0].after(lambda: when_quiet(left, then))
    else:
        then()


def chunk_bytes(bytes_per_second: float, kinds: Kinds) -> int:
    """How much to post at once over a path of this rate; 0 where it is not known."""
    if bytes_per_second == 0:
        return MOST_CHUNK if "VRAM" in kinds else USUAL_CHUNK
    return int(min(MOST_CHUNK, max(LEAST_CHUNK, bytes_per_second * CHUNK_SECONDS)))


def move_copies(
    endpoint: "Endpoint",
    direction: Direction,
    peer: str,
    kinds: Kinds,
    copies: Copies,
    *,
    flights: list[Flight],
    chunk: int = MOST_CHUNK,
) -> Routine[None]:
    """Copy between addresses; return when all bytes have arrived. Raises TransferError.

    Every post is put into `flights` before it starts: whoever gives up knows what is under way.
    """
    clock = endpoint.clock
    pause = SOON if "VRAM" in kinds else AT_ONCE  # a device copies on its own
    # all posts before the first starts: afterwards caches are full of the bytes they move
    ready: deque[Flight] = deque()
    running: list[Flight] = []
    try:
        for part in chunks(copies, chunk):
            ready.append(endpoint.post(direction, peer, kinds, part))
        moved_at = clock()
        while ready or running:
            until = clock() + CHUNK_SECONDS / 2  # some posts copy within `start`
            while ready and len(running) < IN_FLIGHT and clock() < until:
                flight = ready.popleft()
                flights.append(flight)
                running.append(flight)
                flight.start()
            left = [flight for flight in running if not flight.poll()]
            if len(left) < len(running):
                running, moved_at = left, clock()
            if ready or running:
                yield pause if clock() - moved_at < STALLED_SECONDS else NOW_AND_THEN
    finally:
        for flight in ready:
            flight.drop()
