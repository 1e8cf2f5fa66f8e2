"""What two ranks both hold of one layer, in the whole model's coordinates.

Every axis says which intervals of the whole model's axis a rank holds, so what two ranks
share is an intersection of intervals. No rank number enters:

    whole axis   0       4       8          source holds [0, 4), destination [2, 8)
    source       ├───────┤                  shared [2, 4): at 2 in the one,
    destination      ├───────────┤          at 0 in the other
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvstow.plan.spec import Extent, Field, LayerSpec
from kvstow.route.copies import Copies, cut

Interval = tuple[int, int]

Box = tuple[Interval, ...]
"""Part of a field in the whole model's coordinates: heads, then each of the field's axes."""


class Shared(NamedTuple):
    """Heads that both sides hold, counted in heads, and in each of their cells bytes of it."""

    heads: Copies
    content: Copies


def common(source: Extent, destination: Extent, within: Interval | None = None) -> Copies:
    """What both sides hold of an axis, in its units, in the destination's order."""
    lo_limit, hi_limit = within or (0, source.total)
    spans: list[tuple[int, int, int]] = []
    there = 0
    for d_lo, d_hi in destination.pieces:
        here = 0
        for s_lo, s_hi in source.pieces:
            lo, hi = max(s_lo, d_lo, lo_limit), min(s_hi, d_hi, hi_limit)
            if lo < hi:
                spans.append((here + lo - s_lo, there + lo - d_lo, hi - lo))
            here += s_hi - s_lo
        there += d_hi - d_lo
    return Copies(*np.array(spans, np.int64).reshape(-1, 3).T).merged()


def content_bits(source: Field, destination: Field, box: Box | None = None) -> Copies:
    """What both sides hold of a field, in bits from the field's start."""
    within: Sequence[Interval | None] = box or (None,) * len(source.axes)
    s_stride = d_stride = source.dtype.bits
    spans = Copies.one(0, 0, s_stride)
    axes = zip(source.axes, destination.axes, within, strict=True)
    for s_axis, d_axis, interval in reversed(tuple(axes)):
        held = common(s_axis, d_axis, interval)
        if len(spans) == 1 and s_stride == d_stride == spans.total:  # all that is inside
            spans = Copies(
                held.source * s_stride, held.destination * s_stride, held.nbytes * s_stride
            )
        else:
            each = cut(held, 1)
            spans = Copies(
                np.add.outer(each.source * s_stride, spans.source).ravel(),
                np.add.outer(each.destination * d_stride, spans.destination).ravel(),
                np.tile(spans.nbytes, len(each)),
            )
        s_stride *= s_axis.size
        d_stride *= d_axis.size
    return spans.merged()


def shared(
    source: LayerSpec, destination: LayerSpec, claims: Mapping[str, Sequence[Box]] | None = None
) -> tuple[Shared, ...]:
    """What both sides hold of a section's cells; with `claims`, only those boxes of each field."""
    contents: dict[Interval | None, list[Copies]] = {}
    here = {field.name: field for field in source.fields}
    for field in destination.fields:
        if field.name not in here:  # in another section there
            continue
        starts = source.field_offsets[field.name], destination.field_offsets[field.name]
        for box in (None,) if claims is None else claims.get(field.name, ()):
            bits = content_bits(here[field.name], field, None if box is None else box[1:])
            nbytes = Copies(bits.source // 8, bits.destination // 8, bits.nbytes // 8)
            contents.setdefault(None if box is None else box[0], []).append(nbytes.moved(*starts))
    parts = (
        Shared(common(source.heads, destination.heads, heads), Copies.joined(spans).merged())
        for heads, spans in contents.items()
    )
    return tuple(part for part in parts if len(part.heads) and len(part.content))
