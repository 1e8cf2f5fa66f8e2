"""A store against a dictionary: whatever it serves was stored under that name, and is whole."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from faulty import Fails, FaultyFiles, Flips, Tears
from kvstow.errors import StoreError
from kvstow.offload.disk.tier import DiskTier
from offloading import hybrid, row_files

NUMBERS = st.lists(st.integers(0, 60), min_size=1, max_size=25, unique=True)
GROUPS = st.integers(0, 1)
FAULTS = st.one_of(
    st.builds(Fails, st.sampled_from([5, 28]), st.sampled_from([0, 4096, 8192])),
    st.builds(Tears, st.sampled_from([0, 4096, 12288])),
    st.builds(Flips, st.integers(0, 100_000)),
)


def key(number):
    return number.to_bytes(3, "big")


def content(layout, group, number):
    dice = np.random.default_rng([group, number])
    return dice.integers(0, 256, layout.row_bytes(group), dtype=np.uint8)


class Stores(RuleBasedStateMachine):
    """Two processes' worth of tiers on one directory, small enough to overflow."""

    @initialize()
    def make(self):
        self.path = Path(tempfile.mkdtemp(prefix="kvstow-law-"))
        self.layout = hybrid(content=64)
        self.files = [FaultyFiles(), FaultyFiles()]
        self.tiers = []
        for i in range(2):
            self.tiers.append(self.opened(i))
        self.may_be = [set(), set()]  # numbers that were stored and not evicted by name

    def opened(self, i):
        return DiskTier(
            self.path,
            self.layout,
            capacity=320 << 10,
            files=self.files[i],
            threads=2,
        )

    @rule(i=st.integers(0, 1), group=GROUPS, numbers=NUMBERS)
    def store(self, i, group, numbers):
        rows = [content(self.layout, group, n) for n in numbers]
        kept = self.tiers[i].store(group, [key(n) for n in numbers], rows)
        self.may_be[group] |= {n for n, ok in zip(numbers, kept, strict=True) if ok}

    @rule(i=st.integers(0, 1), group=GROUPS, numbers=NUMBERS)
    def load(self, i, group, numbers):
        rows = [np.zeros(self.layout.row_bytes(group), np.uint8) for _ in numbers]
        found = self.tiers[i].load(group, [key(n) for n in numbers], rows)
        for n, row, ok in zip(numbers, rows, found, strict=True):
            if ok:
                assert n in self.may_be[group]
                assert (row == content(self.layout, group, n)).all()

    @rule(i=st.integers(0, 1), group=GROUPS, numbers=NUMBERS)
    def evict(self, i, group, numbers):
        self.tiers[i].evict(group, [key(n) for n in numbers])
        self.may_be[group] -= set(numbers)

    @rule(i=st.integers(0, 1), share=st.sampled_from([0, 64 << 10, 200 << 10]))
    def prune(self, i, share):
        self.tiers[i].prune(share)

    @rule(i=st.integers(0, 1))
    def reopen(self, i):
        self.tiers[i].close()
        self.tiers[i] = self.opened(i)

    @rule(
        i=st.integers(0, 1),
        fault=FAULTS,
        after=st.integers(0, 3),
        group=GROUPS,
        numbers=NUMBERS,
        operation=st.sampled_from(["create", "write", "read", "sync", "link", "rename"]),
    )
    def fail(self, i, fault, after, group, numbers, operation):
        """One operation of the medium goes wrong during a store and a load."""
        files = self.files[i]
        first = files.counts.get(operation, 0) + after
        files.fault = lambda op, n: fault if (op, n) == (operation, first) else None
        try:
            rows = [content(self.layout, group, n) for n in numbers]
            self.may_be[group] |= set(numbers)
            self.tiers[i].store(group, [key(n) for n in numbers], rows)
            self.load(i, group, numbers)
        except StoreError:
            pass
        finally:
            files.fault = lambda op, n: None

    @precondition(lambda self: hasattr(self, "tiers"))
    @invariant()
    def nothing_is_left_of_what_was_not_stored(self):
        assert not list(self.path.glob("new/*/*"))

    @precondition(lambda self: hasattr(self, "tiers"))
    @invariant()
    def row_files_stay_within_the_capacity(self):
        files = {file.stat().st_ino: file.stat().st_size for file in row_files(self.path)}
        assert sum(files.values()) <= 320 << 10

    def teardown(self):
        for tier in getattr(self, "tiers", ()):
            tier.close()
        if hasattr(self, "path"):
            shutil.rmtree(self.path)


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
