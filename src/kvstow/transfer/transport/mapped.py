"""Mapped: the arena of a peer on this node is memory of ours, and we copy out of it ourselves.

    at first contact   arena, counters ◀── mapped once ── consumer
    a pull             copy ─▶ digest of both sides ─▶ counters ─▶ accept; told, and not waited for

When is our memory quiet? As soon as our own copy has ended: nobody else writes to it. The fence is
a read of memory: counters are looked at after the last byte, and a ticket is believed by its
signature alone. A producer may be stopped or killed at any time: its memory stays as it was for as
long as we map it. One that closes its agent and lives on says so in `alive`, before it gives blocks
back.

A mapping keeps a dead producer's memory allocated. So its process is watched, and the mapping is
closed as soon as no copy of ours runs.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from kvstow.errors import CopyError, NotShared, TransferError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import CopyHandle, copy, copy_grids
from kvstow.memory.share import (
    Mapping,
    SharedArena,
    SharedCounters,
    SharedFile,
    mapped_counters,
    share,
)
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies, chunks
from kvstow.route.lanes import Grid
from kvstow.transfer.loop import AT_ONCE, SOON, Routine
from kvstow.transfer.tickets.owner import Owner

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint

log = logging.getLogger(__name__)

STEP_BYTES = 16 << 20
"""So much is copied on the host before others get a turn: two milliseconds or so."""

Reason = Literal["node", "user", "memory", "process", "option"]
"""Why a peer is not mapped: it is on another node or of another user, its memory cannot be mapped
by others, its process is not found or not the same, or an option forbids it."""


# ── what is shared, and what is mapped ────────────────────────────────────────────────


class Counters(Protocol):
    """Whole numbers that peers of this node can read, all 0 at first."""

    @property
    def numbers(self) -> Ints: ...


class PeerMemory(Protocol):
    """Memory of a peer's process: its arena, its generations, and whether it is 1 that `alive`
    holds, as long as its agent is open."""

    @property
    def arena(self) -> Arena: ...

    @property
    def tables(self) -> Ints: ...

    @property
    def alive(self) -> Ints: ...

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        ...

    def close(self) -> None:
        """Let go of it. Nothing may be reading it."""
        ...


class NodeMemory(Protocol):
    """How processes of one node share memory: a simulation brings its own."""

    def counters(self, count: int) -> Counters:
        """So many numbers."""
        ...

    def describe(self, arena: Arena, tables: Counters, alive: Counters) -> bytes:
        """What a peer needs to map them. Raises NotShared."""
        ...

    def attach(self, description: bytes, layout: Layout, device: torch.device) -> PeerMemory:
        """Map what a peer has described. Raises NotShared."""
        ...


class _Description(msgspec.Struct, frozen=True, array_like=True):
    arena: SharedArena
    tables: SharedFile
    alive: SharedFile


class _Mapped:
    def __init__(self, described: _Description, layout: Layout, device: torch.device) -> None:
        self._mapping = Mapping(described.arena, layout, device)
        self.arena = self._mapping.arena
        count = sum(layout.num_blocks(g) for g in range(len(layout.groups)))
        try:
            self.tables = mapped_counters(described.arena, described.tables, count)
            self.alive = mapped_counters(described.arena, described.alive, 1)
        except BaseException:
            self._mapping.close()
            raise

    @property
    def is_gone(self) -> bool:
        return self._mapping.is_gone

    def close(self) -> None:
        del self.tables, self.alive
        self._mapping.close()


class ThisNode:
    """Files in memory, and handles of device memory."""

    def counters(self, count: int) -> SharedCounters:
        return SharedCounters(count)

    def describe(self, arena: Arena, tables: Counters, alive: Counters) -> bytes:
        assert isinstance(tables, SharedCounters)
        assert isinstance(alive, SharedCounters)
        return msgspec.msgpack.encode(_Description(share(arena), tables.file, alive.file))

    def attach(self, description: bytes, layout: Layout, device: torch.device) -> _Mapped:
        try:
            described = msgspec.msgpack.decode(description, type=_Description)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NotShared("memory", f"no description of memory: {error}") from None
        return _Mapped(described, layout, device)


_placed: WeakKeyDictionary[Owner, Counters] = WeakKeyDictionary()
"""Where owners have their generations: several agents may share one's blocks."""


def place_generations(node: NodeMemory, owner: Owner) -> Counters:
    """Have an owner keep its generations where peers can read them, from its first agent on."""
    if owner not in _placed:
        counts = [len(table) for table in owner.generations]
        counters = node.counters(sum(counts))
        owner.place_generations(np.split(counters.numbers, np.cumsum(counts)[:-1]))
        _placed[owner] = counters
    return _placed[owner]


# ── a peer ────────────────────────────────────────────────────────────────────────────


class MappedPeer:
    """A mapped peer. Whoever copies out of it holds it meanwhile; from any thread."""

    def __init__(self, memory: PeerMemory, layout: Layout) -> None:
        counts = [layout.num_blocks(g) for g in range(len(layout.groups))]
        self.arena = memory.arena
        self._memory = memory
        self._tables: Sequence[Ints] = np.split(memory.tables, np.cumsum(counts)[:-1])
        self._lock = threading.Lock()
        self._holds = 1  # the peer's own, until it is lost

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended; its memory stays until nobody holds it."""
        return self._memory.is_gone

    def hold(self) -> None:
        """Keep the mapping. Raises TransferError where it was closed already."""
        with self._lock:
            if not self._holds:
                raise TransferError("the peer's memory is not mapped any more", kind="peer")
            self._holds += 1

    def release(self) -> None:
        """Undo one `hold`; the last one closes the mapping. A driver that refuses is no fault of
        whoever was the last."""
        with self._lock:
            self._holds -= 1
            if not self._holds:
                self._tables = ()
                try:
                    self._memory.close()
                except Exception:
                    log.warning("a peer's memory stays mapped", exc_info=True)

    def generations(self, blocks: MappingOf[int, Blocks]) -> dict[int, Ints] | None:
        """The counters of these blocks, now; None where the agent there was closed."""
        tables, alive = self._tables, self._memory.alive
        counts = {g: tables[g].take(listed.ids) for g, listed in blocks.items()}
        return counts if alive[0] == 1 else None


def copy_mapped(endpoint: "Endpoint", peer: MappedPeer, grids: Sequence[Grid]) -> Routine[int]:
    """Copy out of a peer's arena, in how many pieces; nothing is under way when this has ended,
    however it does. Raises TransferError."""
    if endpoint.kind == "VRAM":
        programs = endpoint.options.copy_programs
        yield from ended(partial(copy_grids, peer.arena, endpoint.arena, grids, programs))
        return sum(map(len, grids))
    copies = Copies.joined([grid.written_out() for grid in grids]).merged()
    for part in chunks(copies, STEP_BYTES):
        yield AT_ONCE
        yield from copied(peer.arena, endpoint.arena, part)
    return len(copies)


def copied(source: Arena, destination: Arena, copies: Copies) -> Routine[None]:
    """Copy inside this machine; TransferError if that fails. Leaves nothing under way."""
    return ended(partial(copy, source, destination, copies))


def ended(start: Callable[[], CopyHandle]) -> Routine[None]:
    """Start a copy, and wait for its end, whatever happens. Raises TransferError."""
    running: CopyHandle | None = None
    try:
        running = start()
        while not running.poll():
            yield SOON
        running = None
    except CopyError as error:
        raise TransferError(f"copy: {error}", kind="transport") from error
    finally:
        if running is not None:
            with suppress(CopyError):
                running.wait()
