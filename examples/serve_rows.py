"""Serve rows to a peer: one process computes, another pulls, over NIXL.

python examples/serve_rows.py            # starts the other process itself
"""

import subprocess
import sys

import torch

import kvstow

TOKENS = 1000
LAYERS = [
    kvstow.LayerSpec.attention(f"layers.{i}", heads=4, head_dim=128, dtype="bfloat16")
    for i in range(12)
]

# Of a model on disk: kvstow.Identity.of(model_dir). There are no weights here.
IDENTITY = kvstow.Identity.of_tensors("example", {}, [("none", "bfloat16", b"no weights")])


def agent_and_rows() -> tuple[kvstow.Agent, kvstow.Arena, kvstow.Ledger]:
    """What each process has: an agent, an arena, and a ledger of who holds which row."""
    layout = kvstow.packed(kvstow.grouped(LAYERS), num_slabs=128)
    arena, pool = kvstow.Arena(layout), kvstow.Pool(layout)
    transport = kvstow.NixlTransport()
    agent = kvstow.Agent(arena, pool, transport=transport, identity=IDENTITY)
    return agent, arena, kvstow.Ledger(pool)


def produce() -> None:
    """Hold a request's rows, write them, print a ticket, serve until told to stop."""
    agent, arena, ledger = agent_and_rows()
    with agent:
        request = ledger.admit(TOKENS).request
        blocks = ledger.blocks(request)[0]
        arena.tensor("layers.11")[blocks.ids] = (
            torch.arange(len(blocks)).view(-1, 1, 1, 1).bfloat16()
        )
        print(agent.offer(ledger, request), flush=True)
        sys.stdin.readline()


def consume(ticket: str) -> None:
    """Pull the rows and look at them."""
    agent, arena, ledger = agent_and_rows()
    with agent:
        blocks = ledger.blocks(ledger.admit(TOKENS).request)
        stats = agent.pull(kvstow.Ticket.parse(ticket), into=blocks, digest="always").wait()
        last = arena.tensor("layers.11")[blocks[0].ids[-1]]
        print(f"{stats.nbytes:,} bytes in {stats.descriptors} descriptor(s), {stats.seconds:.3f} s")
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
