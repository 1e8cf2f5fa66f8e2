"""Copies that touch a CUDA device: the runtime's batched memcpy, and kernels, on a side stream."""

import ctypes
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kvstow.errors import CopyError
from kvstow.memory.arena import Arena
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints, align_up
from kvstow.route.copies import Copies, cut
from kvstow.route.lanes import Grid, Lanes

CudaMethod = Literal["batch", "kernel", "plain"]

_ANY_DIRECTION = 4  # cudaMemcpyDefault
_AFTER_STREAM = 1  # cudaMemcpySrcAccessOrderStream


@dataclass(frozen=True, slots=True, eq=False)
class StreamWork:
    """Work on a stream up to an event; `kept` is what the work needs until then."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    kept: Sequence[torch.Tensor]


def start_grids(
    source: Arena, destination: Arena, grids: Sequence[Grid], programs: int
) -> StreamWork:
    """Submit grids inside one device, a launch each, to a stream that goes on after the current
    one's present work: what is uploaded in that one meanwhile does not wait for the copy."""
    with torch.cuda.device(destination.device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with _all_or_nothing(side), torch.cuda.stream(side):
            kept = launch_grids(source.bytes, destination.bytes, grids, programs)
            event = torch.cuda.Event()
            event.record(side)
    return StreamWork(side, event, kept)


@contextmanager
def _all_or_nothing(stream: torch.cuda.Stream) -> Generator[None]:
    """Where not all of it can be submitted, nothing of it is under way any more once that is
    raised: nobody gets a handle to wait on."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # a device that has failed copies nothing
            stream.synchronize()
        raise


def start(
    source: Arena,
    destination: Arena,
    copies: Copies,
    method: CudaMethod,
    stream: torch.cuda.Stream | None,
) -> StreamWork:
    """Submit the copies to a stream that goes on after the current streams' present work."""
    arenas = [arena for arena in (source, destination) if arena.device.type == "cuda"]
    with torch.cuda.device(arenas[0].device):
        side = torch.cuda.Stream() if stream is None else stream
        for arena in arenas:
            side.wait_stream(torch.cuda.current_stream(arena.device))
        kept: list[torch.Tensor] = []
        with _all_or_nothing(side):
            if method == "kernel" and len(copies):
                with torch.cuda.stream(side):
                    kept.append(gather(source.bytes, destination.bytes, copies))
            elif len(copies):
                submit = batch if method == "batch" else one_by_one
                submit(copies.moved(source.address, destination.address), side.cuda_stream)
            event = torch.cuda.Event()
            event.record(side)
    for arena in arenas:
        arena.bytes.record_stream(side)
    return StreamWork(side, event, kept)


# ── the runtime's own copies ──────────────────────────────────────────────────────────────


def one_by_one(copies: Copies, stream: int) -> None:
    """One asynchronous memcpy per copy, between addresses."""
    memcpy = runtime().cudaMemcpyAsync
    columns = copies.destination.tolist(), copies.source.tolist(), copies.nbytes.tolist()
    for place, start, nbytes in zip(*columns, strict=True):
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


def batch(copies: Copies, stream: int) -> None:
    """Batched memcpy between addresses, one batch after the other. The legacy default stream does
    not take it."""
    if not has_batch():
        raise CopyError("this CUDA runtime has no batched memcpy\n\nhint: it came with 12.8")
    if stream == 0:
        raise CopyError("batched memcpy does not run on the legacy default stream")
    columns = (copies.destination, copies.source, copies.nbytes)
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
    version = ctypes.c_int(0)
    _succeed(question, runtime()[question](ctypes.byref(version)))
    return version.value


def _succeed(what: str, status: int) -> None:
    if status:
        runtime().cudaGetLastError()  # the call's error, not the device's: not left to others
        raise CopyError(f"{what}: CUDA error {status}")


# ── kernels ───────────────────────────────────────────────────────────────────────────────

UNEVEN = 4
"""Copies of more than so many times the mean are cut, so that no program has most of the work."""

MOST_BYTES = 1 << 30
"""Copies are cut where they are longer than so much, too: a kernel counts inside one in 32 bits."""

MOST_PROGRAMS = 264
"""Programs of a copy: two per multiprocessor of an H200, where more were not faster."""


def gather(
    source: torch.Tensor, destination: torch.Tensor, copies: Copies, programs: int = MOST_PROGRAMS
) -> torch.Tensor:
    """Copy by a kernel that reads and writes wherever the copies say, pinned memory included.

    What the kernel needs until it has run.
    """
    from kvstow.memory.kernels.copy import TILE_BYTES, copy_lanes

    numbers = copies.source, copies.destination, copies.nbytes
    word = word_bytes(source.data_ptr(), destination.data_ptr(), *numbers)
    mean = copies.total // len(copies)
    even = cut(copies, min(align_up(UNEVEN * mean, TILE_BYTES), MOST_BYTES))
    still = np.zeros_like(even.nbytes)
    columns = even.source, even.destination, even.nbytes, still, still
    device = source.device if source.device.type == "cuda" else destination.device
    table = torch.as_tensor(np.concatenate((*columns, [0, 0])) // word)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    lanes, pair = table[:-2].view(5, -1), table[-2:].view(2, 1)
    longest = int(even.nbytes.max())
    copy_lanes(source, destination, pair, lanes, word, longest=longest, programs=programs)
    return table


def launch_grids(
    source: torch.Tensor,
    destination: torch.Tensor,
    grids: Sequence[Grid],
    programs: int = MOST_PROGRAMS,
) -> list[torch.Tensor]:
    """Copy what a route has not written out, inside one device: only the pairs of blocks go there
    each time, all of them before the first launch, which an upload would wait for.

    What the kernels need until they have run: the lanes, too, which others may let go of
    meanwhile, and which are another stream's memory.
    """
    from kvstow.memory.kernels.copy import copy_lanes

    if not grids:
        return []
    most = word_bytes(source.data_ptr(), destination.data_ptr())
    kinds = [_lanes_there(grid.lanes, most, source.device) for grid in grids]
    numbers = np.concatenate([ids for grid in grids for ids in (grid.source, grid.destination)])
    pairs = torch.as_tensor(numbers, device=source.device)
    ends = accumulate((2 * len(grid.source) for grid in grids), initial=0)
    for (word, lanes, longest), (first, end) in zip(kinds, pairwise(ends), strict=True):
        copy_lanes(
            source,
            destination,
            pairs[first:end].view(2, -1),
            lanes,
            word,
            longest=longest,
            programs=programs,
        )
    return [pairs, *(lanes for _, lanes, _ in kinds)]


@lru_cache(maxsize=256)
def _lanes_there(lanes: Lanes, most: int, device: torch.device) -> tuple[int, torch.Tensor, int]:
    """The words that lanes can be copied in, of at most so many bytes, the lanes on a device, and
    the length of the longest."""
    copies = lanes.copies
    columns = (
        copies.source,
        copies.destination,
        copies.nbytes,
        lanes.source_stride,
        lanes.destination_stride,
    )
    word = min(most, word_bytes(*columns))
    table = torch.as_tensor(np.stack(columns) // word, device=device)
    return word, table, int(copies.nbytes.max())


def compile_copies(memory: torch.Tensor, layout: Layout) -> None:
    """Compile what copies of a layout's blocks and tokens run on a device, by copying a few bytes
    of it: for words as long as a cell's, and longer."""
    from kvstow.memory.kernels.copy import WIDTHS, WORDS, copy_lanes

    numbers = [
        (*pages.offsets, *astuple(pages.place), pages.spec.cell_bytes)
        for group in layout.page_sets
        for pages in group
    ]
    least = word_bytes(memory.data_ptr(), *map(np.array, numbers))
    room = torch.empty(max(WORDS), dtype=torch.uint8, device=memory.device)
    pair = torch.tensor([[0], [0]], device=memory.device)
    lane = torch.tensor([[0], [0], [1], [0], [0]], device=memory.device)
    for word in WORDS:
        for width in WIDTHS:
            if word >= least:
                copy_lanes(memory, room, pair, lane, word, longest=word, programs=1, width=width)
    if memory.device.type == "cuda":
        torch.cuda.current_stream(memory.device).synchronize()


def word_bytes(*numbers: int | Ints) -> int:
    """The longest word, of at most 16 bytes, of which all numbers are multiples."""
    bits = 16
    for number in numbers:
        bits |= int(np.bitwise_or.reduce(number, axis=None))
    return bits & -bits
