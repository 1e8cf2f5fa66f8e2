"""Faults, one by one, made for real: each ends as an error that names every group's blocks,
within its deadline, and afterwards the pair works again."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode
from kvstow.plan.pack import Alignment
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric
from strategies import Kind, Served
from transfer_node import Node, hybrid_layout, rows_for
from transfer_process import Process, Remote, Zygote
from waiting import wait_for

TOKENS = 18
HURRY = {
    "transfer_seconds": 15.0,
    "contact_seconds": 8.0,
    "heartbeat_seconds": 0.3,
    "drain_seconds": 0.3,
    "quarantine_seconds": 1.0,
}
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}

LAYOUT = hybrid_layout()
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1), rows_for(LAYOUT, TOKENS, 2)
GROUPS = {rows.group.name for rows in LAYOUT.groups}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def assert_failed(result: dict, *kinds: str) -> None:
    """An error of one of the kinds, which names all destination blocks of every group."""
    assert result.get("kind") in kinds, result
    assert set(result["blocks"]) == GROUPS
    for g, rows in enumerate(LAYOUT.groups):
        assert result["blocks"][rows.group.name] == TARGET[str(g)][0]


def assert_works(producer: Any, consumer: Any, salt: int = 5) -> None:
    producer.fill(SOURCE, salt)
    result = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, digest="always")
    assert "error" not in result, result
    assert consumer.check(TARGET, 0, TOKENS, salt) == ""


class Couple:
    """A producer and a consumer, each in a process of its own."""

    def __init__(self, zygote: Zygote, env: dict[str, str]) -> None:
        self.zygote = zygote
        self.env = env
        self.processes: list[Process] = []
        self.port = free_port()
        self.producer = self.start_producer()
        self.consumer = self.start("consumer")

    def start(self, name: str, **how: Any) -> Remote:
        process = self.zygote.process(self.env)
        self.processes.append(process)
        return process.node(encode(LAYOUT), name, options=HURRY, **how)

    def start_producer(self) -> Remote:
        return self.start("producer", listen=f"tcp://127.0.0.1:{self.port}")

    def close(self) -> None:
        for process in self.processes:
            process.close()


@pytest.fixture(params=["tcp", "one host"])
def couple(request: pytest.FixtureRequest, zygote: Zygote) -> Iterator[Couple]:
    made = Couple(zygote, TCP if request.param == "tcp" else {})
    yield made
    made.close()


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def nodes(fabric: Fabric) -> Iterator[tuple[Node, Node]]:
    """Producer and consumer in this process, over the local transport."""
    pair = tuple(Node(encode(LAYOUT), fabric, name=n, options=HURRY) for n in ("p", "c"))
    yield pair  # type: ignore[misc]
    for node in pair:
        node.close()


# ── processes that die, stall, come back ──────────────────────────────────────────────


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_producer_killed_in_the_middle_is_an_error_and_its_successor_is_found(zygote, direction):
    couple = Couple(zygote, TCP)
    try:
        producer, consumer = couple.producer, couple.consumer
        assert_works(producer, consumer)
        consumer.wipe()
        ticket = producer.offer(SOURCE, TOKENS)
        producer.process.stop()  # from here on nothing of it moves
        number = consumer.begin_pull([ticket], TARGET, direction=direction)
        time.sleep(0.2)
        producer.process.kill()
        assert_failed(consumer.end_pull(number), "peer", "timeout")
        assert consumer.wait_quiet(number, 15)
        assert consumer.held() == 0
        successor = couple.start_producer()
        assert_failed(consumer.pull([ticket], TARGET), "expired", "ticket")
        assert_works(successor, consumer, salt=9)
    finally:
        couple.close()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_stalled_producer_is_a_timeout_and_its_rows_are_kept_until_it_is_quiet(zygote, direction):
    couple = Couple(zygote, TCP)
    try:
        producer, consumer = couple.producer, couple.consumer
        assert_works(producer, consumer)
        ticket = producer.offer(SOURCE, TOKENS)
        producer.process.stop()
        number = consumer.begin_pull([ticket], TARGET, direction=direction, deadline=1.0)
        result = consumer.end_pull(number)
        assert_failed(result, "timeout")
        assert "no end within 1 s" in result["error"]
        if direction == "write":  # it may still write when it wakes up
            assert not consumer.wait_quiet(number, 1.0)
            assert consumer.held() > 0
        producer.process.resume()
        assert consumer.wait_quiet(number, 15)
        assert consumer.held() == 0
        assert_works(producer, consumer, salt=7)
    finally:
        couple.close()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_late_bytes_of_a_stopped_producer_never_reach_rows_that_others_were_given(
    zygote, direction
):
    """Over TCP an engine does not cancel what it was given: only its end makes rows quiet."""
    couple = Couple(zygote, TCP)
    try:
        stopped, consumer = couple.producer, couple.consumer
        good = couple.start("good")
        stopped.fill(SOURCE, 1)
        for producer in (stopped, good):
            ticket = producer.offer(SOURCE, TOKENS)
            assert "error" not in consumer.pull([ticket], TARGET, digest="off")
        good.fill(SOURCE, 2)
        ticket = stopped.offer(SOURCE, TOKENS)
        stopped.process.stop()
        number = consumer.begin_pull([ticket], TARGET, direction=direction, deadline=1.0)
        assert_failed(consumer.end_pull(number), "timeout")
        if direction == "write":  # nothing but the producer itself can say that it is over
            assert not consumer.wait_quiet(number, 3.0)
            stopped.process.resume()
        assert consumer.wait_quiet(number, 15)
        ticket = good.offer(SOURCE, TOKENS)
        assert "error" not in consumer.pull([ticket], TARGET, digest="always")
        stopped.process.resume()
        time.sleep(1.0)
        assert consumer.check(TARGET, 0, TOKENS, 2) == ""
    finally:
        couple.close()


def test_a_consumer_that_dies_costs_the_producer_its_lease_and_nothing_else(couple):
    producer, consumer = couple.producer, couple.consumer
    assert_works(producer, consumer)
    ticket = producer.offer(SOURCE, TOKENS, lease_seconds=1.0)
    producer.process.stop()
    consumer.begin_pull([ticket], TARGET, direction="read")
    consumer.process.kill()
    producer.process.resume()
    wait_for(lambda: producer.held() == 0)
    assert_works(producer, couple.start("consumer"))


# ── cables ────────────────────────────────────────────────────────────────────────────


# ── tickets ───────────────────────────────────────────────────────────────────────────


def forged(ticket: str, **changes: Any) -> str:
    real = Ticket.parse(ticket)
    values = {field.name: getattr(real, field.name) for field in fields(real)}
    return str(Ticket(**(values | changes)))


def test_a_forged_ticket_is_refused(nodes):
    producer, consumer = nodes
    producer.fill(SOURCE)
    ticket = producer.offer(SOURCE, TOKENS)
    real = Ticket.parse(ticket)
    others = {g: type(b)(b.ids[::-1].copy(), b.index) for g, b in real.blocks.items()}
    assert_failed(consumer.pull([forged(ticket, blocks=others)], TARGET), "ticket")
    assert_failed(consumer.pull([forged(ticket, lease=real.lease + 1)], TARGET), "ticket")
    assert_failed(consumer.pull([forged(ticket, fingerprint="00" * 32)], TARGET), "ticket")
    assert_works(producer, consumer)


def test_a_ticket_out_of_range_is_refused_before_anything_is_read(nodes):
    producer, consumer = nodes
    ticket = producer.offer(SOURCE, TOKENS)
    real = Ticket.parse(ticket)
    for wrong in (0, LAYOUT.num_blocks(0), 1 << 40):
        ids = real.blocks[0].ids.copy()
        ids[0] = wrong
        blocks = {**real.blocks, 0: type(real.blocks[0])(ids, real.blocks[0].index)}
        assert_failed(consumer.pull([forged(ticket, blocks=blocks)], TARGET), "ticket")
    assert consumer.check({}, 0, 0) == ""


# ── leases and fences ─────────────────────────────────────────────────────────────────


def test_a_withdrawn_ticket_fails_its_reader_promptly(nodes, fabric):
    producer, consumer = nodes
    assert_works(producer, consumer)
    ticket = producer.offer(SOURCE, TOKENS)
    fabric.cut(*(node.agent.endpoint.transport.name for node in nodes))
    number = consumer.begin_pull([ticket], TARGET, direction="read", deadline=60)
    wait_for(lambda: producer.agent.server.servings)
    producer.withdraw(ticket)
    assert_failed(consumer.end_pull(number), "expired")


def test_an_aborted_pull_releases_the_producer_promptly(nodes, fabric):
    producer, consumer = nodes
    assert_works(producer, consumer)
    ticket = producer.offer(SOURCE, TOKENS, lease_seconds=600)
    fabric.cut(*(node.agent.endpoint.transport.name for node in nodes))
    number = consumer.begin_pull([ticket], TARGET, direction="read", deadline=60)
    wait_for(lambda: producer.agent.server.servings)  # or there would be nothing to release
    consumer.transfers[number].abort()
    assert_failed(consumer.end_pull(number), "aborted")
    wait_for(lambda: producer.held() == 0)


def test_a_dropped_ticket_releases_the_producer_promptly(nodes):
    producer, consumer = nodes
    ticket = producer.offer(SOURCE, TOKENS, lease_seconds=600)
    consumer.agent.drop(Ticket.parse(ticket))
    wait_for(lambda: producer.held() == 0)


def test_a_kept_ticket_outlives_its_lease_time(nodes):
    producer, consumer = nodes
    producer.fill(SOURCE)
    consumer.path(producer.address)
    kept, lost = (producer.offer(SOURCE, TOKENS, lease_seconds=1.5) for _ in range(2))
    consumer.agent.keep(Ticket.parse(kept))
    leases = producer.agent.server.leases
    wait_for(lambda: leases.has_ended(Ticket.parse(lost).lease))
    assert_failed(consumer.pull([lost], TARGET), "expired")
    assert "error" not in consumer.pull([kept], TARGET)


def test_a_digest_that_does_not_come_is_a_timeout(nodes):
    producer, consumer = nodes
    assert_works(producer, consumer)
    done = threading.Event()
    producer.agent.endpoint.worker.submit(done.wait)
    ticket = producer.offer(SOURCE, TOKENS)
    result = consumer.pull([ticket], TARGET, digest="always", deadline=0.5)
    done.set()
    assert_failed(result, "timeout")
    assert_works(producer, consumer, salt=4)


# ── several sources ───────────────────────────────────────────────────────────────────


def test_a_missing_source_is_refused(nodes, fabric):
    """Half of the heads are not a request."""
    kinds = (Kind(Full(), 4, (("k", DType.BFLOAT16, 4), ("v", DType.BFLOAT16, 4))),)

    def layout(tp: int) -> Layout:
        return Served(
            tp=tp, pp=1, states={Full(): 4}, order="BLHNC", pack="packed", alignment=Alignment()
        ).layout(kinds, 0, 0, 16)

    half = Node(encode(layout(2)), fabric, name="half", options=HURRY)
    whole = Node(encode(layout(1)), fabric, name="whole", options=HURRY)
    ticket = half.offer(rows_for(half.layout, 16, 1), 16)
    result = whole.pull([ticket], rows_for(whole.layout, 16, 2))
    assert result["kind"] == "refused"
    assert "no source holds" in result["error"]
    assert "1 of 2 ranks are there: one ticket per rank" in result["error"]
    for node in (half, whole):
        node.close()
