"""Rows of one rank, stored and loaded as the scheduler's side orders it: real arenas and tiers.

The engine is pretended: it fills memory and keeps ids. vLLM itself is in tests/vllm.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstow.adapters.vllm.cache.layout import (
    CacheDeclaration,
    axes_of,
    declared_layout,
)
from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    KeysPresent,
    StepOrders,
    StepResults,
)
from kvstow.adapters.vllm.worker import tiers
from kvstow.adapters.vllm.worker.part import RankState
from kvstow.adapters.vllm.worker.tiers import WorkerTiers
from kvstow.memory.arena import Arena
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.shared import remove
from pretended_engine import RecallAlone
from recorded_vllm import Pool, engine_state, hybrid, one_group
from servers import Valkey

PROMPT = list(range(500, 518))
"""18 tokens: four whole blocks, and half of one."""


@dataclass
class Rank:
    """One engine of one rank: who decides, who moves, and the memory."""

    recall: RecallAlone
    tiers: WorkerTiers
    views: dict[str, torch.Tensor]
    pool: Pool
    counts: EngineCounts

    @staticmethod
    def start(options: ConnectorOptions, declared: CacheDeclaration) -> "Rank":
        layout = declared_layout(declared, base_align=64)
        raw = torch.zeros(declared.regions[0].nbytes // 4)
        views = {
            page.layer: raw.as_strided(
                (declared.num_blocks, page.heads.size, page.states * page.content),
                (region.block_stride // 4, page.states * page.content, 1),
                (region.offset + i * region.layer_stride) // 4,
            )
            for region in declared.regions
            for i, page in enumerate(
                page for group in declared.groups for page in group if page.layer in region.layers
            )
        }
        arena = Arena.adopt(layout, dict(views), axes=axes_of(layout.order))
        recall, pool = RecallAlone.of(engine_state(declared, options))
        counts = EngineCounts()
        state = RankState(arena=arena, options=options, name="0", counts=counts)
        made = Rank(recall, WorkerTiers(state), views, pool, counts)
        made.step()
        return made

    def fill(self, seed: int) -> dict[str, torch.Tensor]:
        """Random bytes everywhere; a copy of them."""
        rng = torch.Generator().manual_seed(seed)
        for view in self.views.values():
            view.copy_(torch.rand(view.shape, generator=rng))
        return {name: view.clone() for name, view in self.views.items()}

    def compute(self, tokens: Sequence[int], ids: BlockIds, id: str = "r") -> int:
        """A request whose tokens are in these blocks; rows that were stored of it."""
        self.recall.ask(EngineRequest(id=id, tokens=tokens))
        self.recall.matched(id, 0)
        self.recall.computed(id, len(tokens), ids)
        self.recall.ended(id, ids, len(tokens))
        return self.store()

    def step(self, step: StepOrders | None = None) -> StepResults:
        """A step of the engine, whose scheduler hears what has come of it."""
        step = step or StepOrders()
        self.tiers.load(step)
        self.tiers.save(step)
        results = StepResults()
        self.tiers.report(results)
        self.recall.apply(results)
        return results

    def store(self) -> int:
        """Steps until nothing is to be stored any more; rows that were."""
        before, until = self.counts["stored_rows"], time.monotonic() + 20
        while len(self.recall.stores) and time.monotonic() < until:
            self.step(StepOrders(store=self.recall.stores.take()))
        self.step()
        assert self.counts["store_failures"] == 0
        assert self.pool.held == set()
        return self.counts["stored_rows"] - before

    def ask(self, tokens: Sequence[int], id: str = "d") -> int:
        """Tokens of a new request that can come back."""
        lookup = self.recall.ask(EngineRequest(id=id, tokens=tokens))
        if lookup is not None:
            assert self.recall.matched(id, 0) is None
            step, until = StepOrders(lookups=[lookup]), time.monotonic() + 20
            while self.recall.matched(id, 0) is None and time.monotonic() < until:
                self.step(step)
                step = None
                time.sleep(0.001)
        found = self.recall.matched(id, 0)
        assert found is not None
        return found

    def load(self, ids: BlockIds, num_tokens: int, id: str = "d") -> bool:
        """Whether a request's rows have come back."""
        results = self.step(StepOrders(loads=[self.recall.order(id, ids, 0, num_tokens)]))
        until = time.monotonic() + 20
        while not results.received and time.monotonic() < until:
            results = self.step()
        assert results.received == {id}
        return not results.failed

    def reasons(self) -> dict[str, int]:
        """What was counted lately of rows that went to the remote store, or did not."""
        self.step()
        counts = self.counts.take()
        return {name: count for name, count in counts.items() if name.startswith("remote")}

    def clear(self) -> None:
        for view in self.views.values():
            view.zero_()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Ranks that are closed in the end."""
    made: list[Rank] = []
    yield made
    for rank in made:
        rank.tiers.close()


def on_host() -> ConnectorOptions:
    return ConnectorOptions(host_bytes=8 << 20)


def on_disk(folder: Path) -> ConnectorOptions:
    return ConnectorOptions(host_bytes=8 << 20, disk_path=str(folder), disk_bytes=32 << 20)


ROOM = 512
"""Bytes of a row in the host tier: 384, aligned to 256."""
THERE = ((0, 0, 4, 5, 6), (7, 8, 9, 10, 11))
"""Blocks of a request whose window has let go of the first two."""
HERE = ((0, 0, 20, 19, 18), (1, 2, 3, 13, 12))
SAME = (("layers.1", [(4, 20), (5, 19)]), ("layers.3", [(7, 1), (8, 2), (9, 3), (10, 13)]))


def check_came_back(rank: Rank, kept: dict[str, torch.Tensor]) -> None:
    """All rows are there, and no other memory has changed."""
    rank.clear()
    assert rank.ask(PROMPT) == 16
    assert rank.load(HERE, 16)
    for name, places in SAME:
        for there, here in places:
            assert torch.equal(rank.views[name][here], kept[name][there])
        others = sorted(set(range(24)) - {here for _, at in SAME for _, here in at})
        assert (rank.views[name][others] == 0).all()


@pytest.mark.parametrize("order", ["BLHNC", "LBHNC"])
def test_stored_blocks_come_back_also_after_a_restart(
    tmp_path: Path, order: str, ranks: list[Rank]
):
    first = Rank.start(on_disk(tmp_path), hybrid(order, 24))
    kept = first.fill(5)
    assert first.compute(PROMPT, THERE) == 6
    check_came_back(first, kept)
    first.tiers.close()
    ranks.append(Rank.start(on_disk(tmp_path), hybrid(order, 24)))
    check_came_back(ranks[0], kept)


@pytest.mark.parametrize("is_alive", [True, False])
def test_rows_in_shared_memory_are_found_by_another_process(is_alive: bool, ranks: list[Rank]):
    options = replace(on_host(), host_shared=f"kvstow-test-{uuid.uuid4().hex[:12]}")
    try:
        writer = Rank.start(options, hybrid("BLHNC", 24))
        kept = writer.fill(7)
        assert writer.compute(PROMPT, THERE) == 6
        writer.tiers.finish()
        if is_alive:
            ranks.append(writer)
        else:
            writer.tiers.close()
        reader = Rank.start(options, hybrid("BLHNC", 24))
        ranks.append(reader)
        check_came_back(reader, kept)
    finally:
        remove(options.host_shared)


def test_rows_of_a_process_beside_are_found_on_disk(tmp_path: Path, ranks: list[Rank]):
    ranks += [Rank.start(on_disk(tmp_path), hybrid("BLHNC", 24)) for _ in range(2)]
    writer, reader = ranks
    kept = writer.fill(6)
    assert writer.compute(PROMPT, THERE) == 6
    until = time.monotonic() + 20
    while reader.ask(PROMPT, id="early") != 16 and time.monotonic() < until:
        time.sleep(0.1)
        reader.step()
    check_came_back(reader, kept)


def test_rows_that_went_away_fail_the_load_and_are_known_to_be_gone(
    tmp_path: Path, ranks: list[Rank]
):
    rank = Rank.start(on_disk(tmp_path), hybrid("BLHNC", 24))
    ranks.append(rank)
    rank.compute(PROMPT, THERE)
    assert rank.ask(PROMPT) == 16
    forget_everything(rank)
    assert not rank.load(HERE, 16)
    assert rank.ask(PROMPT, id="again") == 0


def test_a_disk_that_cannot_be_asked_has_nothing_and_the_engine_goes_on(
    tmp_path: Path, ranks: list[Rank]
):
    rank = Rank.start(on_disk(tmp_path), hybrid("BLHNC", 24))
    ranks.append(rank)
    rank.compute(PROMPT, THERE)
    assert rank.tiers._mover.drain(20)  # to the disk
    for group in (0, 1):
        host = rank.tiers.host
        host.evict(group, host.keys(group))
    rank.step()
    disk = rank.tiers._disk
    assert disk is not None
    until = time.monotonic() + 20
    while rank.ask(PROMPT, id="early") != 16 and time.monotonic() < until:
        time.sleep(0.1)
        rank.step()
    disk.close()
    assert rank.ask(PROMPT) == 0


def test_an_engine_that_sleeps_waits_for_loads_from_a_slow_disk(
    tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
):
    """Memory that is gone, or somebody else's, must not be written to."""
    rank = Rank.start(on_disk(tmp_path), hybrid("BLHNC", 24))
    ranks.append(rank)
    kept = rank.fill(8)
    rank.compute(PROMPT, THERE)
    assert rank.tiers._mover.drain(20)
    assert rank.ask(PROMPT) == 16
    for group in (0, 1):
        rank.tiers.host.evict(group, rank.tiers.host.keys(group))
    monkeypatch.setattr(tiers, "FINISH_SECONDS", 0.0)
    slowly = DiskTier.load

    def load(*arguments: Any) -> Any:
        time.sleep(0.3)
        return slowly(*arguments)

    monkeypatch.setattr(DiskTier, "load", load)
    rank.clear()
    rank.tiers.load(StepOrders(loads=[rank.recall.order("d", HERE, 0, 16)]))
    rank.tiers.finish()
    for name, places in SAME:
        assert all(torch.equal(rank.views[name][b], kept[name][a]) for a, b in places)
    results = StepResults()
    rank.tiers.report(results)
    assert (results.received, results.failed) == ({"d"}, set())


