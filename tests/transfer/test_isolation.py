"""One fault, one casualty: whatever happens to one transfer, another one under way finishes.

Every test has a healthy pull that is held up by a cut cable while something goes wrong beside
it, and that must end well when the cable is whole again.
"""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.errors import BlockError, TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.identity import Identity
from kvstow.plan.manifest import encode
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.messages import Claim, RegionCard, TellDigest
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import CANARY, IDENTITY, Node, from_json, hybrid_layout, rows_for
from waiting import wait_for

TOKENS = 18
LAYOUT = hybrid_layout(num_slabs=24)
SOURCE, TARGET = (rows_for(LAYOUT, TOKENS, seed, among=(1, 12)) for seed in (1, 2))
OTHER_SOURCE, OTHER_TARGET = (rows_for(LAYOUT, TOKENS, seed, among=(12, 24)) for seed in (3, 4))
HURRY = {
    "transfer_seconds": 15.0,
    "contact_seconds": 8.0,
    "heartbeat_seconds": 0.1,
    "drain_seconds": 0.3,
    "quarantine_seconds": 60.0,
    "quarantine_share": 1.0,
}


def forged(ticket: str, **changes: Any) -> str:
    real = Ticket.parse(ticket)
    values = {field.name: getattr(real, field.name) for field in fields(real)}
    return str(Ticket(**(values | changes)))


def hurry(node: Node) -> None:
    """From now on rows are in quarantine for a moment only."""
    node.agent.endpoint.options = replace(node.agent.options, quarantine_seconds=0.1)


