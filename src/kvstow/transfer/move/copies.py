"""Copies on their way: posts started a few at a time, so that a stop is never far."""

from collections import deque
from typing import TYPE_CHECKING

from kvstow.route.copies import Copies, chunks
from kvstow.transfer.loop import AT_ONCE, NOW_AND_THEN, SOON, Routine
from kvstow.transfer.transport.base import Direction, Kinds

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.peers.flight import Flight

IN_FLIGHT = 3
LEAST_CHUNK = 16 << 20
USUAL_CHUNK = 256 << 20
MOST_CHUNK = 1 << 30
CHUNK_SECONDS = 0.08
"""A post may block its caller while it copies: it shall not be longer than about this."""

STALLED_SECONDS = 8 * CHUNK_SECONDS
"""After so long without one that ended, posts are looked at only now and then."""


def chunk_bytes(bytes_per_second: float, kinds: Kinds) -> int:
    """How much to post at once over a path of this rate; 0 where it is not known."""
    if bytes_per_second == 0:
        return MOST_CHUNK if "VRAM" in kinds else USUAL_CHUNK
    return int(min(MOST_CHUNK, max(LEAST_CHUNK, bytes_per_second * CHUNK_SECONDS)))


def moved(
    endpoint: "Endpoint",
    direction: Direction,
    peer: str,
    kinds: Kinds,
    copies: Copies,
    *,
    flights: "list[Flight]",
    chunk: int = MOST_CHUNK,
) -> Routine[None]:
    """Copy between addresses; return when all bytes have arrived. Raises TransferError.

    Every post is put into `flights` before it starts: whoever gives up knows what is under way.
    """
    clock = endpoint.clock
    pause = SOON if "VRAM" in kinds else AT_ONCE  # a device copies on its own
    # all posts before the first starts: afterwards caches are full of the bytes they move
    ready: deque[Flight] = deque()
    running: list[Flight] = []
    try:
        for part in chunks(copies, chunk):
            ready.append(endpoint.post(direction, peer, kinds, part))
        moved_at = clock()
        while ready or running:
            until = clock() + CHUNK_SECONDS / 2  # some posts copy within `start`
            while ready and len(running) < IN_FLIGHT and clock() < until:
                flight = ready.popleft()
                flights.append(flight)
                running.append(flight)
                flight.start()
            left = [flight for flight in running if not flight.poll()]
            if len(left) < len(running):
                running, moved_at = left, clock()
            if ready or running:
                yield pause if clock() - moved_at < STALLED_SECONDS else NOW_AND_THEN
    finally:
        for flight in ready:
            flight.drop()
