"""Tracks: engines beside the agent's own, each in a thread of its own.

Between processes of one host an engine copies inside the call that starts a post, so bytes
move as fast as one processor copies. A track takes chunks of the same transfer from the
other end; of many chunks, the faster of the two takes more:

    chunks   0 1 2 3 4 5 6 7
    agent    ▶ ▶ ▶ ▶ ▶
    track              ◀ ◀ ◀

A track is connected to the same engine of the peer as the agent itself, and disconnected
with it: nobody else needs to know of it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from kvstow.errors import TransferError
from kvstow.transfer.latch import Latch
from kvstow.transfer.transport.base import Direction, Kinds, Post, Region, Spans, Transport, lost

TRACKS = 2
"""Engines that work on one transfer at most, the agent's own included."""

TRACK_NAME = "kvstow-track"
PAUSE_SECONDS = 20e-6


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


class Connection:
    """A track's connection to a peer, from one `connect` to the next `disconnect`."""

    def __init__(self) -> None:
        self.is_open = True


class Job:
    """Chunks that a track copies: all that it finds, from the last one on, while the connection
    is open that it was made for. The peer may be connected again: that is another one.

    `over` says that nothing of it moves a byte any more; `error` then holds the first one.
    """

    def __init__(
        self,
        direction: Direction,
        peer: str,
        kinds: Kinds,
        waiting: deque[Spans],
        connection: Connection,
    ) -> None:
        self.error: TransferError | None = None
        self._connection = connection
        self._over = Latch()
        self._direction: Direction = direction
        self._peer = peer
        self._kinds = kinds
        self._waiting = waiting
        self._has_begun = threading.Lock()

    @property
    def over(self) -> bool:
        return self._over.is_set

    def wait(self, seconds: float) -> None:
        """Until it is over, but no longer than this."""
        self._over.wait(seconds)

    def withdraw(self) -> None:
        """Over, unless it has begun."""
        if self._has_begun.acquire(blocking=False):
            self._over.set()

    def run(self, transport: Transport, using: threading.Lock) -> None:
        """Copy chunk after chunk, holding `using` in every call of the engine."""
        if not self._has_begun.acquire(blocking=False):
            return
        try:
            while self._waiting:
                self._copy(transport, using)
        except TransferError as error:
            self.error = error
        except Exception as error:  # nobody else would ever hear of it
            self.error = TransferError(f"track: {error!r}", kind="transport", peer=self._peer)
        finally:
            self._over.set()

    def _copy(self, transport: Transport, using: threading.Lock) -> None:
        try:
            spans = self._waiting.pop()
        except IndexError:  # the agent was faster
            return
        with using:
            self._check()
            post = transport.prepare(self._direction, self._peer, self._kinds, spans)
        with using:
            self._check()
            post.start()
        while not self._polled(post, using):
            time.sleep(PAUSE_SECONDS)

    def _check(self) -> None:
        if not self._connection.is_open:
            raise lost(self._peer, "disconnected")

    def _polled(self, post: Post, using: threading.Lock) -> bool:
        with using:
            if not post.poll():
                return False
            post.release()
        return True


class Track:
    """An engine and its thread, which also makes it. All calls but `copy` may wait: for the
    engine to be made, or for a copy that is under way."""

    def __init__(self, make: Callable[[], Transport], regions: Sequence[Region]) -> None:
        self._made: Future[Transport] = Future()
        self._make = make
        self._regions = regions
        self._peers: dict[str, Connection] = {}
        self._using = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=TRACK_NAME, daemon=True)
        self._thread.start()

    def connect(self, peer: str, metadata: bytes) -> None:
        """Be connected to a peer. Raises TransferError."""
        if peer not in self._peers:
            transport = self._made.result()
            with self._using:
                transport.connect(metadata)
            self._peers[peer] = Connection()

    def disconnect(self, peer: str) -> None:
        """Forget a peer: nothing here reads from it or writes to it any more."""
        connection = self._peers.pop(peer, None)
        if connection is not None:
            with self._using:
                connection.is_open = False
                self._made.result().disconnect(peer)

    def copy(self, direction: Direction, peer: str, kinds: Kinds, waiting: deque[Spans]) -> Job:
        """Begin to take chunks off the right end of `waiting`, when earlier jobs are over.
        Raises TransferError if the peer is not connected."""
        if peer not in self._peers:
            raise lost(peer, "not connected")
        job = Job(direction, peer, kinds, waiting, self._peers[peer])
        self._jobs.put(job)
        return job

    def _run(self) -> None:
        try:
            transport = self._make()
            for region in self._regions:
                transport.register(region)
        except Exception as error:
            self._made.set_exception(error)
            return
        self._made.set_result(transport)
        while (job := self._jobs.get()) is not None:
            job.run(transport, self._using)
        transport.close()

    def close(self) -> None:
        """Let go of everything; jobs that go on must have been disconnected."""
        self._jobs.put(None)
        self._thread.join()
