"""The remote tier: rows on a store that other machines and other layouts read.

    contains   one batched question within the budget; where rows were found is remembered
    load       objects or ranges of them → checksums → rows of this layout
    store      copied, queued, written in the background; dropped when that is too much

Everything that is not a verified row is a miss with a counted reason (`misses`).
"""

import logging
from collections.abc import Sequence
from threading import Event, Lock
from time import monotonic

import numpy as np

from kvstow.blocks.prompt import Prompt
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.remote.calls import Breaker, Calls
from kvstow.offload.remote.client import (
    Blob,
    BlobClient,
    RemoteOptions,
    StoreUnreachable,
    open_client,
)
from kvstow.offload.remote.collect import Quota, last_usage
from kvstow.offload.remote.directory import Directory, WriterLayout
from kvstow.offload.remote.fetch import LOTS, Fetcher, LookUps, Parts
from kvstow.offload.remote.writes import WriteQueue
from kvstow.offload.tier import (
    Bools,
    Bytes,
    Counts,
    Reasons,
    Tallies,
    Usage,
    checked_keys,
    checked_rows,
    known_identity,
    note_unverified,
)
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.threads import guarded_thread

log = logging.getLogger("kvstow.offload")

REFRESH_SECONDS = 15.0
"""How often the directory of writers is read again, and the own entry renewed."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds between questions to a store that does not answer."""


