"""Which way the bytes go: measured at first contact, because it can be a factor of 300."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.channel.messages import AskProbe, Card, TellProbe
from kvstow.transfer.loop import Story
from kvstow.transfer.move.copies import moved
from kvstow.transfer.options import Way
from kvstow.transfer.peers.endpoint import PROBE_BYTES, Endpoint
from kvstow.transfer.transport.base import Direction, Kinds

if TYPE_CHECKING:
    from kvstow.transfer.peers.incoming import Incoming
    from kvstow.transfer.peers.outgoing import Outgoing

PROBES = 5
"""The first one also connects, so it never counts alone."""

PREFER_READ = 2.0
"""Other ways cost the producer work: they have to be so much faster to be chosen."""

STAGED_SHARE = 0.7
"""What is left of the rate between two hosts' memories when rows are copied on both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The chosen direction, and the rates it was chosen by, in bytes per second.

    `staged_rate` is 0 where both sides' rows are in host memory: nothing to gain.
    """

    direction: Way
    read_rate: float
    write_rate: float
    staged_rate: float = 0.0
    forced: bool = False

    @property
    def rate(self) -> float:
        match self.direction:
            case "read":
                return self.read_rate
            case "write":
                return self.write_rate
            case "staged":
                return self.staged_rate


def chosen(
    read_rate: float,
    write_rate: float,
    staged_rate: float = 0.0,
    forced: Way | None = None,
) -> Path:
    """The fastest way, unless one is forced; the simpler one where they are about equal."""
    best: Way = "write" if write_rate > PREFER_READ * read_rate else "read"
    if staged_rate > PREFER_READ * max(read_rate, write_rate):
        best = "staged"
    return Path(
        direction=forced or best,
        read_rate=read_rate,
        write_rate=write_rate,
        staged_rate=staged_rate,
        forced=forced is not None,
    )


def measured_path(endpoint: Endpoint, peer: "Outgoing", card: Card) -> Story[Path]:
    """Read a few megabytes several times, then have as much written; choose. TransferError if
    the peer cannot be read."""
    forced = endpoint.options.direction
    if forced is not None:
        return chosen(0.0, 0.0, forced=forced)
    kinds = endpoint.kinds(card)
    ours, theirs = endpoint.probe.data_ptr(), card.probe.address
    size = min(PROBE_BYTES, card.probe.nbytes)
    read = yield from _rate(endpoint, "read", card, kinds, Copies.one(theirs, ours, size))
    staged = 0.0
    if "VRAM" in kinds:
        ours = endpoint.stage.arena.address if endpoint.stage else ours
        theirs = card.stage.address if card.stage else theirs
        copies = Copies.one(theirs, ours, size)
        staged = yield from _rate(endpoint, "read", card, Kinds(), copies)
    peer.send(AskProbe(size))
    told = yield from peer.mailbox.wait(TellProbe)
    write = told.nbytes / told.seconds if told.seconds > 0 else 0.0
    return chosen(read, write, STAGED_SHARE * staged)


def written_probe(endpoint: Endpoint, peer: "Incoming", nbytes: int) -> Story[None]:
    """Write a few megabytes into a consumer's probe memory, several times, and tell it how
    long that took."""
    card = peer.card
    size = min(PROBE_BYTES, max(1, nbytes), card.probe.nbytes)
    copies = Copies.one(endpoint.probe.data_ptr(), card.probe.address, size)
    try:
        peer.attach()
        rate = yield from _rate(endpoint, "write", card, endpoint.kinds(card), copies)
    except TransferError:
        peer.send(TellProbe(size, -1.0))
        raise
    peer.write_rate = rate
    peer.send(TellProbe(size, size / rate))


def _rate(
    endpoint: Endpoint, direction: Direction, card: Card, kinds: Kinds, copies: Copies
) -> Story[float]:
    """Bytes per second, the best of several."""
    best = 0.0
    for _ in range(PROBES):
        started = endpoint.clock()
        yield from moved(endpoint, direction, card.engine, kinds, copies, flights=[])
        best = max(best, copies.total / max(endpoint.clock() - started, 1e-9))
    return best
