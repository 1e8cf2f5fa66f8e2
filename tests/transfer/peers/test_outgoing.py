"""Agents that we dial: met, kept, given up when they are silent."""

from collections.abc import Iterator
from random import Random
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.errors import TransferError
from kvstow.plan.manifest import encode
from kvstow.transfer.channel.messages import AnyMessage, End, Stopped
from kvstow.transfer.peers.outgoing import Peers
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, hybrid_layout, rows_for
from waiting import wait_for

TOKENS = 18
LAYOUT = hybrid_layout()
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1), rows_for(LAYOUT, TOKENS, 2)
HURRY = {"contact_seconds": 0.5, "heartbeat_seconds": 0.05, "drain_seconds": 0.3}


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    fabric = Fabric()
    pair = tuple(Node(encode(LAYOUT), fabric, name=name, options=HURRY) for name in ("p", "c"))
    yield pair  # type: ignore[misc]
    for node in pair:
        node.close()


class Silenced:
    """An agent that hears and does not answer, until `speak`."""

    def __init__(self, node: Node) -> None:
        self._channel: Any = node.agent.channel
        self._send = self._channel.send
        self._channel.send = lambda line, message: True

    def speak(self) -> None:
        self._channel.send = self._send


def test_an_agent_that_answers_no_heartbeat_is_given_up_and_met_again(nodes, monkeypatch):
    monkeypatch.setattr("kvstow.transfer.peers.outgoing.SILENT_BEATS", 4)
    producer, consumer = nodes
    peer = consumer.agent.connect(producer.address)
    wait_for(lambda: peer.unanswered == 0)
    silenced = Silenced(producer)
    wait_for(lambda: peer.state == "broken")
    assert peer.error is not None
    assert "4 heartbeats" in str(peer.error)
    silenced.speak()
    producer.fill(SOURCE, 3)
    assert "error" not in consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    assert consumer.check(TARGET, 0, TOKENS, 3) == ""
    assert not peer.readers


def test_an_agent_that_answers_is_kept_for_longer_than_that(nodes, monkeypatch):
    monkeypatch.setattr("kvstow.transfer.peers.outgoing.SILENT_BEATS", 20)
    producer, consumer = nodes
    peer = consumer.agent.connect(producer.address)
    heard = [peer.heard_at]
    while len(heard) < 40:
        wait_for(lambda: peer.heard_at > heard[-1])
        heard.append(peer.heard_at)
    assert peer.state == "ready"


def test_a_lease_is_kept_while_its_agent_cannot_be_met_for_a_moment(nodes):
    producer, consumer = nodes
    ticket = Ticket.parse(producer.offer(SOURCE, TOKENS, lease_seconds=4.0))
    consumer.agent.keep(ticket)
    peer = consumer.agent.connect(producer.address)
    silenced = Silenced(producer)
    consumer.agent.loop.submit(lambda: peer.lose(TransferError("a fault", kind="peer")))
    wait_for(lambda: peer.state == "broken" and "did not answer" in str(peer.error))
    silenced.speak()
    wait_for(lambda: peer.state == "ready")
    assert ticket.lease in peer.kept
    lease = producer.agent.server.leases.find(ticket.lease)
    deadline = lease.deadline
    wait_for(lambda: lease.deadline > deadline)


def test_a_ticket_is_not_kept_for_ever_where_nobody_answers(nodes):
    producer, consumer = nodes
    ticket = Ticket.parse(producer.offer(SOURCE, TOKENS, lease_seconds=0.3))
    producer.close()
    consumer.agent.keep(ticket)
    wait_for(lambda: any(task.name == "keep" for task in consumer.agent.loop.tasks))
    wait_for(lambda: all(task.name != "keep" for task in consumer.agent.loop.tasks))
    peer = consumer.agent.peers.at(ticket.address, ticket.key)
    assert ticket.lease not in peer.kept


class Heard:
    """A reader that only listens."""

    lease = 0

    def __init__(self) -> None:
        self.messages: list[AnyMessage | TransferError] = []

    def hear(self, message: AnyMessage) -> None:
        self.messages.append(message)

    def lose(self, error: TransferError) -> None:
        self.messages.append(error)


def test_what_is_sent_before_the_agent_knows_us_does_not_make_us_a_stranger():
    fabric = Fabric()
    here, there = (Node(encode(LAYOUT), fabric, name, is_started=False) for name in ("h", "t"))
    peer = here.agent.peers.at(there.address, "")
    reader = peer.readers[7] = Heard()

    def turn() -> bool:
        for node in (here, there):
            node.agent.loop.step(0.001)
        return peer.state == "ready"

    peer.greet()
    here.agent.loop.step()
    assert peer.state == "greeting"
    peer.send(End(7, 0, "failed"))
    wait_for(turn)
    peer.send(End(7, 0, "failed"))
    wait_for(lambda: turn() and len(reader.messages) > 0)
    assert reader.messages == [Stopped(7)]
    for node in (here, there):
        node.close()


def test_a_message_is_heard_while_another_thread_asks_for_its_agent():
    """Whoever is asked for becomes the latest of all: a message that came at that very moment was
    heard by nobody."""
    where = ("tcp://127.0.0.1:5000", "")
    peers = Peers(SimpleNamespace(random=Random(1)), None)  # type: ignore[arg-type]
    peer: Any = peers.at(*where)
    peer.line, heard = "line", []
    peer.hear = heard.append
    is_out, may_go_on = Event(), Event()

    class Slow(dict[Any, Any]):
        def pop(self, *key: Any) -> Any:
            there = super().pop(*key)
            is_out.set()
            may_go_on.wait(5)
            return there

    peers.all = Slow(peers.all)
    asking = Thread(target=peers.at, args=where)
    asking.start()
    is_out.wait(5)
    Timer(0.1, may_go_on.set).start()
    peers.hear("line", "message")  # type: ignore[arg-type]
    asking.join()
    assert heard == ["message"]
