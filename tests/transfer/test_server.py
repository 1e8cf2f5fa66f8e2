"""What a producer does with messages that come late, or that no honest consumer sends."""

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.framing import decode_message
from kvstow.transfer.channel.messages import AnyMessage, Begin, End, Failed, Ids, Sample, Write
from kvstow.transfer.loop import AFTER_ERROR, NOW_AND_THEN
from kvstow.transfer.options import Options
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.tickets.ticket import MAX_TOKENS, packed_ints
from kvstow.transfer.transport.base import lost
from kvstow.transfer.transport.local import Fabric, LocalTransport
from schedules.network import Clock, Network, Packet, SimChannel
from transfer_node import IDENTITY, from_json, hybrid_layout, rows_for

TOKENS = 24
LAYOUT = hybrid_layout(60)
SOURCE = from_json(rows_for(LAYOUT, TOKENS, 1, (1, 20)))
TARGET = from_json(rows_for(LAYOUT, TOKENS, 2, (20, 40)))


class Pair:
    """A producer and a consumer in one thread, and a network that holds packets back."""

    def __init__(self, fabric: Fabric | None = None) -> None:
        self.network, self.clock, self.fabric = Network(), Clock(), fabric or Fabric()
        self.random = Random(1)
        self.held: list[Packet] = []
        self.producer, self.consumer = self._agent("p"), self._agent("c")
        self.peer = self.consumer.peers.at(self.producer.address, "")
        self.peer.greet()
        self.rounds(5)

    def _agent(self, name: str) -> Agent:
        return Agent(
            Arena(LAYOUT),
            Generations(LAYOUT),
            transport=LocalTransport(self.fabric),
            identity=IDENTITY,
            name=name,
            channel=SimChannel(self.network, f"sim://{name}"),
            clock=self.clock,
            random=self.random,
            options=Options(direction="write", digest="off"),
        )

    def rounds(self, count: int, *hold: type[AnyMessage]) -> None:
        """Deliver everything and turn both agents; messages of some kinds are held back."""
        for _ in range(count):
            packets, self.network.packets = self.network.packets, []
            for packet in packets:
                if isinstance(decode_message(packet.data), hold):
                    self.held.append(packet)
                else:
                    self.network.deliver(packet)
            for agent in (self.producer, self.consumer):
                agent.loop.step(0)
                agent.settle()
            self.clock.now += 0.01


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.consumer.close()
    made.producer.close()


def failed_pull(pair: Pair) -> None:
    """A pull whose order stays on a line that its consumer has left; its rows are free again."""
    ticket = pair.producer.offer_blocks(SOURCE, TOKENS)
    transfer = pair.consumer.pull(ticket, into=TARGET)
    pair.rounds(5, Begin)
    pair.peer.lose(lost("p", "a post of another pull has failed"))
    pair.rounds(300)
    assert pair.held
    assert transfer.quiet
    owner = pair.consumer.endpoint.owner
    assert isinstance(owner, Generations)
    assert not any(owner.holds(g, listed.ids).any() for g, listed in TARGET.items())


def assert_nothing_is_written(pair: Pair) -> None:
    memory = pair.consumer.endpoint.arena.bytes.numpy()
    pair.producer.endpoint.arena.bytes.fill_(7)
    before = memory.copy()
    for packet in pair.held:
        pair.network.deliver(packet)
    pair.rounds(20)
    assert not pair.producer.server.servings
    assert np.array_equal(memory, before)


def test_an_order_that_comes_after_its_stop_was_answered_is_not_served(pair):
    """It came on a line that the consumer had left, into rows that were somebody else's."""
    failed_pull(pair)
    assert_nothing_is_written(pair)


def test_a_second_line_of_one_agent_leaves_the_first_alone(pair):
    """An agent may know another one by two addresses."""
    server = pair.producer.server
    (first,) = server.incoming
    other = Outgoing(pair.consumer.endpoint, pair.consumer.loop, pair.producer.address, "")
    other.greet()
    pair.consumer.peers.all["another address", ""] = other
    pair.rounds(5)
    assert other.state == "ready"
    assert len(server.incoming) == 2
    assert first in server.incoming
    other.lose(lost("p", "left"))
    pair.rounds(1)
    other.greet()
    pair.rounds(5)
    assert other.state == "ready"
    assert len(server.incoming) == 2
    assert first in server.incoming


