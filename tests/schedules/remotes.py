"""A store on the network that all nodes share, and each node's tier on it, without threads.

Calls are made where they are asked for; rows on their way out go when the schedule gives the tier a
turn. The store is unreachable at times, refuses, loses and spoils objects: what it gives is what
was computed, or nothing.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstow.offload.remote import tier as remote_tier
from kvstow.offload.remote import writes
from kvstow.offload.remote.calls import Calls
from kvstow.offload.remote.client import (
    BUSY,
    NO_ROOM,
    THERE,
    Answer,
    Blob,
    Range,
    Refused,
    StoreUnreachable,
)
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.remote.writes import WriteQueue
from schedules.truth import WINDOW, Request, layout_of, truth

if TYPE_CHECKING:
    from schedules.schedule import Schedule
    from schedules.world import Node, World


class SimStore:
    """Objects by name, for all processes; `trouble` is how often something goes wrong."""

    where = "sim://store"
    puts_at_once = 1

    def __init__(self, world: "World") -> None:
        self.trouble = 0.0
        self._world = world
        self._objects: dict[str, bytes] = {}

    def _fails(self, what: str, times: float = 1.0) -> bool:
        fails = self.trouble > 0 and self._world.random.random() < times * self.trouble
        if fails:
            self._world.count(f"remote: {what}")
        return fails

    def _reach(self) -> None:
        if self._fails("unreachable"):
            raise StoreUnreachable("no answer")

    def put(self, blobs: Sequence[Blob]) -> Refused:
        self._reach()
        refused: Refused = {}
        for blob in blobs:
            if blob.name in self._objects:
                refused[blob.name] = THERE
            elif self._fails("refused"):
                refused[blob.name] = self._world.random.choice((NO_ROOM, BUSY))
            else:
                self._objects[blob.name] = self._kept(blob.data.tobytes())
        return refused

    def _kept(self, data: bytes) -> bytes:
        """What a store makes of bytes."""
        dice = self._world.random
        if self._fails("cut short"):
            return data[: dice.randrange(len(data))]
        if self._fails("spoilt", 4.0):
            at = dice.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
        return data

    def get(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        self._reach()
        return [self._parts(name, ranges) for name, ranges in objects]

    def _parts(self, name: str, ranges: Sequence[Range]) -> Answer:
        if self._fails("lost"):
            self._objects.pop(name, None)
        data = self._objects.get(name)
        if data is None:
            return None
        return [np.frombuffer(data[lo:hi], np.uint8) for lo, hi in ranges]

    def exists(self, names: Sequence[str]) -> Any:
        self._reach()
        return np.array([name in self._objects for name in names], bool)

    def delete(self, names: Sequence[str]) -> Refused:
        self._reach()
        for name in names:
            self._objects.pop(name, None)
        return {}

    def close(self) -> None:
        """Nothing to let go of."""


class Remotes:
    """What nodes keep on the store, and what must be true of it."""

    def __init__(self, schedule: "Schedule") -> None:
        self.schedule = schedule
        self.store = SimStore(schedule.world)
        self._tiers: dict[str, RemoteTier] = {}
        self._known: dict[str, list[Request]] = {}

    def _tier(self, node: "Node") -> RemoteTier:
        """The tier of a process, opened when it is first needed."""
        start = node.agent.endpoint.start
        if start not in self._tiers:
            self._tiers[start] = RemoteTier(self.store, layout_of(node.model, node.shape))  # type: ignore[arg-type]
        return self._tiers[start]

    def save(self) -> None:
        """A node keeps the whole blocks of a request that it holds."""
        schedule, node = self.schedule, self.schedule.any_node()
        if node is None or not node.held or node.shape.second == "state":
            return
        held, tier = schedule.random.choice(node.held), self._tier(node)
        keys = held.request.keys(node.shape.block_tokens)
        for g, blocks in node.rows.blocks(held.claim).items():
            listed = blocks.whole
            whole = listed.index < len(keys)
            whole &= listed.index * node.shape.block_tokens >= held.first[g]
            rows = [node.packed_row(g, int(i)) for i in listed.ids[whole]]
            tier.store(g, [keys[i] for i in listed.index[whole].tolist()], rows)
        self._known.setdefault(node.model, []).append(held.request)
        schedule.count("saved remotely")

    def load(self) -> None:
        """A node asks for a prompt that somebody has kept; what it gets must be true."""
        schedule, node = self.schedule, self.schedule.any_node()
        known = self._known.get(node.model, []) if node is not None else []
        if node is None or not known or node.shape.second == "state":
            return
        request, tier = schedule.random.choice(known[-8:]), self._tier(node)
        step = node.shape.block_tokens
        keys = request.keys(step)
        tier.expect(request.identity, request.prompt)
        for g in range(len(tier.layout.groups)):
            rows = [np.zeros(tier.layout.row_bytes(g), np.uint8) for _ in keys]
            there = tier.load(g, keys, rows)
            for block in np.flatnonzero(there).tolist():
                end = (block + 1) * step
                seen = max(0, end - WINDOW + 1) if node.shape.second == "window" and g else 0
                first = max(seen, block * step)
                cells = node.cells_in_row(g)[first - block * step :]
                expected = truth(request, node.shape, g)[first:end]
                if rows[block][cells].tobytes() != expected.tobytes():
                    schedule.broken(
                        f"{node.name}: remote tier: block {block} of group {g} is not that of "
                        f"{request}"
                    )
            schedule.report.outcomes["rows checked in remote tiers"] += int(there.sum())

    def turn(self) -> None:
        """Rows go out; a store that has failed is asked whether it answers again."""
        for tier in self._tiers.values():
            tier.writes._work()
            if tier.breaker.in_doubt.is_set() and self.store.trouble == 0:
                tier.breaker.close()
            tier.refresh()


# ── a tier without threads ────────────────────────────────────────────────────────────


class CallsHere(Calls):
    """Calls that are made at once, by whoever starts them."""

    def __init__(self, breaker: Any, num_threads: int) -> None:
        super().__init__(breaker, 0)

    def start(self, function: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future


class NoThread:
    """A thread that never runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is started."""

    def start(self) -> None:
        """Turns come from the schedule."""

    def join(self, timeout: float | None = None) -> None:
        """It has ended."""


@contextmanager
def threadless() -> Generator[None]:
    """A library whose remote tiers have no threads."""
    next_batch = WriteQueue._next_batch

    def waiting(self: WriteQueue) -> list[Blob]:
        return next_batch(self) if self._waiting else []

    changes: list[tuple[Any, str, Any]] = [
        (remote_tier, "Calls", CallsHere),
        (remote_tier, "guarded_thread", NoThread),
        (writes, "guarded_thread", NoThread),
        (WriteQueue, "_next_batch", waiting),
    ]
    with ExitStack() as stack:
        for where, name, value in changes:
            stack.callback(setattr, where, name, vars(where)[name])
            setattr(where, name, value)
        yield
