"""Both sides of the connector around a small pretended engine: real arenas, agents and tiers.

The engine is pretended (it only fills memory and keeps ids), everything of ours is real; vLLM
itself is in tests/vllm.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import EngineRequest, OfferBlocks
from kvstow.adapters.vllm.scheduler.side import SchedulerSide
from kvstow.adapters.vllm.worker.part import Task
from kvstow.cli import app
from kvstow.errors import StoreError, TransferError
from kvstow.threads import broken_threads
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric
from pretended_engine import (
    HEADS,
    NUM_BLOCKS,
    PROMPT,
    Engine,
    Seen,
    WayToTell,
    declaration,
)
from recorded_vllm import engine_state
from waiting import wait_for

SETTINGS = ConnectorOptions(digest="always", lease_seconds=60, transfer_seconds=20)
BRIEF = replace(SETTINGS, lease_seconds=0.3)
"""Leases that run out while a test waits for it."""


@contextmanager
def started(
    settings: ConnectorOptions, *orders: str, told: WayToTell = "in steps"
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine."""
    fabric = Fabric()
    pair = [
        Engine.start(fabric, f"engine-{i}", settings, order, told=told)
        for i, order in enumerate(orders)
    ]
    yield pair[0], pair[1]
    for engine in pair:
        engine.hands.close()


@pytest.fixture(params=[("BLHNC", "BLHNC"), ("BLHNC", "LBHNC"), ("LBHNC", "LBHNC")])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    with started(SETTINGS, *request.param) as pair:
        yield pair


@pytest.fixture
def brief_engines() -> Iterator[tuple[Engine, Engine]]:
    with started(BRIEF, "BLHNC", "LBHNC") as pair:
        yield pair


THERE = ((0, 0, 4, 5, 6), (7, 8, 9, 10, 11))
"""Blocks of the prefill side: its window has let go of the first two."""
HERE = ((0, 0, 20, 19, 18), (1, 2, 3, 13, 12))


def test_blocks_of_every_group_arrive_and_no_others_change(engines: tuple[Engine, Engine]):
    prefill, decode = engines
    prefill.fill(1)
    params = prefill.prefill(THERE)
    prefill.step()
    assert decode.decode(params, HERE) == len(PROMPT) - 1
    found = pulled(prefill, decode)
    assert (found.received, found.failed) == ({"d"}, frozenset())
    for group, names in enumerate((("w.0", "w.1"), ("f.0", "f.1"))):
        pairs = [(a, b) for a, b in zip(THERE[group], HERE[group], strict=True) if a]
        for name in names:
            for there, here in pairs:
                assert torch.equal(decode.views[name][here], prefill.views[name][there])
    touched = {b for ids in HERE for b in ids} - {0}
    untouched = sorted(set(range(NUM_BLOCKS)) - touched)
    assert all((view[untouched] == 0).all() for view in decode.views.values())


@contextmanager
def unequal(*sizes: int) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine whose kernels keep so many tokens per block in order."""
    fabric = Fabric()
    pair = [
        Engine.start(fabric, f"engine-{size}", SETTINGS, "BLHNC", block_tokens=size)
        for size in sizes
    ]
    yield pair[0], pair[1]
    for engine in pair:
        engine.hands.close()


def blocks_of(num_tokens: int, size: int, ids: Iterator[int]) -> tuple[tuple[int, ...], ...]:
    """Ids of a request's blocks as an engine has them when tokens have been computed: a window of
    8 tokens has let go of those before."""
    whole, first = -(-num_tokens // size), max(0, num_tokens - 7) // size
    window = [0] * first + [next(ids) for _ in range(first, whole)]
    return tuple(window), tuple(next(ids) for _ in range(whole))


def test_a_block_that_lacks_tokens_behind_a_window_is_not_used():
    """vLLM enters it into its prefix cache as whole: a shorter prompt would see what it lacks."""
    prompt = list(range(21))
    there, here = (blocks_of(20, size, iter(range(1, NUM_BLOCKS))) for size in (4, 8))
    assert there[0][:3] == (0, 0, 0), "tokens 8 to 11 are gone, here they are half of a block"
    with unequal(4, 8) as (prefill, decode):
        params = prefill.prefill(there, prompt[:-1])
        prefill.step()
        decode.decode(params, here, prompt=prompt)
        found = pulled(prefill, decode)
        assert found.failed == {"d"}
        assert found.counts == {"pulls refused": 1}, "nothing of it is counted as pulled"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (None, 4, "tokens per state is 4 in the source, 1 in the destination"),
        (4, 8, "has 8 tokens per block, the store 4"),
    ],
)
def test_a_store_of_opaque_or_of_other_blocks_is_refused_in_words(
    tmp_path: Path, before: int | None, after: int, says: str
):
    """What an earlier version has written, whose pages were all opaque, is not read."""
    kept = replace(SETTINGS, host_bytes=1 << 20, disk_path=str(tmp_path), disk_bytes=1 << 20)
    Engine.start(Fabric(), "engine-0-0", kept, "BLHNC", block_tokens=before).hands.close()
    with pytest.raises(StoreError, match=says):
        Engine.start(Fabric(), "engine-0-0", kept, "BLHNC", block_tokens=after)


def pulled(prefill: Engine, decode: Engine) -> Seen:
    """Steps of both engines, until decode's load is over."""
    for _ in range(5000):
        prefill.step()
        if (found := decode.step()).received:
            return found
    raise AssertionError("the load never ended")


