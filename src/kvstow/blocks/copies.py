"""Copies that have to be made before a step: a state, or a shared block about to be written."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvstow.blocks.pool import Pool
from kvstow.blocks.table import Table
from kvstow.plan.view import Ints


@dataclass(frozen=True, slots=True)
class Copy:
    """Row `source` of a group is to be copied to row `destination`."""

    group: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class SharedTail:
    """A request's last block, not full, that others hold, too."""

    group: int
    slot: int
    row: int


def shared_tails(
    pool: Pool, tables: Mapping[int, Table], slots: Ints, num_tokens: Ints
) -> tuple[SharedTail, ...]:
    """Last blocks that the requests must not write to; of several that share one, and
    nobody else, the last may keep it."""
    found: list[SharedTail] = []
    for g, table in tables.items():
        part = num_tokens % table.block_tokens != 0
        rows = table.last_ids(slots[part])
        left = dict(zip(rows.tolist(), pool.holds(g, rows).tolist(), strict=True))
        for slot, row in zip(slots[part].tolist(), rows.tolist(), strict=True):
            if left[row] > 1:
                left[row] -= 1
                found.append(SharedTail(g, slot, row))
    return tuple(found)
