"""Events of a real ledger, a real host tier and a real disk, repeated over sockets."""

from pathlib import Path

import numpy as np
import pytest

from event_reader import tokens_by_medium
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import SpecError
from kvstow.events.publisher import EventPublisher
from kvstow.memory.arena import Arena
from kvstow.offload.events import EngineEvents
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, Window
from offloading import IDENTITY, layer
from waiting import wait_for

LOOPBACK = "tcp://127.0.0.1:*"
LAYERS = [layer("l.0", Full()), layer("l.1", Window(8))]
LAYOUT = packed(grouped(LAYERS), num_slabs=24).identified(IDENTITY)


class Engine:
    """What an engine has: an arena, a ledger, a store."""

    def __init__(self, directory: Path) -> None:
        self.arena = Arena(LAYOUT)
        self.ledger = Ledger(Pool(LAYOUT))
        self.store = Store(host="64KiB", disk=directory, disk_bytes="2MiB").bind(LAYOUT)
        self.publisher = EventPublisher(LOOPBACK, replay=LOOPBACK)
        self.events = EngineEvents(self.publisher, ledger=self.ledger, store=self.store)

    def compute(self, prompt: Prompt, *, save: bool) -> None:
        """A request that is admitted, computed, perhaps saved, and over."""
        self.events.know(prompt)
        request = self.ledger.admit(prompt).request
        if save:
            self.store.save(self.arena, self.ledger.blocks(request), prompt)
            self.store.flush()
        self.ledger.release(request)
        self.events.turn()

    def close(self) -> None:
        self.publisher.close()
        self.store.close()


def prompt_of(seed: int, num_tokens: int) -> Prompt:
    return Prompt.of(np.random.default_rng(seed).integers(0, 1000, num_tokens))


def test_a_router_sees_device_host_and_disk_and_what_is_evicted(tmp_path: Path):
    engine, prompt = Engine(tmp_path / "a"), prompt_of(1, 18)
    whole = prompt.tokens[:16].tolist()

    def media() -> set[str]:
        """Where all whole blocks of the prompt are, by the events."""
        engine.events.turn()
        held = tokens_by_medium(engine.publisher, 0)
        return {medium for medium, tokens in held.items() if set(whole) <= set(tokens)}

    engine.compute(prompt, save=True)
    wait_for(lambda: media() == {"GPU", "CPU", "STORAGE"})
    assert engine.store.host is not None
    assert engine.store.disk is not None
    engine.store.host.evict(0, engine.store.disk.keys(0))
    wait_for(lambda: media() == {"GPU", "STORAGE"})
    for seed in range(2, 12):  # other prompts take the device's rows
        engine.compute(prompt_of(seed, 40), save=False)
    wait_for(lambda: media() == {"STORAGE"})
    engine.store.disk.prune(0)
    wait_for(lambda: media() == set())
    engine.close()


def test_an_engine_that_starts_over_a_warm_disk_tells_what_requests_find_there(tmp_path: Path):
    prompt = prompt_of(1, 16)
    first = Engine(tmp_path / "a")
    first.compute(prompt, save=True)
    first.close()
    second = Engine(tmp_path / "a")
    second.events.know(prompt)
    second.events.turn()
    assert tokens_by_medium(second.publisher, 0) == {"STORAGE": prompt.tokens.tolist()}
    second.close()


def test_a_ledger_without_prefixes_is_refused():
    with (
        EventPublisher(LOOPBACK) as publisher,
        pytest.raises(SpecError, match="without prefixes"),
    ):
        EngineEvents(publisher, ledger=Ledger(Pool(LAYOUT), caching=False))
