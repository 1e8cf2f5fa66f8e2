"""Lists of blocks, ours and those that peers send, checked against a layout."""

from collections.abc import Mapping, Sequence

from kvstow.errors import BlockError, TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, check_ids


def check_blocks(layout: Layout, blocks: Mapping[int, Blocks], *, whose: str) -> None:
    """TransferError unless every block exists in the layout and is listed once."""
    if not isinstance(blocks, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TransferError(
            f"{whose}: blocks are {type(blocks).__name__}, not by group\n\n"
            "hint: ledger.blocks(request), or {0: Blocks.first(ids)}",
            kind="refused",
        )
    for g, listed in blocks.items():
        if not 0 <= g < len(layout.groups):
            raise TransferError(
                f"{whose}: group {g} is not one of {len(layout.groups)}", kind="ticket"
            )
        try:
            check_ids(layout, g, listed, f"{whose}:")
        except BlockError as error:
            raise TransferError(str(error), kind="ticket") from None


def named(layout: Layout, ids: Mapping[int, Sequence[int] | Ints]) -> dict[str, tuple[int, ...]]:
    """Ids by group name, for errors."""
    return {layout.groups[g].group.name: tuple(int(i) for i in each) for g, each in ids.items()}
