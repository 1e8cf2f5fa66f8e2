"""Mapped memory: two agents on one node, in one process and in two that are killed and stopped."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstow.memory import share
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.transfer.options import Options
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport import mapped
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, attention, hybrid_layout, rows_for
from transfer_process import Process, Remote, Zygote
from waiting import wait_for

TOKENS = 18
LAYOUT = hybrid_layout()
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1), rows_for(LAYOUT, TOKENS, 2)
MAPPED = {"mapped": True, "contact_seconds": 8.0, "heartbeat_seconds": 0.2, "lease_seconds": 5.0}


def node(fabric: Fabric, name: str, layout: Layout = LAYOUT, **options: Any) -> Node:
    return Node(encode(layout), fabric, name=name, options=MAPPED | options)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    fabric = Fabric()
    nodes = node(fabric, "producer"), node(fabric, "consumer")
    nodes[0].fill(SOURCE)
    yield nodes
    for each in nodes:
        each.close()


def unmapped(consumer: Node) -> str:
    (peer,) = consumer.agent.peers.all.values()
    return peer.unmapped


# ── what is mapped, and what is not ───────────────────────────────────────────────────


@pytest.mark.parametrize("digest", ["always", "sample", "off"])
def test_rows_of_a_mapped_peer_come_by_our_own_copy(pair, digest):
    producer, consumer = pair
    result = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, digest=digest)
    assert result.get("directions") == ["mapped"], result
    assert consumer.check(TARGET, 0, TOKENS) == ""
    wait_for(lambda: producer.held() == 0)  # the lease has ended: it was told
    assert consumer.metric("kvstow_transfer_contacts_total", outcome="mapped") == 1
    assert not consumer.agent.endpoint.transport.peers  # no engine had to be connected


def test_any_two_layouts(pair):
    fabric = Fabric()
    short, long = (
        packed(grouped([attention(f"l.{i}", Full(), size) for i in range(3)]), num_slabs=20,
               site=Site(model="m"))
        for size in (4, 16)
    )  # fmt: skip
    producer, consumer = node(fabric, "p", short), node(fabric, "c", long)
    for start in (0, 5):
        source, target = rows_for(short, 30, 3), rows_for(long, 30, 4)
        producer.fill(source, start)
        consumer.wipe()
        result = consumer.pull(
            [producer.offer(source, 30)], target, start_token=start, digest="always"
        )
        assert result.get("directions") == ["mapped"], result
        assert consumer.check(target, start, 30, start) == ""
    for each in (producer, consumer):
        each.close()


def test_a_forced_way_goes_through_the_engine_and_a_forced_mapping_is_refused_where_there_is_none():
    fabric = Fabric()
    producer, consumer = node(fabric, "p"), node(fabric, "c")
    closed = node(fabric, "closed", mapped=False)
    producer.fill(SOURCE)
    for way in ("read", "write", "slots", "mapped"):
        result = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction=way)
        assert result.get("directions") == [way], result
    refused = closed.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="mapped")
    assert refused["kind"] == "refused"
    assert "not mapped: option" in refused["error"]
    for each in (producer, consumer, closed):
        each.close()


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_either_side_may_switch_it_off(who):
    fabric = Fabric()
    nodes = [node(fabric, name, mapped=name != who) for name in ("producer", "consumer")]
    nodes[0].fill(SOURCE)
    result = nodes[1].pull([nodes[0].offer(SOURCE, TOKENS)], TARGET)
    assert result["directions"] == ["read"]
    assert unmapped(nodes[1]) == "option"
    assert nodes[1].metric("kvstow_transfer_contacts_total", outcome="option") == 1
    assert nodes[1].status()["peers"][0]["unmapped"] == "option"
    for each in nodes:
        each.close()


@pytest.mark.parametrize("reason", ["node", "user"])
def test_others_are_met_as_ever_and_counted_with_the_reason(monkeypatch, reason):
    fabric = Fabric()
    producer, consumer = node(fabric, "p"), node(fabric, "c")
    producer.fill(SOURCE)
    if reason == "node":
        monkeypatch.setattr(share, "node", lambda: "another boot")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    result = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    assert result["directions"] == ["read"]
    assert unmapped(consumer) == reason
    for each in (producer, consumer):
        each.close()


@pytest.mark.parametrize("described", [b"", b"\xc1", b"\x93\x01\x02\x03", bytes(64)])
def test_a_description_that_is_none_maps_nothing(described):
    with pytest.raises(mapped.NotShared):
        mapped.ThisNode().attach(described, LAYOUT, Node(encode(LAYOUT), Fabric()).arena.device)


# ── tickets and generations ───────────────────────────────────────────────────────────


def test_an_altered_ticket_is_refused_by_the_consumer_itself(pair):
    producer, consumer = pair
    ticket = Ticket.parse(producer.offer(SOURCE, TOKENS))
    blocks = {g: replace(b, ids=b.ids[::-1].copy()) for g, b in ticket.blocks.items()}
    generations = producer.agent.endpoint.generations(blocks)
    for forged in (
        replace(ticket, blocks=blocks, generations=generations),
        replace(ticket, blocks=blocks, generations=generations).signed(bytes(32)),
        replace(ticket, signature=bytes(16)),
    ):
        result = consumer.pull([str(forged)], TARGET)
        assert result.get("kind") == "ticket", result
    assert consumer.check({}, 0, 0) == ""
    assert "error" not in consumer.pull([str(ticket)], TARGET)


def test_bytes_that_change_under_a_lease_are_caught_by_the_digest(pair, monkeypatch):
    producer, consumer = pair
    copied = mapped.copied

    def spoiled(source: Any, destination: Any, copies: Any) -> Any:
        yield from copied(source, destination, copies)
        consumer.memory[int(copies.destination[0])] ^= 1

    monkeypatch.setattr(mapped, "copied", spoiled)
    result = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, digest="always")
    assert result["kind"] == "digest"


def test_rows_are_quiet_as_soon_as_a_pull_has_failed(pair, monkeypatch):
    producer, consumer = pair
    monkeypatch.setattr(mapped, "STEP_BYTES", 16)

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return iter(())

    monkeypatch.setattr(mapped, "copied", slow)
    number = consumer.begin_pull([producer.offer(SOURCE, TOKENS)], TARGET, deadline=0.2)
    assert consumer.end_pull(number)["kind"] == "timeout"
    assert consumer.wait_quiet(number, 5)
    assert consumer.agent.quarantine.rows == 0


def test_a_ticket_that_its_agent_hears_of_later_than_the_consumer_is_waited_for(pair):
    """A scheduler writes a ticket, and the worker sets the counters when it hears of it."""
    producer, consumer = pair
    owner = producer.owner
    ticket = Ticket.parse(producer.offer(SOURCE, TOKENS))
    generations = {g: table + 5 for g, table in ticket.generations.items()}
    early = replace(ticket, lease=ticket.lease ^ 1, generations=generations)
    early = early.signed(producer.agent.ticket_key)
    number = consumer.begin_pull([str(early)], TARGET)
    time.sleep(0.1)
    assert not consumer.transfers[number].done
    for g, blocks in early.blocks.items():
        owner.generations[g][blocks.ids] = early.generations[g]
    producer.agent.adopt(early)
    assert "error" not in consumer.end_pull(number)
    assert consumer.check(TARGET, 0, TOKENS) == ""


def test_an_agent_that_is_closed_while_its_process_lives_is_believed_no_more(pair):
    producer, consumer = pair
    ticket = producer.offer(SOURCE, TOKENS)
    peer = consumer.agent.connect(producer.address)
    assert peer.mapped is not None
    held = peer.mapped
    held.hold()
    assert held.generations(Ticket.parse(ticket).blocks) is not None
    producer.agent.close()
    assert held.generations(Ticket.parse(ticket).blocks) is None
    held.release()


def test_a_lease_ends_with_its_pull_though_the_peer_s_memory_cannot_be_unmapped(pair, monkeypatch):
    producer, consumer = pair
    peer, copied = consumer.agent.connect(producer.address), mapped.copied

    def losing(*args: Any) -> Any:
        yield from copied(*args)
        if peer.mapped is not None:  # the pull holds it alone, from now on
            peer._unmap()

    def refused() -> None:
        raise RuntimeError("the driver has failed")

    monkeypatch.setattr(mapped, "copied", losing)
    monkeypatch.setattr(peer.mapped._memory, "close", refused)
    result = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    assert "error" not in result
    wait_for(lambda: producer.held() == 0)
    assert not peer.readers
    assert not consumer.agent.endpoint.moving


def test_agents_over_one_owner_share_its_counters():
    fabric, owner = Fabric(), Generations(LAYOUT)
    node = mapped.ThisNode()
    first = mapped.place_generations(node, owner)
    assert mapped.place_generations(node, owner) is first
    owner.retire(0, np.array([1]))
    assert first.numbers.sum() == 1
    assert Options().mapped
    del fabric


# ── processes that die, stall, come back ──────────────────────────────────────────────


BIG = packed(
    grouped([attention(f"l.{i}", Full(), 4) for i in range(2)]),
    num_slabs=80,
    site=Site(model="big"),
)
LONG = 4 * 36
HERE, THERE = rows_for(BIG, LONG, 1, (1, 40)), rows_for(BIG, LONG, 2, (41, 80))


def start(zygote: Zygote) -> tuple[Process, Remote]:
    process = zygote.process()
    return process, process.node(encode(BIG), "producer", options=MAPPED)


def test_a_stopped_producer_does_not_hold_up_a_pull_of_mapped_rows(zygote):
    process, producer = start(zygote)
    consumer = Node(encode(BIG), name="consumer", options=MAPPED)
    producer.fill(HERE, 3)
    ticket = producer.offer(HERE, LONG)
    consumer.agent.connect(producer.address)
    process.stop()
    result = consumer.pull([ticket], THERE, digest="always")
    assert result.get("directions") == ["mapped"], result
    assert consumer.check(THERE, 0, LONG, 3) == ""
    process.resume()
    consumer.close()
    process.close()


def test_a_dead_producer_s_memory_is_let_go_of_and_its_successor_is_met(zygote):
    process, producer = start(zygote)
    consumer = Node(encode(BIG), name="consumer", options=MAPPED)
    peer = consumer.agent.connect(producer.address)
    memory = peer.mapped
    assert memory is not None
    process.kill()
    killed_at = time.monotonic()
    wait_for(lambda: peer.mapped is None, 5)
    assert memory._holds == 0
    assert time.monotonic() - killed_at < 5
    process.close()
    process, producer = start(zygote)
    producer.fill(HERE, 4)
    result = consumer.pull([producer.offer(HERE, LONG)], THERE)
    assert result.get("directions") == ["mapped"], result
    assert consumer.check(THERE, 0, LONG, 4) == ""
    consumer.close()
    process.close()
