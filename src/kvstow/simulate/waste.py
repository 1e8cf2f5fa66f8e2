"""Waste: bytes that are in use and hold nothing, and why.

padding         rows are longer than their pages
fragmentation   free rows in slabs that a group cannot give up
rounding        token slots of blocks that are not full
"""

from dataclasses import dataclass

import numpy as np

from kvstow.blocks.ledger import Ledger
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Encoder, State


@dataclass(frozen=True, slots=True)
class Waste:
    """Bytes at one moment; `needed` is what tokens and states themselves take."""

    needed: float
    padding: float
    fragmentation: float
    rounding: float

    @property
    def in_use(self) -> float:
        return self.needed + self.padding + self.fragmentation + self.rounding


class Meter:
    """Measures a ledger's bytes."""

    def __init__(self, layout: Layout) -> None:
        groups = range(len(layout.groups))
        self._layout = layout
        self._page = [rows.group.page_bytes for rows in layout.groups]
        self._stride = [layout.row_stride(g) for g in groups]

    def read(self, ledger: Ledger) -> Waste:
        needed = padding = fragmentation = rounding = 0.0
        for g, group in enumerate(ledger.groups):
            held = ledger.pool.num_held(g)
            page, stride = self._page[g], self._stride[g]
            padding += held * (stride - page)
            fragmentation += ledger.pool.num_stranded(g) * stride
            if isinstance(group.retention, State | Encoder):
                needed += held * page
                continue
            unfilled = ledger.unfilled_tokens(g) / group.block_tokens * page
            rounding += unfilled
            needed += held * page - unfilled
        return Waste(needed, padding, fragmentation, rounding)


def shares(samples: list[Waste]) -> dict[str, float]:
    """Parts of the bytes in use, averaged over the samples."""
    total = sum(sample.in_use for sample in samples)
    parts = {
        name: float(np.sum([getattr(sample, name) for sample in samples])) / total if total else 0.0
        for name in ("padding", "fragmentation", "rounding")
    }
    return parts | {"total": sum(parts.values())}
