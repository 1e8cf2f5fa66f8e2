"""Copies on their way: pieces started a few at a time, so that a stop is never far."""

from collections import deque
from collections.abc import Sequence

from kvstow.errors import TransferError
from kvstow.transfer.home import Home
from kvstow.transfer.transport.base import Direction, Kinds, Post, Spans, chunks
from kvstow.transfer.transport.parallel import Job, Track

IN_FLIGHT = 3
LEAST_CHUNK = 16 << 20
USUAL_CHUNK = 256 << 20
MOST_CHUNK = 1 << 30
CHUNK_SECONDS = 0.08
"""A post may block its caller while it copies: it shall not be longer than about this."""

CHUNKS_EACH = 1
"""Chunks at least for every engine that works on a transfer; of a longer one, the faster engine
takes more."""

TRACK_SECONDS = 5e-3
"""So long at a time we wait for the last chunk of a track."""

STALLED_SECONDS = 8 * CHUNK_SECONDS
"""After so long without one that ended, posts are looked at only now and then."""


def chunk_bytes(bytes_per_second: float, kinds: Kinds, tracks: int = 1, nbytes: int = 0) -> int:
    """How much of `nbytes` to post at once over a path of this rate; 0 where it is not known."""
    if bytes_per_second == 0:
        most = MOST_CHUNK if "VRAM" in kinds else USUAL_CHUNK
    else:
        most = int(min(MOST_CHUNK, max(LEAST_CHUNK, bytes_per_second * CHUNK_SECONDS)))
    if tracks == 1:
        return most
    return min(most, max(LEAST_CHUNK, -(-nbytes // (CHUNKS_EACH * tracks))))


class Mover:
    """Posts copies to one peer and watches them. `advance` does all the work but for what
    the tracks beside take of it; `copies_inside` says that every post was over when the call
    that started it was: a processor of ours has copied it.

    After an error or `stop`, nothing new is started; `quiet` says when nothing that was
    started can move a byte any more.
    """

    def __init__(
        self,
        home: Home,
        direction: Direction,
        peer: str,
        kinds: Kinds,
        spans: Spans,
        size: int,
        beside: Sequence[Track] = (),
    ) -> None:
        self.direction: Direction = direction
        self.nbytes = spans.total
        self.descriptors = len(spans)
        self._home = home
        self._peer = peer
        self._kinds = kinds
        self._waiting = deque(chunks(spans, size))
        self._beside = beside if len(self._waiting) > 1 else ()
        self._jobs: list[Job] = []
        self._ready: deque[Post] = deque()
        self._posted: list[Post] = []
        self._moved_at = home.clock()
        self.copies_inside = True
        self.error: TransferError | None = None

    @property
    def quiet(self) -> bool:
        return not self._posted and all(job.over for job in self._jobs)

    @property
    def done(self) -> bool:
        return self.error is None and not (self._ready or self._waiting) and self.quiet

    def stop(self) -> None:
        """Start nothing more."""
        self._waiting.clear()
        for job in self._jobs:
            job.withdraw()
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
            self._follow()
        except TransferError as error:
            self.error = self.error or error
            self.sever()
        return self.done

    def prepare(self) -> None:
        """Make all posts before the first starts: afterwards caches are full of their bytes.
        Only our share where tracks take the others. Raises TransferError."""
        prepare = self._home.transport.prepare
        while self._waiting and not (self._beside and len(self._ready) >= CHUNKS_EACH):
            try:
                spans = self._waiting.popleft()
            except IndexError:  # a track was faster
                return
            self._ready.append(prepare(self.direction, self._peer, self._kinds, spans))

    def _start(self) -> None:
        """Start posts until enough are under way. Those that have copied within the call must
        not take longer than a chunk may: then others of this thread have their turn."""
        if self._beside and not self._jobs:
            self._jobs = [track.copy(self.direction, self._peer, self._kinds, self._waiting)
                          for track in self._beside]  # fmt: skip
        until = self._home.clock() + CHUNK_SECONDS / 2
        while self._ready and len(self._posted) < IN_FLIGHT:
            post = self._ready.popleft()
            self._posted.append(post)
            post.start()
            if not post.poll():
                self.copies_inside = False
            elif self._home.clock() > until:
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

    def _follow(self) -> None:
        """See what the tracks do; where nothing is left for us, wait for them a little."""
        for job in self._jobs:
            if not self._waiting:
                job.withdraw()
                if not self._posted and not self._ready:
                    self._home.has_watched = True
                    job.wait(TRACK_SECONDS)
            if job.error is not None:
                raise job.error

    def sever(self) -> None:
        """Disconnect the peer: quiet from now on."""
        self._waiting.clear()
        self._ready.clear()
        self._home.sever(self._peer)
        self._posted.clear()
        self._jobs.clear()
