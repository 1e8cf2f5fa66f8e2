"""Copies inside host memory."""

from ctypes import memmove

from kvstow.memory.moves import Spans


def move(source: int, destination: int, moves: Spans) -> None:
    """Copy every move's bytes between the memory at two base addresses."""
    starts = (moves.source + source).tolist()
    places = (moves.destination + destination).tolist()
    for start, place, nbytes in zip(starts, places, moves.nbytes.tolist(), strict=True):
        memmove(place, start, nbytes)
