"""Generations: one counter per block, raised before the block's bytes change owner.

The counters lie in memory that peers can read. A consumer that finds a counter unchanged
after its last byte has arrived knows that nobody had begun to reuse the block (a seqlock).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from kvstow.errors import BlockError, TransferError, WrongThread
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks

log = logging.getLogger(__name__)


class Owner(Protocol):
    """Whoever hands out block ids: `kvstow.blocks.Pool`, or `Generations` for an engine.

    An agent calls these in the thread of whoever calls the agent; after `lend`, in its own too.
    """

    @property
    def generations(self) -> Sequence[Ints]:
        """Per group, one counter per block."""
        ...

    def place_generations(self, tables: Sequence[Ints]) -> None:
        """Keep the counters in this memory from now on, which is all 0: for the first agent."""
        ...

    def share(self, group: int, ids: Ints) -> None:
        """Keep these blocks from being reused, whoever else lets go of them."""
        ...

    def release(self, group: int, ids: Ints) -> None:
        """Undo one `share`."""
        ...

    def trust(self, group: int, ids: Ints, whole: Bools | None = None) -> None:
        """These blocks hold what their request needs; those that are `whole`, all of them if not
        given, lack nothing. Not those in quarantine."""
        ...

    def unknown(self, group: int, ids: Ints) -> Bools:
        """Whether each block holds nothing that anybody may use."""
        ...

    def quarantine(self, group: int, ids: Ints) -> None:
        """Somebody writes to these blocks: keep them from being reused, and what they hold is
        `unknown`. BlockError where one is in quarantine already."""
        ...

    def unquarantine(self, group: int, ids: Ints, whole: Bools | None = None) -> None:
        """Nobody writes to them any more. With `whole` all has been written: `trust` them."""
        ...


class OwnerQueue:
    """Calls to an owner that wait for its thread.

    `defer` is for any thread, everything else for the owner's. Where any thread may call the
    owner, what was deferred is still done in order: by one of them at a time.
    """

    def __init__(self, owner: Owner, on_error: Callable[[Exception], None]) -> None:
        self._owner = owner
        self._on_error = on_error
        self._deferred: deque[tuple[Callable[[], None], Callable[[Exception], None]]] = deque()
        self._settling = threading.RLock()
        self._thread = threading.get_ident()

    def defer(
        self, call: Callable[[], None], on_error: Callable[[Exception], None] | None = None
    ) -> None:
        """Have something done when the owner's thread next settles. What it raises ends nothing
        else: it is passed to `on_error`."""
        self._deferred.append((call, on_error or self._on_error))

    def settle(self) -> None:
        """Do what was deferred, unless another thread is at it. The calling thread is the owner's
        from now on."""
        if not self._settling.acquire(blocking=False):
            return
        try:
            while self._deferred:
                call, on_error = self._deferred.popleft()
                try:
                    call()
                except WrongThread:  # it stays deferred
                    self._deferred.appendleft((call, on_error))
                    raise
                except Exception as error:
                    log.exception("settling")
                    on_error(error)
            self._thread = threading.get_ident()
        finally:
            self._settling.release()

    def settle_if_ours(self) -> None:
        """Do what is owed, if the calling thread is the one that settled last."""
        if threading.get_ident() == self._thread:
            self.settle()

    def share(self, blocks: Mapping[int, Blocks]) -> None:
        """All blocks, or none and the owner's error."""
        self._all_or_none(self._owner.share, self._owner.release, blocks)

    def release(self, blocks: Mapping[int, Blocks]) -> None:
        """Undo one `share`."""
        for g, listed in blocks.items():
            self._owner.release(g, listed.ids)

    def quarantine(self, blocks: Mapping[int, Blocks]) -> None:
        """A pull writes to these blocks until `unquarantine`: all of them, or none and a
        TransferError."""
        try:
            self._all_or_none(self._owner.quarantine, self._owner.unquarantine, blocks)
        except BlockError as error:
            raise TransferError(
                f"{error}\n\nhint: pull into blocks that are held, and to which no earlier pull "
                "may still write: see transfer.wait_quiet()",
                kind="refused",
            ) from error

    def unquarantine(
        self, blocks: Mapping[int, Blocks], whole: Mapping[int, Bools] | None = None
    ) -> None:
        """Nothing writes to these blocks any more; `whole` if a pull has filled them."""
        for g, listed in blocks.items():
            self._owner.unquarantine(g, listed.ids, None if whole is None else whole[g])

    def _all_or_none(
        self,
        call: Callable[[int, Ints], None],
        undo: Callable[[int, Ints], None],
        blocks: Mapping[int, Blocks],
    ) -> None:
        with ExitStack() as undone:
            for g, listed in blocks.items():
                call(g, listed.ids)
                undone.callback(undo, g, listed.ids)
            undone.pop_all()


