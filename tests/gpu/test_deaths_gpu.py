"""Producers with a cache of most of the GPU, killed in the middle of pulls, and their successors.

The consumer is this process and lives through all of it; every producer is another one. A mapping
keeps a dead producer's memory allocated, so each successor only starts if it was given back. Needs
nixl, and is not run without it. `KVSTOW_TEST_DEVICE=cpu` tries the same with little host memory.
"""

import os
import random
import subprocess
import sys
import time
from unittest import SkipTest

import numpy as np
import torch

from kvstow.errors import BackendMissing, TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.identity import Identity
from kvstow.plan.sizing.plan import Deployment
from kvstow.route.blocks import Blocks

DEVICE = os.environ.get("KVSTOW_TEST_DEVICE", "cuda:0")
ON_CPU = DEVICE == "cpu"
MODEL = "smollm2-135m" if ON_CPU else "llama-3.1-8b"
BLOCK_TOKENS = 16
ROWS = 64 if ON_CPU else 2048
"""Rows of one pull: 4 GiB, some two milliseconds."""

TICKETS = 3
DEATHS = 10
CANARY = 0xA5
RETURNED_SECONDS = 1.0


def agent(num_slabs, name):
    from kvstow.transfer.agent import Agent
    from kvstow.transfer.tickets.owner import Generations
    from kvstow.transfer.transport.nixl import NixlTransport

    layout = Deployment(model=MODEL, block_tokens=BLOCK_TOKENS, num_slabs=num_slabs).layout(0)
    arena = Arena(layout, device=DEVICE)
    identity = Identity.unverified("bytes of a test")
    owner, transport = Generations(layout), NixlTransport()
    made = Agent(arena, owner, transport=transport, identity=identity, name=name)
    made.start()
    return arena, made


def synchronize():
    if not ON_CPU:
        torch.cuda.synchronize()


def free_bytes():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


# ── the producer ──────────────────────────────────────────────────────────────────────────


def produce(num_slabs, seed):
    """Print tickets for rows all over the arena, each row of one value, then wait to be killed."""
    arena, made = agent(num_slabs, f"producer-{seed}")
    shuffled = 1 + np.random.default_rng(seed).permutation(num_slabs - 1)
    for number in range(TICKETS):
        ids = shuffled[number * ROWS : (number + 1) * ROWS]
        arena.fill(0, ids, value_of(seed, number))
        synchronize()
        print(made.offer_blocks({0: Blocks.first(ids)}, ROWS * BLOCK_TOKENS), flush=True)
        sys.stdin.readline()
    time.sleep(600)


def value_of(seed, number):
    return (seed * TICKETS + number) % 160  # never the canary


# ── the tests ─────────────────────────────────────────────────────────────────────────────


def needs_nixl():
    """SkipTest where nixl, or what an agent needs besides, is not installed."""
    try:
        from kvstow.transfer.transport.nixl import NixlTransport

        NixlTransport().close()
    except (BackendMissing, ImportError) as error:
        raise SkipTest(f"needs nixl: {error}") from error


class Victim:
    """A producer that will be killed."""

    def __init__(self, num_slabs, seed):
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(num_slabs), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ticket(self, *, is_first=False):
        from kvstow.transfer.tickets.ticket import Ticket

        if not is_first:
            print(file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"a producer has ended with {self._process.wait(10)}: no room for it?"
        return Ticket.parse(line.strip())

    def kill(self):
        self._process.kill()
        self._process.wait(30)
        self._process.stdin.close()
        self._process.stdout.close()


def outcome_of(transfer, arena, into, value):
    """How a pull has ended; one that was accepted has brought every byte. No other byte changed."""
    try:
        transfer.wait(60)
        outcome = "accepted"
    except TransferError as error:
        outcome = error.kind
    transfer.wait_quiet(60)
    synchronize()
    if outcome == "accepted":
        placed = arena.layout.footprints[0].strips
        for strip in placed:
            rows = arena.bytes.as_strided(
                (strip.count, strip.nbytes),
                (strip.stride, 1),
                arena.bytes.storage_offset() + strip.offset,
            )
            taken = torch.as_tensor(into, device=arena.device)
            for part in taken.split(128):
                assert bool((rows[part] == value).all()), "an accepted pull has brought other bytes"
    arena.fill(0, into, CANARY)
    synchronize()
    for part in arena.bytes.split(1 << 30):
        assert bool((part == CANARY).all()), "a pull has written elsewhere"
    return outcome


def seconds_until_returned(free_before):
    """Seconds until a dead producer's memory is free again."""
    started = time.perf_counter()
    while free_bytes() < free_before - (1 << 30):
        assert time.perf_counter() - started < 10, "a dead producer's memory stays allocated"
        time.sleep(0.005)
    return time.perf_counter() - started


def test_dead_producers_do_no_harm_and_make_room_for_the_next(record_property):
    needs_nixl()
    dice = random.Random(12)
    arena, consumer = agent(2 * ROWS + 1, "consumer")
    arena.bytes.fill_(CANARY)
    synchronize()
    num_slabs = 8 * ROWS if ON_CPU else int(0.6 * free_bytes()) // (2 << 20)
    into = 1 + np.random.default_rng(1).permutation(2 * ROWS)[:ROWS]
    outcomes, waits = [], []
    try:
        for seed in range(DEATHS):
            free_before = 0 if ON_CPU else free_bytes()
            victim = Victim(num_slabs, seed)
            tickets = [victim.ticket(is_first=True)]
            try:
                tickets += [victim.ticket() for _ in range(TICKETS - 1)]
                pull = consumer.pull(tickets[0], into={0: Blocks.first(into)}, deadline=10.0)
                whole = outcome_of(pull, arena, into, value_of(seed, 0))
                assert whole == "accepted", whole
                pull = consumer.pull(tickets[1], into={0: Blocks.first(into)}, deadline=10.0)
                time.sleep(dice.uniform(0, 0.004))
            finally:
                victim.kill()
            killed_in = outcome_of(pull, arena, into, value_of(seed, 1))
            waits.append(0.0 if ON_CPU else round(seconds_until_returned(free_before), 3))
            pull = consumer.pull(tickets[2], into={0: Blocks.first(into)}, deadline=1.0)
            after = outcome_of(pull, arena, into, value_of(seed, 2))
            assert after != "accepted", "a dead producer's ticket was accepted after its end"
            outcomes.append([killed_in, after])
    finally:
        consumer.close()
    record_property("arena_bytes", num_slabs * (2 << 20))
    record_property("killed during the pull, asked afterwards", outcomes)
    record_property("seconds until the memory was free", waits)
    assert max(waits) < RETURNED_SECONDS, waits


if __name__ == "__main__":
    produce(int(sys.argv[1]), int(sys.argv[2]))
