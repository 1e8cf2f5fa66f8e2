"""Kills and stops inside of pulls between real processes: at a random byte, either side, over and
over. Pulls are slow, in many pieces, so that most of what happens falls into their middle."""

import random
import time
from collections import Counter
from typing import Any

import pytest

from kvstow.plan.group import grouped
from kvstow.plan.manifest import encode
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.transfer import pull, serve
from kvstow.transfer.transport import mapped
from transfer_node import CANARY, Node, SlowNixl, attention, rows_for
from transfer_process import Process, Remote, Zygote
from waiting import wait_for

LAYOUT = packed(
    grouped([attention(f"l.{i}", Full(), 4) for i in range(2)]),
    num_slabs=80,
    site=Site(model="big"),
)
TOKENS = 4 * 36
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1, (1, 40)), rows_for(LAYOUT, TOKENS, 2, (41, 80))
PULL_SECONDS = 0.03
PIECE_BYTES = 256
SECONDS_AFTER = 2.0
WAYS = ("read", "write", "slots")
OPTIONS = {
    "contact_seconds": 8.0,
    "heartbeat_seconds": 0.2,
    "lease_seconds": 5.0,
    "transfer_seconds": 1.5,
    "drain_seconds": 0.2,
    "quarantine_seconds": 0.5,
    "slot_bytes": 1024,
}


def start(zygote: Zygote, name: str, **options: Any) -> tuple[Process, Remote]:
    process = zygote.process()
    node = process.node(encode(LAYOUT), name, options=OPTIONS | options, piece_bytes=PIECE_BYTES)
    return process, node


def here(**options: Any) -> Node:
    return Node(encode(LAYOUT), name="here", options=OPTIONS | options, transport=SlowNixl())


def check_stays(node: Node, seconds: float, when: Any) -> None:
    """No byte of a node's arena changes for so long."""
    before = node.memory.copy()
    time.sleep(seconds)
    assert (node.memory == before).all(), when


def lose_producers(zygote: Zygote, dice: random.Random, *, maps: bool, rounds: int) -> Counter[str]:
    """Pulls from a producer that is stopped or killed at any time, or gives its rows to others; how
    each ended. Every byte of the consumer's arena is compared when one is accepted, and later."""
    consumer = here(mapped=maps)
    outcomes: Counter[str] = Counter()
    process, producer = start(zygote, "p0", mapped=maps)
    try:
        for number in range(rounds):
            producer.fill(SOURCE, number)
            consumer.wipe()
            ticket = producer.offer(SOURCE, TOKENS)
            consumer.agent.connect(producer.address)
            way = None if maps else dice.choice(WAYS)
            begun = consumer.begin_pull([ticket], TARGET, digest="off", direction=way)
            time.sleep(dice.random() * PULL_SECONDS)
            is_inside = not consumer.transfers[begun].done
            fate = dice.choice(("kill", "stop", "reuse", "none"))
            if fate == "kill":
                process.kill()
            elif fate == "stop":
                process.stop()
            elif fate == "reuse":
                producer.reuse(SOURCE, 1000 + number)
            result = consumer.end_pull(begun, wait=20)
            if "error" not in result:
                assert consumer.check(TARGET, 0, TOKENS, number) == "", (number, fate)
            outcomes[f"{fate}{' inside' * is_inside}: {result.get('kind', 'accepted')}"] += 1
            if fate == "stop":
                process.resume()
            assert consumer.wait_quiet(begun, 30)
            check_stays(consumer, 0.05, (number, fate))
            if fate == "kill":
                wait_for(lambda: not is_mapped(consumer), 5)
                process.close()
                process, producer = start(zygote, f"p{number + 1}", mapped=maps)
        check_stays(consumer, SECONDS_AFTER, "the end")
    finally:
        consumer.close()
        process.close()
    return outcomes


def is_mapped(consumer: Node) -> bool:
    """Whether memory of a dead process is mapped still."""
    peers = consumer.agent.peers.all.values()
    return any(peer.mapped is not None and peer.mapped.is_gone for peer in peers)


def lose_consumers(zygote: Zygote, dice: random.Random, *, maps: bool, rounds: int) -> Counter[str]:
    """Pulls by a consumer that is stopped or killed at any time. The producer's bytes stay, its
    rows come free, and the next consumer gets what it was promised."""
    producer = here(mapped=maps, lease_seconds=0.5)
    producer.fill(SOURCE, 7)
    outcomes: Counter[str] = Counter()
    process, consumer = start(zygote, "c0", mapped=maps)
    try:
        for number in range(rounds):
            way = None if maps else dice.choice(WAYS)
            consumer.path(producer.address)
            ticket = producer.offer(SOURCE, TOKENS)
            begun = consumer.begin_pull([ticket], TARGET, digest="off", direction=way)
            time.sleep(dice.random() * PULL_SECONDS)
            fate = dice.choice(("kill", "stop", "none"))
            if fate == "kill":
                process.kill()
                process.close()
                process, consumer = start(zygote, f"c{number + 1}", mapped=maps)
                outcomes["kill"] += 1
            else:
                if fate == "stop":
                    process.stop()
                    time.sleep(dice.choice((0.01, 1.0)))
                    process.resume()
                result = consumer.end_pull(begun, wait=20)
                if "error" not in result:
                    assert consumer.check(TARGET, 0, TOKENS, 7) == "", (number, fate)
                outcomes[f"{fate}: {result.get('kind', 'accepted')}"] += 1
                assert consumer.wait_quiet(begun, 30)
                consumer.wipe()
            wait_for(lambda: producer.held() == 0, 10)
            assert producer.check(SOURCE, 0, TOKENS, 7) == "", (number, fate)
        check_stays(producer, SECONDS_AFTER, "the end")
        assert (producer.memory != CANARY).any()
    finally:
        producer.close()
        process.close()
    return outcomes


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes move in many pieces, which take some time each."""
    copied = mapped.copied
    for module in (pull, serve):
        monkeypatch.setattr(module, "chunk_bytes", lambda *path: PIECE_BYTES)

    def slow(*args: Any) -> Any:
        time.sleep(0.0005)
        return copied(*args)

    monkeypatch.setattr(mapped, "STEP_BYTES", PIECE_BYTES)
    monkeypatch.setattr(mapped, "copied", slow)


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("lose", [lose_producers, lose_consumers])
def test_a_process_that_is_lost_inside_of_a_pull_makes_no_wrong_byte(zygote, slowly, lose, maps):
    outcomes = lose(zygote, random.Random(5), maps=maps, rounds=6)
    assert any("accepted" in each for each in outcomes), outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("lose", [lose_producers, lose_consumers])
def test_a_hundred_times(zygote, slowly, lose, maps):
    outcomes = lose(zygote, random.Random(6), maps=maps, rounds=100)
    print(dict(outcomes))
    if lose is lose_producers:
        inside = sum(n for what, n in outcomes.items() if what.startswith(("kill in", "stop in")))
        assert inside > 20, outcomes
