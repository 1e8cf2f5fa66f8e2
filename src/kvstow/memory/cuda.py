"""Copies that touch a CUDA device: the runtime's batched memcpy, and kernels, on a side stream."""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kvstow.errors import CopyError
from kvstow.memory.arena import Arena
from kvstow.plan.view import align_up
from kvstow.route.blocks import Overlap
from kvstow.route.copies import Copies, cut, joined
from kvstow.route.route import Route

CudaMethod = Literal["batch", "kernel", "plain"]

_ANY_DIRECTION = 4  # cudaMemcpyDefault
_AFTER_STREAM = 1  # cudaMemcpySrcAccessOrderStream


@dataclass(frozen=True, slots=True, eq=False)
class StreamWork:
    """Work on a stream up to an event; `kept` is what the work needs until then."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    kept: tuple[torch.Tensor, ...]

    def over(self) -> bool:
        return self.event.query()

    def wait(self) -> bool:
        self.event.synchronize()
        return True


def start(
    source: Arena,
    destination: Arena,
    copies: Copies,
    method: CudaMethod,
    stream: torch.cuda.Stream | None,
) -> StreamWork:
    """Submit the copies to a stream that goes on after the current streams' present work."""
    devices = [arena.device for arena in (source, destination) if arena.device.type == "cuda"]
    with torch.cuda.device(devices[0]):
        side = torch.cuda.Stream() if stream is None else stream
        for device in devices:
            side.wait_stream(torch.cuda.current_stream(device))
        kept = _submitted(source, destination, copies, method, side)
        event = torch.cuda.Event()
        event.record(side)
    for arena in (source, destination):
        if arena.device.type == "cuda":
            arena.bytes.record_stream(side)
    return StreamWork(side, event, kept)


def _submitted(
    source: Arena, destination: Arena, copies: Copies, method: CudaMethod, stream: torch.cuda.Stream
) -> tuple[torch.Tensor, ...]:
    if not len(copies):
        return ()
    match method:
        case "plain":
            one_by_one(source.address, destination.address, copies, stream.cuda_stream)
            return ()
        case "batch":
            batch(source.address, destination.address, copies, stream.cuda_stream)
            return ()
        case "kernel":
            with torch.cuda.stream(stream):
                return gather(source.bytes, destination.bytes, copies)


# ── the runtime's own copies ──────────────────────────────────────────────────────────────


def one_by_one(source: int, destination: int, copies: Copies, stream: int) -> None:
    """One asynchronous memcpy per copy."""
    memcpy = runtime().cudaMemcpyAsync
    starts, places = (copies.source + source).tolist(), (copies.destination + destination).tolist()
    for start, place, nbytes in zip(starts, places, copies.nbytes.tolist(), strict=True):
        _succeed("cudaMemcpyAsync", memcpy(place, start, nbytes, _ANY_DIRECTION, stream))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes; the location hints matter for managed memory only."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


OPENING = 4
"""Copies of the first batch. Handing over a copy costs the host about a microsecond, and the
device starts on a batch when it has all of it: so it is given few to begin with."""

GROWTH = 4
"""How many times as many each batch has as the one before: the device takes longer over a copy
of the one than the host over as many of the next."""


def batch(source: int, destination: int, copies: Copies, stream: int) -> None:
    """Batched memcpy, one batch after the other. The legacy default stream does not take it."""
    if not has_batch():
        raise CopyError("this CUDA runtime has no batched memcpy\n\nhint: it came with 12.8")
    if stream == 0:
        raise CopyError("batched memcpy does not run on the legacy default stream")
    columns = (copies.destination + destination, copies.source + source, copies.nbytes)
    arrays = [np.ascontiguousarray(column, np.int64) for column in columns]
    addresses = [array.ctypes.data for array in arrays]
    attributes, first = _Attributes(_AFTER_STREAM), ctypes.c_size_t(0)
    rest = [ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]
    if _version("cudaRuntimeGetVersion") < 13000:  # it named the copy that failed
        rest.append(ctypes.byref(ctypes.c_size_t(0)))
    call = runtime().cudaMemcpyBatchAsync
    for low, high in rounds(len(copies)):
        lists = [ctypes.c_void_p(address + 8 * low) for address in addresses]
        status = call(*lists, ctypes.c_size_t(high - low), *rest, ctypes.c_void_p(stream))
        _succeed("cudaMemcpyBatchAsync", status)


