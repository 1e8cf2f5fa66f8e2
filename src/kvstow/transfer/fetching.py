"""The two halves of a staged transfer, at work."""

from collections import deque
from dataclasses import dataclass

from kvstow.errors import CopyError, TransferError
from kvstow.memory.copy import CopyHandle
from kvstow.plan.view import Ints
from kvstow.route.copies import Copies, merged
from kvstow.transfer.channel.messages import AnyMessage, Card, Failed, Staged, Stopped, Written
from kvstow.transfer.home import Home
from kvstow.transfer.mover import Mover
from kvstow.transfer.staging import Piece, Stage, over
from kvstow.transfer.transport.base import Kinds

IN_FLIGHT = 2


class Gathering:
    """The producer's half: pieces into slots, each kept until it was fetched."""

    def __init__(self, home: Home, stage: Stage, pieces: list[Piece]) -> None:
        self._home = home
        self._stage = stage
        self._waiting = deque(enumerate(pieces))
        self._copying: dict[int, tuple[int, CopyHandle]] = {}
        self._ready: dict[int, int] = {}
        self._nbytes = sum(piece.total for piece in pieces)
        self._descriptors = sum(len(piece.nbytes) for piece in pieces)
        self._stopped = False

    def fetched(self, number: int) -> None:
        """The consumer has a piece: its slot is free."""
        if number in self._ready:
            self._stage.give(self._ready.pop(number))

    def stop(self) -> None:
        """Gather nothing more. Whoever is reading a slot will not be told that it is done."""
        self._stopped = True
        self._waiting.clear()
        for slot in self._ready.values():
            self._stage.give(slot)
        self._ready.clear()

    def sever(self) -> None:
        self.stop()
        for slot, running in self._copying.values():
            running.wait()
            self._stage.give(slot)
        self._copying.clear()

    def advance(self, transfer: int) -> tuple[list[AnyMessage], bool]:
        """CopyHandle on; what to tell the consumer, and whether it is over."""
        told: list[AnyMessage] = []
        try:
            while self._waiting and len(self._copying) < IN_FLIGHT:
                slot = self._stage.take()
                if slot is None:
                    break
                number, piece = self._waiting.popleft()
                self._copying[number] = slot, self._stage.gather(self._home.arena, piece, slot)
            for number, (slot, running) in list(self._copying.items()):
                if over(running):
                    del self._copying[number]
                    self._ready[number] = slot
                    told.append(Staged(transfer, number, slot))
        except (TransferError, CopyError) as error:
            self.stop()
            return [Failed(transfer, "transport", str(error))], True
        if self._stopped and not self._copying:
            self.stop()
            return [Stopped(transfer)], True
        if self._waiting or self._copying or self._ready:
            return told, False
        return [Written(transfer, self._nbytes, self._descriptors)], True


@dataclass(slots=True, eq=False)
class _Fetch:
    """One piece on its way: read, then copied to its rows."""

    number: int
    piece: Piece
    mover: Mover
    slot: int | None
    copying: CopyHandle | None = None


class Fetching:
    """The consumer's half: pieces out of the producer's slots, or rows, into ours."""

    def __init__(self, home: Home, card: Card, pieces: list[Piece]) -> None:
        self._home = home
        self._card = card
        self._stage = home.stage
        self._pieces = pieces
        self._waiting: deque[tuple[int, int | None]] = deque(
            [] if card.stage else [(number, None) for number in range(len(pieces))]
        )
        self._left = len(pieces)
        self._running: list[_Fetch] = []
        self.nbytes = sum(piece.total for piece in pieces)
        self.descriptors = 0
        self.error: TransferError | None = None

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def quiet(self) -> bool:
        return not self._running

    def staged(self, number: int, slot: int) -> None:
        """The producer has put a piece into its slot."""
        stage = self._card.stage
        if stage is None or not 0 <= number < len(self._pieces):
            return
        if not 0 <= slot <= stage.nbytes - self._pieces[number].total:
            self.error = TransferError(f"slot {slot} is not inside {stage.nbytes} bytes",
                                       kind="transport", peer=self._card.agent)  # fmt: skip
            return
        self._waiting.append((number, slot))

    def stop(self) -> None:
        self._waiting.clear()

    def sever(self) -> None:
        """Disconnect the peer: nothing is read any more."""
        self._waiting.clear()
        for fetch in self._running:
            fetch.mover.sever()
            if fetch.copying is not None:
                fetch.copying.wait()
            self._give(fetch)
        self._running.clear()

    def advance(self) -> list[int]:
        """Read and copy on; pieces that the producer may forget. Keeps the first error in
        `error`."""
        fetched: list[int] = []
        try:
            while self._waiting and len(self._running) < IN_FLIGHT and self._begun():
                pass
            for fetch in tuple(self._running):
                if self._finished(fetch):
                    self._running.remove(fetch)
                    self._give(fetch)
                    self._left -= 1
                    fetched.append(fetch.number)
        except (TransferError, CopyError) as error:
            if not isinstance(error, TransferError):
                error = TransferError(f"staging: {error}", kind="transport")
            self.error = self.error or error
            self.sever()
        return fetched

    def _begun(self) -> bool:
        slot = None
        if self._stage is not None:
            slot = self._stage.take()
            if slot is None:
                return False
        number, theirs = self._waiting.popleft()
        piece = self._pieces[number]
        spans = merged(Copies(self._there(piece, theirs), self._here(piece, slot), piece.nbytes))
        kinds = Kinds(
            "DRAM" if slot is not None else self._home.kind,
            0 if slot is not None else self._home.device,
            "DRAM" if theirs is not None else self._card.kind,
            0 if theirs is not None else self._card.device,
        )
        mover = Mover(self._home, "read", self._card.start, kinds, spans, piece.total)
        self.descriptors += len(spans)
        self._running.append(_Fetch(number, piece, mover, slot))
        return True

    def _here(self, piece: Piece, slot: int | None) -> Ints:
        if slot is None:
            return piece.destination + self._home.card.base
        assert self._stage is not None
        return self._stage.arena.address + slot + piece.at

    def _there(self, piece: Piece, slot: int | None) -> Ints:
        if slot is None:
            return piece.source + self._card.base
        assert self._card.stage is not None
        return self._card.stage.address + slot + piece.at

    def _finished(self, fetch: _Fetch) -> bool:
        if fetch.copying is None:
            if not fetch.mover.advance():
                if fetch.mover.error is not None:
                    raise fetch.mover.error
                return False
            if fetch.slot is None:
                return True
            assert self._stage is not None
            fetch.copying = self._stage.scatter(self._home.arena, fetch.piece, fetch.slot)
        return over(fetch.copying)

    def _give(self, fetch: _Fetch) -> None:
        if fetch.slot is not None and self._stage is not None:
            self._stage.give(fetch.slot)
            fetch.slot = None
