"""What an agent is made of and asked for: mistakes are errors that say what to do."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.errors import SpecError, TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.identity import Identity
from kvstow.plan.manifest import encode
from kvstow.transfer.agent import Agent
from kvstow.transfer.options import Options
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import Node, from_json, hybrid_layout, rows_for
from waiting import PATIENCE, wait_for

LAYOUT = hybrid_layout()
MANIFEST = encode(LAYOUT)
IDENTITY = Identity.unverified("bytes of a test")
TOKENS = 18


def made(owner: Any, **how: Any) -> Agent:
    transport = LocalTransport(Fabric())
    return Agent(Arena(LAYOUT), owner, transport=transport, **{"identity": IDENTITY, **how})


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Pool(LAYOUT))


@pytest.fixture
def agent(ledger: Ledger) -> Iterator[Agent]:
    with made(ledger.pool) as agent:
        yield agent


def test_a_request_of_a_ledger_on_another_pool_is_not_offered(agent, ledger):
    ledger.admit(TOKENS)
    other = Ledger(Pool(LAYOUT))  # its first request has the very ids that ours has
    with pytest.raises(TransferError, match=r"another pool(.|\n)*ledger\.pool"):
        agent.offer(other, other.admit(TOKENS).request)


def test_waiting_for_an_agent_that_was_not_started_says_so(agent, ledger):
    ticket = agent.offer(ledger, ledger.admit(TOKENS).request)
    idle = Ledger(Pool(LAYOUT))
    consumer = made(idle.pool)
    pull = consumer.pull(ticket, into=idle.blocks(idle.admit(TOKENS).request))
    with pytest.raises(TimeoutError, match=r"not started: agent\.start\(\)"):
        pull.wait(0.01)
    consumer.close()


def test_an_agent_that_was_closed_does_not_start_again(ledger):
    agent = made(ledger.pool)
    agent.close()
    with pytest.raises(TransferError, match="is closed"):
        agent.start()


@pytest.mark.parametrize("listen", ["127.0.0.1:1234", "localhost:1234", ""])
def test_an_address_without_its_scheme_is_refused_as_such(ledger, listen):
    with pytest.raises(TransferError, match=r"does not begin with tcp://, ipc:// or inproc://"):
        made(ledger.pool, listen=listen)


def test_an_address_to_dial_without_its_scheme_is_refused_as_such(agent):
    with pytest.raises(TransferError, match=r"does not begin with tcp://, ipc:// or inproc://"):
        agent.connect("foo")


@pytest.mark.parametrize("into", [1, [1, 2]])
def test_rows_that_are_not_listed_by_group_are_refused(agent, ledger, into):
    ticket = agent.offer(ledger, ledger.admit(TOKENS).request)
    with pytest.raises(TransferError, match=r"hint: ledger\.blocks\(request\)"):
        agent.pull(ticket, into=into)


def test_what_is_taken_for_a_pool_options_or_an_identity_is_refused(ledger):
    with pytest.raises(SpecError, match=r"hint: ledger\.pool"):
        made(ledger)
    with pytest.raises(SpecError, match=r"options are dict"):
        made(ledger.pool, options={"lease_seconds": 3})
    with pytest.raises(SpecError, match="lease_seconds is '3'"):
        Options(lease_seconds="3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TransferError, match="an identity is str"):
        made(ledger.pool, identity="llama")


def test_a_pool_of_another_layout_is_refused_as_such():
    with pytest.raises(TransferError, match="the pool's layout is not the arena's"):
        made(Pool(hybrid_layout(num_slabs=24)))


@pytest.mark.parametrize("text", [None, b"kvt3."])
def test_a_ticket_that_is_no_text_is_refused(text):
    with pytest.raises(TransferError, match="not text"):
        Ticket.parse(text)


def test_tokens_that_a_request_does_not_hold_are_not_offered(agent, ledger):
    request = ledger.admit(TOKENS).request
    with pytest.raises(TransferError, match=f"holds {TOKENS} tokens, {TOKENS + 1} cannot"):
        agent.offer(ledger, request, num_tokens=TOKENS + 1)
    assert agent.offer(ledger, request, num_tokens=TOKENS).num_tokens == TOKENS


# ── the end ───────────────────────────────────────────────────────────────────────────


def broken_by(node: Node, how: str) -> None:
    """End its thread by itself."""
    if how == "begin":
        node.agent.endpoint.use_device = _fail  # type: ignore[method-assign]
        node.agent.start()
    else:
        node.agent.start()
        node.agent.loop.submit(sys.exit)


def _fail() -> None:
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize("how", ["begin", "command"])
def test_nobody_waits_for_an_agent_whose_thread_has_broken(how):
    """Its leases never ended, its pulls were never quiet, and it could not even be closed."""
    layout, fabric, ended = hybrid_layout(24), Fabric(), []
    source, target = rows_for(layout, TOKENS, 1, (1, 12)), rows_for(layout, TOKENS, 2, (12, 24))
    producer = Node(encode(layout), fabric)
    node = Node(encode(layout), fabric, is_started=False)
    node.offer(source, TOKENS, on_end=ended.append)
    ticket = Ticket.parse(producer.offer(source, TOKENS))
    transfer = node.agent.pull(ticket, into=from_json(target))
    fabric.cut(producer.agent.endpoint.start, node.agent.endpoint.start)
    broken_by(node, how)
    with pytest.raises(TransferError, match="is closed"):
        transfer.wait(PATIENCE)
    assert transfer.wait_quiet(PATIENCE)
    wait_for(lambda: node.agent.settle() or ended)
    assert ended == ["closed"]
    assert node.held() == 0
    assert node.agent.endpoint.transport.is_closed  # type: ignore[attr-defined]
    node.close()
    node.close()
    producer.close()


def test_a_lease_that_is_offered_while_its_agent_is_closed_ends():
    """What was submitted last began when all leases had ended: it ran for ever."""
    node, ended = Node(MANIFEST, Fabric(), is_started=False), []
    loop, rows = node.agent.loop, rows_for(LAYOUT, TOKENS, 1)
    close = loop.close

    def offer_and_close() -> None:
        node.offer(rows, TOKENS, on_end=ended.append)
        close()

    loop.close = offer_and_close  # type: ignore[method-assign]
    node.close()
    assert ended == ["closed"]
    assert node.held() == 0
    assert not len(node.agent.server.leases)


@pytest.mark.parametrize("what", ["leases", "step", "routines", "sockets"])
def test_an_agent_lets_go_of_everything_whatever_fails_while_it_is_closed(monkeypatch, what):
    node = Node(MANIFEST, Fabric(), is_started=False)
    agent, rows, ended = node.agent, rows_for(LAYOUT, TOKENS, 1), []
    node.offer(rows, TOKENS, on_end=ended.append)
    agent.loop.step()
    where, name = {
        "leases": (agent.server.leases, "close"),
        "step": (agent.loop, "step"),
        "routines": (agent.loop, "close"),
        "sockets": (agent.channel, "close"),
    }[what]
    with monkeypatch.context() as patched:
        patched.setattr(where, name, _fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            agent.close()
    assert agent.endpoint.transport.is_closed  # type: ignore[attr-defined]
    assert ended == ([] if what == "leases" else ["closed"])
    if what == "sockets":
        agent.channel.close()
