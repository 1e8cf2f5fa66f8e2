"""A fence at work: counters read one-sidedly into a slot, and compared."""

from collections import deque
from contextlib import suppress

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.channel.messages import Card
from kvstow.transfer.fence import Round, fence_rounds
from kvstow.transfer.generations import ids_of
from kvstow.transfer.home import Home
from kvstow.transfer.mover import Mover
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.base import Kinds


class Fence:
    """Reads the counters of a ticket's blocks again, one round after the other."""

    def __init__(self, home: Home, card: Card, ticket: Ticket) -> None:
        self._home = home
        self._peer = card.start
        self._rounds: deque[Round] = deque(
            fence_rounds(card.tables, ids_of(ticket.blocks), ticket.generations)
        )
        self._slot: int | None = None
        self._mover: Mover | None = None
        self.changed: dict[int, tuple[int, ...]] = {}
        self.error: TransferError | None = None

    @property
    def done(self) -> bool:
        return not self._rounds and self._mover is None

    @property
    def quiet(self) -> bool:
        return self._mover is None or self._mover.quiet

    def prepare(self) -> None:
        """Make the first read ready to be started, if a slot is free; `stop` undoes it."""
        if self._rounds and self._aimed():
            assert self._mover is not None
            with suppress(TransferError):  # `advance` will meet it again
                self._mover.prepare()

    def stop(self) -> None:
        """Give back what was only prepared; a read that is under way goes on."""
        if self._mover is None or self._mover.quiet:
            self._rounds.clear()
            if self._mover is not None:
                self._mover.stop()
                self._mover = None
            self._give_back()

    def advance(self) -> bool:
        """Post, poll and compare; whether all rounds are over."""
        while self._rounds and self.error is None:
            if self._mover is None and not self._aimed():
                return False
            assert self._mover is not None
            if not self._mover.advance():
                self.error = self._mover.error
                if self.error is not None:
                    self._give_back()
                return False
            self._compare()
        return self.done

    def _aimed(self) -> bool:
        """Whether there is a slot for the next round's counters, and a mover to bring them."""
        if self._slot is None:
            self._slot = self._home.take_slot()
            if self._slot is None:
                return False
        one = self._rounds[0]
        copies = Copies(one.remote, self._home.slot_address(self._slot) + one.local, one.nbytes)
        self._mover = Mover(self._home, "read", self._peer, Kinds(), copies, 1 << 30)
        return True

    def _compare(self) -> None:
        assert self._slot is not None
        changed = self._rounds.popleft().changed(self._home.slots[self._slot])
        for g, ids in changed.items():
            self.changed[g] = (*self.changed.get(g, ()), *ids)
        self._mover = None
        if not self._rounds:
            self._give_back()

    def _give_back(self) -> None:
        if self._slot is not None:
            self._home.give_slot(self._slot)
            self._slot = None

    def sever(self) -> None:
        """Disconnect the peer: quiet from now on."""
        if self._mover is not None:
            self._mover.sever()
        self._give_back()
