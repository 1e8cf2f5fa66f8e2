"""Copies that touch a CUDA device: the runtime's batched memcpy, and kernels, on a side stream."""

import ctypes
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kvstow.errors import CopyError
from kvstow.memory.arena import Arena
from kvstow.memory.moves import Spans, merged
from kvstow.plan.view import align_up

CudaMethod = Literal["batch", "kernel", "staged", "plain"]

_ANY_DIRECTION = 4  # cudaMemcpyDefault
_AFTER_STREAM = 1  # cudaMemcpySrcAccessOrderStream


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """Work on a stream up to an event; `kept` is what the work needs until then."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    kept: tuple[torch.Tensor, ...]

    def over(self) -> bool:
        return self.event.query()

    def wait(self) -> bool:
        self.event.synchronize()
        return True

    def join(self) -> None:
        """The current stream's further work starts after the event."""
        torch.cuda.current_stream(self.stream.device).wait_event(self.event)


def start(
    source: Arena,
    destination: Arena,
    moves: Spans,
    method: CudaMethod,
    stream: torch.cuda.Stream | None,
) -> Running:
    """Submit the moves to a stream that goes on after the current streams' present work."""
    devices = [arena.device for arena in (source, destination) if arena.device.type == "cuda"]
    with torch.cuda.device(devices[0]):
        side = torch.cuda.Stream(devices[0]) if stream is None else stream
        for device in devices:
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            kept = _submitted(source, destination, moves, method, side)
        for arena in (source, destination):
            if arena.device.type == "cuda":
                arena.bytes.record_stream(side)
        event = torch.cuda.Event()
        event.record(side)
    return Running(side, event, kept)


def _submitted(
    source: Arena, destination: Arena, moves: Spans, method: CudaMethod, stream: torch.cuda.Stream
) -> tuple[torch.Tensor, ...]:
    if not len(moves.source):
        return ()
    match method:
        case "plain":
            one_by_one(source.address, destination.address, moves, stream.cuda_stream)
            return ()
        case "batch":
            _batched(source.address, destination.address, moves, stream)
            return ()
        case "kernel":
            return gather(source.bytes, destination.bytes, moves)
        case "staged":
            return _staged(source, destination, moves, stream.cuda_stream)


# ── the runtime's own copies ──────────────────────────────────────────────────────────────


def one_by_one(source: int, destination: int, moves: Spans, stream: int) -> None:
    """One asynchronous memcpy per move."""
    memcpy = runtime().cudaMemcpyAsync
    starts, places = (moves.source + source).tolist(), (moves.destination + destination).tolist()
    for start, place, nbytes in zip(starts, places, moves.nbytes.tolist(), strict=True):
        _succeed("cudaMemcpyAsync", memcpy(place, start, nbytes, _ANY_DIRECTION, stream))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes; the location hints matter for managed memory only."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def batch(source: int, destination: int, moves: Spans, stream: int) -> None:
    """All moves in one call. The legacy default stream does not take it."""
    if not has_batch():
        raise CopyError("this CUDA runtime has no batched memcpy\n\nhint: it came with 12.8")
    if stream == 0:
        raise CopyError("batched memcpy does not run on the legacy default stream")
    starts, places = moves.source + source, moves.destination + destination
    nbytes = np.ascontiguousarray(moves.nbytes)
    attributes, first = _Attributes(_AFTER_STREAM), ctypes.c_size_t(0)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = [
        pointer(places.ctypes.data), pointer(starts.ctypes.data), pointer(nbytes.ctypes.data),
        size(len(nbytes)), ctypes.byref(attributes), ctypes.byref(first), size(1),
    ]  # fmt: skip
    if _version("cudaRuntimeGetVersion") < 13000:  # it named the move that failed
        arguments.append(ctypes.byref(size(0)))
    status = runtime().cudaMemcpyBatchAsync(*arguments, pointer(stream))
    _succeed("cudaMemcpyBatchAsync", status)


BATCH_STREAMS = 4
"""Batches run side by side: the pause between two copies of one is filled by the others."""

OPENING = 8
"""One part in so many goes first: handing over a move costs the host about a microsecond, and
the device is busy with the opening while it takes in the rest."""


def _batched(source: int, destination: int, moves: Spans, stream: torch.cuda.Stream) -> None:
    """Batches on several streams, in two rounds; the stream goes on after all of them."""
    beside, lanes = _beside(stream), list[torch.cuda.Stream]()
    weights = [1] * BATCH_STREAMS + [OPENING - 1] * BATCH_STREAMS
    for i, part in enumerate(shares(moves, weights)):
        lanes.extend(itertools.islice(beside, 1))
        batch(source, destination, part, lanes[i % len(lanes)].cuda_stream)
    for lane in lanes[1:]:
        stream.wait_stream(lane)


