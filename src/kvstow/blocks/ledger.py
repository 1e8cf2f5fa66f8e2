"""Ledger: all blocks of all requests, in all groups.

    admit     a prompt gets rows in every group, shared ones where its beginning is cached
    grow      many requests at once get room for more tokens; windows move on
    fork      a request twice; a block that is not full is copied before it is written
    release   what was computed stays cached, as long as there is room

A step that does not fit changes nothing but this: rows that no later token can see are
given back, and prefixes that were looked at count as used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.blocks.placement import RowDemand
from kvstow.blocks.pool import Pool
from kvstow.blocks.prefix import MISS, PrefixCache, PrefixHit, PromptSource
from kvstow.blocks.prompt import Hashes, Prompt
from kvstow.blocks.requests import Requests
from kvstow.blocks.rows import NONE
from kvstow.blocks.table import (
    BlockTable,
    Growth,
    RowCopy,
    SharedTail,
    by_block,
    demands_of,
    growths,
    shared_tails,
)
from kvstow.errors import BlockError, OutOfBlocks
from kvstow.plan.retention import Encoder, State
from kvstow.plan.view import Ints, ceil_div
from kvstow.route.blocks import Blocks

Handles = int | Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Admission:
    """A request, the tokens it need not compute, and what to copy before it starts."""

    request: int
    hit_tokens: int
    copies: tuple[RowCopy, ...]


class Checkpoint(NamedTuple):
    """A running state to be copied for others, who find it by the hash of the tokens before it."""

    group: int
    row: int
    hashes: Hashes
    source: PromptSource


class Ledger:
    """Requests on a pool.

    Requests belong to the thread that owns the pool and are changed only there (see `Pool`).
    Make the copies that a method returns, in their order, before you compute the tokens that
    it made room for. Without `caching` nothing is kept after a release.
    """

    def __init__(self, pool: Pool, *, caching: bool = True) -> None:
        if not isinstance(pool, Pool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BlockError(
                f"a ledger needs a Pool, not {type(pool).__name__}\n\nhint: Ledger(Pool(layout))"
            )
        layout = pool.layout
        self.pool = pool
        self.groups = tuple(rows.group for rows in layout.groups)
        self._requests = Requests()
        self._tables = [
            BlockTable(group, gaps=pool.has_gaps(g)) for g, group in enumerate(self.groups)
        ]
        self._states = {
            g: self._tables[g]
            for g, group in enumerate(self.groups)
            if isinstance(group.retention, State)
        }
        self._encoders = {
            g: ceil_div(group.retention.tokens, group.block_tokens)
            for g, group in enumerate(self.groups)
            if isinstance(group.retention, Encoder)
        }
        self._growing = {
            g: table
            for g, table in enumerate(self._tables)
            if g not in self._encoders and g not in self._states
        }
        num_rows = [layout.num_blocks(g) for g in range(len(self.groups))]
        self.prefixes = PrefixCache(self.groups, num_rows) if caching else None
        if self.prefixes:
            pool.on_evict.append(self.prefixes.remove)

    # ── questions ─────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._requests)

    def num_tokens(self, request: int) -> int:
        """Tokens of the request that have their rows."""
        return int(self._requests.num_tokens[self._requests.slots(request)[0]])

    def blocks(self, request: int) -> dict[int, Blocks]:
        """By group, the blocks that the request holds; of a recurrent one the running row.

        Those that a pull did not fill are its `partial` ones; of those that `Pool.unknown` names
        nothing may be used.
        """
        slot = int(self._requests.slots(request)[0])
        listed = {g: table.blocks(slot) for g, table in enumerate(self._tables)}
        return {
            g: Blocks(each.ids, each.index, partial=each.index[self.pool.suspect(g, each.ids)])
            for g, each in listed.items()
        }

    def hit_tokens(self, prompt: Prompt) -> int:
        """How many tokens of the prompt need not be computed, if it were admitted now."""
        return self.prefixes.hit(prompt).num_tokens if self.prefixes else 0

    def unfilled_tokens(self, group: int) -> int:
        """Token slots that all requests together have in a group and do not use yet."""
        table = self._tables[group]
        slots = self._requests.living()
        room = table.end[slots] * table.block_tokens - self._requests.num_tokens[slots]
        return int(room[room > 0].sum())

    # ── admit ─────────────────────────────────────────────────────────────────────

    def admit(self, prompt: Prompt | int, *, num_tokens: int | None = None) -> Admission:
        """Admit a request, with rows for the first `num_tokens` tokens of its prompt.

        Without `num_tokens`, for all of them. `prompt` may be a number of tokens whose ids are
        not known. Raises `OutOfBlocks`, having changed nothing, with what is needed and what is
        free in every group.
        """
        self.pool.check_thread()
        content = prompt if isinstance(prompt, Prompt) else None
        length = len(prompt) if isinstance(prompt, Prompt) else _num_tokens(prompt)
        if length < 1:
            raise BlockError(f"a request of {length} tokens cannot be admitted, 1 is the least")
        if num_tokens is not None and not 1 <= num_tokens <= length:
            raise BlockError(f"{num_tokens} tokens of a prompt of {length} cannot be admitted")
        hit = self.prefixes.hit(content) if self.prefixes and content else MISS
        upto = max(hit.num_tokens, length if num_tokens is None else num_tokens)
        held = self._hold_for_admission(hit, upto)
        slot = self._requests.open(upto, content, hit.num_tokens)
        copies = tuple(
            copy for g in range(len(self.groups)) for copy in self._open(slot, g, hit, held[g])
        )
        return Admission(self._requests.handle(slot), hit.num_tokens, copies)

    def _hold_for_admission(self, hit: PrefixHit, num_tokens: int) -> dict[int, Ints]:
        demands: list[RowDemand] = []
        for g, group in enumerate(self.groups):
            if g in self._growing:
                step = group.block_tokens
                count = ceil_div(num_tokens, step) - hit.num_tokens // step
                demands += demands_of(g, self._growing[g], count, num_tokens)
            else:
                demands.append(RowDemand(g, self._encoders.get(g, 1)))
        for g, part in hit.blocks.items():
            self.pool.share(g, part.ids)
        try:
            held = self.pool.hold_all(demands)
        except OutOfBlocks:
            for g, part in hit.blocks.items():
                self.pool.release(g, part.ids)
            raise
        parts: dict[int, list[Ints]] = {}
        for demand, ids in zip(demands, held, strict=True):
            parts.setdefault(demand.group, []).append(ids)
        return {g: by_block(ids) for g, ids in parts.items()}

    def _open(self, slot: int, g: int, hit: PrefixHit, ids: Ints) -> Sequence[RowCopy]:
        """Enter a request's rows of one group: what is shared, then what is new."""
        table, shared = self._tables[g], hit.blocks.get(g)
        if shared is None or g in self._states:
            table.open(slot, 0, ids)
        else:
            start = hit.num_tokens // table.block_tokens
            table.open(slot, start - len(shared), np.concatenate((shared.ids, ids)))
        if shared is None or g not in self._states or not len(shared):
            return ()
        self.pool.release(g, shared.ids)
        return (RowCopy(g, int(shared.ids[0]), int(ids[0])),)

    # ── grow ──────────────────────────────────────────────────────────────────────

    def grow(self, requests: Handles, num_tokens: npt.ArrayLike) -> tuple[RowCopy, ...]:
        """Make room for `num_tokens` tokens in all per request; for all requests or for none.

        Says as well that all tokens before these have been computed: whole blocks of them
        can be found as prefixes from now on, and what no later token sees is given back.
        """
        self.pool.check_thread()
        slots = self._requests.slots(requests)
        before = self._requests.num_tokens[slots]
        after = np.broadcast_to(np.asarray(num_tokens, np.int64), before.shape)
        if (after < before).any():
            at = int((after < before).argmax())
            raise BlockError(
                f"a request of {before[at]} tokens cannot shrink to {after[at]}\n\n"
                "hint: the number counts all its tokens, not those that are added"
            )
        self._requests.check_distinct(slots)
        if self.prefixes:
            self._store_computed(slots, before)
        copies = self._grow_rows(slots, before, after)
        self._requests.num_tokens[slots] = after
        return copies

    def _grow_rows(self, slots: Ints, before: Ints, after: Ints) -> tuple[RowCopy, ...]:
        """Hold and enter what is new: blocks, copies of shared tails, checkpoints."""
        growing = self._growing_rows(slots, before, after)
        grows = after > before
        tails = self._shared_tails(slots[grows], before[grows])
        due = self._checkpoints_due(slots[grows], before[grows])
        demands = [demand for growth in growing for demand in growth.demands]
        ids = self.pool.hold_all([*demands, *(RowDemand(tail.group, 1) for tail in tails)])
        rows = [int(row[0]) for row in ids[len(demands) :]]
        copies = [self._copied(tail, row) for tail, row in zip(tails, rows, strict=True)]
        held = iter(ids)
        for growth in growing:
            growth.enter(list(islice(held, len(growth.demands))))
        if tails:
            self._requests.forked[slots[grows]] = False
        return (*copies, *(self._keep_checkpoints(due) if due else ()))

    def _growing_rows(self, slots: Ints, before: Ints, after: Ints) -> list[Growth]:
        """The rows that requests need to grow. Windows move on, whether they fit or not."""
        growing: list[Growth] = []
        for g, table in self._growing.items():
            more = ceil_div(after, table.block_tokens) - table.end[slots]
            if table.moves:
                self.pool.release(g, table.slide(slots, before))
            growing += growths(g, table, slots, more, after)
        return growing

    def received(self, requests: Handles) -> None:
        """All tokens of requests were brought from elsewhere, not computed here.

        A pull or a load brings what the next token sees. Rows that windows have left behind hold
        nothing, so they are given back: nobody may find them as a prefix, or store them.
        """
        self.pool.check_thread()
        slots = self._requests.slots(requests)
        tokens = self._requests.num_tokens[slots]
        for g, table in self._growing.items():
            if table.moves:
                self.pool.release(g, table.slide(slots, tokens))

    def _shared_tails(self, slots: Ints, num_tokens: Ints) -> tuple[SharedTail, ...]:
        forked = self._requests.forked[slots]
        if not forked.any():
            return ()
        return shared_tails(self.pool, self._growing, slots[forked], num_tokens[forked])

    def _copied(self, tail: SharedTail, row: int) -> RowCopy:
        self._growing[tail.group].replace_last(tail.slot, row)
        self.pool.inherit(tail.group, tail.row, row)
        self.pool.release(tail.group, [tail.row])
        return RowCopy(tail.group, tail.row, row)

    # ── prefixes ──────────────────────────────────────────────────────────────────

    def append(self, request: int, tokens: npt.ArrayLike) -> None:
        """Append the ids of generated tokens, so that their blocks can be found as prefixes.

        For requests that were admitted with a prompt.
        """
        self.pool.check_thread()
        slot = int(self._requests.slots(request)[0])
        source = self._requests.sources[slot]
        if source is None:
            raise BlockError(f"request {request} was admitted without a prompt")
        source.prompt = source.prompt.extended(tokens)
        self._requests.num_known[slot] = len(source.prompt)

    def _store_computed(self, slots: Ints, computed: Ints) -> None:
        """Make whole blocks of computed tokens, whose ids are known, known as prefixes."""
        ready = np.minimum(computed, self._requests.num_known[slots])
        for i in np.nonzero(ready > self._requests.num_stored[slots])[0].tolist():
            self._store_computed_of(int(slots[i]), int(ready[i]))

    def _store_computed_of(self, slot: int, num_tokens: int) -> None:
        source = self._requests.sources[slot]
        assert source is not None
        stored = int(self._requests.num_stored[slot])
        self._requests.num_stored[slot] = num_tokens
        for g, table in self._growing.items():
            first, end = stored // table.block_tokens, num_tokens // table.block_tokens
            first = max(first, int(table.first[slot]))
            if first < end:
                self._store(slot, g, first, end, source)

    def _store(self, slot: int, g: int, first: int, end: int, source: PromptSource) -> None:
        """Make blocks `[first, end)` of a request in one group known; it holds all of them."""
        assert self.prefixes is not None
        table = self._growing[g]
        hashes = source.prompt.hashes(table.block_tokens)[first:end]
        rows = table.ids(slot, first, end)
        usable = ~self.pool.suspect(g, rows)
        self.pool.keep(g, self.prefixes.store(g, rows[usable], hashes[usable], source))

    # A state is somewhere only after all its tokens and before the next one. So a checkpoint is
    # made when a request that stands at a multiple of `block_tokens` goes on: the engine copies the
    # running row first. Only later requests may start from it.

    def _checkpoints_due(self, slots: Ints, num_tokens: Ints) -> list[Checkpoint]:
        """Of requests that go on from `num_tokens`, the states that later requests could start
        from, and have no such yet."""
        due: list[Checkpoint] = []
        if not self.prefixes:
            return due
        for g, table in self._states.items():
            at = np.nonzero((num_tokens % table.block_tokens == 0) & (num_tokens > 0))[0]
            for i in at.tolist():
                slot, tokens = int(slots[i]), int(num_tokens[i])
                source = self._requests.sources[slot]
                if source is None or len(source.prompt) < tokens:
                    continue
                row, hashes = table.all_ids(slot), source.prompt.hash_after(tokens)
                if not (self.pool.suspect(g, row) | self.prefixes.has(g, hashes)).any():
                    due.append(Checkpoint(g, int(row[0]), hashes, source))
        return due

    def _keep_checkpoints(self, due: Sequence[Checkpoint]) -> list[RowCopy]:
        """Cache copies of states at once; none where there is no room for all."""
        assert self.prefixes is not None
        try:
            held = self.pool.hold_all([RowDemand(each.group, 1) for each in due])
        except OutOfBlocks:
            return []
        for each, row in zip(due, held, strict=True):
            stored = self.prefixes.store(each.group, row, each.hashes, each.source)
            self.pool.keep(each.group, stored)
            self.pool.release(each.group, row)
        return [RowCopy(d.group, d.row, int(row[0])) for d, row in zip(due, held, strict=True)]

    # ── fork, release ─────────────────────────────────────────────────────────────

    def fork(self, request: int) -> Admission:
        """The same request once more: all blocks shared, states copied; all or nothing."""
        self.pool.check_thread()
        slot = int(self._requests.slots(request)[0])
        rows = self.pool.hold_all([RowDemand(g, 1) for g in self._states])
        source = self._requests.sources[slot]
        twin = self._requests.open(
            int(self._requests.num_tokens[slot]),
            source and source.prompt,
            int(self._requests.num_stored[slot]),
        )
        copies: list[RowCopy] = []
        states = dict(zip(self._states, rows, strict=True))
        for g, table in enumerate(self._tables):
            ids = table.all_ids(slot)
            if g in states:
                copies.append(RowCopy(g, int(ids[0]), int(states[g][0])))
                self.pool.inherit(*copies[-1])
                table.open(twin, 0, states[g])
            else:
                self.pool.share(g, ids)
                table.open(twin, int(table.first[slot]), ids)
        self._requests.forked[[slot, twin]] = True
        num_tokens = int(self._requests.num_tokens[slot])
        return Admission(self._requests.handle(twin), num_tokens, tuple(copies))

    def release(self, requests: Handles, *, computed_tokens: npt.ArrayLike | None = None) -> None:
        """Give back all rows of requests.

        Blocks of tokens that have been computed, all of them if not said otherwise, stay
        cached where their tokens are known.
        """
        self.pool.check_thread()
        slots = self._requests.slots(requests)
        self._requests.check_distinct(slots)
        if self.prefixes:
            tokens = self._requests.num_tokens[slots]
            if computed_tokens is not None:
                tokens = np.minimum(tokens, np.asarray(computed_tokens, np.int64))
            self._store_computed(slots, tokens)
        for g, table in enumerate(self._tables):
            ids = [table.all_ids(slot) for slot in slots.tolist()]
            self.pool.release(g, ids[0] if len(ids) == 1 else np.concatenate((NONE, *ids)))
        for slot in map(int, slots):
            self._requests.close(slot)

    # ── integrity ─────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raises with every number that does not add up; changes nothing. Slow, for tests."""
        self.pool.check()
        broken: list[str] = []
        slots = self._requests.living()
        for g, group in enumerate(self.groups):
            each = [self._tables[g].all_ids(slot) for slot in slots.tolist()]
            rows = np.concatenate(each) if each else NONE
            twice = sum(len(ids) - len(np.unique(ids)) for ids in each)
            if twice:
                broken.append(f"group {group.name!r}: {twice} ids are in one request twice")
            uses = np.bincount(rows, minlength=self.pool.layout.num_blocks(g))
            holds = self.pool.holds(g, np.arange(len(uses)))
            for row in np.nonzero(uses > holds)[0][:3]:
                broken.append(
                    f"group {group.name!r}: block {row} is in {uses[row]} requests and has "
                    f"{holds[row]} holds"
                )
            findable = self.prefixes.rows(g) if self.prefixes else NONE
            for row in findable[~self.pool.kept(g, findable)][:3]:
                broken.append(f"group {group.name!r}: block {row} can be found and is not kept")
        if broken:
            raise BlockError("\n".join(broken))


def _num_tokens(num_tokens: int) -> int:
    """The number of tokens, of numpy's kinds too. BlockError for tokens that are no `Prompt`: they
    would be counted, and found by nobody."""
    try:
        return int(index(num_tokens))
    except TypeError:
        raise BlockError(
            f"{type(num_tokens).__name__} is neither a prompt nor a number of tokens\n\n"
            "hint: kvstow.Prompt.of(tokens)"
        ) from None
