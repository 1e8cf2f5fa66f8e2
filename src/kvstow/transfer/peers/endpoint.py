"""This process's side of every transfer: its arena, its counters, its engine.

Posts of ours are flights (`flight`): those that are under way are known here.
"""

import random
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from logging import getLogger

import numpy as np
import torch
from prometheus_client import Counter

from kvstow.errors import NotShared, TransferError
from kvstow.memory.arena import Arena
from kvstow.observe import Fact, Telemetry
from kvstow.plan.identity import HINT, Identity
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode, fingerprint
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.ways import PROBE_BYTES
from kvstow.transfer.channel.framing import DropReason
from kvstow.transfer.channel.messages import Card, RegionCard, Welcome
from kvstow.transfer.fence import ENTRY_BYTES
from kvstow.transfer.metrics import TransferMetrics
from kvstow.transfer.options import Options
from kvstow.transfer.peers.flight import Flight
from kvstow.transfer.peers.layouts import PeerLayouts
from kvstow.transfer.slots import SLOTS, Stage
from kvstow.transfer.tickets.owner import Owner
from kvstow.transfer.tickets.ticket import KEY_BYTES
from kvstow.transfer.transport.base import (
    Direction,
    Kinds,
    MemoryKind,
    Region,
    Transport,
    lost,
)
from kvstow.transfer.transport.mapped import MappedPeer, NodeMemory, ThisNode, place_generations

log = getLogger(__name__)

SLOT_BYTES, DEVICE_SLOT_BYTES = 2 << 20, 32 << 20
"""The size of a slot; the second one where the arena is on a device."""

LEAST_COUNTERS = 4096
MOST_GONE = 1024


class EngineReplaced(TransferError):
    """Our engine is being replaced: what has not begun to move goes on with the fresh one."""

    def __init__(self, agent: str) -> None:
        super().__init__(f"agent {agent!r}: its engine is being replaced", kind="peer", peer=agent)