def forget_everything(rank: Rank) -> None:
    """Another tenant's rows have pushed ours out of both tiers."""
    rank.tiers._mover.drain(10)
    for tier in (rank.tiers.host, rank.tiers._disk):
        assert tier is not None
        for group in range(len(tier.layout.groups)):
            tier.evict(group, tier.keys(group))


def test_rows_that_were_pushed_out_of_host_memory_are_known_to_be_gone(ranks: list[Rank]):
    declared = one_group(num_blocks=24)
    rank = Rank.start(ConnectorOptions(host_bytes=5 * ROOM), declared)
    ranks.append(rank)
    rank.fill(1)
    assert rank.compute(PROMPT, ((1, 2, 3, 4, 5),)) == 4
    assert rank.ask(PROMPT, id="first") == 16
    other = [token + 1000 for token in PROMPT]
    assert rank.compute(other, ((1, 2, 3, 4, 5),), id="other") == 4
    assert rank.ask(PROMPT, id="second") == 0
    assert rank.ask(other, id="third") == 16


def test_a_window_that_moves_on_comes_back_at_every_length_it_has_passed(ranks: list[Rank]):
    """Of the blocks that a window has let go, those were stored while it passed them."""
    rank = Rank.start(on_host(), hybrid("BLHNC", 24))
    ranks.append(rank)
    kept = rank.fill(3)
    tokens: list[int] = []
    rank.recall.ask(EngineRequest(id="r", tokens=tokens))
    for step, token in enumerate(PROMPT):
        tokens.append(token)
        window = tuple(k + 1 if 4 * (k + 1) > step - 8 else 0 for k in range(step // 4 + 1))
        rank.recall.computed("r", step + 1, (window, tuple(range(11, 12 + step // 4))))
        rank.store()
    rank.recall.ended("r", ((), ()), 0)
    for length in (8, 12, 16):
        rank.clear()
        asked = [*tokens[:length], 1]
        assert rank.ask(asked, id=f"d{length}") == length
        window = tuple(0 if 4 * (k + 1) <= length - 7 else 20 + k % 4 for k in range(5))
        assert rank.load((window, (1, 2, 3, 13, 12)), length, id=f"d{length}")
        last = length // 4 - 1
        assert torch.equal(rank.views["layers.0"][window[last]], kept["layers.0"][last + 1])
        assert torch.equal(rank.views["layers.2"][(1, 2, 3, 13)[last]], kept["layers.2"][11 + last])


# ── remote ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def remotely(url: str) -> ConnectorOptions:
    return ConnectorOptions(host_bytes=8 << 20, remote=url)


def test_rows_of_an_engine_that_has_ended_come_back_from_a_remote_store(
    ranks: list[Rank], valkey: Valkey
):
    url = f"{valkey.url}?prefix=back&budget=10"
    first = Rank.start(remotely(url), hybrid("BLHNC", 24))
    kept = first.fill(1)
    assert first.compute(PROMPT, THERE) == 6
    first.tiers.close()
    assert first.reasons() == {"remote_stored_rows": 6}
    assert first.reasons() == {}  # told once
    for order in ("BLHNC", "LBHNC"):
        ranks.append(Rank.start(remotely(url), hybrid(order, 24)))
        check_came_back(ranks[-1], kept)


def test_a_dead_remote_store_leaves_host_memory_at_work(ranks: list[Rank], tmp_path: Path):
    server = Valkey(tmp_path)  # never started
    rank = Rank.start(remotely(f"{server.url}?budget=0.2&load=0.5"), hybrid("BLHNC", 24))
    ranks.append(rank)
    rank.fill(1)
    assert rank.compute(PROMPT, THERE) == 6
    assert rank.ask(PROMPT) == 16
    assert rank.ask([1] * 18, id="e") == 0
    reasons = rank.reasons()
    assert reasons["remote_missed_rows unreachable"] > 0
    assert rank.reasons() == {}  # told once


def test_an_answer_counts_when_all_ranks_have_given_theirs(ranks: list[Rank], valkey: Valkey):
    url = f"{valkey.url}?prefix=ranks&budget=10"
    rank = Rank.start(remotely(url), hybrid("BLHNC", 24))
    ranks.append(rank)
    rank.recall.index.expect(["0", "1"])
    rank.recall._engine.num_ranks = 2
    lookup = rank.recall.ask(EngineRequest(id="d", tokens=PROMPT))
    assert lookup is not None
    everything = tuple((True,) * len(keys) for keys in lookup.keys)
    rank.recall.answer(KeysPresent(request="d", present=everything))
    assert rank.recall.matched("d", 0) is None
    nothing = tuple((False,) * len(keys) for keys in lookup.keys)
    rank.recall.answer(KeysPresent(request="d", present=nothing))
    assert rank.recall.matched("d", 0) == 0
