"""Models whose caches are not plain, served by vLLM: handed over, and brought back from tiers.

Tiny configurations with weights drawn from one seed (`plugins/tiny_weights.py`), so large that a
wrong cache changes the text. DeepSeek-V4 needs a CPU with bfloat16 instructions, and more than
vLLM's CPU build has (`plugins/v4_metadata.py`). `KVSTOW_VLLM_TABLE` names a file for what was
found, which `scripts/vllm_models.py` writes into the guide.
"""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Launch, Server, running, shows

from kvstow.adapters.vllm.cache.pages import AFTER_LAST_TOKEN
from kvstow.plan import manifest
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Chunk, Window

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE / "plugins"), str(HERE.parents[1] / "src")])
BLOCK = 128
MAX_TOKENS = 12
LONG_ANSWER = 64
LOST = "KVSTOW_LOST_GROUP"


@dataclass(frozen=True)
class Tiny:
    """A model to serve: its configuration's file, and what is special about it."""

    file: str
    kind: str
    what: str
    lengths: tuple[int, ...] = (5, BLOCK, BLOCK + 1, 255, 256, 300, 383, 506, 512)
    dtype: str = "float32"


WHOLE_BLOCKS_AND_ONE = (BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 1)
"""Lengths where decode and an engine with a cache of its own both compute the last token alone:
where prefill and decode of one engine give slightly different numbers, these agree."""

MODELS = {
    "gpt-oss": Tiny("gptoss", "windows, chunks", "windows of 128, sinks"),
    "Llama 4": Tiny("llama4", "windows, chunks", "chunks of 256"),
    "Gemma 3n": Tiny(
        "gemma3n", "windows, chunks", "windows of 128, two layers read others' caches"
    ),
    "DeepSeek-V3": Tiny("dsv3", "latents (MLA)", "latents", WHOLE_BLOCKS_AND_ONE),
    "Qwen3-Next": Tiny(
        "qwen3next", "recurrent states", "gated delta nets", WHOLE_BLOCKS_AND_ONE, "bfloat16"
    ),
}

V4 = "DeepSeek-V4"
if torch.cpu._is_avx512_bf16_supported():  # vLLM has kernels for no other CPUs
    MODELS[V4] = Tiny(
        "v4",
        "DeepSeek-V4",
        "latents, 4 or 128 tokens in one, and an index of them",
        (130, 200, 257, 300, 385, 506),
        "bfloat16",
    )
V4_GROUPS = ("window128.0", "window128.1", "full.2", "window8.3", "window128.4")


