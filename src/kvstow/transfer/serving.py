"""The producer's half: guests, their readings, and writes on their behalf.

Everything here runs in the agent's own thread.
"""

from collections.abc import Callable
from concurrent.futures import Future

from kvstow.errors import (
    FaultKind,
    KvstowError,
    ManifestError,
    RouteError,
    TransferError,
)
from kvstow.plan.manifest import decode
from kvstow.route.blocks import Blocks
from kvstow.route.compare import differences
from kvstow.transfer.channel.base import Channel, Line
from kvstow.transfer.channel.messages import (
    Alive,
    AnyMessage,
    AskProbe,
    AskStatus,
    Begin,
    Begun,
    Card,
    End,
    Failed,
    Fetched,
    Hello,
    Refused,
    Renew,
    Stop,
    Stopped,
    TellDigest,
    TellStatus,
    Welcome,
)
from kvstow.transfer.digesting import digests
from kvstow.transfer.fetching import Gathering
from kvstow.transfer.guest import Guest
from kvstow.transfer.home import Home, check_blocks
from kvstow.transfer.lease import Leases
from kvstow.transfer.staging import pieces
from kvstow.transfer.ticket import Ticket, unpacked_ints
from kvstow.transfer.writing import Probe, Writing

AWAKE_AFTER_HELLO = 0.5
"""A new guest measures how fast it can read: that takes our help, and is not announced."""

SILENT_BEATS = 30
"""A guest that was silent for so many heartbeats is forgotten."""