class Endpoint:
    """What an agent owns. Registers everything that peers may touch; makes the agent's card.

    `start` names this start of the process; the engine under it may be replaced: while it
    `is_draining`, nothing shall begin to move. `moving` are pulls that have begun and not ended.
    Engines of peers are `broken` where a post to them has failed, until they are connected again,
    and `gone` where they were found to be dead, the latest last: one that is forgotten is found out
    again. Our own engine has not let go of a peer, and is to be replaced, since `faulty_since`.
    `wake` resumes the agent's routines, from any thread.
    """

    def __init__(
        self,
        name: str,
        arena: Arena,
        owner: Owner,
        *,
        transport: Transport,
        identity: Identity | None = None,
        options: Options,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
        random: random.Random,
        node: NodeMemory | None = None,
    ) -> None:
        self.name = name
        self.arena = arena
        self.owner = owner
        self.transport = transport
        self.start = transport.name
        self.options = options
        self.telemetry = telemetry
        self.metrics = TransferMetrics(telemetry.registry)
        self.clock = clock
        self.random = random
        self.identity = _known_identity(name, arena.layout, identity)
        self.layout = arena.layout.identified(self.identity)
        self.fingerprint = fingerprint(self.layout)
        self.layouts = PeerLayouts(self.layout)
        self.kind: MemoryKind = "VRAM" if arena.device.type == "cuda" else "DRAM"
        self.device = arena.device.index or 0
        self.probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=arena.device)
        on_device = self.kind == "VRAM"
        slot_bytes = options.slot_bytes or (DEVICE_SLOT_BYTES if on_device else SLOT_BYTES)
        self.stage = Stage(slot_bytes, pinned=on_device)
        self.worker = ThreadPoolExecutor(1, f"kvstow-{name}-digest", self.use_device)
        self.flights: dict[Flight, None] = {}  # in the order in which they started
        self.broken: set[str] = set()
        self.gone: dict[str, None] = {}
        self.moving: set[int] = set()
        self.faulty_since: float | None = None
        self.wake: Callable[[], None] = lambda: None
        self.is_draining = False
        self.num_engines = 1
        self._counters: list[Ints] = []
        self._spare_counters: list[Ints] = []
        self._users: dict[str, set[object]] = {}
        self._cards: dict[str, Card] = {}
        self._labelled: dict[tuple[Counter, str], Counter] = {}
        self._manifest = encode(self.layout)
        self.node = node or ThisNode()
        self.ticket_key = random.randbytes(KEY_BYTES)
        self.memory, self.unmappable = self._share()
        self._register(transport)
        self.card = self._card(transport)

    def _share(self) -> tuple[bytes, str]:
        """What peers need to map our memory, or nothing and the reason."""
        tables, self.alive = place_generations(self.node, self.owner), self.node.counters(1)
        self.alive.numbers[0] = 1
        if not self.may_map:
            return b"", "option"
        try:
            return self.node.describe(self.arena, tables, self.alive), ""
        except NotShared as error:
            log.info("agent %s: its memory cannot be mapped: %s", self.name, error)
            return b"", error.reason

    @property
    def may_map(self) -> bool:
        """Whether options let us map others' memory, and others ours."""
        return self.options.mapped and self.options.direction in (None, "mapped")

    def welcome(self) -> Welcome:
        """What a consumer is told."""
        return Welcome(self.card, self.memory, self.unmappable, self.ticket_key)

    def map(self, welcome: Welcome, layout: Layout) -> MappedPeer:
        """A peer's memory as ours. Raises NotShared."""
        if not self.may_map:
            raise NotShared("option", "mapping is switched off here")
        if not welcome.memory:
            raise NotShared(welcome.unmappable, "it cannot be mapped by others")
        memory = self.node.attach(welcome.memory, layout, self.arena.device)
        return MappedPeer(memory, layout)

    def use_device(self) -> None:
        """Make the arena's device the current one of the calling thread, with a stream of its own:
        in the default one, digests would wait for whatever the process computes."""
        if self.arena.device.type == "cuda":
            torch.cuda.set_device(self.arena.device)
            torch.cuda.synchronize(self.arena.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.arena.device))

    # ── the engine ────────────────────────────────────────────────────────────────

    def replace_engine(self) -> None:
        """Close the engine, which makes all flights quiet, and go on with a fresh one.

        Peers have to meet us again; tickets stay valid.
        """
        fresh = self.transport.fresh()
        try:
            self._register(fresh)
            card = self._card(fresh)
        except TransferError:  # the old one goes on, and this one must not stay behind
            fresh.close()
            raise
        self._close_engine()
        self._users.clear()
        self._cards.clear()
        self.broken.clear()
        self.faulty_since = None
        self.transport = fresh
        self.num_engines += 1
        self.card = card

    def _close_engine(self) -> None:
        """Nothing writes any more, and what had not arrived never will."""
        self.transport.close()
        for flight in tuple(self.flights):
            flight.give_up(lost(flight.peer, "our engine was closed"))
            flight.land()

    def _register(self, transport: Transport) -> None:
        for region in self._regions():
            transport.register(region)

    def _regions(self) -> list[Region]:
        arena = [
            Region(self.arena.address + run.offset, run.nbytes, self.kind, self.device)
            for run in self.arena.regions
        ]
        tables = [t for t in (*self.owner.generations, *self._counters) if t.nbytes]
        return [
            *arena,
            *(Region(table.ctypes.data, table.nbytes) for table in tables),
            Region(self.probe.data_ptr(), PROBE_BYTES, self.kind, self.device),
            Region(self.stage.arena.address, self.stage.arena.nbytes),
        ]

    def _card(self, transport: Transport) -> Card:
        for g, table in enumerate(self.owner.generations):
            if table.dtype != np.int64 or len(table) != self.layout.num_blocks(g):
                raise TransferError(
                    f"group {g}: {len(table)} generations of {table.dtype}, not "
                    f"{self.layout.num_blocks(g)} of int64\n\n"
                    "hint: the pool's layout is not the arena's",
                    kind="refused",
                )
        stage = self.stage
        return Card(
            agent=self.name,
            start=self.start,
            engine=transport.name,
            manifest=self._manifest,
            metadata=transport.metadata(),
            base=self.arena.address,
            kind=self.kind,
            device=self.device,
            tables=tuple(table.ctypes.data for table in self.owner.generations),
            probe=RegionCard(self.probe.data_ptr(), PROBE_BYTES, self.kind, self.device),
            stage=RegionCard(stage.arena.address, SLOTS * stage.slot_bytes, "DRAM", 0),
        )

    def attach(self, card: Card, user: object) -> None:
        """Connect the engine to an agent, as long as some user needs it. Raises TransferError."""
        if self._cards.get(card.engine, card) != card:
            raise TransferError(
                f"agent {card.agent!r} claims engine {card.engine!r}, which another one has",
                kind="refused",
                peer=card.agent,
            )
        if card.engine not in self._users:
            self.transport.connect(card.engine, card.metadata)
            self._cards[card.engine] = card
        self._users.setdefault(card.engine, set()).add(user)

    def detach(self, engine: str, user: object) -> None:
        """This user needs the agent no more: see `disconnect_idle`. Raises nothing: whoever calls
        this has more to undo."""
        self._users.get(engine, set()).discard(user)
        if engine in self.broken:
            self._disconnect(engine)

    def disconnect_idle(self) -> None:
        """Disconnect agents that nobody needs, unless a flight may still end."""
        busy = {flight.peer for flight in self.flights}
        for engine, users in tuple(self._users.items()):
            if not users and engine not in busy:
                self._disconnect(engine)

    def _disconnect(self, engine: str) -> None:
        self.broken.discard(engine)
        self._cards.pop(engine, None)
        for flight in self.flights:
            if flight.peer == engine:
                flight.give_up(lost(engine, "disconnected here"))
        if self._users.pop(engine, None) is None:
            return
        try:
            self.transport.disconnect(engine)
        except Exception as error:  # its posts were given up, and are not quiet
            log.warning("agent %s: disconnecting %s: %s", self.name, engine, error)
            self.note("turn-failed", {"error": str(error)})
            if self.faulty_since is None:
                self.faulty_since = self.clock()

    def note_gone(self, engine: str) -> None:
        """An engine was found to be dead."""
        self.gone[engine] = None
        if len(self.gone) > MOST_GONE:
            del self.gone[next(iter(self.gone))]

    def poll_flights(self) -> None:
        """Look at all flights: some were given up, and end all the same."""
        for flight in tuple(self.flights):
            with suppress(TransferError):
                flight.poll()

    def post(self, direction: Direction, peer: str, kinds: Kinds, copies: Copies) -> Flight:
        """Copies between addresses, ready to be started. Raises TransferError."""
        return Flight(self, peer, self.transport.prepare(direction, peer, kinds, copies))

    def kinds(self, card: Card) -> Kinds:
        """Kinds of memory between our arena and theirs."""
        return Kinds(self.kind, self.device, card.kind, card.device)

    def close(self) -> None:
        """Let go of the engine: all flights are quiet."""
        try:
            self.worker.shutdown()
        finally:
            self._close_engine()

    # ── counters ──────────────────────────────────────────────────────────────────

    def take_counters(self, count: int) -> Ints:
        """Registered memory for at least so many counters. Raises TransferError."""
        for i, spare in enumerate(self._spare_counters):
            if len(spare) >= count:
                return self._spare_counters.pop(i)
        fresh: Ints = np.zeros(max(LEAST_COUNTERS, 1 << (count - 1).bit_length()), np.int64)
        self.transport.register(Region(fresh.ctypes.data, len(fresh) * ENTRY_BYTES))
        self._counters.append(fresh)
        return fresh

    def give_counters(self, memory: Ints) -> None:
        """Nothing writes to it any more."""
        self._spare_counters.append(memory)

    def generations(self, blocks: Mapping[int, Blocks]) -> dict[int, Ints]:
        """The counters of these blocks, now."""
        return {g: self.owner.generations[g].take(listed.ids) for g, listed in blocks.items()}

    # ── telling ───────────────────────────────────────────────────────────────────

    def count(self, family: Counter, label: str, amount: int = 1) -> None:
        """Raise a counter; its label is looked up once."""
        key = family, label
        if key not in self._labelled:
            self._labelled[key] = family.labels(label)
        self._labelled[key].inc(amount)

    def drop(self, reason: DropReason, detail: str) -> None:
        """Count a message that is not heard."""
        self.metrics.messages.labels(reason).inc()
        self.note("message-dropped", {"reason": reason, "detail": detail})

    def note(self, what: str, facts: Mapping[str, Fact]) -> None:
        """Emit an event of this agent."""
        self.telemetry.events.emit("transfer", what, {"agent": self.name, **facts})

    @contextmanager
    def guard(self, what: str) -> Generator[None]:
        """One turn of what goes on as long as the agent: where it raises, that is logged and
        counted, and the next one comes."""
        try:
            yield
        except Exception as error:
            is_ours = isinstance(error, TransferError)
            log.warning("agent %s: %s: %s", self.name, what, error, exc_info=not is_ours)
            self.count(self.metrics.errors, what)
            self.note("turn-failed", {"error": str(error)})


def _known_identity(name: str, layout: Layout, identity: Identity | None) -> Identity:
    """The identity that was given, or else the layout's. TransferError without either."""
    maker = identity or layout.identity
    if maker is not None and not isinstance(maker, Identity):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TransferError(
            f"agent {name!r}: an identity is {type(maker).__name__}\n\n{HINT}", kind="refused"
        )
    if maker is None:
        raise TransferError(
            f"agent {name!r}: nothing says which computation makes these bytes\n\n{HINT}",
            kind="refused",
        )
    if not maker.is_verified:
        log.warning("agent %s: identity is not verified: %s", name, maker.unverified_because)
    return maker
