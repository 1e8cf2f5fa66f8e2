"""Models whose caches are not plain, served by vLLM: handed over, and brought back from tiers.

Tiny configurations with weights drawn from one seed (`plugins/tiny_weights.py`), so large that a
wrong cache changes the text. `KVSTOW_VLLM_TABLE` names a file for what was found, which
`scripts/vllm_models.py` writes into the guide.
"""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import Launch, Server, running

from kvstow.adapters.vllm.pages import AFTER_LAST_TOKEN
from kvstow.plan import manifest
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE / "plugins"), str(HERE.parents[1] / "src")])
BLOCK = 128
MAX_TOKENS = 12


@dataclass(frozen=True)
class Tiny:
    """A model to serve: its configuration's file, and what is special about it."""

    file: str
    what: str
    lengths: tuple[int, ...] = (5, BLOCK, BLOCK + 1, 255, 256, 300, 383, 506, 512)
    dtype: str = "float32"


WHOLE_BLOCKS_AND_ONE = (BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 1)
"""Lengths where decode and an engine with a cache of its own both compute the last token alone:
where prefill and decode of one engine give slightly different numbers, these agree."""

MODELS = {
    "gpt-oss": Tiny("gptoss", "windows of 128, sinks"),
    "Llama 4": Tiny("llama4", "chunks of 256"),
    "Gemma 3n": Tiny("gemma3n", "windows of 128, two layers read others' caches"),
    "DeepSeek-V3": Tiny("dsv3", "latents", WHOLE_BLOCKS_AND_ONE),
    "Qwen3-Next": Tiny("qwen3next", "gated delta nets", WHOLE_BLOCKS_AND_ONE, "bfloat16"),
}


class Pair:
    """Prefill and decode of one model."""

    def __init__(self, name: str, tiny: Tiny, servers: list[Server], layout: Layout) -> None:
        self.name, self.tiny, self.layout = name, tiny, layout
        self.prefill, self.decode = servers
        self.found: dict[str, Any] = {}


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    tiny = MODELS[request.param]
    home = tmp_path_factory.mktemp(tiny.file)
    model, logs = home / "model", home / "logs"
    for folder in (model, logs):
        folder.mkdir()
    config = (HERE / "tiny_models" / f"{tiny.file}.json").read_text()
    (model / "config.json").write_text(config)
    launches = [
        Launch(
            model=model,
            name=tiny.file,
            settings={
                "digest": "always",
                "unverified": "weights are drawn from one seed",
                "host_bytes": 256 << 20,
                "manifest_file": str(logs / role),
            },
            environment={"PYTHONPATH": PATH},
            options=("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", tiny.dtype),
        )
        for role in ("prefill", "decode")
    ]
    with running(*launches, logs=logs) as servers:
        layout = manifest.decode((logs / "decode.0-0").read_bytes())
        made = Pair(request.param, tiny, servers, layout)
        yield made
    record(made)


def record(pair: Pair) -> None:
    """Add what was found to the table that `KVSTOW_VLLM_TABLE` names."""
    name = os.environ.get("KVSTOW_VLLM_TABLE")
    if name is None:
        return
    file = Path(name)
    table = json.loads(file.read_text()) if file.exists() else {}
    table[pair.name] = {
        "what": pair.tiny.what,
        "order": pair.layout.order,
        "groups": [group_name(rows.group) for rows in pair.layout.groups],
        **pair.found,
    }
    file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def group_name(group: Group) -> str:
    """What a group keeps; a recurrent state is what the next token needs of the last block."""
    if group.retention == AFTER_LAST_TOKEN:
        return "state"
    return group.name.rpartition(".")[0]


def prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(10, 49_000) for _ in range(length)]


def answer(server: Server, tokens: list[int], **more: Any) -> list[int]:
    found = server.ask(tokens, max_tokens=MAX_TOKENS, return_token_ids=True, **more)
    return found["choices"][0]["token_ids"]


def test_decode_continues_as_one_engine_would(pair: Pair) -> None:
    before = pair.decode.counts()
    for length in pair.tiny.lengths:
        tokens = prompt(length, length)
        answer(pair.prefill, tokens)
        alone = answer(pair.prefill, tokens)  # from its own cache, as far as blocks are full
        tickets = pair.prefill.tickets(tokens)
        assert answer(pair.decode, tokens, kv_transfer_params=tickets) == alone, length
    accepted = before.get("pull accepted", 0) + len(pair.tiny.lengths)
    assert pair.decode.await_count("pull accepted", accepted) == accepted
    after = pair.decode.counts()
    moved = {what: after[what] - before.get(what, 0) for what in ("descriptors", "pulled bytes")}
    pair.found["handed over"] = {
        "prompts": len(pair.tiny.lengths),
        "tokens": sum(pair.tiny.lengths),
        "descriptors": int(moved["descriptors"]),
        "bytes": int(moved["pulled bytes"]),
    }


def test_a_shorter_prompt_after_a_handover_finds_nothing_that_was_left_behind(pair: Pair) -> None:
    """vLLM enters the blocks of a load into its prefix cache: all of them must be filled, though
    windows, chunks and states take only the last blocks of a long prompt."""
    tokens = prompt(2, 4 * BLOCK + 1)
    pair.decode.post("/reset_prefix_cache", {})
    answer(pair.decode, tokens, kv_transfer_params=pair.prefill.tickets(tokens))
    for blocks in (1, 2, 3):
        shorter = tokens[: blocks * BLOCK + 1]
        pair.prefill.post("/reset_prefix_cache", {})
        right = [answer(pair.prefill, shorter) for _ in ("computed", "from its own cache")]
        assert answer(pair.decode, shorter) in right, blocks


def test_the_text_depends_on_what_was_cached(pair: Pair) -> None:
    """The same last token, which is computed, after others, which are cached: another text."""
    length = pair.tiny.lengths[-1]
    tokens = prompt(length, length)
    other = [*prompt(7, length - 1), tokens[-1]]
    assert answer(pair.prefill, other) != answer(pair.prefill, tokens)


def test_a_prefix_that_was_driven_out_comes_back(pair: Pair) -> None:
    length = 3 * BLOCK + 1
    tokens = prompt(1, length)
    answer(pair.decode, tokens)
    cached = answer(pair.decode, tokens)
    assert pair.decode.await_count("stored rows", 3) >= 3
    before = pair.decode.counts().get("restored tokens", 0)
    pair.decode.post("/reset_prefix_cache", {})
    assert answer(pair.decode, tokens) == cached
    restored = pair.decode.await_count("restored tokens", before + 1) - before
    assert restored >= 2 * BLOCK
    assert pair.decode.counts().get("restore failed", 0) == 0
    pair.found["came back"] = {"tokens": int(restored), "of": length}
