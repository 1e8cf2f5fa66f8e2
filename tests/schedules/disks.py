"""Tiers of a node in a schedule: a host tier, a store on a disk that loses power, a mover.

A mover's step runs in a greenlet, which stops before file operations: then others get turns, of
the same node and of other processes that have the same store open. It never stops while a process
gives a file its names, for which its own threads would have to wait.
"""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent, greenlet

from faulty import Fails, Fault, FaultyFiles, Flips, Tears, Unsynced
from kvstow.offload.copies.jobs import MoverJob
from kvstow.offload.copies.mover import Limits, Mover
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.offload.tier import Tier
from kvstow.plan.layout import Layout
from schedules.rows import Claim
from schedules.truth import Ints, Request, Shape, layout_of, places_in, truth

if TYPE_CHECKING:
    from schedules.world import Node, World

ROW_BYTES = 4096
DATA_FILE = 2 * ROW_BYTES
"""A header and a page of rows."""

TRANSIENT = (errno.EMFILE, errno.ENOMEM, errno.EINTR)


class ProcessDied(BaseException):
    """The process is gone in the middle of what it did."""


@dataclass(eq=False)
class Load:
    """A prefix that is being loaded: jobs by group, and the logical blocks that they bring."""

    claim: Claim
    request: Request
    jobs: list[tuple[int, MoverJob, Ints]]


@dataclass(frozen=True)
class DiskFaults:
    """How often something goes wrong with a file.

    `fails` is an error that loses nothing, `breaks` a medium error, `syncs` one of a sync, `lies`
    a write that says it went well, `dies` the end of the process before an operation.
    """

    fails: float = 0.0
    breaks: float = 0.0
    syncs: float = 0.0
    lies: float = 0.0
    dies: float = 0.0


NO_DISK_FAULTS = DiskFaults()


class Machine:
    """One disk, and the processes that use it. Stores of equal ranks share a directory, whatever
    model they are of."""

    def __init__(self, world: "World", folder: str) -> None:
        self.world = world
        self.unsynced = Unsynced()
        self.faults = NO_DISK_FAULTS
        self.is_honest = True
        """Nothing has lost rows that have their names."""
        self.known: dict[bytes, tuple[Request, int]] = {}
        """What a key names: a request, and how many tokens of it there are at the block's end."""
        self.pauses = world.random.choice((0.0, 0.3, 0.8))
        self._folder = folder
        self._home: Path | None = None
        self._paths: set[Path] = set()

    def path(self, shape: Shape) -> Path:
        """The directory of all stores of such ranks."""
        rank, size = shape.tp
        if self._home is None:
            self._home = Path(mkdtemp(dir=self._folder))
        path = self._home / f"{rank}of{size}-{shape.block_tokens}-{shape.second}"
        self._paths.add(path)
        return path

    def fault(self, operation: str, count: int) -> Fault | None:
        """What goes wrong with the next operation on a file."""
        faults, dice = self.faults, self.world.random
        if faults is NO_DISK_FAULTS:
            return None
        drawn = dice.random()
        if operation == "write" and drawn < faults.lies:
            self.is_honest = False
            self.world.count("torn writes")
            if drawn < faults.lies / 2:
                return Tears(dice.choice((0, ROW_BYTES)))
            return Flips(dice.randrange(8 * ROW_BYTES))
        if operation == "sync" and drawn < faults.syncs:
            self.world.count("failed sync")
            return Fails(errno.EIO)
        if operation in ("read", "write") and drawn < faults.breaks:
            self.world.count(f"failed {operation}")
            self.is_honest &= operation != "read"
            return Fails(errno.EIO)
        if operation in ("open", "create", "read", "write", "rename") and drawn > 1 - faults.fails:
            self.world.count("transient errors")
            is_new = operation in ("create", "rename")
            return Fails(errno.ENOSPC if is_new else dice.choice(TRANSIENT))
        return None

    def cut(self) -> None:
        """The power was cut: what was not synced may be gone."""
        self.world.count("power cuts")
        lost = self.unsynced.cut(self.world.random.getrandbits(32))
        self.world.injected["unsynced sectors and names lost"] += lost

    def close(self) -> None:
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)


