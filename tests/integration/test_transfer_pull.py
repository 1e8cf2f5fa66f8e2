"""Pulls between real processes over NIXL, and between threads over the local transport."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvstow.plan.group import grouped
from kvstow.plan.manifest import encode
from kvstow.plan.pack import packed
from kvstow.plan.spec import Full
from kvstow.transfer.local import Fabric
from transfer_node import Node, attention, hybrid_layout, rows_for


@pytest.fixture(params=["local", "nixl"])
def pair(request: pytest.FixtureRequest, other) -> Iterator[tuple[Any, Node]]:
    """A producer, in another process over NIXL, and a consumer here."""
    manifest = encode(hybrid_layout())
    fabric = Fabric() if request.param == "local" else None
    name = f"producer-{request.node.name}"
    producer = (
        Node(manifest, fabric, name=name) if fabric else other.node(manifest, name)
    )  # fmt: skip
    consumer = Node(manifest, fabric, name="consumer")
    yield producer, consumer
    consumer.close()
    producer.close()


TOKENS = 18


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("digest", ["always", "sample", "off"])
def test_a_pulled_request_is_byte_exact_in_every_group(pair, direction, digest):
    producer, consumer = pair
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    producer.fill(source)
    ticket = producer.offer(source, TOKENS)
    stats = consumer.pull([ticket], target, direction=direction, digest=digest)
    assert stats["fence"] == "passed"
    assert stats["directions"] == [direction]
    assert stats["digest"] == ("off" if digest == "off" else "passed")
    assert stats["bytes"] > 0
    assert consumer.check(target, 0, TOKENS) == ""


def test_blocks_are_given_back_on_both_sides_once_the_pull_is_over(pair):
    producer, consumer = pair
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    number = consumer.begin_pull([producer.offer(source, TOKENS)], target)
    consumer.end_pull(number)
    assert consumer.wait_quiet(number, 5)
    assert consumer.held() == 0
    wait_for(lambda: producer.held() == 0)


def test_a_prefix_that_the_consumer_has_is_not_moved_again(pair):
    producer, consumer = pair
    source, target = (rows_for(hybrid_layout(), TOKENS, seed) for seed in (1, 2))
    producer.fill(source)
    whole = consumer.pull([producer.offer(source, TOKENS)], target)
    consumer.wipe()
    rest = consumer.pull([producer.offer(source, TOKENS)], target, start_token=12)
    assert consumer.check(target, 12, TOKENS) == ""
    assert 0 < rest["bytes"] < whole["bytes"]


@pytest.mark.parametrize(
    ("here", "there", "descriptors"),
    [
        ([3, 4, 5, 6], [7, 8, 9, 10], 1),
        ([3, 4, 8, 9], [3, 4, 6, 7], 2),
        ([6, 5, 4, 3], [3, 4, 5, 6], 4),
        ([2, 4, 6, 8], [1, 3, 5, 7], 4),
    ],
)
def test_rows_that_are_neighbours_on_both_sides_are_one_descriptor(other, here, there, descriptors):
    layout = packed(grouped([attention("layers.0", Full())]), num_slabs=12)
    producer = other.node(encode(layout), f"producer-{here}")
    consumer = Node(encode(layout))
    index = [0, 1, 2, 3]
    producer.fill({"0": [there, index]})
    stats = consumer.pull([producer.offer({"0": [there, index]}, 16)], {"0": [here, index]})
    assert stats["descriptors"] == descriptors
    assert stats["bytes"] == 4 * layout.row_bytes(0)
    assert consumer.check({"0": [here, index]}, 0, 16) == ""
    consumer.close()
    producer.close()


def wait_for(question, seconds: float = 10.0) -> None:
    import time

    limit = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < limit, "did not come true in time"
        time.sleep(0.01)
