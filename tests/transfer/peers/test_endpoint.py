"""This process's side of transfers: its engine, and what becomes of posts when that is closed."""

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.plan.manifest import encode
from kvstow.route.copies import Copies
from kvstow.transfer.transport.base import Kinds, Region
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import Node, hybrid_layout

MANIFEST = encode(hybrid_layout())


class Scarce(LocalTransport):
    """An engine after which no other one gets memory."""

    is_first = True

    def fresh(self) -> "Scarce":
        made = Scarce(self.fabric)
        made.is_first = False
        return made

    def register(self, region: Region) -> None:
        if not self.is_first:
            raise TransferError("no memory to register", kind="transport")
        super().register(region)


def test_a_fresh_engine_that_gets_no_memory_is_closed_and_the_old_one_goes_on():
    fabric = Fabric()
    node = Node(encode(hybrid_layout()), transport=Scarce(fabric), is_started=False)
    endpoint = node.agent.endpoint
    engine = endpoint.transport
    for _ in range(3):
        with pytest.raises(TransferError, match="no memory"):
            endpoint.replace_engine()
    assert endpoint.transport is engine
    assert list(fabric.members) == [engine.name]
    node.close()


@pytest.mark.parametrize("how", ["replace", "close"])
def test_a_post_under_way_when_its_engine_is_closed_is_quiet_and_has_not_arrived(how):
    fabric = Fabric()
    here, there = (Node(MANIFEST, fabric, name=name, is_started=False) for name in "ab")
    endpoint, card = here.agent.endpoint, there.agent.endpoint.card
    endpoint.attach(card, "a test")
    fabric.cut(endpoint.transport.name, card.engine)
    copies = Copies.one(card.base, endpoint.card.base, 64)
    done: list[bool] = []
    flight = endpoint.post("read", card.engine, Kinds(), copies)
    flight.after(lambda: done.append(True))
    flight.start()
    assert not flight.poll()
    assert not flight.is_quiet
    endpoint.replace_engine() if how == "replace" else endpoint.close()
    assert flight.is_quiet
    assert done == [True]
    assert not endpoint.flights
    with pytest.raises(TransferError, match="our engine was closed"):
        flight.poll()
    for node in (here, there):
        node.close()


def test_a_post_that_had_arrived_stays_so():
    fabric = Fabric()
    here, there = (Node(MANIFEST, fabric, name=name, is_started=False) for name in "ab")
    endpoint, card = here.agent.endpoint, there.agent.endpoint.card
    there.memory[:64] = np.arange(64)
    endpoint.attach(card, "a test")
    copies = Copies.one(card.base, endpoint.card.base, 64)
    flight = endpoint.post("read", card.engine, Kinds(), copies)
    flight.start()
    while not flight.poll():
        pass
    endpoint.replace_engine()
    assert flight.poll()
    assert here.memory[:64].tolist() == list(range(64))
    for node in (here, there):
        node.close()


def test_a_peer_that_we_have_disconnected_is_not_taken_for_dead():
    fabric = Fabric()
    here, there = (Node(MANIFEST, fabric, name=name, is_started=False) for name in "ab")
    endpoint, card = here.agent.endpoint, there.agent.endpoint.card
    endpoint.attach(card, "a test")
    copies = Copies.one(card.base, endpoint.card.base, 64)
    flight = endpoint.post("read", card.engine, Kinds(), copies)
    endpoint.broken.add(card.engine)
    endpoint.detach(card.engine, "a test")
    with pytest.raises(TransferError, match="not connected here") as caught:
        flight.start()
    assert caught.value.kind == "transport"
    assert not endpoint.gone
    for node in (here, there):
        node.close()


class Clinging(LocalTransport):
    """An engine that does not let go of peers."""

    def disconnect(self, peer: str) -> None:
        super().disconnect(peer)
        raise TransferError("nixlBackendError", kind="transport", peer=peer)


def test_an_engine_that_does_not_let_go_of_a_peer_is_to_be_replaced():
    """The error came out of `detach`, where somebody had more to undo: a consumer heard that its
    transfer had stopped while bytes were on their way, and leases never ran out."""
    fabric = Fabric()
    here = Node(MANIFEST, transport=Clinging(fabric), is_started=False)
    there = Node(MANIFEST, fabric, is_started=False)
    endpoint, card = here.agent.endpoint, there.agent.endpoint.card
    endpoint.attach(card, "a test")
    fabric.cut(endpoint.transport.name, card.engine)
    flight = endpoint.post("read", card.engine, Kinds(), Copies.one(card.base, card.base, 64))
    flight.start()
    assert endpoint.faulty_since is None
    endpoint.broken.add(card.engine)
    endpoint.detach(card.engine, "a test")
    assert endpoint.faulty_since is not None
    assert not flight.is_quiet
    endpoint.replace_engine()
    assert endpoint.faulty_since is None
    assert flight.is_quiet
    for node in (here, there):
        node.close()


class Nameless(LocalTransport):
    """An engine after which no other one can be told about."""

    def fresh(self) -> "LocalTransport":
        made = Nameless(self.fabric)
        made.metadata = self._nothing  # type: ignore[method-assign]
        return made

    def _nothing(self) -> bytes:
        raise TransferError("no metadata", kind="transport")


def test_a_fresh_engine_without_metadata_is_closed_and_the_old_one_goes_on():
    fabric = Fabric()
    node = Node(MANIFEST, transport=Nameless(fabric), is_started=False)
    endpoint = node.agent.endpoint
    engine, card = endpoint.transport, endpoint.card
    with pytest.raises(TransferError, match="no metadata"):
        endpoint.replace_engine()
    assert (endpoint.transport, endpoint.card) == (engine, card)
    assert list(fabric.members) == [engine.name]
    node.close()
