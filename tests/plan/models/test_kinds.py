"""Page sizes by kind of layer, each against arithmetic written out here."""

import pytest

from kvstow.errors import ModelError, SpecError
from kvstow.plan.models import deepseek, recurrent
from kvstow.plan.models.attention import attention
from kvstow.plan.models.deepseek import indexer, latent
from kvstow.plan.models.ranks import TensorRank
from kvstow.plan.models.serving import Precision, Recurrence, precision
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, Sink, State, Window
from kvstow.plan.spec import DType, Extent, LayerSpec

WHOLE = Recurrence(
    rank=TensorRank(),
    conv_dtype=DType.BFLOAT16,
    state_dtype=DType.BFLOAT16,
    checkpoint_tokens=512,
)


def kv(
    heads: int = 8,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    tokens: int = 16,
    dtype: str = "bf16",
    retention: Retention | None = None,
) -> LayerSpec:
    return attention(
        "a",
        retention=retention or Full(),
        block_tokens=tokens,
        heads=Extent.whole("head", heads),
        key_dim=key_dim,
        value_dim=value_dim,
        precision=precision(dtype),
    )


def mla(dtype: str, latent_dim: int = 512) -> LayerSpec:
    how: Precision = precision(dtype)
    return latent("m", block_tokens=16, latent_dim=latent_dim, rope_dim=64, precision=how)


@pytest.mark.parametrize(
    "retention", [Full(), Window(128), Chunk(8192), Sink(4, 1020), Encoder(1500)]
)
def test_attention_keeps_two_vectors_per_head_and_token_whatever_its_retention(
    retention: Retention,
) -> None:
    assert kv(retention=retention).page_bytes == 8 * 16 * (128 + 128) * 2


@pytest.mark.parametrize("heads", [1, 2, 16])
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_attention_pages_grow_with_heads_and_tokens(heads: int, tokens: int) -> None:
    assert kv(heads, 64, 32, tokens=tokens).page_bytes == heads * tokens * (64 + 32) * 2


@pytest.mark.parametrize(("dtype", "size"), [("fp16", 2), ("fp32", 4), ("fp8", 1), ("fp8_e5m2", 1)])
def test_plain_elements_of_any_width_come_without_scales(dtype: str, size: int) -> None:
    assert kv(1, tokens=1, dtype=dtype).page_bytes == (128 + 128) * size


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_eight_bits_with_scales_per_token_and_head_take_264_bytes(dtype: str) -> None:
    assert kv(1, tokens=1, dtype=dtype).cell_bytes == 128 + 128 + 2 * 4 == 264


def test_four_bits_with_scales_per_token_and_head_take_136_bytes() -> None:
    assert kv(1, tokens=1, dtype="int4_per_token_head").cell_bytes == 64 + 64 + 2 * 4 == 136


