"""Publisher and subscriber over real sockets: order, gaps, restarts."""

import threading
import time

import pytest
import zmq

from kvstow.errors import SpecError
from kvstow.events.format import BlockRemoved, BlockStored, EventBatch, decode_batch
from kvstow.events.publisher import EventPublisher
from kvstow.events.subscriber import EventSubscriber
from waiting import wait_for

LOOPBACK = "tcp://127.0.0.1:*"


def number(n: int) -> list[BlockRemoved]:
    return [BlockRemoved([n], "CPU")]


class Heard:
    """What a subscriber has heard: numbers, and None where it had to start over."""

    def __init__(self) -> None:
        self.said: list[int | None] = []

    def batch(self, batch: EventBatch) -> None:
        (event,) = batch.events
        assert isinstance(event, BlockRemoved | BlockStored)
        (value,) = event.block_hashes
        assert isinstance(value, int)
        self.said.append(value)

    def lost(self) -> None:
        self.said.append(None)

    def subscriber(self, publisher: EventPublisher, *, replay: bool = True) -> EventSubscriber:
        return EventSubscriber(
            publisher.address,
            replay=publisher.replay_address if replay else "",
            on_batch=self.batch,
            on_lost=self.lost,
        )


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
        while not frames and time.monotonic() < until:  # until the subscription has arrived
            publisher.publish(number(5))
            if socket.poll(20):
                frames = socket.recv_multipart()
    topic, sequence, payload = frames
    assert topic == b"kv"
    assert 0 <= int.from_bytes(sequence, "big") < publisher.next_sequence
    assert len(sequence) == 8
    assert decode_batch(payload).events == number(5)


def test_who_comes_late_hears_everything_that_is_kept_in_order():
    heard = Heard()
    with EventPublisher(LOOPBACK, replay=LOOPBACK) as publisher:
        for n in range(50):
            publisher.publish(number(n))
        with heard.subscriber(publisher):
            wait_for(lambda: len(heard.said) >= 50)
            while publisher.next_sequence < 80 or len(heard.said) < 80:
                publisher.publish(number(publisher.next_sequence))
                time.sleep(0.005)
            count = publisher.next_sequence
            wait_for(lambda: len(heard.said) == count)
    assert heard.said == list(range(count))


def test_a_gap_is_filled_from_replay():
    """The first socket drops every other batch; replay has them all."""
    heard = Heard()
    with (
        EventPublisher(LOOPBACK, replay=LOOPBACK) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as source,
        context.socket(zmq.PUB) as lossy,
    ):
        source.subscribe(b"")
        source.connect(publisher.address)
        port = lossy.bind_to_random_port("tcp://127.0.0.1")
        done = threading.Event()

        def drop_some() -> None:
            passed = 0
            while not done.is_set():
                if source.poll(20):
                    frames = source.recv_multipart()
                    passed += 1
                    if passed % 3 == 0:
                        lossy.send_multipart(frames)

        thread = threading.Thread(target=drop_some)
        thread.start()
        subscriber = EventSubscriber(
            f"tcp://127.0.0.1:{port}",
            replay=publisher.replay_address,
            on_batch=heard.batch,
            on_lost=heard.lost,
        )
        with subscriber:
            while len(heard.said) < 60:
                publisher.publish(number(publisher.next_sequence))
                time.sleep(0.005)
        done.set()
        thread.join()
    assert heard.said == list(range(len(heard.said)))


def test_what_is_not_kept_any_more_is_said_to_be_lost():
    heard = Heard()
    with EventPublisher(LOOPBACK, replay=LOOPBACK, keep=4) as publisher:
        for n in range(10):
            publisher.publish(number(n))
        subscriber = heard.subscriber(publisher)
        subscriber._next = 3  # pyright: ignore[reportPrivateUsage] # as if 0 … 2 were heard
        subscriber._take(9, EventBatch(time.time(), list(number(9))))  # pyright: ignore[reportPrivateUsage]
        subscriber.close()
    assert heard.said == [None, 6, 7, 8, 9]


def test_a_publisher_that_was_started_again_is_heard_from_its_beginning():
    heard = Heard()
    first = EventPublisher(LOOPBACK, replay=LOOPBACK)
    address, replay = first.address, first.replay_address
    for n in range(5):
        first.publish(number(n))
    with heard.subscriber(first):
        wait_for(lambda: len(heard.said) == 5)
        first.close()
        wait_for(lambda: None in heard.said)
        with EventPublisher(address, replay=replay) as second:
            while len(heard.said) < 20:
                second.publish(number(100 + second.next_sequence))
                time.sleep(0.02)
            said = list(heard.said)
    assert said[:6] == [0, 1, 2, 3, 4, None]
    assert said[6:] == list(range(100, 100 + len(said) - 6))


def test_without_replay_a_gap_is_lost_and_later_batches_are_heard():
    heard = Heard()
    with EventPublisher(LOOPBACK) as publisher:
        subscriber = heard.subscriber(publisher, replay=False)
        for n in (0, 1, 5, 6):
            batch = EventBatch(time.time(), list(number(n)))
            subscriber._take(n, batch)  # pyright: ignore[reportPrivateUsage]
        subscriber.close()
    assert heard.said == [0, 1, None, 5, 6]


def test_an_address_that_cannot_be_is_refused_with_a_hint():
    with pytest.raises(SpecError, match="hint: an address looks like"):
        EventPublisher("tcp://nowhere")
    with pytest.raises(SpecError, match="hint: an address looks like"):
        EventSubscriber("tcp:/", on_batch=Heard().batch, on_lost=Heard().lost)


def test_nothing_is_published_for_no_events():
    with EventPublisher(LOOPBACK) as publisher:
        publisher.publish([])
        assert publisher.next_sequence == 0