class Serving:
    """All guests of one agent, and what is being done for them."""

    def __init__(
        self,
        home: Home,
        channel: Channel,
        leases: Leases,
        ticket_of: Callable[[int], Ticket],
        status: Callable[[], bytes],
        wake: Callable[[], None],
        silent_seconds: float,
    ) -> None:
        self.guests: dict[int, Guest] = {}
        self._home = home
        self._channel = channel
        self._leases = leases
        self._ticket_of = ticket_of
        self._status = status
        self._wake = wake
        self._silent_seconds = silent_seconds
        self._writings: dict[tuple[int, int], Writing | Gathering] = {}
        self._probes: list[Probe] = []
        self._digests: list[tuple[Guest, int, Future[tuple[int, ...]]]] = []
        self._awake_until = 0.0

    def stay_awake(self, seconds: float) -> None:
        """Make progress without pause for so long: some engines' targets have to."""
        self._awake_until = max(self._awake_until, self._home.clock() + seconds)

    @property
    def works(self) -> bool:
        """Whether this thread does something for a guest."""
        return bool(self._writings or self._probes)

    @property
    def attends(self) -> bool:
        """Whether a guest may need this process to make progress."""
        return self._home.clock() < self._awake_until or any(
            guest.reading for guest in self.guests.values()
        )

    # ── messages ──────────────────────────────────────────────────────────────────

    def hear(self, line: Line, message: AnyMessage, now: float) -> None:
        """Take in a message from a guest."""
        if isinstance(message, Hello):
            self._greet(line, message.card, now)
            return
        if isinstance(message, AskStatus):
            self._channel.send(line, TellStatus(self._status()))
            return
        guest = self.guests.get(line.session)
        if guest is None:
            return
        guest.heard_at = now
        match message:
            case Begin():
                self._begin(guest, message, now)
            case End(transfer, lease, outcome):
                self._end(guest, transfer, lease, outcome)
            case Stop(transfer):
                self._stop(guest, transfer)
            case Fetched(transfer, piece):
                gathering = self._writings.get((line.session, transfer))
                if isinstance(gathering, Gathering):
                    gathering.fetched(piece)
            case Renew(leases):
                self._renew(guest, leases, now)
            case AskProbe(nbytes):
                self._probes.append(Probe(self._home, guest, nbytes))
            case _:
                pass

    def _greet(self, line: Line, card: Card, now: float) -> None:
        try:
            layout = decode(card.manifest)
            found = differences(self._home.layout, layout)
            if found:
                raise RouteError(found)
            guest = Guest(line, card, layout)
        except (ManifestError, RouteError) as error:
            reasons = tuple(str(error).splitlines())
            self._home.note("refused", {"peer": card.agent, "why": str(error)})
            self._channel.send(line, Refused(0, "refused", reasons))
            return
        for old in [g for g in self.guests.values() if g.card.agent == card.agent]:
            self._forget(old)
        guest.heard_at = now
        self.guests[line.session] = guest
        self.stay_awake(AWAKE_AFTER_HELLO)
        self._channel.send(line, Welcome(self._home.card))

    def _forget(self, guest: Guest) -> None:
        for key in [key for key in self._writings if key[0] == guest.line.session]:
            self._writings.pop(key).sever()
        for transfer, lease in guest.reading.items():
            self._leases.shut(lease, (guest.line.session, transfer), accepted=False)
        self.guests.pop(guest.line.session, None)
        self._channel.hang_up(guest.line)

    def _begin(self, guest: Guest, begin: Begin, now: float) -> None:
        reader = (guest.line.session, begin.transfer)
        try:
            self._leases.open(begin.lease, begin.digest, reader, now=now)
            ticket = self._ticket_of(begin.lease)
            if begin.write is not None:
                self._writings[reader] = self._ordered(guest, ticket, begin)
            if begin.samples:
                claims = guest.errand(self._home.layout, begin.claims).claims
                told = self._home.worker.submit(
                    digests, self._home.arena, ticket.blocks, begin.samples, claims
                )
                self._digests.append((guest, begin.transfer, told))
                told.add_done_callback(lambda _: self._wake())
        except (KvstowError, ValueError, ArithmeticError, LookupError) as error:
            self._leases.shut(begin.lease, reader, accepted=False)
            kind: FaultKind = error.kind if isinstance(error, TransferError) else "ticket"
            self._channel.send(guest.line, Refused(begin.transfer, kind, (str(error),)))
            return
        guest.reading[begin.transfer] = begin.lease
        self._channel.send(guest.line, Begun(begin.transfer))

    def _ordered(self, guest: Guest, ticket: Ticket, begin: Begin) -> "Writing | Gathering":
        """What the consumer has ordered: a write into its rows, or pieces in our slots."""
        order, home = begin.write, self._home
        assert order is not None
        into = {
            part.group: Blocks(unpacked_ints(part.ids), unpacked_ints(part.index))
            for part in order.blocks
        }
        check_blocks(guest.layout, into, whose=f"order of {guest.card.agent!r}")
        ways = guest.errand(home.layout, begin.claims).ways
        tokens = (order.start_token, order.num_tokens)
        if begin.slot_bytes:
            if home.stage is None or begin.slot_bytes > home.stage.slot_bytes:
                raise TransferError(f"slots of {begin.slot_bytes} bytes are not to be had",
                                    kind="refused")  # fmt: skip
            cut = pieces(ways.route, ticket.blocks, into, tokens, begin.slot_bytes)
            return Gathering(home, home.stage, cut)
        there = ways.spans(ticket.blocks, into, tokens, (home.card.base, guest.card.base))
        return Writing(home, guest, there)

    def _end(self, guest: Guest, transfer: int, lease: int, outcome: str) -> None:
        guest.reading.pop(transfer, None)
        reader = (guest.line.session, transfer)
        if outcome == "aborted" and lease in self._leases:
            self._leases.end(lease, "aborted")
        else:
            self._leases.shut(lease, reader, accepted=outcome == "accepted")

    def _stop(self, guest: Guest, transfer: int) -> None:
        writing = self._writings.get((guest.line.session, transfer))
        if writing is None:
            self._channel.send(guest.line, Stopped(transfer))
        else:
            writing.stop()

    def _renew(self, guest: Guest, leases: tuple[int, ...], now: float) -> None:
        for lease in leases:
            self._leases.renew(lease, now=now)
        ended = tuple(lease for lease in leases if self._leases.has_ended(lease))
        self._channel.send(guest.line, Alive(ended))

    def lease_ended(self, lease: int, reason: str) -> None:
        """Tell everybody who reads under this lease."""
        if reason == "read":
            return
        for guest in self.guests.values():
            for transfer, theirs in guest.reading.items():
                if theirs == lease:
                    self._channel.send(guest.line, Alive((lease,)))
                    writing = self._writings.get((guest.line.session, transfer))
                    if writing is not None:
                        writing.stop()

    # ── work ──────────────────────────────────────────────────────────────────────

    def advance(self, now: float) -> None:
        """Move writes and probes on; forget guests that have gone silent."""
        for (session, transfer), writing in list(self._writings.items()):
            answers, is_over = writing.advance(transfer)
            if is_over:
                del self._writings[session, transfer]
            for answer in answers:
                self._channel.send(self.guests[session].line, answer)
        for probe in list(self._probes):
            told = probe.advance()
            if told is not None:
                self._probes.remove(probe)
                self._channel.send(probe.guest.line, told)
        for entry in tuple(self._digests):
            if entry[2].done():
                self._digests.remove(entry)
                self._tell_digest(*entry)
        for guest in list(self.guests.values()):
            if now - guest.heard_at > self._silent_seconds:
                self._home.note("guest-silent", {"peer": guest.card.agent})
                self._forget(guest)

    def _tell_digest(self, guest: Guest, transfer: int, told: Future[tuple[int, ...]]) -> None:
        error = told.exception()
        if error is not None:
            self._channel.send(guest.line, Failed(transfer, "digest", f"no digest: {error}"))
        else:
            self._channel.send(guest.line, TellDigest(transfer, told.result()))