def _beside(stream: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
    """The stream, then others that start where it stood, each made when it is asked for."""
    ready = stream.record_event()
    yield stream
    for _ in range(BATCH_STREAMS - 1):
        other = torch.cuda.Stream(stream.device)
        other.wait_event(ready)
        yield other


def shares(moves: Spans, weights: Sequence[int]) -> Iterator[Spans]:
    """The moves in order, in parts whose bytes are about as the weights; none without moves."""
    ends = np.cumsum(moves.nbytes)
    wanted = np.cumsum(weights[:-1]) * (int(ends[-1]) / sum(weights))
    edges = [0, *np.searchsorted(ends, wanted, side="right").tolist(), len(ends)]
    for low, high in itertools.pairwise(edges):
        if low < high:
            yield Spans(*(array[low:high] for array in moves))


def has_batch() -> bool:
    """Whether runtime and driver have the batched memcpy, which came with 12.8."""
    return min(_version("cudaRuntimeGetVersion"), _version("cudaDriverGetVersion")) >= 12080


@cache
def runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    torch.cuda.init()
    loaded = re.findall(r"\S*/libcudart\.so\S*", Path("/proc/self/maps").read_text())
    major = (torch.version.cuda or "").partition(".")[0]
    library = ctypes.CDLL(loaded[0] if loaded else f"libcudart.so.{major}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
    return library


@cache
def _version(question: str) -> int:
    """13000 for 13.0."""
    found = ctypes.c_int(0)
    _succeed(question, runtime()[question](ctypes.byref(found)))
    return found.value


def _succeed(what: str, status: int) -> None:
    if status:
        runtime().cudaGetLastError()  # the call's error, not the device's: not left to others
        raise CopyError(f"{what}: CUDA error {status}")


# ── kernels ───────────────────────────────────────────────────────────────────────────────

UNEVEN = 4
"""Moves of more than so many times the mean are cut, so that no program has most of the work."""


def gather(
    source: torch.Tensor, destination: torch.Tensor, moves: Spans
) -> tuple[torch.Tensor, ...]:
    """Copy by a kernel that reads and writes wherever the moves say, pinned memory included.

    The tensors that the kernel needs until it has run.
    """
    from kvstow.memory.kernels import TILE_BYTES, copy_moves

    word = word_bytes(source.data_ptr(), destination.data_ptr(), moves)
    mean = int(moves.nbytes.mean())
    limit = align_up(UNEVEN * mean, TILE_BYTES)
    even = moves if int(moves.nbytes.max()) <= limit else cut(moves, limit)
    table = torch.as_tensor(np.stack(even) // word)
    device = source.device if source.device.type == "cuda" else destination.device
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    copy_moves(source, destination, table, word, programs=-(-mean // TILE_BYTES))
    return (table,)


def word_bytes(source: int, destination: int, moves: Spans) -> int:
    """The longest word, of at most 16 bytes, at whose multiples everything starts and ends."""
    bits = source | destination | 16
    for array in moves:
        bits |= int(np.bitwise_or.reduce(array))
    return bits & -bits


def cut(moves: Spans, limit: int) -> Spans:
    """The same moves in pieces of at most `limit` bytes."""
    counts = -(-moves.nbytes // limit)
    first = np.cumsum(counts) - counts
    which = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(len(which)) - first[which]) * limit
    return Spans(
        moves.source[which] + start,
        moves.destination[which] + start,
        np.minimum(moves.nbytes[which] - start, limit),
    )


def _staged(
    source: Arena, destination: Arena, moves: Spans, stream: int
) -> tuple[torch.Tensor, ...]:
    """Through a device buffer in the order of the host's side, so that the bus sees long runs."""
    total = int(moves.nbytes.sum())
    to_host = destination.device.type == "cpu"
    device = source.device if to_host else destination.device
    staging = torch.empty(total, dtype=torch.uint8, device=device)
    order = np.argsort(moves.destination if to_host else moves.source, kind="stable")
    ordered = Spans(*(array[order] for array in moves))
    places = np.cumsum(ordered.nbytes) - ordered.nbytes
    if to_host:
        kept = gather(source.bytes, staging, Spans(ordered.source, places, ordered.nbytes))
        bus = merged(Spans(places, ordered.destination, ordered.nbytes))
        _bus(staging.data_ptr(), destination.address, bus, stream)
    else:
        bus = merged(Spans(ordered.source, places, ordered.nbytes))
        _bus(source.address, staging.data_ptr(), bus, stream)
        kept = gather(staging, destination.bytes, Spans(places, ordered.destination,
                                                        ordered.nbytes))  # fmt: skip
    return (staging, *kept)


def _bus(source: int, destination: int, moves: Spans, stream: int) -> None:
    if has_batch() and stream:
        batch(source, destination, moves, stream)
    else:
        one_by_one(source, destination, moves, stream)
