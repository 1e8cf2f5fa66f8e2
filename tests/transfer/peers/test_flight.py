"""Posts of one move: all are made, or none is left behind."""

from typing import Any

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.plan.manifest import encode
from kvstow.route.copies import Copies
from kvstow.transfer.peers.flight import move_copies
from kvstow.transfer.transport.base import Kinds
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, hybrid_layout


def test_posts_are_dropped_if_a_later_one_cannot_be_made(monkeypatch):
    fabric = Fabric()
    here, there = (Node(encode(hybrid_layout()), fabric, n, is_started=False) for n in "ab")
    endpoint, card = here.agent.endpoint, there.agent.endpoint.card
    endpoint.attach(card, "a test")
    made: list[Any] = []
    prepare = endpoint.transport.prepare

    def prepared(*how: Any) -> Any:
        if len(made) == 2:
            raise TransferError("no more", kind="transport")
        made.append(prepare(*how))
        made[-1].release = lambda: released.append(1)
        return made[-1]

    released: list[int] = []
    monkeypatch.setattr(endpoint.transport, "prepare", prepared)
    at = np.arange(3) * 64
    copies = Copies(card.base + at, endpoint.card.base + at, np.full(3, 64))
    with pytest.raises(TransferError, match="no more"):
        next(move_copies(endpoint, "read", card.engine, Kinds(), copies, flights=[], chunk=64))
    assert released == [1, 1]
    for node in (here, there):
        node.close()