class Scene:
    """A producer, a consumer, and a pull between them that is held up until `finish`."""

    def __init__(self, consumer_transport: LocalTransport | None = None) -> None:
        self.fabric = Fabric()
        self.producer = self.node("p")
        self.consumer = self.node("c")
        self.nodes = [self.producer, self.consumer]
        self.producer.fill(SOURCE)
        assert "error" not in self.pulled(self.producer.offer(SOURCE, TOKENS))
        self.consumer.wipe()
        ticket = self.producer.offer(SOURCE, TOKENS)
        self._cable = [node.agent.endpoint.transport.name for node in self.nodes]
        self.fabric.cut(*self._cable)
        self.healthy = self.consumer.begin_pull([ticket], TARGET, direction="read")
        wait_for(lambda: bool(self.consumer.agent.endpoint.flights))

    def node(self, name: str, **how: Any) -> Node:
        options = {**HURRY, **how.pop("options", {})}
        return Node(encode(LAYOUT), self.fabric, name=name, options=options, **how)

    def add(self, name: str, **how: Any) -> Node:
        """Another producer, whose rows are full."""
        made = self.node(name, **how)
        self.nodes.append(made)
        made.fill(OTHER_SOURCE)
        return made

    def pulled(self, ticket: str, into: Any = None, **how: Any) -> dict:
        return self.consumer.pull([ticket], into or OTHER_TARGET, **how)

    def finish(self) -> None:
        """The healthy pull ends well, and so does the next one."""
        self.fabric.reconnect(*self._cable)
        assert "error" not in self.consumer.end_pull(self.healthy)
        for g, blocks in from_json(TARGET).items():
            assert len(blocks), g
        self.producer.fill(SOURCE, 5)
        result = self.consumer.pull([self.producer.offer(SOURCE, TOKENS)], TARGET, digest="always")
        assert "error" not in result, result


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    for node in made.nodes:
        closing = threading.Thread(target=node.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive(), "close hangs"


# ── addresses ─────────────────────────────────────────────────────────────────────────

BAD_ADDRESSES = ["foo://127.0.0.1:5", "tcp://[::1", "tcp://127.0.0.1", "", "tcp://127.0.0.1:99999"]


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_a_bad_address_in_a_ticket_fails_that_pull(scene, address):
    ticket = scene.add("evil").offer(OTHER_SOURCE, TOKENS)
    result = scene.pulled(forged(ticket, address=address), deadline=3)
    assert result["kind"] in ("refused", "ticket", "transport", "timeout")
    scene.finish()


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_a_bad_address_of_a_kept_or_dropped_ticket_harms_nobody(scene, address):
    ticket = scene.add("evil").offer(OTHER_SOURCE, TOKENS)
    bad = Ticket.parse(forged(ticket, address=address))
    scene.consumer.agent.keep(bad)
    scene.consumer.agent.drop(bad)
    time.sleep(0.1)
    scene.finish()


def test_a_key_that_is_given_later_is_used(scene):
    """Peers are known by address and key: a junk key on a first ticket bars nobody."""
    ticket = scene.producer.offer(SOURCE, TOKENS)
    assert scene.pulled(forged(ticket, key="junk"))["kind"] == "refused"
    scene.finish()


# ── peers that lie ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("values", [(), (1, 2), (2**64 - 1,), (1, 2, 3, 4)])
def test_a_peer_that_tells_another_number_of_digests_fails_its_own_pull(scene, values):
    evil = scene.add("evil")
    channel = evil.agent.channel
    send = channel.send

    def lie(line: Any, message: Any) -> bool:
        if isinstance(message, TellDigest):
            message = TellDigest(message.transfer, values)
        return send(line, message)

    channel.send = lie
    result = scene.pulled(evil.offer(OTHER_SOURCE, TOKENS), deadline=3)
    assert result["kind"] == "digest"
    scene.finish()


@pytest.mark.parametrize(
    "changes",
    [
        {"base": 0},
        {"base": 2**62 - 1},
        {"tables": (2**62 - 1,) * 3},
        {"tables": (1,) * 50},
        {"probe": RegionCard(0, 0, "DRAM", 0)},
        {"probe": RegionCard(4096, 1 << 20, "DRAM", 0)},
        {"kind": "VRAM", "device": 3},
        {"stage": RegionCard(4096, 1 << 20, "DRAM", 0)},
        {"metadata": b""},
        {"manifest": b"{}"},
        {"engine": "local-nobody"},
        {"start": "another start"},
    ],
    ids=str,
)
def test_a_card_that_is_not_so_fails_its_own_pull(scene, changes):
    evil = scene.add("evil")
    evil.agent.endpoint.card = msgspec.structs.replace(evil.agent.endpoint.card, **changes)
    scene.pulled(evil.offer(OTHER_SOURCE, TOKENS), deadline=2)
    scene.finish()


def test_a_card_that_claims_the_engine_of_another_does_not_disconnect_it(scene):
    evil = scene.add("evil")
    theirs = scene.producer.agent.endpoint.card
    for changes in ({"engine": theirs.engine}, {"metadata": theirs.metadata}):
        evil.agent.endpoint.card = msgspec.structs.replace(evil.agent.endpoint.card, **changes)
        result = scene.pulled(evil.offer(OTHER_SOURCE, TOKENS), deadline=2)
        assert "error" in result
    scene.finish()


def test_engines_of_consumers_that_have_gone_are_disconnected(scene, monkeypatch):
    monkeypatch.setattr("kvstow.transfer.server.SILENT_BEATS", 20)
    producer = scene.add("q")
    gone = []
    for number in range(5):
        guest = scene.node(f"guest-{number}")
        for direction in ("read", "write"):
            ticket = producer.offer(OTHER_SOURCE, TOKENS)
            assert "error" not in guest.pull([ticket], OTHER_TARGET, direction=direction)
        gone.append(guest.agent.endpoint.transport.name)
        guest.close()
    transport = producer.agent.endpoint.transport
    wait_for(lambda: not transport.peers & set(gone))
    assert not producer.agent.server.incoming
    scene.finish()


def test_a_second_agent_of_the_same_name_does_not_evict_the_first(scene):
    twin = scene.node("c")
    scene.nodes.append(twin)
    other = scene.add("q")
    assert "error" not in twin.pull([other.offer(OTHER_SOURCE, TOKENS)], OTHER_TARGET)
    assert "error" not in twin.pull([scene.producer.offer(SOURCE, TOKENS)], TARGET)
    names = [guest["name"] for guest in scene.producer.status()["guests"]]
    assert names == ["c", "c"]
    scene.finish()


# ── pulls that cannot be ──────────────────────────────────────────────────────────────


def test_more_tokens_than_the_ticket_has_are_refused(scene):
    ticket = scene.add("q").offer(OTHER_SOURCE, TOKENS)
    with pytest.raises(TransferError, match="20 tokens were requested, the ticket is for 18"):
        scene.pulled(ticket, num_tokens=20)
    scene.finish()


@pytest.mark.parametrize("how", [{"num_tokens": 0}, {"deadline": 0}, {"start_token": TOKENS}])
def test_nothing_to_pull_and_no_time_for_it_are_refused(scene, how):
    ticket = scene.add("q").offer(OTHER_SOURCE, TOKENS)
    with pytest.raises(TransferError) as caught:
        scene.pulled(ticket, **how)
    assert caught.value.kind == "refused"
    assert scene.consumer.held() == sum(len(ids) for ids, _ in TARGET.values())
    scene.finish()


def test_a_recurrent_state_is_neither_pulled_nor_offered_for_fewer_tokens_than_it_is_of(scene):
    """It was accepted: the state after all tokens, as that after some of them."""
    ticket = scene.add("q").offer(OTHER_SOURCE, TOKENS)
    with pytest.raises(TransferError, match=f"after {TOKENS} tokens, not after {TOKENS - 1}"):
        scene.pulled(ticket, num_tokens=TOKENS - 1)
    pool = Pool(LAYOUT)
    ledger = Ledger(pool)
    agent = Agent(Arena(LAYOUT), pool, transport=LocalTransport(Fabric()), identity=IDENTITY)
    request = ledger.admit(TOKENS).request
    with pytest.raises(TransferError, match="the recurrent state is that after"):
        agent.offer(ledger, request, num_tokens=TOKENS - 1)
    agent.close()
    scene.finish()


def test_rows_that_were_given_to_others_meanwhile_are_not_accepted():
    """The consumer's own generations are compared before a pull is accepted."""
    scene = Scene()
    for g, blocks in from_json(TARGET).items():
        scene.consumer.owner.retire(g, blocks.ids[:1])
        break
    scene.fabric.reconnect(*(node.agent.endpoint.transport.name for node in scene.nodes))
    result = scene.consumer.end_pull(scene.healthy)
    assert result["kind"] == "fence"
    assert "destination rows" in result["error"]
    for node in scene.nodes:
        node.close()


def test_a_ticket_for_another_layout_than_the_peer_has_is_refused(scene):
    """The ticket's fingerprint is compared with the peer's."""
    ticket = scene.add("q").offer(OTHER_SOURCE, TOKENS)
    result = scene.pulled(forged(ticket, fingerprint="ab" * 32))
    assert result["kind"] == "ticket"
    assert "abab" in result["error"]
    scene.finish()


# ── writers, copies, slots ────────────────────────────────────────────────────────────


def test_a_writer_that_dies_fails_its_own_pull_and_its_rows_stay_put_until_a_fresh_engine():
    """What it had sent lies in sockets of our engine, and lands as long as that engine lives."""
    fabric, is_late = Fabric(), threading.Event()
    fabric.lands = is_late.is_set
    writer, consumer = (
        Node(encode(LAYOUT), fabric, name=name, options={**HURRY, "contact_seconds": 0.3})
        for name in "pc"
    )
    writer.fill(SOURCE)
    consumer.path(writer.address)
    engines = [node.agent.endpoint.transport for node in (writer, consumer)]
    names = [engine.name for engine in engines]
    fabric.cut(*names)
    number = consumer.begin_pull([writer.offer(SOURCE, TOKENS)], TARGET, direction="write")
    wait_for(lambda: bool(engines[0].writes))
    writer.agent.loop.stop()
    fabric.kill(names[0])
    fabric.reconnect(*names)
    assert consumer.end_pull(number)["kind"] == "peer"
    assert not consumer.wait_quiet(number, 1.0)
    assert consumer.held() > 0
    hurry(consumer)
    assert consumer.wait_quiet(number, 15)
    assert consumer.agent.endpoint.transport.name != names[1]
    consumer.wipe()
    is_late.set()
    time.sleep(0.1)
    assert (consumer.memory == CANARY).all()
    for node in (consumer, writer):
        node.close()


def test_a_failed_staging_copy_fails_its_own_pull_and_gives_its_slots_back():
    scene = Scene()
    staging = scene.add("q", options={"slot_bytes": 64})
    good = staging.agent.endpoint.arena
    for _ in range(6):  # more than there are slots
        staging.agent.endpoint.arena = Arena(hybrid_layout(num_slabs=2))
        ticket = staging.offer(OTHER_SOURCE, TOKENS)
        result = scene.pulled(ticket, direction="slots", digest="off")
        assert result["kind"] == "transport", result
        staging.agent.endpoint.arena = good
    stage = staging.agent.endpoint.stage
    wait_for(lambda: stage.num_free == 4)
    ticket = staging.offer(OTHER_SOURCE, TOKENS)
    assert "error" not in scene.pulled(ticket, direction="slots")
    scene.finish()
    for node in scene.nodes:
        node.close()


# ── quiet ─────────────────────────────────────────────────────────────────────────────


def test_tickets_outlive_the_engine_and_a_healthy_pull_ends_before_it_is_replaced(scene):
    consumer = scene.consumer
    ticket = consumer.offer(OTHER_SOURCE, TOKENS)
    consumer.fill(OTHER_SOURCE, 3)
    engine = consumer.agent.endpoint.transport.name
    stuck = scene.add("stuck")
    cable = [node.agent.endpoint.transport.name for node in (stuck, consumer)]
    consumer.path(stuck.address)
    scene.fabric.cut(*cable)
    number = consumer.begin_pull(
        [stuck.offer(OTHER_SOURCE, TOKENS)],
        rows_for(LAYOUT, TOKENS, 9, among=(12, 24)),
        direction="read",
        deadline=0.3,
    )
    assert consumer.end_pull(number)["kind"] == "timeout"
    scene.finish()
    hurry(consumer)
    assert consumer.wait_quiet(number, 15)
    assert consumer.agent.endpoint.transport.name != engine
    reader = scene.node("reader")
    scene.nodes.append(reader)
    assert "error" not in reader.pull([ticket], OTHER_TARGET)
    assert reader.check(OTHER_TARGET, 0, TOKENS, 3) == ""


@pytest.mark.parametrize("is_met", [True, False])
def test_a_pull_that_waits_for_the_fresh_engine_is_not_ended_with_the_old_one(is_met):
    """What moves when an engine is closed ends with it; what has not begun goes on."""
    fabric, layout = Fabric(), hybrid_layout(num_slabs=36)
    first, second = (rows_for(layout, TOKENS, 5, among=among) for among in ((12, 24), (24, 36)))
    options = {**HURRY, "drain_seconds": 2.0, "quarantine_seconds": 0.1, "direction": "read"}
    stuck, good, consumer = (
        Node(encode(layout), fabric, name=name, options=options) for name in ("stuck", "good", "c")
    )
    good.fill(SOURCE, 2)
    consumer.path(stuck.address)
    if is_met:
        consumer.path(good.address)
    names = [node.agent.endpoint.transport.name for node in (stuck, consumer)]
    fabric.cut(*names)
    pulls = [
        consumer.begin_pull([stuck.offer(rows, TOKENS)], rows, deadline=deadline)
        for rows, deadline in ((first, 10.0), (second, 0.2))
    ]
    wait_for(lambda: consumer.agent.endpoint.is_draining)
    result = consumer.pull([good.offer(SOURCE, TOKENS)], TARGET, digest="always")
    assert "error" not in result, result
    assert consumer.agent.endpoint.transport.name != names[1]
    assert consumer.end_pull(pulls[0])["kind"] == "peer"
    for node in (consumer, stuck, good):
        node.close()


def test_failed_posts_that_concern_no_rows_are_bounded_too(monkeypatch):
    """Probes and fences that fail wait for a fresh engine as well, and there are never many."""
    monkeypatch.setattr("kvstow.transfer.quarantine.MOST_FAILED", 4)
    fabric = Fabric(lands=lambda: False)
    failing = [True]

    def fails(copy: int) -> None:
        if failing:
            raise TransferError("a copy has failed", kind="transport")

    options = {**HURRY, "quarantine_seconds": 0.3}
    producer = Node(encode(LAYOUT), fabric, name="p", options=options)
    transport = LocalTransport(fabric, before_copy=fails, piece_bytes=1 << 20)
    consumer = Node(encode(LAYOUT), name="c", options=options, transport=transport)
    for _ in range(8):
        with pytest.raises(TransferError):
            consumer.path(producer.address)
    failing.clear()
    wait_for(lambda: not consumer.agent.endpoint.flights)
    assert consumer.agent.endpoint.transport is not transport
    producer.fill(SOURCE)
    assert "error" not in consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    for node in (consumer, producer):
        node.close()


# ── threads and ends ──────────────────────────────────────────────────────────────────


def test_a_closed_agent_refuses_and_writes_into_no_file():
    node = Node(encode(LAYOUT), Fabric(), name="p", options=HURRY)
    ticket = Ticket.parse(node.offer(SOURCE, TOKENS))
    node.close()
    files = [os.open("/dev/null", os.O_RDWR) for _ in range(8)]
    readers = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]
    try:
        for call in (
            lambda: node.offer(SOURCE, TOKENS),
            lambda: node.agent.pull(ticket, into=from_json(TARGET)),
            lambda: node.agent.keep(ticket),
            lambda: node.agent.withdraw(ticket),
        ):
            with pytest.raises(TransferError, match="closed"):
                call()
        for fd in readers:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
        assert node.held() == 0
    finally:
        for fd in (*files, *readers):
            os.close(fd)


