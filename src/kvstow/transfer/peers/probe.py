"""Which way bytes go: measured at first contact, because it can be a factor of 300.

Every way is measured with one long piece and with many short ones.
"""

from typing import TYPE_CHECKING

import numpy as np

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.route.ways import PROBE_BYTES, PROBE_COPIES, SLOTS_SHARE, Path, Rates
from kvstow.transfer.channel.messages import AskProbe, Card, TellProbe
from kvstow.transfer.loop import Routine
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.flight import Flight, move_copies, when_quiet
from kvstow.transfer.transport.base import Direction, Kinds

if TYPE_CHECKING:
    from kvstow.transfer.peers.outgoing import Outgoing
    from kvstow.transfer.serve import Incoming

LONG_PROBES, SHORT_PROBES = 5, 2
"""How often each is measured. The first one also connects, so it never counts alone."""

UNMEASURED = Path()
"""Of a peer that is mapped, or where a way is forced."""


def measure_path(endpoint: Endpoint, peer: "Outgoing", card: Card) -> Routine[Path]:
    """Read a few megabytes several times, in one piece and in many, then have as much written.
    TransferError if the peer cannot be read."""
    if endpoint.options.direction is not None:
        return UNMEASURED
    size = min(PROBE_BYTES, card.probe.nbytes)
    read = yield from _rates(
        endpoint, "read", card, (card.probe.address, endpoint.probe.data_ptr(), size)
    )
    between_hosts = read.long
    if "VRAM" in endpoint.kinds(card):
        between_hosts = yield from _slot_rate(endpoint, card, size)
    peer.send(AskProbe(size))
    answer = yield from peer.mailbox.wait(TellProbe)
    write = Rates(*(size / seconds if seconds > 0 else 0.0 for seconds in answer.seconds))
    return Path(read=read, write=write, slots=SLOTS_SHARE * between_hosts)


def _slot_rate(endpoint: Endpoint, card: Card, nbytes: int) -> Routine[float]:
    """Bytes per second from a peer's slots to ours: into one that nobody else has meanwhile."""
    stage = endpoint.stage
    slot = yield from stage.take(card.engine)
    flights: list[Flight] = []
    try:
        size = min(nbytes, stage.slot_bytes, card.stage.nbytes)
        one = Copies.one(card.stage.address, stage.arena.address + slot, size)
        return (yield from _best(endpoint, "read", card, Kinds(), one, LONG_PROBES, flights))
    finally:
        when_quiet(flights, lambda: stage.give(slot))


def write_probe(endpoint: Endpoint, peer: "Incoming", nbytes: int) -> Routine[None]:
    """Write a few megabytes into a consumer's probe memory, several times, and tell it how
    long that took."""
    card = peer.card
    size = min(PROBE_BYTES, max(1, nbytes), card.probe.nbytes)
    try:
        peer.attach()
        rates = yield from _rates(
            endpoint, "write", card, (endpoint.probe.data_ptr(), card.probe.address, size)
        )
    except TransferError:
        peer.send(TellProbe((-1.0, -1.0)))
        raise
    peer.write_rate = rates.long
    peer.send(TellProbe((nbytes / rates.long, nbytes / rates.short)))


def _rates(
    endpoint: Endpoint, direction: Direction, card: Card, ends: tuple[int, int, int]
) -> Routine[Rates]:
    """What one piece and many of them bring, from one address to another."""
    kinds, one, many = endpoint.kinds(card), Copies.one(*ends), _scattered(*ends)
    long = yield from _best(endpoint, direction, card, kinds, one, LONG_PROBES, [])
    short = yield from _best(endpoint, direction, card, kinds, many, SHORT_PROBES, [])
    return Rates(long, short)


def _scattered(source: int, destination: int, nbytes: int) -> Copies:
    """The bytes in short pieces, of which no two can be made one: the last is put first."""
    short = max(1, nbytes // PROBE_COPIES)
    starts = np.arange(nbytes // short, dtype=np.int64) * short
    return Copies(source + starts, destination + starts[::-1], np.full(len(starts), short))


def _best(
    endpoint: Endpoint,
    direction: Direction,
    card: Card,
    kinds: Kinds,
    copies: Copies,
    times: int,
    flights: list[Flight],
) -> Routine[float]:
    """Bytes per second, the best of several times. `flights` are the posts."""
    best = 0.0
    for _ in range(times):
        started = endpoint.clock()
        yield from move_copies(endpoint, direction, card.engine, kinds, copies, flights=flights)
        best = max(best, copies.total / max(endpoint.clock() - started, 1e-9))
    return best
