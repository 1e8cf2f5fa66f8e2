"""The publisher over real sockets: frames, and what it repeats."""

import time

import msgspec
import pytest
import zmq

from event_reader import replayed
from kvstow.errors import SpecError
from kvstow.events.format import BlockRemoved, EventBatch
from kvstow.events.publisher import EventPublisher
from kvstow.threads import broken_threads
from waiting import wait_for

LOOPBACK = "tcp://127.0.0.1:*"


def number(n: int) -> list[BlockRemoved]:
    return [BlockRemoved([n], "CPU")]


def test_frames_are_topic_sequence_and_batch():
    with (
        EventPublisher(LOOPBACK, topic="kv") as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        socket.subscribe(b"kv")
        socket.connect(publisher.address)
        frames: list[bytes] = []
        until = time.monotonic() + 20
        published = 0
        while not frames and time.monotonic() < until:  # until the subscription has arrived
            publisher.publish(number(published))
            published += 1
            if socket.poll(20):
                frames = socket.recv_multipart()
    topic, sequence, payload = frames
    assert topic == b"kv"
    assert len(sequence) == 8
    sequence = int.from_bytes(sequence, "big")
    assert 0 <= sequence < published
    assert msgspec.msgpack.decode(payload, type=EventBatch).events == number(sequence)


def test_what_was_missed_is_repeated_in_order_as_far_as_it_is_kept():
    with EventPublisher(LOOPBACK, replay=LOOPBACK, keep=40) as publisher:
        for n in range(50):
            publisher.publish(number(n))
        for first in (0, 10, 17, 49, 50):
            repeated = [(n, batch.events) for n, batch in replayed(publisher, first)]
            assert repeated == [(n, number(n)) for n in range(max(first, 10), 50)]


def test_an_address_that_cannot_be_is_refused_with_a_hint():
    with pytest.raises(SpecError, match="hint: an address looks like"):
        EventPublisher("tcp://nowhere")


def test_nothing_is_published_for_no_events():
    with EventPublisher(LOOPBACK, replay=LOOPBACK) as publisher:
        publisher.publish([])
        assert list(replayed(publisher)) == []


def test_a_thread_of_replays_that_ends_with_an_error_is_counted(monkeypatch):
    def fail(self, socket, request):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(EventPublisher, "_repeat", fail)
    before = broken_threads().get("kvstow-events", 0)
    with (
        EventPublisher(LOOPBACK, replay=LOOPBACK) as publisher,
        zmq.Context() as context,
        context.socket(zmq.REQ) as socket,
    ):
        socket.linger = 0
        socket.connect(publisher.replay_address)
        socket.send((0).to_bytes(8, "big"))
        wait_for(lambda: broken_threads().get("kvstow-events", 0) == before + 1)
