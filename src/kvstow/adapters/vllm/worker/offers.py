"""Offers reach workers of other processes before the engine's next step.

A worker is given its orders when the engine steps, and an engine that is driven by hand
(`LLM.generate`) takes no step once its last request has ended. So the scheduler's side tells the
workers on its machine of an offer as soon as it is made, by a datagram with a mark that only it
can make. One that does not arrive (another machine, a ticket of more than some 200 KB, a full
queue) costs nothing: the next step tells.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from secrets import token_hex
from threading import Thread
from weakref import finalize

import msgspec

from kvstow.adapters.vllm.protocol import OfferBlocks, WorkerEndpoint
from kvstow.errors import KvstowError
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)

Told = tuple[str, str]
"""A request, and the ticket of the worker that is told."""

MARK_BYTES = 32
MAX_BYTES = 1 << 20


def _mark(secret: bytes, body: bytes) -> bytes:
    return blake2b(body, digest_size=MARK_BYTES, key=secret, person=b"kvstow offer").digest()


class OfferInbox:
    """Where a worker is told of offers: a socket on its machine, for who knows its secret."""

    def __init__(self, secret: bytes, hear: Callable[[OfferBlocks], None]) -> None:
        self.address = f"\0kvstow-{token_hex(16)}"  # a name, not a file: nothing is left behind
        self._secret = secret
        self._hear = hear
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._is_open = True
        self._thread = Thread(target=self._serve, name="kvstow offers", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._is_open:
            told = self._socket.recv(MAX_BYTES)
            mark, body = told[:MARK_BYTES], told[MARK_BYTES:]
            if compare_digest(mark, _mark(self._secret, body)):
                self._take(body)

    def _take(self, body: bytes) -> None:
        try:
            request, ticket = msgspec.msgpack.decode(body, type=Told)
            self._hear(OfferBlocks(request=request, tickets=(Ticket.parse(ticket),)))
        except (KvstowError, msgspec.MsgspecError):
            log.exception("an offer of the scheduler's")

    def close(self) -> None:
        """Listen no more."""
        self._is_open = False
        with suppress(OSError):
            self._socket.sendto(b"", socket.MSG_DONTWAIT, self.address)  # wakes the thread
        self._thread.join(1.0)
        self._socket.close()


class OfferSender:
    """Tells each worker of its tickets."""

    def __init__(self, workers: Sequence[WorkerEndpoint]) -> None:
        self._workers = {worker.agent: worker for worker in workers}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        finalize(self, self._socket.close)

    def tell(self, offer: OfferBlocks, texts: Sequence[str]) -> None:
        """Every worker that can be told is told, and not waited for. `texts` are the tickets."""
        for ticket, text in zip(offer.tickets, texts, strict=True):
            worker = self._workers[ticket.agent]
            body = msgspec.msgpack.encode((offer.request, text))
            told = _mark(worker.secret, body) + body
            with suppress(OSError):
                self._socket.sendto(told, socket.MSG_DONTWAIT, worker.inbox)
