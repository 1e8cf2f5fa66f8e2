"""Pulls between real processes over NIXL, and between threads over the local transport."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.memory.digest import DigestCount
from kvstow.plan.group import grouped
from kvstow.plan.manifest import encode
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from kvstow.route.blocks import Blocks, Tokens
from kvstow.transfer.channel.messages import Sample, TellDigest
from kvstow.transfer.pull import (
    INLINE_BYTES,
    at_once,
    check_still_ours,
    compare_digests,
    in_worker,
    meet,
    meet_all,
    ready_counts,
    written_rows,
)
from kvstow.transfer.tickets.ticket import KEY_BYTES, Ticket
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, attention, hybrid_layout, rows_for
from waiting import wait_for


@pytest.fixture(params=["local", "nixl"])
def pair(request: pytest.FixtureRequest, other) -> Iterator[tuple[Any, Node]]:
    """A producer, in another process over NIXL, and a consumer here."""
    manifest = encode(hybrid_layout())
    fabric = Fabric() if request.param == "local" else None
    name = f"producer-{request.node.name}"
    producer = Node(manifest, fabric, name=name) if fabric else other.node(manifest, name)
    consumer = Node(manifest, fabric, name="consumer")
    yield producer, consumer
    consumer.close()
    producer.close()


TOKENS = 18


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("digest", ["always", "sample", "off"])
def test_a_pulled_request_is_byte_exact_in_every_group(pair, direction, digest):
    producer, consumer = pair
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    producer.fill(source)
    ticket = producer.offer(source, TOKENS)
    stats = consumer.pull([ticket], target, direction=direction, digest=digest)
    assert stats["fence"] == "passed"
    assert stats["directions"] == [direction]
    assert stats["digest"] == ("off" if digest == "off" else "passed")
    assert stats["bytes"] > 0
    assert consumer.check(target, 0, TOKENS) == ""


@pytest.mark.parametrize(
    ("here", "there", "descriptors"),
    [
        ([3, 4, 5, 6], [7, 8, 9, 10], 1),
        ([3, 4, 8, 9], [3, 4, 6, 7], 2),
        ([6, 5, 4, 3], [3, 4, 5, 6], 4),
        ([2, 4, 6, 8], [1, 3, 5, 7], 4),
    ],
)
def test_rows_that_are_neighbours_on_both_sides_are_one_descriptor(other, here, there, descriptors):
    layout = packed(grouped([attention("layers.0", Full())]), num_slabs=12)
    producer = other.node(encode(layout), f"producer-{here}")
    consumer = Node(encode(layout))
    index = [0, 1, 2, 3]
    producer.fill({"0": [there, index]})
    stats = consumer.pull([producer.offer({"0": [there, index]}, 16)], {"0": [here, index]})
    assert stats["descriptors"] == descriptors
    assert stats["bytes"] == 4 * layout.row_bytes(0)
    assert consumer.check({"0": [here, index]}, 0, 16) == ""
    consumer.close()
    producer.close()


@pytest.mark.parametrize(
    ("theirs", "ours"), [(64, 64), (1 << 20, 128), (40, 1 << 16), (None, None)]
)
@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_rows_may_go_through_slots_of_any_size(other, transport, theirs, ours):
    fabric, manifest = Fabric(), encode(hybrid_layout())
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    name = f"slots-{theirs}-{ours}"
    if transport == "local":
        producer = Node(manifest, fabric, name=name, options={"slot_bytes": theirs})
        consumer = Node(manifest, fabric, options={"slot_bytes": ours})
    else:
        producer = other.node(manifest, name, options={"slot_bytes": theirs})
        consumer = Node(manifest, options={"slot_bytes": ours})
    for salt in range(6):  # more pieces than slots, more pulls than slots
        producer.fill(source, salt)
        consumer.wipe()
        ticket = producer.offer(source, TOKENS)
        stats = consumer.pull([ticket], target, direction="slots", digest="always")
        assert stats.get("directions") == ["slots"], stats
        assert consumer.check(target, 0, TOKENS, salt) == ""
    wait_for(lambda: producer.held() == 0)
    consumer.close()
    producer.close()


def test_what_happened_is_counted_and_told(pair):
    producer, consumer = pair
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    producer.fill(source)
    ticket = producer.offer(source, TOKENS)
    stats = consumer.pull([ticket], target, direction="read")
    named = Ticket.parse(ticket)
    wait_for(lambda: not consumer.agent.peers.at(named.address, named.key).readers)
    refused = consumer.pull([ticket], target, direction="read")
    assert refused["kind"] == "used"
    assert consumer.metric("kvstow_transfers_total", outcome="accepted") == 1
    assert consumer.metric("kvstow_transfers_total", outcome="used") == 1
    moved = consumer.metric("kvstow_transfer_bytes_total", direction="read")
    assert moved >= stats["bytes"]
    assert consumer.metric("kvstow_transfer_seconds_count") == 1
    assert 0 < stats["seconds"] < 20
    assert producer.metric("kvstow_transfer_lease_ends_total", reason="read") == 1
    assert producer.metric("kvstow_transfer_leases") == 0
    told = [event.what for event in consumer.agent.telemetry.events.recent("transfer")]
    assert told.count("transfer") == 2
    assert "connected" in told
    text = consumer.agent.telemetry.exposition().decode()
    assert 'kvstow_transfers_total{outcome="accepted"} 1.0' in text
    status = consumer.status()
    assert [peer["state"] for peer in status["peers"]] == ["ready"]
    assert status["peers"][0]["moved_bytes"] >= stats["bytes"]
    assert status["quarantined_rows"] == 0
    (guest,) = producer.status()["guests"]
    assert (guest["name"], guest["moved_bytes"]) == ("consumer", stats["bytes"])


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_producer_counts_what_was_pulled_from_it(pair, direction):
    producer, consumer = pair
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    producer.fill(source)
    pulled = consumer.pull([producer.offer(source, TOKENS)], target, direction=direction)["bytes"]
    wait_for(lambda: producer.status()["guests"][0]["moved_bytes"])
    assert producer.metric("kvstow_transfer_served_bytes_total", direction=direction) == pulled
    assert producer.metric("kvstow_transfer_bytes_total", direction=direction) == 0


def test_the_row_in_which_a_pull_begins_is_written_to():
    """It is in quarantine until nothing writes to it."""
    layout = packed(grouped([attention("a", Full())]), num_slabs=8)
    into = {0: Blocks.first(np.arange(1, 5))}
    for start, first in ((0, 0), (3, 0), (4, 1), (6, 1), (7, 1), (8, 2)):
        written = written_rows(layout, into, Tokens(start, 16))[0]
        assert written.index.tolist() == list(range(first, 4)), start


def test_rows_of_a_pull_that_ordered_nothing_are_quiet_at_once(monkeypatch):
    fabric, manifest = Fabric(), encode(hybrid_layout())
    producer = Node(manifest, fabric, name="producer")
    consumer = Node(manifest, fabric, name="consumer")
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    producer.fill(source)
    consumer.agent.connect(producer.address)

    def attach(card, user):
        raise TransferError("no such engine, on purpose", kind="peer")

    monkeypatch.setattr(consumer.agent.endpoint, "attach", attach)
    number = consumer.begin_pull([producer.offer(source, TOKENS)], target, direction="write")
    assert "on purpose" in consumer.end_pull(number)["error"]
    assert consumer.wait_quiet(number, 5)
    assert consumer.held() == 0
    for node in (consumer, producer):
        node.close()


# ── meeting and accepting, step by step ───────────────────────────────────────────────


class Offer:
    """A source of whose agent the card of the first start is known; what goes wrong is set."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.layout = hybrid_layout()
        self.key = bytes(KEY_BYTES)
        self.peer = SimpleNamespace(
            name="producer",
            state="ready",
            card=SimpleNamespace(start="first"),
            fingerprint="ab",
            ticket_key=self.key,
            met=self.met,
            ping=self.ping,
        )
        ids = np.arange(self.layout.groups[0].rows_per_slab, 8)
        self.ticket = Ticket(
            agent="producer",
            start="first",
            address="tcp://127.0.0.1:1",
            key="",
            lease=1,
            lease_seconds=1.0,
            fingerprint="ab",
            num_tokens=4,
            blocks={0: Blocks.first(ids)},
            generations={0: np.ones_like(ids)},
        ).signed(self.key)
        self.route: Any = "a route"
        self.mapped: Any = None
        self.claims = None
        self.answer: tuple[int, ...] = ()
        self.mailbox = SimpleNamespace(wait=self.wait)

    def met(self) -> Any:
        self.log.append("met")
        return
        yield

    def ping(self) -> Any:
        self.log.append("ping")
        self.peer.card = SimpleNamespace(start="second")
        return
        yield

    def wait(self, kind: type) -> Any:
        self.log.append(kind.__name__)
        return TellDigest(0, self.answer)
        yield

    def fault(self, what: str, kind: Any) -> TransferError:
        return TransferError(what, kind=kind, peer="producer")


