"""Prefixes without tickets: asked for by key, answered by a ticket or a miss."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.offload.keys import block_keys
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, State, Window
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.messages import AnyMessage, AskPrefix, TellPrefix
from kvstow.transfer.options import Options
from kvstow.transfer.prefixes import GONE, MOST_LEASES, NONE
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import attention
from waiting import wait_for

MODEL = Identity(model="m", weights="ab" * 16)
OTHER = Identity(model="m", weights="cd" * 16)
LAYERS = [attention("l.0", Full(), 4), attention("l.1", Window(8), 4)]
LAYOUT = packed(grouped(LAYERS), num_slabs=40)
PROMPT = Prompt.of(np.random.default_rng(5).integers(0, 9000, 30))


class Lent:
    """Blocks that may be asked for by their keys, as long as their generations stay."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks: dict[tuple[int, bytes], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def still(self) -> AbstractContextManager[object]:
        return nullcontext()

    def lend(self, group: int, key: bytes, block: int) -> None:
        self._blocks[group, key] = block, int(self._pool.generations[group][block])

    def ids(self, group: int, keys: Sequence[bytes]) -> np.ndarray:
        return np.array([self._id(group, key) for key in keys], np.int64)

    def _id(self, group: int, key: bytes) -> int:
        block, generation = self._blocks.get((group, key), (NONE, 0))
        is_there = block == NONE or self._pool.generations[group][block] == generation
        return block if is_there else GONE


class Engine:
    """An agent with its arena, pool and ledger; its blocks belong to the test's thread."""

    def __init__(
        self, fabric: Fabric, name: str, identity: Identity = MODEL, layout: Layout = LAYOUT
    ) -> None:
        self.arena = Arena(layout.identified(identity))
        memory = self.arena.bytes.numpy()
        memory[:] = np.random.default_rng(len(name)).integers(0, 256, len(memory), dtype=np.uint8)
        self.pool = Pool(self.arena.layout)
        self.ledger = Ledger(self.pool)
        self.identity = identity
        self.agent = Agent(
            self.arena,
            self.pool,
            transport=LocalTransport(fabric),
            name=name,
            options=Options(contact_seconds=20.0),
        )
        self.lent = Lent(self.pool)
        self.agent.prefixes.source = self.lent  # in this thread: a pool is not for any thread
        self.agent.server.on_question = self.agent.prefixes.hear
        self.agent.start()

    def holds(self, prompt: Prompt) -> int:
        """Admit a prompt as if it were computed here, and let peers ask for it."""
        request = self.ledger.admit(prompt).request
        blocks = self.ledger.blocks(request)
        for g, listed in blocks.items():
            every = block_keys(self.identity, prompt, self.ledger.groups[g].block_tokens)
            for block, k in zip(listed.ids.tolist(), listed.index.tolist(), strict=True):
                if k < len(every):
                    self.lent.lend(g, every[k], block)
        return request

    def row(self, group: int, block: int) -> bytes:
        memory = self.arena.bytes.numpy()
        runs = self.arena.layout.runs(group, block)
        return b"".join(memory[run.offset : run.end].tobytes() for run in runs)


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    fabric = Fabric()
    engines = Engine(fabric, "producer"), Engine(fabric, "a consumer")
    yield engines
    for engine in engines:
        engine.agent.close()


def asked(
    consumer: Engine, producer: Engine, keys: list[bytes], step: int = 4, seconds: float = 20
) -> Ticket | None:
    """Ask in another thread, while the producer settles in this one."""
    with ThreadPoolExecutor(1) as thread:
        answer: Future[Ticket | None] = thread.submit(
            consumer.agent.ask, producer.agent.address, keys, step=step, seconds=seconds
        )
        while not answer.done():
            producer.agent.settle()
            time.sleep(0.002)
    return answer.result()


def misses(consumer: Engine) -> dict[str, int]:
    """What the consumer was told about questions that got no ticket."""
    (peer,) = consumer.agent.peers.all.values()
    return dict(peer.misses)


