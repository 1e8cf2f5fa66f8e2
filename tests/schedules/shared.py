"""Memory that nodes of one machine share, without files: a description is a number."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstow.errors import NotShared
from kvstow.memory.arena import Arena
from schedules.truth import Ints

if TYPE_CHECKING:
    from schedules.world import World


@dataclass(eq=False)
class SimCounters:
    numbers: Ints


@dataclass(eq=False)
class SimMemory:
    """One process's memory, as the process `holder` maps it; it stays as it was when the process is
    killed."""

    world: "World"
    holder: str
    engine: str
    arena: Arena
    tables: Ints
    alive: Ints
    is_closed: bool = False

    @property
    def is_gone(self) -> bool:
        return self.engine not in self.world.engines

    def close(self) -> None:
        readers = (
            source
            for node in self.world.nodes.values()
            for peer in node.agent.peers.all.values()
            for source in peer.readers.values()
        )
        if self.is_closed or any(s.mapped and s.mapped._memory is self for s in readers):
            self.world.broken = f"memory of {self.engine} is unmapped while it is read"
        self.is_closed = True
        self.world.mapped.discard(self)


@dataclass(eq=False)
class SimNode:
    """The node as one process sees it. Some processes share no memory."""

    world: "World"
    engine: str
    shares: bool

    def counters(self, count: int) -> SimCounters:
        return SimCounters(np.zeros(count, np.int64))

    def describe(self, arena: Arena, tables: Any, alive: Any) -> bytes:
        if not self.shares:
            raise NotShared("memory", "this process shares none")
        self.world.shared.append((self.engine, arena, tables.numbers, alive.numbers))
        return len(self.world.shared).to_bytes(8)

    def attach(self, description: bytes, layout: Any, device: Any) -> SimMemory:
        engine, arena, tables, alive = self.world.shared[int.from_bytes(description) - 1]
        if engine not in self.world.engines:
            raise NotShared("process", "it has ended")
        mapped = Arena.over(layout, arena.bytes)
        memory = SimMemory(self.world, self.engine, engine, mapped, tables, alive)
        self.world.mapped.add(memory)
        return memory
