"""A transport made of several engines: every chunk is confirmed, or the read has failed."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.transport import parallel as module
from kvstow.transfer.transport.base import Kinds, Post, Region
from kvstow.transfer.transport.local import Fabric, LocalTransport
from kvstow.transfer.transport.parallel import ParallelTransport, parallel
from waiting import wait_for

BYTES = 1 << 16
HALF = BYTES // 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_CHUNK", 64)
    monkeypatch.setattr(module, "TELLING_BYTES", 64)


class Engine(LocalTransport):
    """A local engine whose helper can be held back, or made to fail.

    `hold` is waited for before every copy of an engine that is not the first.
    """

    def __init__(self, fabric: Fabric, *, first: "Engine | None" = None) -> None:
        super().__init__(fabric, before_copy=self._before)
        self._first = first
        self.helper: Engine | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.reached = threading.Event()
        self.fault: TransferError | None = None
        self.silent = False
        self.copied = 0

    @property
    def several_are_faster(self) -> bool:
        return True

    def fresh(self) -> "Engine":
        self.helper = Engine(self.fabric, first=self)
        return self.helper

    def _before(self, index: int) -> None:
        if self._first is not None:
            self.reached.set()
            assert self.hold.wait(10)
        elif self.helper is not None:
            time.sleep(0.005)  # so that there is something left for the helper
        if self.fault is not None:
            raise self.fault
        self.copied += 1


class Pair:
    """A reader made of two engines, and the peer that it reads from."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.here = np.zeros(BYTES, np.uint8)
        self.there = (np.arange(BYTES) % 251 + 1).astype(np.uint8)
        self.peer = LocalTransport(self.fabric)
        self.peer.register(Region(self.there.ctypes.data, BYTES))
        self.engine = Engine(self.fabric)
        self.transport = ParallelTransport(self.engine)
        self.transport.register(Region(self.here.ctypes.data, BYTES))
        self.transport.connect(self.peer.name, self.peer.metadata())

    def read(self, *parts: tuple[int, int]) -> Post:
        """A post that reads bytes `[start, stop)` for each part."""
        start, stop = np.array(parts, np.int64).T
        copies = Copies(self.there.ctypes.data + start, self.here.ctypes.data + start, stop - start)
        return self.transport.prepare("read", self.peer.name, Kinds(), copies)

    def warm(self) -> Engine:
        """A first read tells that copies are made inside the call; long ones get the helper
        ready."""

        def is_ready() -> bool:
            done(self.read((0, 4096)))
            return self.transport.num_engines(self.peer.name) == 2

        wait_for(is_ready)
        self.here[:] = 0
        assert self.engine.helper is not None
        return self.engine.helper


def done(post: Post) -> None:
    post.start()
    wait_for(post.poll)
    assert post.ended
    post.release()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    if made.engine.helper is not None:
        made.engine.helper.hold.set()
    made.transport.close()


def test_one_engine_or_an_engine_that_gains_nothing_is_left_as_it_is():
    fabric = Fabric()
    plain = LocalTransport(fabric)
    assert parallel(plain, 2) is plain
    engine = Engine(fabric)
    assert parallel(engine, 1) is engine
    assert isinstance(parallel(engine, 2), ParallelTransport)


def test_both_engines_copy_and_every_byte_arrives(pair):
    helper = pair.warm()
    for _ in range(20):
        pair.here[:] = 0
        done(pair.read((0, BYTES)))
        assert (pair.here == pair.there).all()
    assert helper.copied > 1
    assert pair.engine.copied > 1


def test_short_reads_make_no_helper(pair):
    """Nor do they connect one: whoever moves little has one engine."""
    done(pair.read((0, 4096)))  # tells
    for _ in range(5):
        done(pair.read((0, 32)))
    assert pair.engine.helper is None


def slow_read(pair: Pair) -> None:
    """A read that is not over when the call that starts it returns."""
    pair.engine.step_bytes = 0
    post = pair.read((0, BYTES))
    post.start()
    pair.engine.step_bytes = BYTES
    wait_for(post.poll)


def test_a_first_read_that_only_connects_does_not_rule_helpers_out(pair):
    slow_read(pair)
    pair.warm()


