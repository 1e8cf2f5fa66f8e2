"""Prefixes that vLLM has thrown away come back: from host memory, and after a restart from disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Launch, Server, running, shows

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 128
NUM_BLOCKS = 12
"""Of vLLM's own cache: eleven that can be used, so three prompts of five drive one out."""


def prompt(seed: int, count: int = 5 * BLOCK + 9) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()


@pytest.fixture(scope="module")
def launch(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    settings: dict[str, Any] = {
        "host_bytes": 1 << 30,
        "disk_path": str(tmp_path_factory.mktemp("store")),
        "disk_bytes": 2 << 30,
    }
    return Launch(
        model=smollm2,
        name="smollm2",
        settings=settings,
        options=("--num-gpu-blocks-override", str(NUM_BLOCKS)),
    )


@pytest.fixture(scope="module")
def texts() -> dict[int, str]:
    """What was answered before anything came back."""
    return {}


@pytest.fixture(scope="module")
def server(launch: Launch, logs: Path) -> Iterator[Server]:
    with running(launch, logs=logs) as (server,):
        yield server


def test_a_prefix_that_was_driven_out_comes_back_from_the_tiers(
    server: Server, texts: dict[int, str]
):
    for seed in range(3):
        texts[seed] = server.text(prompt(seed), max_tokens=12)
    assert server.await_count("stored_rows", 15) >= 15
    assert server.counts().get("restored_tokens", 0) == 0
    assert server.text(prompt(0), max_tokens=12) == texts[0]
    assert server.await_count("restored_tokens", 5 * BLOCK) == 5 * BLOCK
    assert server.counts().get("restore_failures", 0) == 0
    shows("full attention", "offload")


def test_a_prefix_in_common_comes_back_as_far_as_it_is_common(server: Server):
    server.post("/reset_prefix_cache", {})
    before = server.counts()["restored_tokens"]
    forked = prompt(1)[: 3 * BLOCK + 50] + prompt(77)[:100]
    expected = server.text(forked, max_tokens=12)
    assert server.await_count("restored_tokens", before + 3 * BLOCK) == before + 3 * BLOCK
    assert server.text(forked, max_tokens=12) == expected


def test_after_a_restart_prefixes_come_back_from_disk(
    server: Server, launch: Launch, logs: Path, texts: dict[int, str]
):
    server.stop()
    with running(launch, logs=logs) as (again,):
        for seed in (2, 0):
            assert again.text(prompt(seed), max_tokens=12) == texts[seed]
        assert again.await_count("restored_tokens", 10 * BLOCK) == 10 * BLOCK
        assert again.text(prompt(50), max_tokens=4)
        assert again.counts()["restored_tokens"] == 10 * BLOCK


def test_a_damaged_store_costs_only_time(
    launch: Launch, logs: Path, texts: dict[int, str], server: Server
):
    """Every data file is overwritten in the middle: checksums find it, vLLM computes anew."""
    assert server.process.poll() is not None
    store = Path(dict(launch.settings or {})["disk_path"])
    files = [path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    assert files
    for path in files:
        damage(path)
    with running(launch, logs=logs) as (again,):
        assert again.text(prompt(2), max_tokens=12) == texts[2]
        assert again.await_count("restore_failures") == 1
        assert again.counts().get("restored_tokens", 0) == 0


def damage(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(100_000, size, 1 << 20):
            file.seek(offset)
            file.write(b"\xa5" * 512)