def test_a_producer_is_awake_as_long_as_somebody_reads_from_it(pair):
    """Some engines move bytes only while their target looks at them."""
    ticket = pair.producer.offer_blocks(SOURCE, TOKENS)
    transfer = pair.consumer.pull(ticket, into=TARGET, direction="read")
    pair.rounds(10, End)
    assert transfer.wait(0).directions == ("read",)
    (serving,) = pair.producer.server.servings.values()
    pair.producer.loop.step()
    assert serving.task.due <= pair.clock.now + NOW_AND_THEN


# ── orders that cannot be ─────────────────────────────────────────────────────────────


def refusal(pair: Pair, write: Write | None, samples: tuple[Sample, ...]) -> str:
    """Why a producer refuses an order, which it says at once."""
    ticket = pair.producer.offer_blocks(SOURCE, TOKENS)
    said: list[AnyMessage] = []
    pair.peer.hear = said.append  # type: ignore[method-assign]
    pair.peer.send(Begin(5, ticket.lease, ticket.signature, "write", None, write, 0, samples))
    started = time.monotonic()
    pair.rounds(3)
    assert time.monotonic() - started < 10
    (reason,) = [message.reason for message in said if isinstance(message, Failed)]
    assert not pair.producer.server.servings
    return reason


@pytest.mark.parametrize(("start", "end"), [(0, 1 << 28), (-1, TOKENS), (9, 8), (0, TOKENS + 1)])
def test_an_order_for_tokens_that_the_ticket_has_not_is_refused_at_once(pair, start, end):
    """It kept the loop busy for minutes, and took gigabytes."""
    ids = tuple(Ids(g, packed_ints(b.ids), packed_ints(b.index)) for g, b in TARGET.items())
    assert f"tokens [{start}, {end}) are not" in refusal(pair, Write(ids, start, end), ())


def test_a_digest_of_tokens_that_the_ticket_has_not_is_refused_at_once(pair):
    sample = Sample(("layers.0",), None, 0, 1 << 28, 1, 0)
    assert f"tokens [0, {1 << 28}) are not" in refusal(pair, None, (sample,))


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("digest", ["off", "always"])
def test_a_forged_ticket_for_very_many_tokens_fails_at_once(pair, direction, digest):
    ticket = replace(pair.producer.offer_blocks(SOURCE, TOKENS), num_tokens=MAX_TOKENS)
    transfer = pair.consumer.pull(ticket, into=TARGET, direction=direction, digest=digest)
    started = time.monotonic()
    while not transfer.done and time.monotonic() < started + 10:
        pair.rounds(1)
    with pytest.raises(TransferError) as caught:
        transfer.wait(0)
    assert caught.value.kind == "ticket"


@pytest.mark.parametrize("which", ["server", "peers"])
def test_upkeep_goes_on_after_an_error(pair, monkeypatch, which):
    """Leases never ran out any more, and peers were never forgotten."""
    agent = pair.producer
    part = {"server": agent.server.leases, "peers": agent.peers}[which]
    upkeep = {"server": agent.server, "peers": agent.peers}[which].upkeep()

    def fail(*args: object, **how: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(part, {"server": "expire", "peers": "every"}[which], fail)
        assert next(upkeep) == AFTER_ERROR
    assert next(upkeep) < AFTER_ERROR


def test_a_consumer_does_not_hear_that_what_still_writes_has_stopped():
    """Our engine failed to let go of it, and the transfer was forgotten meanwhile."""
    may_land: list[bool] = []
    pair = Pair(Fabric(lands=lambda: bool(may_land)))
    engine: Any = pair.producer.endpoint.transport
    engine.piece_bytes, engine.step_bytes = 16, 64
    disconnect = engine.disconnect

    def cling(peer: str) -> None:
        disconnect(peer)
        raise TransferError("nixlBackendError", kind="transport", peer=peer)

    def fail_once(copy: int) -> None:
        if copy == 3:
            raise TransferError("one copy failed", kind="transport")

    engine.disconnect, engine.before_copy = cling, fail_once
    transfer = pair.consumer.pull(pair.producer.offer_blocks(SOURCE, TOKENS), into=TARGET)
    pair.rounds(200)
    assert transfer.done
    assert len(pair.producer.server.servings) == 1
    assert not transfer.quiet
    may_land.append(True)
    pair.consumer.close()
    pair.producer.close()
