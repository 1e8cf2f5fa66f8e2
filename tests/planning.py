"""Strategies for layer specs and layouts, and a brute-force picture of their bytes."""

from collections.abc import Callable, Iterator

import numpy as np
from hypothesis import strategies as st

from kvstow.errors import PlanError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout, Page
from kvstow.plan.pack import Alignment, Site, packed, separate, union
from kvstow.plan.retention import Chunk, Encoder, Full, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

SMALL = st.sampled_from([1, 2, 2, 3, 4, 5, 8])
TOKENS = st.sampled_from([1, 2, 3, 4, 6, 8])
DTYPES = st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3, DType.INT4])

RETENTIONS = st.one_of(
    st.just(Full()),
    st.builds(Window, SMALL),
    st.builds(Chunk, SMALL),
    st.builds(Encoder, SMALL),
)


def attention(
    name: str,
    *,
    heads: int = 2,
    dim: int = 2,
    tokens: int = 2,
    retention: object = None,
    dtype: DType = DType.BFLOAT16,
    align: int = 1,
    value_section: int = 0,
) -> LayerSpec:
    """An ordinary layer: k and v in one cell, or each in a section of the page."""
    content = (Extent.whole("content", dim),)
    return LayerSpec(
        name=name,
        retention=retention or Full(),
        block_tokens=tokens,
        states=tokens,
        heads=Extent.whole("head", heads),
        fields=(Field("k", dtype, content), Field("v", dtype, content, value_section)),
        align=align,
    )


def recurrent(name: str, *, channels: int = 3, taps: int = 2, heads: int = 2) -> LayerSpec:
    """A recurrent layer: a convolution's tail in bf16, a state in f32."""
    conv = (Extent.whole("channel", channels), Extent.whole("tap", taps))
    ssm = (Extent.whole("head", heads), Extent.whole("state", 2))
    return LayerSpec(
        name=name,
        retention=State(),
        block_tokens=8,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(Field("conv", DType.BFLOAT16, conv), Field("ssm", DType.FLOAT32, ssm)),
    )


TIGHT = Alignment(page=1, row=1, base=64)


def laid_out(*layers: LayerSpec, num_slabs: int = 12, **site: object) -> Layout:
    """Layers packed without padding, unless `site` says otherwise."""
    where = Site(**{"model": "m", "alignment": TIGHT} | site)
    return packed(grouped(layers), num_slabs=num_slabs, site=where)


@st.composite
def layer_lists(draw: st.DrawFn, *, least_groups: int = 2) -> list[LayerSpec]:
    """Layers of at least two groups, pages of mixed sizes, dimensions often 1, 2 or equal."""
    kinds = draw(
        st.lists(st.tuples(RETENTIONS, TOKENS), min_size=least_groups, max_size=3, unique=True)
    )
    layers: list[LayerSpec] = []
    for retention, tokens in kinds:
        for _ in range(draw(st.integers(1, 3))):
            same = draw(st.booleans())
            heads = tokens if same else draw(SMALL)
            dim = 2 * (heads if same else draw(SMALL))
            layers.append(
                attention(
                    f"layers.{len(layers)}",
                    heads=heads,
                    dim=dim,
                    tokens=tokens,
                    retention=retention,
                    dtype=draw(DTYPES),
                    align=draw(st.sampled_from([1, 1, 4, 12])),
                    value_section=draw(st.sampled_from([0, 0, 1])),
                )
            )
    if draw(st.booleans()):
        layers.append(
            recurrent(
                f"layers.{len(layers)}.mamba",
                channels=draw(SMALL),
                taps=draw(SMALL),
                heads=draw(SMALL),
            )
        )
    return layers


PACKINGS: tuple[Callable[..., Layout], ...] = (packed, union, separate)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any packing in any order, of a handful of slabs."""
    site = Site(
        order=draw(st.sampled_from(ORDERS)),
        alignment=Alignment(
            page=draw(st.sampled_from([1, 4, 16])),
            row=draw(st.sampled_from([1, 8, 64])),
            base=draw(st.sampled_from([1, 64])),
        ),
    )
    pack = draw(st.sampled_from(PACKINGS))
    groups = grouped(draw(layer_lists()))
    budget = draw(st.integers(4, 12)) * max(group.page_bytes for group in groups) + 256
    while True:
        try:
            return pack(groups, budget=budget, site=site)
        except PlanError:
            budget *= 2


def section_numbers(page: Page, section: int) -> tuple[int, int, int]:
    """Offset in block 0, head stride and token stride of a section, as they are written down."""
    each = page[section]
    return each.offset, each.head_stride, each.token_stride


def element_bytes(layout: Layout, layer: str, field: str, block: int) -> Iterator[int]:
    """Every byte of a field in one block, by the address law written out in loops."""
    group, spec, place = layout.layers[layer]
    assert block < layout.num_blocks(group)
    start = spec.field_offsets[field]
    offset, head_stride, token_stride = section_numbers(place, spec.field(field).section)
    for h in range(spec.heads.size):
        for n in range(spec.states):
            cell = offset + block * place[0].block_stride + h * head_stride + n * token_stride
            yield from range(cell + start, cell + start + spec.field(field).nbytes)


def block_bytes(layout: Layout, group: int, block: int) -> np.ndarray:
    """Every byte of every field of a block, in no particular order; repeats are kept."""
    found: list[np.ndarray] = []
    rows = layout.groups[group]
    for spec, place in zip(rows.group.layers, rows.placements, strict=True):
        for field in spec.fields:
            offset, head_stride, token_stride = section_numbers(place, field.section)
            heads = np.arange(spec.heads.size) * head_stride
            states = np.arange(spec.states) * token_stride
            cells = offset + block * place[0].block_stride + (heads[:, None] + states).ravel()
            within = spec.field_offsets[field.name] + np.arange(field.nbytes)
            found.append((cells[:, None] + within).ravel())
    return np.concatenate(found)
