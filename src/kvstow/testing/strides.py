"""What kernels are tried on, one layer of each shape in placements that differ in one stride; and
what is reported of them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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

SEED = 0
"""Of the contents, lengths and blocks that a kernel is tried on."""

KERNEL_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError)
"""By these a kernel refuses a layout."""


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """What happened with one placement of one layer's pages."""

    layer: str
    name: str
    result: str
    """The error that was measured, or the kernel's own words where it refused."""
    is_right: bool = False
    is_refused: bool = False

    def __str__(self) -> str:
        verdict = "honoured" if self.is_right else "refused" if self.is_refused else "NOT HONOURED"
        return f"{self.layer}  {self.name:<20} {verdict:<12} {self.result}"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What a kernel honours.

    `needs_clean_tail`, of kernels that read: the kernel multiplies unfilled slots of a sequence's
    last block by zero, so not-a-number there reaches its result. Rows that pass between groups
    must be zeroed for such a kernel.
    """

    checks: tuple[KernelCheck, ...]
    needs_clean_tail: bool | None = None

    @property
    def ok(self) -> bool:
        return all(check.is_right for check in self.checks)

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the placements that failed, each once."""
        return tuple(dict.fromkeys(check.name for check in self.checks if not check.is_right))

    def __str__(self) -> str:
        lines = [str(check) for check in self.checks]
        if self.needs_clean_tail is not None:
            tail = "must be zeroed" if self.needs_clean_tail else "are safe"
            lines.append(f"unfilled slots {tail}")
        return "\n".join(lines)


def shapes(layout: Layout, fields: Sequence[str]) -> list[str]:
    """One layer of each shape and window that has these fields."""
    layers: dict[tuple[object, ...], str] = {}
    for name, (_, spec, _) in layout.layers.items():
        if set(fields) <= {field.name for field in spec.fields}:
            layers.setdefault((spec.heads, spec.states, spec.fields, window_of(spec)), name)
    if not layers:
        names = " and ".join(map(repr, fields))
        raise SpecError(f"layout {layout.model!r} has no layer with fields {names}")
    for name in layers.values():
        element_of(layout.layers[name][1], fields)
    return list(layers.values())


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
        call = ", ".join((*arguments, *(f"{name}=…" for name in named)))
        raise SpecError(
            f"the kernel cannot be called with ({call}): {error}"
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
    placements: dict[str, tuple[Order, Placement]] = {
        "compact": ("LBHNC", plain),
        "offset": ("LBHNC", replace(plain, offset=gap)),
        "block stride": ("LBHNC", replace(plain, block_stride=plain.block_stride + gap)),
        "head stride": ("LBHNC", Placement(0, heads * piece, piece, cell)),
        "token stride": ("LBNHC", Placement(0, states * line, cell, line)),
    }
    return [(name, _single(spec, *placed)) for name, placed in placements.items()]


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