def test_scales_are_part_of_the_page() -> None:
    with_scales, without = kv(dtype="fp8_per_token_head"), kv(dtype="fp8")
    assert with_scales.page_bytes - without.page_bytes == 8 * 16 * 2 * 4


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_nvfp4_pages_are_twice_the_kv_heads_times_72_bytes(heads: int) -> None:
    assert kv(heads, dtype="nvfp4").page_bytes == 2 * heads * 16 * (128 // 2 + 128 // 16)
    assert 128 // 2 + 128 // 16 == 72


def test_nvfp4_needs_whole_groups_of_sixteen() -> None:
    with pytest.raises(ModelError, match="multiples of 16, not 72"):
        kv(1, 72, 72, dtype="nvfp4")


def test_four_bit_heads_of_odd_size_do_not_fill_bytes() -> None:
    with pytest.raises(SpecError, match="71 elements of int4"):
        kv(1, 71, 71, dtype="int4_per_token_head")


def test_mla_keeps_1152_bytes_per_token() -> None:
    assert mla("bf16").cell_bytes == (512 + 64) * 2 == 1152
    assert mla("bf16").page_bytes == 16 * 1152


def test_mla_in_fp8_with_scales_takes_656_bytes() -> None:
    assert mla("fp8_ds_mla").cell_bytes == 512 + 4 * (512 // 128) + 64 * 2 == 656


def test_mla_in_plain_fp8_takes_a_byte_per_element() -> None:
    assert mla("fp8").cell_bytes == 576


def test_an_indexer_takes_132_bytes_per_token() -> None:
    spec = indexer("i", block_tokens=64, key_dim=128)
    assert spec.cell_bytes == 128 + 4 == 132
    assert spec.page_bytes == 64 * 132


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_per_token_head"])
def test_latents_have_no_per_head_scales(dtype: str) -> None:
    with pytest.raises(ModelError, match="latents"):
        mla(dtype)


def test_latents_that_are_not_whole_scale_groups_are_refused() -> None:
    with pytest.raises(ModelError, match="500"):
        mla("fp8_ds_mla", latent_dim=500)


def test_keys_and_values_are_no_latents() -> None:
    with pytest.raises(ModelError, match="keys and values"):
        kv(dtype="fp8_ds_mla")


def test_an_unknown_element_type_is_refused_with_those_close_to_it() -> None:
    with pytest.raises(ModelError, match=r"'fp9'(?s:.*)hint: one of .*fp8"):
        precision("fp9")


@pytest.mark.parametrize(
    ("spec", "block_tokens", "retention", "states", "cell", "page"),
    [
        (
            deepseek.compressed_latent(
                "x", block_tokens=256, ratio=4, head_dim=512, rope_dim=64
            ),
            256, Full(), 64, 584, 37_440,
        ),
        (
            deepseek.compressed_indexer("x", block_tokens=256, ratio=4, key_dim=128),
            256, Full(), 64, 132, 8_640,
        ),
        (
            deepseek.compressed_latent(
                "x", block_tokens=256, ratio=128, head_dim=512, rope_dim=64
            ),
            256, Full(), 2, 584, 1_728,
        ),
        (
            deepseek.sliding_latent("x", window=128, head_dim=512, rope_dim=64),
            64, Window(128), 64, 584, 37_440,
        ),
        (
            deepseek.compressor_state("x", ratio=4, dim=512),
            4, Window(8), 4, 8_192, 32_832,
        ),
        (
            deepseek.compressor_state("x", ratio=4, dim=128),
            4, Window(8), 4, 2_048, 8_640,
        ),
        (
            deepseek.compressor_state("x", ratio=128, dim=512),
            8, Window(128), 8, 4_096, 32_832,
        ),
    ],
    ids=["c4", "indexer", "c128", "sliding", "c4_state", "indexer_state", "c128_state"],
)  # fmt: skip
def test_compressed_caches_have_the_published_sizes(
    spec: LayerSpec, block_tokens: int, retention: Retention, states: int, cell: int, page: int
) -> None:
    assert (spec.block_tokens, spec.retention) == (block_tokens, retention)
    assert (spec.states, spec.cell_bytes, spec.page_bytes) == (states, cell, page)
    assert page == -(-states * cell // 576) * 576


def test_mamba1_keeps_a_state_and_three_inputs_per_channel() -> None:
    spec = recurrent.mamba1("s", WHOLE, channels=8192, state=16, kernel=4)
    assert spec.page_bytes == 8192 * 16 * 2 + 8192 * 3 * 2 == 311_296


def test_mamba2_keeps_a_matrix_per_head_and_convolves_x_b_and_c() -> None:
    spec = recurrent.mamba2("s", WHOLE, heads=24, head_dim=64, groups=1, state=128, kernel=4)
    assert spec.page_bytes == 24 * 64 * 128 * 2 + (24 * 64 + 2 * 128) * 3 * 2 == 403_968


def test_a_gated_delta_net_has_the_published_state_page() -> None:
    spec = recurrent.gated_delta_net(
        "s", WHOLE, key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4
    )
    assert spec.page_bytes == 32 * 128 * 128 * 2 + 3 * 8192 * 2 == 1_097_728


def test_lightning_attention_keeps_a_square_per_head() -> None:
    spec = recurrent.linear_attention("s", WHOLE, heads=64, head_dim=128)
    assert spec.page_bytes == 64 * 128 * 128 * 2


def test_a_short_convolution_keeps_its_last_inputs() -> None:
    spec = recurrent.short_convolution("s", WHOLE, channels=1024, kernel=3)
    assert spec.page_bytes == 1024 * 2 * 2


def test_states_may_be_wider_than_convolutions() -> None:
    wide = Recurrence(
        rank=TensorRank(),
        conv_dtype=DType.BFLOAT16,
        state_dtype=DType.FLOAT32,
        checkpoint_tokens=512,
    )
    spec = recurrent.mamba1("s", wide, channels=8, state=4, kernel=4)
    assert spec.field("conv").nbytes == 8 * 3 * 2
    assert spec.field("ssm").nbytes == 8 * 4 * 4


def test_a_recurrent_layer_is_one_state_of_one_head() -> None:
    spec = recurrent.linear_attention("s", WHOLE, heads=2, head_dim=2)
    assert (spec.retention, spec.states, spec.heads.size) == (State(), 1, 1)
    assert spec.block_tokens == 512
