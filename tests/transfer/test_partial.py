"""A pull brings what the next token sees. What it left out can never be found, kept or given on."""

from collections.abc import Iterator

import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, Window
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric, LocalTransport
from strategies import group_bytes, value
from transfer_node import CANARY, IDENTITY, attention

TOKENS, WINDOW = 26, 6
PROMPT = Prompt.of(range(TOKENS))


class Engine:
    """An engine of its own, on kvstow's ledger: every byte is known, or a canary."""

    def __init__(self, fabric: Fabric, name: str, span: int, seen: Window) -> None:
        layers = [attention("layers.0", Full(), span), attention("layers.1", seen, span)]
        self.layout = packed(grouped(layers), num_slabs=60, site=Site(model="m", order="BLHNC"))
        self.arena = Arena(self.layout)
        self.memory = self.arena.bytes.numpy()
        self.memory[:] = CANARY
        self.ledger = Ledger(Pool(self.layout))
        self.agent = Agent(
            self.arena,
            self.ledger.pool,
            transport=LocalTransport(fabric),
            identity=IDENTITY,
            name=name,
            listen="tcp://127.0.0.1:*",
        )
        self.agent.start()

    def computed(self, prompt: Prompt = PROMPT) -> int:
        """A request whose tokens were computed, one after the other: its windows have moved on."""
        request = self.ledger.admit(prompt).request
        for g, blocks in self.ledger.blocks(request).items():
            held = group_bytes(self.layout, g, blocks)
            self.memory[held.address] = value(held.layer, held.number)
        self.ledger.grow(request, len(prompt))
        return request

    def pulled(self, ticket: Ticket, num_tokens: int = TOKENS) -> int:
        request = self.ledger.admit(Prompt.of(PROMPT.tokens[:num_tokens])).request
        blocks = self.ledger.blocks(request)
        try:
            self.agent.pull(ticket, into=blocks, num_tokens=num_tokens, digest="always").wait(10)
        except TransferError:
            self.ledger.release(request, computed_tokens=0)
            raise
        return request

    def wrong_tokens(self, blocks: dict[int, Blocks], num_tokens: int) -> set[int]:
        """Tokens that the token behind so many sees, and that are not there."""
        wrong: set[int] = set()
        for g, listed in blocks.items():
            held = group_bytes(self.layout, g, listed)
            seen = held.first_token < num_tokens
            retention = self.layout.groups[g].group.retention
            if not isinstance(retention, Full):
                seen &= held.first_token > num_tokens - WINDOW
            bad = self.memory[held.address] != value(held.layer, held.number)
            wrong |= set(held.first_token[bad & seen].tolist())
        return wrong


@pytest.fixture
def engines(request) -> Iterator[list[Engine]]:
    spans, seen = request.param
    fabric = Fabric()
    made = [Engine(fabric, f"e{i}", span, seen) for i, span in enumerate(spans)]
    yield made
    for engine in made:
        engine.agent.close()


PAIRS = [*(((a, b), Window(WINDOW)) for a, b in ((2, 4), (4, 4), (8, 2), (2, 8)))]


@pytest.mark.parametrize("engines", PAIRS, indirect=True)
def test_only_what_was_brought_is_stored(engines, tmp_path):
    producer, consumer = engines
    request = consumer.pulled(producer.agent.offer(producer.ledger, producer.computed()))
    with Store(disk=tmp_path, disk_bytes="64MiB", identity=IDENTITY) as store:
        store.save(consumer.arena, consumer.ledger.blocks(request), PROMPT)
        consumer.memory[:] = CANARY
        for length in range(1, TOKENS + 1):
            prompt = Prompt.of([*range(length), 999])
            found = store.stored_tokens(prompt)
            if found:
                mine = consumer.ledger.admit(found).request
                blocks = consumer.ledger.blocks(mine)
                assert store.load(consumer.arena, prompt, into=blocks, most=found) == found
                assert not consumer.wrong_tokens(blocks, found), (length, found)
                consumer.ledger.release(mine)
