"""Blocks are offloaded while their request runs: conversations and windows come back."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import shows
from tiny import Remote, started
from vllm_engines import GEMMA, LLAMA, SMALL, Prompts

from kvstow.offload.host.shared import remove, shared_path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BLOCK = 32
NUM_BLOCKS = 36
"""Hardly more than one prompt of 1,024 tokens needs; one of them is vLLM's null block."""
DRAW = Prompts(SMALL["vocab_size"])


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    name = f"kvstow-test-{uuid.uuid4().hex[:12]}"
    yield name
    remove(name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, shared: str) -> Iterator[Remote]:
    folder = tmp_path_factory.mktemp("llama")
    engine = started(folder, LLAMA, NUM_BLOCKS, host_bytes=256 << 20, host_shared=shared)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    engine = started(tmp_path_factory.mktemp("gemma"), GEMMA, 6 * NUM_BLOCKS, host_bytes=256 << 20)
    yield engine
    engine.close()


def text(engine: Remote, prompt: list[int], **more: Any) -> list[int]:
    return engine.first({"prompt": prompt, **more})["text"]


def forget(engine: Remote) -> None:
    """Other prompts take every block of the pool."""
    engine.run([{"prompt": DRAW(900), "max_tokens": 1} for _ in range(4)])


def grown(engine: Remote, before: dict[str, float], what: str) -> float:
    return engine.counts().get(what, 0.0) - before.get(what, 0.0)


def test_a_preempted_request_comes_back_from_host_memory_and_says_the_same(
    llama: Remote, tmp_path: Path
):
    """Six requests of up to 15 blocks in a pool of 35. No two prompts begin alike, so what is
    restored was stored by the same request, before vLLM took its blocks away."""
    jobs = [{"prompt": DRAW(300), "max_tokens": 150} for _ in range(6)]
    before, preempted = llama.counts(), llama.preemptions()
    together = texts(llama, jobs)
    assert llama.preemptions() > preempted
    assert grown(llama, before, "restored_tokens") > 0
    assert grown(llama, before, "restore_failures") == 0
    roomy = started(tmp_path, LLAMA, 6 * NUM_BLOCKS)
    try:
        assert texts(roomy, jobs) == together
        assert roomy.preemptions() == 0
    finally:
        roomy.close()


def texts(engine: Remote, jobs: list[dict[str, Any]]) -> list[list[int]]:
    """What the engine says to all of them at once."""
    return [job["text"] for job in engine.run(jobs, len(jobs), 600)["jobs"]]


def test_what_a_request_has_generated_comes_back_too(llama: Remote):
    """A conversation: the next prompt is the last one with its answer."""
    prompt = DRAW(200)
    answer = text(llama, prompt, max_tokens=125)
    forget(llama)
    before = llama.counts()
    text(llama, [*prompt, *answer, 5])
    whole = (len(prompt) + len(answer)) // BLOCK * BLOCK
    assert grown(llama, before, "restored_tokens") == whole


@pytest.mark.parametrize("length", [33, 97, 161, 300, 506])
def test_windows_come_back_at_every_length(gemma: Remote, length: int):
    """Whole blocks of a window group were stored while the window passed them."""
    prompt = DRAW(length)
    first = text(gemma, prompt)
    forget(gemma)
    before = gemma.counts()
    assert text(gemma, prompt) == first
    assert grown(gemma, before, "restored_tokens") == (length - 1) // BLOCK * BLOCK
    shows("windows, chunks", "offload")


def test_damaged_shared_memory_never_changes_what_is_said(llama: Remote, shared: str):
    """What is damaged is found by its checksum, unless the engine has a copy of its own."""
    prompt = DRAW(500)
    first = text(llama, prompt)
    forget(llama)
    names = list(shared_path(shared).glob("*/rows-*/*/*/*"))
    assert names
    for name in names:
        with name.open("r+b") as file:
            for offset in range(4096, name.stat().st_size, 50_000):
                file.seek(offset)
                file.write(b"\xa5" * 64)
    assert text(llama, prompt) == first
    forget(llama)
    assert text(llama, prompt) == first
