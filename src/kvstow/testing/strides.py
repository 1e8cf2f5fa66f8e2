"""What kernels are tried on: one layer of each shape, and placements that differ in one stride."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstow.errors import SpecError
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, Order, PlacedGroup, Placement
from kvstow.plan.retention import Encoder, Full, Window
from kvstow.plan.spec import DType, LayerSpec
from kvstow.plan.view import align_up

TOLERANCE = {
    DType.FLOAT64: 1e-6,
    DType.FLOAT32: 1e-3,
    DType.FLOAT16: 4e-3,
    DType.BFLOAT16: 2e-2,
    DType.FLOAT8_E4M3: 2e-2,
    DType.FLOAT8_E5M2: 2e-2,
}
"""Largest ‖result − reference‖ / ‖reference‖ by element type. Queries of fp8 are bfloat16."""


def shapes(layout: Layout, fields: Sequence[str]) -> list[str]:
    """One layer of each shape and window that has these fields."""
    found: dict[tuple[object, ...], str] = {}
    for name, (_, spec, _) in layout.layers.items():
        if set(fields) <= {field.name for field in spec.fields}:
            found.setdefault((spec.heads, spec.states, spec.fields, window_of(spec)), name)
    if not found:
        wanted = " and ".join(map(repr, fields))
        raise SpecError(f"layout {layout.model!r} has no layer with fields {wanted}")
    for name in found.values():
        element_of(layout.layers[name][1], fields)
    return list(found.values())


def element_of(spec: LayerSpec, fields: Sequence[str]) -> DType:
    """The one element type of all fields of a layer that has these fields and no others."""
    dtypes = {field.dtype for field in spec.fields}
    names = [field.name for field in spec.fields]
    if names != list(fields) or len(dtypes) > 1 or not dtypes <= TOLERANCE.keys():
        kept = ", ".join(f"{field.name} in {field.dtype}" for field in spec.fields)
        raise SpecError(f"layer {spec.name!r}: no reference for {kept}")
    return dtypes.pop()


def window_of(spec: LayerSpec) -> int | None:
    """How many tokens a layer sees, where it does not see all."""
    match spec.retention:
        case Full() | Encoder():
            return None
        case Window(tokens):
            return tokens
        case other:
            raise SpecError(
                f"layer {spec.name!r}: no reference for attention that keeps {other}"
                "\n\nhint: check a layout of its layers with Full() retention"
            )


def check_callable(
    kernel: Callable[..., object], arguments: Sequence[str], **named: object
) -> None:
    """SpecError for a kernel that does not take these arguments."""
    try:
        inspect.signature(kernel).bind(*arguments, **named)
    except TypeError as error:
        told = ", ".join((*arguments, *(f"{name}=…" for name in named)))
        raise SpecError(
            f"the kernel cannot be called with ({told}): {error}"
            "\n\nhint: wrap it in a function of these arguments"
        ) from error
    except ValueError:  # a builtin that does not tell its arguments
        return


def stride_variants(spec: LayerSpec) -> list[tuple[str, Layout]]:
    """One layer's pages, compact and with one number of the address law changed at a time."""
    cell, heads, states = spec.cell_bytes, spec.heads.size, spec.states
    gap = align_up(3 * cell, 16 * spec.unit)
    plain = Placement(0, heads * states * cell, states * cell, cell)
    piece, line = states * cell + gap, heads * cell + gap
    return [
        ("compact", _single(spec, "LBHNC", plain)),
        ("offset", _single(spec, "LBHNC", replace(plain, offset=gap))),
        (
            "block stride",
            _single(spec, "LBHNC", replace(plain, block_stride=plain.block_stride + gap)),
        ),
        ("head stride", _single(spec, "LBHNC", Placement(0, heads * piece, piece, cell))),
        ("token stride", _single(spec, "LBNHC", Placement(0, states * line, cell, line))),
    ]


def _single(spec: LayerSpec, order: Order, place: Placement) -> Layout:
    num_blocks = 24
    rows = PlacedGroup(
        group=Group(name="check", layers=(replace(spec, align=1),)),
        rows_per_slab=1,
        placements=((place,),),
    )
    return Layout(
        model="check",
        order=order,
        groups=(rows,),
        num_slabs=num_blocks,
        nbytes=place.offset + num_blocks * place.block_stride,
        base_align=256,
    )
