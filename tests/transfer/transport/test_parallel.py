"""Two tracks: one agent and a second engine in a thread of its own read the same transfer.

The producer is another process of this host, so that bytes are copied inside the call that
starts them. Chunks are made small enough for a small request to have several.
"""

import threading
import time
from collections import deque

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.plan.manifest import encode
from kvstow.testing.measure.timed import TimedNixl
from kvstow.transfer import mover
from kvstow.transfer.transport.base import Kinds, Region, Spans
from kvstow.transfer.transport.local import Fabric, LocalTransport
from kvstow.transfer.transport.parallel import Track
from transfer_node import Node, hybrid_layout, rows_for

TOKENS = 18
LAYOUT = hybrid_layout()
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1), rows_for(LAYOUT, TOKENS, 2)
HURRY = {"transfer_seconds": 15.0, "contact_seconds": 8.0, "heartbeat_seconds": 0.1,
         "drain_seconds": 0.3}  # fmt: skip


@pytest.fixture
def producer(zygote):
    process = zygote.process({})
    yield process.node(encode(LAYOUT), "producer", options=HURRY)
    process.close()


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(mover, "LEAST_CHUNK", 64)
    monkeypatch.setattr(mover, "CHUNKS_EACH", 1)
    made = TimedNixl()
    transfer = made._agent.transfer

    def slow(*arguments):
        time.sleep(0.03)  # so that there is something left for the second track
        return transfer(*arguments)

    monkeypatch.setattr(made._agent, "transfer", slow)
    return made


@pytest.fixture
def consumer(engine):
    node = Node(encode(LAYOUT), name="consumer", options={**HURRY, "tracks": 2}, transport=engine)
    yield node
    node.close()


