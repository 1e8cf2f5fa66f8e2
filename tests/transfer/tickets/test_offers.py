"""Offers: a ticket keeps its blocks, whoever wrote it, or leaves them as they were."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstow.blocks.pool import Pool
from kvstow.errors import BlockError, SpecError, TransferError
from kvstow.memory.arena import Arena
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.options import Options
from kvstow.transfer.tickets.owner import Generations, OwnerQueue
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import IDENTITY, hybrid_layout
from waiting import wait_for

LAYOUT = hybrid_layout()
TOKENS = 8


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def agent(fabric: Fabric) -> Iterator[Agent]:
    transport = LocalTransport(fabric)
    with Agent(Arena(LAYOUT), Pool(LAYOUT), transport=transport, identity=IDENTITY) as made:
        yield made


@pytest.fixture
def pool(agent: Agent) -> Pool:
    assert isinstance(agent.endpoint.owner, Pool)
    return agent.endpoint.owner


def through_an_engine(fabric: Fabric, rows: Pool) -> Agent:
    """An agent whose pulls go through its engine."""
    return Agent(
        Arena(LAYOUT),
        rows,
        transport=LocalTransport(fabric),
        identity=IDENTITY,
        options=Options(mapped=False),
    )


def written(agent: Agent, blocks: dict[int, Blocks], lease: int) -> Ticket:
    """A ticket that somebody else writes in an agent's name."""
    endpoint = agent.endpoint
    return Ticket(
        agent=agent.name,
        start=endpoint.start,
        address=agent.address,
        key="",
        lease=lease,
        lease_seconds=30.0,
        fingerprint=endpoint.fingerprint,
        num_tokens=TOKENS,
        blocks=blocks,
        generations=endpoint.generations(blocks),
        identity=endpoint.identity.digest,
    ).signed(agent.ticket_key)


def test_a_ticket_that_was_written_elsewhere_keeps_its_blocks_until_its_lease_ends(agent, pool):
    ids = pool.hold(0, 2)
    ticket = written(agent, {0: Blocks.first(ids)}, lease=7)
    ended: list[str] = []
    agent.adopt(ticket, on_end=ended.append)
    pool.release(0, ids)
    assert pool.num_held(0) == 2
    agent.withdraw(ticket)
    wait_for(lambda: agent.settle() or ended)
    assert ended == ["withdrawn"]
    assert pool.num_held(0) == 0


def test_a_ticket_that_is_shown_before_it_is_adopted_is_waited_for(agent, pool, fabric):
    offered = {g: Blocks.first(pool.hold(g, 2)) for g in range(len(LAYOUT.groups))}
    ticket = written(agent, offered, lease=7)
    rows = Pool(LAYOUT)
    with through_an_engine(fabric, rows) as reader:
        into = {g: Blocks.first(rows.hold(g, 2)) for g in range(len(LAYOUT.groups))}
        with pytest.raises(TransferError, match="not given out here"):
            reader.pull(ticket, into=into).wait(20)
        wait_for(lambda: not agent.server.servings)
        transfer = reader.pull(ticket, into=into)
        wait_for(lambda: agent.server.servings)
        assert not transfer.done
        agent.adopt(ticket)
        assert transfer.wait(20).fence == "passed"


@pytest.mark.parametrize("field", ["agent", "start", "fingerprint"])
def test_a_ticket_of_another_agent_start_or_layout_is_not_adopted(agent, pool, field):
    ids = pool.hold(0, 2)
    ticket = replace(written(agent, {0: Blocks.first(ids)}, lease=7), **{field: "another"})
    with pytest.raises(TransferError, match="not of") as caught:
        agent.adopt(ticket)
    assert caught.value.kind == "ticket"
    pool.release(0, ids)
    assert pool.num_held(0) == 0


def test_an_offer_of_a_closed_agent_keeps_nothing(agent, pool):
    ids = pool.hold(0, 2)
    agent.close()
    with pytest.raises(TransferError):
        agent.offer_blocks({0: Blocks.first(ids)}, TOKENS)
    pool.release(0, ids)
    assert pool.num_held(0) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"readers": 0},
        {"readers": 1.5},
        {"lease_seconds": 0},
        {"lease_seconds": float("nan")},
        {"lease_seconds": 1e9},
        {"num_tokens": -1},
        {"num_tokens": 1.5},
    ],
)
def test_an_offer_that_no_ticket_can_say_is_refused_and_keeps_nothing(agent, pool, wrong):
    """Blocks that had been shared for it were never given back."""
    ids = pool.hold(0, 2)
    with pytest.raises(TransferError):
        agent.offer_blocks({0: Blocks.first(ids)}, **{"num_tokens": TOKENS, **wrong})
    pool.release(0, ids)
    assert pool.num_held(0) == 0


@pytest.mark.parametrize("name", ["x" * 257, "\ud800", 5])
def test_an_agent_name_that_peers_cannot_be_told_is_refused(fabric, name):
    with pytest.raises(SpecError, match="agent name"):
        Agent(
            Arena(LAYOUT),
            Pool(LAYOUT),
            transport=LocalTransport(fabric),
            identity=IDENTITY,
            name=name,
        )


@pytest.mark.parametrize("options", [{"direction": "push"}, {"digest": "none"}])
def test_a_pull_by_a_way_that_there_is_not_is_refused(agent, pool, fabric, options):
    """It moved nothing, and was accepted where nobody compared digests."""
    offered = {g: Blocks.first(pool.hold(g, 2)) for g in range(len(LAYOUT.groups))}
    ticket = agent.offer_blocks(offered, TOKENS)
    rows = Pool(LAYOUT)
    with through_an_engine(fabric, rows) as reader:
        into = {g: Blocks.first(rows.hold(g, 2)) for g in range(len(LAYOUT.groups))}
        with pytest.raises(SpecError, match="hint: one of"):
            reader.pull(ticket, into=into, **{"digest": "off", **options})
        with pytest.raises(TransferError, match=r"hint: kvstow.Ticket.parse\(text\)"):
            reader.pull(str(ticket), into=into)
        for g, listed in into.items():
            rows.release(g, listed.ids)
            assert rows.num_held(g) == 0


