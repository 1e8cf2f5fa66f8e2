"""Attention that reads rows in place, in Triton's interpreter where there is no device."""

import pytest
import torch

from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.spec import DType
from kvstow.testing.attention import check_in_place, reference
from planning import attention


def cache(
    order: str = "BLHNC",
    *,
    heads: int = 2,
    dim: int = 4,
    tokens: int = 4,
    dtype: DType = DType.FLOAT32,
    num_slabs: int = 24,
) -> Layout:
    layers = [
        attention(f"l.{i}", heads=heads, dim=dim, tokens=tokens, dtype=dtype) for i in range(2)
    ]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(order=order))


def expected(query, keys, values, table, lengths):
    """Attention in float64 over contents that are gathered block by block."""
    contents = [x[table.long()].transpose(2, 3).flatten(1, 2) for x in (keys, values)]
    return reference(query, *contents, lengths.tolist()).to(query.dtype)


def paged(query, keys, values, table, lengths, splits=2):
    """Our kernel, one sequence after the other: those of one call are equally long."""
    from kvstow.memory.kernels.attention import paged_attention

    rows = [
        paged_attention(
            query[i : i + 1, :, None],
            keys,
            values,
            table[i : i + 1],
            num_tokens=length,
            splits=splits,
        )[0, 0]
        for i, length in enumerate(lengths.tolist())
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("order", ORDERS)
def test_the_paged_attention_kernel_reads_rows_of_every_order_in_place(order):
    report = check_in_place(paged, cache(order, heads=2, tokens=2, dim=2))
    assert report.ok, report
    assert not report.needs_clean_tail


@pytest.mark.parametrize("tokens", [16, 24, 32])
@pytest.mark.parametrize(("order", "splits"), [("BLHNC", 1), ("BHLNC", 1), ("BHLNC", 4)])
def test_the_paged_attention_kernel_sees_each_token_once_whatever_its_steps(tokens, order, splits):
    """Steps inside one block and across blocks, parts without a token."""
    arena = Arena(cache(order, heads=8, tokens=tokens, dim=16, num_slabs=48))
    keys, values = arena.field("l.0", "k"), arena.field("l.0", "v")
    for view in (keys, values):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(len(view))))
    per_sequence = -(-320 // tokens)
    table = torch.randperm(len(keys) - 1)[: 2 * per_sequence].reshape(2, -1).int() + 1
    lengths = torch.tensor([313, 17], dtype=torch.int32)
    query = torch.randn(2, 16, 16)
    found = paged(query, keys, values, table, lengths, splits)
    torch.testing.assert_close(found, expected(query, keys, values, table, lengths))


def test_the_paged_attention_kernel_reaches_heads_whose_distance_does_not_fit_31_bits(tmp_path):
    """The last head lies 2^31 elements behind the first, in a file that is nearly all holes."""
    dim, tokens, num_blocks, heads, apart = 16, 16, 4, 3, 1 << 30
    pages = num_blocks * tokens * 2 * dim
    memory = torch.from_file(
        str(tmp_path / "arena"), shared=True, size=2 * apart + pages + dim, dtype=torch.float16
    )
    shape, strides = (num_blocks, heads, tokens, dim), (tokens * 2 * dim, apart, 2 * dim, 1)
    keys, values = (torch.as_strided(memory, shape, strides, at) for at in (0, dim))
    query = torch.as_strided(memory, (1, heads, dim), (apart, apart, 1), pages)
    for view in (keys, values, query):
        view.copy_(torch.randn(view.shape))
    table, lengths = torch.tensor([[3, 1, 2]], dtype=torch.int32), torch.tensor([37])
    found = paged(query, keys, values, table, lengths, splits=None)
    wanted = expected(query, keys, values, table, lengths)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