def test_blocks_are_let_go_when_they_have_been_read(engines: tuple[Engine, Engine]):
    prefill, decode = engines
    params = prefill.prefill(THERE)
    prefill.step()
    decode.decode(params, HERE)
    for _ in range(5000):
        decode.step()
        if "p" in prefill.step().sent:
            return
    raise AssertionError("the lease never ended")


def test_tokens_that_decode_has_are_not_touched(engines: tuple[Engine, Engine]):
    prefill, decode = engines
    prefill.fill(2)
    params = prefill.prefill(THERE)
    prefill.step()
    assert decode.decode(params, HERE, computed=12) == 5
    assert not pulled(prefill, decode).failed
    assert (decode.views["f.0"][[1, 2, 3]] == 0).all()
    assert torch.equal(decode.views["f.0"][13], prefill.views["f.0"][10])


def test_a_ticket_may_be_shown_before_the_worker_has_heard_of_it(engines: tuple[Engine, Engine]):
    prefill, decode = engines
    params = prefill.prefill(THERE)
    decode.decode(params, HERE)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert not decode.step().received
    assert not pulled(prefill, decode).failed


@pytest.mark.parametrize("field", ["lease", "lease_seconds", "fingerprint"])
def test_a_forged_ticket_is_refused(engines: tuple[Engine, Engine], field: str):
    prefill, decode = engines
    params: Any = prefill.prefill(THERE)
    prefill.step()
    fields = vars(Ticket.parse(params["kvstow"]["tickets"][0]))
    other = {"lease": fields["lease"] + 1, "lease_seconds": 9.0, "fingerprint": "00" * 32}
    forged = {name: fields[name] for name in Ticket.__dataclass_fields__} | {field: other[field]}
    params["kvstow"]["tickets"] = [str(Ticket(**forged))]
    decode.decode(params, HERE)
    found = pulled(prefill, decode)
    assert (found.failed, found.counts) == ({"d"}, {"pulls ticket": 1})


def test_an_expired_lease_frees_the_blocks_and_fails_the_load(
    brief_engines: tuple[Engine, Engine],
):
    prefill, decode = brief_engines
    params = prefill.prefill(THERE)
    prefill.until(lambda found: "p" in found.sent)
    decode.decode(params, HERE)
    found = pulled(prefill, decode)
    assert found.failed == {"d"}
    assert found.counts == {"pulls expired": 1}


def test_a_ticket_of_an_earlier_time_of_the_same_blocks_fails(
    brief_engines: tuple[Engine, Engine],
):
    """What users got elsewhere: the previous prompt's answer."""
    prefill, decode = brief_engines
    stale = prefill.prefill(THERE)
    prefill.until(lambda found: "p" in found.sent)
    prefill.fill(3)
    prefill.prefill(THERE)
    prefill.step()
    decode.decode(stale, HERE)
    assert pulled(prefill, decode).failed == {"d"}


def test_a_producer_that_is_gone_fails_the_load():
    with started(replace(SETTINGS, transfer_seconds=1), "BLHNC", "LBHNC") as (prefill, decode):
        params = prefill.prefill(THERE)
        prefill.step()
        prefill.hands.agent.close()
        decode.decode(params, HERE)
        found = decode.until(lambda found: bool(found.received))
        assert found.failed == {"d"}


