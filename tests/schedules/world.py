"""The world outside the protocol, in one thread: engines, processes, their memory and disks.

Nothing here moves by itself. A schedule (see `schedule`) decides what happens next: which packet
arrives or is lost, which agent gets a turn, when time passes, when an agent is
stopped, killed or started again, when bytes of a copy land.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvstow.blocks.table import RowCopy
from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.offload.remote.directory import WriterLayout
from kvstow.plan.layout import Layout
from kvstow.transfer.agent import Agent
from kvstow.transfer.options import Options
from kvstow.transfer.transport.base import Region
from kvstow.transfer.transport.local import Fabric, LocalTransport
from schedules.disks import Machine, Storage, cells_in_row
from schedules.library import TELEMETRY, Worker
from schedules.network import Clock, Network, SimChannel
from schedules.rows import Claim, EngineRows, LedgerRows
from schedules.shared import SimMemory, SimNode
from schedules.truth import Bytes, Ints, Places, Request, Shape, layout_of, places_of, truth


@dataclass(eq=False)
class Pull:
    """A transfer that was begun, and what it is to bring."""

    transfer: Any
    claim: Claim
    source: Request
    until: float
    must_fail: str = ""
    """Why it may not be accepted, where it may not."""
    twins: list[Claim] = field(default_factory=list)
    """Requests that were forked from it, whose rows were copied before they were filled."""
    is_judged: bool = False
    is_quiet: bool = False


@dataclass(eq=False)
class Held:
    """Rows that their holder has filled, or accepted, and will look at again.

    `first` is the first token that their rows have in each group.
    """

    claim: Claim
    request: Request
    first: dict[int, int]


@dataclass(eq=False)
class Node:
    """A process: one agent, its arena, and what its owner knows about every row.

    `shadow` is what each byte must be; rows of `open_rows` may change any time.
    """

    name: str
    model: str
    shape: Shape
    agent: Agent
    arena: Arena
    rows: LedgerRows | EngineRows
    channel: SimChannel
    transport: LocalTransport
    worker: Worker
    memory: Bytes
    shadow: Bytes
    places: Places
    storage: Storage | None = None
    pulls: list[Pull] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    stopped: bool = False

    @property
    def engine(self) -> str:
        return self.agent.endpoint.transport.name

    def has_work(self, now: float) -> bool:
        """Whether a turn would do something."""
        if self.channel.inbox or self.worker.waiting or self.agent.loop._commands:
            return True
        return any(task.due <= now for task in self.agent.loop.tasks)

    # ── memory ────────────────────────────────────────────────────────────────────

    def copy(self, copies: Iterable[RowCopy]) -> None:
        """What a ledger wants to be copied from row to row."""
        for each in copies:
            rows = self.places.rows[each.group]
            self.memory[rows[each.destination]] = self.memory[rows[each.source]]
            self.shadow[rows[each.destination]] = self.memory[rows[each.source]]

    def write(
        self, group: int, ids: Ints, index: Ints, request: Request, first: int, end: int
    ) -> None:
        """Compute tokens `[first, end)` of a request, as far as they lie in these blocks."""
        cells, values = self._known(group, ids, index, request, first, end)
        self.memory[cells] = self.shadow[cells] = values

    def packed_row(self, group: int, block: int) -> Bytes:
        """A row as a tier keeps it."""
        layout = self.tier_layout
        row = np.zeros(layout.row_bytes(group), np.uint8)
        row[cells_in_row(layout, group)] = self.memory[self.places.cells[group][block]]
        return row

    def cells_in_row(self, group: int) -> Ints:
        """Where the cells of each token are in a row that a tier keeps."""
        return cells_in_row(self.tier_layout, group)

    @property
    def tier_layout(self) -> Layout:
        return WriterLayout.of(layout_of(self.model, self.shape)).layout

    def differs(
        self, group: int, ids: Ints, index: Ints, request: Request, first: int, end: int
    ) -> list[int]:
        """The tokens in `[first, end)` whose bytes in these blocks are not the request's."""
        cells, values = self._known(group, ids, index, request, first, end)
        if self.memory[cells].tobytes() == values.tobytes():
            return []
        return np.flatnonzero((self.memory[cells] != values).any(axis=1)).tolist()

    def _known(
        self, group: int, ids: Ints, index: Ints, request: Request, first: int, end: int
    ) -> tuple[Ints, Bytes]:
        """The places of tokens in blocks, and what must lie there; of a recurrent group, the state
        after the last of them."""
        if self.shape.is_state(group):
            values = truth(request, self.shape, group)[end - 1 : end]
            return self.places.cells[group][ids].reshape(len(ids), -1), values
        step = self.shape.block_tokens
        tokens = (index[:, None] * step + np.arange(step)).ravel()
        cells = self.places.cells[group][ids].reshape(len(tokens), -1)
        values = truth(request, self.shape, group)
        if len(tokens) and tokens[0] >= first and tokens[-1] < end:
            return cells, values[tokens]
        known = (tokens >= first) & (tokens < end)
        return cells[known], values[tokens[known]]

    def changed(self) -> Ints:
        """Bytes that are not what they were, as far as nobody may write to them."""
        if self.memory.tobytes() == self.shadow.tobytes():
            return np.empty(0, np.int64)
        other = self.memory != self.shadow
        for g, ids in self.open_rows():
            other[self.places.rows[g][ids]] = False
        self.shadow[:] = self.memory
        return np.flatnonzero(other)

    def open_rows(self) -> list[tuple[int, Ints]]:
        """Rows that a transfer or a load may still write to."""
        claims = [pull.claim for pull in self.pulls if not pull.is_quiet]
        if self.storage is not None:
            claims += [load.claim for load in self.storage.loads]
        return [(g, blocks.ids) for claim in claims for g, blocks in claim.new.items()]


