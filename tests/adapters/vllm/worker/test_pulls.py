"""Pulls from a producer that hangs while it writes: its request goes on, its blocks stay away.

The producer's agent is stopped for real, in the middle of a write: between two copies of it.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from kvstow.adapters.vllm.mail import Inbox
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    EarlyAnswer,
    EarlyOutcome,
    EarlyPull,
    EngineRequest,
    PullBlocks,
    StepResults,
    handover_in,
)
from kvstow.adapters.vllm.worker import pulls
from kvstow.transfer import serve
from kvstow.transfer.pulls import Transfer
from kvstow.transfer.transport.local import Fabric, LocalTransport
from pretended_engine import NUM_BLOCKS, PROMPT, Engine
from recorded_vllm import Pool
from waiting import wait_for

THERE = ((0, 0, 4, 5, 6), (7, 8, 9, 10, 11))
HERE = ((0, 0, 20, 19, 18), (1, 2, 3, 13, 12))
OURS = {20, 19, 18, 1, 2, 3, 13, 12}
CANARY = -7.0
WRITES = ConnectorOptions(digest="always", direction="write")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "HOLD_SECONDS", 0.05)


class HungWriter:
    """An engine that stops before the third copy that it writes, until it is woken."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.hangs, self.awake = Event(), Event()
        transport = engine.hands.agent.endpoint.transport
        assert isinstance(transport, LocalTransport)
        transport.before_copy = self._stop

    def _stop(self, index: int) -> None:
        if index >= 2:
            self.hangs.set()
            assert self.awake.wait(120)


@contextmanager
def hung(*orders: str, pool: Pool, computed: int = 0) -> Iterator[tuple[HungWriter, Engine]]:
    """A prefill that hangs in the middle of writing what decode waits for."""
    fabric = Fabric()
    prefill = Engine.start(fabric, "prefill", WRITES, orders[0])
    decode = Engine.start(fabric, "decode", WRITES, orders[1])
    decode.desk.bind(pool)  # pyright: ignore
    writer = HungWriter(prefill)
    try:
        prefill.fill(1)
        params = prefill.prefill(THERE)
        prefill.step()
        decode.decode(params, HERE, computed)
        decode.step()
        assert writer.hangs.wait(60)
        transfer = transfer_of(decode)
        transfer.abort()
        wait_for(lambda: transfer.done)
        yield writer, decode
    finally:
        writer.awake.set()
        prefill.hands.close()
        decode.hands.close()


def transfer_of(decode: Engine) -> Transfer:
    wait_for(lambda: len(decode.hands.agent.pulls.running) == 1)
    (transfer,) = decode.hands.agent.pulls.running
    return transfer


def told(decode: Engine) -> StepResults:
    return decode.until(lambda found: bool(found.received))


@pytest.mark.parametrize("orders", [("BLHNC", "BLHNC"), ("BLHNC", "LBHNC")])
def test_a_request_is_told_while_the_producer_hangs_and_its_blocks_are_held_until_it_stops(
    orders: tuple[str, str],
):
    pool = Pool()
    with hung(*orders, pool=pool) as (writer, decode):
        found = told(decode)
        assert (found.received, found.failed) == ({"d"}, {"d"})
        assert list(found.held.values()) == [tuple(sorted(OURS))]
        assert pool.held == OURS
        for view in decode.views.values():
            view.fill_(CANARY)
        assert not any((step := decode.step()).released or step.received for _ in range(50))
        writer.awake.set()
        after = decode.until(lambda found: bool(found.released))
        assert (after.received, after.held) == (frozenset(), {})
        assert pool.held == set()
        assert decode.desk.counts == {"held_blocks": 8, "released_blocks": 8}
        others = sorted(set(range(NUM_BLOCKS)) - OURS)
        assert all((view[others] == CANARY).all() for view in decode.views.values())
        late = [(view[sorted(OURS)] != CANARY).any() for view in decode.views.values()]
        assert any(late), "bytes have come late, or this test would say nothing"
        assert not any((step := decode.step()).released or step.received for _ in range(5))