def test_waiting_in_another_thread_leaves_the_pool_to_its_owner():
    fabric = Fabric()
    producer = Node(encode(LAYOUT), fabric, name="p", options=HURRY)
    producer.fill(SOURCE)
    pool = Pool(LAYOUT)
    arena = Arena(LAYOUT)
    with Agent(arena, pool, transport=LocalTransport(fabric), identity=IDENTITY) as agent:
        into = {
            g: Blocks(pool.hold(g, len(blocks)), blocks.index)
            for g, blocks in from_json(TARGET).items()
        }
        ticket = Ticket.parse(producer.offer(SOURCE, TOKENS))
        before = time.monotonic()
        transfer = agent.pull(ticket, into=into)
        outcome: list[Any] = []
        other = threading.Thread(target=lambda: outcome.append(transfer.wait(10)))
        other.start()
        other.join()
        assert outcome[0].fence == "passed"
        assert 0 < outcome[0].seconds <= time.monotonic() - before
        agent.settle()
        for g, blocks in into.items():
            pool.release(g, blocks.ids)
        assert all(pool.num_held(g) == 0 for g in range(len(LAYOUT.groups)))
    producer.close()


def test_settling_in_a_foreign_thread_is_an_error_that_loses_nothing():
    pool = Pool(LAYOUT)
    with Agent(Arena(LAYOUT), pool, transport=LocalTransport(Fabric()), identity=IDENTITY) as agent:
        ids = pool.hold(0, 3)
        agent.withdraw(agent.offer_blocks({0: Blocks.first(ids)}, 12))
        pool.release(0, ids)
        has_ended = threading.Event()
        agent.loop.submit(has_ended.set)
        assert has_ended.wait(10)
        raised: list[BlockError] = []

        def settle() -> None:
            try:
                agent.settle()
            except BlockError as error:
                raised.append(error)

        other = threading.Thread(target=settle)
        other.start()
        other.join()
        assert len(raised) == 1
        assert pool.num_held(0) == 3
        agent.settle()
        assert pool.num_held(0) == 0