class Generations:
    """Counters for an engine that keeps its own block ids.

    The engine calls `retire` when it takes blocks back, before it reuses them. A block
    that an agent has shared is retired by itself when the agent lets go of it: from then on
    the engine alone knows whether a pull has filled it or has failed.
    """

    def __init__(self, layout: Layout) -> None:
        counts = [layout.num_blocks(g) for g in range(len(layout.groups))]
        ends = np.cumsum(counts)[:-1]
        self._tables: tuple[Ints, ...] = tuple(np.split(np.zeros(sum(counts), np.int64), ends))
        self._holds: tuple[Ints, ...] = tuple(np.zeros(count, np.int64) for count in counts)
        self._unknown: tuple[Bools, ...] = tuple(np.zeros(count, np.bool_) for count in counts)
        self._quarantined: tuple[Bools, ...] = tuple(np.zeros(count, np.bool_) for count in counts)

    @property
    def generations(self) -> Sequence[Ints]:
        return self._tables

    def place_generations(self, tables: Sequence[Ints]) -> None:
        for there, here in zip(tables, self._tables, strict=True):
            there[:] = here
        self._tables = tuple(tables)

    def retire(self, group: int, ids: Ints) -> None:
        """Raise the counters: whatever was read from these blocks is no longer accepted. What they
        hold from now on is for the engine to know."""
        np.add.at(self._tables[group], ids, 1)
        self._unknown[group][ids] = self._quarantined[group][ids]

    def holds(self, group: int, ids: Ints) -> Ints:
        """How many keep each block: the engine must not reuse one that is not at zero."""
        return self._holds[group][ids]

    def share(self, group: int, ids: Ints) -> None:
        np.add.at(self._holds[group], ids, 1)

    def release(self, group: int, ids: Ints) -> None:
        if (self._holds[group][ids] < 1).any():
            raise BlockError(f"group {group}: some of blocks {ids[:8].tolist()} are not shared")
        np.subtract.at(self._holds[group], ids, 1)
        self.retire(group, ids[self._holds[group][ids] == 0])

    def trust(self, group: int, ids: Ints, whole: Bools | None = None) -> None:
        self._unknown[group][ids] = self._quarantined[group][ids]

    def unknown(self, group: int, ids: Ints) -> Bools:
        return self._unknown[group][ids]

    def quarantine(self, group: int, ids: Ints) -> None:
        busy = ids[self._quarantined[group][ids]]
        if len(busy):
            raise BlockError(
                f"group {group}: {len(busy)} of {len(ids)} blocks are in quarantine already, "
                f"{busy[:8].tolist()} among them"
            )
        self.share(group, ids)
        self._quarantined[group][ids] = self._unknown[group][ids] = True

    def unquarantine(self, group: int, ids: Ints, whole: Bools | None = None) -> None:
        self._quarantined[group][ids] = False
        if whole is not None:
            self.trust(group, ids, whole)
        self.release(group, ids)
