"""This process's side of every transfer: its arena, its counters, its engine."""

import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from prometheus_client import Counter

from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.observe import Fact, Telemetry, TransferMetrics
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode, fingerprint
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.messages import Card, RegionCard
from kvstow.transfer.fence import ENTRY, SLOT_ENTRIES
from kvstow.transfer.generations import Owner
from kvstow.transfer.staging import DEVICE_SLOT_BYTES, SLOTS, Stage
from kvstow.transfer.transport.base import Kinds, MemoryKind, Region, Transport

PROBE_BYTES = 4 << 20
_SLOTS = 128

WATCH_SECONDS = 2e-3
"""Posts under way are watched without pause for so long: some engines move bytes only then."""

YIELD_SECONDS = 2e-4
"""Other threads of this process wait so long at most meanwhile."""


class Home:
    """What an agent owns. Registers everything peers may touch; makes the agent's card."""

    def __init__(
        self,
        name: str,
        arena: Arena,
        owner: Owner,
        transport: Transport,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
        slot_bytes: int | None = None,
    ) -> None:
        self.name = name
        self.arena = arena
        self.owner = owner
        self.transport = transport
        self.telemetry = telemetry
        self.events = telemetry.events
        self.metrics = TransferMetrics(telemetry.registry)
        self.clock = clock
        self.layout: Layout = arena.layout
        self.fingerprint = fingerprint(arena.layout)
        self.kind: MemoryKind = "VRAM" if arena.device.type == "cuda" else "DRAM"
        self.device = arena.device.index or 0
        self.probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=arena.device)
        on_device = self.kind == "VRAM"
        wanted = DEVICE_SLOT_BYTES if slot_bytes is None and on_device else slot_bytes
        self.stage = Stage(wanted, pinned=on_device) if wanted else None
        self.slots: Ints = np.zeros((_SLOTS, SLOT_ENTRIES), np.int64)
        self._free_slots = deque(range(_SLOTS))
        self._slots_at = self.slots.ctypes.data
        self._spare_counters: list[Ints] = []
        self._attached: dict[str, int] = {}
        self._counters: dict[tuple[Counter, str], Counter] = {}
        self.has_watched = False
        self.worker = ThreadPoolExecutor(1, f"kvstow-{name}-digest", self.use_device)
        for region in self._regions():
            transport.register(region)
        self.card = self._card()

    def use_device(self) -> None:
        """Make the arena's device the current one of the calling thread."""
        if self.arena.device.type == "cuda":
            torch.cuda.set_device(self.arena.device)
            torch.cuda.synchronize(self.arena.device)

    def _regions(self) -> list[Region]:
        arena = [
            Region(self.arena.address + run.offset, run.nbytes, self.kind, self.device)
            for run in self.arena.regions
        ]
        tables = [Region(t.ctypes.data, t.nbytes) for t in self.owner.generations if t.nbytes]
        probe = Region(self.probe.data_ptr(), PROBE_BYTES, self.kind, self.device)
        stage = [Region(self.stage.arena.address, self.stage.arena.nbytes)] if self.stage else []
        slots = Region(self.slots.ctypes.data, self.slots.nbytes)
        return [*arena, *tables, probe, slots, *stage]

    def _card(self) -> Card:
        for g, table in enumerate(self.owner.generations):
            if table.dtype != np.int64 or len(table) != self.layout.num_blocks(g):
                raise TransferError(
                    f"group {g}: {len(table)} generations of {table.dtype}, not "
                    f"{self.layout.num_blocks(g)} of int64", kind="refused")  # fmt: skip
        return Card(
            agent=self.name,
            start=self.transport.name,
            engine=self.transport.name,
            manifest=encode(self.layout),
            metadata=self.transport.metadata(),
            base=self.arena.address,
            kind=self.kind,
            device=self.device,
            tables=tuple(table.ctypes.data for table in self.owner.generations),
            probe=RegionCard(self.probe.data_ptr(), PROBE_BYTES, self.kind, self.device),
            stage=RegionCard(self.stage.arena.address, SLOTS * self.stage.slot_bytes, "DRAM", 0)
            if self.stage
            else None,
        )

    # ── peers of the engine ───────────────────────────────────────────────────────

    def attach(self, card: Card) -> None:
        """Connect the engine to an agent; several attachments share one connection."""
        if card.start not in self._attached:
            self.transport.connect(card.start, card.metadata)
        self._attached[card.start] = self._attached.get(card.start, 0) + 1

    def detach(self, start: str) -> None:
        """Undo one attachment; the last one disconnects."""
        if start in self._attached:
            self._attached[start] -= 1
            if self._attached[start] == 0:
                self.sever(start)

    def sever(self, start: str) -> None:
        """Disconnect at once: after this no post of ours to that agent moves a byte."""
        if self._attached.pop(start, None) is not None:
            self.transport.disconnect(start)

    def close(self) -> None:
        """Let go of the engines; all agents must have been severed."""
        self.worker.shutdown()
        self.transport.close()

    def is_attached(self, start: str) -> bool:
        return start in self._attached

    def watch(self, poll: Callable[[], bool]) -> bool:
        """Ask without pause for a while whether a post is over, but let other threads have
        their turn."""
        self.has_watched = True
        now = self.clock()
        until, turn = now + WATCH_SECONDS, now + YIELD_SECONDS
        while not (over := poll()) and (now := self.clock()) < until:
            if now > turn:
                select.select((), (), (), 0)  # without the interpreter's lock
                turn = now + YIELD_SECONDS
        return over

    # ── counters ──────────────────────────────────────────────────────────────────

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def take_slot(self) -> int | None:
        """A slot for counters, or None while all are in use."""
        return self._free_slots.popleft() if self._free_slots else None

    def give_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def slot_address(self, slot: int) -> int:
        return self._slots_at + slot * SLOT_ENTRIES * ENTRY

    def take_counters(self, count: int) -> Ints:
        """Registered memory for at least so many counters. Raises TransferError."""
        for i, spare in enumerate(self._spare_counters):
            if len(spare) >= count:
                return self._spare_counters.pop(i)
        fresh: Ints = np.zeros(-(-count // SLOT_ENTRIES) * SLOT_ENTRIES, np.int64)
        self.transport.register(Region(fresh.ctypes.data, fresh.nbytes))
        return fresh

    def give_counters(self, memory: Ints) -> None:
        """Nothing writes to it any more."""
        self._spare_counters.append(memory)

    def generations(self, blocks: Mapping[int, Blocks]) -> dict[int, Ints]:
        """The counters of these blocks, now."""
        return {g: self.owner.generations[g].take(listed.ids) for g, listed in blocks.items()}

    def kinds(self, card: Card) -> Kinds:
        """Kinds of memory between our arena and theirs."""
        return Kinds(self.kind, self.device, card.kind, card.device)

    def checked(self, blocks: Mapping[int, Blocks]) -> None:
        """Refuse blocks that this layout does not have, or that are listed twice."""
        check_blocks(self.layout, blocks, whose=self.name)

    def count(self, family: Counter, label: str, amount: int = 1) -> None:
        """Raise a counter; its label is looked up once."""
        key = family, label
        if key not in self._counters:
            self._counters[key] = family.labels(label)
        self._counters[key].inc(amount)

    def note(self, what: str, facts: Mapping[str, Fact]) -> None:
        """Emit an event of this agent."""
        self.events.emit("transfer", what, {"agent": self.name, **facts})


def check_known(layout: Layout, blocks: Mapping[int, Blocks], *, whose: str) -> None:
    """TransferError unless every block exists in the layout."""
    for g, listed in blocks.items():
        if not 0 <= g < len(layout.groups):
            raise TransferError(f"{whose}: group {g} is not one of {len(layout.groups)}",
                                kind="ticket")  # fmt: skip
        least, count, ids = layout.groups[g].rows_per_slab, layout.num_blocks(g), listed.ids
        if len(ids) and not least <= np.minimum.reduce(ids) <= np.maximum.reduce(ids) < count:
            name = layout.groups[g].group.name
            wrong = ids[(ids < least) | (ids >= count)]
            raise TransferError(f"{whose}: group {name!r}: blocks {wrong[:8].tolist()} are not in "
                                f"[{least}, {count})", kind="ticket",
                                blocks={name: tuple(wrong.tolist())})  # fmt: skip


def check_blocks(layout: Layout, blocks: Mapping[int, Blocks], *, whose: str) -> None:
    """TransferError unless every block exists in the layout and is listed once."""
    check_known(layout, blocks, whose=whose)
    for g, listed in blocks.items():
        ordered = listed.ids.copy()
        ordered.sort()
        if np.logical_or.reduce(ordered[1:] == ordered[:-1]):
            name = layout.groups[g].group.name
            raise TransferError(f"{whose}: group {name!r}: some block is listed twice",
                                kind="ticket")  # fmt: skip


def named(layout: Layout, ids: Mapping[int, Sequence[int] | Ints]) -> dict[str, tuple[int, ...]]:
    """Ids by group name, for errors."""
    return {layout.groups[g].group.name: tuple(int(i) for i in each) for g, each in ids.items()}