def test_a_callback_that_fails_is_told_in_the_log_and_ends_no_call_of_others(caplog):
    def fails(reason: str) -> None:
        raise RuntimeError(f"callback of a lease that was {reason}")

    node = Node(encode(LAYOUT), Fabric(), name="p", options=HURRY)
    blocks = from_json(SOURCE)
    node.agent.withdraw(node.agent.offer_blocks(blocks, TOKENS, on_end=fails))
    wait_for(lambda: node.held() == 0)
    assert "callback of a lease that was withdrawn" in caplog.text
    node.close()


def test_an_agent_without_an_identity_is_refused_and_says_what_to_do():
    with pytest.raises(TransferError, match=r"hint: .*Identity\.of") as caught:
        Agent(Arena(LAYOUT), Pool(LAYOUT), transport=LocalTransport(Fabric()))
    assert caught.value.kind == "refused"


def test_an_agent_whose_computation_nobody_has_verified_says_so(caplog):
    node = Node(encode(LAYOUT), Fabric(), name="p")
    node.close()
    assert "identity is not verified: bytes of a test" in caplog.text


def test_another_computation_of_the_same_shape_is_refused_in_words(scene):
    other = Node(encode(LAYOUT), scene.fabric, name="q", options=HURRY)
    other.close()
    arena = Arena(LAYOUT)
    identity = Identity.of_tensors("another", {}, [("w", "float32", b"other weights")])
    with Agent(arena, Pool(LAYOUT), transport=LocalTransport(scene.fabric), identity=identity) as a:
        ids = {0: Blocks.first(np.asarray(a.endpoint.owner.hold(0, 5)))}
        ticket = a.offer_blocks(ids, 20)
        with pytest.raises(TransferError, match="weights, configuration, adapter or salt differ"):
            scene.pulled(str(ticket))
        result = scene.pulled(forged(str(ticket), identity=IDENTITY.digest))
        assert result["kind"] == "refused"
        assert "another" in result["error"]
        a.endpoint.owner.release(0, ids[0].ids)
    scene.finish()


