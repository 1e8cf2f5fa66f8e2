"""Serve rows to a peer: one process computes, another pulls, over NIXL.

python examples/serve_rows.py            # starts the other process itself
"""

import subprocess
import sys

import torch

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.transfer.agent import Agent
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.nixl import NixlTransport

TOKENS = 1000
IDENTITY = Identity.of_tensors("example", {}, [("none", "bfloat16", b"an example without weights")])
"""Of a model on disk: Identity.of(model_dir)."""
HEAD = (Extent.whole("content", 128),)


def layout() -> Layout:
    layers = [
        LayerSpec(
            name=f"layers.{i}",
            retention=Full(),
            block_tokens=16,
            states=16,
            heads=Extent.whole("head", 4),
            fields=(Field("k", DType.BFLOAT16, HEAD), Field("v", DType.BFLOAT16, HEAD)),
        )
        for i in range(12)
    ]
    return packed(grouped(layers), num_slabs=128, site=Site(model="example"))


def produce() -> None:
    """Hold a request's rows, write them, hand out a ticket, serve until told to stop."""
    arena, pool = Arena(layout()), Pool(layout())
    ledger = Ledger(pool)
    with Agent(arena, pool, transport=NixlTransport(), identity=IDENTITY) as agent:
        request = ledger.admit(TOKENS).request
        blocks = ledger.blocks(request)[0]
        arena.tensor("layers.11")[blocks.ids] = (
            torch.arange(len(blocks)).view(-1, 1, 1, 1).bfloat16()
        )
        print(agent.offer(ledger, request), flush=True)
        sys.stdin.readline()


def consume(word: str) -> None:
    """Pull the rows, and look."""
    arena, pool = Arena(layout()), Pool(layout())
    ledger = Ledger(pool)
    with Agent(arena, pool, transport=NixlTransport(), identity=IDENTITY) as agent:
        request = ledger.admit(TOKENS).request
        blocks = ledger.blocks(request)
        stats = agent.pull(Ticket.parse(word), into=blocks, digest="always").wait()
        last = arena.tensor("layers.11")[blocks[0].ids[-1]]
        print(f"{stats.nbytes:,} bytes in {stats.descriptors} descriptors, {stats.seconds:.3f} s")
        print(f"fence {stats.fence}, digest {stats.digest}")
        print(f"the last row says {int(last[0, 0, 0])}, the producer wrote {len(blocks[0]) - 1}")


def main() -> None:
    producer = subprocess.Popen(
        [sys.executable, __file__, "produce"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert producer.stdout is not None
        consume(producer.stdout.readline().decode().strip())
    finally:
        producer.communicate(b"stop\n")


if __name__ == "__main__":
    produce() if sys.argv[1:] == ["produce"] else main()
