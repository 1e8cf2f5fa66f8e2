"""Pushing: the consumer says what it expects, the producer asks it to pull.

    consumer   arrival = agent.expect(into, num_tokens)   ─ arrival.ticket ─▶   producer
    producer   push = peer.push(blocks, to=ticket)        ─ deliver ─▶   consumer pulls

So a push is a pull that the producer starts: same directions, same fence, same faults.
"""

import threading
from collections.abc import Callable, Sequence

from kvstow.errors import TransferError
from kvstow.transfer.channel.messages import Delivered
from kvstow.transfer.contact import Contact
from kvstow.transfer.lease import Leases
from kvstow.transfer.pulling import Stats, Transfer
from kvstow.transfer.ticket import Ticket

Starter = Callable[[Sequence[tuple[Ticket, Contact]]], Transfer]


class Arrival:
    """Rows that wait for somebody to push into them."""

    def __init__(self, ticket: Ticket, start: Starter) -> None:
        self.ticket = ticket
        self.transfer: Transfer | None = None
        self.error: TransferError | None = None
        self._start = start
        self._begun = threading.Event()

    def begin(
        self, source: Ticket, contact: Contact, answer: Callable[[TransferError | None], None]
    ) -> Transfer:
        """Start to pull; `answer` is called with the outcome. For the agent's thread."""
        self.transfer = self._start([(source, contact)])
        self.transfer.on_end = answer
        self._begun.set()
        return self.transfer

    def cancel(self, error: TransferError) -> None:
        """Nobody will push any more."""
        if self.transfer is None:
            self.error = error
            self._begun.set()

    def poll(self) -> bool:
        """Whether the rows hold what was pushed; raises TransferError if they never will."""
        if self.error is not None:
            raise self.error
        return self.transfer is not None and self.transfer.poll()

    def wait(self, seconds: float | None = None) -> Stats:
        """The outcome of the push, once there is one; TimeoutError if there is none yet."""
        if not self._begun.wait(seconds):
            raise TimeoutError(f"nothing was pushed within {seconds} s")
        self.poll()
        assert self.transfer is not None
        return self.transfer.wait(seconds)


class Push:
    """Blocks on their way to somebody who expects them."""

    def __init__(self, source: Ticket, target: Ticket) -> None:
        self.id = Leases.fresh_id()
        self.source = source
        self.target = target
        self._ended = threading.Event()
        self._error: TransferError | None = None

    def poll(self) -> bool:
        """Whether the consumer has accepted; raises TransferError if it never will."""
        if self._ended.is_set() and self._error is not None:
            raise self._error
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> None:
        """Until the consumer has accepted; raises TransferError, or TimeoutError."""
        if not self._ended.wait(seconds):
            raise TimeoutError(f"the push has not ended within {seconds} s")
        self.poll()

    def hear(self, message: Delivered) -> None:
        """The consumer's answer."""
        if message.kind is None:
            self._ended.set()
        else:
            self.fail(TransferError(f"peer {self.target.agent!r}: {message.reason}",
                                    kind=message.kind, peer=self.target.agent))  # fmt: skip

    def fail(self, error: TransferError) -> None:
        """End as an error, unless it has ended."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