def test_a_callback_of_a_quiet_pull_that_fails_harms_nobody(scene, caplog):
    def fails() -> None:
        raise RuntimeError("callback of a quiet pull")

    other = scene.add("q")
    for direction in ("read", "write"):
        ticket = other.offer(OTHER_SOURCE, TOKENS)
        assert "error" not in scene.pulled(ticket, direction=direction, on_quiet=fails)
    assert "callback of a quiet pull" in caplog.text
    scene.finish()


def test_an_agent_closes_although_a_callback_of_a_quiet_pull_fails():
    def fails() -> None:
        raise RuntimeError("callback of a quiet pull")

    scene = Scene()
    number = scene.consumer.begin_pull(
        [scene.producer.offer(SOURCE, TOKENS)], OTHER_TARGET, direction="read", on_quiet=fails
    )
    for node in reversed(scene.nodes):
        node.close()
    assert scene.consumer.end_pull(number)["kind"] == "aborted"
    assert scene.consumer.held() == 0


def test_a_write_that_failed_does_not_keep_its_producer_from_pulling():
    """Both agents serve each other over one connection, which a failed write takes down."""
    fabric = Fabric()
    failing: list[bool] = []

    def fails(copy: int) -> None:
        if failing:
            failing.clear()
            raise TransferError("a copy has failed", kind="transport")

    one = Node(
        encode(LAYOUT), name="a", options=HURRY, transport=LocalTransport(fabric, before_copy=fails)
    )
    other = Node(encode(LAYOUT), fabric, name="b", options=HURRY)
    one.fill(SOURCE)
    other.fill(OTHER_SOURCE)
    assert "error" not in one.pull([other.offer(OTHER_SOURCE, TOKENS)], OTHER_TARGET)
    other.path(one.address)
    failing.append(True)
    assert "error" in other.pull([one.offer(SOURCE, TOKENS)], TARGET, direction="write")
    engine = other.agent.endpoint.transport.name
    wait_for(lambda: engine not in one.agent.endpoint.transport.peers)
    ticket = other.offer(OTHER_SOURCE, TOKENS)
    assert "error" not in one.pull([ticket], OTHER_TARGET, direction="read")
    for node in (one, other):
        node.close()