class World:
    """Clock, network, fabric, disks and the nodes; everything is drawn from one seed."""

    def __init__(self, seed: int, folder: str) -> None:
        self.random = Random(seed)
        self.clock = Clock()
        self.network = Network()
        self.fabric = SimFabric(self, f"{seed}")
        self.machine = Machine(self, folder)
        self.nodes: dict[str, Node] = {}
        self.shared: list[tuple[str, Arena, Ints, Ints]] = []
        self.mapped: set[SimMemory] = set()
        self.engines: set[str] = set()
        """Starts of processes that live."""
        self.broken = ""
        """What has gone wrong where nobody could be told."""
        self.shares = False
        """Whether processes map each other's memory."""
        self.graveyard: list[Node] = []
        self.injected: Counter[str] = Counter()
        self.cut: set[frozenset[str]] = set()
        self.late_share = 0.0
        self.copy_faults = 0.0
        self.slowness = 0.0
        self.flips = 0.0
        self.full = 0.0

    def count(self, what: str) -> None:
        self.injected[what] += 1

    # ── processes ─────────────────────────────────────────────────────────────────

    def started(
        self, name: str, model: str, shape: Shape, options: Options, *, engine_ids: bool
    ) -> Node:
        """A new process under this name, at the same address as any before it."""
        layout = layout_of(model, shape)
        arena = ARENAS.taken(model, shape)
        rows = EngineRows(layout) if engine_ids else LedgerRows(layout)
        channel = SimChannel(self.network, f"sim://{name}")
        transport = SimTransport(
            self,
            step_bytes=self.random.choice((1, 1, 48, 1 << 20)),
            piece_bytes=self.random.choice((0, 8, 24)),
        )
        full, self.full = self.full, 0.0  # a process that cannot start is none
        self.engines.add(transport.name)
        agent = Agent(
            arena,
            rows.owner,
            node=SimNode(self, transport.name, shares=self.shares and self.random.random() < 0.9),
            transport=transport,
            name=name,
            options=options,
            channel=channel,
            clock=self.clock,
            random=self.random,
            telemetry=TELEMETRY,
        )
        self.full = full
        worker = agent.endpoint.worker
        assert isinstance(worker, Worker), "the library is not prepared"
        memory = arena.bytes.numpy()
        made = Node(
            name,
            model,
            shape,
            agent,
            arena,
            rows,
            channel,
            transport,
            worker,
            memory,
            memory.copy(),
            places_of(shape),
        )
        if isinstance(rows, LedgerRows):
            rows.copy = made.copy
        self.nodes[name] = made
        return made

    def kill(self, name: str) -> Node:
        """The process is gone, with all it had under way; its memory is nobody's."""
        node = self.nodes.pop(name)
        self.engines.discard(node.agent.endpoint.start)
        if node.storage is not None:
            node.storage.die()
        self.fabric.kill(node.engine)
        node.channel.close()
        node.agent.loop.close()
        self.mapped = {each for each in self.mapped if each.holder != node.agent.endpoint.start}
        self.graveyard.append(node)
        return node

    def close(self) -> None:
        """Give memory and files back."""
        for node in (*self.nodes.values(), *self.graveyard):
            node.agent.loop.close()
            if node.storage is not None:
                node.storage.die()
            ARENAS.give(node.model, node.shape, node.arena)
        self.machine.close()

    # ── engines ───────────────────────────────────────────────────────────────────

    def lands(self) -> bool:
        """Whether bytes of a copy that was given up land now."""
        late = self.random.random() < self.late_share
        if late:
            self.count("late bytes")
        return late

    def before_copy(self, index: int) -> None:
        if self.copy_faults and self.random.random() < self.copy_faults:
            self.count("failed copies")
            raise TransferError("a copy failed", kind="transport")

    def after_copy(self, address: int, nbytes: int) -> None:
        """A bit of a row is turned over on the way; counters lie elsewhere."""
        if not self.flips or self.random.random() >= self.flips:
            return
        if any(_holds(node.arena, address) for node in self.nodes.values()):
            at = address + self.random.randrange(nbytes)
            ctypes.c_uint8.from_address(at).value ^= 1 << self.random.randrange(8)
            self.count("flipped bits")

    def are_apart(self, one: str, other: str) -> bool:
        """Whether nothing moves between two engines now: a process is stopped, or a cable cut."""
        found = [node for node in self.nodes.values() if node.engine in (one, other)]
        if any(node.stopped for node in found):
            return True
        if self.slowness and self.random.random() < self.slowness:
            return True
        return frozenset(node.name for node in found) in self.cut


