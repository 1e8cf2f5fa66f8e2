"""Host memory as one arena sees it: a host tier, or a window that rows only pass through."""

from collections.abc import Sequence
from threading import Lock

from kvstow.memory.arena import Arena
from kvstow.offload.host.tier import HostTier
from kvstow.offload.rows import RowMapping, matching_group, row_layout
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.view import Ints
from kvstow.route.copies import Copies

WINDOW_BYTES = 64 << 20


class HostRows:
    """Blocks of an arena, and the rows of a host tier that are theirs."""

    def __init__(self, arena: Arena, tier: HostTier) -> None:
        self.tier = tier
        groups = range(len(arena.layout.groups))
        self._groups = [matching_group(arena.layout, g, tier.layout) for g in groups]
        self._mappings = [
            RowMapping(arena.layout, g, tier.layout, there)
            for g, there in zip(groups, self._groups, strict=True)
        ]

    def group(self, group: int) -> int:
        """The tier's group for one of the arena's."""
        return self._groups[group]

    def row_bytes(self, group: int) -> int:
        return self.tier.layout.row_bytes(self._groups[group])

    def runs(self, group: int) -> tuple[tuple[int, int], ...]:
        """The bytes of a row that are a block's."""
        return self._mappings[group].runs

    def copies(self, group: int, ids: Ints, rows: Ints, *, is_inward: bool) -> Copies:
        """What to copy from blocks to rows, or back."""
        mapping = self._mappings[group]
        return mapping.back(rows, ids) if is_inward else mapping.out(ids, rows)


class HostWindow(HostRows):
    """Host memory in which rows are reserved and never kept; for one at a time, by `turn`."""

    def __init__(self, arena: Arena, layout: Layout) -> None:
        nbytes = max(WINDOW_BYTES, 4 * row_layout(layout).slab_bytes)
        super().__init__(arena, HostTier(layout, capacity=nbytes))
        self.turn = Lock()

    def lots(self, group: int, positions: Sequence[int]) -> list[Sequence[int]]:
        """The positions, as many at a time as there is room for."""
        there = self._groups[group]
        rows = self.tier.layout.num_blocks(there)
        rows -= NULL_SLABS * self.tier.layout.groups[there].rows_per_slab
        return [positions[at : at + rows] for at in range(0, len(positions), rows)]