def test_only_rows_that_a_failed_pull_writes_to_are_counted_in_quarantine(scene):
    number = scene.consumer.begin_pull(
        [scene.producer.offer(SOURCE, TOKENS)],
        OTHER_TARGET,
        start_token=16,
        direction="read",
        deadline=0.3,
    )
    assert scene.consumer.end_pull(number)["kind"] == "timeout"
    order = scene.consumer.transfers[number].order
    rows = sum(map(len, order.written.values()))
    assert rows < sum(map(len, order.into.values()))
    wait_for(lambda: scene.consumer.agent.quarantine.rows == rows)
    scene.finish()


def test_rows_are_unknown_before_their_pull_can_end(monkeypatch):
    """An agent that settles by itself may have accepted it already."""
    node = Node(encode(LAYOUT), Fabric(), name="p", options=HURRY)
    ticket = Ticket.parse(node.offer(SOURCE, TOKENS))
    into = from_json(TARGET)

    def unknown() -> list[bool]:
        return [bool(node.owner.unknown(g, listed.ids).all()) for g, listed in into.items()]

    begun: list[list[bool]] = []
    monkeypatch.setattr(node.agent.pulls, "begin", lambda *how: begun.append(unknown()))
    monkeypatch.setattr(node.agent.loop, "submit", lambda command, on_error: command())
    node.agent.pull(ticket, into=into)
    assert begun == [[True] * len(into)]
    monkeypatch.undo()
    node.agent._owner.unquarantine(into, {g: np.ones(len(b), bool) for g, b in into.items()})
    node.close()
    with pytest.raises(TransferError, match="closed"):
        node.agent.pull(ticket, into=into)
    assert unknown() == [False] * len(into)


