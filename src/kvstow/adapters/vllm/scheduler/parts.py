"""What the parts of the scheduler's side share, and the verbs of those that are sources.

handovers   tickets that came with the request; other engines that are asked for some
recall      rows that the tiers of all ranks keep
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Literal

from kvstow.adapters.vllm.cache.pages import AFTER_LAST_TOKEN
from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.engine import BlockPool, Request
from kvstow.adapters.vllm.identity import EngineWeights
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    StepOrders,
    StepResults,
    WorkerEndpoint,
)
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity

HitSource = Literal["host", "p2p", "disk", "external_unspecified"]
"""What vLLM's metrics call the places outside of its device (`CacheHitSource`)."""

Hits = Mapping[HitSource, int]
"""Where the tokens of a load come from."""


class BlockHolds:
    """vLLM's block pool: a block is held by one more reference. Blocks of the prefix cache are
    those of caches with one group."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        return len(self._pool.blocks)

    @property
    def num_free(self) -> int:
        return self._pool.get_num_free_blocks()

    def take(self, count: int) -> list[int]:
        """So many free blocks, held; what they cached is forgotten."""
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def cached(self, hashes: Sequence[bytes], count: int) -> list[int]:
        """Of the first `count` blocks of a prompt those that lie in the prefix cache, up to the
        first that does not."""
        ids: list[int] = []
        while len(ids) < count and (hit := self._pool.get_cached_block(hashes[len(ids)], [0])):
            ids.append(hit[0].block_id)
        return ids

    def enter(self, request: Request, blocks: Sequence[int], first: int, block_tokens: int) -> None:
        """Enter a request's blocks into the prefix cache, from number `first` on. They are held,
        and hold what the engine would have computed."""
        each = [self._pool.blocks[block] for block in blocks]
        self._pool.cache_full_blocks(request, each, first, len(each), block_tokens, 0)

    def hold(self, blocks: Sequence[int]) -> None:
        """Nobody is given these blocks until they are released."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def is_last(self, block: int) -> bool:
        """Whether a held block is free once it is released: nobody else has it."""
        return self._pool.blocks[block].ref_cnt == 1


@dataclass(slots=True, kw_only=True, eq=False)
class EngineState:
    """One engine, as all parts see it. A draft model's rows are also made of the tokens `ahead`.
    With `takes_over` loads may write to blocks that the engine gives; with `pulls_early` to those
    that are free in its `pool`. `step` is what the workers are to do when the engine takes its next
    one."""

    groups: tuple[Group, ...]
    num_blocks: int
    options: ConnectorOptions
    weights: EngineWeights
    num_ranks: int = 1
    ahead: int = 0
    takes_over: bool = True
    pulls_early: bool = False
    workers: tuple[WorkerEndpoint, ...] = ()
    pool: BlockHolds | None = None
    counts: EngineCounts = field(default_factory=EngineCounts)
    step: StepOrders = field(default_factory=StepOrders)

    @property
    def blocks(self) -> BlockHolds:
        """The engine's pool, which it has told of before its first request."""
        assert self.pool is not None, "vLLM has not bound its pool yet"
        return self.pool

    @property
    def unit(self) -> int:
        """Tokens after which blocks of all groups end."""
        return lcm(*(group.block_tokens for group in self.groups))

    @property
    def has_states(self) -> bool:
        """Whether some group keeps recurrent states: of a prefix, that after its last token."""
        return any(group.retention == AFTER_LAST_TOKEN for group in self.groups)

    def take_step(self) -> StepOrders:
        """What was ordered; told once."""
        step, self.step = self.step, StepOrders()
        return step


class PrefixSource:
    """A source of prefixes. A verb does nothing unless a source says otherwise."""

    def arrived(self, request: EngineRequest, keys: RequestKeys, *, has_tickets: bool) -> None:
        """A request is queued."""

    def reach(self, id: str, num_computed: int, num_held: int) -> int | None:
        """How many of its first tokens could be had, if more than the `num_held` that the sources
        before this one have; `num_computed` of them are in the engine. None: ask again later."""
        return num_held

    def has(self, id: str) -> bool:
        """Whether a load of this request can still be ordered."""
        return False

    def load(self, id: str, ids: BlockIds, start: int, num_tokens: int) -> Hits:
        """Order tokens `[start, num_tokens)` into these blocks."""
        raise NotImplementedError

    def computes(self, id: str) -> None:
        """The request goes on to compute, after a load or without one."""

    def ended(self, id: str, ids: BlockIds, num_tokens: int) -> None:
        """The request is over, with the cache of so many tokens in these blocks."""

    def apply(self, results: StepResults) -> None:
        """What the workers have told in a step."""

    def plan(self) -> None:
        """The engine takes its next step."""

    def reset(self, identity: Identity) -> None:
        """Nothing of before is found any more: the engine computes something else from now on."""

    def close(self) -> None:
        """The engine ends."""