def test_the_next_pull_from_a_producer_that_was_hung_works():
    with hung("BLHNC", "BLHNC", pool=Pool()) as (writer, decode):
        told(decode)
        writer.awake.set()
        decode.until(lambda found: bool(found.released))
        prefill = writer.engine
        params = prefill.prefill(THERE, id="again")
        prefill.step()
        assert decode.decode(params, HERE) == len(PROMPT) - 1
        found = told(decode)
        assert (found.failed, found.held) == (frozenset(), {})
        assert torch.equal(decode.views["f.0"][12], prefill.views["f.0"][11])


def test_blocks_that_the_pull_does_not_write_are_not_held():
    """Three blocks of the full layers are decode's own, and may be shared with others."""
    pool = Pool()
    with hung("BLHNC", "BLHNC", pool=pool, computed=12) as (_, decode):
        told(decode)
        assert pool.held == {19, 18, 13, 12}


def test_an_engine_ends_while_blocks_are_held():
    with hung("BLHNC", "BLHNC", pool=Pool()) as (_, decode):
        told(decode)
        assert len(decode.hands.pulls._holds) == 1
        decode.hands.close()
        decode.hands.pulls.resume()
        assert len(decode.hands.pulls._holds) == 0


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_failed_pull_is_mostly_quiet_at_once_and_holds_nothing(
    direction: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pulls, "HOLD_SECONDS", 20.0)
    fabric, pool = Fabric(), Pool()
    options = replace(WRITES, direction=direction)
    prefill, decode = (Engine.start(fabric, name, options, "BLHNC") for name in ("p", "d"))
    decode.desk.bind(pool)  # pyright: ignore
    try:
        params = prefill.prefill(THERE)
        prefill.step()
        prefill.hands.agent.endpoint.owner.generations[1][10] += 1
        decode.decode(params, HERE)
        found = told(decode)
        assert (found.failed, found.held, found.released) == ({"d"}, {}, [])
        assert pool.held == set()
    finally:
        prefill.hands.close()
        decode.hands.close()


def test_what_tests_with_servers_break_is_still_where_they_break_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Plugins of tests/vllm replace parts of a pull: such tests need vLLM, and are seldom run."""
    folder = Path(__file__).parents[3] / "vllm" / "plugins"
    monkeypatch.syspath_prepend(folder)
    for name, variable, owner, part in (
        ("lost_rows.lose_rows", "KVSTOW_LOST_GROUP", pulls.RankPulls, "_accept"),
        ("stopped_writes.stop_writes", "KVSTOW_STOPPED_WRITES", serve, "move_copies"),
    ):
        before = getattr(owner, part)
        monkeypatch.setattr(owner, part, before)  # put back at the end
        monkeypatch.setenv(variable, str(tmp_path / "file"))
        module, _, function = name.partition(".")
        getattr(importlib.import_module(module), function)()
        assert getattr(owner, part) is not before


@pytest.mark.parametrize(("is_met", "outcome"), [(True, "failed"), (False, "declined")])
def test_an_answer_waits_while_its_inbox_is_full(is_met: bool, outcome: EarlyOutcome):
    fabric = Fabric()
    prefill, decode = (
        Engine.start(fabric, name, WRITES, "BLHNC") for name in ("prefill", "decode")
    )
    prefill.fill(1)
    params = prefill.prefill(THERE)
    prefill.step()
    handover = handover_in(EngineRequest(id="d", tokens=[*PROMPT, 99], params=params))
    assert handover is not None
    pull = PullBlocks(
        request="d",
        tickets=() if is_met else handover.tickets,  # without a ticket every pull fails
        ids=HERE,
        start_token=0,
        num_tokens=len(PROMPT),
    )
    inbox = Inbox()
    while inbox.address.send("other mail"):
        pass
    decode.hands.pulls.hear(EarlyPull(number=7, pull=pull, answer_to=inbox.address))
    assert len(decode.hands.pulls) == 1
    while inbox.receive(0) is not None:
        pass
    decode.step()
    assert inbox.receive(5) == EarlyAnswer(7, outcome)
    assert len(decode.hands.pulls) == 0
    inbox.close()
    prefill.hands.close()
    decode.hands.close()
