"""Where the beginning of a request may come from: sources with the same verbs.

handovers   tickets that came with the request, or that a peer has given for its keys
recall      rows that the tiers of all ranks keep
peers       other engines that are asked; their tickets become handovers
"""

from collections.abc import Mapping
from typing import Literal

from kvstow.adapters.vllm.protocol import BlockIds, EngineRequest, StepOrders, StepResults
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.plan.identity import Identity

HitSource = Literal["host", "p2p", "disk", "external_unspecified"]
"""What vLLM's metrics call the places outside of its device (`CacheHitSource`)."""

Hits = Mapping[HitSource, int]
"""Where the tokens of a load come from."""


class OrderBook:
    """What the workers are to do, collected until the engine takes its next step."""

    def __init__(self) -> None:
        self.step = StepOrders()

    def take(self) -> StepOrders:
        """The step, told once."""
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

    def plan(self, step: StepOrders) -> None:
        """The engine takes its next step."""

    def reset(self, identity: Identity) -> None:
        """Nothing of before is found any more: the engine computes something else from now on."""

    def close(self) -> None:
        """The engine ends."""
