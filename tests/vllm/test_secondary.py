"""kvstow's stores below vLLM's own offloading, by vLLM's own classes: no engine is needed, and its
offloading refuses CPUs."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CHUNK_BYTES = 96
KEYS = [bytes([k]) * 32 + bytes(4) for k in range(1, 5)]


def spec(tp_size: int = 1) -> Any:
    """What vLLM says of an engine's chunks."""
    groups = [SimpleNamespace(tokens_per_block=16, layer_names=["a", "b"])]
    parallel = {"tp_size": tp_size, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0}
    config = SimpleNamespace(
        groups=groups,
        parallel=SimpleNamespace(**parallel, is_parallelism_agnostic=False),
        model=SimpleNamespace(name="m", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        replicated_layout=False,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


class Tier:
    """The tier as vLLM makes it, and the host memory that it reads and fills."""

    def __init__(self, disk: Path, offloading: Any = None, **config: Any) -> None:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        self.memory = np.zeros((8, CHUNK_BYTES), np.int8)
        named = {"type": "KvstowTier", "module_path": "kvstow.adapters.vllm.secondary"}
        places = {"disk": str(disk), "disk_bytes": 1 << 24, "unverified": "a test"}
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {**named, **places, **config}, memoryview(self.memory), offloading or spec()
        )

    def move(self, submit: Any, keys: list[bytes], chunks: list[int]) -> Any:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        context: Any = SimpleNamespace()
        submit(TransferJob(7, keys, np.array(chunks), False, context))
        assert self.tier.has_pending_work()
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == 7
        return result

    def has(self, key: bytes) -> bool:
        from vllm.v1.kv_offload.base import LookupResult

        until = time.monotonic() + 10
        while (answer := self.tier.lookup(key, None)) is LookupResult.RETRY:
            assert time.monotonic() < until
        return answer is LookupResult.HIT


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[list[Tier]]:
    made: list[Tier] = []
    yield made
    for each in made:
        each.tier.shutdown()


def test_chunks_come_back_in_another_engine(tiers: list[Tier], tmp_path: Path):
    first = Tier(tmp_path)
    first.memory[:] = np.random.default_rng(1).integers(-128, 128, first.memory.shape)
    kept = first.memory[[5, 2]].copy()
    assert first.move(first.tier.submit_store, KEYS[:2], [5, 2]).success
    first.tier.shutdown()
    second = Tier(tmp_path)
    tiers.append(second)
    assert [second.has(key) for key in KEYS[:3]] == [True, True, False]
    assert second.move(second.tier.submit_load, KEYS[:2], [1, 6]).success
    assert np.array_equal(second.memory[[1, 6]], kept)
    assert not second.memory[[0, 2, 3, 4, 5, 7]].any()
    partly = second.move(second.tier.submit_load, KEYS[1:3], [3, 4])
    assert (partly.success, partly.successful_keys) == (False, KEYS[1:2])


def test_chunks_of_another_shape_are_not_found(tiers: list[Tier], tmp_path: Path):
    tiers.append(Tier(tmp_path))
    tiers[0].move(tiers[0].tier.submit_store, KEYS, [0, 1, 2, 3])
    tiers.append(Tier(tmp_path, spec(tp_size=2)))
    assert tiers[0].has(KEYS[0])
    assert not tiers[1].has(KEYS[0])
