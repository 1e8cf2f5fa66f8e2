"""Latent, indexed and compressed attention: page sizes, and which caches a layer has."""

from collections import Counter

import pytest

from kvstow.errors import ModelError
from kvstow.plan.group import grouped
from kvstow.plan.layout import Order
from kvstow.plan.models import model_layers
from kvstow.plan.models.deepseek import indexer
from kvstow.plan.pack import PACKINGS, Packing, Site, packed_as
from kvstow.plan.retention import Full, Retention, Window
from kvstow.plan.spec import LayerSpec
from model_facts import LLAMA, config

V4 = {layer.name: layer for layer in model_layers("deepseek-v4-flash").layers}


def mla(dtype: str, latent_dim: int = 512) -> LayerSpec:
    facts = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": latent_dim}
    return model_layers({**facts, "qk_rope_head_dim": 64}, kv_dtype=dtype).layers[0]


V4_COUNTS = {
    "deepseek-v4-flash": {"c4": 21, "indexer": 21, "c128": 20, "sliding": 43},
    "deepseek-v4-pro": {"c4": 30, "indexer": 30, "c128": 31, "sliding": 61},
}


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_per_token_head"])
def test_latents_have_no_per_head_scales(dtype: str) -> None:
    with pytest.raises(ModelError, match="latents"):
        mla(dtype)


def test_latents_that_are_not_whole_scale_groups_are_refused() -> None:
    with pytest.raises(ModelError, match="500"):
        mla("fp8_ds_mla", latent_dim=500)


@pytest.mark.parametrize(
    ("name", "block_tokens", "retention", "states", "cell", "page"),
    [
        ("20.attn.c4", 256, Full(), 64, 584, 37_440),
        ("20.attn.indexer", 256, Full(), 64, 132, 8_640),
        ("21.attn.c128", 256, Full(), 2, 584, 1_728),
        ("20.attn.sliding", 64, Window(128), 64, 584, 37_440),
        ("20.attn.c4_state", 4, Window(8), 4, 8_192, 32_832),
        ("20.attn.indexer_state", 4, Window(8), 4, 2_048, 8_640),
        ("21.attn.c128_state", 8, Window(128), 8, 4_096, 32_832),
    ],
)
def test_compressed_caches_have_the_published_sizes(
    name: str, block_tokens: int, retention: Retention, states: int, cell: int, page: int
) -> None:
    spec = V4[f"model.layers.{name}"]
    assert (spec.block_tokens, spec.retention) == (block_tokens, retention)
    assert (spec.states, spec.cell_bytes, spec.page_bytes) == (states, cell, page)
    assert page == -(-states * cell // 576) * 576


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2", "glm-4.7-flash"])
def test_latent_models_keep_1152_bytes_per_token_and_layer(name: str) -> None:
    specs = model_layers(name).layers
    assert {x.cell_bytes for x in specs} == {1152}
    assert {tuple(f.name for f in x.fields) for x in specs} == {("latent", "rope")}


@pytest.mark.parametrize("dtype", ["fp8", "fp8_ds_mla"])
def test_fp8_latents_of_v32_carry_scales(dtype: str) -> None:
    model = model_layers("deepseek-v3.2", kv_dtype=dtype)
    assert Counter(x.cell_bytes for x in model.layers) == {656: 61, 132: 61}
    assert bool(model.notes) == (dtype == "fp8")


@pytest.mark.parametrize("name", V4_COUNTS)
def test_v4_has_the_published_numbers_of_caches(name: str) -> None:
    counts = Counter(x.name.rsplit(".", 1)[1] for x in model_layers(name).layers)
    states = {
        "c4_state": counts["c4"],
        "indexer_state": counts["c4"],
        "c128_state": counts["c128"],
    }
    assert counts == V4_COUNTS[name] | states


def test_v4_ratios_may_be_given_as_layer_types() -> None:
    names = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    ratios = config("deepseek-v4-pro")["compress_ratios"]
    assert isinstance(ratios, list)
    types = [names[ratio] for ratio in ratios[:61]]
    other = config("deepseek-v4-pro", compress_ratios=None, layer_types=types)
    assert model_layers(other).layers == model_layers("deepseek-v4-pro").layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": None}, "no 'compress_ratios' or 'layer_types'"),
        ({"compress_ratios": [4] * 42}, "42 entries, num_hidden_layers is 43"),
        ({"compress_ratios": [8] * 43}, "ratio 8 is none of"),
        (
            {"compress_ratios": [True] * 43},
            "not a list of whole numbers",
        ),
        ({"qk_rope_head_dim": 512}, "512 is not below head_dim 512"),
    ],
)
def test_v4_facts_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_layers(config("deepseek-v4-flash", **changes))


def test_v4_keeps_its_own_tokens_per_block() -> None:
    assert model_layers("deepseek-v4-flash", block_tokens=256) == model_layers("deepseek-v4-flash")
    with pytest.raises(ModelError, match="16 tokens per block do not make whole"):
        model_layers("deepseek-v4-flash", block_tokens=16)
    model = model_layers("deepseek-v4-flash", block_tokens=512)
    assert {x.block_tokens for x in model.layers} == {512, 64, 4, 8}
    assert "keep their own tokens per block" in model.notes[0]


def test_v4_has_one_precision() -> None:
    assert model_layers("deepseek-v4-pro", kv_dtype="fp8") == model_layers("deepseek-v4-pro")
    with pytest.raises(ModelError, match="'bf16' cannot be stored"):
        model_layers("deepseek-v4-pro", kv_dtype="bf16")


def test_a_v4_page_is_all_latents_and_then_all_scales() -> None:
    spec = V4["model.layers.20.attn.c4"]
    assert [part.cell_bytes for part in spec.sections] == [576, 8]
    assert spec.section_offsets == (0, 64 * 576)
    assert spec.field_offsets == {"latent": 0, "rope": 448, "scale": 0}


def test_an_index_page_is_all_keys_and_then_all_scales() -> None:
    for spec in (
        V4["model.layers.20.attn.indexer"],
        indexer("i", block_tokens=64, key_dim=128),
    ):
        assert [part.cell_bytes for part in spec.sections] == [128, 4]
        assert spec.section_offsets == (0, 64 * 128)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC", "LBHNC", "LBNHC"])
def test_v4_latents_lie_as_flashmla_reads_them(packing: Packing, order: Order) -> None:
    groups = grouped(model_layers("deepseek-v4-flash").layers)
    layout = packed_as(packing, groups, num_slabs=3, site=Site(order=order))
    for name, states in (("20.attn.sliding", 64), ("20.attn.c4", 64), ("21.attn.c128", 2)):
        page = layout.page(f"model.layers.{name}")
        block, content = page.axes
        assert content.stride == 1
        assert content.size >= states * 584
        assert page.offset % 16 == 0  # loads of 16 bytes on Hopper
        assert block.stride % 576 == 0  # tensor maps on Blackwell
        assert block.stride < 2**31
