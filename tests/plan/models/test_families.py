"""Each family of models: which layers it has, what they keep, and for how long."""

from collections import Counter

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import model_layers
from kvstow.plan.models.catalogue import entries
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window
from kvstow.plan.spec import DType, LayerSpec

BASE: dict[str, object] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def layers(model_type: str, **facts: object) -> tuple[LayerSpec, ...]:
    return model_layers({**BASE, "model_type": model_type, **facts}).layers


def kept(model_type: str, **facts: object) -> list[Retention]:
    return [layer.retention for layer in layers(model_type, **facts)]


def config(name: str, **changes: object) -> dict[str, object]:
    return {**entries()[name]["config"], **changes}


ORDINARY = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "glm", "glm4"]


@pytest.mark.parametrize("model_type", ORDINARY)
def test_an_ordinary_decoder_keeps_everything_in_every_layer(model_type: str) -> None:
    specs = layers(model_type, head_dim=8)
    assert [x.retention for x in specs] == [Full()] * 6
    assert [x.name for x in specs] == [f"model.layers.{i}.self_attn" for i in range(6)]
    assert {x.page_bytes for x in specs} == {2 * 16 * (8 + 8) * 2}


def test_gpt2_names_its_facts_otherwise() -> None:
    specs = model_layers({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32}).layers
    assert [x.page_bytes for x in specs] == [4 * 16 * (8 + 8) * 2] * 2


@pytest.mark.parametrize(
    ("facts", "heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 8),
        ({}, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 4, "num_key_value_heads": None}, 4),
    ],
)
def test_falcon_shares_its_kv_heads_by_flags(facts: dict[str, object], heads: int) -> None:
    assert layers("falcon", **facts)[0].heads.total == heads


def test_mistral_with_a_window_keeps_it_in_every_layer() -> None:
    assert kept("mistral", sliding_window=4096) == [Window(4096)] * 6
    assert kept("mistral", sliding_window=None) == [Full()] * 6


def test_qwen_windows_start_after_max_window_layers_and_only_when_used() -> None:
    window = {"sliding_window": 32, "max_window_layers": 4}
    assert kept("qwen2", **window) == [Full()] * 6
    assert kept("qwen2", **window, use_sliding_window=False) == [Full()] * 6
    assert kept("qwen2", **window, use_sliding_window=True) == [Full()] * 4 + [Window(32)] * 2
    everywhere = {"sliding_window": 32, "max_window_layers": 0, "use_sliding_window": True}
    assert kept("qwen3", **everywhere) == [Window(32)] * 6


def test_qwen_max_window_layers_must_be_a_count() -> None:
    with pytest.raises(ModelError, match="max_window_layers is -1"):
        kept("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=-1)


def test_gemma2_alternates_beginning_with_a_window() -> None:
    assert kept("gemma2", sliding_window=4096) == [Window(4096), Full()] * 3


def test_gemma3_has_five_windows_to_one_full_layer() -> None:
    assert kept("gemma3_text", sliding_window=512) == [Window(512)] * 5 + [Full()]
    every_third = kept("gemma3_text", sliding_window=512, sliding_window_pattern=3)
    assert every_third == [Window(512), Window(512), Full()] * 2


def test_gemma3_facts_that_the_released_file_leaves_out_are_those_of_its_class() -> None:
    released = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    }
    assert model_layers(released).layers == model_layers("gemma-3-4b").layers


def test_layer_types_win_over_patterns() -> None:
    types = ["full_attention", "sliding_attention"] * 3
    assert kept("gemma2", sliding_window=8, layer_types=types) == [Full(), Window(8)] * 3


def test_gpt_oss_alternates_and_its_sinks_keep_no_tokens() -> None:
    assert kept("gpt_oss", sliding_window=128) == [Window(128), Full()] * 3


def test_llama4_sees_chunks_but_everything_in_each_fourth_layer() -> None:
    expected = [Chunk(8192)] * 3 + [Full()] + [Chunk(8192)] * 2
    assert kept("llama4_text", attention_chunk_size=8192) == expected
    assert kept("llama4_text", attention_chunk_size=8192, no_rope_layers=[]) == expected
    listed = kept("llama4_text", attention_chunk_size=64, no_rope_layers=[1, 0, 1, 1, 0, 1])
    assert listed == [Chunk(64), Full(), Chunk(64), Chunk(64), Full(), Chunk(64)]
    assert kept("llama4_text", attention_chunk_size=None) == [Full()] * 6


def test_llama4_lists_as_many_rotary_layers_as_there_are() -> None:
    with pytest.raises(ModelError, match=r"no_rope_layers has 2 entries, .* 6"):
        kept("llama4_text", attention_chunk_size=64, no_rope_layers=[1, 0])


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2", "glm-4.7-flash"])
def test_latent_models_keep_1152_bytes_per_token_and_layer(name: str) -> None:
    specs = model_layers(name).layers
    assert {x.cell_bytes for x in specs} == {1152}
    assert {tuple(f.name for f in x.fields) for x in specs} == {("latent", "rope")}


