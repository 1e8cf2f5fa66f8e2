"""Two layouts compared: every difference, with both values."""

from dataclasses import replace

import pytest

from kvstow.errors import RouteError
from kvstow.plan.retention import Window
from kvstow.plan.spec import DType, Extent, Field
from kvstow.route.route import plan_route
from planning import attention, laid_out

TWO = (attention("layers.0"), attention("layers.1"))  # 2 heads × 2 tokens × 8 bytes a page


def differences(here, there) -> tuple[str, ...]:
    with pytest.raises(RouteError) as caught:
        plan_route(here, there)
    return caught.value.differences


def test_every_difference_is_listed_with_both_values():
    here = laid_out(attention("layers.0"), attention("layers.1"))
    there = laid_out(
        attention("layers.0", dtype=DType.FLOAT8_E4M3),
        attention("layers.1", heads=4, dim=6, retention=Window(2)),
    )
    found = "\n".join(differences(here, there))
    for text in (
        "'k': dtype is bfloat16 in the source, float8_e4m3fn in the destination",
        "'v': dtype is bfloat16",
        "heads: size is 2 in the source, 4 in the destination",
        "axis 'content': size is 2 in the source, 6 in the destination",
        "retention is Full() in the source, Window(tokens=2)",
    ):
        assert text in found


def test_fields_that_only_one_side_has_are_refused():
    spec = attention("layers.0")
    scale = Field("k_scale", DType.FLOAT32, (Extent.whole("content", 1),))
    scaled = replace(spec, fields=(*spec.fields, scale))
    assert differences(laid_out(spec), laid_out(scaled)) == (
        "layer 'layers.0': field 'k_scale' is none in the source, float32 [1] in the destination",
    )
    assert "none in the destination" in differences(laid_out(scaled), laid_out(spec))[0]


def test_another_model_is_refused():
    layout = laid_out(*TWO)
    found = differences(layout, replace(layout, model="n"))
    assert found == ("model is 'm' in the source, 'n' in the destination",)


def test_layers_that_are_missing_without_a_pipeline_are_refused():
    found = differences(laid_out(TWO[0]), laid_out(TWO[1]))
    assert found == (
        "layer 'layers.1': missing in the source, held by the destination",
        "layer 'layers.0': held by the source, missing in the destination",
    )


def test_different_tokens_per_state_are_refused():
    spec = attention("layers.0", tokens=4)
    found = differences(laid_out(spec), laid_out(replace(spec, states=2)))
    assert "tokens per state is 1 in the source, 2 in the destination" in found[0]


def test_four_bit_elements_split_inside_a_byte_are_refused():
    def part(*pieces):
        field = Field("k", DType.INT4, (Extent("content", 8, pieces),))
        return replace(attention("layers.0"), fields=(field,))

    found = differences(laid_out(part((0, 4))), laid_out(part((1, 5))))
    assert "split inside a byte" in found[0]
