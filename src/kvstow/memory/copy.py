"""Copies between arenas of one machine: one submission for all moves, and a handle on it.

    host   → host    memmove, finished when `copy` returns
    host  ⇄  device  CUDA's batched memcpy; many short pieces: a kernel that reads or writes
                     pinned memory itself
    device → device  a gather kernel

On CUDA a copy runs on a stream of its own that starts after what the current stream had been
given by then. Nothing is copied before all moves have been found to lie inside both arenas.
"""

from collections.abc import Callable
from ctypes import memmove
from dataclasses import dataclass
from typing import Literal

import torch

from kvstow.errors import CopyError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.moves import Spans, check_apart, check_inside, check_unread, merged, spans
from kvstow.route.copies import Copies

Method = Literal["memmove", "batch", "kernel", "plain"]


@dataclass(frozen=True, slots=True, eq=False)
class CopyHandle:
    """A copy under way; it keeps both arenas until it is over."""

    source: Arena
    destination: Arena
    num_moves: int
    nbytes: int
    method: Method
    running: cuda.StreamWork | None

    def poll(self) -> bool:
        """Whether all bytes have arrived. Raises CopyError once it is known that they won't."""
        return self.running is None or self._watched(self.running.over)

    def wait(self) -> None:
        """Return when all bytes have arrived; CopyError if they don't."""
        if self.running is not None:
            self._watched(self.running.wait)

    def join(self) -> None:
        """Let the current stream's further work start after this copy; the host goes on."""
        if self.running is not None:
            self.running.join()

    def _watched(self, question: Callable[[], bool]) -> bool:
        try:
            return question()
        except RuntimeError as error:  # what torch raises for any CUDA error
            raise CopyError(
                f"{self.num_moves} moves, {self.nbytes} bytes, {self.source.device} → "
                f"{self.destination.device} ({self.method}): {error}"
            ) from error


def copy(
    source: Arena,
    destination: Arena,
    moves: Copies | Spans,
    *,
    method: Method | Literal["auto"] = "auto",
    stream: torch.cuda.Stream | None = None,
) -> CopyHandle:
    """Start moving bytes from one arena to another.

    Copies may come in any order; destinations must not overlap each other, nor sources when
    both arenas lie in the same memory.
    """
    checked = _checked(source, destination, spans(moves))
    num_moves, nbytes = len(checked.nbytes), int(checked.nbytes.sum())
    mean = nbytes // max(1, num_moves)
    chosen = choose_method(source, destination, mean) if method == "auto" else method
    running = _started(source, destination, checked, chosen, stream)
    return CopyHandle(source, destination, num_moves, nbytes, chosen, running)


SHORT_BYTES = 128 << 10
"""Mean length of a move from which CUDA's batched memcpy beats a kernel on pinned memory: on one
H200, moves of 16 KiB 14 to 16 GB/s against 20 to 25, of 128 KiB 48 against 48, of 1 MiB 54
against 49."""


def choose_method(source: Arena, destination: Arena, mean_bytes: int) -> Method:
    """The fastest way for moves of that mean length, by what was measured on one H200
    (bench/results)."""
    kinds = (source.device.type, destination.device.type)
    if kinds == ("cpu", "cpu"):
        return "memmove"
    if kinds == ("cuda", "cuda"):
        return "kernel" if source.device == destination.device else "plain"
    host = source if source.device.type == "cpu" else destination
    if not host.pinned:
        return "plain"
    return "batch" if mean_bytes >= SHORT_BYTES and cuda.has_batch() else "kernel"


def _checked(source: Arena, destination: Arena, moves: Spans) -> Spans:
    """The moves, joined; between device and host, in the order of the host's side, which the
    bus likes best."""
    check_inside(moves.source, moves.nbytes, source.regions, "source")
    check_inside(moves.destination, moves.nbytes, destination.regions, "destination")
    to_host = (source.device.type, destination.device.type) == ("cuda", "cpu")
    moves = merged(moves, along=int(to_host))
    check_apart(moves.destination, moves.nbytes, "destination")
    if source.device == destination.device and _meet(source, destination):
        check_unread(
            moves.source + source.address, moves.destination + destination.address, moves.nbytes
        )
    return moves


def _meet(source: Arena, destination: Arena) -> bool:
    """Whether the two lie in memory that overlaps, from end to end."""
    return (
        source.address < destination.address + destination.nbytes
        and destination.address < source.address + source.nbytes
    )


def _started(
    source: Arena,
    destination: Arena,
    moves: Spans,
    method: Method,
    stream: torch.cuda.Stream | None,
) -> cuda.StreamWork | None:
    on_host = source.device.type == destination.device.type == "cpu"
    if on_host != (method == "memmove"):
        raise CopyError(f"{method!r} does not copy from {source.device} to {destination.device}")
    if method == "memmove":
        _move_on_host(source.address, destination.address, moves)
        return None
    return cuda.start(source, destination, moves, method, stream)


def _move_on_host(source: int, destination: int, moves: Spans) -> None:
    starts, places = (moves.source + source).tolist(), (moves.destination + destination).tolist()
    for start, place, nbytes in zip(starts, places, moves.nbytes.tolist(), strict=True):
        memmove(place, start, nbytes)
