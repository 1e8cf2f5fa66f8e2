"""One transport made of several engines, each in a thread of its own.

Between processes of one host an engine copies inside the call that starts a post, so bytes
move as fast as one processor copies. A second engine takes half of a long read:

    chunks     0    1
    caller     ▶▶▶▶
    helper          ▶▶▶▶

Peers know the first engine only. A helper is connected to the same engine of the peer and
needs nothing from it. It is used for reads between host memories, with peers of which one of
the first reads was over when the call that started it returned. The first long read makes the
helper, the next one connects it, later ones use it. It connects while a read is under way and at
no other time: UCX 1.23 ends the process if the peer's engine is closed just then.

A read is done when every chunk was confirmed by the engine that copied it, and has ended when
every chunk has that was taken.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from kvstow.errors import TransferError
from kvstow.route.copies import Copies, chunks
from kvstow.transfer.transport.base import (
    Direction,
    Kinds,
    Post,
    Region,
    Transport,
    disconnected,
)

ENGINES = 2
"""Engines that work on one read at most."""

LEAST_CHUNK = 16 << 20
"""Shorter ones are not worth the second thread."""

TELLING_BYTES = 1 << 20
"""A read of at least so many bytes tells whether the caller's processor copies."""

TELLING_READS = 4
"""So many are looked at: the first one also connects, and is never over at once."""

PAUSE_SECONDS = 20e-6
WAIT_SECONDS = 1e-3
"""So long a poll waits for the last chunk of a helper: looking again would only hold it up."""

THREAD_NAME = "kvstow-engine"
_SCRATCH_BYTES = 4096


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def parallel(transport: Transport, engines: int | None = None) -> Transport:
    """The transport with helpers, or itself where they would be of no use."""
    most = min(ENGINES, processors()) if engines is None else engines
    if most < 2 or not transport.several_are_faster:
        return transport
    return ParallelTransport(transport, most)


