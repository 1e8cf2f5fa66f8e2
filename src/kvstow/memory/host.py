"""Copies inside host memory."""

from ctypes import memmove

import numpy as np

from kvstow.memory.moves import Spans
from kvstow.memory.stream import LINE, streamer
from kvstow.plan.view import Ints

STREAM_BYTES = 8 << 20
"""Copies of more than this in all leave the cache alone: they would only sweep it."""

LONG_BYTES = 16 << 10
"""Single moves from this length on are streamed; what is shorter, the C library copies."""


def move(source: int, destination: int, moves: Spans) -> None:
    """Copy every move's bytes between the memory at two base addresses."""
    starts, places = moves.source + source, moves.destination + destination
    long = moves.nbytes >= LONG_BYTES
    stream = streamer() if int(moves.nbytes.sum()) > STREAM_BYTES else None
    if stream is None or not long.any():
        _one_by_one(starts, places, moves.nbytes)
        return
    rest = ~long
    _one_by_one(starts[rest], places[rest], moves.nbytes[rest])
    starts, places, nbytes = starts[long], places[long], moves.nbytes[long]
    head = -places % LINE
    body = (nbytes - head) // LINE * LINE
    tail = nbytes - head - body
    lines, rows = places + head, starts + head
    stream(lines, rows, body)
    _one_by_one(starts, places, head)
    _one_by_one(rows + body, lines + body, tail)


def _one_by_one(starts: Ints, places: Ints, nbytes: Ints) -> None:
    some = np.flatnonzero(nbytes)
    for start, place, length in zip(
        starts[some].tolist(), places[some].tolist(), nbytes[some].tolist(), strict=True
    ):
        memmove(place, start, length)
