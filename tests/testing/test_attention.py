"""The conformance kit tells kernels that honour strides from kernels that do not."""

import pytest
import torch

from kvstow.errors import SpecError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Alignment, Demand, Site, packed
from kvstow.plan.retention import Chunk, Full, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.testing.attention import check_attention, check_in_place, check_latent_attention
from planning import attention, recurrent

DEFAULT = Alignment()


def cache(
    order: str = "BLHNC",
    *,
    heads: int = 2,
    dim: int = 4,
    tokens: int = 4,
    dtype: DType = DType.FLOAT32,
    alignment: Alignment = DEFAULT,
    num_slabs: int = 24,
) -> Layout:
    layers = [
        attention(f"l.{i}", heads=heads, dim=dim, tokens=tokens, dtype=dtype) for i in range(2)
    ]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(order=order, alignment=alignment))


def gathered(query, keys, values, table, lengths):
    """torch's scaled_dot_product_attention over gathered blocks."""
    rows = []
    for i, length in enumerate(lengths.tolist()):
        k, v = (
            x[table[i].long()].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)[None]
            for x in (keys, values)
        )
        q = query[i][None, :, None]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        rows.append(out[0, :, 0])
    return torch.stack(rows)


# ── kernels that are right ────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 2, 2), (4, 4, 4), (1, 8, 4), (8, 1, 2)])
def test_torch_attention_over_gathered_blocks_honours_every_order(order, sizes):
    heads, tokens, dim = sizes
    report = check_attention(gathered, cache(order, heads=heads, tokens=tokens, dim=dim))
    assert report.ok, report
    assert not report.needs_clean_tail


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16])
def test_torch_attention_honours_every_stride_in_every_type(dtype):
    report = check_attention(gathered, cache(dtype=dtype))
    assert report.ok, report


# ── flex_attention, compiled for the CPU: it skips blocks that the mask leaves out ────


def slots(view: torch.Tensor) -> tuple[torch.Tensor, int]:
    """All token slots of the memory on one axis, and how many of them a block is apart."""
    blocks, heads, tokens, dim = view.shape
    block, head, token, _ = view.stride()
    if block % token:
        raise ValueError(f"block stride {block} is not a multiple of token stride {token}")
    apart = block // token
    count = (blocks - 1) * apart + tokens
    return view.as_strided((1, heads, count, dim), (0, head, token, 1)), apart


