"""Leases: until when a producer keeps blocks for whoever holds the ticket.

Expiry goes through a heap, so one lease that is renewed again and again never hides
another that has run out. A lease ends once, for one reason, and then gives its blocks
back through `on_end`; what the blocks' owner does there comes after their generations
are safe (see `owner`).
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Literal

from kvstow.errors import FaultKind, TransferError
from kvstow.transfer.tickets.ticket import Ticket

EndReason = Literal["read", "expired", "withdrawn", "aborted", "closed"]
MAX_REMEMBERED = 1 << 16

ENDED: dict[EndReason, tuple[FaultKind, str]] = {
    "read": (
        "used",
        "all readers that it was for have pulled it\n\n"
        "hint: offer the request again, or with readers= as many consumers as will pull",
    ),
    "expired": (
        "expired",
        "expired\n\nhint: pull sooner, agent.keep(ticket), or offer with a longer lease_seconds",
    ),
    "withdrawn": ("expired", "withdrawn by its producer"),
    "aborted": ("aborted", "given up by a consumer"),
    "closed": ("peer", "its producer was closed"),
}
"""What a consumer hears who comes after the end."""


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to keep a ticket's blocks until `deadline`, for `readers` more readers; None: as
    many as the first consumer that comes has ranks."""

    ticket: Ticket
    readers: int | None
    deadline: float
    on_end: Callable[[EndReason], None]
    reading: set[Hashable] = field(default_factory=set[Hashable])

    @property
    def id(self) -> int:
        return self.ticket.lease


class Leases:
    """All leases of one agent. Time comes in as `now`; nothing here looks at a clock."""

    def __init__(self) -> None:
        self._running: dict[int, Lease] = {}
        self._is_closed = False
        self._heap: list[tuple[float, int]] = []
        self._ended: OrderedDict[int, EndReason] = OrderedDict()
        self._given_up: OrderedDict[int, int] = OrderedDict()
        """Readers of leases that are not known yet who will not come."""

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, id: int) -> bool:
        return id in self._running

    def has_ended(self, id: int) -> bool:
        """Whether it ran here and no longer does. One that is not known may still be granted:
        an engine's scheduler gives tickets out before the agent hears of them."""
        return id in self._ended

    def grant(self, lease: Lease) -> None:
        """Let a lease run, one that has ended here, too. Where all were closed, it ends at once."""
        self._ended.pop(lease.id, None)
        self._running[lease.id] = lease
        if self._is_closed:
            self.end(lease.id, "closed")
            return
        heapq.heappush(self._heap, (lease.deadline, lease.id))
        for _ in range(self._given_up.pop(lease.id, 0)):
            self.give_up(lease.id, None)

    def is_early(self, id: int) -> bool:
        """Whether it is not known yet: it may be granted later."""
        return id not in self._running and id not in self._ended

    def find(self, id: int) -> Lease:
        """The running lease; TransferError names why there is none."""
        if id in self._running:
            return self._running[id]
        if id in self._ended:
            kind, why = ENDED[self._ended[id]]
            raise TransferError(f"lease {id}: {why}", kind=kind)
        raise TransferError(f"lease {id}: not given out here", kind="ticket")

    def open(
        self, id: int, signature: bytes, reader: Hashable, *, now: float, ranks: int = 1
    ) -> Lease:
        """Let one reader in, one of `ranks`, and renew the lease; TransferError if it may not."""
        lease = self.find(id)
        if not compare_digest(signature, lease.ticket.signature):
            raise TransferError(f"lease {id}: the ticket is not the one given out", kind="ticket")
        if lease.readers is None:
            lease.readers = ranks
        if reader not in lease.reading and len(lease.reading) >= lease.readers:
            raise TransferError(
                f"lease {id}: {lease.readers} readers may still come, {len(lease.reading)} read "
                f"already\n\nhint: offer with readers= as many consumers as will pull",
                kind="used",
            )
        lease.reading.add(reader)
        self.renew(id, now=now)
        return lease

    def shut(self, id: int, reader: Hashable, *, accepted: bool) -> None:
        """A reader is done. The last one that accepted ends the lease; one that failed may
        come again."""
        lease = self._running.get(id)
        if lease is None or reader not in lease.reading:
            return
        lease.reading.discard(reader)
        if accepted and lease.readers is not None:
            lease.readers -= 1
            if lease.readers == 0:
                self.end(id, "read")

    def give_up(self, id: int, reader: Hashable) -> None:
        """A reader will not come, or not again. Where none is left to come, the lease ends; its
        siblings go on. That may be heard before the lease is."""
        if self.is_early(id):
            self._given_up[id] = self._given_up.get(id, 0) + 1
            if len(self._given_up) > MAX_REMEMBERED:
                self._given_up.popitem(last=False)
        lease = self._running.get(id)
        if lease is None:
            return
        lease.reading.discard(reader)
        lease.readers = (lease.readers or 1) - 1
        if lease.readers == 0:
            self.end(id, "aborted")

    def renew(self, id: int, *, now: float) -> None:
        """Start the lease's time again; leases that are not known are ignored."""
        lease = self._running.get(id)
        if lease is not None:
            lease.deadline = now + lease.ticket.lease_seconds

    def end(self, id: int, reason: EndReason) -> None:
        """End a lease, if it is still running, and give its blocks back."""
        lease = self._running.pop(id, None)
        if lease is None:
            return
        self._ended[id] = reason
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        lease.on_end(reason)

    def expire(self, *, now: float) -> None:
        """End every lease whose time is over."""
        while self._heap and self._heap[0][0] <= now:
            _, id = heapq.heappop(self._heap)
            lease = self._running.get(id)
            if lease is not None and lease.deadline > now:  # renewed since it was pushed
                heapq.heappush(self._heap, (lease.deadline, id))
            else:
                self.end(id, "expired")

    def close(self) -> None:
        """End all of them, and those that are granted from now on."""
        self._is_closed = True
        with ExitStack() as ends:  # all of them, whatever one raises
            for id in list(self._running):
                ends.callback(self.end, id, "closed")