# ── a retry, a command, a callback that fails ─────────────────────────────────────────


def test_a_retry_into_rows_that_are_not_quiet_is_refused_and_harms_nobody():
    """It used to poison the agent: every later call raised, for healthy rows too."""
    fabric = Fabric()
    producer = Node(encode(LAYOUT), fabric, name="p", options=HURRY)
    owner = Pool(LAYOUT)
    held = {0: Blocks.first(owner.hold(0, 5)), 1: Blocks.first(owner.hold(1, 5))}
    held[2] = Blocks.first(owner.hold(2, 1))
    other = {g: Blocks.first(owner.hold(g, len(held[g]))) for g in held}
    arena, local = Arena(LAYOUT), LocalTransport(fabric)
    with Agent(arena, owner, transport=local, identity=IDENTITY) as agent:
        producer.fill(SOURCE)
        ticket = Ticket.parse(producer.offer(SOURCE, TOKENS, readers=9))
        agent.pull(ticket, into=held).wait(10)
        names = producer.agent.endpoint.transport.name, local.name
        fabric.cut(*names)
        failed = agent.pull(ticket, into=held, deadline=0.2)
        with pytest.raises(TransferError, match="in quarantine already"):
            agent.pull(ticket, into=held)
        with pytest.raises(TransferError, match="no end within"):
            failed.wait(10)
        with pytest.raises(TransferError, match="in quarantine already"):
            agent.pull(ticket, into=held)
        fabric.reconnect(*names)
        agent.pull(ticket, into=other).wait(10)
        assert failed.wait_quiet(10)
        agent.pull(ticket, into=held).wait(10)
        for blocks in (held, other):
            for g, listed in blocks.items():
                owner.release(g, listed.ids)
        agent.settle()
        assert [owner.num_held(g) for g in held] == [0, 0, 0]
    producer.close()


