"""Digests on a device, of pages of one geometry."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from kvstow.memory.arena import Arena
from kvstow.memory.digest_keys import CellKeys
from kvstow.memory.digest_pages import Intervals, Pages, keys_in, unit_of
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
        in_words(arena, unit),
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


def in_words(arena: Arena, unit: int) -> torch.Tensor:
    """The arena's bytes in words of this length."""
    words = {1: torch.uint8, 4: torch.uint32}[unit]
    return arena.bytes[: arena.nbytes // unit * unit].view(words)
