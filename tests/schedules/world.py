"""The world outside the protocol, in one thread: a clock, a network, engines, agents' memory.

Nothing here moves by itself. A schedule (see `schedule`) decides what happens next: which
packet arrives, is lost, doubled or spoilt, which agent gets a turn, when time passes, when an
agent is stopped, killed or started again, when bytes of a copy land.
"""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvstow.blocks.pool import Pool
from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.framing import Clients, Session, answered
from kvstow.transfer.channel.messages import AnyMessage
from kvstow.transfer.options import Options
from kvstow.transfer.peers import endpoint, probe
from kvstow.transfer.transport.local import Fabric, LocalTransport

for module in (endpoint, probe):
    module.PROBE_BYTES = 8  # paths are measured here too, but not for their rates

BLOCK_TOKENS = 2
NUM_SLABS = 12
Bytes = np.ndarray


class Clock:
    """Time, which passes when the schedule says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ── the network ───────────────────────────────────────────────────────────────────────


class Packet(NamedTuple):
    """Bytes on their way: to the agent at `address`, or back to one that has dialled."""

    address: str
    client: bytes
    data: bytes


class Network:
    """Packets under way, and the channels that they go to."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.channels: dict[str, SimChannel] = {}
        self.dialled: dict[bytes, tuple[SimChannel, Session]] = {}
        self.deaf: set[str] = set()
        self._made = 0

    def is_deaf(self, packet: Packet) -> bool:
        """Whether it goes to somebody to whom everything is late."""
        if packet.address:
            return packet.address in self.deaf
        dialled = self.dialled.get(packet.client)
        return dialled is not None and dialled[0].address in self.deaf

    def client(self) -> bytes:
        """A name for a new line, as a ROUTER would draw it."""
        self._made += 1
        return self._made.to_bytes(4, "big")

    def deliver(self, packet: Packet) -> None:
        """Let a packet arrive, if anybody is there."""
        if packet.address:
            channel = self.channels.get(packet.address)
            if channel is not None:
                channel.inbox.append(packet)
        elif packet.client in self.dialled:
            self.dialled[packet.client][0].inbox.append(packet)


class SimChannel:
    """One agent's side channel over the network."""

    def __init__(self, network: Network, address: str, random: Random) -> None:
        self.address = address
        self.inbox: list[Packet] = []
        self.drops: list[str] = []
        self._network = network
        self._clients = Clients(self._reply, self._on_drop, random=random)
        self._client_of: dict[Session, bytes] = {}
        network.channels[address] = self

    def _on_drop(self, reason: str, detail: str) -> None:
        self.drops.append(reason)

    def _reply(self, client: bytes, data: bytes) -> bool:
        self._network.packets.append(Packet("", client, data))
        return True

    def dial(self, address: str, key: str) -> Session:
        line, client = Session(0), self._network.client()
        self._client_of[line] = client
        self._network.dialled[client] = self, line
        line.address = address  # type: ignore[attr-defined]
        return line

    def hang_up(self, line: Any) -> None:
        client = self._client_of.pop(line, None)
        if client is None:
            self._clients.forget(line)
        else:
            self._network.dialled.pop(client, None)

    def send(self, line: Any, message: AnyMessage) -> bool:
        data = line.framed(message)
        if line.client is not None:
            return self._reply(line.client, data)
        if line in self._client_of:
            packet = Packet(line.address, self._client_of[line], data)
            self._network.packets.append(packet)
        return line in self._client_of

    def watch(self, fd: int) -> None:
        """Turns come from the schedule."""

    def heard(self, timeout_ms: int) -> Iterator[tuple[Session, AnyMessage]]:
        arrived, self.inbox = self.inbox, []
        for packet in arrived:
            if packet.address:
                said = self._clients.said(packet.client, packet.data)
                if said is not None:
                    yield said
            elif packet.client in self._network.dialled:
                line = self._network.dialled[packet.client][1]
                message = answered(line, packet.data, self._on_drop)
                if message is not None:
                    yield line, message

    def close(self) -> None:
        """Nobody is at this address any more, and nothing comes back."""
        if self._network.channels.get(self.address) is self:
            del self._network.channels[self.address]
        for client in self._client_of.values():
            self._network.dialled.pop(client, None)
        self._client_of.clear()


# ── what is computed ──────────────────────────────────────────────────────────────────


@lru_cache(maxsize=8)
def layout_of(model: str) -> Layout:
    """Two layers of one group; small rows."""
    content = (Extent.whole("content", 4),)
    layers = [
        LayerSpec(
            name=f"layers.{i}",
            retention=Full(),
            block_tokens=BLOCK_TOKENS,
            states=BLOCK_TOKENS,
            heads=Extent.whole("head", 1),
            fields=(Field("k", DType.BFLOAT16, content),),
        )
        for i in range(2)
    ]
    layout = packed(grouped(layers), num_slabs=NUM_SLABS)
    return layout.identified(Identity(model=model, weights=f"weights of {model}"))


