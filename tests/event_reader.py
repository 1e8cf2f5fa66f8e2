"""What a publisher repeats, read as a router reads it."""

from collections.abc import Iterator

import msgspec
import zmq

from kvstow.events.format import END_OF_REPLAY, BlockRemoved, EventBatch
from kvstow.events.publisher import EventPublisher

Batch = tuple[int, EventBatch]


def replayed(publisher: EventPublisher, first: int = 0) -> Iterator[Batch]:
    """The batches that a publisher keeps, from that number on, with their numbers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(publisher.replay_address)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert socket.poll(20_000), "the publisher does not answer"
            *_, number, payload = socket.recv_multipart()
            if number == END_OF_REPLAY:
                return
            yield int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=EventBatch)


def tokens_by_medium(publisher: EventPublisher, group: int) -> dict[str, list[int]]:
    """The tokens of a group's blocks in each medium, after all events that there were."""
    blocks: dict[str, dict[int, list[int]]] = {}
    for _, batch in replayed(publisher):
        for event in batch.events:
            held = blocks.setdefault(event.medium or "", {})
            if event.group_idx != group:
                continue
            if isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del held[name]
                continue
            for k, name in enumerate(event.block_hashes):
                size = event.block_size
                held[name] = event.token_ids[k * size : (k + 1) * size]
    return {
        medium: [token for tokens in held.values() for token in tokens]
        for medium, held in blocks.items()
        if held
    }
