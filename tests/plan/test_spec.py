import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import SpecError
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec


def field(name: str, dtype: DType, *sizes: int) -> Field:
    return Field(name, dtype, tuple(Extent.whole(f"axis{i}", n) for i, n in enumerate(sizes)))


def layer(**changes: object) -> LayerSpec:
    facts: dict[str, object] = {
        "name": "layer",
        "retention": Full(),
        "block_tokens": 16,
        "states": 16,
        "heads": Extent.whole("head", 2),
        "fields": (field("k", DType.BFLOAT16, 4), field("v", DType.BFLOAT16, 4)),
    }
    return LayerSpec(**(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "bits", "unit", "per_unit"),
    [
        (DType.FLOAT64, 64, 8, 1),
        (DType.FLOAT32, 32, 4, 1),
        (DType.BFLOAT16, 16, 2, 1),
        (DType.FLOAT8_E5M2, 8, 1, 1),
        (DType.FLOAT4_E2M1, 4, 1, 2),
        (DType.INT4, 4, 1, 2),
    ],
)
def test_an_element_type_knows_its_bits_and_its_addressable_unit(
    dtype: DType, bits: int, unit: int, per_unit: int
) -> None:
    assert (dtype.bits, dtype.unit, dtype.per_unit) == (bits, unit, per_unit)


@pytest.mark.parametrize(
    "pieces",
    [(), ((0, 0),), ((-1, 2),), ((0, 9),), ((3, 2),), ((0, 4), (3, 6)), ((0, 2), (0, 2))],
)
def test_an_extent_of_pieces_that_are_empty_outside_or_overlapping_cannot_be_built(
    pieces: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(SpecError, match="disjoint"):
        Extent("head", 8, pieces)


def test_a_four_bit_field_of_an_odd_length_does_not_fill_whole_bytes() -> None:
    with pytest.raises(SpecError, match="3 elements of int4"):
        field("k", DType.INT4, 3)


def test_a_field_without_axes_cannot_be_built() -> None:
    with pytest.raises(SpecError, match="no axes"):
        Field("k", DType.INT8, ())


@given(st.sampled_from(DType), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_a_fields_bytes_are_its_elements_times_their_bits(dtype: DType, sizes: list[int]) -> None:
    sizes[-1] *= 2
    elements = 1
    for size in sizes:
        elements *= size
    assert field("x", dtype, *sizes).nbytes * 8 == elements * dtype.bits


def test_fields_start_at_their_natural_alignment_and_cells_end_at_the_largest() -> None:
    fields = (field("a", DType.INT8, 3), field("b", DType.FLOAT32, 1), field("c", DType.INT8, 1))
    spec = layer(fields=fields)
    assert spec.field_offsets == {"a": 0, "b": 4, "c": 8}
    assert spec.cell_bytes == 12


def test_an_aligned_page_is_padded_and_says_what_it_held_before() -> None:
    spec = layer(align=576)
    assert spec.payload_bytes == 512
    assert spec.page_bytes == 576


@pytest.mark.parametrize("key", ["block_tokens", "states", "align"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "4", None])
def test_a_layer_whose_counts_are_not_whole_and_positive_cannot_be_built(
    key: str, value: object
) -> None:
    with pytest.raises(SpecError, match=f"{key} is {value!r}"):
        layer(**{key: value})


def test_states_divide_the_tokens_of_a_block() -> None:
    with pytest.raises(SpecError, match="16 tokens per block do not make 3"):
        layer(states=3)


def test_a_summary_is_one_state_of_any_number_of_tokens() -> None:
    assert layer(retention=State(), states=1, block_tokens=511).tokens_per_state == 1
    with pytest.raises(SpecError, match="one state, not 2"):
        layer(retention=State(), states=2)


def test_two_fields_of_one_name_cannot_share_a_cell() -> None:
    with pytest.raises(SpecError, match="unique"):
        layer(fields=(field("k", DType.INT8, 1), field("k", DType.INT8, 1)))


def test_a_missing_field_is_reported_with_those_there_are() -> None:
    assert layer().field("v").name == "v"
    with pytest.raises(SpecError, match=r"no field 'q'; it has \['k', 'v'\]"):
        layer().field("q")


@pytest.mark.parametrize("retention", ["full", None, 4096, Window])
def test_what_is_no_retention_is_refused_with_a_hint(retention: object) -> None:
    with pytest.raises(SpecError, match=r"layer 'layer': retention is .*\n\nhint: .*Full\(\)"):
        layer(retention=retention)


@pytest.mark.parametrize("heads", [2, None, "2", (0, 2)])
def test_heads_are_an_extent_and_a_number_is_refused_with_a_hint(heads: object) -> None:
    with pytest.raises(SpecError, match=r"heads is .*, not an Extent\n\nhint: Extent\.whole"):
        layer(heads=heads)


def test_fields_are_a_tuple_of_fields_of_known_types() -> None:
    with pytest.raises(SpecError, match=r"not a tuple of Fields\n\nhint: "):
        layer(fields=[field("k", DType.INT8, 1)])
    with pytest.raises(SpecError, match=r"dtype is 'bf16', not a DType\n\nhint: "):
        Field("k", "bf16", (Extent.whole("content", 4),))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1 << 41, 10**18, 10**27])
