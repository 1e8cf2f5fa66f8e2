"""Copies on their way: pieces started a few at a time, so that a stop is never far."""

from collections import deque

from kvstow.errors import TransferError
from kvstow.transfer.home import Home
from kvstow.transfer.transport import Direction, Kinds, Post, Spans, chunks

IN_FLIGHT = 3
LEAST_CHUNK = 16 << 20
USUAL_CHUNK = 256 << 20
MOST_CHUNK = 1 << 30
CHUNK_SECONDS = 0.08
"""A post may block its caller while it copies: it shall not be longer than about this."""


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
        self, home: Home, direction: Direction, peer: str, kinds: Kinds, spans: Spans, size: int
    ) -> None:
        self.direction: Direction = direction
        self.nbytes = spans.total
        self.descriptors = len(spans)
        self._home = home
        self._peer = peer
        self._kinds = kinds
        self._waiting = deque(chunks(spans, size))
        self._ready: deque[Post] = deque()
        self._posted: list[Post] = []
        self.error: TransferError | None = None

    @property
    def quiet(self) -> bool:
        return not self._posted

    @property
    def done(self) -> bool:
        return not (self._posted or self._ready or self._waiting) and self.error is None

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
            for post in tuple(self._posted):
                if post.poll():
                    post.release()
                    self._posted.remove(post)
        except TransferError as error:
            self.error = self.error or error
            self.sever()
        return self.done

    def prepare(self) -> None:
        """Make all posts before the first starts: afterwards caches are full of their bytes.
        Raises TransferError."""
        prepare = self._home.transport.prepare
        while self._waiting:
            post = prepare(self.direction, self._peer, self._kinds, self._waiting[0])
            self._waiting.popleft()
            self._ready.append(post)

    def _start(self) -> None:
        """Start posts until enough are under way, or one has copied within the call: then
        others of this thread have their turn."""
        while self._ready and len(self._posted) < IN_FLIGHT:
            post = self._ready.popleft()
            self._posted.append(post)
            post.start()
            if post.poll():
                return

    def sever(self) -> None:
        """Disconnect the peer: quiet from now on."""
        self._waiting.clear()
        self._ready.clear()
        self._home.sever(self._peer)
        self._posted.clear()
