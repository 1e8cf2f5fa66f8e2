"""Layouts for hypothesis: any kind of layer, order and packing; sizes 1, 2 and equal ones often.

The only module that imports hypothesis, which is a development dependency.
"""

from hypothesis import strategies as st

from kvstow.errors import PlanError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Alignment, Site, packed, separate, union
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

SIZES = st.sampled_from([1, 2, 2, 3, 4, 5, 8])
DTYPES = st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3, DType.INT4])


def retentions() -> st.SearchStrategy[Retention]:
    """Every kind but summaries, which have pages of their own."""
    return st.one_of(
        st.just(Full()),
        st.builds(Window, SIZES),
        st.builds(Chunk, SIZES),
        st.builds(Encoder, SIZES),
    )


@st.composite
def attention_layers(
    draw: st.DrawFn, name: str, retention: Retention, block_tokens: int
) -> LayerSpec:
    """Keys and values in one cell, sometimes with scales beside them."""
    heads = draw(st.one_of(SIZES, st.just(block_tokens)))
    content = (Extent.whole("content", 2 * draw(SIZES)),)
    dtype = draw(DTYPES)
    fields = [Field("k", dtype, content), Field("v", dtype, content)]
    if draw(st.booleans()):
        scale = (Extent.whole("scale", 1),)
        fields += [Field("k_scale", DType.FLOAT32, scale), Field("v_scale", DType.FLOAT32, scale)]
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=block_tokens,
        heads=Extent.whole("head", heads),
        fields=tuple(fields),
        align=draw(st.sampled_from([1, 1, 4, 12])),
    )


@st.composite
def recurrent_layers(draw: st.DrawFn, name: str) -> LayerSpec:
    """A convolution's tail in bf16 and a state in f32, each with its own axes."""
    conv = (Extent.whole("channel", draw(SIZES)), Extent.whole("tap", draw(SIZES)))
    ssm = (Extent.whole("row", draw(SIZES)), Extent.whole("column", draw(SIZES)))
    return LayerSpec(
        name=name,
        retention=State(),
        block_tokens=8,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(Field("conv", DType.BFLOAT16, conv), Field("ssm", DType.FLOAT32, ssm)),
    )


@st.composite
def models(draw: st.DrawFn) -> list[LayerSpec]:
    """One to three groups of one to three layers, sometimes a recurrent layer as well."""
    kinds = draw(st.lists(st.tuples(retentions(), SIZES), min_size=1, max_size=3, unique=True))
    layers: list[LayerSpec] = []
    for retention, block_tokens in kinds:
        for _ in range(draw(st.integers(1, 3))):
            layers.append(draw(attention_layers(f"layers.{len(layers)}", retention, block_tokens)))
    if draw(st.booleans()):
        layers.append(draw(recurrent_layers(f"layers.{len(layers)}")))
    return layers


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any packing of such a model in any order, with a handful of slabs."""
    alignment = Alignment(
        page=draw(st.sampled_from([1, 4, 16])),
        row=draw(st.sampled_from([1, 8, 64])),
        base=draw(st.sampled_from([1, 64])),
    )
    site = Site(order=draw(st.sampled_from(ORDERS)), alignment=alignment)
    pack = draw(st.sampled_from((packed, union, separate)))
    groups = grouped(draw(models()))
    budget = draw(st.integers(4, 12)) * max(group.page_bytes for group in groups) + 256
    while True:
        try:
            return pack(groups, budget=budget, site=site)
        except PlanError:
            budget *= 2