@lru_cache(maxsize=1 << 14)
def truth(model: str, request: int, block: int, nbytes: int) -> bytes:
    """What the rows of a block hold: a number for every byte, of model, request and token."""
    seed = (hash_of(model) * 1_000_003 + request * 7919 + block * 104_729 + 1) & (2**63 - 1)
    words = (np.arange(-(-nbytes // 8), dtype=np.uint64) + np.uint64(1)) * np.uint64(seed | 1)
    words ^= words >> np.uint64(29)
    return (words * np.uint64(0x9E3779B97F4A7C15)).tobytes()[:nbytes]


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode().ljust(7, b"\0")[:7], "big")


class Worker:
    """Counts digests when the schedule gives it a turn, instead of in another thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: call(*args)))
        return future

    def turn(self) -> None:
        """Do what was submitted."""
        waiting, self._waiting = self._waiting, []
        for future, call in waiting:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.turn()


# ── agents ────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Pull:
    """A transfer that was begun, and what it is to bring."""

    transfer: Any
    ids: Any
    request: int
    model: str
    until: float
    is_judged: bool = False
    is_quiet: bool = False


@dataclass(eq=False)
class Held:
    """Rows that their holder has filled, or accepted, and will look at again."""

    ids: Any
    model: str
    request: int


@dataclass(eq=False)
class Node:
    """A process: one agent, its arena, and what its owner knows about every row.

    `shadow` is what each row must hold; rows of `open_rows` may change any time.
    """

    name: str
    model: str
    agent: Agent
    arena: Arena
    pool: Pool
    channel: SimChannel
    transport: LocalTransport
    worker: Worker
    memory: Bytes
    shadow: Bytes
    pulls: list[Pull] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    stopped: bool = False

    @property
    def engine(self) -> str:
        return self.agent.endpoint.transport.name

    @property
    def open_rows(self) -> set[int]:
        return {int(i) for pull in self.pulls if not pull.is_quiet for i in pull.ids}


class World:
    """Clock, network, fabric and the nodes; everything is drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock = Clock()
        self.network = Network()
        self.fabric = SimFabric(self, f"{seed}")
        self.late_share = 0.0
        self.cut: set[frozenset[str]] = set()
        self.nodes: dict[str, Node] = {}
        self.graveyard: list[Node] = []
        self.copy_faults = 0.0
        self.slowness = 0.0
        self.flips = 0.0
        self.spoils = 0.0
        self.injected: dict[str, int] = {}

    def lands(self) -> bool:
        """Whether bytes of a copy that was given up land now."""
        late = self.random.random() < self.late_share
        if late:
            self.count("late bytes")
        return late

    def count(self, what: str) -> None:
        self.injected[what] = self.injected.get(what, 0) + 1

    def started(self, name: str, model: str, options: Options) -> Node:
        """A new process under this name, at the same address as any before it."""
        layout = layout_of(model)
        arena, pool = Arena(layout), Pool(layout)
        channel = SimChannel(self.network, f"sim://{name}", self.random)
        transport = LocalTransport(
            self.fabric,
            step_bytes=self.random.choice((1, 1, 48, 1 << 20)),
            piece_bytes=self.random.choice((0, 8, 24)),
            before_copy=self._before_copy,
            after_copy=self._after_copy,
        )
        agent = Agent(
            arena, pool, transport=transport, name=name, options=options, channel=channel,
            clock=self.clock, random=self.random,
        )  # fmt: skip
        worker = Worker()
        agent.endpoint.worker = worker  # type: ignore[assignment]
        strip = layout.footprints[0].strips[0]
        memory = arena.bytes.numpy()[strip.offset :]
        memory = memory[: layout.num_blocks(0) * strip.stride].reshape(-1, strip.stride)
        memory = memory[:, : strip.nbytes]
        made = Node(
            name, model, agent, arena, pool, channel, transport, worker, memory, memory.copy()
        )
        self.nodes[name] = made
        return made

    def _before_copy(self, index: int) -> None:
        if self.copy_faults and self.random.random() < self.copy_faults:
            self.count("failed copies")
            raise TransferError("a copy failed", kind="transport")

    def _after_copy(self, address: int, nbytes: int) -> None:
        """A bit of a row is turned over on the way; counters lie elsewhere."""
        if not self.flips or self.random.random() >= self.flips:
            return
        if any(self._is_row(node, address) for node in self.nodes.values()):
            at = address + self.random.randrange(nbytes)
            ctypes.c_uint8.from_address(at).value ^= 1 << self.random.randrange(8)
            self.count("flipped bits")

    def _is_row(self, node: Node, address: int) -> bool:
        start = node.arena.address
        return start <= address < start + node.arena.nbytes

    def kill(self, name: str) -> None:
        """The process is gone, with all it had under way; its memory is nobody's."""
        node = self.nodes.pop(name)
        self.fabric.kill(node.engine)
        node.channel.close()
        node.agent.loop.close()
        self.graveyard.append(node)

    def are_apart(self, one: str, other: str) -> bool:
        """Whether nothing moves between two engines now: a process is stopped, or a cable cut."""
        found = [node for node in self.nodes.values() if node.engine in (one, other)]
        if any(node.stopped for node in found) or self.random.random() < self.slowness:
            return True
        return frozenset(node.name for node in found) in self.cut


class SimFabric(Fabric):
    """A fabric whose cables and late bytes are the world's."""

    def __init__(self, world: World, token: str) -> None:
        super().__init__(token=token, lands=world.lands)
        self._world = world

    def is_cut(self, one: str, other: str) -> bool:
        return self._world.are_apart(one, other)
