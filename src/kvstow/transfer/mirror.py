"""A peer's counters, all of them: read by one post, again and again.

    leg 1   … last byte ─┐
    leg 2        … last byte ─┐
    reads     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤
                            └─ answers both

A read answers every fence that asked before it began. Nothing is made for a pull: where tables
are small, that costs less than a list of exactly the counters it wants.
"""

import numpy as np

from kvstow.errors import TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.copies import Copies
from kvstow.transfer.channel.messages import Card
from kvstow.transfer.fence import ENTRY, SLOT_ENTRIES
from kvstow.transfer.home import Home
from kvstow.transfer.mover import STALLED_SECONDS
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.base import Kinds, lost

MOST_ENTRIES = 1 << 16
ENTRIES_EACH = 128
"""Counters read for each block at most. It could be more: of a pool of 65,000, all were read in
less time than just those of 64 scattered blocks were listed and read, on one host and over TCP."""


def is_worth(layout: Layout, ticket: Ticket) -> bool:
    """Whether to read all counters of a layout for the blocks of a ticket."""
    entries = sum(layout.num_blocks(g) for g in range(len(layout.groups)))
    blocks = sum(len(listed) for listed in ticket.blocks.values())
    return entries <= min(MOST_ENTRIES, max(SLOT_ENTRIES, ENTRIES_EACH * blocks))


class Mirror:
    """The counters of one peer, as of the last read. Raises TransferError when it is made, or
    read, and the peer is not there."""

    def __init__(self, home: Home, card: Card, layout: Layout) -> None:
        counts = np.array([layout.num_blocks(g) for g in range(len(layout.groups))])
        ends = counts.cumsum()
        self.home = home
        self.peer = card.start
        self._memory = home.take_counters(int(ends[-1]))
        self.tables: list[Ints] = np.split(self._memory[: ends[-1]], ends[:-1])
        local = self._memory.ctypes.data + (ends - counts) * ENTRY
        some = counts > 0
        copies = Copies(np.array(card.tables)[some], local[some], counts[some] * ENTRY)
        try:
            self._post = home.transport.prepare("read", card.start, Kinds(), copies)
        except TransferError:
            home.give_counters(self._memory)
            raise
        self._begun = self._over = self._wanted = 0
        self._begun_at = 0.0
        self._is_closed = False

    def ask(self) -> int:
        """The number of a read that has not begun."""
        self._wanted = self._begun + 1
        return self._wanted

    def has_read(self, number: int) -> bool:
        """Whether that read is over; begins it when the one before it is."""
        if self._is_closed:
            raise lost(self.peer, "disconnected")
        self._look()
        if self._begun == self._over < self._wanted:
            self._begun += 1
            self._begun_at = self.home.clock()
            self._post.start()
            self._look()
        return self._over >= number

    def _look(self) -> None:
        if self._begun > self._over and (self._post.poll() or self._watch()):
            self._over = self._begun

    def _watch(self) -> bool:
        """Stay with the read for a while, unless nothing moves any more."""
        stalled = self.home.clock() - self._begun_at > STALLED_SECONDS
        return not stalled and self.home.watch(self._post.poll)

    def close(self) -> None:
        """Give the memory back; only when the peer was disconnected. Who asks now gets an error:
        the memory may hold another peer's counters."""
        self._is_closed = True
        self.home.give_counters(self._memory)


class MirrorFence:
    """Asks the mirror for a ticket's counters once the last byte is there, and compares."""

    def __init__(self, mirror: Mirror, ticket: Ticket) -> None:
        self._mirror = mirror
        self._ticket = ticket
        self._read = 0
        self.done = False
        self.changed: dict[int, tuple[int, ...]] = {}
        self.error: TransferError | None = None

    @property
    def quiet(self) -> bool:
        return self._read == 0 or self.done or self.error is not None

    def prepare(self) -> None:
        """Nothing to make."""

    def stop(self) -> None:
        """A read that is under way goes on."""

    def advance(self) -> bool:
        """Read and compare; whether that is over. Keeps an error in `error`."""
        if self.done or self.error is not None:
            return self.done
        try:
            self._read = self._read or self._mirror.ask()
            if self._mirror.has_read(self._read):
                self._compare()
        except TransferError as error:
            self.error = error
            self.sever()
        return self.done

    def _compare(self) -> None:
        for g, listed in self._ticket.blocks.items():
            found, expected = self._mirror.tables[g].take(listed.ids), self._ticket.generations[g]
            if found.tobytes() != expected.tobytes():
                self.changed[g] = tuple(listed.ids[found != expected].tolist())
        self.done = True

    def sever(self) -> None:
        """Disconnect the peer: quiet from now on."""
        self._mirror.home.sever(self._mirror.peer)
        self.error = self.error or TransferError(
            f"peer {self._mirror.peer!r}: its counters were not read", kind="peer",
            peer=self._mirror.peer)  # fmt: skip
