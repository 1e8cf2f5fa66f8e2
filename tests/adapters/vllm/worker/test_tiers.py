"""Rows of one rank, stored and loaded as the scheduler's side orders it: real arenas and tiers.

The engine is pretended: it fills memory and keeps ids. vLLM itself is in tests/vllm.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvstow.adapters.vllm.cache.layout import (
    CacheDeclaration,
    axes_of,
    declared_groups,
    declared_layout,
)
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import BlockIds, EngineRequest, KeysPresent
from kvstow.adapters.vllm.scheduler.recall import Recall
from kvstow.adapters.vllm.worker.tiers import LoadJob, WorkerTiers
from kvstow.memory.arena import Arena
from kvstow.testing.servers import Valkey
from recorded_vllm import IDENTITY, Pool, hybrid, one_group

PROMPT = list(range(500, 518))
"""18 tokens: four whole blocks, and half of one."""


@dataclass
class Rank:
    """One engine of one rank: who decides, who moves, and the memory."""

    recall: Recall
    tiers: WorkerTiers
    views: dict[str, torch.Tensor]
    pool: Pool

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
        groups = declared_groups(declared)
        recall = Recall(groups, IDENTITY, options, num_blocks=declared.num_blocks)
        recall.stores.holds = pool = Pool()
        recall.meet(["0"])
        made = Rank(recall, WorkerTiers(arena, options), views, pool)
        recall.known.told("0", made.tiers.kept())
        return made

    def fill(self, seed: int) -> dict[str, torch.Tensor]:
        """Random bytes everywhere; a copy of them."""
        rng = torch.Generator().manual_seed(seed)
        for view in self.views.values():
            view.copy_(torch.rand(view.shape, generator=rng))
        return {name: view.clone() for name, view in self.views.items()}

    def compute(self, tokens: Sequence[int], ids: BlockIds, id: str = "r") -> int:
        """A request whose tokens are in these blocks; rows that were stored of it."""
        self.recall.arrived(EngineRequest(id=id, tokens=tokens))
        self.recall.matched(id, 0)
        self.recall.computed(id, len(tokens), ids)
        self.recall.finished(id, len(tokens), ids)
        return self.store()

    def store(self) -> int:
        """Steps until nothing is to be stored any more; rows that were."""
        stored, until = 0, time.monotonic() + 20
        while len(self.recall.stores) and time.monotonic() < until:
            order = self.recall.stores.take()
            if order is not None:
                self.tiers.store(order)
            for job in self.tiers.stored():
                assert job.error is None
                stored += job.num_moved
                self.recall.stores.stored(job.number, 1)
            self.recall.known.told("0", self.tiers.kept())
        assert self.pool.held == set()
        return stored

    def ask(self, tokens: Sequence[int], id: str = "d") -> int:
        """Tokens of a new request that can come back."""
        lookup = self.recall.arrived(EngineRequest(id=id, tokens=tokens))
        if lookup is not None:
            assert self.recall.matched(id, 0) is None
            self.tiers.look_up(lookup)
            until = time.monotonic() + 20
            while not self.tiers.has_answers and time.monotonic() < until:
                time.sleep(0.001)
            for answer in self.tiers.answers():
                self.recall.answer(answer)
        found = self.recall.matched(id, 0)
        assert found is not None
        return found

    def load(self, ids: BlockIds, num_tokens: int, id: str = "d") -> LoadJob:
        order = self.recall.taken(id, ids, 0, num_tokens)
        self.tiers.load(order)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for job in self.tiers.loaded():
                self.recall.known.told("0", self.tiers.kept())
                return job
        raise AssertionError("the load never ended")

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
    assert rank.load(HERE, 16).error is None
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


def test_rows_of_a_process_beside_are_found_on_disk(tmp_path: Path, ranks: list[Rank]):
    ranks += [Rank.start(on_disk(tmp_path), hybrid("BLHNC", 24)) for _ in range(2)]
    writer, reader = ranks
    kept = writer.fill(6)
    assert writer.compute(PROMPT, THERE) == 6
    until = time.monotonic() + 20
    while reader.ask(PROMPT, id="early") != 16 and time.monotonic() < until:
        time.sleep(0.1)
        reader.recall.known.told("0", reader.tiers.kept())
    check_came_back(reader, kept)


def test_rows_that_went_away_fail_the_load_and_are_known_to_be_gone(
    tmp_path: Path, ranks: list[Rank]
):
    rank = Rank.start(on_disk(tmp_path), hybrid("BLHNC", 24))
    ranks.append(rank)
    rank.compute(PROMPT, THERE)
    assert rank.ask(PROMPT) == 16
    forget_everything(rank)
    assert rank.load(HERE, 16).error is not None
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
    rank.recall.known.told("0", rank.tiers.kept())
    disk = rank.tiers._disk
    assert disk is not None
    until = time.monotonic() + 20
    while rank.ask(PROMPT, id="early") != 16 and time.monotonic() < until:
        time.sleep(0.1)
        rank.recall.known.told("0", rank.tiers.kept())
    disk.close()
    assert rank.ask(PROMPT) == 0


def forget_everything(rank: Rank) -> None:
    """Another tenant's rows have pushed ours out of both tiers."""
    rank.tiers._mover.drain(10)
    for tier in (rank.tiers._host, rank.tiers._disk):
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
    rank.recall.arrived(EngineRequest(id="r", tokens=tokens))
    for step, token in enumerate(PROMPT):
        tokens.append(token)
        window = tuple(k + 1 if 4 * (k + 1) > step - 8 else 0 for k in range(step // 4 + 1))
        rank.recall.computed("r", step + 1, (window, tuple(range(11, 12 + step // 4))))
        rank.store()
    rank.recall.finished("r", 0, ((), ()))
    for length in (8, 12, 16):
        rank.clear()
        asked = [*tokens[:length], 1]
        assert rank.ask(asked, id=f"d{length}") == length
        window = tuple(0 if 4 * (k + 1) <= length - 7 else 20 + k % 4 for k in range(5))
        assert rank.load((window, (1, 2, 3, 13, 12)), length, id=f"d{length}").error is None
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
    assert first.tiers.reasons() == {"remote stored rows": 6}
    assert first.tiers.reasons() == {}  # told once
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
    reasons = rank.tiers.reasons()
    assert reasons["remote missed_rows: unreachable"] > 0
    assert rank.tiers.reasons() == {}  # told once


def test_an_answer_counts_when_all_ranks_have_given_theirs(ranks: list[Rank], valkey: Valkey):
    url = f"{valkey.url}?prefix=ranks&budget=10"
    rank = Rank.start(remotely(url), hybrid("BLHNC", 24))
    ranks.append(rank)
    rank.recall.meet(["0", "1"])
    lookup = rank.recall.arrived(EngineRequest(id="d", tokens=PROMPT))
    assert lookup is not None
    everything = tuple((True,) * len(keys) for keys in lookup.keys)
    rank.recall.answer(KeysPresent(request="d", present=everything))
    assert rank.recall.matched("d", 0) is None
    nothing = tuple((False,) * len(keys) for keys in lookup.keys)
    rank.recall.answer(KeysPresent(request="d", present=nothing))
    assert rank.recall.matched("d", 0) == 0
