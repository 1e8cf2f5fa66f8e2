"""Engines in the caller's process, as in notebooks: no step is taken once `generate` has returned.

With two ranks the workers are processes of their own, which vLLM tells nothing between steps.
"""

from collections.abc import Iterator

import pytest
from tiny import Remote, started
from vllm_engines import LLAMA, SMALL, Prompts, connector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

NUM_BLOCKS = 40
DRAW = Prompts(SMALL["vocab_size"])

Pair = tuple[Remote, Remote, int]

OFFLOADS = {"host_bytes": 1 << 26}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda ranks: f"tp{ranks}")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    made: list[Remote] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        folder = tmp_path_factory.mktemp("model")
        for _ in ("prefill", "decode"):
            options = {"digest": "always", "lease_seconds": 60, "contact_seconds": 60}
            made.append(started(folder, LLAMA, NUM_BLOCKS, ranks=request.param, **options))
        yield made[0], made[1], request.param
    for engine in made:
        engine.close()


def test_another_beginning_of_the_prompt_changes_the_text(pair: Pair):
    """Otherwise equal texts would say nothing of the cache."""
    one, other = DRAW(300), DRAW(300)
    texts = [pair[0].first({"prompt": prompt})["text"] for prompt in (one, other[:200] + one[200:])]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("length", [33, 300])
def test_a_ticket_is_honoured_though_the_engine_that_gave_it_takes_no_step(pair: Pair, length: int):
    prefill, decode, ranks = pair
    prompt = DRAW(length)
    alone = prefill.first({"prompt": prompt})["text"]
    before = decode.counts().get("pulls accepted", 0)
    asks = {"prompt": prompt, "max_tokens": 1, "params": {"do_remote_decode": True}}
    tickets = prefill.first(asks)["params"]
    assert len(tickets["kvstow"]["tickets"]) == ranks
    assert decode.first({"prompt": prompt, "params": tickets})["text"] == alone
    after = decode.counts()
    assert after["pulls accepted"] - before == ranks
    assert "pulls ticket" not in after


@pytest.fixture(scope="module", params=["alone", "first", "second"])
def storing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Remote]:
    """An engine with tiers; the connector alone, or one of two in vLLM's MultiConnector."""
    levels = {"alone": "INFO", "first": "DEBUG", "second": "WARNING"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", levels[request.param])
        folder = tmp_path_factory.mktemp("model")
        kvstow = connector("kvstow", **OFFLOADS)
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path_factory.mktemp("e"))},
        }
        pair = [kvstow, example] if request.param == "first" else [example, kvstow]
        several = {**kvstow, "kv_connector": "MultiConnector", "kv_connector_module_path": None}
        several["kv_connector_extra_config"] = {"connectors": pair}
        transfer = kvstow if request.param == "alone" else several
        engine = started(folder, LLAMA, NUM_BLOCKS, transfer=transfer)
        yield engine
    engine.close()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_no_block_is_held_once_a_batch_is_over(storing: Remote, max_tokens: int):
    storing.run([{"prompt": DRAW(200), "max_tokens": max_tokens} for _ in range(12)], 12)
    assert storing.reset()


def test_a_prompt_comes_back_from_the_tiers_of_an_engine_in_process(
    storing: Remote, request: pytest.FixtureRequest
):
    """Counts are told at every step: a connector that vLLM does not know by name would end it."""
    prompt = DRAW(300)
    before = storing.first({"prompt": prompt})["text"]
    assert storing.reset()
    assert storing.first({"prompt": prompt})["text"] == before
    is_asked_second = "second" in request.node.name  # then the other one has it, too, and loads it
    assert ("restored_tokens" in storing.counts()) is not is_asked_second
    assert storing.counts()["stored_rows"] > 0
