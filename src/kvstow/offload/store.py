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
from functools import partial
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
from kvstow.offload.arenas import ArenaRows
from kvstow.offload.disk.files import Files
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.eviction.policies import PolicyName
from kvstow.offload.heartbeat import Heartbeat, watch_tiers
from kvstow.offload.host.tier import HostTier
from kvstow.offload.journal import Journal, JournalKind
from kvstow.offload.keys import block_keys, keys_at, links, tokenwise_groups, wanted
from kvstow.offload.prefixes import check_blocks, check_listed, last_row, longest_prefix
from kvstow.offload.remote.tier import RemoteTier, loadable
from kvstow.offload.remote.url import parse
from kvstow.offload.rows import check_joinable, matching_group
from kvstow.offload.tier import (
    Bools,
    Tier,
    held_by_any,
    known_identity,
)
from kvstow.offload.why import WhyEnded, why_ended
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import State
from kvstow.plan.words import parse_size
from kvstow.route.blocks import Blocks

log = logging.getLogger("kvstow.offload")

FLUSH_SECONDS = 60.0

_NO_BLOCKS: Mapping[int, Blocks] = {}


class Store:
    """Rows by key in tiers: `host` bytes of host memory, a directory on `disk`, a `remote` URL.

    `disk_bytes` is needed where there is no store in the directory yet. `identity` says which
    computation makes the rows, unless the layout that is bound does. Sizes are numbers or words
    such as "8GiB". Several ranks may be given one directory; each has a folder of its own there.
    A remote store (`s3://…`, `redis://…`, `mooncake://…`, see `offload.remote.url`) is shared by
    all ranks and machines, whatever their layout. Stored prompts are noted for `kvstow why` in the
    directory `journal_path`, or on `disk`; without either, nothing is noted.

    Threads may use it at once, and take turns where it has no host memory; several stores may
    share a directory, in one process or in many. A process that was forked after the store was
    opened must open its own.
    """

    def __init__(
        self,
        *,
        host: int | str | None = None,
        disk: str | Path | None = None,
        disk_bytes: int | str | None = None,
        remote: str | None = None,
        identity: Identity | None = None,
        policy: PolicyName = "lru",
        files: Files | None = None,
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
            known = ", ".join(get_args(JournalKind))
            raise StoreError(f"journal={journal!r} is none of {known}")
        self._host_bytes = None if host is None else parse_size(host)
        self._disk_bytes = None if disk_bytes is None else parse_size(disk_bytes)
        self._path = None if disk is None else _directory(disk)
        self._url = remote
        if remote is not None:
            parse(remote)
        self._wanted_identity = identity
        self._policy: PolicyName = policy
        self._files = files
        self.journal: Journal | None = None
        noted = self._path if journal_path is None else _directory(journal_path)
        if noted is not None and journal != "off":
            self.journal = Journal(noted, tokens=journal == "tokens")
        self._lock = RLock()
        self.host: HostTier | None = None
        self.disk: DiskTier | None = None
        self.remote: RemoteTier | None = None
        self._identity: Identity | None = None
        self._rows: ArenaRows | None = None
        self._heartbeat: Heartbeat | None = None
        self._is_closed = False
        self._opener = os.getpid()

    @classmethod
    def open(
        cls,
        path: str | Path,
        layout: Layout | None = None,
        *,
        capacity: int | str | None = None,
        policy: PolicyName = "lru",
        files: Files | None = None,
    ) -> Self:
        """The store in a directory, bound to `layout`, or to its own where none is given.

        A new store needs `layout` and `capacity`. One that is there keeps its own layout;
        another one of the same computation is joined to it by a route, anything else is refused.
        """
        store = cls(disk=path, disk_bytes=capacity, policy=policy, files=files)
        store._use(
            DiskTier(path, layout, capacity=store._disk_bytes, policy=policy, files=files), layout
        )
        return store

    # ── binding ───────────────────────────────────────────────────────────────────

    def bind(self, layout: Layout, identity: Identity | None = None) -> Self:
        """Keep rows of this layout, or of any that a route can join to it, from now on.

        StoreError where nobody says which computation makes the rows, or where the store holds
        rows of another one. Binding again checks that the layouts can be joined.
        """
        with self._lock:
            known = known_identity(layout, identity or self._wanted_identity, "a store")
            layout = layout.identified(known)
            if self._identity is not None:
                check_joinable(layout, self.layout)
                return self
            disk = None
            if self._path is not None:
                disk = DiskTier(
                    _folder(self._path, layout),
                    layout,
                    capacity=self._disk_bytes,
                    policy=self._policy,
                    files=self._files,
                )
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
                self.host = HostTier(rows, capacity=self._host_bytes, policy=self._policy)
        except BaseException:
            for tier in (disk, self.remote):
                if tier is not None:
                    tier.close()
            self.remote = None
            raise
        if disk is not None:
            self._heartbeat = Heartbeat(disk, (self.host, self.remote))
        self.disk = disk
        self._rows = ArenaRows(self.host, disk, self.remote)
        self._identity = rows.identity

    @property
    def layout(self) -> Layout:
        """The layout of the rows that are kept; StoreError before the store is bound."""
        return self.tiers[0].layout

    @property
    def identity(self) -> Identity:
        """The computation that makes the rows."""
        return known_identity(self.layout, None, "a store")

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers, the fastest first."""
        tiers: tuple[Tier | None, ...] = (self.host, self.disk, self.remote)
        present = tuple(tier for tier in tiers if tier is not None)
        if self._is_closed:
            raise StoreError("the store is closed")
        if not present:
            raise StoreError("the store has no layout yet\n\nhint: store.bind(arena.layout)")
        return present

    @property
    def _arena_rows(self) -> ArenaRows:
        """What moves rows; StoreError before the store is bound, and when it is closed."""
        _ = self.tiers
        assert self._rows is not None
        return self._rows

    def watch(self, telemetry: Telemetry) -> None:
        """Show the numbers of all tiers in a telemetry; StoreError before the store is bound."""
        watch_tiers(telemetry, self.tiers)

    @property
    def dropped(self) -> tuple[str, ...]:
        """What was lost when the store was opened, in words."""
        return () if self.disk is None else tuple(str(drop) for drop in self.disk.dropped)

    # ── prefixes ──────────────────────────────────────────────────────────────────

    def save(
        self,
        arena: Arena,
        blocks: Mapping[int, Blocks],
        prompt: Prompt,
        *,
        checkpoints: Mapping[int, Blocks] = _NO_BLOCKS,
        identity: Identity | None = None,
    ) -> int:
        """Keep what a request's blocks hold of a prompt that has been computed; how many rows.

        `blocks` are the request's by group, as `Ledger.blocks` lists them, `checkpoints` as
        `Ledger.checkpoints` does. The last block may be partly filled; a recurrent group's row
        is its state after the whole prompt. `identity` is for a request with an adapter or salt
        of its own (`store.identity.for_request`). Nobody may write to the blocks meanwhile.
        """
        self.bind(arena.layout, self._wanted_identity)
        check_blocks(blocks)
        known = identity or self.identity
        count = 0
        for g, group in tokenwise_groups(arena.layout):
            whole = block_keys(known, prompt, group.block_tokens)
            running = blocks[g].whole if g in blocks else None  # nobody is given what lacks tokens
            listed = checkpoints.get(g) if isinstance(group.retention, State) else running
            if listed is not None:
                listed = listed.whole
                at = listed.index < len(whole)
                numbers: list[int] = listed.index[at].tolist()
                chain = links(whole)
                keys: list[bytes] = [whole[k] for k in numbers]
                where: list[ChainLink] = [chain[k] for k in numbers]
                count += int(self.save_rows(arena, g, listed.ids[at], keys, where).sum())
            last = last_row(running, group.retention, len(prompt), group.block_tokens)
            if len(last):
                end = keys_at(known, prompt, [len(prompt)])
                count += int(self.save_rows(arena, g, last, end).sum())
        self.note(prompt, known)
        return count

    def note(self, prompt: Prompt, identity: Identity | None = None) -> None:
        """Remember that a prompt was stored, for `kvstow why`; `save` does so itself."""
        if self.journal is not None:
            self.journal.note(prompt, identity or self.identity, self._unit)

    def why(self, prompt: Prompt, identity: Identity | None = None) -> WhyEnded:
        """Where reuse of a prompt would end now, and why."""
        known = identity or self.identity
        found = self.stored_tokens(prompt, identity=known)
        return why_ended(self.journal, prompt, known, found, self._unit)

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
        known = identity or self.identity
        self.expect(prompt, known)
        return self._longest(self.layout, known, prompt, most)

    def expect(self, prompt: Prompt, identity: Identity | None = None) -> None:
        """Rows of this prompt will be asked for by key. `stored_tokens` and `load` say so by
        themselves; a remote store finds blocks of other sizes only so."""
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
        """Bring the longest stored beginning of a prompt into a request's blocks; its tokens.

        Every block that a token behind it sees must be among `into`, so ask `stored_tokens`
        first and admit as many. 0 where nothing fits; the blocks' bytes are unspecified then.
        """
        self.bind(arena.layout, self._wanted_identity)
        check_listed(arena.layout, into)
        known = identity or self.identity
        self.expect(prompt, known)
        limit = most
        for _ in range(3):  # rows may go while they are looked for
            length = self._longest(arena.layout, known, prompt, limit, into)
            self._say_why(prompt, known)
            if not length or self._loaded(arena, known, prompt, length, into):
                return length
            limit = length - 1
        return 0

    def _say_why(self, prompt: Prompt, identity: Identity) -> None:
        """Log where reuse ends, for those who want to know; a broken journal stops nobody."""
        if log.isEnabledFor(logging.DEBUG):
            try:
                text = self.why(prompt, identity).text
            except StoreError as error:
                text = str(error)
            log.debug("prompt of %d tokens: %s", len(prompt), text)

    def _longest(
        self,
        layout: Layout,
        identity: Identity,
        prompt: Prompt,
        most: int | None,
        into: Mapping[int, Blocks] | None = None,
    ) -> int:
        return longest_prefix(layout, identity, prompt, partial(self._present, layout), most, into)

    def _loaded(
        self,
        arena: Arena,
        identity: Identity,
        prompt: Prompt,
        length: int,
        into: Mapping[int, Blocks],
    ) -> bool:
        """Bring the rows that a token at `length` sees; whether all of them came."""
        for g, keyed in wanted(identity, prompt, arena.layout, length).items():
            if isinstance(arena.layout.groups[g].group.retention, State):
                ids = into[g].ids[: len(keyed.keys)]
            else:
                ids = into[g].ids[np.searchsorted(into[g].index, keyed.index)]
            if not self.load_rows(arena, g, keyed.keys, ids).all():
                return False
        return True

    def _present(self, layout: Layout, group: int, keys: Sequence[bytes]) -> Bools:
        return self.loadable(matching_group(layout, group, self.layout), keys)

    # ── rows ──────────────────────────────────────────────────────────────────────

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which rows of a group of the store's layout are there."""
        return held_by_any(self.tiers, group, keys)

    def loadable(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which of these rows are there and take less time to load than to compute."""
        return loadable(self.tiers, group, keys)

    def save_rows(
        self,
        arena: Arena,
        group: int,
        ids: npt.ArrayLike,
        keys: Sequence[bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Keep blocks of an arena; which of them are there now.

        With host memory, the disk gets them in the background (`flush`). `links` say where the
        blocks stand in their sequences, for `kvstow store convert`. Nobody may write to them
        meanwhile. Raises StoreError, naming the blocks, when the medium fails.
        """
        return self._arena_rows.save(arena, group, ids, keys, links)

    def load_rows(
        self, arena: Arena, group: int, keys: Sequence[bytes], ids: npt.ArrayLike
    ) -> Bools:
        """Bring rows into blocks of an arena; which of them were there.

        The bytes of the other blocks are unspecified.
        """
        return self._arena_rows.load(arena, group, keys, ids)

    # ── the end ───────────────────────────────────────────────────────────────────

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Whether everything that was saved has gone on to the tiers below host memory, or was
        dropped, within so many seconds."""
        drained = self._rows is None or self._rows.flush(timeout)
        return (self.remote is None or self.remote.flush(timeout)) and drained

    def close(self) -> None:
        """Write what is on its way, and let go of memory, files and connections.

        In a process that was forked meanwhile nothing happens: they are the other one's.
        """
        if os.getpid() != self._opener:
            return
        used = (self.journal, self.remote, self.disk, self.host, self._heartbeat, self._rows)
        with ExitStack() as closing:  # the last first, and all of them whatever fails
            for each in used:
                if each is not None:
                    closing.callback(each.close)
            self.flush()
            self.host = self.disk = self.remote = self._rows = None
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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
