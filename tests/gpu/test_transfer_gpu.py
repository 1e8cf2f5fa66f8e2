"""Rows of unequal layouts between two processes on one CUDA device, every way that there is.

The consumer is this process, the producer's ranks are agents of another. Needs nixl, and is not
run without it. `KVSTOW_TEST_DEVICE=cpu` tries the same with arenas in host memory.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from unittest import SkipTest

import numpy as np

from kvstow.errors import BackendMissing
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from patterns import CANARY, fill_canaries, fill_request, wrong_values

DEVICE = os.environ.get("KVSTOW_TEST_DEVICE", "cuda:0")
SLOT_BYTES = 8192
"""A few rows: staged pulls and rows that are cut take several pieces."""

WAYS = (None, "write", "slots", "read")

CASES = {  # heads and dim; the producer's ranks, tokens per block and order; the consumer's; tokens
    "heads of two ranks": ((2, 8), (2, 16, "BLHNC"), (1, 16, "BLHNC"), 90),
    "heads for two ranks": ((2, 8), (1, 16, "BLHNC"), (2, 16, "BLHNC"), 90),
    "longer blocks": ((2, 8), (1, 16, "BLHNC"), (1, 64, "BLHNC"), 130),
    "shorter blocks": ((1, 64), (1, 64, "BLHNC"), (1, 16, "BLHNC"), 64),
    "another order": ((4, 4), (1, 4, "BLHNC"), (1, 4, "LBNHC"), 2),
    "everything": ((4, 16), (4, 8, "BHLNC"), (2, 32, "BLNHC"), 257),
    "one token": ((2, 2), (2, 2, "BLHNC"), (1, 1, "BLHNC"), 1),
    "equal rows": ((2, 8), (1, 16, "BLHNC"), (1, 16, "BLHNC"), 90),
}


def layout(case, side, rank):
    """A rank's rows, with as many again that the request does not use."""
    (heads, dim), *sides, num_tokens = CASES[case]
    ranks, block_tokens, order = sides[side]
    mine = heads // ranks
    content = (Extent.whole("content", dim),)
    layers = [
        LayerSpec(
            name=f"layers.{i}",
            retention=Full(),
            block_tokens=block_tokens,
            states=block_tokens,
            heads=Extent("head", heads, ((rank * mine, (rank + 1) * mine),)),
            fields=(Field("k", DType.BFLOAT16, content), Field("v", DType.BFLOAT16, content)),
        )
        for i in range(3)
    ]
    count = -(-num_tokens // block_tokens)
    site = Site(model="transfer", order=order, tp=(rank, ranks))
    return packed(grouped(layers), num_slabs=2 * count + 2, site=site)


def request(where, case, side, seed):
    """Blocks in random order."""
    block_tokens, num_tokens = CASES[case][1 + side][1], CASES[case][3]
    ids = np.random.default_rng(seed).permutation(np.arange(1, where.num_blocks(0)))
    return {0: Blocks.first(ids[: -(-num_tokens // block_tokens)])}


def agent(where, name):
    from kvstow.transfer.agent import Agent
    from kvstow.transfer.options import Options
    from kvstow.transfer.tickets.owner import Generations
    from kvstow.transfer.transport.nixl import NixlTransport

    arena = Arena(where, device=DEVICE)
    fill_canaries(arena)
    identity = Identity.unverified("bytes of a test")
    options = Options(slot_bytes=SLOT_BYTES)
    transport, owner = NixlTransport(), Generations(where)
    made = Agent(arena, owner, transport=transport, identity=identity, name=name, options=options)
    made.start()
    return arena, made


# ── the producer ──────────────────────────────────────────────────────────────────────────


def produce():
    """Offer the request of the case on stdin, on those ranks that the consumer's rank 0 needs."""
    with ExitStack() as stack:
        current, agents = "", []
        for line in sys.stdin:
            case = json.loads(line)
            if case != current:
                stack.close()
                current, agents = case, list(offering(case))
                for made, _ in agents:
                    stack.callback(made.close)
            num_tokens = CASES[case][3]
            print(*(made.offer_blocks(blocks, num_tokens) for made, blocks in agents), flush=True)


def offering(case):
    _, (ranks, _, _), (ranks_there, _, _), _ = CASES[case]
    for rank in range(max(1, ranks // ranks_there)):
        where = layout(case, 0, rank)
        blocks = request(where, case, 0, seed=rank)
        arena, made = agent(where, f"producer-{rank}")
        fill_request(arena, blocks)
        yield made, blocks


@contextmanager
def producer():
    """A function that asks the other process for tickets of a case."""
    from kvstow.transfer.tickets.ticket import Ticket

    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def tickets(case):
        print(json.dumps(case), file=child.stdin, flush=True)
        line = child.stdout.readline()
        assert line, f"the producer has ended with {child.wait(10)}"
        return [Ticket.parse(text) for text in line.split()]

    try:
        yield tickets
    finally:
        child.stdin.close()
        child.wait(30)
        child.stdout.close()


# ── the tests ─────────────────────────────────────────────────────────────────────────────


def needs_nixl():
    """SkipTest where nixl, or what an agent needs besides, is not installed."""
    try:
        from kvstow.transfer.transport.nixl import NixlTransport

        NixlTransport().close()
    except (BackendMissing, ImportError) as error:
        raise SkipTest(f"needs nixl: {error}") from error


def pulled(tickets, case):
    """What each way took; the bytes are compared after each, and those of all other rows."""
    where = layout(case, 1, 0)
    into = request(where, case, 1, seed=99)
    arena, made = agent(where, "consumer")
    found = {}
    try:
        for way in WAYS:
            pull = made.pull(
                tickets(case),
                into=into,
                direction=way,
                digest="always",
                deadline=30.0,
            )
            found[way] = stats = pull.wait(60)
            assert stats.digest == "passed", (case, way)
            assert way is None or set(stats.directions) == {way}, (case, way, stats)
            wrong = wrong_values(arena, into, CASES[case][3])
            assert wrong == 0, f"{case}: {way}: {wrong} values are wrong"
            arena.fill(0, into[0].ids, CANARY)
            assert int((arena.bytes != CANARY).sum()) == 0, f"{case}: {way} has written elsewhere"
    finally:
        made.close()
    return found


def test_every_way_brings_every_byte_and_no_other():
    needs_nixl()
    with producer() as tickets:
        for case in CASES:
            pulled(tickets, case)


def test_slots_take_few_descriptors():
    needs_nixl()
    with producer() as tickets:
        found = pulled(tickets, "everything")
    counts = {str(way): stats.descriptors for way, stats in found.items()}
    print(f"descriptors {counts}, chosen {found[None].directions}", flush=True)
    assert counts["read"] == counts["write"] > 500
    assert counts["slots"] < counts["read"] // 8


if __name__ == "__main__":
    produce()
