"""`kvstow route` names the way that agents take, with their descriptors and bytes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.cli.options import named
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode
from kvstow.route import ways
from kvstow.route.blocks import Blocks
from kvstow.transfer.peers.probe import Path
from transfer_node import Node, to_json

TOKENS = 256
SLOT_BYTES = 4 << 20
MODEL = "llama-3.2-1b"
CASES = {
    "equal blocks": ("tp=1", "tp=1"),
    "16 to 64": ("block_tokens=16", "block_tokens=64"),
    "64 to 16": ("block_tokens=64", "block_tokens=16"),
    "tp 8 to 4": ("tp=8", "tp=4,rank=1"),
    "tp 1 to 2": ("tp=1", "tp=2,rank=1"),
}


def told(case: str, link: str = "shm", memory: str = "host") -> dict[str, Any]:
    """What the command says."""
    here, there = specs(case)
    arguments = [here, there, "--tokens", str(TOKENS), "--link", link, "--rows-in", memory]
    result = CliRunner().invoke(app, ["route", *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def specs(case: str) -> tuple[str, str]:
    """Both layouts, with room for a request whose blocks are no neighbours."""
    here, there = (
        f"{MODEL}@{','.join(filter(None, (how, 'num_slabs=40')))}" for how in CASES[case]
    )
    return here, there


def scattered(layout: Layout, seed: int) -> dict[str, Any]:
    """Every second block, in random order."""
    num_blocks = TOKENS // layout.groups[0].group.block_tokens
    ids = 2 * np.random.default_rng(seed).permutation(np.arange(1, num_blocks + 1))
    return to_json({0: Blocks.first(ids)})


@dataclass(frozen=True)
class Pair:
    """A consumer, and a producer for each rank that the command names."""

    case: str
    producers: dict[int, Node]
    consumer: Node

    def pull(self, direction: str | None = None) -> dict[str, Any]:
        tickets = [
            node.offer(scattered(node.layout, rank), TOKENS)
            for rank, node in self.producers.items()
        ]
        into = scattered(self.consumer.layout, 99)
        stats = self.consumer.pull(tickets, into, direction=direction)
        assert "error" not in stats, stats
        return stats

    def prices(self) -> tuple[str, str]:
        """What the consumer has measured, for `--link` and `--rows-in`: one price for all ranks.

        Reads and writes are taken to be alike, as the command takes them on one host: on a busy
        machine either may seem twice as fast.
        """
        peers = [self.consumer.agent.connect(node.address) for node in self.producers.values()]
        for peer in peers:
            peer.path = Path(direction="read", read_rate=1e9, write_rate=1e9)
        self.pull()
        here = self.consumer.agent.endpoint.copy_speed
        if here is None or peers[0].link is None:
            return "shm", "host"  # nothing was measured, because there is nothing to choose
        for peer in peers:
            peer.link = peers[0].link
        link, memory = (
            f"{each.bytes_per_second / 1e9!r}:{each.seconds_per_copy * 1e6!r}"
            for each in (peers[0].link, here)
        )
        return link, f"host:{memory}"


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    case = request.param
    here, there = specs(case)
    ranks = [source["rank"] for source in told(case)["sources"]]
    source, (target,) = named(here, one_rank=False), named(there, one_rank=True).layouts
    options = {"slot_bytes": SLOT_BYTES, "engines": 1}
    producers = {
        rank: Node(encode(source.layouts[rank]), name=f"producer-{rank}", options=options)
        for rank in ranks
    }
    consumer = Node(encode(target), name="consumer", options=options)
    yield Pair(case, producers, consumer)
    for node in (consumer, *producers.values()):
        node.close()


def test_an_agent_over_nixl_takes_the_way_that_the_command_names(pair):
    found = told(pair.case, *pair.prices())["ways"]
    stats = pair.pull()
    (choice,) = found["agent"]
    assert set(stats["directions"]) == {choice["direction"]}
    assert choice["ranks"] == list(pair.producers)
    taken = found[choice["way"]]
    assert (stats["descriptors"], stats["bytes"]) == (taken["moves"], taken["bytes"])


def test_every_way_takes_the_descriptors_and_bytes_that_the_command_counts(pair, monkeypatch):
    monkeypatch.setattr(ways, "DEVICE_SLOT_BYTES", SLOT_BYTES)
    found = told(pair.case)["ways"]
    for way, direction, is_gathered in (
        ("direct", "read", None),
        ("direct", "write", False),
        ("rows", "rows", None),
        ("gathered", "write", True),
        ("staged", "staged", None),
    ):
        for node in pair.producers.values():
            node.agent.endpoint.gathers = is_gathered
        stats = pair.pull(direction)
        assert set(stats["directions"]) == {direction}
        counted = found[way]["moves"], found[way]["bytes"]
        assert (stats["descriptors"], stats["bytes"]) == counted, way


def test_equal_rows_are_read_and_half_rows_are_not_read_whole_at_the_usual_prices():
    for case in ("equal blocks", "tp 1 to 2"):
        (choice,) = told(case)["ways"]["agent"]
        assert (choice["way"], choice["direction"]) == ("direct", "read")