def test_v32_has_an_indexer_beside_every_latent() -> None:
    specs = model_layers("deepseek-v3.2").layers
    assert [x.name for x in specs[:2]] == [
        "model.layers.0.self_attn",
        "model.layers.0.self_attn.indexer",
    ]
    assert Counter(x.cell_bytes for x in specs) == {1152: 61, 132: 61}


@pytest.mark.parametrize("dtype", ["fp8", "fp8_ds_mla"])
def test_fp8_latents_of_v32_carry_scales(dtype: str) -> None:
    model = model_layers("deepseek-v3.2", kv_dtype=dtype)
    assert Counter(x.cell_bytes for x in model.layers) == {656: 61, 132: 61}
    assert bool(model.notes) == (dtype == "fp8")


V4_COUNTS = {
    "deepseek-v4-flash": {"c4": 21, "indexer": 21, "c128": 20, "sliding": 43},
    "deepseek-v4-pro": {"c4": 30, "indexer": 30, "c128": 31, "sliding": 61},
}


@pytest.mark.parametrize("name", V4_COUNTS)
def test_v4_has_the_published_numbers_of_caches(name: str) -> None:
    counts = Counter(x.name.rsplit(".", 1)[1] for x in model_layers(name).layers)
    states = {
        "c4_state": counts["c4"], "indexer_state": counts["c4"], "c128_state": counts["c128"],
    }  # fmt: skip
    assert counts == V4_COUNTS[name] | states


def test_v4_caches_of_a_layer_are_named_after_it() -> None:
    names = [x.name for x in model_layers("deepseek-v4-flash").layers]
    assert names[:7] == [
        "model.layers.0.attn.sliding",
        "model.layers.1.attn.sliding",
        "model.layers.2.attn.c4",
        "model.layers.2.attn.indexer",
        "model.layers.2.attn.sliding",
        "model.layers.2.attn.c4_state",
        "model.layers.2.attn.indexer_state",
    ]


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
        ({"compress_ratios": [True] * 43}, "holds True"),
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


def test_jamba_has_attention_once_in_eight_layers() -> None:
    specs = model_layers("jamba-mini").layers
    full = [i for i, x in enumerate(specs) if x.retention == Full()]
    assert full == [4, 12, 20, 28]
    assert specs[0].name == "model.layers.0.mamba"
    assert specs[4].name == "model.layers.4.self_attn"


@pytest.mark.parametrize("offset", [None, -1, 8, True, "4"])
def test_jamba_needs_an_offset_inside_its_period(offset: object) -> None:
    with pytest.raises(ModelError, match=r"attn_layer_offset is .*, attn_layer_period is 8"):
        model_layers(config("jamba-mini", attn_layer_offset=offset))


def test_bamba_has_attention_where_it_says() -> None:
    specs = model_layers("bamba-9b").layers
    assert [i for i, x in enumerate(specs) if x.retention == Full()] == [9, 18, 27]
    assert specs[0].page_bytes == 128 * 64 * 128 * 2 + (8192 + 2 * 128) * 3 * 2


def test_bamba_head_size_may_be_automatic() -> None:
    automatic = model_layers(config("bamba-9b", mamba_d_head="auto"))
    assert automatic.layers == model_layers("bamba-9b").layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_d_head": 32}, "128 mamba heads of 32 do not make the mamba width, 8192"),
        ({"attn_layer_indices": [32]}, "names layer 32, num_hidden_layers is 32"),
        ({"mamba_n_groups": 3}, "128 mamba heads cannot share 3 groups"),
        ({"mamba_d_conv": 1}, "remembers nothing"),
    ],
)
def test_bamba_facts_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_layers(config("bamba-9b", **changes))


def test_falcon_h1_has_both_in_every_layer() -> None:
    specs = model_layers("falcon-h1-0.5b").layers
    assert [x.name for x in specs[:2]] == ["model.layers.0.self_attn", "model.layers.0.mamba"]
    assert Counter(type(x.retention) for x in specs) == {Full: 36, State: 36}


def test_nemotron_h_has_layers_that_keep_nothing() -> None:
    specs = model_layers("nemotron-h-8b").layers
    assert Counter(type(x.retention) for x in specs) == {State: 24, Full: 4}
    assert [x.name for x in specs[:2]] == ["model.layers.0.mixer", "model.layers.2.mixer"]


def test_nemotron_h_may_list_its_blocks_by_name() -> None:
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    pattern = config("nemotron-h-8b")["hybrid_override_pattern"]
    assert isinstance(pattern, str)
    blocks = [names[letter] for letter in pattern]
    other = config("nemotron-h-8b", hybrid_override_pattern=None, layers_block_type=blocks)
    assert model_layers(other).layers == model_layers("nemotron-h-8b").layers
    assert model_layers({**other, "num_hidden_layers": None}).layers == model_layers(other).layers


@pytest.mark.parametrize("pattern", ["M-M", "", "M" * 51 + "X", 5])
def test_nemotron_h_patterns_that_do_not_fit_are_refused(pattern: object) -> None:
    with pytest.raises(ModelError):
        model_layers(config("nemotron-h-8b", hybrid_override_pattern=pattern))


