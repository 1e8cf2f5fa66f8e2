"""Lists of blocks, ours and those that peers send, checked against a layout."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvstow.errors import TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks


def check_known(layout: Layout, blocks: Mapping[int, Blocks], *, whose: str) -> None:
    """TransferError unless every block exists in the layout."""
    for g, listed in blocks.items():
        if not 0 <= g < len(layout.groups):
            raise TransferError(
                f"{whose}: group {g} is not one of {len(layout.groups)}", kind="ticket"
            )
        least, count, ids = layout.groups[g].rows_per_slab, layout.num_blocks(g), listed.ids
        if len(ids) and not least <= np.minimum.reduce(ids) <= np.maximum.reduce(ids) < count:
            name = layout.groups[g].group.name
            wrong = ids[(ids < least) | (ids >= count)]
            raise TransferError(
                f"{whose}: group {name!r}: blocks {wrong[:8].tolist()} are not in "
                f"[{least}, {count})",
                kind="ticket",
                blocks={name: tuple(wrong.tolist())},
            )


def check_blocks(layout: Layout, blocks: Mapping[int, Blocks], *, whose: str) -> None:
    """TransferError unless every block exists in the layout and is listed once."""
    check_known(layout, blocks, whose=whose)
    for g, listed in blocks.items():
        ordered = listed.ids.copy()
        ordered.sort()
        if np.logical_or.reduce(ordered[1:] == ordered[:-1]):
            name = layout.groups[g].group.name
            raise TransferError(
                f"{whose}: group {name!r}: some block is listed twice", kind="ticket"
            )


def named(layout: Layout, ids: Mapping[int, Sequence[int] | Ints]) -> dict[str, tuple[int, ...]]:
    """Ids by group name, for errors."""
    return {layout.groups[g].group.name: tuple(int(i) for i in each) for g, each in ids.items()}
