"""Writes into a guest's memory: rows that it ordered, and probes."""

from kvstow.errors import TransferError
from kvstow.route.copies import Copies, merged
from kvstow.transfer.channel.messages import AnyMessage, Failed, Stopped, TellProbe, Written
from kvstow.transfer.contact import PROBES
from kvstow.transfer.guest import Guest
from kvstow.transfer.home import PROBE_BYTES, Home
from kvstow.transfer.mover import Mover, chunk_bytes


def attached(home: Home, guest: Guest) -> None:
    """Make sure that the engine can reach the guest."""
    if not home.is_attached(guest.card.start):
        home.attach(guest.card)


class Writing:
    """A write into a guest's rows."""

    def __init__(self, home: Home, guest: Guest, copies: Copies) -> None:
        attached(home, guest)
        self._stopped = False
        kinds = home.kinds(guest.card)
        size = chunk_bytes(guest.write_rate, kinds)
        self._mover = Mover(home, "write", guest.card.start, kinds, merged(copies), size)

    def stop(self) -> None:
        """Write nothing more."""
        self._stopped = True
        self._mover.stop()

    def sever(self) -> None:
        """End at once, whatever is under way."""
        self._mover.sever()

    def advance(self, transfer: int) -> tuple[list[AnyMessage], bool]:
        """Write on; what to tell the guest, and whether it is over."""
        mover = self._mover
        over = mover.advance()
        if mover.error is not None:
            return [Failed(transfer, mover.error.kind, str(mover.error))], True
        if not over:
            return [], False
        if self._stopped:
            return [Stopped(transfer)], True
        return [Written(transfer, mover.nbytes, mover.descriptors)], True


class Probe:
    """A few megabytes written into a guest's probe memory, several times."""

    def __init__(self, home: Home, guest: Guest, nbytes: int) -> None:
        self.guest = guest
        self._home = home
        self._nbytes = min(PROBE_BYTES, max(1, nbytes), guest.card.probe.nbytes)
        self._left = PROBES
        self._best = 0.0
        self._mover: Mover | None = None
        self._started = 0.0

    def advance(self) -> TellProbe | None:
        """Write on; how long it took when it is over."""
        while self._left:
            if self._mover is None:
                try:
                    self._mover = self._posted()
                except TransferError:
                    return TellProbe(self._nbytes, -1.0)
            if not self._mover.advance():
                return None if self._mover.error is None else TellProbe(self._nbytes, -1.0)
            seconds = max(self._home.clock() - self._started, 1e-9)
            self._best = max(self._best, self._nbytes / seconds)
            self._mover = None
            self._left -= 1
        self.guest.write_rate = self._best
        return TellProbe(self._nbytes, self._nbytes / self._best)

    def _posted(self) -> Mover:
        attached(self._home, self.guest)
        card = self.guest.card
        one = Copies.one(self._home.probe.data_ptr(), card.probe.address, self._nbytes)
        self._started = self._home.clock()
        return Mover(self._home, "write", card.start, self._home.kinds(card), one, PROBE_BYTES)
