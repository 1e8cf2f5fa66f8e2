"""What two ranks both hold of one layer, in the whole model's coordinates.

Every axis says which intervals of the whole model's axis a rank holds, so what two ranks
share is an intersection of intervals. No rank number enters:

    whole axis   0       4       8          source holds [0, 4), destination [2, 8)
    source       ├───────┤                  shared [2, 4): at 2 in the one,
    destination      ├───────────┤          at 0 in the other
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstow.plan.spec import Extent, Field, LayerSpec

Interval = tuple[int, int]

Box = tuple[Interval, ...]
"""Part of a field in the whole model's coordinates: heads, then each of the field's axes."""


class Span(NamedTuple):
    """`size` units that lie at `source` on one side and at `destination` on the other."""

    source: int
    destination: int
    size: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Heads and, in each of their cells, bytes that both sides hold."""

    heads: tuple[Span, ...]
    content: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        return sum(s.size for s in self.heads) * sum(s.size for s in self.content)


def common(source: Extent, destination: Extent, within: Interval | None = None) -> tuple[Span, ...]:
    """What both sides hold of an axis, in the destination's order."""
    lo_limit, hi_limit = within or (0, source.total)
    spans: list[Span] = []
    there = 0
    for d_lo, d_hi in destination.pieces:
        here = 0
        for s_lo, s_hi in source.pieces:
            lo, hi = max(s_lo, d_lo, lo_limit), min(s_hi, d_hi, hi_limit)
            if lo < hi:
                spans.append(Span(here + lo - s_lo, there + lo - d_lo, hi - lo))
            here += s_hi - s_lo
        there += d_hi - d_lo
    return abutting(spans)


def abutting(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans by destination, those that follow each other on both sides made one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.destination):
        last = merged[-1] if merged else None
        if last and (last.source + last.size, last.destination + last.size) == span[:2]:
            merged[-1] = last._replace(size=last.size + span.size)
        else:
            merged.append(span)
    return tuple(merged)


def content_bits(source: Field, destination: Field, box: Box | None = None) -> tuple[Span, ...]:
    """What both sides hold of a field, as spans of bits from the field's start."""
    within: Sequence[Interval | None] = box or (None,) * len(source.axes)
    bits = source.dtype.bits
    spans: tuple[Span, ...] = (Span(0, 0, bits),)
    s_stride = d_stride = bits
    axes = zip(source.axes, destination.axes, within, strict=True)
    for s_axis, d_axis, interval in reversed(tuple(axes)):
        held = common(s_axis, d_axis, interval)
        if spans == (Span(0, 0, s_stride),) and s_stride == d_stride:
            spans = tuple(Span(*(number * s_stride for number in span)) for span in held)
        else:
            spans = tuple(
                Span(
                    (s + i) * s_stride + inner.source,
                    (d + i) * d_stride + inner.destination,
                    inner.size,
                )
                for s, d, size in held
                for i in range(size)
                for inner in spans
            )
        s_stride *= s_axis.size
        d_stride *= d_axis.size
    return abutting(spans)


def shared(
    source: LayerSpec, destination: LayerSpec, claims: Mapping[str, Sequence[Box]] | None = None
) -> tuple[Shared, ...]:
    """What both sides hold of a section's cells; with `claims`, only those boxes of each field."""
    contents: dict[tuple[Span, ...], list[Span]] = {}
    here = {field.name: field for field in source.fields}
    for d_field in destination.fields:
        if d_field.name not in here:  # in another section there
            continue
        s_field = here[d_field.name]
        start_s = source.field_offsets[d_field.name]
        start_d = destination.field_offsets[d_field.name]
        boxes = (None,) if claims is None else claims.get(d_field.name, ())
        for box in boxes:
            heads = common(source.heads, destination.heads, None if box is None else box[0])
            spans = content_bits(s_field, d_field, None if box is None else box[1:])
            contents.setdefault(heads, []).extend(
                Span(start_s + s // 8, start_d + d // 8, size // 8) for s, d, size in spans
            )
    whole = {sum(field.nbytes for field in spec.fields) for spec in (source, destination)}
    return tuple(
        Shared(heads, (Span(0, 0, source.cell_bytes),) if _are(whole, spans) else abutting(spans))
        for heads, spans in contents.items()
        if heads and spans
    )


def _are(whole: set[int], spans: Sequence[Span]) -> bool:
    """Whether these are all bytes of a cell on both sides, in the same places: cells that are
    equal inside travel whole, padding between fields included."""
    return whole == {sum(span.size for span in spans)} and all(
        span.source == span.destination for span in spans
    )
