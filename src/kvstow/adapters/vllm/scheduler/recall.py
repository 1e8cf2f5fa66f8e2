"""Which beginnings of requests come back from the tiers, and which blocks go there.

    matched    what all ranks have told that they keep → the longest beginning for every group
    taken      the engine has given blocks: rows come back beside its steps
    computed   blocks that a step fills are queued to be stored while the request runs

Full groups are stored block by block. Of window groups those blocks are stored that a return
needs: one is only possible at a multiple of all groups' tokens per block.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    HintedRows,
    KeyedBlocks,
    KeysPresent,
    LoadBlocks,
    LoadLimits,
    LookUpKeys,
    StepResults,
)
from kvstow.adapters.vllm.scheduler.events import TierEvents
from kvstow.adapters.vllm.scheduler.holds import RowToStore, StoreQueue
from kvstow.adapters.vllm.scheduler.journal import EngineJournal
from kvstow.adapters.vllm.scheduler.key_index import KeyIndex, Level, Levels, RequestKeys
from kvstow.adapters.vllm.scheduler.parts import EngineState, Hits, HitSource, PrefixSource
from kvstow.plan.identity import Identity
from kvstow.plan.retention import Full, longest_prefix, seen_blocks
from kvstow.plan.view import align_up

Stage = Literal["asking", "answered", "loading"]
"""What the workers keep of a request is being asked; was answered; a load was ordered, and nothing
computed since: there is no second one."""


@dataclass(slots=True, eq=False)
class RecalledRequest:
    """What is known and planned for one request."""

    request: EngineRequest
    keys: RequestKeys
    passed: list[int]
    """Per group, how many blocks were looked at to be stored, or were there when it began."""
    limits: LoadLimits
    stage: Stage = "answered"
    answer: KeysPresent | None = None
    """What some ranks have answered, all of them once it is known."""
    announced: int = 0
    """Tokens whose blocks events may tell of."""
    due: int = 0
    """With so many tokens a block is full that was not when last looked at."""


class Recall(PrefixSource):
    """Look-ups, loads and stores of one engine."""

    def __init__(self, engine: EngineState, events: TierEvents | None = None) -> None:
        self._engine = engine
        self._events = events
        self._groups = engine.groups
        self._identity = engine.weights.identity
        self._unit = engine.unit
        self._requests: dict[str, RecalledRequest] = {}
        self.index = KeyIndex(len(engine.groups))
        self.journal = _journal(engine.options, self._identity, self._unit)
        self.stores = StoreQueue(engine)

    def meet(self) -> None:
        """The workers have tiers. They may be fewer than there are, where a connector beside ours
        has kept the others from us."""
        self.index.expect([worker.agent for worker in self._engine.workers])

    # ── coming back ───────────────────────────────────────────────────────────────

    def arrived(self, request: EngineRequest, keys: RequestKeys, *, has_tickets: bool) -> None:
        """The workers are asked whether rows are there that only they can see, on disk or in other
        processes' memory. A request that `has_tickets` takes its rows over."""
        if not request.shareable:
            return
        for action, _ in request.hints:
            self._engine.counts[f"{Count.HINTS} {action or 'other'}"] += 1
        if keys.identity is not self._identity:
            sizes = {group.block_tokens for group in self._groups}
            keys = RequestKeys(self._identity, request, sizes, ahead=self._engine.ahead)
        entry = RecalledRequest(request, keys, [0] * len(self._groups), request.load_limits)
        self._requests[request.id] = entry
        self._note_due(entry)
        limit = self._limit(entry)
        if has_tickets or not limit or not self._must_ask(entry, limit):
            return
        entry.stage = "asking"
        self._announce(entry, limit)
        each = tuple(tuple(keys.of(g.block_tokens, limit)) for g in self._groups)
        self._engine.step.lookups.append(LookUpKeys(request=request.id, keys=each))

    def _must_ask(self, entry: RecalledRequest, limit: int) -> bool:
        options = self._engine.options
        has_more = options.disk_path or options.host_shared or options.remote
        if not has_more or self._least_level(entry) != Level.BELOW:
            return False
        is_listed = not options.host_shared and not options.remote
        far = self._longest(entry, limit, Level.BELOW) if is_listed else limit
        return self._longest(entry, limit, Level.HOST) < far

    def apply(self, results: StepResults) -> None:
        for answer in results.present.values():
            self._answered(answer)
        for rank, kept in results.kept.items():
            self.index.update(rank, kept)
        for job, ranks in results.stored.items():
            self.stores.stored(job, ranks)
        if self._events is not None:
            self._events.changed(results.changes)

    def _answered(self, answer: KeysPresent) -> None:
        """Which rows are there, by the word of some ranks; known when all have answered."""
        entry = self._requests.get(answer.request)
        if entry is not None:
            entry.answer = answer if entry.answer is None else entry.answer.both(answer)
            if entry.stage == "asking" and entry.answer.ranks >= self._engine.num_ranks:
                entry.stage = "answered"

    def reach(self, id: str, num_computed: int, num_held: int) -> int | None:
        """Asked of a request that begins, or begins again after it was preempted."""
        entry = self._requests.get(id)
        if entry is None or entry.stage == "loading":
            return num_held
        self._pass(entry, num_computed)
        limit = self._limit(entry, num_computed)
        if limit <= num_held:
            return num_held
        if entry.stage == "asking":
            return None
        return max(num_held, self._longest(entry, limit))

    def _least_level(self, entry: RecalledRequest) -> Level:
        """From where rows of this request may come."""
        allows = entry.limits.allows
        if allows("storage", "local") or (
            self._engine.options.remote and allows("storage", "remote")
        ):
            return Level.BELOW
        return Level.HOST

    def _limit(self, entry: RecalledRequest, num_computed: int = 0) -> int:
        """What could be loaded at most: the last token is always computed, and keys may cover
        what comes behind a block."""
        tokens = len(entry.request.tokens) - max(1, self._engine.ahead)
        most = entry.limits.up_to(tokens, num_computed)
        return max(0, most) // self._unit * self._unit

    def _levels(self, entry: RecalledRequest, g: int, num_blocks: int) -> Levels:
        """Where the first blocks of a group are kept, by every rank, as far as they may come from
        there."""
        size = self._groups[g].block_tokens
        levels = self.index.levels(g, entry.keys.of(size, num_blocks * size))
        if not entry.limits.allows("cpu", "local"):
            levels[levels == Level.HOST] = Level.GONE
        if entry.answer is None:
            return levels
        below = np.zeros(num_blocks, np.uint8)
        present = entry.answer.present[g][:num_blocks]
        below[: len(present)] = present
        return np.where(levels == Level.HOST, levels, below * np.uint8(Level.BELOW))

    def _longest(self, entry: RecalledRequest, limit: int, least: Level | None = None) -> int:
        """The longest beginning that every group can serve from rows of at least that level; of
        the least that may be used, where none is named: below only what the workers have found."""
        if least is None:
            least = self._least_level(entry) if entry.answer else Level.HOST
        return longest_prefix(
            enumerate(self._groups),
            limit,
            lambda g, num_blocks: self._levels(entry, g, num_blocks) >= least,
        )

    def has(self, id: str) -> bool:
        """Whether something may come back for a request: there was no reset since it came."""
        return id in self._requests

    def load(self, id: str, ids: BlockIds, start: int, num_tokens: int) -> Hits:
        """Every block that the engine has given is brought, or the load fails: the engine counts
        them all as filled."""
        entry = self._requests[id]
        self._explain(entry)
        entry.stage = "loading"
        self._pass(entry, num_tokens)
        rows: dict[int, KeyedBlocks] = {}
        for g, group in enumerate(self._groups):
            keys = entry.keys.of(group.block_tokens, num_tokens)
            first = start // group.block_tokens
            places = [k for k in range(first, len(keys)) if ids[g][k] > 0]
            rows[g] = tuple(keys[k] for k in places), tuple(ids[g][k] for k in places)
        self._engine.step.loads.append(
            LoadBlocks(request=id, rows=rows, num_tokens=num_tokens - start)
        )
        return self._hits(rows, num_tokens - start)

    def _hits(self, rows: Mapping[int, KeyedBlocks], num_tokens: int) -> Hits:
        """The tokens by the tiers that hold the rows of the group that has most of them."""
        g, (keys, _) = max(rows.items(), key=lambda each: len(each[1][0]))
        hits = Counter[HitSource]()
        for level in self.index.levels(g, keys).tolist():
            hits[self._source_of(level)] += self._groups[g].block_tokens
        if not hits:
            return {"host": num_tokens}
        hits[next(iter(hits))] += num_tokens - hits.total()
        return {source: count for source, count in hits.items() if count > 0}

    def _source_of(self, level: int) -> HitSource:
        if level == Level.HOST:
            return "host"
        return (
            "disk"
            if level == Level.BELOW or not self._engine.options.remote
            else "external_unspecified"
        )

    def computes(self, id: str) -> None:
        entry = self._requests.get(id)
        if entry is not None and entry.stage == "answered":
            self._explain(entry)

    def _explain(self, entry: RecalledRequest) -> None:
        """Have the journal say why no more of a request is found."""
        if self.journal is not None:
            self.journal.looked_up(entry.request, self._longest(entry, self._limit(entry)))

    # ── going out ─────────────────────────────────────────────────────────────────

    def _pass(self, request: RecalledRequest, num_tokens: int) -> None:
        """Blocks of the first tokens are not looked at to be stored."""
        request.passed = [num_tokens // group.block_tokens for group in self._groups]
        self._note_due(request)

    def _note_due(self, request: RecalledRequest) -> None:
        each = zip(request.passed, self._groups, strict=True)
        tokens = min((done + 1) * group.block_tokens for done, group in each)
        request.due = tokens + self._engine.ahead

    def is_due(self, id: str, num_tokens: int) -> bool:
        """Whether a request with so many tokens has a block that may be stored, and there is room
        for it. What finds none now is looked at again when there is some."""
        request = self._requests.get(id)
        return request is not None and num_tokens >= request.due and not self.stores.is_full

    def computed(self, id: str, num_tokens: int, ids: BlockIds) -> int:
        """With the step that is planned, so many tokens of a request are in these blocks. How many
        rows there is no room for now."""
        request = self._requests.get(id)
        if request is None:
            return 0
        if request.stage == "loading":
            request.stage = "answered"
        num_tokens = self._num_keyed(request, num_tokens)
        self._announce(request, num_tokens)
        each = range(len(self._groups))
        num_left = sum(self._queue(request, g, num_tokens, ids[g]) for g in each)
        self._note_due(request)
        return num_left

    def _num_keyed(self, request: RecalledRequest, num_tokens: int) -> int:
        """Of the first tokens, those whose blocks have keys."""
        return max(0, min(num_tokens, len(request.request.tokens)) - self._engine.ahead)

    def _announce(self, request: RecalledRequest, num_tokens: int) -> None:
        """Events may tell of these blocks from now on."""
        if self._events is not None:
            request.announced = self._events.know(
                request.request, request.keys, request.announced, num_tokens
            )

    def _queue(self, request: RecalledRequest, g: int, num_tokens: int, ids: Sequence[int]) -> int:
        """Queue rows that are wanted, as far as there is room; how many are left."""
        first, num_left = request.passed[g], 0
        keys = request.keys.of(self._groups[g].block_tokens, num_tokens, first)
        for k, (key, block) in enumerate(zip(keys, ids[first:], strict=False), first):
            is_wanted = block > 0 and self._is_wanted(g, k, key)
            if self.stores.is_full:
                num_left += is_wanted
                continue
            request.passed[g] = k + 1
            if is_wanted:
                self.stores.add(RowToStore(request.request.id, g, key, block))
        return num_left

    def _is_wanted(self, g: int, block: int, key: bytes) -> bool:
        """Whether a row is neither kept nor on its way, and some return needs it."""
        kept = self.index.has(g, key) or self.stores.contains(g, key)
        return not kept and self._returns(g, block)

    def _returns(self, g: int, block: int) -> bool:
        """Whether a request that comes back needs this block of a group: at the next multiple
        of the unit, if at any."""
        group = self._groups[g]
        if isinstance(group.retention, Full):
            return True
        length = align_up((block + 1) * group.block_tokens, self._unit)
        return block in seen_blocks(group.retention, length, group.block_tokens)

    def make_room(self) -> bool:
        """The engine has no block left. Whether some are free now, or soon, that were held.

        Rows of a request that comes back are looked at again, and counted when it ends.
        """
        given_up = self.stores.give_up_free()
        self._lost(sum(row.request not in self._requests for row in given_up))
        return bool(given_up) or self.stores.will_free

    def give_up(self) -> None:
        """No step may come for long: rows that wait for one are not stored."""
        self._lost(len(self.stores.give_up()))

    def _lost(self, num_rows: int) -> None:
        """So many rows are not stored, for good."""
        if num_rows:
            self._engine.counts[Count.NOT_STORED_ROWS] += num_rows

    def forget(self, id: str) -> None:
        """Nothing more of a request is stored, and nothing comes back for it."""
        self._requests.pop(id, None)

    def plan(self) -> None:
        self._engine.step.store = self.stores.take()

    def ended(self, id: str, ids: BlockIds, num_tokens: int) -> None:
        """A request is over. What is not stored of its blocks is queued, as far as there is room:
        of those, too, that were cached or loaded when it began, and that a tier may have lost."""
        request = self._requests.get(id)
        if request is None or not num_tokens:
            self.forget(id)
            return
        request.passed, request.announced = [0] * len(self._groups), 0
        self._lost(self.computed(id, num_tokens, ids))
        self.forget(id)
        self._note(request, num_tokens)
        num_tokens = self._num_keyed(request, num_tokens)
        for action, seconds in request.request.hints:
            if action is not None and action != "prefetch":
                keys = tuple(
                    tuple(request.keys.of(g.block_tokens, num_tokens)) for g in self._groups
                )
                self._engine.step.hints.append(
                    HintedRows(action=action, seconds=seconds, keys=keys)
                )

    def _note(self, request: RecalledRequest, num_tokens: int) -> None:
        """Have the journal remember a prompt; one that is too slow costs prompts, not steps."""
        if self.journal is None or num_tokens < self._unit:
            return
        if self.journal.is_full:
            self._engine.counts[Count.NOT_NOTED_PROMPTS] += 1
        else:
            self.journal.stored(request.request, num_tokens)

    def reset(self, identity: Identity) -> None:
        """Rows are kept and found under another identity from now on. Requests that are known
        have blocks of the time before: they are not stored any more, and nothing comes back for
        them."""
        self._identity = identity
        self._requests.clear()
        self.give_up()
        if self.journal is not None:
            self.journal.identity = identity

    def close(self) -> None:
        """Let go of the journal."""
        if self.journal is not None:
            self.journal.close()


def _journal(options: ConnectorOptions, identity: Identity, unit: int) -> EngineJournal | None:
    where = options.journal_directory
    if where is None:
        return None
    return EngineJournal(where, identity, unit, tokens=options.journal == "tokens")