def rounds(count: int) -> Iterator[tuple[int, int]]:
    """So many copies in order, in batches that grow."""
    low, size = 0, OPENING
    while low < count:
        yield low, min(low + size, count)
        low, size = low + size, size * GROWTH


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
"""Copies of more than so many times the mean are cut, so that no program has most of the work."""

MOST_PROGRAMS = 264
"""Programs of a copy: two per multiprocessor of an H200, where more were not faster."""


def gather(
    source: torch.Tensor, destination: torch.Tensor, copies: Copies, programs: int = MOST_PROGRAMS
) -> tuple[torch.Tensor, ...]:
    """Copy by a kernel that reads and writes wherever the copies say, pinned memory included.

    The tensors that the kernel needs until it has run.
    """
    from kvstow.memory.kernels.copy import copy_runs

    table, word, longest = _table(source, destination, copies)
    copy_runs(source, destination, table, word, longest=longest, programs=programs)
    return (table,)


def _table(
    source: torch.Tensor, destination: torch.Tensor, copies: Copies
) -> tuple[torch.Tensor, int, int]:
    """The kernel's table of the copies, what it counts in, and the longest run in bytes."""
    from kvstow.memory.kernels.copy import TILE_BYTES

    word = word_bytes(source.data_ptr(), destination.data_ptr(), copies)
    even = cut(copies, align_up(UNEVEN * (copies.total // len(copies)), TILE_BYTES))
    columns = np.empty((3, len(even)), np.int64)
    for row, places in zip(columns, (even.source, even.destination, even.nbytes), strict=True):
        np.right_shift(places, word.bit_length() - 1, out=row)
    table = torch.as_tensor(columns)
    device = source.device if source.device.type == "cuda" else destination.device
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, word, int(even.nbytes.max())


def warm_up(source: torch.Tensor, route: Route) -> None:
    """Compile what copies of a route run on a device, by gathering a few of them from there.

    Those of whole blocks and those of one token start and end at multiples of every word that
    any of its copies do.
    """
    from kvstow.memory.kernels.copy import WIDTHS, copy_runs

    for copies in _examples(route):
        places = copies.nbytes.cumsum() - copies.nbytes
        room = torch.empty(copies.total, dtype=torch.uint8, device=source.device)
        table, word, longest = _table(source, room, Copies(copies.source, places, copies.nbytes))
        for width in WIDTHS:
            copy_runs(
                source, room, table, word, longest=longest, programs=MOST_PROGRAMS, width=width
            )
        if source.device.type == "cuda":
            torch.cuda.current_stream(source.device).synchronize()


def _examples(route: Route) -> Iterator[Copies]:
    """The copies of all kinds of full block pairs, and those of one token; in blocks 1."""
    cells = (pair.lanes(Overlap(0, 0, 1)) for pair in route.pairs)
    for kinds in (route.lanes, tuple(cells)):
        parts = [lanes.copies for lanes in kinds]
        places = [lanes.copies.source + lanes.source_stride for lanes in kinds]
        if parts:
            yield replace(joined(parts), source=np.concatenate(places))


def word_bytes(source: int, destination: int, copies: Copies) -> int:
    """The longest word, of at most 16 bytes, at whose multiples everything starts and ends."""
    bits = source | destination | 16
    for array in (copies.source, copies.destination, copies.nbytes):
        bits |= int(np.bitwise_or.reduce(array))
    return bits & -bits