class Pair:
    """Prefill and decode of one model."""

    def __init__(self, name: str, tiny: Tiny, servers: list[Server], layout: Layout) -> None:
        self.name, self.tiny, self.layout = name, tiny, layout
        self.prefill, self.decode = servers
        self.found: dict[str, Any] = {}

    @contextmanager
    def losing(self, group: int) -> Iterator[None]:
        """Meanwhile decode loses the rows of that group that a hand-over brings."""
        file = Path(self.decode.launch.environment[LOST])
        file.write_text(str(group))
        yield
        file.unlink()


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What this run has found so far, by model: rows of an earlier one are never among it."""
    return {}


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    found: dict[str, dict[str, Any]],
) -> Iterator[Pair]:
    tiny = MODELS[request.param]
    home = tmp_path_factory.mktemp(tiny.file)
    model, logs = home / "model", home / "logs"
    for folder in (model, logs):
        folder.mkdir()
    config = (HERE / "tiny_models" / f"{tiny.file}.json").read_text()
    (model / "config.json").write_text(config)
    environment = {"PYTHONPATH": PATH, LOST: str(logs / "lost")}
    if tiny.file == "v4":
        environment["KVSTOW_V4"] = "1"
    launches = [
        Launch(
            model=model,
            name=tiny.file,
            settings={
                "digest": "always",
                "contact_seconds": 60,  # of two servers on few cores
                "unverified": "weights are drawn from one seed",
                "host_bytes": 256 << 20,
                "manifest_file": str(logs / role),
            },
            environment=environment,
            options=("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", tiny.dtype),
        )
        for role in ("prefill", "decode")
    ]
    with running(*launches, logs=logs) as servers:
        layout = manifest.decode((logs / "decode.0-0").read_bytes())
        made = Pair(request.param, tiny, servers, layout)
        yield made
    found[made.name] = row(made)
    if table := os.environ.get("KVSTOW_VLLM_TABLE"):
        Path(table).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def row(pair: Pair) -> dict[str, Any]:
    """What was found of a model, for the table."""
    return {
        "what": pair.tiny.what,
        "order": pair.layout.order,
        "groups": [group_name(rows.group) for rows in pair.layout.groups],
        **pair.found,
    }


def group_name(group: Group) -> str:
    """What a group keeps; a recurrent state is what the next token needs of the last block."""
    if group.retention == AFTER_LAST_TOKEN:
        return "state"
    return group.name.rpartition(".")[0]


def prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(10, 49_000) for _ in range(length)]


def answer(
    server: Server, tokens: list[int], max_tokens: int = MAX_TOKENS, **more: Any
) -> list[int]:
    found = server.ask(tokens, max_tokens=max_tokens, return_token_ids=True, **more)
    return found["choices"][0]["token_ids"]


def told_by_one_engine(
    pair: Pair, seed: int, length: int, max_tokens: int = MAX_TOKENS
) -> tuple[list[int], list[int]]:
    """A prompt of that length, and how prefill goes on with it.

    In V4's kernels numbers depend on how many tokens are computed at once. Decode computes the
    prompt's last token alone: compared with an engine that has made that token itself.
    """
    if pair.tiny.file == "v4":
        tokens = prompt(seed, length - 1)
        first, *rest = answer(pair.prefill, tokens, max_tokens + 1)
        return [*tokens, first], rest
    tokens = prompt(seed, length)
    answer(pair.prefill, tokens, max_tokens)
    return tokens, answer(
        pair.prefill, tokens, max_tokens
    )  # from its own cache, as far as blocks are full


def test_decode_continues_as_one_engine_would(pair: Pair) -> None:
    before = pair.decode.counts()
    for length in pair.tiny.lengths:
        tokens, alone = told_by_one_engine(pair, length, length)
        tickets = pair.prefill.tickets(tokens)
        assert answer(pair.decode, tokens, kv_transfer_params=tickets) == alone, length
    accepted = before.get("pulls accepted", 0) + len(pair.tiny.lengths)
    assert pair.decode.await_count("pulls accepted", accepted) == accepted
    after = pair.decode.counts()
    moved = {
        what: after[what] - before.get(what, 0) for what in ("pull_descriptors", "pulled_bytes")
    }
    if pair.layout.order.startswith("B"):
        rows = [most_rows(x.group, n) for x in pair.layout.groups for n in pair.tiny.lengths]
        assert moved["pull_descriptors"] <= sum(rows)
    pair.found["handed over"] = {
        "prompts": len(pair.tiny.lengths),
        "tokens": sum(pair.tiny.lengths),
        "descriptors": int(moved["pull_descriptors"]),
        "bytes": int(moved["pulled_bytes"]),
    }
    shows(pair.tiny.kind, "hand-over")


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


def most_rows(group: Group, num_tokens: int) -> int:
    """Blocks that the next token can need, at most."""
    whole = -(-num_tokens // group.block_tokens)
    match group.retention:
        case Window(tokens=tokens) | Chunk(tokens=tokens):
            return min(whole, -(-tokens // group.block_tokens) + 1)
        case _:
            return whole


@pytest.mark.parametrize("pair", [V4] if V4 in MODELS else [], indirect=True)
@pytest.mark.parametrize("name", V4_GROUPS)
def test_rows_of_one_group_that_are_lost_after_a_handover_change_the_text(
    pair: Pair, name: str
) -> None:
    """506 tokens, and more: the states that 128 tokens are folded from are read at 512."""
    group = [rows.group.name for rows in pair.layout.groups].index(name)
    # what is wrong is stored, too: each prompt once
    tokens, text = told_by_one_engine(pair, 100 + group, 506, LONG_ANSWER)
    tickets = pair.prefill.tickets(tokens)
    with pair.losing(group):
        lost = answer(pair.decode, tokens, LONG_ANSWER, kv_transfer_params=tickets)
    assert lost != text


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
    assert pair.decode.await_count("stored_rows", 3) >= 3
    before = pair.decode.counts().get("restored_tokens", 0)
    pair.decode.post("/reset_prefix_cache", {})
    assert answer(pair.decode, tokens) == cached
    restored = pair.decode.await_count("restored_tokens", before + 1) - before
    assert restored >= 2 * BLOCK
    assert pair.decode.counts().get("restore_failures", 0) == 0
    pair.found["came back"] = {"tokens": int(restored), "of": length}
    shows(pair.tiny.kind, "offload")