def test_a_failed_load_gives_the_blocks_back_before_their_lease_ends():
    fabric, slow = Fabric(), ConnectorOptions(lease_seconds=300, transfer_seconds=5)
    prefill, decode = (Engine.start(fabric, f"engine-{i}", slow, "BLHNC") for i in range(2))
    try:
        params = prefill.prefill(THERE)
        prefill.step()
        prefill.hands.agent.endpoint.owner.generations[1][10] += 1
        decode.decode(params, HERE)
        found = decode.until(lambda found: bool(found.received))
        assert (found.failed, found.counts["pulls fence"]) == ({"d"}, 1)
        assert prefill.until(lambda found: "p" in found.sent).counts == {"lease_ends aborted": 1}
    finally:
        prefill.hands.close()
        decode.hands.close()


def test_an_engine_whose_agent_has_ended_goes_on_and_hands_nothing_over(
    engines: tuple[Engine, Engine],
):
    prefill, decode = engines
    first = prefill.prefill(THERE)
    prefill.step()
    for engine in engines:
        engine.hands.agent.close()  # as good as an agent whose thread has ended with an error
    second = prefill.prefill(THERE, id="another")
    assert prefill.step().sent == {"p", "another"}
    for params in (first, second):
        decode.desk.arrived(EngineRequest(id="dropped", tokens=PROMPT, params=params))
        decode.step()
        decode.desk.finished(EngineRequest(id="dropped", tokens=PROMPT), ((), ()), 0)
        decode.step()
        decode.decode(params, HERE)
        assert decode.until(lambda found: bool(found.received)).failed == {"d"}


def test_mail_that_comes_while_a_rank_is_closed_waits_until_its_pulls_have_ended():
    engine = Engine.start(Fabric(), "engine", SETTINGS, "BLHNC")
    pulls, ends = engine.hands.pulls, list[str]()

    def pull() -> Task:
        try:
            while True:
                yield
        except TransferError:
            engine.hands.endpoint.inbox.wake()
            time.sleep(0.1)  # the listener's turn, were it not for the lock
            ends.append("closed")

    pulls._tasks.begin(pull())
    before = broken_threads()
    engine.hands.close()
    wait_for(lambda: "kvstow-mail" not in {each.name for each in threading.enumerate()})
    assert (ends, broken_threads()) == (["closed"], before)


