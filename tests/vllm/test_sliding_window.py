"""A model of window and full layers (Gemma 3): groups that overlay each other, handed over.

Prefill keeps rows, decode keeps one region per layer: the route joins the two.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serving import Launch, Server, running, shows

import recorded_vllm
from kvstow.adapters.vllm.cache.layout import declared_layout
from kvstow.demo.weights import GEMMA3, unpacked
from kvstow.plan import manifest
from kvstow.transfer.tickets.ticket import Ticket

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

BOS = 2
WINDOW = 512
STORY = (
    "Once upon a time there was a small village at the foot of a mountain. Every morning the "
    "baker lit the oven, the smith opened the forge, and the children walked to school along "
    "the river. "
)


@pytest.fixture(scope="module")
def pair(logs: Path) -> Iterator[list[Server]]:
    model = unpacked(GEMMA3)
    launches = [
        Launch(
            model=model,
            name="gemma",
            settings={
                "digest": "always",
                "lease_seconds": 60,
                "manifest_file": str(logs / f"manifest-{rows}"),
            },
            rows=rows,
        )
        for rows in (True, False)
    ]
    with running(*launches, logs=logs) as servers:
        yield servers


@pytest.fixture(scope="module")
def words(pair: list[Server]) -> list[int]:
    """Tokens of a text, with the first token that Gemma needs."""
    answer = pair[0].post("/tokenize", {"model": "gemma", "prompt": STORY * 24})
    found = [token for token in answer["tokens"] if token != BOS]
    assert len(found) > 900
    return found


@pytest.mark.parametrize(("rows", "order"), [(True, "BLHNC"), (False, "LBHNC")])
def test_the_engine_declares_what_was_recorded(
    pair: list[Server], logs: Path, rows: bool, order: str
):
    """Two servers, two orders."""
    layout = manifest.decode((logs / f"manifest-{rows}.0-0").read_bytes())
    recorded = declared_layout(recorded_vllm.gemma3(order), base_align=64)
    assert layout.identity is not None
    assert layout.identity.interior == "cpu-transposed"
    assert layout.identity.is_verified
    assert replace(layout, model=recorded.model, identity=recorded.identity) == recorded


@pytest.mark.parametrize("count", [6, 128, 400, WINDOW, WINDOW + 1, 639, 640, 767, 900])
def test_decode_continues_as_one_server_would(pair: list[Server], words: list[int], count: int):
    prefill, decode = pair
    prompt = [BOS, *words[40 : 40 + count - 1]]
    params = prefill.tickets(prompt)
    before = decode.counts().get("pulls accepted", 0)
    text = decode.text(prompt, max_tokens=12, kv_transfer_params=params)
    assert text == prefill.text(prompt, max_tokens=12)
    assert decode.await_count("pulls accepted", before + 1) == before + 1
    shows("windows, chunks", "hand-over")


def test_past_the_window_only_the_window_is_offered(pair: list[Server], words: list[int]):
    prompt = [BOS, *words[:899]]
    params = pair[0].tickets(prompt)
    ticket = Ticket.parse(params["kvstow"]["tickets"][0])
    counts = sorted(len(blocks) for blocks in ticket.blocks.values())
    blocks = -(-900 // 128)
    assert counts[-1] == blocks
    assert counts[0] < blocks
    assert pair[1].text(prompt, max_tokens=8, kv_transfer_params=params)


@pytest.mark.parametrize("shorter", [127, 129, 257, 384, 600])
def test_a_shorter_prompt_after_a_handover_finds_nothing_that_the_window_left_behind(
    pair: list[Server], words: list[int], shorter: int
):
    """vLLM enters the blocks of a load into its prefix cache: all of them were filled."""
    prefill, decode = pair
    prompt = [BOS, *words[60:959]]
    decode.post("/reset_prefix_cache", {})
    accepted = decode.counts().get("pulls accepted", 0) + 1
    decode.text(prompt, max_tokens=4, kv_transfer_params=prefill.tickets(prompt))
    assert decode.await_count("pulls accepted", accepted) == accepted
    prefill.post("/reset_prefix_cache", {})
    expected = prefill.text(prompt[:shorter], max_tokens=12)
    assert decode.text(prompt[:shorter], max_tokens=12) == expected


def test_a_failed_load_is_reported_for_all_groups_and_computed_anew(
    pair: list[Server], words: list[int]
):
    prefill, decode = pair
    prompt = [BOS, *words[100:800]]
    params = prefill.tickets(prompt)
    real = Ticket.parse(params["kvstow"]["tickets"][0])
    fields = {name: getattr(real, name) for name in Ticket.__dataclass_fields__}
    params["kvstow"]["tickets"] = [str(Ticket(**{**fields, "lease": real.lease ^ 1}))]
    before = decode.counts().get("pulls ticket", 0)
    text = decode.text(prompt, max_tokens=12, kv_transfer_params=params)
    assert text == prefill.text(prompt, max_tokens=12)
    assert decode.await_count("pulls ticket", before + 1) == before + 1
