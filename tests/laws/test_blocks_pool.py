"""A pool behaves like sets of ids, and a generation never outlives the bytes it stands for."""

from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from block_layouts import layouts
from kvstow.blocks.placement import Kind, RowDemand
from kvstow.blocks.pool import Pool
from kvstow.errors import BlockError, OutOfBlocks
from kvstow.plan.layout import Layout

LAYOUTS = layouts()
KINDS = get_args(Kind)
Row = tuple[int, int]


class Sets:
    """Rows as `(group, id)`, in sets; slabs are worked out from scratch every time."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.held: Counter[Row] = Counter()
        self.kept: set[Row] = set()
        self.cached: set[Row] = set()
        self.quarantined: set[Row] = set()
        self.suspect: set[Row] = set()
        self.unknown: set[Row] = set()

    def slab(self, row: Row) -> tuple[int, int]:
        """The sharing set and the slab in it; a group alone has slabs of one row."""
        group, block = row
        which = next(i for i, s in enumerate(self.layout.sharing) if group in s)
        alone = len(self.layout.sharing[which]) == 1
        return which, block if alone else block // self.layout.groups[group].rows_per_slab

    def can_hold(self, needs: Counter[int]) -> bool:
        return all(self._fits(i, members, needs) for i, members in enumerate(self.layout.sharing))

    def _fits(self, which: int, members: tuple[int, ...], needs: Counter[int]) -> bool:
        size = {g: self.layout.groups[g].rows_per_slab for g in members}
        if len(members) == 1:
            (g,) = members
            taken = {block for group, block in self.held if group == g}
            return needs[g] <= (self.layout.num_slabs - 1) * size[g] - len(taken)
        held = {row for row in self.held if row[0] in members}
        busy = {g: {self.slab(row)[1] for row in held if row[0] == g} for g in members}
        idle = self.layout.num_slabs - 1 - sum(len(slabs) for slabs in busy.values())
        wanted = 0
        for g in members:
            spare = len(busy[g]) * size[g] - sum(1 for row in held if row[0] == g)
            wanted += -(-max(0, needs[g] - spare) // size[g])
        return wanted <= idle

    def used(self) -> set[Row]:
        return set(self.held) | self.cached


class PoolMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(LAYOUTS)))
    def begin(self, name: str) -> None:
        layout = LAYOUTS[name]
        self.pool = Pool(layout)
        self.sets = Sets(layout)
        self.holders: list[list[Row]] = []
        self.tickets: dict[Row, int] = {}
        self.evicted_unkept: list[Row] = []
        self.pool.on_evict.append(self.evicted)

    def evicted(self, group: int, ids: np.ndarray) -> None:
        for block in ids.tolist():
            row = (group, block)
            if row not in self.sets.kept:  # nobody hears what a listener raises
                self.evicted_unkept.append(row)
            self.sets.kept.discard(row)
            self.sets.cached.discard(row)

    @rule(data=st.data(), near=st.booleans())
    def hold(self, data: st.DataObject, near: bool) -> None:
        groups = range(len(self.sets.layout.groups))
        wants: list[RowDemand] = []
        for g in data.draw(st.lists(st.sampled_from(groups), max_size=3)):
            most = self.sets.layout.num_blocks(g)
            last = [ids[-1][1] for ids in self.holders if ids[-1][0] == g]
            if near and last:
                wants.append(RowDemand(g, len(last), "single", np.array(last)))
            else:
                count = data.draw(st.integers(0, max(1, most // 2)))
                wants.append(RowDemand(g, count, data.draw(st.sampled_from(KINDS))))
        needs: Counter[int] = Counter()
        for want in wants:
            needs[want.group] += want.count
        before = self.state()
        if not self.sets.can_hold(needs):
            with pytest.raises(OutOfBlocks):
                self.pool.hold_all(wants)
            assert self.state() == before
            return
        for want, ids in zip(wants, self.pool.hold_all(wants), strict=True):
            assert len(ids) == want.count
            self.given(want.group, ids.tolist())

    def given(self, group: int, ids: list[int]) -> None:
        rows = [(group, block) for block in ids]
        assert len(set(rows)) == len(rows)
        assert not set(rows) & self.sets.used()
        null = self.sets.layout.groups[group].rows_per_slab
        assert all(block >= null for block in ids)
        for row in rows:
            generation = int(self.pool.generations[group][row[1]])
            assert generation > self.tickets.get(row, 0)
            self.tickets[row] = generation
            self.sets.held[row] = 1
        if rows:
            self.holders.append(rows)
            self.fenced(group, {self.sets.slab(row) for row in rows})

    def fenced(self, group: int, slabs: set[tuple[int, int]]) -> None:
        """Tickets for rows of other groups in these slabs are worthless from now on."""
        for row, generation in self.tickets.items():
            if row[0] != group and self.sets.slab(row) in slabs:
                assert int(self.pool.generations[row[0]][row[1]]) > generation, row

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        rows = data.draw(st.sampled_from(self.holders))
        self.pool.share(rows[0][0], [block for _, block in rows])
        self.sets.held.update(rows)
        self.holders.append(rows)

    @precondition(lambda self: self.sets.cached)
    @rule(data=st.data())
    def share_cached(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.sets.cached)))
        self.pool.share(row[0], [row[1], row[1]])
        self.sets.cached.discard(row)
        self.sets.held[row] += 2
        self.holders += [[row], [row]]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        rows = data.draw(st.sampled_from(self.holders))
        some = rows[: data.draw(st.integers(1, len(rows)))]
        if self.sets.suspect & set(some):
            before = self.state()
            with pytest.raises(BlockError, match="quarantined"):
                self.pool.keep(rows[0][0], [block for _, block in some])
            assert self.state() == before
            return
        self.pool.keep(rows[0][0], [block for _, block in some])
        self.sets.kept |= set(some)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 3))
    def release(self, data: st.DataObject, count: int) -> None:
        group = data.draw(st.sampled_from(self.holders))[0][0]
        mine = [rows for rows in self.holders if rows[0][0] == group][:count]
        self.holders = [rows for rows in self.holders if not any(rows is m for m in mine)]
        ids = [row for rows in mine for row in rows]
        self.pool.release(group, [block for _, block in ids])
        self.sets.held.subtract(ids)
        self.ended()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def keep_and_release(self, data: st.DataObject) -> None:
        rows = data.draw(st.sampled_from(self.holders))
        trusted = [row for row in rows if row not in self.sets.suspect]
        self.pool.keep(rows[0][0], [block for _, block in trusted])
        self.sets.kept |= set(trusted)
        self.pool.release(rows[0][0], [block for _, block in rows])
        self.holders = [each for each in self.holders if each is not rows]
        self.sets.held.subtract(rows)
        self.ended()

    def ended(self) -> None:
        for row in [row for row, count in self.sets.held.items() if count == 0]:
            del self.sets.held[row]
            self.sets.suspect.discard(row)
            self.sets.unknown.discard(row)
            if row in self.sets.kept:
                self.sets.cached.add(row)

    @precondition(lambda self: self.sets.used())
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.sets.used())))
        self.pool.forget(row[0], [row[1]])
        assert row not in self.sets.kept

    @precondition(lambda self: set(self.sets.held) - self.sets.quarantined)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(set(self.sets.held) - self.sets.quarantined)))
        self.pool.quarantine(row[0], [row[1]])
        assert row not in self.sets.kept
        self.sets.held[row] += 1
        self.sets.quarantined.add(row)
        self.sets.suspect.add(row)
        self.sets.unknown.add(row)
        self.fenced_out(row)

    def fenced_out(self, row: Row) -> None:
        """A ticket for the row is worthless from now on."""
        generation = int(self.pool.generations[row[0]][row[1]])
        assert generation > self.tickets[row]
        self.tickets[row] = generation

    @precondition(lambda self: self.sets.quarantined)
    @rule(data=st.data(), whole=st.none() | st.booleans())
    def unquarantine(self, data: st.DataObject, whole: bool | None) -> None:
        row = data.draw(st.sampled_from(sorted(self.sets.quarantined)))
        self.pool.unquarantine(row[0], [row[1]], None if whole is None else np.array([whole]))
        self.sets.quarantined.discard(row)
        if whole is not None:
            self.sets.unknown.discard(row)
            self.sets.suspect -= {row} if whole else set()
        self.sets.held[row] -= 1
        self.fenced_out(row)
        self.ended()

    @precondition(lambda self: self.sets.held)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.sets.held)))
        self.pool.distrust(row[0], [row[1]])
        assert row not in self.sets.kept
        self.sets.suspect.add(row)
        self.sets.unknown.add(row)

    @precondition(lambda self: self.sets.held)
    @rule(data=st.data(), whole=st.booleans())
    def trust(self, data: st.DataObject, whole: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.sets.held)))
        self.pool.trust(row[0], [row[1]], np.array([whole]))
        if row not in self.sets.quarantined:
            self.sets.unknown.discard(row)
            self.sets.suspect -= {row} if whole else set()

    @rule(data=st.data())
    def release_what_is_not_held(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(range(len(self.sets.layout.groups))))
        wrong = data.draw(st.integers(-2, self.sets.layout.num_blocks(group) + 1))
        if (group, wrong) in self.sets.held:
            return
        rows = [block for g, block in self.sets.held if g == group]
        before = self.state()
        with pytest.raises(BlockError):
            self.pool.release(group, [*rows, wrong])
        assert self.state() == before

    def state(self) -> tuple[object, ...]:
        groups = range(len(self.sets.layout.groups))
        return tuple(
            (
                self.pool.holds(g, np.arange(self.sets.layout.num_blocks(g))).tolist(),
                self.pool.num_cached(g),
                self.pool.num_free(g),
                self.pool.generations[g].tolist(),
            )
            for g in groups
        )

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check()
        for g in range(len(self.sets.layout.groups)):
            holds = self.pool.holds(g, np.arange(self.sets.layout.num_blocks(g)))
            expected = {block: count for (h, block), count in self.sets.held.items() if h == g}
            assert {int(b): int(holds[b]) for b in np.nonzero(holds)[0]} == expected
            assert self.pool.num_cached(g) == sum(1 for h, _ in self.sets.cached if h == g)
            every = np.arange(self.sets.layout.num_blocks(g))
            for found, kept in (
                (self.pool.suspect(g, every), self.sets.suspect),
                (self.pool.unknown(g, every), self.sets.unknown),
            ):
                assert set(np.nonzero(found)[0].tolist()) == {b for h, b in kept if h == g}

    @invariant()
    def only_kept_rows_are_evicted(self) -> None:
        assert not self.evicted_unkept

    @invariant()
    def a_slab_has_one_owner(self) -> None:
        owners: dict[tuple[int, int], int] = {}
        for row in self.sets.used():
            assert owners.setdefault(self.sets.slab(row), row[0]) == row[0]

    @invariant()
    def rows_in_use_keep_their_generation(self) -> None:
        for group, block in self.sets.used():
            assert self.pool.generations[group][block] == self.tickets[group, block]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40, deadline=None)
