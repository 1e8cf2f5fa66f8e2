"""The two sides of `kvstow bench transfer`: agents that know their own processor time.

Setting      what is moved: rows of so many layers, K and V of so many bytes each
TimedNixl    NIXL that adds up how long it was busy itself
TimedAgent   an agent without a thread: whoever has it turns it, and every turn is timed
Producer     the other process, which only serves
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from kvstow.child import Child, Say
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.spec import LayerSpec
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.framing import Session
from kvstow.transfer.channel.messages import AnyMessage
from kvstow.transfer.options import Options, Way
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.nixl import NixlTransport

BLOCK_TOKENS = 16
HEADS = 4
SPARE = 32
IDENTITY = Identity.unverified("bytes of a measurement")

ENGINE = ("transfer", "check_xfer_state", "get_new_notifs", "add_remote_agent")
"""Calls in which NIXL moves bytes, makes progress or connects. Lists of descriptors and handles
are made for one pull, and count as our own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is moved: `rows` rows of `layers` layers, K and V of `piece` bytes each."""

    rows: int = 512
    layers: int = 46
    piece: int = 16 << 10
    repeats: int = 5
    device: str = "cpu"

    @property
    def row_bytes(self) -> int:
        return 2 * self.layers * self.piece

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def layout(self) -> Layout:
        """Packed rows: K and V of all layers side by side."""
        layers = [
            LayerSpec.attention(
                f"layers.{i}",
                heads=HEADS,
                head_dim=self.piece // BLOCK_TOKENS // HEADS // 2,
                dtype="bfloat16",
                block_tokens=BLOCK_TOKENS,
            )
            for i in range(self.layers)
        ]
        return packed(grouped(layers), num_slabs=self.rows + SPARE)

    def scattered(self, seed: int) -> Blocks:
        """Rows in random order."""
        ids = np.random.default_rng(seed).permutation(np.arange(1, self.rows + SPARE))
        return Blocks.first(ids[: self.rows])

    def in_order(self) -> Blocks:
        return Blocks.first(np.arange(1, self.rows + 1))


class TimedNixl(NixlTransport):
    """`seconds` is the processor time inside the engine, `starts` how many transfers it began."""

    def __init__(self, *, num_threads: int = 0) -> None:
        super().__init__(num_threads=num_threads)
        self.seconds = 0.0
        self.starts = 0
        for name in ENGINE:
            setattr(self.engine, name, self._timed(getattr(self.engine, name)))

    def fresh(self) -> "TimedNixl":
        return TimedNixl()

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        is_start = call.__name__ == "transfer"

        @wraps(call)
        def timed(*args: Any) -> Any:
            self.starts += is_start
            started = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += time.thread_time() - started

        return timed


class TimedAgent(Agent):
    """An agent that is turned by hand. `own` is its processor time without the engine's, in turns
    in which something happened: in others it only looked again whether a post is over."""

    def __init__(self, setting: Setting, name: str, direction: Way | None = None) -> None:
        self.transport = TimedNixl()
        self.own = 0.0
        self._num_heard = 0
        arena = Arena(setting.layout(), device=setting.device)
        arena.bytes.fill_(7 if name == "producer" else 1)
        super().__init__(
            arena,
            Generations(arena.layout),
            transport=self.transport,
            identity=IDENTITY,
            name=name,
            options=Options(direction=direction),
        )

    def _hear(self, line: Session, message: AnyMessage) -> None:
        self._num_heard += 1
        super()._hear(line, message)

    def turn(self, timeout: float = 0.0) -> float:
        """One turn of the loop; how long the next may wait."""
        before = self._signature
        return self._timed(lambda: self.loop.step(timeout), lambda: self._signature != before)

    def call(self, call: Callable[[], Any]) -> Any:
        """What a call of this agent returns, its time counted."""
        return self._timed(call, lambda: True)

    @property
    def _signature(self) -> tuple[int, ...]:
        return self._num_heard, self.transport.starts, len(self.loop.tasks)

    def _timed(self, call: Callable[[], Any], counts: Callable[[], bool]) -> Any:
        inside, started = self.transport.seconds, time.thread_time()
        result = call()
        seconds = time.thread_time() - started
        if counts():
            self.own += seconds - (self.transport.seconds - inside)
        return result


# ── the producer ──────────────────────────────────────────────────────────────────────


class TimedProducer:
    """What the other process does: offers rows, and serves them in between."""

    def __init__(self, say: Say, setting: Setting) -> None:
        logging.getLogger("kvstow").setLevel(logging.ERROR)  # whose bytes these are does not matter
        self._setting = setting
        self._agent = TimedAgent(setting, "producer")
        self._wait = 0.0

    def turn(self) -> None:
        """One turn of the agent's loop."""
        self._wait = self._agent.turn(self._wait)

    def address(self) -> str:
        """Where the agent listens."""
        return self._agent.address

    def offer(self, order: str, awake_seconds: float) -> tuple[str, float]:
        """A ticket, and the processor time of this agent's own before it was made."""
        self._agent.server.stay_awake(awake_seconds)
        own, blocks = self._agent.own, self._setting.scattered(seed=1)
        if order != "scattered":
            blocks = self._setting.in_order() if order == "in-order" else Blocks.first([1])
        offer = {0: blocks}, len(blocks) * BLOCK_TOKENS
        return str(self._agent.call(lambda: self._agent.offer_blocks(*offer))), own


class Producer:
    """The other process, from here; `own` is its processor time before it made the last ticket."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.own = 0.0

    def offer(self, order: str, awake_seconds: float = 0.0) -> Ticket:
        """A ticket for rows in this order."""
        ticket, self.own = self._child.call("offer", order=order, awake_seconds=awake_seconds)
        return Ticket.parse(ticket)


@contextmanager
def producing(setting: Setting) -> Generator[tuple[Producer, str]]:
    """The other process, and its agent's address."""
    with Child("producer", f"{__name__}:TimedProducer", setting) as child:
        yield Producer(child), child.call("address")
