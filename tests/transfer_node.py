"""One agent with an arena, driven by plain calls; `transfer_process` has the same in another
process.

Contents are a function of the logical byte (see `strategies.value`), so that any layout
can be filled, and checked, without any of the library's own copying.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.ways import LONG_BYTES
from kvstow.transfer import pull, serve
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.channel.status import status_document
from kvstow.transfer.options import Options
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.base import Direction, Kinds, Post
from kvstow.transfer.transport.local import Fabric, LocalTransport
from kvstow.transfer.transport.nixl import NixlTransport
from strategies import Kind, blocks_of, first_block, group_bytes, own_bytes, value

_KV = (("k", DType.BFLOAT16, 4), ("v", DType.BFLOAT16, 4))
ALL_RETENTIONS = (
    Kind(Full(), 4, _KV),
    Kind(Full(), 4, _KV),
    Kind(Window(24), 4, _KV),
    Kind(Chunk(32), 4, _KV),
    Kind(State(), 4, (), parts=(4, 4, 8)),
)
"""A model with every kind of retention that transfers tell apart."""

CANARY = 0xA5
IDENTITY = Identity.unverified("bytes of a test")

Listed = dict[str, list[list[int]]]
"""Blocks as JSON: group → [ids, index]."""


def to_json(blocks: dict[int, Blocks]) -> Listed:
    return {str(g): [b.ids.tolist(), b.index.tolist()] for g, b in blocks.items()}


def shares_rows(one: Listed, other: Listed) -> bool:
    """Whether two lists have a block in common."""
    return any(set(ids) & set(other.get(g, [[]])[0]) for g, (ids, _) in one.items())


def from_json(listed: Listed) -> dict[int, Blocks]:
    return {
        int(g): Blocks(np.array(ids, np.int64), np.array(index, np.int64))
        for g, (ids, index) in listed.items()
    }


def attention(name: str, retention: Retention, block_tokens: int = 4) -> LayerSpec:
    head = (Extent.whole("content", 4),)
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=block_tokens,
        heads=Extent.whole("head", 2),
        fields=(Field("k", DType.BFLOAT16, head), Field("v", DType.BFLOAT16, head)),
    )


def hybrid_layout(num_slabs: int = 12) -> Layout:
    """Full, window and state groups in one arena."""
    state = LayerSpec(
        name="layers.2",
        retention=State(),
        block_tokens=16,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(Field("ssm", DType.FLOAT32, (Extent.whole("state", 24),)),),
    )
    layers = [
        attention("layers.0", Full()),
        attention("layers.1", Window(8)),
        state,
        attention("layers.3", Full()),
    ]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(model="hybrid"))


def rows_for(
    layout: Layout, num_tokens: int, seed: int, among: tuple[int, int] | None = None
) -> Listed:
    """Random rows for a request, mixed, out of the slabs `[among)` or all; groups that share
    slabs get slabs of their own."""
    random = np.random.default_rng(seed)
    found: dict[int, Blocks] = {}
    for members in layout.sharing:
        slabs = random.permutation(np.arange(*(among or (1, layout.num_slabs)))).tolist()
        for g in members:
            rows = layout.groups[g]
            count = blocks_of(rows.group, num_tokens)
            first = first_block(rows.group, num_tokens, 0)
            need = -(-(count - first) // rows.rows_per_slab)
            mine, slabs = slabs[:need], slabs[need:]
            ids = [s * rows.rows_per_slab + r for s in mine for r in range(rows.rows_per_slab)]
            ids = random.permutation(ids)[: count - first]
            found[g] = Blocks(np.array(ids, np.int64), np.arange(first, count))
    return to_json(found)


class SlowNixl(NixlTransport):
    """Every post waits a moment before it starts."""

    def prepare(self, direction: Direction, peer: str, kinds: Kinds, copies: Copies) -> Post:
        post = super().prepare(direction, peer, kinds, copies)
        start = post.start

        def later() -> None:
            time.sleep(0.0005)
            start()

        post.start = later  # type: ignore[method-assign]
        return post

    def fresh(self) -> "SlowNixl":
        return SlowNixl(listen=self._listen)


def move_slowly(piece_bytes: int) -> None:
    """Have all agents of this process, which is to be killed, move rows in such small posts."""
    for module in (pull, serve):
        module.chunk_bytes = lambda *path: piece_bytes  # type: ignore[attr-defined]


class Node:
    """An agent whose arena is full of canaries."""

    def __init__(
        self,
        manifest: bytes,
        fabric: Fabric | None = None,
        name: str = "",
        options: dict[str, Any] | None = None,
        listen: str = "tcp://127.0.0.1:*",
        keys: Keys | list[Any] | None = None,
        transport: Any = None,
        is_started: bool = True,
        piece_bytes: int = 0,
    ) -> None:
        if piece_bytes:
            move_slowly(piece_bytes)
        if isinstance(keys, list):  # from another process: public, secret, peers
            keys = Keys(public=keys[0], secret=keys[1], peers=frozenset(keys[2]))
        self.layout = decode(manifest)
        self.arena = Arena(self.layout)
        self.memory = self.arena.bytes.numpy()
        self.memory[:] = CANARY
        self.owner = Generations(self.layout)
        engine = SlowNixl if piece_bytes else NixlTransport
        made = transport or (LocalTransport(fabric) if fabric else engine(listen=listen))
        self.agent = Agent(
            self.arena,
            self.owner,
            transport=made,
            identity=self.layout.identity or IDENTITY,
            name=name,
            listen=listen,
            keys=keys,
            options=Options(**({"mapped": False} | (options or {}))),
        )
        if is_started:
            self.agent.start()
        self.transfers: dict[int, Any] = {}
        self._into: dict[int, Listed] = {}

    @property
    def address(self) -> str:
        return self.agent.address

    def fill(self, listed: Listed, salt: int = 0) -> None:
        """Give the request's bytes their contents; other salt, other contents."""
        for g, blocks in from_json(listed).items():
            held = group_bytes(self.layout, g, blocks)
            self.memory[held.address] = value(held.layer + salt, held.number)

    def wipe(self) -> None:
        self.memory[:] = CANARY

    def offer(self, listed: Listed, num_tokens: int, **how: Any) -> str:
        return str(self.agent.offer_blocks(from_json(listed), num_tokens, **how))

    def withdraw(self, ticket: str) -> None:
        self.agent.withdraw(Ticket.parse(ticket))

    def reuse(self, listed: Listed, salt: int) -> None:
        """What an owner does: raise the generations, then write something else."""
        for g, blocks in from_json(listed).items():
            self.owner.retire(g, blocks.ids)
        self.fill(listed, salt)

    def pull(self, tickets: list[str], into: Listed, wait: float = 20.0, **how: Any) -> dict:
        """Pull, wait for the end and say how it was."""
        number = self.begin_pull(tickets, into, **how)
        return self.end_pull(number, wait)

    def begin_pull(self, tickets: list[str], into: Listed, **how: Any) -> int:
        parsed = [Ticket.parse(ticket) for ticket in tickets]
        for number, earlier in self.transfers.items():  # its rows are refused until they are quiet
            if earlier.done and shares_rows(self._into[number], into):
                earlier.wait_quiet(15)
        number = len(self.transfers)
        self._into[number] = into
        self.transfers[number] = self.agent.pull(parsed, into=from_json(into), **how)
        return number

    def end_pull(self, number: int, wait: float = 20.0) -> dict:
        transfer = self.transfers[number]
        try:
            stats = transfer.wait(wait)
        except TransferError as error:
            return {
                "error": str(error),
                "kind": error.kind,
                "peer": error.peer,
                "blocks": {k: list(v) for k, v in error.blocks.items()},
                "quiet": transfer.quiet,
            }
        return {
            "bytes": stats.nbytes,
            "seconds": stats.seconds,
            "descriptors": stats.descriptors,
            "fence": stats.fence,
            "digest": stats.digest,
            "directions": list(stats.directions),
        }

    def status(self) -> dict:
        return json.loads(status_document(self.agent))

    def abort(self, number: int) -> None:
        self.transfers[number].abort()

    def wait_quiet(self, number: int, seconds: float) -> bool:
        return self.transfers[number].wait_quiet(seconds)

    def held(self) -> int:
        """Rows that the agent keeps."""
        self.agent.settle()
        return int(
            sum(
                self.owner.holds(g, np.arange(self.layout.num_blocks(g))).sum()
                for g in range(len(self.layout.groups))
            )
        )

    def check(self, into: Listed, start_token: int, num_tokens: int, salt: int = 0) -> str:
        """What is wrong with a request's bytes, or with anybody else's; empty if nothing."""
        mine = np.zeros(len(self.memory), np.bool_)
        for g, blocks in from_json(into).items():
            held = group_bytes(self.layout, g, blocks)
            mine |= own_bytes(self.layout, g, blocks)
            first, end = start_token, num_tokens
            retention = self.layout.groups[g].group.retention
            match retention:  # what the next token looks at
                case State():
                    first, end = 0, 1
                case Encoder(tokens):
                    first, end = 0, tokens
                case Window(tokens):
                    first = max(first, num_tokens - tokens + 1)
                case Chunk(tokens):
                    first = max(first, num_tokens - num_tokens % tokens)
                case Full():
                    pass
            wanted = held[(held.first_token < end) & (held.end_token > first)]
            wrong = self.memory[wanted.address] != value(wanted.layer + salt, wanted.number)
            if wrong.any():
                return (
                    f"group {g}: {wrong.sum()} of {len(wrong)} bytes wrong, first at "
                    f"{wanted.address[wrong][0]}"
                )
        touched = (self.memory != CANARY) & ~mine
        if touched.any():
            return f"{touched.sum()} bytes of others changed, first at {np.flatnonzero(touched)[0]}"
        return ""

    def path(self, address: str) -> dict:
        found = self.agent.connect(address).path
        return {
            "direction": found.way_of(LONG_BYTES),
            "read": found.read.long,
            "write": found.write.long,
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.agent.telemetry.registry.get_sample_value(name, labels) or 0.0

    def say(self, text: str) -> None:
        """Say something on stderr."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.agent.close()