def run(routine: Any) -> None:
    for _ in routine:
        raise AssertionError("it waits")


def test_an_agent_that_wrote_the_ticket_is_met_once():
    offer = Offer()
    run(meet(offer))  # type: ignore
    assert offer.log == ["met"]


def test_an_agent_that_was_started_again_is_asked_before_its_ticket_is_refused():
    of_the_second = Offer()
    of_the_second.ticket = replace(of_the_second.ticket, start="second").signed(of_the_second.key)
    run(meet(of_the_second))  # type: ignore
    assert of_the_second.log == ["met", "ping", "met"]
    of_another = Offer()
    of_another.ticket = replace(of_another.ticket, start="zeroth").signed(of_another.key)
    with pytest.raises(TransferError, match="earlier start") as error:
        run(meet(of_another))  # type: ignore
    assert error.value.kind == "expired"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"fingerprint": "cd"}, "for layout cd, it has ab"),
        ({"signature": bytes(16)}, "not as it was written there"),
        ({"blocks": {0: Blocks.first([0])}, "generations": {0: np.ones(1, np.int64)}}, "producer"),
    ],
)
def test_a_ticket_that_its_agent_has_not_written_for_its_rows_is_refused(
    change: dict[str, Any], what: str
):
    offer = Offer()
    offer.ticket = replace(offer.ticket, **change)
    if "signature" not in change:
        offer.ticket = offer.ticket.signed(offer.key)
    with pytest.raises(TransferError, match=what) as error:
        run(meet(offer))  # type: ignore
    assert error.value.kind == "ticket"


