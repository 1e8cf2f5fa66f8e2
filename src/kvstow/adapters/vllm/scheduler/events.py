"""Events of the tiers, in the stream in which vLLM publishes its own.

A block in host memory or on disk is called by the hash that vLLM gives it on the device, so that a
router joins the two. The first rank's tiers speak for all ranks: they keep and lose the same rows
at about the same time, and a router only needs a hint.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

from kvstow.adapters.vllm.protocol import EngineRequest
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.errors import SpecError
from kvstow.events.announce import Announcer, GroupKind
from kvstow.events.format import CacheEvent
from kvstow.offload.events import announce_change
from kvstow.offload.watch import TierChange
from kvstow.plan.group import Group

log = logging.getLogger(__name__)

_WORD = (1 << 64) - 1

SWITCH = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": '
    '"tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)


def check_published(kv_events_config: Any) -> None:
    """SpecError unless vLLM publishes events, with hashes as numbers."""
    if not getattr(kv_events_config, "enable_kv_cache_events", False):
        raise SpecError(
            "option 'events' is true, and vLLM publishes no events that ours could join\n\n"
            f"hint: {SWITCH}"
        )
    if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") != "1":
        raise SpecError(
            "option 'events' is true, and vLLM publishes block hashes as bytes\n\n"
            "hint: leave VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES unset"
        )
    endpoint = str(getattr(kv_events_config, "endpoint", ""))
    if endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint:
        log.warning(
            "vLLM connects to %s to publish events, and routers that connect there hear nothing; "
            "hint: it listens on tcp://*:PORT",
            endpoint,
        )


class TierEvents:
    """Events of one engine's tiers, in its scheduler's process.

    `indices` are vLLM's numbers of the groups; `hash_tokens` is how many tokens one of its block
    hashes covers.
    """

    def __init__(self, groups: Sequence[Group], indices: Sequence[int], hash_tokens: int) -> None:
        pairs = zip(groups, indices, strict=True)
        self._kinds = [GroupKind.of(group, index) for group, index in pairs]
        self._hash_tokens = hash_tokens
        self._announcer = Announcer(self._kinds)

    def know(self, request: EngineRequest, keys: RequestKeys, start: int, num_tokens: int) -> int:
        """Remember the tokens of a request's blocks that end behind token `start`, among the first
        `num_tokens`. How many tokens are known now: the engine may not have hashed all of them."""
        end = min(num_tokens, len(request.hashes) * self._hash_tokens)
        for size in {kind.block_tokens for kind in self._kinds}:
            first = start // size
            if end // size > first and size >= self._hash_tokens:
                self._announcer.know(
                    [self._hash(request, k, size) for k in range(first, end // size)],
                    request.tokens,
                    size,
                    keys=keys.of(size, end, first),
                    first=first,
                    parent=self._hash(request, first - 1, size) if first else None,
                    adapter=request.adapter_name,
                    salt=request.salt,
                    content=request.extra_before(end),
                )
        return max(start, end)

    def _hash(self, request: EngineRequest, block: int, block_tokens: int) -> int:
        """What vLLM's events call a block of that size."""
        last = (block + 1) * (block_tokens // self._hash_tokens) - 1
        return int.from_bytes(request.hashes[last], "big") & _WORD

    def changed(self, changes: Sequence[TierChange]) -> None:
        """The first worker's tiers have changed."""
        for change in changes:
            announce_change(self._announcer, change, change.group)

    def take(self) -> list[CacheEvent]:
        """Events since the last time."""
        return self._announcer.take()