def test_a_peer_that_does_not_copy_inside_the_call_is_read_by_one_engine(pair):
    for _ in range(module.TELLING_READS):
        slow_read(pair)
    done(pair.read((0, BYTES)))
    assert pair.engine.helper is None
    assert pair.transport.num_engines(pair.peer.name) == 1


def test_a_chunk_that_failed_between_two_looks_is_not_taken_for_arrived(pair):
    """The caller's half is there; the helper's has failed while nobody looked."""
    helper = pair.warm()
    helper.hold.clear()
    helper.reached.clear()
    helper.fault = TransferError("a copy failed", kind="transport")
    post = pair.read((0, BYTES))
    post.start()
    assert helper.reached.wait(10)
    helper.hold.set()
    wait_for(lambda: post.ended or post.has_failed)
    with pytest.raises(TransferError, match="a copy failed"):
        wait_for(post.poll)
    with pytest.raises(TransferError, match="a copy failed"):
        post.poll()


def test_a_read_has_not_ended_while_the_helper_may_still_write(pair):
    helper = pair.warm()
    helper.hold.clear()
    helper.reached.clear()
    post = pair.read((0, BYTES))
    post.start()
    assert helper.reached.wait(10)
    pair.transport.disconnect(pair.peer.name)
    with pytest.raises(TransferError):
        wait_for(post.poll)
    assert not post.ended
    helper.hold.set()
    wait_for(lambda: (pair.here[HALF:] == pair.there[HALF:]).all())


def test_nothing_is_written_after_close(pair):
    helper = pair.warm()
    pair.fabric.cut(helper.name, pair.peer.name)
    post = pair.read((0, BYTES))
    post.start()
    wait_for(lambda: (pair.here[:HALF] == pair.there[:HALF]).all())
    assert not post.poll()
    pair.transport.close()
    assert post.ended
    pair.fabric.reconnect(helper.name, pair.peer.name)
    helper.progress()
    assert (pair.here[HALF:] == 0).all()


def test_a_helper_that_cannot_be_made_leaves_reads_to_the_first_engine(pair, monkeypatch):
    def broken() -> Engine:
        raise TransferError("no engine", kind="transport")

    monkeypatch.setattr(pair.engine, "fresh", broken)
    done(pair.read((0, BYTES)))
    time.sleep(0.05)
    pair.here[:] = 0
    done(pair.read((0, BYTES)))
    assert (pair.here == pair.there).all()
    assert pair.transport.num_engines(pair.peer.name) == 1


def test_a_post_can_be_started_again(pair):
    pair.warm()
    post = pair.read((0, BYTES))
    for salt in range(5):
        pair.there[:] = salt
        post.start()
        wait_for(post.poll)
        assert (pair.here == salt).all()


def test_memory_registered_later_is_read_into_by_both(pair):
    helper = pair.warm()
    more = np.zeros(BYTES, np.uint8)
    pair.transport.register(Region(more.ctypes.data, BYTES))
    pair.here = more
    before = helper.copied
    for _ in range(10):
        done(pair.read((0, BYTES)))
    assert helper.copied > before
    assert (more == pair.there).all()


def test_writes_and_short_reads_are_the_first_engine_s(pair):
    helper = pair.warm()
    before = helper.copied
    done(pair.read((0, 32)))
    copies = Copies.one(pair.here.ctypes.data, pair.there.ctypes.data, BYTES)
    done(pair.transport.prepare("write", pair.peer.name, Kinds(), copies))
    assert (pair.there == pair.here).all()
    assert helper.copied == before


def test_a_helper_is_not_ready_for_a_peer_that_was_disconnected_while_it_connected():
    pair = Pair()
    helper = module._Helper(lambda: Engine(pair.fabric, first=pair.engine), [])
    threads: list[threading.Thread] = []

    class Wanted(dict[str, bytes]):
        looks = 0

        def get(self, *key: Any) -> Any:  # the second look is just before the peer is ready
            found = super().get(*key)
            self.looks += 1
            if self.looks == 2:
                threads.append(threading.Thread(target=helper.disconnect, args=key))
                threads[0].start()
                threads[0].join(0.2)
            return found

    helper._wanted = Wanted()
    wait_for(lambda: helper.is_made)
    helper.connect(pair.peer.name, pair.peer.metadata(), pair.there.ctypes.data)
    wait_for(lambda: bool(threads))
    helper.close()
    threads[0].join()
    assert not helper.ready
    pair.transport.close()