def keys_of(prompt: Prompt, identity: Identity = MODEL, step: int = 4) -> list[bytes]:
    return block_keys(identity, prompt, step)


def test_a_prefix_that_is_asked_for_is_pulled_byte_for_byte(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    there = producer.ledger.blocks(producer.holds(PROMPT))
    ticket = asked(consumer, producer, keys_of(PROMPT))
    assert ticket is not None
    assert ticket.num_tokens == 28
    mine = consumer.ledger.blocks(consumer.ledger.admit(PROMPT).request)
    transfer = consumer.agent.pull(ticket, into=mine)
    while not transfer.done:
        producer.agent.settle()
        consumer.agent.settle()
        time.sleep(0.002)
    transfer.wait()
    for g, listed in ticket.blocks.items():
        theirs = dict(zip(there[g].index.tolist(), there[g].ids.tolist(), strict=True))
        ours = dict(zip(mine[g].index.tolist(), mine[g].ids.tolist(), strict=True))
        for k in listed.index.tolist():
            assert consumer.row(g, ours[k]) == producer.row(g, theirs[k])


def test_what_is_not_lent_is_a_miss(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    keys = keys_of(PROMPT)
    assert asked(consumer, producer, keys) is None
    producer.holds(Prompt.of(PROMPT.tokens[::-1].copy()))
    assert asked(consumer, producer, keys) is None
    assert producer.agent.prefixes.answers == {"miss": 2}
    assert misses(consumer) == {"absent": 2}


def test_blocks_that_have_changed_hands_are_a_miss(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    producer.ledger.release(producer.holds(PROMPT))
    held = asked(consumer, producer, keys_of(PROMPT))
    assert held is not None  # cached rows are still what they were
    consumer.agent.drop(held)
    while len(producer.agent.server.leases):
        producer.agent.settle()
        time.sleep(0.002)
    producer.agent.settle()
    for seed in range(20):
        fresh = Prompt.of(np.random.default_rng(seed).integers(0, 9000, 60))
        producer.ledger.release(producer.ledger.admit(fresh).request)
    for count in (1, 2):  # it is remembered
        assert asked(consumer, producer, keys_of(PROMPT)) is None
        assert misses(consumer) == {"evicted": count}
    assert producer.agent.prefixes.answers == {"ticket": 1, "evicted": 2}
    producer.holds(PROMPT)
    assert asked(consumer, producer, keys_of(PROMPT)) is not None


def test_other_weights_of_the_same_shape_do_not_even_meet():
    fabric = Fabric()
    producer, consumer = Engine(fabric, "producer"), Engine(fabric, "consumer", OTHER)
    producer.holds(PROMPT)
    with pytest.raises(TransferError, match="weights"):
        asked(consumer, producer, keys_of(PROMPT, OTHER))
    for engine in (producer, consumer):
        engine.agent.close()


def test_a_question_under_another_identity_is_a_miss(pair: tuple[Engine, Engine]):
    producer, _ = pair
    producer.holds(PROMPT)
    keys = b"".join(keys_of(PROMPT))
    forged = AskPrefix(1, OTHER.digest, 4, keys)
    said: list[AnyMessage] = []
    producer.agent.prefixes.hear(SimpleNamespace(send=said.append), forged)  # pyright: ignore
    wait_for(lambda: producer.agent.settle() or said)
    assert said == [TellPrefix(1, b"", "identity")]
    assert producer.agent.prefixes.answers == {"identity": 1}


def test_recurrent_states_are_not_given_to_askers_and_the_answer_is_counted_as_such():
    """A state is overwritten in place as its request goes on: its block holds a key's bytes for a
    moment only, and its generation does not tell."""
    state = replace(attention("l.1", Full(), 4), retention=State(), states=1)
    layout = packed(grouped([LAYERS[0], state]), num_slabs=40)
    fabric = Fabric()
    producer, consumer = (Engine(fabric, name, layout=layout) for name in ("p", "a consumer"))
    try:
        producer.holds(Prompt.of(PROMPT.tokens[:28]))
        assert asked(consumer, producer, keys_of(PROMPT)) is None
        assert producer.agent.prefixes.answers == misses(consumer) == {"states": 1}
    finally:
        for engine in (producer, consumer):
            engine.agent.close()


def test_a_tenants_rows_are_found_by_its_own_keys_only(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    tenant = MODEL.for_request(salt="tenant")
    producer.identity = tenant
    producer.holds(PROMPT)
    assert asked(consumer, producer, keys_of(PROMPT)) is None
    assert asked(consumer, producer, keys_of(PROMPT, tenant)) is not None


@pytest.mark.parametrize("step", [1, 2, 4])
def test_keys_may_be_given_more_often_than_blocks_end(pair: tuple[Engine, Engine], step: int):
    producer, consumer = pair
    producer.holds(PROMPT)
    ticket = asked(consumer, producer, keys_of(PROMPT, step=step), step)
    assert ticket is not None
    assert ticket.num_tokens == 28


def test_keys_that_end_inside_of_blocks_are_a_miss(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    producer.holds(PROMPT)
    assert asked(consumer, producer, keys_of(PROMPT, step=3), 3) is None
    assert producer.agent.prefixes.answers == misses(consumer) == {"step": 1}


@pytest.mark.parametrize("keys", [[], [b"short"], [bytes(32), bytes(31)], ["k" * 32]])
def test_what_cannot_be_asked_is_refused_here(pair: tuple[Engine, Engine], keys: list[bytes]):
    producer, consumer = pair
    with pytest.raises(TransferError, match="keys"):
        consumer.agent.ask(producer.agent.address, keys, step=4)


@pytest.mark.parametrize("step", [0, -4, 1.5])
def test_a_step_that_there_is_not_is_refused_at_once(pair: tuple[Engine, Engine], step: int):
    """The peer dropped the question, and whoever asked waited for nothing."""
    producer, consumer = pair
    with pytest.raises(TransferError, match="a step of"):
        consumer.agent.ask(producer.agent.address, [bytes(32)], step=step)


def test_an_agent_that_was_not_started_does_not_wait_for_ever(pair: tuple[Engine, Engine]):
    arena = Arena(LAYOUT.identified(MODEL))
    transport = LocalTransport(Fabric())
    agent = Agent(arena, Pool(arena.layout), transport=transport, name="idle")
    address = pair[0].agent.address
    with pytest.raises(TransferError, match="did not answer"):
        agent.ask(address, keys_of(PROMPT), step=4, seconds=0.1)
    with pytest.raises(TransferError, match="did not answer"):
        agent.connect(address, seconds=0.1)
    agent.close()


def test_a_question_without_an_answer_ends_in_its_time_and_the_agent_still_serves(
    pair: tuple[Engine, Engine],
):
    producer, consumer = pair
    producer.agent.server.on_question = lambda peer, question: None
    with pytest.raises(TransferError, match=r"hint: its owner must call settle\(\) more often"):
        asked(consumer, producer, keys_of(PROMPT), seconds=0.5)
    producer.agent.server.on_question = producer.agent.prefixes.hear
    producer.holds(PROMPT)
    assert asked(consumer, producer, keys_of(PROMPT)) is not None


def test_an_offer_that_fails_is_a_miss_with_that_reason(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    producer.holds(PROMPT)
    with mock.patch.object(
        producer.agent.offers, "offer", side_effect=TransferError("no", kind="refused")
    ):
        assert asked(consumer, producer, keys_of(PROMPT)) is None
    assert producer.agent.prefixes.answers == misses(consumer) == {"error": 1}


def test_too_many_open_answers_are_misses_until_some_have_ended(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    producer.holds(PROMPT)
    prefixes = producer.agent.prefixes
    for _ in range(MOST_LEASES):
        assert prefixes._room.acquire(blocking=False)
    assert asked(consumer, producer, keys_of(PROMPT)) is None
    assert prefixes.answers == misses(consumer) == {"busy": 1}


def test_a_ticket_that_comes_too_late_is_given_back(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    producer.holds(PROMPT)
    with pytest.raises(TransferError, match="did not answer"):  # nobody settles there
        consumer.agent.ask(producer.agent.address, keys_of(PROMPT), step=4, seconds=0.3)
    leases = producer.agent.server.leases
    until = time.monotonic() + 20
    while not producer.agent.prefixes.answers or len(leases):
        assert time.monotonic() < until
        producer.agent.settle()
        time.sleep(0.01)
    assert producer.agent.prefixes.answers == {"ticket": 1}


def test_a_peers_ticket_must_be_its_own(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    request = producer.holds(PROMPT)
    foreign = Ticket(
        agent="somebody else",
        start="x",
        address="tcp://127.0.0.1:1",
        key="",
        lease=1,
        lease_seconds=1.0,
        fingerprint="f",
        num_tokens=4,
        blocks=producer.ledger.blocks(request),
        generations={
            g: np.zeros(len(b), np.int64) for g, b in producer.ledger.blocks(request).items()
        },
        identity=MODEL.digest,
    )
    producer.agent.server.on_question = lambda peer, asked: peer.send(
        TellPrefix(asked.question, foreign.to_bytes())
    )
    with pytest.raises(TransferError, match="somebody else"):
        asked(consumer, producer, keys_of(PROMPT))


def test_two_agents_that_ask_each_other_both_get_an_answer():
    """Each has a thread of its own, which waits for the other's answer."""
    fabric, together = Fabric(), Barrier(2)
    addresses: dict[str, str] = {}
    answered: list[str] = []

    def life(name: str, other: str) -> int:
        engine = Engine(fabric, name)
        engine.holds(PROMPT)
        addresses[name] = engine.agent.address
        together.wait(20)
        ticket = engine.agent.ask(addresses[other], keys_of(PROMPT), step=4, seconds=20)
        answered.append(name)
        wait_for(lambda: engine.agent.settle() or other in answered)
        together.wait(20)
        engine.agent.close()
        assert ticket is not None
        return ticket.num_tokens

    with ThreadPoolExecutor(2) as threads:
        lives = [threads.submit(life, *names) for names in (("one", "two"), ("two", "one"))]
        assert [one.result() for one in lives] == [28, 28]


def test_questions_under_way_end_when_the_agent_is_closed(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    producer.holds(PROMPT)
    addresses = producer.agent.address, "tcp://127.0.0.1:9"
    answers = [consumer.agent.begin_ask(address, keys_of(PROMPT), step=4) for address in addresses]
    wait_for(lambda: any(peer.readers for peer in consumer.agent.peers.all.values()))
    consumer.agent.close()
    for answer in answers:
        assert answer.done()
        assert isinstance(answer.exception(), TransferError)


def test_a_question_to_a_peer_that_is_lost_ends_at_once(pair: tuple[Engine, Engine]):
    producer, consumer = pair
    producer.holds(PROMPT)
    answer = consumer.agent.begin_ask(producer.agent.address, keys_of(PROMPT), step=4)
    (peer,) = consumer.agent.peers.all.values()
    wait_for(lambda: bool(peer.readers))
    consumer.agent.loop.submit(lambda: peer.lose(TransferError("it is gone", kind="peer")))
    with pytest.raises(TransferError, match="it is gone"):
        answer.result(5)


def test_a_source_that_raises_costs_no_room(pair: tuple[Engine, Engine]):
    agent = pair[0].agent
    question = AskPrefix(1, MODEL.digest, 4, b"".join(keys_of(PROMPT)))
    said: list[AnyMessage] = []
    with mock.patch.object(pair[0].lent, "ids", side_effect=ValueError("on purpose")):
        for _ in range(MOST_LEASES + 1):
            agent.prefixes.hear(SimpleNamespace(send=said.append), question)  # pyright: ignore
            agent.settle()
    assert said == []
    assert agent.prefixes.answers == {}
