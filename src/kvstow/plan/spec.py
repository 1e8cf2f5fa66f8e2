"""What a model keeps: fields in cells, cells in sections, sections in pages, and for how long.

    page of one layer in one block       heads × states cells, in the order's H/N order
    ┌────────┬────────┬────────┬──
    │ cell   │ cell   │ cell   │ …       cell = one head's bytes of one state
    └────────┴────────┴────────┴──
     ╎      ╎
    ┌─────┬─────┬───┬───┐
    │  k  │  v  │ks │vs │               fields, each C-contiguous over its own axes
    └─────┴─────┴───┴───┘

Most pages are one section: a run of such cells. Kernels that keep scales behind all data of a
page have several, each with cells of its own:

    ┌────────┬────────┬──   ──┬───┬───┬──
    │ data 0 │ data 1 │ …     │s 0│s 1│ …     section 0: heads × states cells of data, then
    └────────┴────────┴──   ──┴───┴───┴──     section 1: heads × states cells of scales

A *state* is what one token leaves behind, or several tokens together (compressed
caches), or a whole sequence (recurrent layers: one head, one state, and the fields
carry their own axes).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from math import prod

from kvstow.errors import SpecError
from kvstow.plan.retention import Full, Kind, Retention, State
from kvstow.plan.view import align_up, check_count


class DType(StrEnum):
    """Element types; the value is the name torch uses, or ours where torch has none."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT4_E2M1 = "float4_e2m1"
    INT32 = "int32"
    INT8 = "int8"
    UINT8 = "uint8"
    INT4 = "int4"

    @staticmethod
    def parse(value: "str | DType | object") -> "DType":
        """The element type that `"bf16"`, `"half"`, `"fp8_e5m2"` or `torch.float16` is.

        Letters may be large or small; `fp8` is `float8_e4m3fn`, as in vLLM.
        """
        text = str(value)
        if isinstance(value, str) or text.startswith("torch."):
            name = text.lower().removeprefix("torch.")
            if name in _SPELLINGS:
                return _SPELLINGS[name]
        raise SpecError(
            f"{text[:80]!r} is not an element type\n\nhint: one of {', '.join(_SPELLINGS)}"
        )

    @property
    def bits(self) -> int:
        """As the name says: the first number in it."""
        return _BITS[self]

    @property
    def unit(self) -> int:
        """Bytes of the smallest addressable piece: 1 for 4-bit types, two elements each."""
        return max(1, self.bits // 8)

    @property
    def per_unit(self) -> int:
        """Elements in one addressable piece."""
        return self.unit * 8 // self.bits


_BITS = {dtype: int(re.findall(r"\d+", dtype)[0]) for dtype in DType}

_SPELLINGS = {
    name: dtype
    for dtype, others in {
        DType.FLOAT64: "double fp64",
        DType.FLOAT32: "float fp32",
        DType.FLOAT16: "half fp16",
        DType.BFLOAT16: "bf16",
        DType.FLOAT8_E4M3: "fp8 e4m3 fp8_e4m3 float8_e4m3",
        DType.FLOAT8_E5M2: "e5m2 fp8_e5m2",
        DType.FLOAT4_E2M1: "fp4 e2m1 fp4_e2m1",
        DType.INT32: "",
        DType.INT8: "",
        DType.UINT8: "",
        DType.INT4: "",
    }.items()
    for name in (dtype.value, *others.split())
}


@dataclass(frozen=True)
class Extent:
    """The part of one of the whole model's axes that a rank holds.

    `pieces` are half-open intervals of the whole axis, in the order in which they lie
    in memory: `((4, 8),)` of 8 heads on the second of two ranks; three pieces for a
    convolution whose x, B and C channels are split each on their own. A replicated
    axis is simply held whole, or held alike, by several ranks.
    """

    name: str
    total: int
    pieces: tuple[tuple[int, int], ...]

    @staticmethod
    def whole(name: str, size: int) -> "Extent":
        return Extent(name, size, ((0, size),))

    def __post_init__(self) -> None:
        check_count(f"axis {self.name!r}: its size", self.total)
        ends = sorted(self.pieces)
        inside = all(0 <= lo < hi <= self.total for lo, hi in ends)
        apart = all(a[1] <= b[0] for a, b in pairwise(ends))
        if not self.pieces or not inside or not apart:
            raise SpecError(
                f"axis {self.name!r}: pieces {self.pieces} are not disjoint, non-empty "
                f"parts of [0, {self.total})"
            )

    @cached_property
    def size(self) -> int:
        return sum(hi - lo for lo, hi in self.pieces)


@dataclass(frozen=True)
class Field:
    """One named array inside every cell, C-contiguous over `axes`, outermost first.

    `section` is the part of the page whose cells hold it.
    """

    name: str
    dtype: DType
    axes: tuple[Extent, ...]
    section: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(
                f"field {self.name!r}: dtype is {self.dtype!r}, not a DType"
                '\n\nhint: DType.parse("bf16") reads the usual spellings'
            )
        if not self.axes:
            raise SpecError(f"field {self.name!r} has no axes")
        if self.axes[-1].size % self.dtype.per_unit:
            raise SpecError(
                f"field {self.name!r}: {self.axes[-1].size} elements of {self.dtype} do not "
                f"fill whole bytes\n\nhint: make {self.axes[-1].name!r} even"
            )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.bits // 8


RETENTION_HINT = (
    "one of Full, Window, Chunk, State, Encoder\n\nhint: for example Full() or Window(4096)"
)
HEADS_HINT = 'an Extent\n\nhint: Extent.whole("head", 2) for all of two heads'
FIELDS_HINT = "a tuple of Fields\n\nhint: LayerSpec.attention(...) makes k and v"


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One cache-owning module: what a page of it holds, and for how long.

    `states` cells per head per block, each standing for `block_tokens / states` tokens
    (one cell for a whole summary where retention is `State`). `align` is the kernel's
    demand: pages start at multiples of it and are padded to one.
    """

    name: str
    retention: Retention
    block_tokens: int
    states: int
    heads: Extent
    fields: tuple[Field, ...]
    align: int = 1

    @staticmethod
    def attention(
        name: str,
        *,
        heads: int | Extent,
        head_dim: int,
        dtype: DType | str,
        block_tokens: int = 16,
        retention: Retention | None = None,
        v_head_dim: int | None = None,
        align: int = 1,
    ) -> "LayerSpec":
        """Keys and values of every token, per kv head.

        `heads` is how many kv heads the layer has, all held here, or the `Extent` of a
        tensor-parallel rank. Without a retention every token is kept. `v_head_dim` is for
        layers whose values are narrower or wider than their keys.
        """
        element = DType.parse(dtype)
        value_dim = head_dim if v_head_dim is None else v_head_dim
        for what, value in (("head_dim", head_dim), ("v_head_dim", value_dim)):
            check_count(f"layer {name!r}: {what}", value)
        if not isinstance(heads, Extent):
            check_count(f"layer {name!r}: heads", heads)
            heads = Extent.whole("head", heads)
        return LayerSpec(
            name=name,
            retention=Full() if retention is None else retention,
            block_tokens=block_tokens,
            states=block_tokens,
            heads=heads,
            fields=(
                Field("k", element, (Extent.whole("content", head_dim),)),
                Field("v", element, (Extent.whole("content", value_dim),)),
            ),
            align=align,
        )

    def __post_init__(self) -> None:
        self._check_types()
        names = [field.name for field in self.fields]
        if not names or len(set(names)) < len(names):
            raise SpecError(
                f"layer {self.name!r}: at least one field is needed, each with a unique name, "
                f"not {names}"
            )
        numbers = [field.section for field in self.fields]
        if numbers[0] != 0 or any(b - a not in (0, 1) for a, b in pairwise(numbers)):
            raise SpecError(
                f"layer {self.name!r}: its fields are in sections {numbers}; they are numbered "
                "from 0 and follow each other"
            )
        for what, value in (
            ("block_tokens", self.block_tokens),
            ("states", self.states),
            ("align", self.align),
        ):
            check_count(f"layer {self.name!r}: {what}", value)
        if isinstance(self.retention, State):
            if self.states != 1:
                raise SpecError(f"layer {self.name!r}: a summary is one state, not {self.states}")
        elif self.block_tokens % self.states:
            raise SpecError(
                f"layer {self.name!r}: {self.block_tokens} tokens per block do not make "
                f"{self.states} equal states"
            )

    def _check_types(self) -> None:
        """Untyped callers pass `retention="full"` or `heads=2`; both would fail much later."""
        fields: Iterable[object] = self.fields if type(self.fields) is tuple else (self.fields,)
        values: list[tuple[str, object, type, str]] = [
            ("name", self.name, str, "a string"),
            ("retention", self.retention, Kind, RETENTION_HINT),
            ("heads", self.heads, Extent, HEADS_HINT),
            *(("fields", field, Field, FIELDS_HINT) for field in fields),
        ]
        for what, value, kind, hint in values:
            if not isinstance(value, kind):
                raise SpecError(f"layer {self.name!r}: {what} is {value!r}, not {hint}")

    def field(self, name: str) -> Field:
        """The field of that name."""
        for field in self.fields:
            if field.name == name:
                return field
        names = [field.name for field in self.fields]
        raise SpecError(f"layer {self.name!r} has no field {name!r}; it has {names}")

    @property
    def tokens_per_state(self) -> int:
        """1 for a summary, whose block counts as one token."""
        return 1 if isinstance(self.retention, State) else self.block_tokens // self.states

    @cached_property
    def sections(self) -> "tuple[LayerSpec, ...]":
        """The parts of a page, each as a layer whose pages are that part alone."""
        if self.fields[-1].section == 0:
            return (self,)
        by_section: dict[int, list[Field]] = {}
        for field in self.fields:
            by_section.setdefault(field.section, []).append(replace(field, section=0))
        return tuple(replace(self, fields=tuple(fields), align=1) for fields in by_section.values())

    def end_to_end(self, num_heads: int) -> tuple[tuple[int, ...], int]:
        """Where the sections of so many heads start, each behind the one before it, and the bytes
        of all of them."""
        starts: list[int] = []
        end = 0
        for section in self.sections:
            starts.append(align_up(end, section.unit))
            end = starts[-1] + num_heads * section.states * section.cell_bytes
        return tuple(starts), end

    @cached_property
    def section_offsets(self) -> tuple[int, ...]:
        """Where each section starts in a page in one piece."""
        return self.end_to_end(self.heads.size)[0]

    @cached_property
    def field_offsets(self) -> dict[str, int]:
        """Where each field starts inside a cell: in order, each on its natural alignment."""
        offsets: dict[str, int] = {}
        ends: dict[int, int] = {}
        for field in self.fields:
            offsets[field.name] = align_up(ends.get(field.section, 0), field.dtype.unit)
            ends[field.section] = offsets[field.name] + field.nbytes
        return offsets

    @cached_property
    def unit(self) -> int:
        """Bytes of the largest element: every cell starts at a multiple of it."""
        return max(field.dtype.unit for field in self.fields)

    @cached_property
    def cell_bytes(self) -> int:
        """Bytes of one head's one state, in all sections together."""
        if len(self.sections) > 1:
            return sum(section.cell_bytes for section in self.sections)
        last = self.fields[-1]
        return align_up(self.field_offsets[last.name] + last.nbytes, self.unit)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page before alignment: heads × states × cell, section after section."""
        return self.end_to_end(self.heads.size)[1]

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page, padded as the kernel demands."""
        return align_up(self.payload_bytes, self.align)

    @property
    def num_tensors(self) -> int:
        """How many tensors a per-layer engine allocates for it: K and V apart."""
        return 2 if {"k", "v"} <= {field.name for field in self.fields} else 1
