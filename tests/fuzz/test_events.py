"""Events: whatever a publisher sends is a batch that an index can take, or a SpecError."""

from random import Random

from fuzzing import Reader, damaged_msgpack, fuzzed
from kvstow.errors import SpecError
from kvstow.events.format import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
)
from kvstow.events.index import InstanceIndex

PROMPT = list(range(12))


def stored(**more: object) -> BlockStored:
    facts = {"parent_block_hash": None, "lora_id": None, "medium": "GPU", "lora_name": None}
    known = {"block_hashes": [b"\x01" * 32, 7], "token_ids": list(range(8)), "block_size": 4}
    return BlockStored(**(facts | known | more))  # pyright: ignore


def valid() -> list[bytes]:
    events = (
        [stored()],
        [stored(parent_block_hash=7, block_hashes=[9], token_ids=[1, 2, 3, 4], medium="CPU")],
        [stored(extra_keys=[["lora", 3], None], group_idx=1), BlockRemoved([7], "GPU")],
        [AllBlocksCleared()],
        [],
    )
    return [encode_batch(EventBatch(1.5, list(each), 0)) for each in events]


def read(data: bytes) -> str:
    try:
        batch = decode_batch(data)
    except SpecError as error:
        return f"refused: {type(error).__name__} | {error}"
    assert encode_batch(decode_batch(encode_batch(batch))) == encode_batch(batch)
    take(batch)
    return "accepted"


def take(batch: EventBatch) -> None:
    """An index takes the batch behind one that it knows, and answers within the prompt."""
    index = InstanceIndex(most_blocks=100)
    index.apply("known", EventBatch(0.0, [stored()]))
    for instance in ("known", "other"):
        index.apply(instance, batch)
        assert 0 <= index.num_blocks(instance) <= 100
    for held in index.held(PROMPT).values():
        assert 0 <= held.tokens <= len(PROMPT)


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    return damaged_msgpack(random, data, other)


READER = Reader(name="events", read=read, valid=valid, mutate=mutate)


@fuzzed(READER)
def test_a_damaged_batch_is_a_batch_or_refused(data):
    READER.outcome(data)
