"""Growth: what many requests want of all groups in one step, and who gets what."""

from dataclasses import dataclass, field

import numpy as np

from kvstow.blocks.pool import Want
from kvstow.blocks.table import Table, first_seen
from kvstow.plan.view import Ints


@dataclass(frozen=True, slots=True)
class _Entry:
    """The requests that the next `num_wants` wants are for."""

    table: Table
    slots: Ints
    num_wants: int


@dataclass(slots=True)
class Growth:
    """Wants, in the order in which they are to be held; `renewed` rows stay where they are."""

    wants: list[Want] = field(default_factory=list[Want])
    renewed: list[tuple[int, Table, Ints, Ints]] = field(
        default_factory=list[tuple[int, Table, Ints, Ints]]
    )
    _entries: list[_Entry] = field(default_factory=list[_Entry])

    def add(self, g: int, table: Table, slots: Ints, more: Ints, num_tokens: Ints) -> None:
        """Requests of which each needs so many more blocks to reach so many tokens."""
        one = slots if int(more.max()) == 1 else slots[more == 1]
        if len(one):
            kind = "moving" if table.moves else "single"
            self.wants.append(Want(g, len(one), kind, table.near(one)))
            self._entries.append(_Entry(table, one, 1))
        if len(one) == len(slots):
            return
        for i in np.nonzero(more > 1)[0].tolist():
            wants = stretch(g, table, int(more[i]), int(num_tokens[i]))
            self.wants += wants
            self._entries.append(_Entry(table, slots[i : i + 1], len(wants)))

    def enter(self, ids: list[Ints]) -> None:
        """Write what was held for the wants into the tables."""
        given = iter(ids)
        for entry in self._entries:
            rows = [next(given) for _ in range(entry.num_wants)]
            if len(entry.slots) == 1:
                entry.table.append(int(entry.slots[0]), by_block(rows))
            else:
                entry.table.append_one_each(entry.slots, rows[0])


def stretch(g: int, table: Table, count: int, num_tokens: int) -> list[Want]:
    """What `count` blocks that end at `num_tokens` want: those that no later token sees
    are wanted briefly. They come first in the request and last here, when the others
    have their places."""
    if not table.moves or not table.gaps:
        return [Want(g, count)]
    end = -(-num_tokens // table.block_tokens)
    seen = first_seen(table.retention, num_tokens, table.block_tokens)
    brief = min(count, max(0, seen - max(end - count, table.fixed)))
    if brief == 0:
        return [Want(g, count, "moving")]
    return [Want(g, count - brief, "moving"), Want(g, brief, "brief")]


def by_block(parts: list[Ints]) -> Ints:
    """The rows that a stretch got, in the order of its blocks."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
