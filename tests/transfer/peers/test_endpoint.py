"""This process's side of transfers: its engine."""

import pytest

from kvstow.errors import TransferError
from kvstow.plan.manifest import encode
from kvstow.transfer.transport.base import Region
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import Node, hybrid_layout


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
