"""Slabs over time: who owned which, and how full it was, frame by frame.

A frame is a string with one letter per slab: its code is 33 + 4 · (owner + 1) + fullness.
Fullness counts rows that requests hold: 0 none, 1 up to half, 2 more, 3 all. Where there are
many slabs or many moments, every second, fourth, eighth … is kept.
"""

from typing import Any, NamedTuple

import numpy as np

from kvstow.blocks.pool import Pool
from kvstow.plan.layout import NULL_SLABS, Layout

MAX_FRAMES = 240
MAX_SLABS = 960
FIRST = 33
LEVELS = 4


class Frame(NamedTuple):
    """One moment: the slabs, and what of all prompts so far was found cached."""

    seconds: float
    slabs: str
    hit_rate: float


class Film:
    """Frames of one pool, evenly spread over a time whose end is not known beforehand."""

    def __init__(self, layout: Layout) -> None:
        self.frames: list[Frame] = []
        self._groups = [rows.group.name for rows in layout.groups]
        self._rows = np.array([rows.rows_per_slab for rows in layout.groups], np.int64)
        self._num_slabs = layout.num_slabs - NULL_SLABS
        self._step = -(-self._num_slabs // MAX_SLABS)
        self._is_shared = len(layout.sharing) == 1
        self._every = 1
        self._seen = 0

    def see(self, pool: Pool, seconds: float, *, prompt_tokens: int, hit_tokens: int) -> None:
        """Take a frame, if it is time for one."""
        if self._seen % self._every == 0:
            hit_rate = hit_tokens / prompt_tokens if prompt_tokens else 0.0
            self.frames.append(Frame(seconds, self._slabs(pool), hit_rate))
        self._seen += 1
        if len(self.frames) > MAX_FRAMES:
            self.frames = self.frames[::2]
            self._every *= 2

    def _slabs(self, pool: Pool) -> str:
        """One letter per slab; none where groups share no slabs."""
        if not self._is_shared:
            return ""
        (owned,) = pool.ownership()
        owner, held = (part[NULL_SLABS :: self._step] for part in (owned.owner, owned.held))
        rows = np.where(owner < 0, 1, self._rows[owner])
        level = np.where(held == 0, 0, np.where(held == rows, 3, 1 + (2 * held > rows)))
        codes = FIRST + LEVELS * (owner + 1) + level
        return codes.astype(np.uint32).tobytes().decode("utf-32-le")

    def record(self) -> dict[str, Any]:
        """What a page draws from."""
        return {
            "groups": self._groups,
            "num_slabs": self._num_slabs,
            "step": self._step,
            "seconds": [round(frame.seconds, 3) for frame in self.frames],
            "slabs": [frame.slabs for frame in self.frames],
            "hit_rate": [round(frame.hit_rate, 5) for frame in self.frames],
        }