class ParallelTransport:
    """`first`, and up to `engines - 1` helpers that are made when they are first of use."""

    def __init__(self, first: Transport, engines: int = ENGINES) -> None:
        self._first = first
        self.engines = engines
        self._regions: list[Region] = []
        self._peers: dict[str, bytes] = {}
        self._looks_left: dict[str, int] = {}
        self._copies_inside: set[str] = set()
        self._helpers: list[_Helper] = []
        self._posts: set[_ParallelPost] = set()
        self.is_closed = False

    @property
    def name(self) -> str:
        return self._first.name

    @property
    def several_are_faster(self) -> bool:
        return False

    def register(self, region: Region) -> None:
        self._first.register(region)
        self._regions.append(region)
        for helper in self._helpers:
            helper.register(region)

    def metadata(self) -> bytes:
        return self._first.metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        self._first.connect(peer, metadata)
        self._peers[peer] = metadata
        self._looks_left[peer] = TELLING_READS

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._looks_left.pop(peer, None)
        self._copies_inside.discard(peer)
        for post in tuple(self._posts):
            if post.peer == peer:
                post.give_up(disconnected(peer))
        for helper in self._helpers:
            helper.disconnect(peer)
        self._first.disconnect(peer)

    def num_engines(self, peer: str) -> int:
        """How many would work on a long read from this peer now."""
        return 1 + sum(peer in helper.ready for helper in self._helpers)

    def prepare(self, direction: Direction, peer: str, kinds: Kinds, copies: Copies) -> Post:
        if direction == "write" or "VRAM" in kinds:
            return self._first.prepare(direction, peer, kinds, copies)
        if self._looks_left.get(peer) and copies.total >= TELLING_BYTES:
            return _TellingPost(self, peer, kinds, copies)
        if peer in self._copies_inside and copies.total >= LEAST_CHUNK:
            self._get_ready(peer, int(copies.source[0]))
        parts = chunks(copies, max(LEAST_CHUNK, -(-copies.total // self.engines)))
        helpers = [h for h in self._helpers if peer in h.ready][: self.engines - 1]
        if not helpers or len(parts) < 2:
            return self._first.prepare(direction, peer, kinds, copies)
        post = _ParallelPost(self, self._first, helpers, peer, kinds, parts)
        self._posts.add(post)
        return post

    def prepare_alone(self, peer: str, kinds: Kinds, copies: Copies) -> Post:
        """A read by the first engine."""
        return self._first.prepare("read", peer, kinds, copies)

    def forget(self, post: "_ParallelPost") -> None:
        """A post was released."""
        self._posts.discard(post)

    def tell(self, peer: str, *, copies_inside: bool) -> None:
        """Whether a read from a peer was over at once."""
        if not self._looks_left.get(peer):
            return
        self._looks_left[peer] -= 1
        if copies_inside:
            self._looks_left[peer] = 0
            self._copies_inside.add(peer)

    def _get_ready(self, peer: str, address: int) -> None:
        """Make helpers; those that are made read a little from that address of the peer, which
        connects them."""
        while len(self._helpers) < self.engines - 1:
            self._helpers.append(_Helper(self._first.fresh, self._regions))
        for helper in self._helpers:
            if helper.is_made and not helper.has_met(peer):
                helper.connect(peer, self._peers[peer], address)

    def progress(self) -> None:
        self._first.progress()

    def fresh(self) -> "ParallelTransport":
        return ParallelTransport(self._first.fresh(), self.engines)

    def close(self) -> None:
        self._first.close()
        for helper in self._helpers:
            helper.close()
        self.is_closed = True
        self._posts.clear()


class _TellingPost:
    """A read by the first engine that tells whether the caller's processor copied."""

    def __init__(self, owner: ParallelTransport, peer: str, kinds: Kinds, copies: Copies) -> None:
        self._owner = owner
        self._peer = peer
        self._inner = owner.prepare_alone(peer, kinds, copies)

    def start(self) -> None:
        self._inner.start()
        self._owner.tell(self._peer, copies_inside=self._inner.poll())

    def poll(self) -> bool:
        return self._inner.poll()

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def release(self) -> None:
        self._inner.release()


class _ParallelPost:
    """A read whose chunks are taken by whoever is free: by the caller in `start` and `poll`
    from the left, by helpers from the right."""

    def __init__(
        self,
        owner: ParallelTransport,
        first: Transport,
        helpers: "list[_Helper]",
        peer: str,
        kinds: Kinds,
        parts: list[Copies],
    ) -> None:
        self.peer = peer
        self._owner = owner
        self._first = first
        self._helpers = helpers
        self._kinds = kinds
        self._parts = parts
        self._lock = threading.Lock()
        self._waiting: deque[Copies] = deque()
        self._confirmed = len(parts)
        self._under_way = 0
        self._error: TransferError | None = None
        self._over = threading.Event()
        self._mine: Post | None = None

    # ── for the caller's thread ───────────────────────────────────────────────────

    def start(self) -> None:
        if self._error is not None:
            raise self._error
        self._confirmed = 0
        self._over.clear()
        self._waiting.extend(self._parts)
        for helper in self._helpers:
            helper.copy(self)
        self._copy_mine()

    def poll(self) -> bool:
        self._copy_mine()
        if self._mine is None and not self._waiting:
            self._over.wait(WAIT_SECONDS)
        if self._error is not None:
            raise self._error
        return self._confirmed == len(self._parts)

    @property
    def ended(self) -> bool:
        return self._owner.is_closed or not (self._waiting or self._under_way)

    def release(self) -> None:
        self._owner.forget(self)
        self._waiting.clear()
        if self._mine is not None:
            self._mine.release()

    def give_up(self, error: TransferError) -> None:
        """Fail; nothing more is taken, and what was goes on."""
        with self._lock:
            self._error = self._error or error
            self._waiting.clear()
            self._over.set()

    def _copy_mine(self) -> None:
        try:
            if self._mine is not None and self._mine.poll():
                self._end_mine(self._mine)
            if self._mine is None and (part := self.take(from_left=True)) is not None:
                self._mine = self._first.prepare("read", self.peer, self._kinds, part)
                self._mine.start()
                if self._mine.poll():
                    self._end_mine(self._mine)
        except TransferError as error:
            self.give_up(error)
            if self._mine is None or self._mine.ended:
                self.put_down()
                self._mine = None

    def _end_mine(self, post: Post) -> None:
        self._mine = None
        post.release()
        self.confirm()

    # ── for any thread ────────────────────────────────────────────────────────────

    def take(self, *, from_left: bool = False) -> Copies | None:
        """A chunk that nobody else has, under way from now on."""
        with self._lock:
            if not self._waiting or self._error is not None:
                return None
            self._under_way += 1
            return self._waiting.popleft() if from_left else self._waiting.pop()

    def confirm(self) -> None:
        """A chunk that was taken has arrived."""
        with self._lock:
            self._under_way -= 1
            self._confirmed += 1
            if self._confirmed == len(self._parts):
                self._over.set()

    def put_down(self) -> None:
        """A chunk that was taken is not copied any more, and has not arrived."""
        with self._lock:
            self._under_way -= 1

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def copy_rest(self, engine: Transport, stop: Callable[[], bool]) -> None:
        """Take chunks until none is left, and copy each with this engine."""
        while (part := self.take()) is not None:
            post: Post | None = None
            try:
                post = engine.prepare("read", self.peer, self._kinds, part)
                post.start()
                while not post.poll():
                    if stop() or self.has_failed:
                        raise disconnected(self.peer)
                    time.sleep(PAUSE_SECONDS)
                post.release()
                self.confirm()
            except Exception as error:
                if post is None or post.ended:
                    self.put_down()
                if not isinstance(error, TransferError):
                    error = TransferError(f"helper: {error!r}", kind="transport", peer=self.peer)
                self.give_up(error)


Command = Callable[[Transport], None]


class _Helper:
    """An engine and the thread that makes it, uses it and closes it."""

    def __init__(self, make: Callable[[], Transport], regions: list[Region]) -> None:
        self.ready: set[str] = set()
        self.is_made = False
        self._scratch = np.zeros(_SCRATCH_BYTES, np.uint8)
        self._make = make
        self._regions = [*regions, Region(self._scratch.ctypes.data, _SCRATCH_BYTES)]
        self._wanted: dict[str, bytes] = {}
        self._lock = threading.Lock()
        """Keeps `ready` and `_wanted` together."""
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def register(self, region: Region) -> None:
        self._commands.put(lambda engine: engine.register(region))

    def has_met(self, peer: str) -> bool:
        """Whether it was told to connect to this peer."""
        return peer in self._wanted

    def connect(self, peer: str, metadata: bytes, address: int) -> None:
        """Connect, and read a little from that address; then the peer is in `ready`."""
        self._wanted[peer] = metadata
        self._commands.put(lambda engine: self._meet(engine, peer, metadata, address))

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self.ready.discard(peer)
            was_wanted = self._wanted.pop(peer, None) is not None
        if was_wanted:
            self._commands.put(lambda engine: engine.disconnect(peer))

    def copy(self, post: _ParallelPost) -> None:
        """Take chunks of a post, when earlier commands are done."""
        self._commands.put(lambda engine: post.copy_rest(engine, self._closing.is_set))

    def close(self) -> None:
        """End the thread; its engine is closed when this returns."""
        self._closing.set()
        self._commands.put(None)
        self._thread.join()

    def _meet(self, engine: Transport, peer: str, metadata: bytes, address: int) -> None:
        if self._wanted.get(peer) is not metadata:
            return
        engine.connect(peer, metadata)
        one = Copies.one(address, self._scratch.ctypes.data, _SCRATCH_BYTES)
        post = engine.prepare("read", peer, Kinds(), one)
        post.start()
        while not post.poll():
            if self._closing.is_set() or peer not in self._wanted:
                return
            time.sleep(PAUSE_SECONDS)
        post.release()
        with self._lock:
            if self._wanted.get(peer) is metadata:
                self.ready.add(peer)

    def _run(self) -> None:
        try:
            engine = self._make()
        except Exception:  # reads go on without it
            return
        try:
            self._serve(engine)
        finally:
            engine.close()

    def _serve(self, engine: Transport) -> None:
        for region in self._regions:
            engine.register(region)
        self.is_made = True
        while (command := self._commands.get()) is not None:
            try:
                command(engine)
            except TransferError:
                continue  # the peer is not ready: others read
