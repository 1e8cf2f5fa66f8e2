"""Copies on their way: pieces started a few at a time, so that a stop is never far."""

from collections import deque

from kvstow.errors import TransferError
from kvstow.route.copies import Copies, chunks
from kvstow.transfer.home import Home
from kvstow.transfer.transport.base import Direction, Kinds, Post

IN_FLIGHT = 3
LEAST_CHUNK = 16 << 20
USUAL_CHUNK = 256 << 20
MOST_CHUNK = 1 << 30
CHUNK_SECONDS = 0.08
"""A post may block its caller while it copies: it shall not be longer than about this."""

STALLED_SECONDS = 8 * CHUNK_SECONDS
"""After so long without one that ended, posts are looked at only now and then."""


def chunk_bytes(bytes_per_second: float, kinds: Kinds) -> int:
    """How much to post at once over a path of this rate; 0 where it is not known."""
    if bytes_per_second == 0:
        return MOST_CHUNK if "VRAM" in kinds else USUAL_CHUNK
    return int(min(MOST_CHUNK, max(LEAST_CHUNK, bytes_per_second * CHUNK_SECONDS)))


class Mover:
    """Posts copies to one peer and watches them. `advance` does all the work.

    After an error or `stop`, nothing new is started; `quiet` says when nothing that was
    started can move a byte any more.
    """

    def __init__(
        self,
        home: Home,
        direction: Direction,
        peer: str,
        kinds: Kinds,
        copies: Copies,
        size: int,
    ) -> None:
        self.direction: Direction = direction
        self.nbytes = copies.total
        self.descriptors = len(copies)
        self._home = home
        self._peer = peer
        self._kinds = kinds
        self._waiting = deque(chunks(copies, size))
        self._ready: deque[Post] = deque()
        self._posted: list[Post] = []
        self._moved_at = home.clock()
        self.error: TransferError | None = None

    @property
    def quiet(self) -> bool:
        return not self._posted

    @property
    def done(self) -> bool:
        return self.error is None and not (self._ready or self._waiting) and self.quiet

    def stop(self) -> None:
        """Start nothing more."""
        self._waiting.clear()
        while self._ready:
            self._ready.popleft().release()

    def advance(self) -> bool:
        """Post and poll; whether everything has arrived. Keeps the first error in `error`.

        An error disconnects the peer, because pieces of the failed post and its siblings
        may still be under way: only then are they certainly over.
        """
        try:
            self.prepare()
            self._start()
            self._poll()
            if self._posted:
                self._watch()
        except TransferError as error:
            self.error = self.error or error
            self.sever()
        return self.done

    def prepare(self) -> None:
        """Make all posts before the first starts: afterwards caches are full of their bytes.
        Raises TransferError."""
        prepare = self._home.transport.prepare
        while self._waiting:
            copies = self._waiting.popleft()
            self._ready.append(prepare(self.direction, self._peer, self._kinds, copies))

    def _start(self) -> None:
        """Start posts until enough are under way. Those that have copied within the call must
        not take longer than a chunk may: then others of this thread have their turn."""
        until = self._home.clock() + CHUNK_SECONDS / 2
        while self._ready and len(self._posted) < IN_FLIGHT:
            post = self._ready.popleft()
            self._posted.append(post)
            post.start()
            if post.poll() and self._home.clock() > until:
                return

    def _poll(self) -> None:
        for post in tuple(self._posted):
            if post.poll():
                post.release()
                self._posted.remove(post)
                self._moved_at = self._home.clock()

    def _watch(self) -> None:
        """Stay with the oldest post for a while, unless nothing moves any more."""
        if self._home.clock() - self._moved_at <= STALLED_SECONDS:
            self._home.watch(self._posted[0].poll)  # asking for one moves all
            self._poll()

    def sever(self) -> None:
        """Disconnect the peer: quiet from now on."""
        self._waiting.clear()
        self._ready.clear()
        self._home.sever(self._peer)
        self._posted.clear()
