"""Events to the byte: as vLLM writes them, and nothing else is taken for them."""

import msgspec
import pytest

from kvstow.errors import SpecError
from kvstow.events.format import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
)

STORED = BlockStored([7, 8], None, [1, 2, 3, 4], 2, None, "CPU", None)


def test_a_batch_is_an_array_of_time_events_and_rank():
    batch = EventBatch(1.5, [STORED, BlockRemoved([7], "CPU", 0), AllBlocksCleared()], 3)
    assert msgspec.msgpack.decode(encode_batch(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7, 8],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


def test_what_vllm_publishes_is_read_with_fields_that_are_not_known_here():
    event = {
        "type": "BlockStored",
        "block_hashes": [b"\x01" * 32, (1 << 64) - 1],
        "parent_block_hash": 5,
        "token_ids": [9] * 4,
        "block_size": 2,
        "lora_id": 1,
        "medium": "GPU",
        "lora_name": "poems",
        "extra_keys": [["poems", "salt"], ["poems"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "of a later version",
    }
    batch = decode_batch(msgspec.msgpack.encode([2.0, [event]]))
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [b"\x01" * 32, (1 << 64) - 1]
    assert stored.extra_keys == [["poems", "salt"], ["poems"]]
    assert batch.data_parallel_rank is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0, [{"type": "Other"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
        b"\x91" * 5000,
    ],
)
def test_anything_else_is_one_error(data: bytes):
    with pytest.raises(SpecError, match="not a batch of KV events"):
        decode_batch(data)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, 3, 1 << 63]},
        {"token_ids": [1, 2, 3, 1 << 32]},
        {"token_ids": [1, 2, 3, -1]},
        {"block_size": 0, "token_ids": [], "block_hashes": []},
        {"block_size": -2, "token_ids": [], "block_hashes": []},
    ],
    ids=str,
)
def test_numbers_that_no_block_has_are_refused(change):
    """An index that took them would fail, or answer for every prompt with an error."""
    batch = msgspec.to_builtins(EventBatch(1.5, [STORED]))
    batch[1][0] |= change
    with pytest.raises(SpecError, match="not a batch"):
        decode_batch(msgspec.msgpack.encode(batch))
