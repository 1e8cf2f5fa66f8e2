"""Digests on a device: of pages of one geometry, or several at once of a few cells each."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch

from kvstow.memory.arena import Arena
from kvstow.memory.digest_keys import CellKeys, Words, state_keys
from kvstow.memory.digest_pages import CountedBlocks, Intervals, Pages, keys_in, unit_of
from kvstow.plan.view import Ints


def on_device(
    arena: Arena, pages: Pages, ids: Ints, index: Ints, intervals: Intervals
) -> Callable[[], torch.Tensor]:
    """The sum over pages of one geometry; what is returned launches it."""
    from kvstow.memory.kernels.digest import cell_sums

    unit = unit_of(pages)
    offsets = pages.offsets // unit
    numbers = np.concatenate((ids, index, offsets, pages.seeds.view(np.int64)))  # one copy for all
    there = torch.as_tensor(numbers, device=arena.device)
    n, m = len(ids), len(offsets)
    return cell_sums(
        _in_words(arena, unit),
        _device_keys(pages.keys, unit, arena.device),
        (there[:n], there[n : 2 * n]),
        (there[2 * n : 2 * n + m], there[2 * n + m :]),
        (pages.block_stride // unit, pages.head_stride // unit, pages.token_stride // unit),
        pages.states,
        (*intervals[0], *intervals[1]),
        aligned=unit == 4 and arena.address % 16 == 0 and pages.all_multiples(16),
    )


@lru_cache(maxsize=64)
def _device_keys(keys: CellKeys, unit: int, device: torch.device) -> torch.Tensor:
    """Keys on a device, copied there once."""
    return torch.as_tensor(keys_in(keys, unit).view(np.int64), device=device)


def _in_words(arena: Arena, unit: int) -> torch.Tensor:
    words = {1: torch.uint8, 4: torch.uint32}[unit]
    return arena.bytes[: arena.nbytes // unit * unit].view(words)


# ── a few cells ───────────────────────────────────────────────────────────────────────────

Digests = Sequence[Sequence[CountedBlocks]]
"""What several digests count, each in parts."""

FEW_BYTES = 8 << 20
"""A sample of a long prompt is shorter; one program for each cell would be slow for much more."""


def are_few(digests: Digests) -> bool:
    """Whether these are so few cells that they are best listed, each in a block of its own."""
    parts = [part for each in digests for part in each]
    is_listable = all(part.pages.states == 1 for part in parts)
    return is_listable and sum(part.nbytes for part in parts) <= FEW_BYTES


def few_on_device(arena: Arena, digests: Digests) -> Callable[[], tuple[int, ...]]:
    """Several digests in one copy and one launch, of parts whose blocks hold one state each.

    The host lists every cell and finds its keys: a sample has few. With `on_device` every group of
    a model would have launches of its own, and a hybrid model has many groups.
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
    launch = cells_summed(_in_words(arena, unit), there[cells.size :], there[: cells.size])
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
    pages, ids, states, _ = part
    heads, words = table_shape
    head = np.arange(heads)
    bases = np.add.outer(pages.offsets, head * pages.head_stride)
    starts = np.add.outer(bases, ids * pages.block_stride)
    found = np.empty((4, *starts.shape), np.int64)
    found[0] = starts // unit
    found[1] = _state_keys(pages.seeds, states)[:, None].view(np.int64)
    found[2] = first_key + (head * words)[:, None]
    found[3] = words
    return found.reshape(4, -1)


def _state_keys(seeds: Words, states: Ints) -> Words:
    return np.stack([state_keys(each, states) for each in seeds])