def test_one_prefill_instance_serves_decode_instances_of_one_and_of_two_ranks():
    """Each rank reads its own heads, and the lease ends with the last rank of either instance."""
    fabric = Fabric()
    prefill = Engine.start(fabric, "prefill", SETTINGS, "BLHNC")
    pools = [
        [
            Engine.start(fabric, f"decode-{size}-{rank}", SETTINGS, "BLHNC", tp=(rank, size))
            for rank in range(size)
        ]
        for size in (1, 2)
    ]
    try:
        for seed, ranks in enumerate([pools[1], pools[0], pools[1]]):
            prefill.fill(seed)
            params = prefill.prefill(THERE)
            for rank, decode in enumerate(ranks):
                assert prefill.step().sent == frozenset()
                decode.decode(params, HERE)
                assert not decode.until(lambda found: bool(found.received)).failed
                mine = slice(rank * HEADS // len(ranks), (rank + 1) * HEADS // len(ranks))
                assert torch.equal(decode.views["f.1"][12], prefill.views["f.1"][11, mine])
                assert torch.equal(decode.views["w.0"][18], prefill.views["w.0"][6, mine])
            counts = prefill.until(lambda found: "p" in found.sent).counts
            assert counts == {"lease_ends read": 1}
    finally:
        for engine in (prefill, *pools[0], *pools[1]):
            engine.hands.close()


# ── workers that hear of offers before the next step ──────────────────────────────────────


@pytest.fixture
def in_process() -> Iterator[tuple[Engine, Engine]]:
    """Workers are told of offers through a socket, and perhaps by no step."""
    with started(SETTINGS, "BLHNC", "BLHNC", told="at once") as pair:
        yield pair


def test_a_ticket_holds_though_the_engine_that_gave_it_never_steps_again(
    in_process: tuple[Engine, Engine],
):
    """`LLM.generate` returns with the last request, and nobody steps until it is called again."""
    prefill, decode = in_process
    prefill.fill(1)
    assert decode.decode(prefill.prefill(THERE), HERE) == len(PROMPT) - 1
    found = decode.until(lambda found: bool(found.received))
    assert (found.received, found.failed) == ({"d"}, frozenset())
    assert torch.equal(decode.views["f.0"][1], prefill.views["f.0"][7])
    assert torch.equal(decode.views["w.1"][20], prefill.views["w.1"][4])


def test_blocks_read_before_the_next_step_are_let_go_in_that_step_and_once(
    in_process: tuple[Engine, Engine],
):
    prefill, decode = in_process
    decode.decode(prefill.prefill(THERE), HERE)
    decode.until(lambda found: bool(found.received))
    wait_until_read(prefill)
    sent = [prefill.step().sent for _ in range(5)]
    assert [bool(each) for each in sent].count(True) == 1
    assert frozenset().union(*sent) == {"p"}


def test_an_offer_that_is_told_after_its_lease_has_ended_is_not_adopted(
    engines: tuple[Engine, Engine],
):
    """Its blocks may be others' by then."""
    prefill, decode = engines
    params: Any = prefill.prefill(THERE)
    ticket = Ticket.parse(params["kvstow"]["tickets"][0])
    prefill.step()
    decode.decode(params, HERE)
    decode.until(lambda found: bool(found.received))
    prefill.until(lambda found: "p" in found.sent)
    after = prefill.hands.agent.endpoint.owner.generations[1].copy()
    prefill.hands.offers.hear(OfferBlocks(request="p", tickets=(ticket,)))
    assert (prefill.hands.agent.endpoint.owner.generations[1] == after).all()
    assert not any(prefill.step().sent for _ in range(3))


def test_a_ticket_holds_though_an_earlier_lease_of_its_blocks_ends_just_then():
    """Two requests share blocks. The scheduler's side has not heard of the first one's end."""
    with started(SETTINGS, "BLHNC", "BLHNC") as (prefill, decode):
        prefill.fill(1)
        first: Any = prefill.prefill(THERE)
        prefill.step()
        decode.hands.agent.drop(Ticket.parse(first["kvstow"]["tickets"][0]))
        wait_until_read(prefill)
        second = prefill.prefill(THERE, id="another")
        prefill.step()
        decode.decode(second, HERE)
        found = decode.until(lambda found: bool(found.received))
        assert (found.received, found.failed) == ({"d"}, frozenset())
        assert torch.equal(decode.views["f.0"][1], prefill.views["f.0"][7])


def test_who_does_not_know_the_secret_tells_a_worker_nothing():
    engine = Engine.start(Fabric(), "engine", SETTINGS, "BLHNC")
    try:
        inbox = engine.hands.endpoint.inbox
        stranger = replace(engine.hands.endpoint, inbox=replace(inbox, secret=b"another"))
        desk = SchedulerSide(engine_state(declaration("BLHNC"), SETTINGS))
        desk.meet([stranger])
        Engine(desk, engine.hands, engine.views).prefill(THERE)
        assert not any(engine.hands.agent.endpoint.owner.generations[1])
    finally:
        engine.hands.close()


def wait_until_read(prefill: Engine) -> None:
    """The consumer's last word reaches the producer's agent, which nobody calls meanwhile."""
    limit = time.monotonic() + 10
    while prefill.hands.agent.server.leases and time.monotonic() < limit:
        time.sleep(0.005)
    assert not prefill.hands.agent.server.leases


def shown(*engines: Engine) -> list[dict[str, Any]]:
    """What `kvstow status` reads at the addresses of these engines' agents."""
    addresses = [engine.hands.endpoint.address for engine in engines]
    done = CliRunner().invoke(app, ["status", *addresses, "--json"])
    assert done.exit_code == 0, done.stdout
    return json.loads(done.stdout)


def test_status_shows_what_engines_moved(engines: tuple[Engine, Engine]):
    prefill, decode = engines
    params = prefill.prefill(THERE)
    prefill.step()
    decode.decode(params, HERE)
    pulled(prefill, decode)
    wait_for(lambda: not len(prefill.hands.agent.server.leases))
    there, here = shown(prefill, decode)
    assert here["metrics"]['kvstow_transfers_total{outcome="accepted"}'] == 1
    assert here["peers"][0]["moved_bytes"] == there["guests"][0]["moved_bytes"] > 0
