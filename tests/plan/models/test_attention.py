"""Ordinary decoders: page sizes against arithmetic written out here, and what each layer sees."""

from collections import Counter
from collections.abc import Mapping

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import model_layers
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, Window
from kvstow.plan.spec import LayerSpec
from model_facts import LLAMA, config, layers


def kv(
    heads: int = 8,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    tokens: int = 16,
    dtype: str = "bf16",
    **facts: object,
) -> LayerSpec:
    """The first layer of a decoder with so many heads."""
    counts = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
    dims = {"head_dim": key_dim, "v_head_dim": value_dim}
    config = {**LLAMA, **counts, **dims, **facts}
    return model_layers(config, block_tokens=tokens, kv_dtype=dtype).layers[0]


def kept(model_type: str, **facts: object) -> list[Retention]:
    return [layer.retention for layer in layers(model_type, **facts)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000, not .* to 1000",
        ),
        ({"head_dim": 2**40 + 1}, "head_dim is 1099511627777, not .* from 1 to 1099511627776"),
        ({"num_key_value_heads": 16}, "8 attention heads cannot share 16 kv heads"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 kv heads"),
        ({"hidden_size": 65}, "hidden_size 65 is not divisible by 8"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers, .* is 4"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list"),
        ({"layer_types": [1, 2, 3, 4]}, "layer_types is \\[1, 2, 3, 4\\], not a list of strings"),
        ({"layer_types": ["sliding_attention"] * 4}, "no 'sliding_window'"),
        ({"layer_types": ["chunked_attention"] * 4}, "no 'attention_chunk_size'"),
        ({"layer_types": ["dragon"] * 4}, "'dragon'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": "big"}, "sliding_window is 'big'"),
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
        ({"torch_dtype": "float7"}, "torch_dtype is 'float7'"),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"model_type": 5}, "model_type is 5"),
    ],
)
def test_contradictory_facts_are_refused_with_both_values(
    changes: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_layers({**LLAMA, **changes})


@pytest.mark.parametrize("heads", [1, 2, 16])
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_attention_pages_grow_with_heads_and_tokens(heads: int, tokens: int) -> None:
    assert kv(heads, 64, 32, tokens=tokens).page_bytes == heads * tokens * (64 + 32) * 2


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_eight_bits_with_scales_per_token_and_head_take_264_bytes(dtype: str) -> None:
    assert kv(1, tokens=1, dtype=dtype).cell_bytes == 128 + 128 + 2 * 4 == 264


def test_four_bits_with_scales_per_token_and_head_take_136_bytes() -> None:
    assert kv(1, tokens=1, dtype="int4_per_token_head").cell_bytes == 64 + 64 + 2 * 4 == 136


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_nvfp4_pages_are_twice_the_kv_heads_times_72_bytes(heads: int) -> None:
    assert kv(heads, dtype="nvfp4").page_bytes == 2 * heads * 16 * (128 // 2 + 128 // 16)
    assert 128 // 2 + 128 // 16 == 72


def test_nvfp4_pages_are_key_data_key_scales_value_data_value_scales() -> None:
    spec = kv(2, dtype="nvfp4")
    assert [part.fields[0].name for part in spec.sections] == ["k", "k_scale", "v", "v_scale"]
    assert spec.section_offsets == (0, 32 * 64, 32 * 72, 32 * 136)


def test_nvfp4_needs_whole_groups_of_sixteen() -> None:
    with pytest.raises(ModelError, match="multiples of 16, not 72"):
        kv(1, 72, 72, dtype="nvfp4")


def test_keys_and_values_are_no_latents() -> None:
    with pytest.raises(ModelError, match="keys and values"):
        kv(dtype="fp8_ds_mla")


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


def test_qwen_windows_start_after_max_window_layers_and_only_when_used() -> None:
    window = {"sliding_window": 32, "max_window_layers": 4}
    assert kept("qwen2", **window) == [Full()] * 6
    assert kept("qwen2", **window, use_sliding_window=False) == [Full()] * 6
    assert kept("qwen2", **window, use_sliding_window=True) == [Full()] * 4 + [Window(32)] * 2
    everywhere = {"sliding_window": 32, "max_window_layers": 0, "use_sliding_window": True}
    assert kept("qwen3", **everywhere) == [Window(32)] * 6


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


def test_a_window_of_a_family_without_a_rule_is_refused() -> None:
    for family in ("llama", "glm4", "foo"):
        with pytest.raises(
            ModelError, match=f"nothing says which layers of .*'{family}' it limits"
        ):
            kept(family, sliding_window=64)
    assert kept("llama", sliding_window=64, use_sliding_window=False) == [Full()] * 6


@pytest.mark.parametrize(
    ("family", "facts", "windows"),
    [
        ("dots1", {"max_window_layers": 4}, [4, 5]),
        ("qwen2_vl", {"use_sliding_window": True, "max_window_layers": 5}, [5]),
        ("qwen2_5_vl", {"use_sliding_window": True}, []),
        ("olmo3", {}, [0, 1, 2, 4, 5]),
        ("exaone4", {"sliding_window_pattern": "LG"}, [0, 2, 4]),
        ("exaone4", {}, [0, 1, 2, 4, 5]),
        ("smollm3", {}, []),
        ("smollm3", {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1, 0, 1]}, [1, 4]),
        ("cwm", {}, [1, 2, 3, 5]),
    ],
)
def test_each_family_has_its_own_windows(
    family: str, facts: dict[str, object], windows: list[int]
) -> None:
    found = kept(family, sliding_window=64, **facts)
    assert [i for i, retention in enumerate(found) if retention == Window(64)] == windows
    assert all(retention in (Full(), Window(64)) for retention in found)


def test_letters_of_a_window_pattern_are_local_and_global() -> None:
    with pytest.raises(ModelError, match="'LX', not letters L"):
        kept("exaone4", sliding_window=64, sliding_window_pattern="LX")


def test_layers_that_share_a_cache_keep_none() -> None:
    found = kept("gemma3n_text", sliding_window=64, num_kv_shared_layers=2)
    assert found == [Window(64)] * 4
    with pytest.raises(ModelError, match=r"num_kv_shared_layers is 6, not .* 0 to 5"):
        kept("gemma3n_text", sliding_window=64, num_kv_shared_layers=6)


def test_gemma_4_has_wider_heads_where_it_sees_everything() -> None:
    wide = layers("gemma4_text", sliding_window=64, global_head_dim=32)
    assert [layer.field("k").shape for layer in wide] == [(8,)] * 5 + [(32,)]
    fewer = layers(
        "gemma4_text",
        sliding_window=64,
        global_head_dim=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )
    assert [layer.heads.size for layer in fewer] == [wide[0].heads.size] * 5 + [1]
    with pytest.raises(ModelError, match="per_layer_config has 'x'"):
        layers("gemma4_text", sliding_window=64, per_layer_config={"x": {}})
    with pytest.raises(ModelError, match="of layer 2 changes 'hidden_size'"):
        layers("gemma4_text", sliding_window=64, per_layer_config={"02": {"hidden_size": 3}})


def test_t5_says_how_long_an_encoder_it_is_planned_for() -> None:
    model = model_layers("t5-large")
    assert Counter(x.retention for x in model.layers) == {Full(): 24, Encoder(512): 24}
    assert model.notes[0].startswith("cross-attention is planned for 512 encoder tokens")
    assumed = model_layers(config("t5-large", n_positions=None))
    assert "an assumption" in assumed.notes[0]