class SimFiles(FaultyFiles):
    """Files of one process, which may stop before every operation, or end there."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.fault, unsynced=machine.unsynced)
        self._machine = machine
        self.is_dead = False
        self.before: Callable[[str], None] = lambda operation: None

    @property
    def num_open(self) -> int:
        return len(self._paths)

    def _next(self, operation: str) -> Fault | None:
        self._check_alive()
        self.before(operation)
        self._check_alive()
        return super()._next(operation)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise ProcessDied

    def close(self, fd: int) -> None:
        if not self.is_dead:
            super().close(fd)

    def die(self) -> None:
        """Nothing reaches a file any more; the system closes what was open."""
        self.is_dead = True
        for fd in self._paths:
            os.close(fd)
        self._paths.clear()


class Storage:
    """The tiers of one process. Raises StoreError where the store is not for this node."""

    def __init__(self, machine: Machine, node: "Node") -> None:
        self.machine = machine
        self.shape = node.shape
        dice = machine.world.random
        self.files = SimFiles(machine)
        self.is_dead = False
        self.loads: list[Load] = []
        self.saves: list[MoverJob] = []
        self._running: greenlet | None = None
        self._hub = getcurrent()
        self.disk = self._opened(node, dice.choice((2, 3, 5)) * DATA_FILE)
        self.dropped: list[str] = []
        """Names of rows that were not what they should have been."""
        self.disk._drop = partial(self._note_dropped, self.disk._drop)
        layout = self.disk.layout
        rows = sum(layout.row_bytes(g) for g in range(len(layout.groups)))
        self.host = HostTier(layout, capacity=dice.choice((3, 6, 12)) * max(rows, 256))
        limits = Limits(workers=0, max_bytes=dice.choice((6, 128)) * rows, part_bytes=2 * rows)
        self.mover = Mover(node.arena, self.host, self.disk, pool=node.rows.owner, limits=limits)
        self.files.before = self._pause

    def _opened(self, node: "Node", capacity: int) -> DiskTier:
        machine = self.machine
        try:
            return DiskTier(
                machine.path(node.shape),
                layout_of(node.model, node.shape),
                capacity=capacity,
                files=self.files,
                threads=0,
                clock=machine.world.clock,
            )
        except BaseException:
            self.files.die()
            raise

    def _note_dropped(self, drop: Any, name: str, *what: Any) -> None:
        self.dropped.append(name)
        drop(name, *what)

    @property
    def nameless(self) -> list[str]:
        """Files that this process was writing and has forgotten."""
        folder = self.disk.tree.writers._folder
        return os.listdir(folder) if folder else []

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self.host, self.disk

    # ── turns ─────────────────────────────────────────────────────────────────────

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way, or waits for a turn."""
        return self._running is not None or any(len(q) for q in self.mover._queues.values())

    def turn(self) -> None:
        """Go on with what the mover does, up to the next file operation."""
        if self._running is None:
            self._running = greenlet(self._step)
        running = self._running
        running.switch()
        if running.dead:
            self._running = None

    def _step(self) -> None:
        with suppress(ProcessDied):
            self.mover.step()

    def _pause(self, operation: str) -> None:
        machine, dice = self.machine, self.machine.world.random
        if getcurrent() is self._hub:
            return
        if machine.faults.dies and dice.random() < machine.faults.dies:
            machine.world.count("died at a file operation")
            self.die()
        elif not self.disk.tree._lock.locked() and dice.random() < machine.pauses:
            self._hub.switch()

    # ── the end ───────────────────────────────────────────────────────────────────

    def die(self) -> None:
        """The process is gone: nothing is given back, nothing written any more."""
        if self.is_dead:
            return
        self.is_dead = True
        self.files.die()
        if self.disk.tree.writers._fd >= 0:
            os.close(self.disk.tree.writers._fd)
        running, self._running = self._running, None
        if running is not None and running is not getcurrent() and not running.dead:
            with suppress(BaseException):  # whatever a dying process stumbles over
                running.throw(ProcessDied)
        self.host.close()

    # ── what must be true ─────────────────────────────────────────────────────────

    def wrong_rows(self, tier: Tier, group: int, keys: list[bytes]) -> tuple[list[str], int]:
        """What is wrong with the rows of these keys, and how many were there."""
        nbytes = tier.layout.row_bytes(group)
        rows = [np.zeros(nbytes, np.uint8) for _ in keys]
        there = tier.load(group, keys, rows)
        wrong = [
            f"{tier.name} tier: row {key.hex()[:12]} of group {group} is not what ends after "
            f"{self.machine.known[key][1]} tokens of {self.machine.known[key][0]}"
            for key, row, found in zip(keys, rows, there.tolist(), strict=True)
            if found and not self._is_true(tier, group, key, row)
        ]
        return wrong, int(there.sum())

    def _is_true(self, tier: Tier, group: int, key: bytes, row: Any) -> bool:
        request, end = self.machine.known[key]
        expected = truth(request, self.shape, group)[end - self.shape.block_tokens : end]
        return row[cells_in_row(tier.layout, group)].tobytes() == expected.tobytes()


def cells_in_row(layout: Layout, group: int) -> Ints:
    """Where the cells of a block are in its row, as a tier of this layout keeps it."""
    rows = layout.groups[group]
    key = layout.tp, rows.placements, rows.group.block_tokens
    if key not in _CELLS:
        places = places_in(layout)
        block = rows.rows_per_slab  # the first that is not in the null slab
        _CELLS[key] = places.cells[group][block] - places.rows[group][block][0]
    return _CELLS[key]


_CELLS: dict[Any, Ints] = {}
