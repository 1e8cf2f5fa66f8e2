"""Which instance holds how much of a prompt, learned from events.

    node of a block  =  BLAKE2b-128( node of the block before, extra keys, token ids )

Instances call blocks by hashes of their own; the index compares tokens. An event whose parent it
has not heard of cannot be placed and is passed over, as is what only a window or a state of the
prompt is kept for: the index counts what every token sees. It is a hint, never a promise: an
instance checks for itself what it has when the request arrives.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Any

import numpy as np

from kvstow.events.format import (
    DEVICE,
    HOST,
    STORAGE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)

MOST_BLOCKS = 1 << 21
"""Blocks that are remembered of one instance."""

WHOLE_PREFIX = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Groups that say how long a prefix is; others keep less than all of it."""

_BIT = {DEVICE: 1, HOST: 2, STORAGE: 4, "DISK": 4, "CPU_PINNED": 2}
_REMOTE = 8
_TIERS = {"device": 1, "host": 2, "disk": 4, "remote": _REMOTE}


@dataclass(frozen=True, slots=True)
class PrefixHeld:
    """How many tokens of a prompt, from the first on, an instance holds, by tier.

    `below` counts what host memory and disk hold together; `remote` what any instance can
    reach.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    below: int = 0
    remote: int = 0

    @property
    def tokens(self) -> int:
        """What the instance need not compute or bring from another machine."""
        return max(self.device, self.below)


@dataclass(slots=True)
class _Block:
    """A block as one of an instance's hashes names it, and the tiers in which it was stored."""

    node: bytes
    bits: int = 0


@dataclass(slots=True)
class _Instance:
    """What is known of one instance. Device and tiers may name one block by two hashes."""

    blocks: dict[BlockHash, _Block] = field(default_factory=dict[BlockHash, _Block])
    held: dict[bytes, int] = field(default_factory=dict[bytes, int])
    sizes: set[int] = field(default_factory=set[int])
    adapters: set[str] = field(default_factory=set[str])
    partial: set[int] = field(default_factory=set[int])
    """Groups that keep less than the whole prefix."""
    per_tier: Counter[int] = field(default_factory=Counter[int])
    """Blocks in each tier, by its bit."""
    passed_over: int = 0

    def add(self, block_hash: BlockHash, node: bytes, bit: int) -> None:
        """A block is in a tier."""
        self.blocks.setdefault(block_hash, _Block(node)).bits |= bit
        before = self.held.get(node, 0)
        self.per_tier[bit] += not before & bit
        self.held[node] = before | bit

    def remove(self, block_hash: BlockHash, bit: int) -> None:
        """A block is gone from a tier."""
        block = self.blocks.get(block_hash)
        if block is None or not block.bits & bit:
            return
        block.bits &= ~bit
        if not block.bits:
            del self.blocks[block_hash]
        left = self.held[block.node] & ~bit
        self.per_tier[bit] -= left != self.held[block.node]
        if left:
            self.held[block.node] = left
        else:
            del self.held[block.node]


