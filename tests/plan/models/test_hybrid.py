"""Models with recurrent layers: which layers are which, and the sizes of their states."""

from dataclasses import replace

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import model_layers
from kvstow.plan.retention import Full, State
from kvstow.plan.spec import DType
from model_facts import config, layers


@pytest.mark.parametrize("offset", [None, -1, 8, True, "4"])
def test_jamba_needs_an_offset_inside_its_period(offset: object) -> None:
    with pytest.raises(ModelError, match=r"attn_layer_offset is .*, attn_layer_period is 8"):
        model_layers(config("jamba-mini", attn_layer_offset=offset))


def test_bamba_head_size_may_be_automatic() -> None:
    automatic = model_layers(config("bamba-9b", mamba_d_head="auto"))
    assert automatic.layers == model_layers("bamba-9b").layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_d_head": 32}, "128 mamba heads of 32 do not make the mamba width, 8192"),
        ({"attn_layer_indices": [32]}, "names layer 32, num_hidden_layers is 32"),
        ({"mamba_n_groups": 3}, "128 mamba heads cannot share 3 groups"),
        ({"mamba_d_conv": 1}, "keeps no state"),
    ],
)
def test_bamba_facts_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_layers(config("bamba-9b", **changes))


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
        "full_attn_layers": full,
        "kda_layers": kda,
        "head_dim": 8,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    facts = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "num_hidden_layers": 3}
    with pytest.raises(ModelError, match=message):
        layers("kimi_linear", **facts, linear_attn_config=linear)


@pytest.mark.parametrize("kinds", [[0, 1], [0, 1, 2] * 2, [], "01"])
def test_minimax_lists_a_kind_for_every_layer(kinds: object) -> None:
    with pytest.raises(ModelError, match="attn_type_list"):
        layers("minimax_text_01", attn_type_list=kinds)


@pytest.mark.parametrize(
    ("model", "page"),
    [
        ("jamba-mini", 8192 * 16 * 2 + 8192 * 3 * 2),  # mamba1: a state, three inputs per channel
        ("falcon-h1-0.5b", 24 * 64 * 128 * 2 + (24 * 64 + 2 * 128) * 3 * 2),  # mamba2: x, B, C
        ("qwen3-next-80b", 1_097_728),  # as published
    ],
)
def test_states_have_the_sizes_of_their_kind(model: str, page: int) -> None:
    (spec,) = {replace(x, name="") for x in model_layers(model).layers if x.retention == State()}
    assert spec.page_bytes == page
    assert (spec.states, spec.heads.size, spec.block_tokens) == (1, 1, 512)