def paged_flex(attend):
    from torch.nn.attention.flex_attention import create_block_mask

    def attention(query, keys, values, table, lengths):
        (k, apart), (v, _) = slots(keys), slots(values)
        tokens, count = keys.shape[2], k.shape[2]
        filled = torch.zeros(len(lengths), count, dtype=torch.bool)
        for i, length in enumerate(lengths.tolist()):
            for token in range(length):
                filled[i, int(table[i, token // tokens]) * apart + token % tokens] = True
        mask = create_block_mask(
            lambda b, h, q, kv: filled[b, kv],
            len(lengths),
            None,
            1,
            count,
            device="cpu",
            BLOCK_SIZE=(tokens, tokens),
        )
        batch = (len(lengths), -1, -1, -1)
        out = attend(
            query[:, :, None], k.expand(batch), v.expand(batch), block_mask=mask, enable_gqa=True
        )
        return out[:, :, 0]

    return attention


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_flex_attention_reads_packed_rows_in_place_when_rows_are_whole_blocks_apart():
    """Its KV axis has one stride: a row must be a whole number of kernel blocks long. That is
    a demand which a plan can meet: 16 tokens of 2 × 16 floats are 2048 bytes."""
    from torch.nn.attention.flex_attention import flex_attention

    demand = Demand(multiple=2048)
    layout = cache(tokens=16, dim=16, alignment=Alignment(demands=(demand,)))
    compiled = torch.compile(flex_attention, dynamic=False)
    report = check_in_place(paged_flex(compiled), layout)
    assert report.ok, report


def test_eager_flex_attention_reads_the_whole_pool_and_is_found_out():
    from torch.nn.attention.flex_attention import flex_attention

    with pytest.warns(UserWarning, match="without torch.compile"):
        report = check_in_place(paged_flex(flex_attention), cache(tokens=16, dim=16))
    assert not report.ok


# ── kernels that are wrong, each in its own way ───────────────────────────────────────


def contiguous_blocks(view: torch.Tensor) -> torch.Tensor:
    """The view as a kernel sees it that takes pages to follow each other."""
    page = max(view.stride(1) * view.shape[1], view.stride(2) * view.shape[2])
    return view.as_strided(view.shape, (page, *view.stride()[1:]))


def dense_heads(view: torch.Tensor) -> torch.Tensor:
    """… that computes the head stride from the number of tokens."""
    block, head, token, last = view.stride()
    head = view.shape[2] * token if head > token else head
    return view.as_strided(view.shape, (block, head, token, last))


def dense_tokens(view: torch.Tensor) -> torch.Tensor:
    """… that computes the token stride from the number of heads."""
    block, head, token, last = view.stride()
    token = view.shape[1] * head if token > head else token
    return view.as_strided(view.shape, (block, head, token, last))


def from_the_start(view: torch.Tensor) -> torch.Tensor:
    """… that forgets where in the memory its layer starts."""
    return view.as_strided(view.shape, view.stride(), view.storage_offset() % view.stride(2))


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        (contiguous_blocks, "block stride"),
        (dense_heads, "head stride"),
        (dense_tokens, "token stride"),
        (from_the_start, "offset"),
    ],
)
def test_a_kernel_that_ignores_one_number_is_found_out_by_that_number(mistake, found):
    def kernel(query, keys, values, table, lengths):
        return gathered(query, mistake(keys), mistake(values), table, lengths)

    report = check_attention(kernel, cache("LBHNC"))
    assert found in report.broken
    assert "compact" not in report.broken
    assert set(report.broken) <= {found, "the layout itself"}


def test_swapped_keys_and_values_and_swapped_heads_are_found_out():
    def swapped(query, keys, values, table, lengths):
        return gathered(query, values, keys, table, lengths)

    def turned(query, keys, values, table, lengths):
        return gathered(query, keys.flip(1), values, table, lengths)

    for kernel in (swapped, turned):
        assert "compact" in check_attention(kernel, cache()).broken


def test_a_kernel_that_writes_to_the_cache_is_found_out():
    def kernel(query, keys, values, table, lengths):
        out = gathered(query, keys, values, table, lengths)
        keys[0, 0, 0, 0] = 1.0
        return out

    report = check_attention(kernel, cache())
    assert not report.ok
    assert all("wrote to the cache" in check.result for check in report.checks)


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_a_kernel_that_refuses_strided_memory_is_reported_as_refusing(kind):
    def kernel(query, keys, values, table, lengths):
        if not keys.is_contiguous():
            raise kind("cache must be contiguous")
        return gathered(query, keys, values, table, lengths)

    report = check_attention(kernel, cache())
    assert all("must be contiguous" in check.result for check in report.checks)
    assert "refused" in str(report)


def test_a_kernel_that_multiplies_unfilled_slots_by_zero_needs_them_clean():
    def kernel(query, keys, values, table, lengths):
        k, v = (x[table.long()].transpose(2, 3).flatten(1, 2) for x in (keys, values))
        there = torch.arange(k.shape[1])[None, :] < lengths[:, None]
        k, v = (
            torch.where((table != 0).repeat_interleave(keys.shape[2], 1)[..., None, None], x, 0)
            for x in (k, v)
        )
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("shd,sthd->sht", query, k) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~there[:, None], float("-inf"))
        return torch.einsum("sht,sthd->shd", scores.softmax(-1), v)

    report = check_attention(kernel, cache())
    assert report.ok, report
    assert report.needs_clean_tail
    assert "must be zeroed" in str(report)


def test_a_layout_without_keys_and_values_cannot_be_checked():
    layout = packed(grouped([recurrent("m")]), num_slabs=4)
    with pytest.raises(SpecError, match="no layer with fields"):
        check_attention(gathered, layout)
    with pytest.raises(SpecError, match="no reference for k in int8, v in int8"):
        check_attention(gathered, cache(dtype=DType.INT8))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda q, k, v, t, n: gathered(q, k, v, t, n)[:, None], r"shape \(6, 1, 4, 4\), not"),
        (lambda q, k, v, t, n: gathered(q, k, v, t, n)[:1], r"shape \(1, 4, 4\), not"),
        (lambda q, k, v, t, n: None, "returned NoneType"),
        (lambda q, k, v: gathered(q, k, v, None, None), "cannot be called with .query, keys"),
        (lambda q, k, v, t, n, scale: q, "missing a required argument: 'scale'"),
    ],
    ids=["one axis more", "one sequence", "nothing", "three arguments", "six arguments"],
)
def test_a_wrapper_of_another_shape_or_arity_is_an_error_and_no_refusal(kernel, reason):
    with pytest.raises(SpecError, match=reason):
        check_attention(kernel, cache())


@pytest.mark.parametrize("num_slabs", [2, 3, 4])
def test_a_layout_too_small_to_tell_anything_is_refused(num_slabs):
    """With one token per sequence every kernel that returns a value is right."""
    with pytest.raises(SpecError, match="nothing would be tested"):
        check_attention(lambda q, k, v, t, n: q, cache(num_slabs=num_slabs))


# ── fp8 and windows ───────────────────────────────────────────────────────────────────


