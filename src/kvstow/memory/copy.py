"""Copies between arenas of one machine: one submission for all of them, and a handle on it.

    host   → host    memmove, finished when `copy` returns
    host  ⇄  device  CUDA's batched memcpy; many short pieces: a kernel that reads or writes
                     pinned memory itself
    device → device  the same kernel

On CUDA a copy runs on a stream of its own that starts after what the current stream had been
given by then. Nothing is copied before all of it has been found to lie inside both arenas.
"""

from collections.abc import Callable, Sequence
from ctypes import c_char, memmove
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import BlockError, CopyError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena, checked_ids
from kvstow.plan.layout import Layout, page_runs
from kvstow.plan.view import Ints, Run
from kvstow.route.copies import Copies, cut
from kvstow.route.lanes import Grid

Method = Literal["memmove", "batch", "kernel", "plain"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class CopyHandle:
    """A copy under way; it keeps both arenas until it is over."""

    source: Arena
    destination: Arena
    num_copies: int
    nbytes: int
    method: Method
    work: cuda.StreamWork | None
    """None where the copy was over when it was returned."""

    def poll(self) -> bool:
        """Whether all bytes have arrived. Raises CopyError once it is known that they won't."""
        return self.work is None or self._checked(self.work.event.query)

    def wait(self) -> None:
        """Return when all bytes have arrived; CopyError if they don't."""
        if self.work is not None:
            self._checked(self.work.event.synchronize)

    def _checked(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except RuntimeError as error:  # what torch raises for any CUDA error
            raise CopyError(
                f"{self.num_copies} copies, {self.nbytes} bytes, {self.source.device} → "
                f"{self.destination.device} ({self.method}): {error}"
            ) from error


def copy(
    source: Arena,
    destination: Arena,
    copies: Copies | None = None,
    *,
    blocks: npt.ArrayLike | None = None,
    into: npt.ArrayLike | None = None,
    group: int | str | None = None,
    method: Method | Literal["auto"] = "auto",
    stream: torch.cuda.Stream | None = None,
) -> CopyHandle:
    """Start copying bytes from one arena to another.

    Whole `blocks` of a group go `into` as many blocks of an arena with the same rows; `group`
    may be left out where there is one. Between any other two layouts a route says which bytes go
    where: `copies` are offsets from the arenas' starts, in any order. Destinations must
    overlap neither each other nor, when both arenas lie in the same memory, a source.

    >>> from kvstow.plan.group import grouped
    >>> from kvstow.plan.models import model_layers
    >>> from kvstow.plan.pack import packed
    >>> groups = grouped(model_layers("Llama-3.2-1B").layers)
    >>> here, there = Arena(packed(groups, num_slabs=8)), Arena(packed(groups, num_slabs=16))
    >>> here.tensor("model.layers.0.self_attn")[2] = 1.5
    >>> done = copy(here, there, blocks=[1, 2, 3], into=[9, 10, 4])
    >>> done.wait()
    >>> done.num_copies, done.nbytes                    # neighbours on both sides are one copy
    (2, 1572864)
    >>> bool((there.tensor("model.layers.0.self_attn")[10] == 1.5).all())
    True
    """
    if (copies is None) == (blocks is None) or (blocks is None) != (into is None):
        raise CopyError("a copy needs either `copies`, or `blocks` and `into`, and not both")
    if copies is None:
        assert blocks is not None
        assert into is not None
        number = source.only_group() if group is None else source.group(group)
        copies = block_copies(source.layout, number, blocks, into, destination.layout)
    copies = _checked(source, destination, copies)
    num_copies, nbytes = len(copies), copies.total
    if method == "auto":
        method = choose_method(source, destination, nbytes // max(1, num_copies))
    if (source.device.type == destination.device.type == "cpu") != (method == "memmove"):
        raise CopyError(f"{method!r} does not copy from {source.device} to {destination.device}")
    work = None
    if method == "memmove":
        _copy_on_host(copies.moved(source.address, destination.address))
    else:
        work = cuda.start(source, destination, copies, method, stream)
    return CopyHandle(source, destination, num_copies, nbytes, method, work)


def copy_grids(
    source: Arena, destination: Arena, grids: Sequence[Grid], programs: int | None = None
) -> CopyHandle:
    """Start copying inside one device what a route has not written out, with a launch for each
    grid. No two of a route's copies share a destination, so that is not checked again."""
    for grid in grids:
        for arena, ids, strides, starts in (
            (source, grid.source, grid.lanes.source_stride, grid.lanes.copies.source),
            (destination, grid.destination, grid.lanes.destination_stride,
             grid.lanes.copies.destination),
        ):  # fmt: skip
            low, high = int(ids.min()), int(ids.max())
            ends = starts + grid.lanes.copies.nbytes + high * strides
            if low < 0 or (ends > arena.nbytes).any():
                raise CopyError(
                    f"blocks {low} to {high} end at byte {int(ends.max())}, not all of them inside "
                    f"the arena of {arena.nbytes} bytes\n\nhint: plan the route with this layout"
                )
    return CopyHandle(
        source,
        destination,
        num_copies=sum(map(len, grids)),
        nbytes=sum(grid.nbytes for grid in grids),
        method="kernel",
        work=cuda.start_grids(source, destination, grids, programs or cuda.MOST_PROGRAMS),
    )


# ── whole blocks ──────────────────────────────────────────────────────────────────────────


def block_copies(
    layout: Layout,
    group: int,
    blocks: npt.ArrayLike,
    into: npt.ArrayLike,
    destination: Layout | None = None,
) -> Copies:
    """Copies of whole blocks between two arenas with the same rows, in the fewest runs.

    `destination` is the other arena's layout where it has another number of blocks.
    """
    other = layout if destination is None else destination
    if other is not layout and _row(layout, group) != _row(other, group):
        name = layout.groups[group].group.name
        raise CopyError(
            f"group {name!r}: rows of the two arenas differ ({layout.order}, {other.order})\n\n"
            f"hint: copy(a, b, plan_route(a.layout, b.layout).copies(here, there, num_tokens))"
        )
    sources, places = checked_ids(layout, group, blocks), checked_ids(other, group, into)
    if sources.shape != places.shape:
        raise BlockError(f"{sources.size} source blocks, {places.size} destination blocks")
    here, there = layout.footprints[group].strips, other.footprints[group].strips
    copies = Copies(
        np.concatenate([strip.offset + sources * strip.stride for strip in here]),
        np.concatenate([strip.offset + places * strip.stride for strip in there]),
        np.repeat([strip.nbytes for strip in here], len(sources)),
    )
    return copies.merged(by="source")


def _row(layout: Layout, group: int) -> object:
    """What a block's bytes mean, wherever the block lies: its pages and where they are in it."""
    if group >= len(layout.groups):
        return None
    placed, strips = layout.groups[group], layout.footprints[group].strips
    inside = [
        (at, run.offset - strip.offset, run.nbytes)
        for layer, place in zip(placed.group.layers, placed.placements, strict=True)
        for run in page_runs(layer, place)
        for at, strip in enumerate(strips)
        if strip.offset <= run.offset < strip.offset + strip.nbytes
    ]
    return layout.order, placed.group, [strip.nbytes for strip in strips], inside


# ── checks, before anything is copied ─────────────────────────────────────────────────────


def _checked(source: Arena, destination: Arena, copies: Copies) -> Copies:
    """The copies, joined; sorted by the host's side, if there is one: that is fastest over the
    bus."""
    _check_inside(copies.source, copies.nbytes, source.regions, "source")
    _check_inside(copies.destination, copies.nbytes, destination.regions, "destination")
    copies = copies.merged(by="source" if source.device.type == "cpu" else "destination")
    _check_apart(copies.destination, copies.nbytes)
    starts, ends = (
        [arena.address + n * arena.nbytes for arena in (source, destination)] for n in (0, 1)
    )
    if source.device == destination.device and max(starts) < min(ends):
        _check_unread(copies.moved(*starts))
    return copies


def _check_inside(offsets: Ints, nbytes: Ints, regions: tuple[Run, ...], what: str) -> None:
    """CopyError unless each range has bytes, all of them inside one region."""
    starts = np.array([run.offset for run in regions], np.int64)
    ends = starts + np.array([run.nbytes for run in regions], np.int64)
    at = np.searchsorted(starts, offsets, side="right") - 1 if len(regions) > 1 else 0
    bad = (nbytes < 1) | (offsets < starts[at]) | (nbytes > ends[at] - offsets)
    if bad.any():
        i = int(np.argmax(bad))
        raise CopyError(
            f"copy {i}: {what} bytes [{offsets[i]}, {offsets[i] + nbytes[i]}) are not inside the "
            f"arena's {[(run.offset, run.end) for run in regions][:4]}"
        )


def _check_apart(offsets: Ints, nbytes: Ints) -> None:
    """CopyError if destinations share bytes."""
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets)
        offsets, nbytes = offsets[order], nbytes[order]
    bad = offsets[1:] - offsets[:-1] < nbytes[:-1]
    if bad.any():
        i = int(np.argmax(bad))
        first, second = (f"[{offsets[k]}, {offsets[k] + nbytes[k]})" for k in (i, i + 1))
        raise CopyError(f"destination bytes {first} and {second} overlap")


def _check_unread(copies: Copies) -> None:
    """CopyError if some destination shares bytes with some source; both are addresses here."""
    nbytes, destinations = copies.nbytes, copies.destination
    order = np.argsort(copies.source, kind="stable")
    starts = copies.source[order]
    reach = np.maximum.accumulate((copies.source + nbytes)[order])
    before = np.searchsorted(starts, destinations + nbytes, side="left") - 1
    bad = (before >= 0) & (reach[before] > destinations)
    if bad.any():
        i = int(np.argmax(bad))
        raise CopyError(
            f"copy {i} writes {nbytes[i]} bytes at address {destinations[i]}, which another part "
            f"of the same copy reads\n\nhint: copy in two steps, through rows that are free"
        )


# ── which way ─────────────────────────────────────────────────────────────────────────────

SHORT_BYTES = 128 << 10
"""Mean length from which CUDA's batched memcpy beats a kernel on pinned memory. On one H200:
pieces of 16 KiB 14 to 16 GB/s against 20 to 25, of 128 KiB 48 against 48, of 1 MiB 54 against
49."""


def choose_method(source: Arena, destination: Arena, mean_bytes: int) -> Method:
    """The fastest way for copies of that mean length, by what was measured on one H200
    (bench/results/copy_gpu.json)."""
    kinds = (source.device.type, destination.device.type)
    if kinds == ("cpu", "cpu"):
        return "memmove"
    if kinds == ("cuda", "cuda"):
        return "kernel" if source.device == destination.device else "plain"
    host = source if source.device.type == "cpu" else destination
    if not host.pinned:
        return "plain"
    return "batch" if mean_bytes >= SHORT_BYTES and cuda.has_batch() else "kernel"


UNITS = range(16, (8 << 10) + 1)
"""Lengths of pieces, in bytes, that are copied faster by index: a call for each takes 0.6 µs, an
index 0.04 and a second copy inside the cache."""

AT_ONCE = 1 << 20
"""Bytes that numpy picks at a time: what it keeps of them meanwhile stays in the cache."""


def _copy_on_host(copies: Copies) -> None:
    """Copy between addresses: many of a common length by index, others one by one."""
    unit = _common_unit(copies)
    if unit not in UNITS or copies.total > 4 * unit * len(copies):
        columns = copies.destination.tolist(), copies.source.tolist(), copies.nbytes.tolist()
        for place, start, nbytes in zip(*columns, strict=True):
            memmove(place, start, nbytes)
        return
    even = cut(copies, unit)
    here, starts = _units(even.source, unit)
    there, places = _units(even.destination, unit)
    step = max(1, AT_ONCE // unit)
    for at in range(0, len(even), step):
        there[places[at : at + step]] = here[starts[at : at + step]]


def _common_unit(copies: Copies) -> int:
    """The longest piece at whose multiples, counted from the first copy, all start and end."""
    if len(copies) < 2:
        return 0
    source, destination = copies.source - copies.source[0], copies.destination
    columns = source, destination - destination[0], copies.nbytes
    return int(np.gcd.reduce([np.gcd.reduce(column) for column in columns]))


def _units(addresses: Ints, unit: int) -> tuple[npt.NDArray[np.void], Ints]:
    """The memory from the lowest to the highest of these addresses in pieces of `unit` bytes, and
    which piece each address is."""
    low = int(addresses.min())
    which = (addresses - low) // unit
    count = int(which.max()) + 1
    memory = memoryview((c_char * (count * unit)).from_address(low))
    return np.ndarray(count, f"V{unit}", memory), which