def test_blocks_that_a_pull_is_writing_to_are_not_offered(agent, pool, fabric):
    """A third agent pulled what happened to be there, and every check agreed."""
    offered = {g: Blocks.first(pool.hold(g, 2)) for g in range(len(LAYOUT.groups))}
    rows = Pool(LAYOUT)
    with through_an_engine(fabric, rows) as relay:
        into = {g: Blocks.first(rows.hold(g, 2)) for g in range(len(LAYOUT.groups))}
        cable = (agent.endpoint.transport.name, relay.endpoint.transport.name)
        relay.connect(agent.address)
        fabric.cut(*cable)
        pull = relay.pull(agent.offer_blocks(offered, TOKENS), into=into, start_token=4)
        with pytest.raises(TransferError, match="1 of 2 blocks hold nothing that may be used"):
            relay.offer_blocks(into, TOKENS)
        assert [rows.num_held(g) for g in into] == [2] * len(into)
        before = {0: Blocks.first(into[0].ids[:1])}
        assert relay.offer_blocks(before, 4).num_blocks == 1  # written to by nobody
        fabric.reconnect(*cable)
        pull.wait(20)
        assert relay.offer_blocks(into, TOKENS).num_blocks == 2 * len(into)


def failed_pull(agent: Agent, reader: Agent, offered, into, start_token: int = 0) -> None:
    """Have a pull fail, and come to rest: its ticket was taken back."""
    ticket = agent.offer_blocks(offered, TOKENS)
    agent.withdraw(ticket)
    pull = reader.pull(ticket, into=into, start_token=start_token)
    with pytest.raises(TransferError):
        pull.wait(20)
    assert pull.wait_quiet(20)


def test_an_engine_knows_itself_what_its_blocks_hold_once_a_pull_is_over(agent, pool, fabric):
    """It may have computed them by then; while the pull is not quiet it cannot have."""
    offered = {g: Blocks.first(pool.hold(g, 1)) for g in range(len(LAYOUT.groups))}
    rows = Generations(LAYOUT)
    with through_an_engine(fabric, rows) as relay:
        relay.connect(agent.address)
        cable = (agent.endpoint.transport.name, relay.endpoint.transport.name)
        fabric.cut(*cable)
        ticket = agent.offer_blocks(offered, 4)
        into = {g: Blocks.first([rows.rows_per_slab]) for g, rows in enumerate(LAYOUT.groups)}
        pull = relay.pull(ticket, into=into)
        with pytest.raises(TransferError, match="a pull is still writing to them"):
            relay.offer_blocks(into, 4)
        agent.withdraw(ticket)
        wait_for(lambda: ticket.lease not in agent.server.leases)
        fabric.reconnect(*cable)
        with pytest.raises(TransferError):
            pull.wait(20)
        assert pull.wait_quiet(20)
        assert relay.offer_blocks(into, 4).num_blocks == len(into)


def test_a_pull_behind_a_failed_one_does_not_vouch_for_its_rows(agent, pool, fabric):
    """Rows of tokens before the first are not written, and stay what they were."""
    offered = {g: Blocks.first(pool.hold(g, 2)) for g in range(len(LAYOUT.groups))}
    rows = Pool(LAYOUT)
    with through_an_engine(fabric, rows) as relay:
        into = {g: Blocks.first(rows.hold(g, 2)) for g in offered}
        failed_pull(agent, relay, offered, into)
        relay.pull(agent.offer_blocks(offered, TOKENS), into=into, start_token=4).wait(20)
        assert rows.unknown(0, into[0].ids).tolist() == [True, False]
        with pytest.raises(BlockError, match="its content is not known"):
            rows.keep(0, into[0].ids)


def test_rows_of_tokens_before_a_pull_stay_cached(agent, pool, fabric):
    offered = {g: Blocks.first(pool.hold(g, 2)) for g in range(len(LAYOUT.groups))}
    rows = Pool(LAYOUT)
    with through_an_engine(fabric, rows) as reader:
        into = {g: Blocks.first(rows.hold(g, 2)) for g in offered}
        rows.keep(0, into[0].ids[:1])
        generation = int(rows.generations[0][into[0].ids[0]])
        failed_pull(agent, reader, offered, into, start_token=4)
        assert rows.kept(0, into[0].ids).tolist() == [True, False]
        assert rows.generations[0][into[0].ids[0]] == generation, "who reads it may go on"


def test_all_blocks_are_shared_or_none():
    pool = Pool(LAYOUT)
    held = pool.hold(0, 2)
    nobodys = pool.hold(1, 1)
    pool.release(1, nobodys)
    with pytest.raises(BlockError):
        OwnerQueue(pool, lambda error: None).share(
            {0: Blocks.first(held), 1: Blocks.first(nobodys)}
        )
    pool.release(0, held)
    assert pool.num_held(0) == pool.num_held(1) == 0


def test_a_ticket_that_is_adopted_twice_gives_all_its_blocks_back(agent, pool):
    ids = pool.hold(0, 2)
    ticket = written(agent, {0: Blocks.first(ids)}, 77)
    for _ in range(2):
        agent.adopt(ticket)
    agent.withdraw(ticket)
    pool.release(0, ids)

    def are_free() -> bool:
        agent.settle()
        return pool.num_held(0) == 0

    wait_for(are_free)
