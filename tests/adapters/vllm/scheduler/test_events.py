"""Events of the tiers of an engine whose requests grow."""

import pytest

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import EngineRequest
from kvstow.adapters.vllm.scheduler.events import TierEvents
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.events.announce import Announcer
from kvstow.events.format import BlockStored
from kvstow.offload.watch import TierChange
from pretended_engine import RecallAlone
from recorded_vllm import IDENTITY, engine_state, one_group

BLOCK, NUM_BLOCKS = 4, 8


def test_a_request_that_grows_is_remembered_block_by_block(monkeypatch: pytest.MonkeyPatch):
    """And once more when it ends: what was remembered longest is forgotten first."""
    told: list[int] = []
    know = Announcer.know

    def counted(self: Announcer, hashes: list[int], *arguments: object, **named: object) -> None:
        told.append(len(hashes))
        know(self, hashes, *arguments, **named)  # pyright: ignore

    monkeypatch.setattr(Announcer, "know", counted)
    engine = engine_state(one_group(), ConnectorOptions(host_bytes=1 << 20), num_blocks=100)
    events = TierEvents(engine.groups, (0,), BLOCK)
    recall, _ = RecallAlone.of(engine, events)
    tokens, hashes = list[int](), list[bytes]()
    request = EngineRequest(id="r", tokens=tokens, hashes=hashes)
    recall.ask(request)
    ids = (tuple(range(1, NUM_BLOCKS + 1)),)
    for k in range(NUM_BLOCKS):
        tokens.extend(range(k * BLOCK, (k + 1) * BLOCK))
        if k != 3:  # the engine hashes two blocks at once
            hashes.extend(j.to_bytes(32, "big") for j in range(100 + len(hashes), 101 + k))
        recall.computed("r", len(tokens), ids)
    assert told == [1, 1, 1, 2, 1, 1, 1]
    recall.ended("r", ids, len(tokens))
    assert told[7:] == [NUM_BLOCKS]
    keys = RequestKeys(IDENTITY, request, {BLOCK}).of(BLOCK, len(tokens))
    events.changed([TierChange("host", 0, tuple(keys[2:6]), stored=True)])
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.block_hashes) == (101, [102, 103, 104, 105])
    assert event.token_ids == tokens[2 * BLOCK : 6 * BLOCK]
