"""Prefixes asked of other engines: real agents, tiers and arenas around pretended engines."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.adapters.vllm.cache.pages import AFTER_LAST_TOKEN
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import BlockIds, EngineRequest, StepResults
from kvstow.adapters.vllm.worker.peers import LentRows, PeerClient, RowServer, instance_of
from kvstow.adapters.vllm.worker.tiers import WorkerTiers
from kvstow.offload.host.tier import HostTier
from kvstow.offload.keys import KeyChain
from kvstow.plan.retention import Window
from kvstow.transfer.channel.messages import AskPrefix
from kvstow.transfer.serve import Incoming
from kvstow.transfer.transport.local import Fabric
from pretended_engine import NUM_BLOCKS, PROMPT, WINDOW, Engine
from recorded_vllm import Pool
from waiting import wait_for

LENDS = ConnectorOptions(
    digest="always", host_bytes=1 << 20, lend="tcp://127.0.0.1:*", contact_seconds=20
)
ASKS = ConnectorOptions(
    digest="always", peers_tokens=4, peers_seconds=20, peers_pull_seconds=20, contact_seconds=20
)
THERE = ((0, 0, 4, 5, 6), (7, 8, 9, 10, 11))
HERE = ((0, 0, 20, 19, 18), (1, 2, 3, 13, 12))


class Fleet:
    """Engines of one test, closed at its end."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.engines: list[Engine] = []

    def start(
        self,
        name: str,
        options: ConnectorOptions,
        order: str = "BLHNC",
        tp: tuple[int, int] = (0, 1),
        block_tokens: int | None = None,
        window: Window = WINDOW,
    ) -> Engine:
        engine = Engine.start(
            self.fabric, name, options, order, tp=tp, block_tokens=block_tokens, window=window
        )
        engine.desk.bind(Pool())  # pyright: ignore
        self.engines.append(engine)
        return engine

    def asker(
        self, *lenders: Engine, order: str = "BLHNC", window: Window = WINDOW, **options: object
    ) -> Engine:
        """An engine that has met these."""
        peers = tuple(address_of(each) for each in lenders)
        asks = replace(ASKS, peers=peers, **options)  # pyright: ignore
        engine = self.start("asker-0-0", asks, order, window=window)
        wait_for(lambda: len(asker_of(engine)._peers()) == len(lenders))
        return engine

    def close(self) -> None:
        for engine in self.engines:
            engine.hands.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def address_of(engine: Engine) -> str:
    return engine.part(RowServer).agent.address


def num_leases(engine: Engine) -> int:
    return len(engine.part(RowServer).agent.server.leases)


def asker_of(engine: Engine) -> PeerClient:
    return engine.part(PeerClient)


def computes(engine: Engine, tokens: list[int] = PROMPT, ids: BlockIds = THERE) -> None:
    """The engine computes a prompt, and its blocks come to host memory."""
    engine.fill(7)
    stores(engine, tokens, "p", ids)


def stores(engine: Engine, tokens: list[int], id: str, ids: BlockIds = THERE) -> None:
    recall = engine.desk.recall
    assert recall is not None
    engine.desk.arrived(EngineRequest(id=id, tokens=tokens))
    recall.computed(id, len(tokens), ids)
    engine.until(lambda _: len(recall.stores) == 0)
    engine.desk.finished(EngineRequest(id=id, tokens=tokens), ids, len(tokens))
    engine.until(lambda _: len(recall.stores) == 0)  # it may store again what is gone already


def asked(engine: Engine, id: str = "d", num_computed: int = 0, **more: Any) -> int:
    """What the engine's scheduler is told of a request in the end; its steps wait for nothing."""
    engine.desk.arrived(EngineRequest(id=id, tokens=PROMPT, **more))
    limit = time.monotonic() + 30
    while (count := engine.desk.matched(id, num_computed)) is None:
        assert time.monotonic() < limit
        engine.step()
    return count


