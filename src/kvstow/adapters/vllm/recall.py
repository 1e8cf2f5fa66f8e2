"""Which beginnings of requests come back from the tiers, and which blocks go there."""

from collections.abc import Sequence
from math import lcm

import numpy as np

from kvstow.adapters.vllm.events import TierEvents
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    KeyedBlocks,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
    StoreBlocks,
)
from kvstow.blocks.prompt import Prompt
from kvstow.offload.keys import block_keys
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.retention import can_hit, seen_blocks


class RecallKeys:
    """What is asked, known and planned for requests that may find their beginning again.

    Whether rows are still there only the workers know: the scheduler's side asks them, and
    answers "later" to the engine meanwhile.
    """

    def __init__(
        self, groups: Sequence[Group], identity: Identity, events: TierEvents | None = None
    ) -> None:
        self._groups = tuple(groups)
        self._identity = identity
        self._events = events
        self._unit = lcm(*(group.block_tokens for group in groups))
        self._asked: dict[str, tuple[tuple[bytes, ...], ...]] = {}
        self._length: dict[str, int] = {}

    # ── coming back ───────────────────────────────────────────────────────────────

    def ask(self, request: EngineRequest) -> LookUpKeys | None:
        """What to ask the workers for a new request; None where it has no whole block to
        spare (the last token is always computed anew)."""
        limit = (len(request.tokens) - 1) // self._unit * self._unit
        if limit <= 0 or not request.shareable:
            return None
        keys = self._keys(request, limit)
        self._asked[request.id] = keys
        return LookUpKeys(request=request.id, keys=keys)

    def answer(self, answer: KeysPresent) -> None:
        """Which rows are there: the longest beginning that every group can serve."""
        keys = self._asked.get(answer.request)
        if keys is None:
            return
        lengths = np.arange(0, len(keys[0]) * self._groups[0].block_tokens + 1, self._unit)
        for group, present in zip(self._groups, answer.present, strict=True):
            blocks = np.asarray(present, np.bool_)
            lengths = lengths[can_hit(group.retention, lengths, group.block_tokens, blocks)]
        self._length[answer.request] = int(lengths.max(initial=0))

    def matched(self, request: str, num_computed: int) -> int | None:
        """Tokens beyond `num_computed` that can be brought back; None while it is not known."""
        if request not in self._asked:
            return 0
        if request not in self._length:
            return None
        return max(0, self._length[request] - num_computed)

    def taken(self, request: str, ids: BlockIds, num_external: int) -> LoadBlocks:
        """The engine has given blocks for `num_external` tokens: what to bring where."""
        keys, length = self._asked[request], self._length[request]
        self.forget(request)
        rows: dict[int, KeyedBlocks] = {}
        for g, group in enumerate(self._groups):
            sinks, rest = seen_blocks(group.retention, length, group.block_tokens)
            first = (length - num_external) // group.block_tokens
            places = [k for k in (*sinks, *rest) if k >= first and ids[g][k] > 0]
            rows[g] = tuple(keys[g][k] for k in places), tuple(ids[g][k] for k in places)
        return LoadBlocks(request=request, rows=rows, num_tokens=num_external)

    def forget(self, request: str) -> None:
        """Whatever was asked for this request is no longer of interest."""
        self._asked.pop(request, None)
        self._length.pop(request, None)

    # ── going out ─────────────────────────────────────────────────────────────────

    def store(self, request: EngineRequest, num_tokens: int, ids: BlockIds) -> StoreBlocks | None:
        """What to keep of a finished request: its whole blocks, as far as it holds them."""
        if not request.shareable:
            return None
        rows: dict[int, KeyedBlocks] = {}
        for g, keys in enumerate(self._keys(request, num_tokens)):
            places = [k for k, id in enumerate(ids[g][: len(keys)]) if id > 0]
            rows[g] = tuple(keys[k] for k in places), tuple(ids[g][k] for k in places)
        if not any(keys for keys, _ in rows.values()):
            return None
        return StoreBlocks(request=request.id, rows=rows)

    def _keys(self, request: EngineRequest, num_tokens: int) -> tuple[tuple[bytes, ...], ...]:
        """Per group, the keys of the whole blocks among the first tokens."""
        identity = self._identity.for_request(adapter=request.adapter, salt=request.salt)
        prompt = Prompt.of(
            np.asarray(request.tokens[:num_tokens], np.int64),
            extra=request.extra_before(num_tokens),
        )
        sizes = {group.block_tokens for group in self._groups}
        by_size = {size: tuple(block_keys(identity, prompt, size)) for size in sizes}
        keys = tuple(by_size[group.block_tokens] for group in self._groups)
        if self._events is not None:
            self._events.know(request, keys)
        return keys
