"""The kit tells kernels that write where pages are from kernels that write elsewhere."""

import pytest
import torch

from kvstow.errors import SpecError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed
from kvstow.plan.spec import DType
from kvstow.testing.cache_writes import check_cache_write
from planning import attention, recurrent


def cache(
    order: str = "BLHNC",
    *,
    heads: int = 2,
    tokens: int = 4,
    dtype: DType = DType.BFLOAT16,
    num_slabs: int = 9,
) -> Layout:
    layers = [attention(f"l.{i}", heads=heads, dim=4, tokens=tokens, dtype=dtype) for i in range(2)]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(order=order))


def write(keys, values, key_cache, value_cache, slots):
    tokens = key_cache.shape[2]
    for content, view in ((keys, key_cache), (values, value_cache)):
        view[slots // tokens, :, slots % tokens] = content.to(view.dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (2, 4), (4, 2)])
def test_a_kernel_that_honours_strides_passes_in_every_order(order, sizes):
    report = check_cache_write(write, cache(order, heads=sizes[0], tokens=sizes[1]))
    assert report.ok, report
    assert len(report.checks) == 6


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.FLOAT32])
def test_every_element_type_is_compared_byte_by_byte(dtype):
    assert check_cache_write(write, cache(dtype=dtype)).ok


def latent_write(latents, ropes, cached, slots):
    tokens = cached.shape[1]
    cached[slots // tokens, slots % tokens] = torch.cat([latents, ropes], dim=-1)


def test_latents_are_written_into_one_cache():
    layers = model_layers("deepseek-v2-lite", block_tokens=4).layers[:2]
    layout = packed(grouped(layers), num_slabs=5)
    assert check_cache_write(latent_write, layout).ok

    def turned(latents, ropes, cached, slots):
        latent_write(latents.flip(-1), ropes, cached, slots)

    assert not check_cache_write(turned, layout).ok


def dense_blocks(view):
    page = max(view.stride(1) * view.shape[1], view.stride(2) * view.shape[2])
    return view.as_strided(view.shape, (page, *view.stride()[1:]))


def test_a_kernel_that_ignores_the_block_stride_is_found_out_by_it():
    def kernel(keys, values, key_cache, value_cache, slots):
        write(keys, values, dense_blocks(key_cache), dense_blocks(value_cache), slots)

    report = check_cache_write(kernel, cache("LBHNC"))
    assert "block stride" in report.broken
    assert "compact" not in report.broken
    assert "NOT HONOURED" in str(report)


def test_a_byte_too_much_is_found_out():
    def kernel(keys, values, key_cache, value_cache, slots):
        write(keys, values, key_cache, value_cache, slots)
        key_cache[0, 0, 0, 0] = 1.0

    report = check_cache_write(kernel, cache())
    assert all(check.result == "0 slots wrong, 2 bytes elsewhere" for check in report.checks)


def test_a_token_that_is_left_out_is_found_out():
    def kernel(keys, values, key_cache, value_cache, slots):
        write(keys[1:], values[1:], key_cache, value_cache, slots[1:])

    report = check_cache_write(kernel, cache())
    assert all(check.result == "1 slots wrong, 0 bytes elsewhere" for check in report.checks)


def test_a_kernel_that_refuses_strides_is_reported_as_refusing():
    def kernel(keys, values, key_cache, value_cache, slots):
        raise ValueError("cache must be contiguous")

    report = check_cache_write(kernel, cache())
    assert all("must be contiguous" in check.result for check in report.checks)


def test_what_cannot_be_tested_is_an_error():
    with pytest.raises(SpecError, match=r"cannot be called with .keys, values, key_cache"):
        check_cache_write(lambda keys, cached: None, cache())
    with pytest.raises(SpecError, match="a layout of 2 blocks has less than two"):
        check_cache_write(write, cache(num_slabs=2))
    with pytest.raises(SpecError, match="no layer of keys and values, or of latents"):
        check_cache_write(write, packed(grouped([recurrent("m")]), num_slabs=4))
