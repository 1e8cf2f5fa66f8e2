"""Which beginnings of requests come back from the tiers, and which blocks go there.

    matched    what all ranks have told that they keep → the longest beginning for every group
    taken      the engine has given blocks: rows come back beside its steps
    computed   blocks that a step fills are queued to be stored while the request runs

Full groups are stored block by block. Of window groups those blocks are stored that a return
needs: one is only possible at a multiple of all groups' tokens per block.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np

from kvstow.adapters.prefill import PROMPT_TOKENS
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    KeyedBlocks,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
)
from kvstow.adapters.vllm.scheduler.events import TierEvents
from kvstow.adapters.vllm.scheduler.journal import EngineJournal
from kvstow.adapters.vllm.scheduler.stored import Level, Levels, RequestKeys, StoredKeys
from kvstow.adapters.vllm.scheduler.stores import RowToStore, StoreQueue
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.retention import Full, can_hit, seen_blocks


@dataclass(slots=True, eq=False)
class RecalledRequest:
    """What is known and planned for one request."""

    request: EngineRequest
    keys: RequestKeys
    passed: list[int] = field(default_factory=list[int])
    """Per group, how many blocks were looked at to be stored, or were there when it began."""
    announced: int = 0
    """Tokens whose blocks events may tell of."""
    asked: bool = False
    partial: KeysPresent | None = None
    """What some ranks have answered."""
    answer: KeysPresent | None = None
    tried: bool = False
    """A load was ordered, and nothing computed since: there is no second one."""
    explained: bool = False
    """The journal was told how much of it was found."""


class Recall:
    """Look-ups, loads and stores of one engine."""

    def __init__(
        self,
        groups: Sequence[Group],
        identity: Identity,
        options: ConnectorOptions,
        *,
        num_blocks: int,
        num_ranks: int = 1,
        events: TierEvents | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        self._events = events
        self._groups = tuple(groups)
        self._identity = identity
        self._options = options
        self._unit = lcm(*(group.block_tokens for group in groups))
        self._sizes = {group.block_tokens for group in groups}
        self._requests: dict[str, RecalledRequest] = {}
        self.due: dict[str, int] = {}
        """By request, with how many tokens a block is full that was not when last looked at."""
        self.known = StoredKeys(len(groups))
        self.journal = _journal(options, identity, self._unit)
        self.stores = StoreQueue(
            [sum(layer.page_bytes for layer in group.layers) for group in groups],
            max_rows=max(1, num_blocks // (8 if options.store_bytes_per_second else 2)),
            bytes_per_second=options.store_bytes_per_second,
            num_ranks=num_ranks,
        )
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.prompt_tokens = 0
        """Tokens of prompts in the step that was planned last."""

    def meet(self, ranks: Sequence[str]) -> None:
        """These ranks have tiers. They may be fewer than there are, where a connector beside ours
        has kept the others from us."""
        self.known.expect(ranks)
        self.stores.num_ranks = max(self.stores.num_ranks, len(ranks))

    # ── coming back ───────────────────────────────────────────────────────────────

    def arrived(
        self,
        request: EngineRequest,
        keys: RequestKeys | None = None,
        *,
        has_tickets: bool = False,
    ) -> LookUpKeys | None:
        """A request is queued, with `keys` where it has some already. What the workers are to be
        asked: whether rows are there that only they can see, on disk or in other processes' memory.
        One that `has_tickets` takes its rows over."""
        if not request.shareable:
            return None
        if keys is None or keys.identity is not self._identity:
            keys = RequestKeys(self._identity, request, self._sizes)
        found = self._requests[request.id] = RecalledRequest(request, keys)
        self._pass(found, 0)
        limit = self._limit(found)
        if has_tickets or not limit or not self._must_ask(found, limit):
            return None
        found.asked = True
        self._announce(found, limit)
        return LookUpKeys(
            request=request.id,
            keys=tuple(tuple(keys.of(g.block_tokens, limit)) for g in self._groups),
        )

    def _must_ask(self, request: RecalledRequest, limit: int) -> bool:
        options = self._options
        if not (options.disk_path or options.host_shared or options.remote):
            return False
        levels = self._levels(request, limit)
        near = self._longest(levels, limit, Level.HOST)
        if options.host_shared or options.remote:
            return near < limit
        return near < self._longest(levels, limit, Level.BELOW)

    def answer(self, answer: KeysPresent) -> None:
        """Which rows are there, by the word of some ranks; known when all have answered."""
        request = self._requests.get(answer.request)
        if request is None:
            return
        request.partial = answer if request.partial is None else request.partial.both(answer)
        if request.partial.ranks >= self.stores.num_ranks:
            request.answer = request.partial

    def matched(self, id: str, num_computed: int) -> int | None:
        """Tokens beyond `num_computed` that can be brought back; None while it is not known.

        Asked of a request that begins, or begins again after it was preempted.
        """
        request = self._requests.get(id)
        if request is None or request.tried:
            return 0
        self._pass(request, num_computed)
        limit = self._limit(request)
        if limit <= num_computed:
            return 0
        if request.asked and request.answer is None:
            return None
        levels = self._levels(request, limit)
        found = self._longest(levels, limit, Level.BELOW if request.answer else Level.HOST)
        if self.journal is not None and not request.explained:
            request.explained = True
            self.journal.looked_up(request.request, found)
        return max(0, found - num_computed)

    def _limit(self, request: RecalledRequest) -> int:
        """What could be loaded at most: the last token is always computed."""
        return max(0, len(request.request.tokens) - 1) // self._unit * self._unit

    def _levels(self, request: RecalledRequest, limit: int) -> list[Levels]:
        found: list[Levels] = []
        for g, group in enumerate(self._groups):
            levels = self.known.levels(g, request.keys.of(group.block_tokens, limit))
            if request.answer is not None:
                told = np.zeros(len(levels), np.uint8)
                present = request.answer.present[g][: len(levels)]
                told[: len(present)] = present
                levels = np.where(levels == Level.HOST, levels, told * np.uint8(Level.BELOW))
            found.append(levels)
        return found

    def _longest(self, levels: Sequence[Levels], limit: int, least: Level) -> int:
        """The longest beginning that every group can serve from rows of at least that level."""
        lengths = np.arange(0, limit + 1, self._unit)
        for group, each in zip(self._groups, levels, strict=True):
            lengths = lengths[can_hit(group.retention, lengths, group.block_tokens, each >= least)]
        return int(lengths.max(initial=0))

    def taken(self, id: str, ids: BlockIds, start: int, length: int) -> LoadBlocks:
        """The engine has given blocks for tokens `[start, length)`: what to bring where.

        Every block that it has given is brought, or the load fails: the engine counts them all as
        filled.
        """
        request = self._requests[id]
        request.tried = True
        self._pass(request, length)
        rows: dict[int, KeyedBlocks] = {}
        for g, group in enumerate(self._groups):
            keys = request.keys.of(group.block_tokens, length)
            first = start // group.block_tokens
            places = [k for k in range(first, len(keys)) if ids[g][k] > 0]
            rows[g] = tuple(keys[k] for k in places), tuple(ids[g][k] for k in places)
        return LoadBlocks(request=id, rows=rows, num_tokens=length - start)

    # ── going out ─────────────────────────────────────────────────────────────────

    def scheduled(self, num_tokens: Mapping[str, int]) -> None:
        """The engine has planned a step with so many tokens of these requests."""
        self.prompt_tokens = sum(count for count in num_tokens.values() if count >= PROMPT_TOKENS)

    def _pass(self, request: RecalledRequest, num_tokens: int) -> None:
        """Blocks of the first tokens are not looked at to be stored."""
        request.passed = [num_tokens // group.block_tokens for group in self._groups]
        self._note_due(request)

    def _note_due(self, request: RecalledRequest) -> None:
        each = zip(request.passed, self._groups, strict=True)
        self.due[request.request.id] = min((done + 1) * group.block_tokens for done, group in each)

    def computed(self, id: str, num_tokens: int, ids: BlockIds) -> None:
        """With the step that is planned, so many tokens of a request are in these blocks."""
        request = self._requests.get(id)
        if request is None:
            return
        request.tried = False
        num_tokens = min(num_tokens, len(request.request.tokens))
        self._announce(request, num_tokens)
        for g in range(len(self._groups)):
            self._queue(request, g, num_tokens, ids[g])
        self._note_due(request)

    def _announce(self, request: RecalledRequest, num_tokens: int) -> None:
        """Events may tell of these blocks from now on."""
        if self._events is not None:
            request.announced = self._events.know(
                request.request, request.keys, request.announced, num_tokens
            )

    def _queue(self, request: RecalledRequest, g: int, num_tokens: int, ids: Sequence[int]) -> None:
        first = request.passed[g]
        keys = request.keys.of(self._groups[g].block_tokens, num_tokens, first)
        for k, (key, block) in enumerate(zip(keys, ids[first:], strict=False), first):
            if self.stores.is_full:
                return
            request.passed[g] = k + 1
            if block > 0 and self._is_wanted(g, k, key):
                self.stores.add(RowToStore(request.request.id, g, key, block))

    def _is_wanted(self, g: int, block: int, key: bytes) -> bool:
        """Whether a row is neither kept nor on its way, and some return needs it."""
        kept = self.known.has(g, key) or self.stores.contains(g, key)
        return not kept and self._returns(g, block)

    def _returns(self, g: int, block: int) -> bool:
        """Whether a request that comes back needs this block of a group: at the next multiple
        of the unit, if at any."""
        group = self._groups[g]
        if isinstance(group.retention, Full):
            return True
        length = -(-(block + 1) * group.block_tokens // self._unit) * self._unit
        sinks, rest = seen_blocks(group.retention, length, group.block_tokens)
        return block in sinks or block in rest

    def make_room(self) -> bool:
        """The engine has no block left. Whether some are free now, or soon, that were held.

        Rows of a request that comes back are looked at again, and counted when it ends.
        """
        given_up = self.stores.give_up_free()
        self._lost(sum(row.request not in self._requests for row in given_up))
        return bool(given_up) or self.stores.will_free

    def _lost(self, num_rows: int) -> None:
        """So many rows are not stored, for good."""
        if num_rows:
            self.counts["not stored rows"] += num_rows

    def forget(self, id: str) -> None:
        """Nothing more of a request is stored, and nothing comes back for it."""
        self._requests.pop(id, None)
        self.due.pop(id, None)

    def finished(self, id: str, num_tokens: int, ids: BlockIds) -> None:
        """A request is over. What is not stored of its blocks is queued, as far as there is room:
        of those, too, that were cached or loaded when it began, and that a tier may have lost."""
        request = self._requests.get(id)
        if request is None or not num_tokens:
            self.forget(id)
            return
        request.passed, request.announced = [0] * len(self._groups), 0
        self.computed(id, num_tokens, ids)
        self.forget(id)
        self._note(request, num_tokens)
        left = sum(
            self._is_wanted(g, k, keys[k])
            for g, group in enumerate(self._groups)
            for keys in [request.keys.of(group.block_tokens, num_tokens)]
            for k in range(request.passed[g], min(len(keys), len(ids[g])))
            if ids[g][k] > 0
        )
        self._lost(left)

    def _note(self, request: RecalledRequest, num_tokens: int) -> None:
        """Have the journal remember a prompt; one that is too slow costs prompts, not steps."""
        if self.journal is None or num_tokens < self._unit:
            return
        if self.journal.is_full:
            self.counts["not noted prompts"] += 1
        else:
            self.journal.stored(request.request, num_tokens)

    def reset(self, identity: Identity) -> None:
        """Rows are kept and found under another identity from now on. Requests that are known
        have blocks of the time before: they are not stored any more, and nothing comes back for
        them."""
        self._identity = identity
        self._requests.clear()
        self.due.clear()
        self._lost(len(self.stores.give_up()))
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
