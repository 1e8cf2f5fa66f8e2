"""Which way the bytes go: measured at first contact, because it can be a factor of 300."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.route.price import LinkSpeed
from kvstow.route.ways import STAGED_SHARE, Amount, Way, fastest, prefers_staged
from kvstow.transfer.channel.messages import AskProbe, Card, TellProbe
from kvstow.transfer.loop import Story
from kvstow.transfer.move.copies import moved
from kvstow.transfer.move.staged import copied
from kvstow.transfer.peers.endpoint import PROBE_BYTES, Endpoint
from kvstow.transfer.transport.base import Direction, Kinds

if TYPE_CHECKING:
    from kvstow.transfer.peers.incoming import Incoming
    from kvstow.transfer.peers.outgoing import Outgoing

PROBES = 5
"""The first one also connects, so it never counts alone."""

PROBE_COPIES = 512
"""So many short copies tell what one costs: they are of 8 KiB, like a page of one head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The chosen direction, and the rates it was chosen by, in bytes per second.

    `staged_rate` is 0 where both sides' rows are in host memory: nothing to gain.
    `seconds_per_write` is what each written copy costs more, 0 where it was not measured.
    """

    direction: Way
    read_rate: float
    write_rate: float
    staged_rate: float = 0.0
    seconds_per_write: float = 0.0
    forced: bool = False

    @property
    def rate(self) -> float:
        match self.direction:
            case "read" | "rows":
                return self.read_rate
            case "write":
                return self.write_rate
            case "staged":
                return self.staged_rate

    def direction_of(self, writes: Amount) -> Way:
        """The direction: staged instead of written, where there are so many writes that they are
        slower."""
        if not self.seconds_per_write:
            return self.direction
        writing = LinkSpeed(
            name="writes",
            bytes_per_second=self.write_rate,
            seconds_per_copy=self.seconds_per_write,
        )
        is_slower = prefers_staged(writing, self.staged_rate, writes)
        return "staged" if is_slower else self.direction


def chosen(
    read_rate: float,
    write_rate: float,
    staged_rate: float = 0.0,
    forced: Way | None = None,
) -> Path:
    """The fastest way, unless one is forced."""
    return Path(
        direction=forced or fastest(read_rate, write_rate, staged_rate),
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
        mine, its = endpoint.card.stage or endpoint.card.probe, card.stage or card.probe
        copies = Copies.one(its.address, mine.address, min(size, mine.nbytes, its.nbytes))
        staged = yield from _rate(endpoint, "read", card, Kinds(), copies)
    peer.send(AskProbe(size))
    told = yield from peer.mailbox.wait(TellProbe)
    write = told.nbytes / told.seconds if told.seconds > 0 else 0.0
    path = chosen(read, write, STAGED_SHARE * staged)
    if path.direction != "write" or not staged or peer.fingerprint == endpoint.fingerprint:
        return path
    link = yield from _measured_writes(endpoint, peer.name, card, kinds, write)
    return replace(path, seconds_per_write=link.seconds_per_copy)


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


# ── what a copy costs ─────────────────────────────────────────────────────────────────


def measured_reads(endpoint: Endpoint, peer: "Outgoing", card: Card) -> Story[LinkSpeed]:
    """What reads from a peer cost; measured when first asked for, by a long one and many short
    ones. Raises TransferError."""
    if peer.link is None:
        size, kinds = min(PROBE_BYTES, card.probe.nbytes), endpoint.kinds(card)
        ends = card.probe.address, endpoint.probe.data_ptr(), size
        one = yield from _rate(endpoint, "read", card, kinds, Copies.one(*ends))
        many = yield from _rate(endpoint, "read", card, kinds, _scattered(*ends))
        peer.link = _speed(peer.name, one, many, _scattered(*ends))
    return peer.link


def _measured_writes(
    endpoint: Endpoint, name: str, card: Card, kinds: Kinds, one: float
) -> Story[LinkSpeed]:
    """What writes between us and a peer cost, whose rate for a long one is known: measured by
    ours to it, because a link is taken to be alike in both directions. Raises TransferError."""
    size = min(PROBE_BYTES, card.probe.nbytes)
    copies = _scattered(endpoint.probe.data_ptr(), card.probe.address, size)
    many = yield from _rate(endpoint, "write", card, kinds, copies)
    return _speed(name, one, many, copies)


def measured_copies(endpoint: Endpoint) -> Story[LinkSpeed]:
    """What copies from our slots cost; measured when first asked for. Raises TransferError."""
    if endpoint.copy_speed is None:
        scratch = endpoint.scratch()
        half = min(PROBE_BYTES, scratch.slot_bytes // 2)
        slot = yield from scratch.taken()
        ends = slot, slot + half, half
        copy = partial(copied, scratch.arena, scratch.arena)
        try:
            one = yield from _best(endpoint, half, partial(copy, Copies.one(*ends)))
            many = yield from _best(endpoint, half, partial(copy, _scattered(*ends)))
        finally:
            scratch.give(slot)
        endpoint.copy_speed = _speed(endpoint.name, one, many, _scattered(*ends))
    return endpoint.copy_speed


def _scattered(source: int, destination: int, nbytes: int) -> Copies:
    """The bytes in short copies, of which no two can be made one: the last is put first."""
    short = max(1, nbytes // PROBE_COPIES)
    starts = np.arange(nbytes // short, dtype=np.int64) * short
    return Copies(source + starts, destination + starts[::-1], np.full(len(starts), short))


def _speed(name: str, one: float, many: float, copies: Copies) -> LinkSpeed:
    """What a copy costs more, by the rates of a single long one and of these."""
    more = copies.total / many - copies.total / one
    return LinkSpeed(name=name, bytes_per_second=one, seconds_per_copy=max(0.0, more / len(copies)))


def _rate(
    endpoint: Endpoint, direction: Direction, card: Card, kinds: Kinds, copies: Copies
) -> Story[float]:
    """Bytes per second, the best of several."""

    def move() -> Story[None]:
        return moved(endpoint, direction, card.engine, kinds, copies, flights=[])

    return (yield from _best(endpoint, copies.total, move))


def _best(endpoint: Endpoint, nbytes: int, move: Callable[[], Story[None]]) -> Story[float]:
    best = 0.0
    for _ in range(PROBES):
        started = endpoint.clock()
        yield from move()
        best = max(best, nbytes / max(endpoint.clock() - started, 1e-9))
    return best
