"""A store: prefixes of prompts kept in host memory, on disk and on other machines.

    arena ⇄ host tier ⇄ disk tier, remote tier

It is made without a layout, and bound to one when it is first used. What is kept has keys that
name the computation and all tokens (`keys`), so that another process, or another day, finds the
same prefix and nothing else.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import lcm
from pathlib import Path
from threading import RLock
from typing import Self, get_args

import numpy as np
import numpy.typing as npt

from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.observe import Telemetry
from kvstow.offload.copies.jobs import MoverJob
from kvstow.offload.copies.mover import Mover
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.offload.journal import Journal, JournalKind
from kvstow.offload.keys import Keyed, PromptRows, links, tokenwise_groups
from kvstow.offload.metrics import TierMetrics
from kvstow.offload.remote.client import parse
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.rows import check_joinable, matching_group
from kvstow.offload.tier import (
    Bools,
    Tier,
    check_process,
    held_by_any,
    known_identity,
)
from kvstow.offload.why import WhyEnded, why_ended
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, Planned, as_layout
from kvstow.plan.retention import State
from kvstow.plan.view import parse_size
from kvstow.route.blocks import Blocks

log = logging.getLogger("kvstow.offload")

FLUSH_SECONDS = 60.0

_NONE = Blocks.first([])


class Store:
    """Rows by key in tiers: `host` bytes of host memory, a directory on `disk`, a `remote` URL.

    `disk_bytes` is needed where there is no store in the directory yet. `identity` says which
    computation makes the rows, unless the layout that is bound does. Sizes are numbers or words
    such as "8GiB". Several ranks may be given one directory; each has a folder of its own there.
    A remote store (`s3://…`, `redis://…`, `mooncake://…`, see `offload.remote.client`) is shared by
    all ranks and machines, whatever their layout. Stored prompts are recorded for `kvstow why` in
    the directory `journal_path`, or on `disk`; without either, none are.

    Rows travel by way of host memory: without `host`, through a window of 64 MiB per arena.
    Threads may use it at once; several stores may share a directory, in one process or in many. A
    process that was forked after the store was opened must open its own.
    """

    def __init__(
        self,
        *,
        host: int | str | None = None,
        disk: str | Path | None = None,
        disk_bytes: int | str | None = None,
        remote: str | None = None,
        identity: Identity | None = None,
        journal: JournalKind = "digests",
        journal_path: str | Path | None = None,
    ) -> None:
        if host is None and disk is None and remote is None:
            raise StoreError(
                "a store without a place for rows\n\n"
                'hint: Store(host="8GiB"), Store(disk="/var/cache/kvstow", disk_bytes="100GiB"), '
                'Store(remote="s3://bucket/prefix")'
            )
        if journal not in get_args(JournalKind):
            names = ", ".join(get_args(JournalKind))
            raise StoreError(f"journal={journal!r} is none of {names}")
        self._host_bytes = None if host is None else parse_size(host)
        self._disk_bytes = None if disk_bytes is None else parse_size(disk_bytes)
        self._path = None if disk is None else _directory(disk)
        self._url = remote
        if remote is not None:
            parse(remote)
        self._given_identity = identity
        self.journal: Journal | None = None
        noted = self._path if journal_path is None else _directory(journal_path)
        if noted is not None and journal != "off":
            self.journal = Journal(noted, tokens=journal == "tokens")
        self._lock = RLock()
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        self.remote: RemoteTier | None = None
        self._tiers: tuple[Tier, ...] = ()
        self._movers: dict[int, tuple[Arena, Mover]] = {}
        """By the arena's id: the arena is kept, so its id stays its own."""
        self._is_closed = False
        self._opener = os.getpid()

    @classmethod
    def open(
        cls,
        path: str | Path,
        layout: Layout | None = None,
        *,
        capacity: int | str | None = None,
    ) -> Self:
        """The store in a directory, bound to `layout`, or to its own where none is given.

        A new store needs `layout` and `capacity`. One that is there keeps its own layout;
        another one of the same computation is joined to it by a route, anything else is refused.
        """
        store = cls(disk=path, disk_bytes=capacity)
        store._use(DiskTier(path, layout, capacity=store._disk_bytes), layout)
        return store

    # ── binding ───────────────────────────────────────────────────────────────────

    def bind(self, layout: Layout | Planned, identity: Identity | None = None) -> Self:
        """Keep rows of this layout, or of any that a route can join to it, from now on.

        StoreError where nobody says which computation makes the rows, or where the store holds
        rows of another one. Binding again checks that the layouts can be joined.
        """
        layout = as_layout(layout)
        with self._lock:
            makes = known_identity(layout, identity or self._given_identity, "a store")
            layout = layout.identified(makes)
            if self._tiers:
                check_joinable(layout, self.layout)
                return self
            disk = None
            if self._path is not None:
                folder = _folder(self._path, layout)
                disk = DiskTier(folder, layout, capacity=self._disk_bytes)
            self._use(disk, layout)
            return self

    def _use(self, disk: DiskTier | None, layout: Layout | None = None) -> None:
        rows = disk.layout if disk is not None else layout
        assert rows is not None
        try:
            if layout is not None:
                check_joinable(layout, rows)
            if self._url is not None:
                self.remote = RemoteTier(self._url, rows)
            if self._host_bytes is not None:
                self.host = HostTier(rows, capacity=self._host_bytes)
        except BaseException:
            for tier in (disk, self.remote):
                if tier is not None:
                    tier.close()
            self.remote = None
            raise
        self.disk = disk
        tiers = (self.host, self.disk, self.remote)
        self._tiers = tuple(tier for tier in tiers if tier is not None)

    @property
    def layout(self) -> Layout:
        """The layout of the rows that are kept; StoreError before the store is bound."""
        return self.tiers[0].layout

    @property
    def identity(self) -> Identity:
        """The computation that makes the rows."""
        identity = self.layout.identity
        assert identity is not None  # which every tier has made sure of
        return identity

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, the fastest first."""
        if self._is_closed:
            raise StoreError("the store is closed")
        if not self._tiers:
            raise StoreError("the store has no layout yet\n\nhint: store.bind(arena.layout)")
        return self._tiers

    def _mover(self, arena: Arena) -> Mover:
        """The mover of an arena that can be joined to the store, which is checked once. Arenas that
        are closed are let go of when all that came from them has gone on."""
        if id(arena) not in self._movers:
            self.bind(arena.layout)
        _ = self.tiers
        check_process(self._opener, "the store")
        with self._lock:
            for number, (other, mover) in tuple(self._movers.items()):
                mover.reap()
                if other.is_closed and mover.drain(0):
                    mover.close()
                    del self._movers[number]
            if id(arena) not in self._movers:
                self._movers[id(arena)] = (
                    arena,
                    Mover(arena, self.host, *(t for t in self._tiers if t is not self.host)),
                )
            return self._movers[id(arena)][1]

    def watch(self, telemetry: Telemetry) -> None:
        """Show the numbers of all tiers in a telemetry; StoreError before the store is bound."""
        TierMetrics(telemetry.registry, self.tiers)

    # ── prefixes ──────────────────────────────────────────────────────────────────

    def save(
        self,
        arena: Arena,
        blocks: Mapping[int, Blocks],
        prompt: Prompt,
        *,
        identity: Identity | None = None,
    ) -> int:
        """Store what a request's blocks hold of a computed prompt; returns how many rows.

        `blocks` are the request's by group, as `Ledger.blocks` lists them. The last block may be
        partly filled; a recurrent group's row is its state after the whole prompt. `identity` is
        for a request with an adapter or salt of its own (`store.identity.for_request`). Nobody
        may write to the blocks meanwhile.
        """
        mover = self._mover(arena)
        _check_blocks(blocks)
        makes = identity or self.identity
        rows = PromptRows(arena.layout, makes, prompt)
        count = 0
        for g, group in rows.groups:
            running = blocks[g].whole if g in blocks else _NONE  # nobody is given what has gaps
            whole, rest = divmod(len(prompt), group.block_tokens)
            listed, last = running, running.ids[(running.index == whole) & (rest > 0)]
            if isinstance(group.retention, State):
                listed, last = _NONE, running.ids[: len(prompt) > 0]
            keys = rows.keys.of_blocks(group.block_tokens)
            at = listed.index < len(keys)
            numbers: list[int] = listed.index[at].tolist()
            chain = links(keys)
            named, where = [keys[k] for k in numbers], [chain[k] for k in numbers]
            end = rows.keys.key_at(len(prompt))
            if len(last) and end is not None:
                named, where = [*named, end], [*where, ChainLink()]
            ids = np.append(listed.ids[at], last)
            count += int(_result(mover.store(g, ids, named, where)).sum())
        self.note(prompt, makes)
        return count

    def note(self, prompt: Prompt, identity: Identity | None = None) -> None:
        """Remember that a prompt was stored, for `kvstow why`; `save` does so itself."""
        if self.journal is not None:
            self.journal.note(prompt, identity or self.identity, self._unit)

    def why(self, prompt: Prompt, identity: Identity | None = None) -> WhyEnded:
        """Where reuse of a prompt would end now, and why."""
        makes = identity or self.identity
        num_tokens = self.stored_tokens(prompt, identity=makes)
        return why_ended(self.journal, prompt, makes, num_tokens, self._unit)

    @property
    def _unit(self) -> int:
        """Tokens after which blocks of all groups end."""
        return lcm(*(group.block_tokens for _, group in tokenwise_groups(self.layout)))

    def stored_tokens(
        self, prompt: Prompt, *, most: int | None = None, identity: Identity | None = None
    ) -> int:
        """How many tokens of the prompt, from the first on, can be loaded; at most `most`.

        An engine that needs the next token's logits asks for at most `len(prompt) - 1`.
        """
        makes = identity or self.identity
        self.expect(prompt, makes)
        rows = PromptRows(self.layout, makes, prompt)
        return rows.longest(len(prompt) if most is None else most, self.contains)

    def expect(self, prompt: Prompt, identity: Identity | None = None) -> None:
        """Announce that rows of this prompt will be requested by key.

        `stored_tokens` and `load` do so themselves. A remote store finds blocks of other sizes
        only if they were announced.
        """
        if self.remote is not None:
            self.remote.expect(identity or self.identity, prompt)

    def load(
        self,
        arena: Arena,
        prompt: Prompt,
        *,
        into: Mapping[int, Blocks],
        most: int | None = None,
        identity: Identity | None = None,
    ) -> int:
        """Load the longest stored prefix of a prompt into a request's blocks; returns its length.

        Every block that a token behind it sees must be among `into`, so ask `stored_tokens`
        first and admit as many. 0 where nothing fits; the blocks' bytes are unspecified then.
        """
        mover = self._mover(arena)
        _check_blocks(into)
        makes = identity or self.identity
        rows = PromptRows(arena.layout, makes, prompt)
        missing = [group.name for g, group in rows.groups if g not in into]
        if missing:
            raise StoreError(
                f"no blocks are listed for {len(missing)} of {len(arena.layout.groups)} groups: "
                f"{', '.join(missing)}\n\nhint: into=ledger.blocks(request)"
            )
        there = {g: matching_group(arena.layout, g, self.layout) for g, _ in rows.groups}
        self.expect(prompt, makes)
        limit = len(prompt) if most is None else most
        for _ in range(3):  # rows may go while they are looked for
            length = rows.longest(limit, lambda g, keys: self.contains(there[g], keys), into)
            self._log_why(prompt, makes)
            if not length or self._has_loaded(mover, arena, rows.seen(length), into):
                return length
            limit = length - 1
        return 0

    def _log_why(self, prompt: Prompt, identity: Identity) -> None:
        """Log where reuse ends, for those who want to know; a broken journal stops nobody."""
        if log.isEnabledFor(logging.DEBUG):
            try:
                text = self.why(prompt, identity).text
            except StoreError as error:
                text = str(error)
            log.debug("prompt of %d tokens: %s", len(prompt), text)

    def _has_loaded(
        self,
        mover: Mover,
        arena: Arena,
        seen: Mapping[int, Keyed],
        into: Mapping[int, Blocks],
    ) -> bool:
        """Bring these rows; whether all of them came."""
        for g, keyed in seen.items():
            if isinstance(arena.layout.groups[g].group.retention, State):
                ids = into[g].ids[: len(keyed.keys)]
            else:
                ids = into[g].ids[np.searchsorted(into[g].index, keyed.index)]
            if not _result(mover.load(g, keyed.keys, ids)).all():
                return False
        return True

    # ── rows ──────────────────────────────────────────────────────────────────────

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which rows of a group of the store's layout are there."""
        return held_by_any(self.tiers, group, keys)

    def save_rows(
        self,
        arena: Arena,
        group: int,
        ids: npt.ArrayLike,
        keys: Sequence[bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Store blocks of an arena; returns which of them are stored now.

        With a host tier, the disk gets them in the background (`flush`). `links` say where the
        blocks stand in their sequences, for `kvstow store convert`. Nobody may write to them
        meanwhile. Raises StoreError, naming the blocks, when the medium fails.
        """
        return _result(self._mover(arena).store(group, ids, keys, links))

    def load_rows(
        self, arena: Arena, group: int, keys: Sequence[bytes], ids: npt.ArrayLike
    ) -> Bools:
        """Load rows into blocks of an arena; returns which of them were there.

        The bytes of the other blocks are unspecified.
        """
        return _result(self._mover(arena).load(group, keys, ids))

    # ── the end ───────────────────────────────────────────────────────────────────

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Whether everything that was saved has gone on to the tiers below host memory, or was
        dropped, within so many seconds."""
        with self._lock:
            movers = [mover for _, mover in self._movers.values()]
        drained = [mover.drain(timeout) for mover in movers]
        return (self.remote is None or self.remote.flush(timeout)) and all(drained)

    def close(self) -> None:
        """Finish the writes under way, and release memory, files and connections.

        In a process that was forked meanwhile nothing happens: they are the other one's.
        """
        if os.getpid() != self._opener:
            return
        movers = [mover for _, mover in self._movers.values()]
        used = (self.remote, self.disk, self.host, *movers)
        with ExitStack() as closing:  # the last first, and all of them whatever fails
            for each in used:
                if each is not None:
                    closing.callback(each.close)
            self.flush()
            self.host = self.disk = self.remote = None
            self._movers.clear()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _result(job: MoverJob) -> Bools:
    """What has become of a job, when nothing of it uses the blocks any more: whoever is interrupted
    while it waits may use them for something else at once."""
    try:
        return job.result()
    finally:
        job.cancel()
        job.wait()


def _directory(path: str | Path) -> Path:
    """The path, unless it can be none: an empty one would be the directory that we are in."""
    text = str(path)
    if not text or "\0" in text or (isinstance(path, str) and not text.strip()):
        raise StoreError(f'{text!r} names no directory\n\nhint: Store(disk="/var/cache/kvstow")')
    return Path(path)


def _folder(path: Path, layout: Layout) -> Path:
    """The directory of a rank: `path` itself where there is only one."""
    if layout.tp[1] == layout.pp[1] == 1:
        return path
    return path / f"tp{layout.tp[0]}of{layout.tp[1]}-pp{layout.pp[0]}of{layout.pp[1]}"


def _check_blocks(blocks: Mapping[int, Blocks]) -> None:
    """Refuses what is not blocks by group, such as the number of a request."""
    if not isinstance(blocks, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(
            f"blocks are listed by group, not as {type(blocks).__name__}\n\n"
            "hint: ledger.blocks(request)"
        )