def _holds(arena: Arena, address: int) -> bool:
    return arena.address <= address < arena.address + arena.nbytes


class SimFabric(Fabric):
    """A fabric whose cables and late bytes are the world's."""

    def __init__(self, world: World, token: str) -> None:
        super().__init__(token=token, lands=world.lands)
        self._world = world
        self._lies_until: dict[Any, float] = {}

    def kill(self, name: str) -> None:
        """What the process was writing lies in sockets for a while."""
        super().kill(name)
        world = self._world
        for post in self.in_transit:
            if post not in self._lies_until:
                seconds = world.random.choice((0.0, 0.3, 0.6, 1.5))
                self._lies_until[post] = world.clock.now + seconds
                world.count("writes of killed processes")

    def arrives(self, post: Any) -> bool:
        return self._world.clock.now >= self._lies_until[post] and self.lands()

    def is_cut(self, one: str, other: str) -> bool:
        return self._world.are_apart(one, other)


class SimTransport(LocalTransport):
    """An engine whose copies fail, and which has no memory for registrations at times."""

    def __init__(self, world: World, *, step_bytes: int, piece_bytes: int) -> None:
        super().__init__(
            world.fabric,
            step_bytes=step_bytes,
            piece_bytes=piece_bytes,
            before_copy=world.before_copy,
            after_copy=world.after_copy,
        )
        self._world = world

    def fresh(self) -> "SimTransport":
        return SimTransport(self._world, step_bytes=self.step_bytes, piece_bytes=self.piece_bytes)

    def progress(self) -> None:
        """Bytes of a copy that was given up land before others, or after them."""
        if any(post.was_given_up for post in self._posts):
            self._world.random.shuffle(self._posts)
        super().progress()

    def register(self, region: Region) -> None:
        world = self._world
        if world.full and self._regions and world.random.random() < world.full:
            world.count("failed registrations")
            raise TransferError("no memory to register", kind="transport")
        super().register(region)


class Arenas:
    """Arenas that one schedule after the other uses: to map memory takes longer than a turn."""

    def __init__(self) -> None:
        self._spare: dict[tuple[str, Shape], list[Arena]] = {}

    def taken(self, model: str, shape: Shape) -> Arena:
        spare = self._spare.get((model, shape))
        if not spare:
            return Arena(layout_of(model, shape))
        arena = spare.pop()
        arena.bytes.zero_()
        return arena

    def give(self, model: str, shape: Shape, arena: Arena) -> None:
        self._spare.setdefault((model, shape), []).append(arena)


ARENAS = Arenas()
