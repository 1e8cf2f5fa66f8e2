"""vLLM's KV events, to the byte.

    frames   topic │ sequence, 8 bytes, big endian │ MessagePack
    batch    [time, [event, …], data parallel rank]
    event    {"type": "BlockStored", "block_hashes": […], "token_ids": […], …}

Written as vLLM 0.32 writes them. `block_hashes` name blocks within one publisher: whoever compares
publishers compares tokens.
"""

from typing import Any, Literal

import msgspec

Medium = Literal["GPU", "CPU", "STORAGE"]
"""Where a block lies, in vLLM's words: device, host memory, disk or another store."""

DEVICE: Medium = "GPU"
HOST: Medium = "CPU"
STORAGE: Medium = "STORAGE"

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, frozen=True):
    """Blocks that follow one another can be reused from now on.

    `extra_keys` is, per block, what it depends on besides tokens: an adapter's name, digests of
    images, in a prompt's first block its salt. `locality` is REMOTE where the bytes lie on
    another machine.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, frozen=True):
    """Blocks are gone from one medium."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


CacheEvent = BlockStored | BlockRemoved


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What happened in one step. `ts` is the publisher's clock, seconds since 1970."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None