def pulled(engine: Engine, count: int, id: str = "d") -> StepResults:
    engine.desk.allocated(id, HERE, count)
    return engine.until(lambda found: bool(found.received))


def same(asker: Engine, lender: Engine, blocks: slice = slice(0, 4)) -> bool:
    """Whether whole blocks of the prompt are there, byte for byte, in every layer."""
    return all(
        torch.equal(asker.views[name][here], lender.views[name][there])
        for group, names in enumerate((("w.0", "w.1"), ("f.0", "f.1")))
        for name in names
        for there, here in zip(THERE[group][blocks], HERE[group][blocks], strict=True)
        if there
    )


@pytest.mark.parametrize("orders", [("BLHNC", "BLHNC"), ("LBHNC", "BLHNC"), ("BLHNC", "LBHNC")])
def test_a_prefix_in_a_peers_host_memory_is_pulled_though_the_peer_sleeps(
    fleet: Fleet, orders: tuple[str, str]
):
    lender = fleet.start("lender-0-0", LENDS, orders[0])
    computes(lender)
    asker = fleet.asker(lender, order=orders[1])
    count = asked(asker)
    assert count == 16, "four whole blocks; nobody has stepped the lender"
    found = pulled(asker, count)
    assert (found.received, found.failed) == ({"d"}, frozenset())
    assert same(asker, lender)
    untouched = sorted(set(range(NUM_BLOCKS)) - {b for ids in HERE for b in ids[:4]})
    assert all((view[untouched] == 0).all() for view in asker.views.values())
    wait_for(lambda: num_leases(lender) == 0)


def test_the_state_after_the_last_token_that_is_lent_comes_from_a_peer(fleet: Fleet):
    """Of a recurrent layer each block holds the state after its last token, and vLLM gives a block
    for the last one alone."""
    lender = fleet.start("lender-0-0", LENDS, window=AFTER_LAST_TOKEN)
    computes(lender)
    asker = fleet.asker(lender, window=AFTER_LAST_TOKEN)
    assert asked(asker) == 16
    asker.desk.allocated("d", ((0, 0, 0, 19, 18), HERE[1]), 16)
    found = asker.until(lambda found: bool(found.received))
    assert (found.received, found.failed) == ({"d"}, frozenset())
    assert same(asker, lender, slice(3, 4))


def of_unequal_blocks(fleet: Fleet, lends: int, asks: int, ids: BlockIds) -> tuple[Engine, Engine]:
    """A lender and an asker whose kernels keep so many tokens per block in order."""
    lender = fleet.start("lender-0-0", LENDS, block_tokens=lends)
    computes(lender, ids=ids)
    options = replace(ASKS, peers=(address_of(lender),))
    asker = fleet.start("asker-0-0", options, block_tokens=asks)
    wait_for(lambda: len(asker_of(asker)._peers()) == 1)
    return lender, asker


