"""Events of the tiers of an engine whose requests grow."""

import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from connected_engine import PROMPT, Engine, Role, cache_config, request, vllm_config
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import EngineRequest
from kvstow.adapters.vllm.scheduler.events import TierEvents, check_published
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.errors import SpecError
from kvstow.events.announce import Announcer
from kvstow.events.format import BlockStored, CacheEvent
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


def events_of(engine: Engine, count: int) -> list[CacheEvent]:
    found: list[CacheEvent] = []
    until = time.monotonic() + 20
    while len(found) < count and time.monotonic() < until:
        engine.step()
        found += engine.scheduler.take_events()
        time.sleep(0.01)
    return found


def test_rows_that_come_to_host_and_disk_are_told_by_vllms_hashes(
    connector: ModuleType, tmp_path: Path
):
    engine = Engine(
        connector,
        in_process=True,
        host_bytes=1 << 20,
        disk_path=str(tmp_path),
        disk_bytes=1 << 24,
        events=True,
    )
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    events = events_of(engine, 2)
    assert [event.medium for event in events if isinstance(event, BlockStored)] == [
        "CPU",
        "STORAGE",
    ]
    for event in events:
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [0xFEED0000 + k for k in range(4)]
        assert event.parent_block_hash is None
        assert event.token_ids == PROMPT[:16]
        assert (event.block_size, event.group_idx) == (4, 0)


def test_a_restarted_engine_tells_of_what_a_request_finds_on_disk(
    connector: ModuleType, tmp_path: Path
):
    tiers = {"host_bytes": 1 << 20, "disk_path": str(tmp_path), "disk_bytes": 1 << 24}
    first = Engine(connector, events=True, **tiers)
    first.compute(request("p"), [7, 8, 9, 10, 11])
    events_of(first, 2)
    first.worker.shutdown()
    second = Engine(connector, events=True, **tiers)
    second.scheduler.on_new_request(request("d"))
    (event,) = events_of(second, 1)
    assert isinstance(event, BlockStored)
    assert (event.medium, event.token_ids) == ("STORAGE", PROMPT[:16])


def test_events_without_a_publisher_or_without_tiers_are_refused(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    def made(**options: object) -> object:
        return connector.KvstowConnector(
            vllm_config(events=True, **options), Role.SCHEDULER, cache_config()
        )

    with pytest.raises(SpecError, match="hint: --kv-events-config"):
        made(publishes=False, host_bytes=1 << 20)
    with pytest.raises(SpecError, match="hint: set host_bytes"):
        made()
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    with pytest.raises(SpecError, match="as bytes"):
        made(host_bytes=1 << 20)


@pytest.mark.parametrize(
    ("endpoint", "warns"),
    [("tcp://*:5557", False), ("tcp://[::]:5557", False), ("tcp://127.0.0.1:5557", True)],
)
def test_an_endpoint_that_vllm_connects_to_is_warned_of(
    endpoint: str, warns: bool, caplog: pytest.LogCaptureFixture
):
    check_published(SimpleNamespace(enable_kv_cache_events=True, endpoint=endpoint))
    assert ("hear nothing" in caplog.text) == warns