def held_back(engine, monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Set when the engine is about to copy; and what it then waits for."""
    waits, go = threading.Event(), threading.Event()
    prepare = engine.prepare

    def late(*arguments):
        waits.set()
        assert go.wait(10)
        return prepare(*arguments)

    monkeypatch.setattr(engine, "prepare", late)
    return waits, go


def test_every_byte_arrives_whichever_track_brings_it(producer, consumer, engine):
    assert consumer.path(producer.address)["tracks"] == 2
    (second,) = engine.beside
    met = second.starts
    for salt in range(1, 12):
        producer.fill(SOURCE, salt)
        consumer.wipe()
        result = consumer.pull(
            [producer.offer(SOURCE, TOKENS)], TARGET, direction="read", digest="always"
        )
        assert "error" not in result, result
        assert consumer.check(TARGET, 0, TOKENS, salt) == ""
    assert second.starts > met, "the second track has copied nothing in a dozen pulls"
    assert consumer.held() == 0


def test_a_producer_that_dies_is_an_error_and_no_track_writes_afterwards(
    producer, consumer, engine, monkeypatch
):
    """The second track is held back until the producer is dead, and then goes on."""
    consumer.path(producer.address)
    (second,) = engine.beside
    waits, dead = held_back(second, monkeypatch)
    producer.fill(SOURCE, 3)
    number = consumer.begin_pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="read")
    assert waits.wait(10)
    producer.process.kill()
    dead.set()
    result = consumer.end_pull(number)
    assert result["kind"] in ("peer", "transport", "timeout"), result
    assert consumer.wait_quiet(number, 15)
    assert consumer.held() == 0


def test_a_pull_that_is_aborted_is_quiet_only_when_the_second_track_is(
    producer, consumer, engine, monkeypatch
):
    consumer.path(producer.address)
    (second,) = engine.beside
    waits, go = held_back(second, monkeypatch)
    producer.fill(SOURCE, 4)
    number = consumer.begin_pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="read")
    assert waits.wait(10)
    consumer.abort(number)
    assert consumer.end_pull(number)["kind"] == "aborted"
    assert not consumer.wait_quiet(number, 0.1)
    assert consumer.held() > 0
    go.set()
    assert consumer.wait_quiet(number, 15)
    assert consumer.held() == 0
    producer.fill(SOURCE, 6)
    result = consumer.pull(
        [producer.offer(SOURCE, TOKENS)], TARGET, direction="read", digest="always"
    )
    assert "error" not in result, result


# ── a track alone ─────────────────────────────────────────────────────────────────────


class Pair:
    """Two members of a fabric with a kilobyte each; the first is a track."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.here, self.there = np.zeros(1024, np.uint8), np.arange(1024).astype(np.uint8)
        self.peer = LocalTransport(self.fabric)
        self.peer.register(Region(self.there.ctypes.data, 1024))
        self.track = Track(lambda: LocalTransport(self.fabric, step_bytes=1),
                           [Region(self.here.ctypes.data, 1024)])  # fmt: skip
        self.track.connect(self.peer.name, self.peer.metadata())

    def chunk(self, *at: int) -> Spans:
        offsets = np.array(at, np.int64)
        return Spans(self.here.ctypes.data + offsets, self.there.ctypes.data + offsets,
                     np.full(len(at), 16))  # fmt: skip

    def over(self, job) -> bool:
        limit = time.monotonic() + 10
        while not job.over and time.monotonic() < limit:
            time.sleep(0.001)
        return job.over


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.track.close()


def test_a_track_takes_chunks_from_the_end_until_none_is_left(pair):
    waiting = deque(pair.chunk(at, at + 32) for at in range(0, 256, 64))
    job = pair.track.copy("read", pair.peer.name, Kinds(), waiting)
    assert pair.over(job)
    assert job.error is None
    assert not waiting
    touched = np.zeros(1024, np.bool_)
    for at in range(0, 256, 32):
        touched[at : at + 16] = True
    assert (pair.here == np.where(touched, pair.there, 0)).all()


def test_a_job_that_was_withdrawn_copies_nothing(pair):
    pair.fabric.cut(pair.peer.name, pair.track._made.result().name)
    first = pair.track.copy("read", pair.peer.name, Kinds(), deque([pair.chunk(0)]))
    waiting = deque([pair.chunk(64)])
    second = pair.track.copy("read", pair.peer.name, Kinds(), waiting)
    second.withdraw()
    assert second.over
    assert not first.over
    pair.fabric.heal(pair.peer.name, pair.track._made.result().name)
    assert pair.over(first)
    assert len(waiting) == 1
    assert (pair.here[64:80] == 0).all()


def test_a_job_whose_peer_is_disconnected_ends_as_an_error_and_writes_no_more(pair):
    pair.fabric.cut(pair.peer.name, pair.track._made.result().name)
    job = pair.track.copy("read", pair.peer.name, Kinds(), deque([pair.chunk(0)] * 3))
    time.sleep(0.05)
    pair.track.disconnect(pair.peer.name)
    pair.fabric.heal(pair.peer.name, pair.track._made.result().name)
    assert pair.over(job)
    assert job.error is not None
    assert job.error.kind == "peer"
    assert (pair.here == 0).all()


class Held(deque):
    """Whoever takes a chunk off the end has it in hand until `go`."""

    def __init__(self, chunks):
        super().__init__(chunks)
        self.taken, self.go = threading.Event(), threading.Event()

    def pop(self):
        chunk = super().pop()
        self.taken.set()
        assert self.go.wait(10)
        return chunk


def test_a_chunk_in_hand_when_its_peer_is_disconnected_is_not_copied_after_another_connection(pair):
    waiting = Held([pair.chunk(0)])
    job = pair.track.copy("read", pair.peer.name, Kinds(), waiting)
    assert waiting.taken.wait(10)
    pair.track.disconnect(pair.peer.name)
    pair.track.connect(pair.peer.name, pair.peer.metadata())
    waiting.go.set()
    assert pair.over(job)
    assert (pair.here == 0).all()
    assert job.error is not None
    assert job.error.kind == "peer"


def test_nothing_is_copied_from_a_peer_that_is_not_connected(pair):
    pair.track.disconnect(pair.peer.name)
    with pytest.raises(TransferError, match="not connected"):
        pair.track.copy("read", pair.peer.name, Kinds(), deque([pair.chunk(0)]))


def test_an_engine_that_cannot_be_made_is_an_error_where_it_is_first_needed():
    def make():
        raise TransferError("no engine", kind="transport")

    track = Track(make, [])
    with pytest.raises(TransferError, match="no engine"):
        track.connect("anybody", b"")
    track.close()
