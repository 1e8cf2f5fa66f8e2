"""Events of a real ledger, a real host tier and a real disk, heard over sockets."""

import time
from pathlib import Path

import numpy as np
import pytest

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import SpecError
from kvstow.events.index import InstanceIndex, PrefixHeld
from kvstow.events.publisher import EventPublisher
from kvstow.events.subscriber import EventSubscriber
from kvstow.memory.arena import Arena
from kvstow.offload.events import EngineEvents
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, Window
from offloading import IDENTITY, layer

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
    engine, index = Engine(tmp_path / "a"), InstanceIndex()
    subscriber = EventSubscriber(
        engine.publisher.address,
        replay=engine.publisher.replay_address,
        on_batch=lambda batch: index.apply("a", batch),
        on_lost=lambda: index.forget("a"),
    )
    prompt = prompt_of(1, 18)
    tokens = prompt.tokens.tolist()

    def eventually(expected: PrefixHeld) -> None:
        until = time.monotonic() + 20
        while index.held(tokens).get("a", PrefixHeld()) != expected:
            assert time.monotonic() < until, index.held(tokens)
            engine.events.turn()
            time.sleep(0.02)

    with subscriber:
        engine.compute(prompt, save=True)
        eventually(PrefixHeld(device=16, host=16, disk=16, below=16))
        assert engine.store.host is not None
        assert engine.store.disk is not None
        engine.store.host.evict(0, engine.store.disk.keys(0))
        eventually(PrefixHeld(device=16, disk=16, below=16))
        for seed in range(2, 12):  # other prompts take the device's rows
            engine.compute(prompt_of(seed, 40), save=False)
        eventually(PrefixHeld(disk=16, below=16))
        engine.store.disk.prune(0)
        eventually(PrefixHeld())
    engine.close()


def test_an_engine_that_starts_over_a_warm_disk_tells_what_requests_find_there(tmp_path: Path):
    prompt = prompt_of(1, 16)
    first = Engine(tmp_path / "a")
    first.compute(prompt, save=True)
    first.close()
    second, index = Engine(tmp_path / "a"), InstanceIndex()
    with EventSubscriber(
        second.publisher.address,
        replay=second.publisher.replay_address,
        on_batch=lambda batch: index.apply("a", batch),
        on_lost=lambda: index.forget("a"),
    ):
        second.events.know(prompt)
        second.events.turn()
        until = time.monotonic() + 20
        while not index.held(prompt.tokens.tolist()) and time.monotonic() < until:
            time.sleep(0.02)
    assert index.held(prompt.tokens.tolist()) == {"a": PrefixHeld(disk=16, below=16)}
    second.close()


def test_a_ledger_without_prefixes_is_refused():
    with (
        EventPublisher(LOOPBACK) as publisher,
        pytest.raises(SpecError, match="without prefixes"),
    ):
        EngineEvents(publisher, ledger=Ledger(Pool(LAYOUT), caching=False))
