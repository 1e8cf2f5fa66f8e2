"""The fence: which counters to read again, and whether they still say the same.

Ids that lie close together are read as one piece, gaps included, and pieces are put into
rounds that fit one slot of registered memory:

    table     · · 4 5 · 7 · · · · · · · · · 203 204 · ·
    pieces        └─────┘                   └─────┘
    slot          4 5 6 7 203 204
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstow.plan.view import Ints

ENTRY = 8
SLOT_ENTRIES = 4096
_GAP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One read of counters.

    Piece `i` is `nbytes[i]` bytes at `remote[i]`, and goes to byte `local[i]` of the slot.
    Counter `where[j]` of the slot belongs to block `ids[j]` of group `groups[j]`.
    """

    remote: Ints
    local: Ints
    nbytes: Ints
    where: Ints
    expected: Ints
    groups: Ints
    ids: Ints

    def changed(self, slot: Ints) -> dict[int, tuple[int, ...]]:
        """Per group, the blocks whose counters are not what the ticket says."""
        found = slot.take(self.where)
        if found.tobytes() == self.expected.tobytes():
            return {}
        wrong = found != self.expected
        return {
            int(g): tuple(self.ids[wrong & (self.groups == g)].tolist())
            for g in np.unique(self.groups[wrong])
        }


def fence_rounds(
    tables: Sequence[int], ids: Mapping[int, Ints], expected: Mapping[int, Ints]
) -> list[Round]:
    """The reads that check these blocks; `tables` are the counters' addresses, per group."""
    rounds: list[Round] = []
    for group, listed in ids.items():
        if not len(listed):
            continue
        near = _near(tables[group], group, listed, expected[group])
        if near is not None:
            rounds.append(near)
            continue
        order = np.argsort(listed, kind="stable")
        wanted, counters = listed[order], expected[group][order]
        rounds += _fitting(tables[group], group, wanted, counters)
    return _joined(rounds)


def _near(table: int, group: int, ids: Ints, counters: Ints) -> Round | None:
    """One piece for ids that lie close together on the whole, in any order."""
    first = int(np.minimum.reduce(ids))
    count = int(np.maximum.reduce(ids)) - first + 1
    if count > min(SLOT_ENTRIES, _GAP * len(ids)):
        return None
    return Round(
        remote=np.array([table + first * ENTRY]),
        local=np.zeros(1, np.int64),
        nbytes=np.array([count * ENTRY]),
        where=ids - first,
        expected=counters,
        groups=np.full(len(ids), group),
        ids=ids,
    )


def _fitting(table: int, group: int, wanted: Ints, counters: Ints) -> list[Round]:
    """Rounds for ascending ids, each small enough for a slot."""
    whole = _round(table, group, wanted, counters)
    if int(whole.nbytes.sum()) <= SLOT_ENTRIES * ENTRY:
        return [whole]
    half = len(wanted) // 2
    return [
        *_fitting(table, group, wanted[:half], counters[:half]),
        *_fitting(table, group, wanted[half:], counters[half:]),
    ]


def _round(table: int, group: int, wanted: Ints, counters: Ints) -> Round:
    opens = np.empty(len(wanted), np.bool_)  # where a piece starts
    opens[0], opens[1:] = True, wanted[1:] - wanted[:-1] > _GAP
    starts = opens.nonzero()[0]
    first = wanted[starts]
    lengths = np.append(wanted[starts[1:] - 1], wanted[-1]) - first + 1
    offsets = lengths.cumsum() - lengths
    piece = opens.cumsum() - 1
    return Round(
        remote=table + first * ENTRY,
        local=offsets * ENTRY,
        nbytes=lengths * ENTRY,
        where=wanted + (offsets - first)[piece],
        expected=counters,
        groups=np.full(len(wanted), group, np.int64),
        ids=wanted,
    )


def _joined(rounds: list[Round]) -> list[Round]:
    """Neighbouring rounds put into one slot where they fit together."""
    if len(rounds) < 2:
        return rounds
    done: list[Round] = []
    batch: list[Round] = []
    used = 0
    for one in rounds:
        size = int(one.nbytes.sum()) // ENTRY
        if batch and used + size > SLOT_ENTRIES:
            done.append(_merged(batch))
            batch, used = [], 0
        batch.append(one)
        used += size
    return [*done, _merged(batch)] if batch else done


def _merged(batch: list[Round]) -> Round:
    if len(batch) == 1:
        return batch[0]
    sizes = [int(one.nbytes.sum()) for one in batch]
    shifts = [sum(sizes[:i]) for i in range(len(batch))]
    return Round(
        remote=np.concatenate([one.remote for one in batch]),
        local=np.concatenate([one.local + s for one, s in zip(batch, shifts, strict=True)]),
        nbytes=np.concatenate([one.nbytes for one in batch]),
        where=np.concatenate([r.where + s // ENTRY for r, s in zip(batch, shifts, strict=True)]),
        expected=np.concatenate([one.expected for one in batch]),
        groups=np.concatenate([one.groups for one in batch]),
        ids=np.concatenate([one.ids for one in batch]),
    )