def test_counts_that_no_model_has_are_refused(count: int) -> None:
    with pytest.raises(SpecError, match=f"block_tokens is {count}, .* to 1099511627776"):
        layer(block_tokens=count, states=count)
    with pytest.raises(SpecError, match=f"size is {count}"):
        Extent.whole("head", count)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((dtype.value, dtype) for dtype in DType),
        *((dtype, dtype) for dtype in DType),
        ("bf16", DType.BFLOAT16),
        ("BF16", DType.BFLOAT16),
        ("torch.bfloat16", DType.BFLOAT16),
        ("fp16", DType.FLOAT16),
        ("half", DType.FLOAT16),
        ("fp8", DType.FLOAT8_E4M3),
        ("fp8_e4m3", DType.FLOAT8_E4M3),
        ("e5m2", DType.FLOAT8_E5M2),
        ("float", DType.FLOAT32),
    ],
)
def test_element_types_are_read_in_the_spelling_people_use(text: str, dtype: DType) -> None:
    assert DType.parse(text) is dtype


@pytest.mark.parametrize("text", ["", "fp9", "nvfp4", 16, None, "torch."])
def test_an_unknown_element_type_is_refused_with_those_there_are(text: object) -> None:
    with pytest.raises(SpecError, match=r"is not an element type\n\nhint: one of .*bfloat16"):
        DType.parse(text)


def test_an_attention_layer_is_the_one_written_out() -> None:
    made = LayerSpec.attention("layer", heads=2, head_dim=8, dtype="half")
    written = LayerSpec(
        name="layer",
        retention=Full(),
        block_tokens=16,
        states=16,
        heads=Extent("head", 2, ((0, 2),)),
        fields=(
            Field("k", DType.FLOAT16, (Extent("content", 8, ((0, 8),)),)),
            Field("v", DType.FLOAT16, (Extent("content", 8, ((0, 8),)),)),
        ),
    )
    assert made == written
    assert made.page_bytes == 16 * 2 * (8 + 8) * 2


def test_an_attention_layer_has_wider_values_other_retentions_and_a_ranks_heads() -> None:
    heads = Extent("head", 8, ((4, 8),))
    made = LayerSpec.attention(
        "a", heads=heads, head_dim=3, v_head_dim=5, dtype="fp8", retention=Window(7), block_tokens=1
    )
    assert made.page_bytes == 4 * (3 + 5)
    assert (made.heads, made.retention) == (heads, Window(7))


# ── sections ────────────────────────────────────────────────────────────────────────────────


def sectioned(**changes: object) -> LayerSpec:
    """Data of 12 bytes in section 0, a float32 scale in section 1."""
    axes = (Extent.whole("content", 6),), (Extent.whole("content", 1),)
    fields = (
        Field("data", DType.BFLOAT16, axes[0]),
        Field("flag", DType.UINT8, axes[1], 1),
        Field("scale", DType.FLOAT32, axes[1], 1),
    )
    return layer(fields=fields, **changes)


def test_sections_follow_each_other_in_a_page() -> None:
    spec = sectioned(states=2, block_tokens=2, heads=Extent.whole("head", 3))
    assert [part.cell_bytes for part in spec.sections] == [12, 8]
    assert spec.section_offsets == (0, 3 * 2 * 12)
    assert spec.field_offsets == {"data": 0, "flag": 0, "scale": 4}
    assert spec.cell_bytes == 20
    assert spec.payload_bytes == 3 * 2 * 20
    assert sectioned(states=2, block_tokens=2, align=64).page_bytes == 128


def test_a_section_starts_at_a_multiple_of_its_largest_element() -> None:
    fields = (field("data", DType.UINT8, 3), Field("scale", DType.FLOAT32, ONE, 1))
    spec = layer(fields=fields, states=1, block_tokens=1, heads=Extent.whole("head", 1))
    assert spec.section_offsets == (0, 4)
    assert spec.payload_bytes == 8


ONE = (Extent.whole("content", 1),)


@pytest.mark.parametrize("numbers", [(1,), (0, 2), (1, 0), (0, 1, 0)])
def test_sections_are_numbered_from_0_in_the_order_of_the_fields(numbers: tuple[int, ...]) -> None:
    fields = tuple(Field(f"f{i}", DType.UINT8, ONE, n) for i, n in enumerate(numbers))
    with pytest.raises(SpecError, match="numbered from 0 and follow each other"):
        layer(fields=fields)
