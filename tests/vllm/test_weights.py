"""Weights that are changed in place: rows of before are not served, once vLLM is told to reset."""

import multiprocessing as mp
import os
from typing import Any

import pytest
from tiny import FewBlocks, checkpoint
from vllm_engines import ENVIRONMENT, LLAMA, ON_CPU, SMALL, Prompts, connector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = Prompts(SMALL["vocab_size"])(300)


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

        from kvstow.observe import vllm_counts

        return vllm_counts(REGISTRY.collect()).get("restored tokens", 0)


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