class RemoteTier:
    """Rows of one layout on a remote store, named by a URL or reached through a client.

    Threads may use it at once. A store that is dead or slow raises nothing: its rows are misses.
    """

    name = "remote"

    def __init__(
        self,
        store: str | BlobClient,
        layout: Layout,
        *,
        identity: Identity | None = None,
        options: RemoteOptions | None = None,
    ) -> None:
        makes = known_identity(layout, identity, "a remote store")
        if isinstance(store, str):
            store, options = open_client(store)
        self.client, self.options = store, options or RemoteOptions()
        note_unverified(makes, self.client.where)
        self._directory = Directory(self.client, self.options.tenant, makes)
        self._own = WriterLayout.of(layout.identified(makes), self._directory.base)
        self.layout = self._own.layout
        self.misses = Tallies()
        """Rows that were asked for and not given, by reason."""
        self.breaker = Breaker(self.client.where)
        self._calls = Calls(self.breaker, num_threads=LOTS + 1)
        self._look_ups = LookUps(
            self.client,
            self._calls,
            self._directory,
            self.layout,
            self._own.fingerprint,
            self.misses,
        )
        self._fetcher = Fetcher(self.client, self._calls, self.misses, self._remove_bad)
        self._quota = Quota(self.options)
        self._tallies = Tallies()
        self._published = float("-inf")
        self._has_answered = False
        """Whether the store has told its writers, or taken ours, since the tier was made."""
        self._publishing = Lock()
        self.writes = WriteQueue(
            self.client,
            self.breaker,
            self._quota,
            max_bytes=self.options.queue,
            before=self._publish,
            written=self._count_written,
        )
        self._closing = Event()
        self.refresh()
        self._thread = guarded_thread(
            "kvstow-remote-look",
            self._keep_looking,
            on_broken=lambda _: self._tallies.add("failures"),
        )
        self._thread.start()

    # ── who else writes ───────────────────────────────────────────────────────────

    def refresh(self) -> None:
        """See which writers there are now, and how much the store holds where that is limited.

        Nothing changes where the store does not answer.
        """
        if self.breaker.is_open:
            return
        try:
            self._calls.run(self._read_directory, self.options.load)
        except StoreUnreachable as error:
            log.warning("%s: the directory was not read: %s", self.client.where, error)

    def _read_directory(self) -> None:
        self._directory.refresh()
        self._has_answered = True
        if self._quota.is_limited:
            self._quota.use(last_usage(self.client))

    def _keep_looking(self) -> None:
        """Read the directory now and then; a store that has failed is only asked whether it answers
        again."""
        pause = FIRST_PAUSE
        while not self._closing.is_set():
            if not self.breaker.in_doubt.wait(REFRESH_SECONDS):
                self.refresh()
            elif not self._closing.wait(pause):
                pause = min(2 * pause, LONGEST_PAUSE)
                try:
                    self.client.exists(["probe"])
                except Exception as error:  # of whatever kind: it has not answered
                    self.breaker.failed(str(error))
                else:
                    self.breaker.close()
                    pause = FIRST_PAUSE

    def _publish(self) -> None:
        """Let others find the own layout: before the first row is written, and now and again,
        since a store may lose it."""
        with self._publishing:
            if monotonic() - self._published < REFRESH_SECONDS:
                return
            self._directory.publish(self._own)
            self._has_answered = True
            self._published = monotonic()

    # ── questions ─────────────────────────────────────────────────────────────────

    @property
    def counts(self) -> Counts:
        return Counts(**self._tallies.now)

    @property
    def reasons(self) -> Reasons:
        """Rows that the store did not give, and was not given, by reason."""
        return {"missed_rows": self.misses.now, "dropped_rows": self.writes.dropped.now}

    @property
    def usage(self) -> Usage:
        """What this process has written; the store's own usage is what the collector counts."""
        now = self.counts
        limits = (self.options.tenant_bytes, self.options.max_bytes)
        limits = [limit for limit in limits if limit is not None]
        return Usage(rows=now.stored_rows, nbytes=now.stored_bytes, capacity=min(limits, default=0))

    def expect(self, identity: Identity, prompt: Prompt) -> None:
        """Rows of this prompt will be asked for. Needed only where writers have other block sizes:
        without the tokens their blocks cannot be found."""
        self._look_ups.expect(identity, prompt)

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which rows are there, as far as there is time to look."""
        checked_keys(self.layout, group, keys)
        return np.array([parts is not None for parts in self._where(group, keys)], bool)

    def _where(self, group: int, keys: Sequence[bytes]) -> list[Parts | None]:
        if self.breaker.is_open or not self._has_answered:
            self.misses.add("unreachable", len(keys))
            return [None] * len(keys)
        where = self._look_ups.look_up(group, keys, self.options.budget)
        lost = [self._name(group, key) for key, parts in zip(keys, where, strict=True) if not parts]
        self.writes.forget(lost)  # a row that was collected is sent again
        return where

    # ── rows ──────────────────────────────────────────────────────────────────────

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        """Copy rows out; which of them were there, whole, and in time."""
        checked_rows(self.layout, group, checked_keys(self.layout, group, keys), rows)
        present = np.zeros(len(keys), bool)
        parts = {i: each for i, each in enumerate(self._where(group, keys)) if each is not None}
        row_bytes = self.layout.row_bytes(group)
        if parts and not self.breaker.is_open:
            at = list(parts)
            for n, row in self._fetcher.rows(row_bytes, list(parts.values()), self.options.load):
                rows[at[n]][:] = row
                present[at[n]] = True
            lost = [keys[i] for i in parts if not present[i]]
            self._look_ups.forget(group, lost)
            self.writes.forget([self._name(group, key) for key in lost])
        self._tallies.add_load(len(keys), int(present.sum()), row_bytes)
        return present

    def _remove_bad(self, name: str) -> None:
        """An object is not the row that its name says: it goes, so that it can be written again."""
        log.warning("%s: a broken object is removed: %s", self.client.where, name)
        self._tallies.add("failures")
        self._calls.start(lambda: self.client.delete([name]))

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Take copies of rows, to be written soon; which of them were taken or are there.

        Never waits for the store. Rows that do not fit the queue or a limit are dropped, and
        counted in `writes.dropped`.
        """
        checked_rows(self.layout, group, checked_keys(self.layout, group, keys), rows)
        objects = self._own.objects(group)
        taken = (
            self.writes.add(
                self._name(group, key),
                objects.nbytes,
                lambda key=key, row=row: objects.written(key, row),
            )
            for key, row in zip(keys, rows, strict=True)
        )
        return np.fromiter(taken, bool, len(keys))

    def _name(self, group: int, key: bytes) -> str:
        return self._own.objects(group).name(key)

    def _count_written(self, new: Sequence[Blob]) -> None:
        nbytes = sum(blob.data.nbytes for blob in new)
        self._quota.add(nbytes)
        self._tallies.add("stored_rows", len(new))
        self._tallies.add("stored_bytes", nbytes)

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        """Remove the objects that rows are made of; how many rows were there and are gone."""
        checked_keys(self.layout, group, keys)
        objects = {
            key: {part.name for part in parts}
            for key, parts in zip(keys, self._where(group, keys), strict=True)
            if parts is not None
        }
        names = list(set[str]().union(*objects.values()))
        try:
            kept = self._calls.run(lambda: self.client.delete(names), self.options.load)
        except StoreUnreachable:
            return 0
        gone = [key for key, each in objects.items() if not each <= kept.keys()]
        self._look_ups.forget(group, gone)
        self.writes.forget([name for name in names if name not in kept])
        self._tallies.add("evicted_rows", len(gone))
        return len(gone)

    # ── the end ───────────────────────────────────────────────────────────────────

    def flush(self, seconds: float) -> bool:
        """Whether everything that was taken has been written or dropped, within so many seconds."""
        return self.writes.flush(seconds)

    def close(self) -> None:
        """Write what waits, within the time limit of a load, and let go of the store."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.breaker.in_doubt.set()  # which the thread waits for
        self.writes.close(self.options.load)
        self._calls.close()
        self._thread.join(1.0)
        self.client.close()