def test_a_prefix_of_a_peer_with_longer_blocks_is_cut_anew(fleet: Fleet):
    there = ((0, 4, 5), (7, 8, 9))
    lender, asker = of_unequal_blocks(fleet, 8, 4, there)
    count = asked(asker)
    assert count == 16
    found = pulled(asker, count)
    assert (found.received, found.failed) == ({"d"}, frozenset())
    for group, names in enumerate((("w.0", "w.1"), ("f.0", "f.1"))):
        for name in names:
            for token in range(9 if group == 0 else 0, count):
                ours = asker.views[name][HERE[group][token // 4], :, token % 4]
                theirs = lender.views[name][there[group][token // 8], :, token % 8]
                assert torch.equal(ours, theirs), (name, token)


def test_ranks_of_a_peer_are_asked_together_and_one_alone_is_not(fleet: Fleet):
    ranks = [fleet.start(f"lender-0-{r}", LENDS, tp=(r, 2)) for r in range(2)]
    for rank in ranks:
        computes(rank)
    alone = replace(ASKS, peers=(address_of(ranks[0]),))
    lonely = fleet.start("lonely-0-0", alone)
    wait_for(lambda: asker_of(lonely)._peer(alone.peers[0]).state == "ready")
    assert asked(lonely) == 0
    asker = fleet.asker(*ranks)
    assert asked(asker) == 16
    assert not pulled(asker, 16).failed
    for head, rank in enumerate(ranks):
        for there, here in zip(THERE[1][:4], HERE[1][:4], strict=True):
            ours, theirs = asker.views["f.1"][here][head], rank.views["f.1"][there][0]
            assert torch.equal(ours, theirs)


def test_a_prompt_is_hashed_once_for_tiers_and_for_peers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[int] = []
    grow = KeyChain.grow
    monkeypatch.setattr(
        KeyChain, "grow", lambda self, new: (hashed.append(len(new)), grow(self, new))[1]
    )
    asker = fleet.asker(fleet.start("lender-0-0", LENDS), host_bytes=1 << 20)
    assert asked(asker) == 0
    assert hashed == [16] * 4, "four blocks of four tokens"
    assert asker.desk.recall is not None
    asker.desk.forget_stored()
    asker.desk.arrived(EngineRequest(id="e", tokens=PROMPT))
    assert asker.desk.matched("e", 0) is None
    assert len(hashed) == 12, "what is stored has another identity from now on"


def test_a_miss_is_computed_and_peers_are_asked_once_for_a_request(fleet: Fleet):
    lender = fleet.start("lender-0-0", LENDS)
    asker = fleet.asker(lender)
    assert asked(asker) == 0
    assert asker.desk.matched("d", 0) == 0
    assert questions(lender) == {"miss": 1}


def questions(engine: Engine) -> dict[str, int]:
    return dict(engine.part(RowServer).agent.prefixes.answers)


def test_peers_are_not_asked_for_what_is_short_or_held(fleet: Fleet):
    lender = fleet.start("lender-0-0", LENDS)
    computes(lender)
    asker = fleet.asker(lender, peers_tokens=8)
    assert asked(asker, num_computed=12) == 0
    asker.desk.arrived(EngineRequest(id="salted", tokens=PROMPT, shareable=False))
    assert asker.desk.matched("salted", 0) == 0
    assert questions(lender) == {}


def test_the_longest_of_several_is_taken_and_the_others_are_handed_back(fleet: Fleet):
    short, long = (fleet.start(f"{name}-0-0", LENDS) for name in ("short", "long"))
    computes(short, PROMPT[:9], ((2, 3, 4), (7, 8, 9)))
    computes(long)
    asker = fleet.asker(short, long)
    assert asked(asker) == 16
    assert not pulled(asker, 16).failed
    for lender in (short, long):
        assert questions(lender) == {"ticket": 1}
        wait_for(lambda lender=lender: num_leases(lender) == 0)


def test_a_peer_that_a_request_names_is_met_and_then_asked_though_no_option_knows_it(fleet: Fleet):
    """llm-d's router names one (`remote_kv_source`) and knows nothing of us."""
    lender = fleet.start("lender-0-0", LENDS)
    computes(lender)
    asker = fleet.start("asker-0-0", ASKS)
    host, _, port = address_of(lender).removeprefix("tcp://").rpartition(":")
    named = {"remote_host": host, "remote_port": int(port), "kv_request_id": "r"}
    params = {"remote_kv_source": named}
    assert asked(asker, id="first", params=params) == 0
    wait_for(lambda: asker.part(PeerClient)._peers(address_of(lender)) != [])
    assert asked(asker, id="plain") == 0, "others ask nobody"
    assert asked(asker, id="d", params=params) == 16
    assert not pulled(asker, 16).failed


@pytest.mark.parametrize("how", ["ended", "gone on to compute"])
def test_tickets_of_a_request_that_does_not_wait_any_more_are_handed_back(fleet: Fleet, how: str):
    lender = fleet.start("lender-0-0", LENDS)
    computes(lender)
    asker = fleet.asker(lender)
    asker.desk.arrived(EngineRequest(id="d", tokens=PROMPT))
    assert asker.desk.matched("d", 0) is None
    asker.hands.begin(asker.desk.take_step(computes=False))
    if how == "ended":
        asker.desk.finished(EngineRequest(id="d", tokens=PROMPT), HERE, 0)
    else:
        asker.desk.allocated("d", HERE, 0)
    asker.until(lambda found: bool(found.peers))
    assert asker.desk.matched("d", 0) == 0
    asker.step()
    wait_for(lambda: num_leases(lender) == 0)


def test_peers_are_not_asked_for_a_request_that_must_not_read(fleet: Fleet):
    """vLLM asks us, and goes on without our answer (`skip_reading_prefix_cache`)."""
    lender = fleet.start("lender-0-0", LENDS)
    computes(lender)
    asker = fleet.asker(lender)
    asker.desk.arrived(EngineRequest(id="d", tokens=PROMPT))
    assert asker.desk.matched("d", 0) is None
    asker.desk.allocated("d", HERE, 0)
    assert asker.desk.take_step(computes=True).asks == []


# ── peers that do not do what they should ─────────────────────────────────────────────────


def test_a_hung_peer_costs_one_request_the_budget_and_the_next_ones_nothing(fleet: Fleet):
    lender = fleet.start("lender-0-0", LENDS)
    computes(lender)
    asker = fleet.asker(lender, peers_seconds=0.2)
    heard: list[AskPrefix] = []

    def silent(peer: Incoming, question: AskPrefix) -> None:
        heard.append(question)

    lender.part(RowServer).agent.server.on_question = silent
    assert asked(asker, "first") == 0
    resting = asker_of(asker)._rest_until
    resting[address_of(lender)] = float("inf")  # however slow this machine is
    for k in range(3):
        assert asked(asker, f"later {k}") == 0
    assert len(heard) == 1
    lender.part(RowServer).agent.server.on_question = lender.part(RowServer).agent.prefixes.hear
    resting.clear()
    assert asked(asker, "d") == 16, "it is asked again later"


def test_a_peer_that_dies_is_left_out_and_met_again(fleet: Fleet):
    lender = fleet.start("lender-0-0", LENDS)
    address = address_of(lender)
    asker = fleet.asker(lender, peers_seconds=0.2, contact_seconds=1)
    fleet.engines.remove(lender)
    lender.hands.close()
    assert asked(asker, "first") == 0
    again = fleet.start("again-0-0", replace(LENDS, lend=address))
    computes(again)
    wait_for(lambda: [instance_of(each.name) for each in asker_of(asker)._peers()] == ["again"])
    assert asked(asker, "d") == 16
    assert not pulled(asker, 16).failed
    assert same(asker, again)


def test_a_peer_that_answers_and_dies_is_a_failed_load_and_is_left_alone(fleet: Fleet):
    lender = fleet.start("lender-0-0", LENDS)
    computes(lender)
    asker = fleet.asker(lender, peers_pull_seconds=0.5)
    assert asked(asker) == 16
    fleet.engines.remove(lender)
    lender.hands.close()
    found = pulled(asker, 16)
    assert (found.received, found.failed) == ({"d"}, {"d"})
    assert asker.desk.matched("d", 0) == 0, "the engine computes it"
    assert asker_of(asker)._rest_until


def test_a_peer_that_hangs_while_it_writes_is_a_failed_load_whose_blocks_are_held(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvstow.adapters.vllm.worker.pulls.HOLD_SECONDS", 0.05)
    lender = fleet.start("lender-0-0", LENDS)
    computes(lender)
    asker, pool, awake = fleet.asker(lender, direction="write"), Pool(), Event()
    asker.desk.bind(pool)  # pyright: ignore
    assert asked(asker) == 16
    transport = lender.part(RowServer).agent.endpoint.transport
    transport.before_copy = lambda _: awake.wait(120)  # pyright: ignore
    try:
        asker.desk.allocated("d", HERE, 16)
        asker.step()
        wait_for(lambda: lender_writes(lender))
        (transfer,) = asker.hands.agent.pulls.running
        transfer.abort()
        found = asker.until(lambda found: bool(found.received))
        assert (found.failed, pool.held) == ({"d"}, {b for ids in HERE for b in ids[:4]} - {0})
    finally:
        awake.set()
    asker.until(lambda found: bool(found.released))
    assert pool.held == set()


def lender_writes(lender: Engine) -> bool:
    """Whether a transfer is being served whose bytes have been posted."""
    servings = lender.part(RowServer).agent.server.servings.values()
    return any(serving.flights for serving in tuple(servings))


# ── lent rows ─────────────────────────────────────────────────────────────────────────────


def test_a_lent_row_stays_until_its_last_lease_and_then_has_a_new_generation(fleet: Fleet):
    engine = fleet.start("lender-0-0", LENDS)
    computes(engine)
    tier: HostTier = engine.part(WorkerTiers).host
    rows, keys = LentRows(tier), tier.keys(1)
    assert len(rows) == tier.usage.rows > 0
    ids = rows.ids(1, [*keys, bytes(32)])
    assert ids[-1] == -1
    ids = ids[:-1]
    rows.share(1, ids[:1])
    rows.share(1, ids[:1])
    assert tier.evict(1, keys) == len(keys) - 1
    rows.release(1, ids[:1])
    assert (tier.evict(1, keys), rows.generations[1][ids[0]]) == (0, 0)
    rows.release(1, ids[:1])
    assert rows.generations[1][ids[0]] == 1
    assert tier.evict(1, keys) == 1
    tier.check()
    assert np.array_equal(rows.ids(1, keys), [-1] * len(keys))


def test_rows_that_are_driven_out_while_they_are_asked_for_are_never_taken_for_others(fleet: Fleet):
    """A lender whose host memory has room for few prompts computes others all the time; what a
    prompt's blocks hold says which prompt it is."""
    lender = fleet.start("lender-0-0", replace(LENDS, host_bytes=10 << 10))
    asker = fleet.asker(lender)
    ends, pulls = Event(), 0

    def compute(seed: int) -> None:
        for view in lender.views.values():
            view.fill_(1 + seed)
        stores(lender, numbered(seed), f"p{seed}")

    def keep_computing() -> None:
        seeds = random.Random(3)
        while not ends.is_set():
            compute(seeds.randrange(8))

    thread = Thread(target=keep_computing)
    thread.start()
    try:
        for number in range(60):
            seed, id = number % 8, f"d{number}"
            asker.desk.arrived(EngineRequest(id=id, tokens=numbered(seed)))
            while (count := asker.desk.matched(id, 0)) is None:
                asker.step()
            if not count:
                continue
            failed = pulled(asker, count, id).failed
            pulls += not failed
            blocks = HERE[1][: count // 4]
            assert failed or all((asker.views["f.1"][b] == 1 + seed).all() for b in blocks)
            asker.desk.finished(EngineRequest(id=id, tokens=numbered(seed)), HERE, 0)
    finally:
        ends.set()
        thread.join()
    assert pulls > 5
    assert lender.part(WorkerTiers).host.counts.evicted_rows > 20
    wait_for(lambda: num_leases(lender) == 0)
    lender.part(WorkerTiers).host.check()


def numbered(seed: int) -> list[int]:
    return list(range(1000 * seed, 1000 * seed + len(PROMPT)))


def test_an_engine_is_named_by_what_its_agents_are_called():
    assert instance_of("a-b-0-1") == instance_of("a-b-1-0-lent") == "a-b"


# ── options ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("given", ["tcp://a:7000,dns://b:7000", ["tcp://a:7000", "dns://b:7000"]])
def test_peers_are_a_list_or_a_text(given: object):
    options = ConnectorOptions.of({"peers": given})
    assert options.peers == ("tcp://a:7000", "dns://b:7000")
