"""vLLM's KV events, to the byte.

    frames   topic │ sequence, 8 bytes, big endian │ MessagePack
    batch    [time, [event, …], data parallel rank]
    event    {"type": "BlockStored", "block_hashes": […], "token_ids": […], …}

Written as vLLM 0.32 writes them; fields that a later version adds are passed over when read.
`block_hashes` name blocks within one publisher: whoever compares publishers compares tokens.
"""

from typing import Annotated, Any, Literal

import msgspec

from kvstow.errors import SpecError

Medium = Literal["GPU", "CPU", "STORAGE"]
"""Where a block lies, in vLLM's words: device, host memory, disk or another store."""

DEVICE: Medium = "GPU"
HOST: Medium = "CPU"
STORAGE: Medium = "STORAGE"

BlockHash = int | bytes
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
BlockSize = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

MAX_BATCH_BYTES = 64 << 20


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, frozen=True):
    """Blocks that follow one another can be reused from now on.

    `extra_keys` is, per block, what it depends on besides tokens: an adapter's name, digests of
    images, in a prompt's first block its salt. `locality` is REMOTE where the bytes lie on
    another machine.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: BlockSize
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

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, frozen=True):
    """The device holds nothing any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What happened in one step. `ts` is the publisher's clock, seconds since 1970."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """The batch as MessagePack."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> EventBatch:
    """The batch in these bytes; SpecError, and nothing else, where there is none."""
    if len(data) > MAX_BATCH_BYTES:
        raise SpecError(f"a batch of events has {len(data)} bytes, at most {MAX_BATCH_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SpecError(f"not a batch of KV events: {str(error)[:200]}") from None
