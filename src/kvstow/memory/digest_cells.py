"""Digests of a few cells on a device, as samples have them: by one kernel, or by copies alone.

The host lists every cell and finds its keys. Who has waited for the bytes counts them by a kernel,
which is the fastest; who only serves them has them copied and counts them itself (`CopiedCells`).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import CopyError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.digest_device import in_words
from kvstow.memory.digest_keys import Words, state_keys
from kvstow.memory.digest_pages import CountedBlocks, keys_in, unit_of
from kvstow.plan.view import Ints, align_up
from kvstow.route.copies import Copies

Digests = Sequence[Sequence[CountedBlocks]]
"""What several digests count, each in parts."""

FEW_BYTES = 8 << 20
"""A sample of a long prompt is shorter; one program for each cell would be slow for much more."""


def are_few(digests: Digests) -> bool:
    """Whether these are so few cells that they are best listed, each in a block of its own."""
    parts = [part for each in digests for part in each]
    is_listable = all(part.pages.states == 1 for part in parts)
    return is_listable and sum(part.nbytes for part in parts) <= FEW_BYTES


# ── by a kernel ───────────────────────────────────────────────────────────────────────────


def few_on_device(arena: Arena, digests: Digests) -> Callable[[], tuple[int, ...]]:
    """Several digests in one copy and one launch, of parts whose blocks hold one state each.

    With `on_device` every group of a model would have launches of its own, and a hybrid model has
    many groups.
    """
    from kvstow.memory.kernels.digest import cells_summed

    parts = [part for each in digests for part in each]
    if not parts:
        return lambda: (0,) * len(digests)
    unit = min(unit_of(part.pages) for part in parts)
    tables = [keys_in(part.pages.keys, unit) for part in parts]
    first_keys = accumulate((table.size for table in tables), initial=0)
    listed = [
        _cells(part, table.shape, unit, first)
        for part, table, first in zip(parts, tables, first_keys, strict=False)
    ]
    cells = np.concatenate(listed, axis=1)
    keys = np.concatenate([table.ravel() for table in tables]).view(np.int64)
    there = torch.as_tensor(np.concatenate((cells.ravel(), keys)), device=arena.device)
    launch = cells_summed(in_words(arena, unit), there[cells.size :], there[: cells.size])
    lengths = iter([each.shape[1] for each in listed])
    ends = accumulate((sum(next(lengths) for _ in each) for each in digests), initial=0)
    slices = [slice(*pair) for pair in pairwise(ends)]

    def taken() -> tuple[int, ...]:
        sums = launch().cpu().numpy().view(np.uint64)
        return tuple(int(sums[each].sum(dtype=np.uint64)) for each in slices)

    return taken


def _cells(part: CountedBlocks, table_shape: tuple[int, ...], unit: int, first_key: int) -> Ints:
    """Per cell of a part: where it starts, its state's key, where its words' keys start, and how
    many words it has; layer by layer, head by head."""
    heads, words = table_shape
    starts = _starts(part, heads)
    found = np.empty((4, *starts.shape), np.int64)
    found[0] = starts // unit
    found[1] = _state_keys(part)[:, None].view(np.int64)
    found[2] = first_key + (np.arange(heads) * words)[:, None]
    found[3] = words
    return found.reshape(4, -1)


# ── by copies ─────────────────────────────────────────────────────────────────────────────

MOST_COPIES = 256
"""With 2,000 copies a pull of 32,000 tokens took 5 ms longer than with a kernel (one H200, one run
of each); probably they wait for their turn among those of the rows."""

ROOM_BYTES = 1 << 20
"""Host memory is taken in multiples of so much: what was used before is there at once."""


def are_few_copies(digests: Digests) -> bool:
    """Whether these are so few cells that copies bring them about as soon as a kernel."""
    num_cells = sum(_num_cells(part) for each in digests for part in each)
    return are_few(digests) and num_cells <= MOST_COPIES


class CopiedCells:
    """Cells on their way from a device to the host, and their digests once they are there.

    No kernel runs. On a device that processes share, one would make it switch to this process,
    and whatever the others compute would wait; beside long kernels of our own, it would wait
    itself. `close` it: nothing may have the memory again while copies can reach it.
    """

    def __init__(self, arena: Arena, digests: Digests) -> None:
        self._digests = digests
        copies = cell_copies(digests)
        room = align_up(max(copies.total, 1), ROOM_BYTES)
        self._there = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        self._over = torch.cuda.Event()
        side = torch.cuda.Stream(arena.device)
        side.wait_stream(torch.cuda.current_stream(arena.device))
        try:
            cuda.batch(arena.address, self._there.data_ptr(), copies, side.cuda_stream)
            self._over.record(side)
        except BaseException:
            side.synchronize()
            raise

    def are_there(self) -> bool:
        """Whether all cells have arrived. Raises CopyError once it is known that they won't."""
        try:
            return self._over.query()
        except RuntimeError as error:  # what torch raises for any CUDA error
            raise CopyError(f"cells of a digest: {error}") from error

    def counted(self) -> tuple[int, ...]:
        """The digests, of cells that are there."""
        return cell_sums(self._there.numpy(), self._digests)

    def close(self) -> None:
        """Wait until nothing is copied any more."""
        self._over.synchronize()


def cell_copies(digests: Digests) -> Copies:
    """Copies of all cells from an arena, one after the other."""
    starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for part in (part for each in digests for part in each):
        table, unit = _keys(part)
        starts.append(_starts(part, len(table)).ravel())
        sizes.append(np.full(starts[-1].size, table.shape[1] * unit))
    nbytes = np.concatenate(sizes)
    return Copies(np.concatenate(starts), nbytes.cumsum() - nbytes, nbytes)


def cell_sums(there: npt.NDArray[np.uint8], digests: Digests) -> tuple[int, ...]:
    """The digests of cells that lie as `cell_copies` puts them."""
    at, found = 0, [0] * len(digests)
    for number, part in ((n, part) for n, each in enumerate(digests) for part in each):
        table, unit = _keys(part)
        shape = len(part.pages.offsets), len(table), len(part.ids), table.shape[1]
        cells = np.frombuffer(there, f"<u{unit}", prod(shape), at).reshape(shape)
        sums = np.einsum("lhbw,hw->lb", cells, table)
        found[number] += int((sums * _state_keys(part)).sum(dtype=np.uint64))
        at += cells.nbytes
    return tuple(each % (1 << 64) for each in found)


def _keys(part: CountedBlocks) -> tuple[Words, int]:
    """The keys of a part's words, and how long these are."""
    unit = unit_of(part.pages)
    return keys_in(part.pages.keys, unit), unit


# ── cells ─────────────────────────────────────────────────────────────────────────────────


def _num_cells(part: CountedBlocks) -> int:
    return len(part.pages.offsets) * len(part.pages.keys.table) * len(part.ids)


def _starts(part: CountedBlocks, heads: int) -> Ints:
    """Where cells start: layer, head, block."""
    pages = part.pages
    bases = np.add.outer(pages.offsets, np.arange(heads) * pages.head_stride)
    return np.add.outer(bases, part.ids * pages.block_stride)


def _state_keys(part: CountedBlocks) -> Words:
    """The keys of states: layer, block."""
    return np.stack([state_keys(each, part.logical) for each in part.pages.seeds])
