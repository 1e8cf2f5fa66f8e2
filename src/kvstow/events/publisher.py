"""A publisher of events: a PUB socket, and a ROUTER socket that repeats what was missed.

    subscriber ── [empty, first sequence, 8 bytes] ──▶ replay
               ◀── [empty, topic, sequence, batch] … [empty, empty, −1, empty] ──

Events name the tokens of prompts: whoever can reach the sockets can read them. Listen on
loopback, or on a network that only routers reach.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Self

import msgspec
import zmq

from kvstow.errors import SpecError
from kvstow.events.format import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    CacheEvent,
    EventBatch,
)
from kvstow.threads import guarded_thread

log = logging.getLogger(__name__)

KEPT_BATCHES = 10_000
HIGH_WATER = 100_000
POLL_MS = 100


class EventPublisher:
    """Publishes batches of events, numbered from 0.

    `listen` and `replay` are ZeroMQ addresses; a port of `*` is chosen by the system. The last
    `keep` batches are repeated to whoever asks at `replay`. A slow subscriber loses batches and
    asks for them again; nobody waits for it.
    """

    def __init__(
        self,
        listen: str = "tcp://127.0.0.1:5557",
        *,
        replay: str = "",
        topic: str = "",
        keep: int = KEPT_BATCHES,
        data_parallel_rank: int = 0,
    ) -> None:
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._next = 0
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._thread: threading.Thread | None = None
        try:
            self._out, self.address = self._bound(zmq.PUB, listen)
            self.replay_address = ""
            if replay:
                answers, self.replay_address = self._bound(zmq.ROUTER, replay)
                self._thread = guarded_thread(
                    "kvstow-events", partial(self._answer, answers), on_broken=lambda error: None
                )
                self._thread.start()
        except BaseException:
            self.close()
            raise

    def _bound(self, kind: int, address: str) -> tuple["zmq.Socket[bytes]", str]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(HIGH_WATER)
        socket.linger = 0
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise SpecError(
                f"events cannot be published at {address!r}: {error}\n\n"
                "hint: an address looks like tcp://127.0.0.1:5557"
            ) from None
        return socket, socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Publish a batch, unless it is empty; from any thread."""
        if not events:
            return
        payload = msgspec.msgpack.encode(EventBatch(time.time(), list(events), self._rank))
        with self._lock:
            number = self._next
            self._next += 1
            self._kept.append((number, payload))
            self._out.send_multipart((self._topic, _sequence(number), payload))

    def _answer(self, socket: "zmq.Socket[bytes]") -> None:
        """Repeat batches until the publisher is closed."""
        while not self._closing.is_set():
            try:
                if socket.poll(POLL_MS):
                    self._repeat(socket, socket.recv_multipart())
            except zmq.ZMQError as error:
                log.warning("events: a replay failed: %s", error)

    def _repeat(self, socket: "zmq.Socket[bytes]", request: Sequence[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != SEQUENCE_BYTES:
            return
        client, first = request[0], int.from_bytes(request[2], "big")
        with self._lock:
            kept = [(number, payload) for number, payload in self._kept if number >= first]
        for number, payload in kept:
            socket.send_multipart((client, b"", self._topic, _sequence(number), payload))
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Let go of the sockets; once is enough."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for socket in self._sockets:
                socket.close()
            self._sockets.clear()
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sequence(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")