def test_what_fails_while_settling_ends_nothing_else_and_is_counted(caplog):
    node = Node(encode(LAYOUT), Fabric(), name="p", options=HURRY)
    done: list[int] = []

    def fails() -> None:
        raise BlockError("planted")

    node.agent._owner.defer(fails)
    node.agent._owner.defer(lambda: done.append(1))
    node.agent.settle()
    assert done == [1]
    assert "planted" in caplog.text
    assert node.metric("kvstow_transfer_errors_total", what="a deferred call") == 1
    node.close()


def test_a_pull_that_cannot_begin_ends_and_gives_its_rows_back(scene, monkeypatch):
    """It was only logged, and whoever waited for it did so for ever."""
    ticket = scene.producer.offer(SOURCE, TOKENS)

    def fails(*how: Any) -> None:
        raise ValueError("planted")

    held = scene.consumer.held()
    with monkeypatch.context() as planted:
        planted.setattr(scene.consumer.agent.pulls, "begin", fails)
        number = scene.consumer.begin_pull([ticket], OTHER_TARGET)
        result = scene.consumer.end_pull(number, 5)
    assert "planted" in result["error"]
    assert scene.consumer.wait_quiet(number, 0)
    assert scene.consumer.held() == held
    assert "error" not in scene.pulled(scene.add("q").offer(OTHER_SOURCE, TOKENS))
    scene.finish()


def test_rows_are_given_back_where_a_pull_is_not_even_submitted(scene, monkeypatch):
    def fails(**how: Any) -> None:
        raise ValueError("planted")

    held = scene.consumer.held()
    ticket = scene.producer.offer(SOURCE, TOKENS)
    monkeypatch.setattr("kvstow.transfer.agent.Order", fails)
    with pytest.raises(ValueError, match="planted"):
        scene.pulled(ticket)
    monkeypatch.undo()
    assert scene.consumer.held() == held
    assert "error" not in scene.pulled(scene.add("q").offer(OTHER_SOURCE, TOKENS))
    scene.finish()


# ── nothing grows without bound ───────────────────────────────────────────────────────


def test_agents_that_nobody_needs_are_forgotten(scene, monkeypatch):
    monkeypatch.setattr("kvstow.transfer.peers.outgoing.MOST_PEERS", 4)
    peers = scene.consumer.agent.peers
    for port in range(2, 40):
        peers.at(f"tcp://127.0.0.1:{port}", "")
    wait_for(lambda: len(peers.all) <= 4)
    assert scene.producer.address in {address for address, _ in peers.all}, "it is being read"
    scene.finish()


def test_dead_engines_and_claims_of_peers_are_remembered_in_bounded_numbers(scene):
    endpoint = scene.consumer.agent.endpoint
    for number in range(2000):
        endpoint.note_gone(f"engine-{number}")
    assert len(endpoint.gone) <= 1024
    assert "engine-1999" in endpoint.gone
    (guest,) = scene.producer.agent.server.incoming.values()
    layers = tuple(LAYOUT.layers)
    for number in range(100):
        guest.share((Claim(layers[:1], (("k", (((0, 1), (0, number % 3 + 1)),)),)),) * number)
    assert guest.share.cache_info().currsize <= 16
    scene.finish()


# ── adapter and salt ──────────────────────────────────────────────────────────────────


def test_a_plain_pull_compares_adapter_and_salt_of_the_request(scene):
    """Equal layouts and weights do not make requests of two tenants one."""
    mine = IDENTITY.for_request(salt="tenant a")
    other = scene.add("q")
    ticket = Ticket.parse(other.offer(OTHER_SOURCE, TOKENS, identity=mine))
    into = from_json(OTHER_TARGET)
    pull = scene.consumer.agent.pull
    for theirs in (None, IDENTITY.for_request(salt="tenant b"), IDENTITY):
        with pytest.raises(TransferError, match="adapter or salt differ"):
            pull(ticket, into=into, identity=theirs)
    pull(ticket, into=into, identity=mine).wait(10)
    scene.finish()