def widened(query, keys, values, table, lengths):
    """fp8 elements, made wider before they are used."""
    return gathered(query, keys.to(query.dtype), values.to(query.dtype), table, lengths)


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3, DType.FLOAT8_E5M2])
def test_fp8_caches_are_compared_with_what_they_hold(dtype):
    report = check_attention(widened, cache(dtype=dtype, dim=16))
    assert report.ok, report

    def other_format(query, keys, values, table, lengths):
        views = (x.view(torch.uint8).to(query.dtype) for x in (keys, values))
        return gathered(query, *views, table, lengths)

    assert "compact" in check_attention(other_format, cache(dtype=dtype, dim=16)).broken


def seen(query, keys, values, table, lengths, window):
    """The last `window` tokens, and nothing else, looked up one by one."""
    tokens = keys.shape[2]
    rows = []
    for i, length in enumerate(lengths.tolist()):
        places = [
            (int(table[i, t // tokens]), t % tokens) for t in range(max(0, length - window), length)
        ]
        k, v = (torch.stack([x[b, :, n] for b, n in places], dim=1)[None] for x in (keys, values))
        q = query[i][None, :, None]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        rows.append(out[0, :, 0])
    return torch.stack(rows)


def windowed(window: int, order: str = "BLHNC") -> Layout:
    layers = [
        attention("l.0", heads=2, dim=4, tokens=4, retention=Window(window), dtype=DType.FLOAT32)
    ]
    return packed(grouped(layers), num_slabs=24, site=Site(order=order))


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 100])
def test_a_window_is_the_last_tokens_and_blocks_before_it_are_gone(window):
    report = check_attention(seen, windowed(window))
    assert report.ok, report
    assert not report.needs_clean_tail


@pytest.mark.parametrize("mistake", [-1, 1, 4])
def test_a_window_that_is_too_long_or_too_short_is_found_out(mistake):
    def kernel(query, keys, values, table, lengths, window):
        return seen(query, keys, values, table, lengths, window + mistake)

    assert "compact" in check_attention(kernel, windowed(5)).broken


def test_a_wrapper_that_takes_no_window_cannot_be_checked_on_windows():
    with pytest.raises(SpecError, match="unexpected keyword argument 'window'"):
        check_attention(gathered, windowed(5))


def test_there_is_no_reference_for_chunks():
    layers = [attention("l.0", retention=Chunk(8), dtype=DType.FLOAT32)]
    with pytest.raises(SpecError, match="no reference for attention that keeps Chunk"):
        check_attention(gathered, packed(grouped(layers), num_slabs=24))


# ── latents ───────────────────────────────────────────────────────────────────────────


def latents(order: str = "BLHNC", *, tokens: int = 4, dtype: DType = DType.FLOAT32) -> Layout:
    def layer(name: str) -> LayerSpec:
        return LayerSpec(
            name=name,
            retention=Full(),
            block_tokens=tokens,
            states=tokens,
            heads=Extent.whole("head", 1),
            fields=(
                Field("latent", dtype, (Extent.whole("content", 8),)),
                Field("rope", dtype, (Extent.whole("content", 4),)),
            ),
        )

    groups = grouped([layer("l.0"), layer("l.1")])
    return packed(groups, num_slabs=24, site=Site(order=order))


def absorbed(query, cached, table, lengths):
    """MLA over gathered blocks: eight of twelve are the latent."""
    rows = []
    for i, length in enumerate(lengths.tolist()):
        every = cached[table[i].long()].flatten(0, 1)[:length]
        scores = query[i] @ every.T * query.shape[-1] ** -0.5
        rows.append(scores.softmax(-1) @ every[:, :8])
    return torch.stack(rows)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_latent_attention_honours_every_order(order, tokens):
    report = check_latent_attention(absorbed, latents(order, tokens=tokens))
    assert report.ok, report


def test_latent_attention_that_ignores_the_block_stride_or_returns_the_rope_part_is_found_out():
    def dense(query, cached, table, lengths):
        page = cached.shape[1] * cached.stride(1)
        there = cached.as_strided(cached.shape, (page, *cached.stride()[1:]))
        return absorbed(query, there, table, lengths)

    assert "block stride" in check_latent_attention(dense, latents()).broken

    def all_of_it(query, cached, table, lengths):
        return absorbed(query, cached, table, lengths).repeat(1, 1, 2)

    with pytest.raises(SpecError, match=r"shape \(6, 4, 16\), not \(6, 4, 8\)"):
        check_latent_attention(all_of_it, latents())


def test_latents_and_keys_are_checked_by_functions_of_their_own():
    with pytest.raises(SpecError, match="no layer with fields 'latent' and 'rope'"):
        check_latent_attention(absorbed, cache())
    with pytest.raises(SpecError, match="no layer with fields 'k' and 'v'"):
        check_attention(gathered, latents())
    scaled = packed(
        grouped(model_layers("deepseek-v2-lite", kv_dtype="fp8_ds_mla").layers[:1]), num_slabs=24
    )
    with pytest.raises(SpecError, match="no reference for latent in float8_e4m3fn, scale in"):
        check_latent_attention(absorbed, scaled)
