"""Weights that are changed in place: rows of before are not served, once vLLM is told to reset.

Engines whose weights have one name take over from each other again, and from no others.
"""

import multiprocessing as mp
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Launch, Server, running
from tiny import FewBlocks, checkpoint
from vllm_engines import ENVIRONMENT, LLAMA, ON_CPU, SMALL, Prompts, connector

from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DRAW = Prompts(SMALL["vocab_size"])
PROMPT = DRAW(300)


class Story:
    """One engine in this process, with a host tier."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM

        transfer = connector("kvstow", host_bytes=1 << 26)
        del transfer["kv_connector_extra_config"]["unverified"]
        self.llm = LLM(folder, **FewBlocks(num_blocks=40).arguments(), kv_transfer_config=transfer)

    def text(self, salt: str = "") -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": PROMPT, **({"cache_salt": salt} if salt else {})}
        (output,) = self.llm.generate(prompt, sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def train(self, folder: str) -> None:
        """Other weights of the same model, in place."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    @property
    def restored(self) -> float:
        from prometheus_client import REGISTRY

        from kvstow.adapters.vllm.counts import vllm_counts

        return vllm_counts(REGISTRY.collect()).get("restored_tokens", 0)


def tell(folder: str, trained: str, pipe: Any) -> None:
    """Runs in a process of its own: texts, and tokens that had come back by then."""
    os.environ.update(ENVIRONMENT | ON_CPU | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    story, found = Story(folder), dict[str, Any]()

    def note(name: str, salt: str = "") -> None:
        found[name] = story.text(salt), story.restored

    note("before")
    note("before, again", salt="so that rows of the first are stored")
    story.llm.reset_prefix_cache()
    note("came back")
    story.train(trained)
    note("changed", salt="nobody else's")
    story.llm.reset_prefix_cache()
    note("not told")
    assert story.llm.reset_prefix_cache(reset_connector=True)
    note("told")
    story.text(salt="so that rows are stored")
    story.llm.reset_prefix_cache()
    note("told, came back")
    story.train(folder)
    assert story.llm.reset_prefix_cache(reset_connector=True)
    note("back")
    story.llm.update_weight_version("one")
    note("named")
    story.text(salt="so that rows are stored")
    story.llm.reset_prefix_cache()
    note("named, came back")
    story.train(trained)
    story.llm.update_weight_version("two")
    note("named anew")
    story.train(folder)
    story.llm.update_weight_version("one")
    note("named as before")
    pipe.send(found)
    story.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = [str(checkpoint(tmp_path_factory.mktemp("model"), LLAMA, seed)) for seed in (1, 2)]
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(*folders, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(300), "the engine says nothing"
        return ours.recv()
    finally:
        process.join(30)
        if process.is_alive():
            process.kill()


def text(found: dict[str, Any], name: str) -> list[int]:
    return found[name][0]


def test_rows_come_back_after_vllm_has_forgotten_its_own_blocks(found: dict[str, Any]):
    assert text(found, "before") == text(found, "before, again") == text(found, "came back")
    assert found["came back"][1] > found["before, again"][1]


def test_without_a_word_to_the_connector_rows_of_the_old_weights_come_back(found: dict[str, Any]):
    """Nobody tells a connector that weights have changed: that is the user's duty. It also shows
    that a wrong cache changes the text."""
    assert text(found, "changed") != text(found, "before")
    assert found["not told"][1] > found["changed"][1]
    assert text(found, "not told") != text(found, "changed")


def test_after_a_reset_of_the_connector_nothing_of_the_old_weights_comes_back(
    found: dict[str, Any],
):
    assert text(found, "told") == text(found, "changed")
    assert found["told"][1] == found["not told"][1]


def test_rows_of_the_new_weights_are_stored_and_come_back(found: dict[str, Any]):
    assert text(found, "told, came back") == text(found, "changed")
    assert found["told, came back"][1] > found["told"][1]


def test_every_reset_counts(found: dict[str, Any]):
    assert text(found, "back") == text(found, "before")
    assert found["back"][1] == found["told, came back"][1]


def test_rows_of_named_weights_come_back_until_they_have_another_name(found: dict[str, Any]):
    """vLLM's own cache is reset, too, though nobody has said so."""
    assert text(found, "named") == text(found, "named, came back") == text(found, "before")
    assert found["named"][1] == found["back"][1]
    assert found["named, came back"][1] > found["named"][1]
    assert text(found, "named anew") == text(found, "changed")
    assert found["named anew"][1] == found["named, came back"][1]


def test_a_name_that_comes_again_brings_nothing_back(found: dict[str, Any]):
    """It could be a mistake: a name stands for one set of weights."""
    assert text(found, "named as before") == text(found, "before")
    assert found["named as before"][1] == found["named anew"][1]


# ── two servers ───────────────────────────────────────────────────────────────────────────

RANKS = (1, 2)
"""Texts of both servers agree only if both ranks of the second one have changed their weights."""


class Trained:
    """Two servers that are given other weights as a trainer does it, one by one or both."""

    def __init__(self, servers: list[Server], folders: list[str]) -> None:
        self.one, self.two = self.both = servers
        self.folders = folders

    def train(self, server: Server, weights: int, *, name: str = "") -> None:
        """Pause, which resets the caches; other weights; their name."""
        wait_for(lambda: paused(server))
        path = {"weights_path": self.folders[weights]}
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        if name:
            server.post("/update_weight_version", {"new_version": name})
        server.post("/resume", {})

    def call(self, name: str) -> None:
        """Name the weights of both."""
        for server in self.both:
            server.post("/update_weight_version", {"new_version": name})

    def takes_over(self) -> bool:
        """Whether either server takes a prompt over from the other. Its text is its own."""
        first, second = (
            takes_over(self.one, self.two, num_ranks=RANKS[1]),
            takes_over(self.two, self.one, num_ranks=RANKS[0]),
        )
        assert first == second
        return first

    def texts(self) -> list[list[int]]:
        """What they say to the same prompt."""
        return [tokens(server, PROMPT, cache_salt="computed here") for server in self.both]


def takes_over(prefill: Server, decode: Server, *, num_ranks: int) -> bool:
    """Whether all ranks of decode take a prompt over, or none."""
    prompt = DRAW(300)
    before = decode.counts()
    tickets = prefill.tickets(prompt)
    text = tokens(decode, prompt, kv_transfer_params=tickets)
    assert text == tokens(decode, prompt, cache_salt="computed here")

    def grown(what: str) -> float:
        return decode.counts().get(what, 0) - before.get(what, 0)

    wait_for(lambda: grown("pulls accepted") == num_ranks or grown("refused_requests") == 1)
    assert 0 in (grown("pulls accepted"), grown("refused_requests"))
    return grown("refused_requests") == 0


def comes_back(server: Server) -> bool:
    """Whether rows of a prompt are found in its host memory, when vLLM has forgotten its own."""
    server.post("/reset_prefix_cache", {})
    before = server.counts().get("restored_tokens", 0)
    text = tokens(server, PROMPT)
    assert text == tokens(server, PROMPT, cache_salt="computed here")
    return server.counts().get("restored_tokens", 0) > before


def paused(server: Server) -> bool:
    """Whether it pauses; not while blocks are kept for a ticket, whose end it may not know yet."""
    try:
        server.post("/pause", {})
    except AssertionError:
        server.post("/resume", {})
        return False
    return True


def tokens(server: Server, prompt: list[int], **more: Any) -> list[int]:
    answer = server.ask(prompt, max_tokens=12, return_token_ids=True, **more)
    return answer["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Iterator[Trained]:
    folders = [checkpoint(tmp_path_factory.mktemp("model"), LLAMA, seed) for seed in (1, 2, 3)]
    launches = [
        Launch(
            model=folders[0],
            name="trained",
            settings={
                "digest": "always",
                "contact_seconds": 60,
                "lease_seconds": 30,
                "host_bytes": 1 << 26,
            },
            options=("--skip-tokenizer-init", "-tp", str(size)),
        )
        for size in RANKS
    ]
    with running(*launches, logs=logs) as servers:
        yield Trained(servers, [str(folder) for folder in folders])


def test_weights_that_are_changed_in_one_server_only_are_not_taken_over(trained: Trained):
    assert trained.takes_over()
    trained.train(trained.two, 1, name="step 1")
    assert not trained.takes_over()


def test_weights_of_one_name_in_both_servers_are_taken_over(trained: Trained):
    before, changed = trained.texts()
    trained.train(trained.one, 1, name="step 1")
    assert trained.takes_over()
    assert trained.texts() == [changed, changed]
    assert changed != before


def test_rows_of_two_ranks_come_back_until_the_weights_have_changed(trained: Trained):
    server = trained.two
    tokens(server, PROMPT)
    wait_for(lambda: comes_back(server))
    trained.train(server, 2, name="step 2")
    assert not comes_back(server)
    wait_for(lambda: comes_back(server))
    trained.train(trained.one, 2, name="step 2")
    assert trained.takes_over()


def test_weights_that_nobody_has_named_are_not_taken_over(trained: Trained):
    for server in trained.both:
        trained.train(server, 1)
    assert not trained.takes_over()


def test_a_name_that_has_been_used_is_not_taken_over(trained: Trained):
    """Somebody has forgotten to count: rows could be those of the first "step 1"."""
    trained.call("step 1")
    assert not trained.takes_over()


def test_a_new_name_joins_them_again(trained: Trained):
    trained.call("step 3")
    assert trained.takes_over()


def test_weights_are_not_named_while_blocks_of_before_are_kept(trained: Trained):
    """A ticket that nobody has used yet keeps its blocks, and stays what it was."""
    prompt = DRAW(300)
    tickets = trained.two.tickets(prompt)
    trained.call("step 4")
    alone = tokens(trained.one, prompt, cache_salt="computed here")
    refused = trained.one.counts().get("refused_requests", 0)
    assert tokens(trained.one, prompt, kv_transfer_params=tickets) == alone
    assert trained.one.await_count("refused_requests", refused + 1) == refused + 1
    assert not trained.takes_over()