def test_mamba2_is_all_state() -> None:
    specs = model_layers("mamba2-2.7b").layers
    assert {x.retention for x in specs} == {State()}
    assert specs[0].page_bytes == 80 * 64 * 128 * 2 + (5120 + 2 * 128) * 3 * 2
    with pytest.raises(ModelError, match="80 mamba heads of 32"):
        model_layers(config("mamba2-2.7b", head_dim=32))


def test_mamba1_is_all_state() -> None:
    facts = {"state_size": 16, "conv_kernel": 4, "expand": 2}
    assert {x.page_bytes for x in layers("mamba", **facts)} == {128 * 16 * 2 + 128 * 3 * 2}


def test_a_model_may_ask_for_wider_states() -> None:
    specs = model_layers(config("nemotron-h-8b", mamba_ssm_cache_dtype="float32")).layers
    assert specs[0].field("ssm").dtype is DType.FLOAT32
    assert specs[0].field("conv").dtype is DType.BFLOAT16


def test_qwen3_next_has_attention_in_every_fourth_layer() -> None:
    specs = model_layers("qwen3-next-80b").layers
    assert [i for i, x in enumerate(specs) if x.retention == Full()] == list(range(3, 48, 4))
    assert specs[0].name == "model.layers.0.linear_attn"


def test_kimi_linear_has_float32_states_and_latents() -> None:
    specs = model_layers("kimi-linear-48b").layers
    assert [i for i, x in enumerate(specs) if x.retention == Full()] == [3, 7, 11, 15, 19, 23, 26]
    assert specs[3].cell_bytes == 1152
    assert specs[0].page_bytes == 32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2


@pytest.mark.parametrize(
    ("full", "kda", "message"),
    [
        ([2], [1], "layer 3 is in neither"),
        ([1, 2], [2, 3], "layer 2 is in both"),
        ([0], [1, 2, 3], "names layer 0"),
        ([4], [1, 2, 3], "names layer 4"),
    ],
)
def test_kimi_linear_names_every_layer_once(full: list[int], kda: list[int], message: str) -> None:
    linear = {
        "full_attn_layers": full, "kda_layers": kda,
        "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4,
    }  # fmt: skip
    facts = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "num_hidden_layers": 3}
    with pytest.raises(ModelError, match=message):
        layers("kimi_linear", **facts, linear_attn_config=linear)


def test_minimax_has_full_attention_after_seven_lightning_layers() -> None:
    specs = model_layers("minimax-text-01").layers
    assert [i for i, x in enumerate(specs) if x.retention == Full()] == list(range(7, 80, 8))
    assert specs[0].page_bytes == 64 * 128 * 128 * 2


@pytest.mark.parametrize("kinds", [[0, 1], [0, 1, 2] * 2, [], "01"])
def test_minimax_lists_a_kind_for_every_layer(kinds: object) -> None:
    with pytest.raises(ModelError, match="attn_type_list"):
        layers("minimax_text_01", attn_type_list=kinds)


def test_lfm2_has_convolutions_and_attention() -> None:
    specs = model_layers("lfm2-350m").layers
    assert [i for i, x in enumerate(specs) if x.retention == Full()] == [2, 5, 8, 10, 12, 14]
    assert specs[0].name == "model.layers.0.conv"
    assert specs[0].page_bytes == 1024 * 2 * 2


def test_whisper_reads_1500_positions_of_its_encoder() -> None:
    specs = model_layers("whisper-large-v3").layers
    assert [x.name for x in specs[:2]] == [
        "model.decoder.layers.0.self_attn",
        "model.decoder.layers.0.encoder_attn",
    ]
    assert Counter(x.retention for x in specs) == {Full(): 32, Encoder(1500): 32}
    assert {x.page_bytes for x in specs} == {20 * 16 * (64 + 64) * 2}


def test_t5_says_how_long_an_encoder_it_is_planned_for() -> None:
    model = model_layers("t5-large")
    assert Counter(x.retention for x in model.layers) == {Full(): 24, Encoder(512): 24}
    assert model.notes[0].startswith("cross-attention is planned for 512 encoder tokens")
    assumed = model_layers(config("t5-large", n_positions=None))
    assert "an assumption" in assumed.notes[0]


def test_whisper_heads_must_divide_its_width() -> None:
    with pytest.raises(ModelError, match="d_model 1280 is not divisible by 19"):
        model_layers(config("whisper-large-v3", decoder_attention_heads=19))


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int4_per_token_head", "nvfp4"])
def test_quantised_caches_of_a_real_model_have_the_sizes_of_their_kind(dtype: str) -> None:
    cell = {"fp8_per_token_head": 264, "int4_per_token_head": 136, "nvfp4": 144}[dtype]
    specs = model_layers("llama-3.1-8b", kv_dtype=dtype, tp=2).layers
    assert {x.page_bytes for x in specs} == {4 * 16 * cell}