def test_nothing_begins_while_our_engine_is_about_to_be_replaced():
    offer, endpoint = Offer(), SimpleNamespace(is_draining=True)
    meeting = meet_all(endpoint, [offer])  # type: ignore
    assert next(meeting, "met") != "met"
    endpoint.is_draining, offer.peer.state = False, "lost"
    assert next(meeting, "met") != "met"
    offer.peer.state = "ready"
    assert next(meeting, "met") == "met"


PARTS = [Sample(("layers.0",), None, 0, 4, 1, 0), Sample(("layers.1",), None, 4, 8, 1, 0)]


def compared(here: tuple[int, ...], there: list[tuple[int, ...]], *offers: Offer) -> None:
    run(compare_digests(here, there, offers, PARTS))  # type: ignore


def test_digests_are_compared_with_the_sum_of_what_all_sources_have():
    tells, is_mapped, brings_nothing = Offer(), Offer(), Offer()
    tells.answer, is_mapped.mapped, brings_nothing.route = (1, 2), "memory", None
    offers = tells, is_mapped, brings_nothing
    compared((11, 22), [(10, 20)], *offers)
    assert [offer.log for offer in offers] == [["TellDigest"], [], []]
    with pytest.raises(TransferError, match=r"layers.1.*tokens \[4, 8\)") as error:
        compared((11, 23), [(10, 20)], *offers)
    assert error.value.kind == "digest"
    assert "layers.0" not in str(error.value)
    tells.answer = (1,)
    with pytest.raises(TransferError, match="1 digests, not 2"):
        compared((11, 22), [(10, 20)], *offers)


def test_only_mapped_sources_that_bring_something_are_counted_here():
    into = {0: Blocks.first([3, 4])}
    endpoint: Any = SimpleNamespace(arena="ours", layout=SimpleNamespace(row_bytes=lambda g: 1))
    order: Any = SimpleNamespace(into=into, digest="always")
    brings, brings_nothing, tells = Offer(), Offer(), Offer()
    brings.mapped = brings_nothing.mapped = SimpleNamespace(arena="theirs")
    brings_nothing.route = None
    offers: Any = brings, brings_nothing, tells
    counts: list[Any] = []
    run(ready_counts(endpoint, order, offers, tuple(PARTS), counts))
    assert len(counts) == 2


@pytest.mark.parametrize(
    ("kind", "row_bytes", "digest", "is_here"),
    [
        ("DRAM", 1, "sample", True),
        ("DRAM", INLINE_BYTES, "sample", False),
        ("VRAM", INLINE_BYTES, "sample", True),
        ("DRAM", 1, "always", False),
    ],
)
def test_small_samples_and_those_on_a_device_are_counted_here(
    monkeypatch, kind, row_bytes, digest, is_here
):
    monkeypatch.setattr("kvstow.transfer.pull.ready_digests", lambda *_: None)
    layout = SimpleNamespace(row_bytes=lambda g: row_bytes)
    endpoint: Any = SimpleNamespace(arena="ours", kind=kind, layout=layout)
    order: Any = SimpleNamespace(into={0: Blocks.first([3, 4])}, digest=digest)
    counts: list[Any] = []
    for _ in ready_counts(endpoint, order, [], tuple(PARTS), counts):
        pass
    assert [count.func for count in counts] == [at_once if is_here else in_worker]


def test_rows_that_were_given_to_others_meanwhile_are_not_accepted():
    into = {0: Blocks.first([3, 4])}
    order: Any = SimpleNamespace(written=into, generations={0: np.array([7, 8])})
    for now in ([7, 8], [7, 9]):
        endpoint: Any = SimpleNamespace(generations=lambda blocks, now=now: {0: np.array(now)})
        if now == [7, 8]:
            check_still_ours(endpoint, order)
            continue
        with pytest.raises(TransferError, match="given to other requests") as error:
            check_still_ours(endpoint, order)
        assert error.value.kind == "fence"


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_device_reads_nothing_for_a_digest_any_more_when_its_pull_has_ended(is_dropped):
    """It may be a peer's memory, which may be unmapped then."""
    events: list[str] = []

    def take():
        events.append("reads")

        def values() -> tuple[int, ...]:
            events.append("has read")
            raise RuntimeError("the device has failed")

        return values

    counting = at_once(DigestCount(take))
    next(counting)
    if is_dropped:
        counting.close()
    else:
        with pytest.raises(TransferError, match="given up"):
            counting.throw(TransferError("given up", kind="aborted"))
    assert events == ["reads", "has read"]
