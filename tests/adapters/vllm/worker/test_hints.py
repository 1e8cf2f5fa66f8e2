"""Hints of requests, obeyed in a real host tier."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstow.adapters.vllm.cache.layout import declared_layout
from kvstow.adapters.vllm.protocol import EngineRequest, HintedRows, StepOrders, StepResults
from kvstow.adapters.vllm.worker import hints
from kvstow.adapters.vllm.worker.hints import RowHints
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.plan.layout import Layout
from recorded_vllm import one_group

NUM_ROWS = 11


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hints, "monotonic", made)
    return made


@pytest.fixture
def layout() -> Layout:
    return declared_layout(one_group(), base_align=64)


@pytest.fixture
def host(layout: Layout) -> HostTier:
    made = HostTier(layout, capacity=16 * layout.row_bytes(0))
    fill(made, range(100, 116))
    assert made.usage.rows == NUM_ROWS, "rows are aligned, and one is nobody's"
    made.evict(0, made.keys(0))
    return made


def key(k: int) -> bytes:
    return k.to_bytes(32, "big")


def fill(tier: Any, ks: Sequence[int]) -> None:
    row = np.zeros(tier.layout.row_bytes(0), np.uint8)
    tier.store(0, [key(k) for k in ks], [row] * len(ks))


def here(host: HostTier) -> set[int]:
    return {int.from_bytes(each, "big") for each in host.keys(0)}


def told(part: RowHints, action: Any, ks: Sequence[int], seconds: float = 60.0) -> None:
    rows = HintedRows(action=action, seconds=seconds, keys=(tuple(key(k) for k in ks),))
    part.save(StepOrders(hints=[rows]))
    part.report(StepResults())


def test_retained_rows_outlive_those_that_were_used_after_them(host: HostTier, clock: Clock):
    fill(host, range(1, NUM_ROWS + 1))
    told(RowHints(host, [0], []), "retain", [1, 2])
    fill(host, range(20, 20 + NUM_ROWS - 2))
    assert {1, 2} <= here(host)
    fill(host, [30, 31])
    assert not {1, 2} & here(host), "only as if they had been used"


def test_pinned_rows_stay_as_long_as_is_said_within_a_quarter_of_the_tier(
    host: HostTier, clock: Clock
):
    """Also those that are still on their way to it."""
    part = RowHints(host, [0], [])
    fill(host, [1])
    told(part, "pin", range(1, 7), seconds=10.0)
    fill(host, range(2, 7))
    clock.now += 1.0
    part.report(StepResults())
    fill(host, range(20, 20 + NUM_ROWS))
    assert {*range(1, 7)} & here(host) == {1, 2, 3, 4}
    clock.now += 10.0
    part.report(StepResults())
    fill(host, range(40, 40 + NUM_ROWS))
    assert not {1, 2, 3, 4} & here(host)
    host.check()


def test_pins_end_with_the_engine(host: HostTier, clock: Clock):
    fill(host, [1])
    part = RowHints(host, [0], [])
    told(part, "pin", [1])
    assert host.evict(0, [key(1)]) == 0
    part.close()
    assert host.evict(0, [key(1)]) == 1


def test_demoted_rows_leave_host_memory_once_they_are_on_disk(
    host: HostTier, clock: Clock, tmp_path: Any
):
    disk = DiskTier(tmp_path, host.layout, capacity=1 << 20)
    part = RowHints(host, [0], [disk])
    fill(host, [1, 2, 3])
    fill(disk, [1])
    told(part, "demote", [1, 2])
    assert here(host) == {2, 3}
    fill(disk, [2])
    clock.now += 1.0
    part.report(StepResults())
    assert here(host) == {3}
    disk.close()


def test_without_a_tier_below_nothing_is_demoted(host: HostTier, clock: Clock):
    fill(host, [1])
    told(RowHints(host, [0], []), "demote", [1])
    assert here(host) == {1}


@pytest.mark.parametrize("in_params", [False, True])
def test_hints_are_read_as_vllm_and_dynamo_write_them(in_params: bool):
    written = {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_type": "kv.pin", "payload": {"ttl_seconds": 5}},
            {"action_type": "kv.demote", "payload": {}},
            {"action_type": "kv.fetch", "payload": {"source_control_endpoint": "tcp://there:1"}},
        ],
    }
    asking = EngineRequest(
        id="r",
        tokens=[1],
        params={"kv_hint": written} if in_params else None,
        kv_hints=None if in_params else written,
    )
    assert asking.hints == (("pin", 5.0), ("demote", 60.0), (None, 60.0))


@pytest.mark.parametrize(
    "written", [7, {"actions": 3}, {"actions": [{"action_type": "kv.pin", "payload": [1]}]}]
)
def test_hints_that_cannot_be_read_are_none(written: Any):
    assert EngineRequest(id="r", tokens=[1], kv_hints=written).hints == ()
