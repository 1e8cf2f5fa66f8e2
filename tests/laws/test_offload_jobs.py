"""Jobs in any interleaving: what arrives is what was stored, and holds are given back."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from faulty import Fails, FaultyFiles
from kvstow.blocks.pool import Pool
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.copies.mover import Limits, Mover
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from offloading import hybrid

LAYOUT = hybrid(num_slabs=260)
NAMES = st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 1), NAMES),
        st.tuples(st.just("load"), st.integers(0, 1), NAMES),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
        st.tuples(st.just("reap"), st.none(), st.none()),
        st.tuples(st.just("evict"), st.integers(0, 1), NAMES),
        st.tuples(st.just("fail"), st.sampled_from(["write", "read", "sync"]), st.none()),
    ),
    max_size=30,
)


def key(number):
    return number.to_bytes(4, "big")


def content(group, number):
    dice = np.random.default_rng([group, number])
    return dice.integers(0, 256, LAYOUT.row_bytes(group), dtype=np.uint8)


def view(arena, group, block):
    (run,) = LAYOUT.runs(group, int(block))
    return arena.bytes.numpy()[run.offset : run.end]


@given(steps=STEPS, workers=st.sampled_from([1, 2, 4]), host_kib=st.sampled_from([8, 32]))
@settings(max_examples=40, deadline=None)
def test_rows_arrive_whole_in_any_interleaving(steps, workers, host_kib):
    with tempfile.TemporaryDirectory(prefix="kvstow-law-") as directory:
        files = FaultyFiles()
        disk = DiskTier(Path(directory), LAYOUT, capacity=512 << 10, files=files, threads=2)
        arena, pool = Arena(LAYOUT), Pool(LAYOUT)
        host = HostTier(LAYOUT, capacity=host_kib << 10)
        limits = Limits(workers=workers, part_bytes=4096)
        mover = Mover(arena, host, disk, pool=pool, limits=limits)
        jobs, owned = [], {}
        try:
            for what, which, names in steps:
                _step(mover, pool, arena, host, files, jobs, owned, what, which, names)
            for job, kind in jobs:
                assert job.wait(60)
                _check(arena, job, kind)
        finally:
            files.fault = lambda op, n: None
            mover.close()
        for job, _ in jobs:
            if len(job.ids):
                pool.release(job.group, job.ids)
        host.check()
        pool.check()
        for group in range(2):
            assert pool.num_held(group) == 0
        disk.close()


def _step(mover, pool, arena, host, files, jobs, owned, what, which, names):
    match what:
        case "store" | "load":
            blocks = pool.hold(which, len(names))
            for block, n in zip(blocks, names, strict=True):
                view(arena, which, block)[:] = content(which, n) if what == "store" else 0xEE
            keys = [key(n) for n in names]
            call = (mover.store, mover.load)[what == "load"]
            arguments = (blocks, keys) if what == "store" else (keys, blocks)
            try:
                jobs.append((call(which, *arguments), (what, names)))
            except StoreError:
                pool.release(which, blocks)
        case "cancel":
            if which < len(jobs):
                jobs[which][0].cancel()
        case "reap":
            mover.reap()
        case "evict":
            host.evict(which, [key(n) for n in names])
        case "fail":
            at = files.counts.get(which, 0)
            files.fault = lambda op, n: Fails() if (op, n) == (which, at) else None


def _check(arena, job, kind):
    what, names = kind
    for block, n, moved in zip(job.ids, names, job.moved, strict=False):
        if what == "store" or (what == "load" and moved):
            assert (view(arena, job.group, block) == content(job.group, n)).all()
