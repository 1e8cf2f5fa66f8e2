"""A subscriber that hears every batch of a publisher once and in order, or says that it cannot.

    live      0 1 2 · · 5         3 and 4 are missing: ask replay for all from 3 on
    replay          3 4 5
    heard     0 1 2 3 4 5

Where the publisher does not keep them any more, or the connection broke and it may have been
started again, `on_lost` says that everything heard so far may be wrong; what is still kept follows.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstow.errors import SpecError
from kvstow.events.format import END_OF_REPLAY, SEQUENCE_BYTES, EventBatch, decode_batch

log = logging.getLogger(__name__)

POLL_MS = 100
REPLAY_MS = 2000
HIGH_WATER = 100_000

Numbered = tuple[int, EventBatch]


class EventSubscriber:
    """Hears the publisher at an address in a thread of its own, from `start` until `close`.

    Without `replay` what is missed is lost. Both callbacks run in that thread.
    """

    def __init__(
        self,
        address: str,
        *,
        replay: str = "",
        topic: str = "",
        on_batch: Callable[[EventBatch], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.address = address
        self._replay = replay
        self._topic = topic.encode()
        self._on_batch = on_batch
        self._on_lost = on_lost
        self._next = 0
        self._latest = 0.0
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.linger = 0
        self._in.set_hwm(HIGH_WATER)
        self._in.subscribe(self._topic)
        self._breaks = self._in.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._in.connect(address)
        except zmq.ZMQError as error:
            self._let_go()
            raise SpecError(
                f"no events can be heard at {address!r}: {error}\n\n"
                "hint: an address looks like tcp://127.0.0.1:5557"
            ) from None
        self._thread = threading.Thread(target=self._hear, name="kvstow-events", daemon=True)

    def start(self) -> Self:
        """Ask for what was said before, and hear what comes."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Hear no more."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        self._in.disable_monitor()
        self._breaks.close(linger=0)
        self._in.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    # ── in its thread ─────────────────────────────────────────────────────────────

    def _hear(self) -> None:
        for number, batch in self._repeated(0):
            self._deliver(number, batch)
        poller = zmq.Poller()
        poller.register(self._in, zmq.POLLIN)
        poller.register(self._breaks, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._breaks in ready:
                recv_monitor_message(self._breaks)
                self._forget()
            elif self._in in ready:
                heard = _numbered(self._in.recv_multipart())
                if heard is not None:
                    self._take(*heard)

    def _forget(self) -> None:
        """The connection broke: whoever is there next may be another start of the publisher."""
        if self._next:
            self._on_lost()
        self._next, self._latest = 0, 0.0

    def _take(self, number: int, batch: EventBatch) -> None:
        """A batch came. An old number with a new time is that of a publisher started again."""
        if number < self._next:
            if batch.ts > self._latest:
                self._start_over(number, batch)
            return
        if number > self._next:
            missed = list(self._repeated(self._next))
            if not missed or missed[0][0] != self._next:
                self._start_over(number, batch)
                return
            for each in missed:
                self._deliver(*each)
        if number >= self._next:
            self._deliver(number, batch)

    def _start_over(self, number: int, batch: EventBatch) -> None:
        what = "events of %s: batch %d after %d, and what lies between is not kept"
        log.warning(what, self.address, number, self._next - 1)
        self._forget()
        for each in self._repeated(0):
            self._deliver(*each)
        if number >= self._next:
            self._deliver(number, batch)

    def _deliver(self, number: int, batch: EventBatch) -> None:
        self._next, self._latest = number + 1, batch.ts
        try:
            self._on_batch(batch)
        except Exception:
            log.exception("events of %s: batch %d", self.address, number)

    def _repeated(self, first: int) -> Iterator[Numbered]:
        """The batches that the publisher keeps, from that number on; none if it is silent."""
        if not self._replay:
            return
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        try:
            socket.connect(self._replay)
            socket.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
            while self._answers(socket):
                frames = socket.recv_multipart()
                if len(frames) >= 2 and frames[-2] == END_OF_REPLAY:
                    return
                heard = _numbered(frames)
                if heard is not None:
                    yield heard
        finally:
            socket.close()

    def _answers(self, socket: "zmq.Socket[bytes]") -> bool:
        """Whether something came in time."""
        for _ in range(REPLAY_MS // POLL_MS):
            if self._closing.is_set():
                return False
            if socket.poll(POLL_MS):
                return True
        return False


def _numbered(frames: list[bytes]) -> Numbered | None:
    """Number and batch, the last two frames; None for anything else."""
    if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
        return None
    try:
        return int.from_bytes(frames[-2], "big"), decode_batch(frames[-1])
    except SpecError as error:
        log.warning("%s", error)
        return None
