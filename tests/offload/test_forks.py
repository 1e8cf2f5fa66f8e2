"""A process that was forked after a store was opened is refused, and harms nothing."""

import os
import threading
import warnings

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.copies.mover import Limits, Mover
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.offload.store import Store
from offloading import hybrid
from offloading import numbered_key as key
from offloading import numbered_row as row

MIB = 1 << 20


def refused(*actions):
    """What a forked process is told when it does these; "" for what it may do."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it forks beside threads
        child = os.fork()
    if not child:
        said = []
        try:
            threading.Timer(20, os._exit, [1]).start()
            for action in actions:
                try:
                    action()
                    said.append("")
                except StoreError as error:
                    said.append(str(error))
            os.write(writing, "\x1f".join(said).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        words = answer.read().split("\x1f")
    os.waitpid(child, 0)
    assert len(words) == len(actions), words
    return words


def stored(tier, numbers):
    tier.store(0, [key(n) for n in numbers], [row(tier, 0, n) for n in numbers])


def loaded(tier, numbers):
    rows = [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in numbers]
    found = tier.load(0, [key(n) for n in numbers], rows)
    return [
        n
        for n, here, got in zip(numbers, found, rows, strict=True)
        if here and (got == row(tier, 0, n)).all()
    ]


def test_a_disk_tier_is_refused_in_a_fork_and_stays_as_it_was(tmp_path):
    with_rows = DiskTier(tmp_path / "kv", hybrid(), capacity=MIB)
    stored(with_rows, range(4))
    *said, closed = refused(
        lambda: loaded(with_rows, [0]),
        lambda: stored(with_rows, [9]),
        lambda: with_rows.contains(0, [key(0)]),
        lambda: with_rows.evict(0, [key(0)]),
        with_rows.close,
    )
    assert all("forked" in each and "hint: open it after the fork" in each for each in said)
    assert closed == ""
    stored(with_rows, range(4, 8))
    assert loaded(with_rows, list(range(8))) == list(range(8))
    with_rows.close()


@pytest.mark.parametrize("places", [{"host": MIB}, {"disk": "kv", "disk_bytes": MIB}])
def test_a_store_is_refused_in_a_fork_instead_of_waiting_for_threads_that_are_not_there(
    tmp_path, places
):
    if "disk" in places:
        places = {**places, "disk": tmp_path / places["disk"]}
    arena = Arena(hybrid())
    with Store(**places) as store:
        store.bind(arena.layout)
        assert store.save_rows(arena, 0, [5], [key(5)]).all()
        save, load, closed = refused(
            lambda: store.save_rows(arena, 0, [6], [key(6)]),
            lambda: store.load_rows(arena, 0, [key(5)], [6]),
            store.close,
        )
        assert "forked" in save
        assert "forked" in load
        assert closed == ""
        assert store.load_rows(arena, 0, [key(5)], [6]).all()


def test_a_mover_is_refused_in_a_fork():
    arena = Arena(hybrid())
    mover = Mover(arena, HostTier(arena.layout, capacity=MIB), limits=Limits(workers=1))
    (said,) = refused(lambda: mover.store(0, [5], [key(5)]))
    assert "forked" in said
    assert mover.store(0, [5], [key(5)]).result().all()
    mover.close()