class InstanceIndex:
    """Blocks of several instances, by content. Used from several threads."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._instances: dict[str, _Instance] = {}
        self._lock = Lock()

    def apply(self, instance: str, batch: EventBatch) -> None:
        """Take in what an instance says."""
        with self._lock:
            known = self._instances.setdefault(instance, _Instance())
            for event in batch.events:
                match event:
                    case BlockStored():
                        self._stored(known, event)
                    case BlockRemoved():
                        _removed(known, event)
                    case AllBlocksCleared():
                        _cleared(known)

    def forget(self, instance: str) -> None:
        """Nothing is known of an instance any more."""
        with self._lock:
            self._instances.pop(instance, None)

    @property
    def adapters(self) -> frozenset[str]:
        """Names of adapters under which something was stored; "" is the model itself."""
        with self._lock:
            return frozenset(name for known in self._instances.values() for name in known.adapters)

    def num_blocks(self, instance: str) -> int:
        """Blocks that an instance holds somewhere."""
        with self._lock:
            known = self._instances.get(instance)
            return len(known.held) if known else 0

    def blocks_by_tier(self, instance: str) -> dict[str, int]:
        """Blocks that an instance holds in each tier."""
        with self._lock:
            known = self._instances.get(instance)
            return {tier: known.per_tier[bit] if known else 0 for tier, bit in _TIERS.items()}

    def held(
        self, tokens: Sequence[int], *, adapter: str = "", salt: str = ""
    ) -> dict[str, PrefixHeld]:
        """What each instance holds of a prompt; instances that hold nothing are left out."""
        with self._lock:
            sizes = {size for known in self._instances.values() for size in known.sizes}
            chains = {size: list(_chain(tokens, size, adapter, salt)) for size in sizes}
            found = {
                name: max(
                    (_held(known, chains[size], size) for size in known.sizes),
                    key=lambda held: (held.tokens, held.remote),
                    default=PrefixHeld(),
                )
                for name, known in self._instances.items()
            }
        return {name: held for name, held in found.items() if held.tokens or held.remote}

    def _stored(self, known: _Instance, event: BlockStored) -> None:
        if event.kv_cache_spec_kind not in WHOLE_PREFIX:
            known.partial.add(event.group_idx or 0)
            return
        bit = _bit(event.medium, event.locality)
        parent = event.parent_block_hash
        before = _Block(b"") if parent is None else known.blocks.get(parent)
        size = event.block_size
        if not bit or before is None or len(event.token_ids) != size * len(event.block_hashes):
            known.passed_over += len(event.block_hashes)
            return
        known.sizes.add(size)
        known.adapters.add(event.lora_name or "")
        node, words = before.node, _words(event.token_ids)
        extras = event.extra_keys or [None] * len(event.block_hashes)
        for k, (block_hash, extra) in enumerate(zip(event.block_hashes, extras, strict=False)):
            if len(known.held) >= self._most_blocks:
                known.passed_over += 1
                return
            node = _node(node, extra, words[4 * k * size : 4 * (k + 1) * size])
            known.add(block_hash, node, bit)


def _removed(known: _Instance, event: BlockRemoved) -> None:
    if (event.group_idx or 0) not in known.partial:
        for block_hash in event.block_hashes:
            known.remove(block_hash, _bit(event.medium, event.locality))


def _cleared(known: _Instance) -> None:
    """Device rows are gone; what lies below stays."""
    for block_hash in tuple(known.blocks):
        known.remove(block_hash, _BIT[DEVICE])


def _bit(medium: str | None, locality: str | None) -> int:
    """One bit per tier; 0 for a medium that is not known."""
    return _REMOTE if locality == "REMOTE" else _BIT.get(medium or DEVICE, 0)


def _held(known: _Instance, chain: Iterable[bytes], size: int) -> PrefixHeld:
    """The whole blocks that each tier holds before its first gap."""
    tiers = {**_TIERS, "below": _BIT[HOST] | _BIT[STORAGE]}
    length = dict.fromkeys(tiers, 0)
    growing = dict(tiers)
    for k, node in enumerate(chain):
        bits = known.held.get(node, 0)
        growing = {tier: mask for tier, mask in growing.items() if bits & mask}
        if not growing:
            break
        for tier in growing:
            length[tier] = (k + 1) * size
    return PrefixHeld(**length)


def _chain(tokens: Sequence[int], size: int, adapter: str, salt: str) -> Iterator[bytes]:
    """The nodes of a prompt's whole blocks."""
    words = _words(tokens)
    node = b""
    rest = [adapter] if adapter else []
    for k in range(len(tokens) // size):
        extra = rest + ([salt] if salt and k == 0 else [])
        node = _node(node, extra or None, words[4 * k * size : 4 * (k + 1) * size])
        yield node


def _words(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int64).astype("<u4").tobytes()


def _node(before: bytes, extra: Sequence[Any] | None, tokens: bytes) -> bytes:
    head = before + repr(list(extra or ())).encode() + b"\0"
    return blake2b(head + tokens, digest_size=16).digest()
