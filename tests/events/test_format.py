"""Events to the byte: as vLLM writes them."""

import msgspec

from kvstow.events.format import BlockRemoved, BlockStored, EventBatch

STORED = BlockStored([7, 8], None, [1, 2, 3, 4], 2, None, "CPU", None)


def test_a_batch_is_an_array_of_time_events_and_rank():
    batch = EventBatch(1.5, [STORED, BlockRemoved([7], "CPU", 0)], 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
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
        ],
        3,
    ]
