"""Groups: layers that share one block table."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvstow.errors import SpecError
from kvstow.plan.retention import (
    Full,
    Retention,
    State,
    lasting_first,
    rows_bound,
    rows_needed,
    short_name,
)
from kvstow.plan.slab import MAX_SLAB_BYTES
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import ceil_div

LONG_ROW_BYTES = 32 << 20
"""A recurrent group with a longer row becomes several groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers of one retention and one number of tokens per block, in natural order."""

    name: str
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        kinds = {(layer.retention, layer.block_tokens) for layer in self.layers}
        if len(kinds) != 1:
            raise SpecError(f"group {self.name!r} mixes {len(kinds)} kinds of layers: {kinds}")

    @property
    def retention(self) -> Retention:
        return self.layers[0].retention

    @property
    def block_tokens(self) -> int:
        return self.layers[0].block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages of one block, before the planner pads anything."""
        return sum(layer.page_bytes for layer in self.layers)

    @property
    def num_tensors(self) -> int:
        return sum(layer.num_tensors for layer in self.layers)

    def rows_bound(self, *, in_flight: int) -> int | None:
        """The most rows one request can hold, for any length; None where it grows for good."""
        return rows_bound(self.retention, self.block_tokens, in_flight=in_flight)

    def rows_needed(self, num_tokens: int, *, in_flight: int = 1) -> int:
        """Rows a request of `num_tokens` holds at its fullest moment."""
        return rows_needed(self.retention, num_tokens, self.block_tokens, in_flight=in_flight)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key by which `layers.2` comes before `layers.10`."""
    parts = re.split(r"0*(\d+)", name)
    return tuple((len(part), part) if part.isdecimal() else (-1, part) for part in parts)


def grouped(layers: Iterable[LayerSpec]) -> tuple[Group, ...]:
    """The fewest groups: one per retention and tokens per block; lasting ones first."""
    kinds: dict[tuple[Retention, int], list[LayerSpec]] = {}
    names: set[str] = set()
    for layer in sorted(layers, key=lambda layer: natural(layer.name)):
        if layer.name in names:
            raise SpecError(f"layer {layer.name!r} is listed twice")
        names.add(layer.name)
        kinds.setdefault((layer.retention, layer.block_tokens), []).append(layer)
    if not kinds:
        raise SpecError("a model without layers has no groups")
    ordered = sorted(kinds, key=lambda kind: (lasting_first(kind[0]), -kind[1]))
    titles = [short_name(retention) for retention, _ in ordered]
    return tuple(
        Group(
            name=title if titles.count(title) == 1 else f"{title}.{kind[1]}",
            layers=tuple(kinds[kind]),
        )
        for title, kind in zip(titles, ordered, strict=True)
    )


def split(group: Group, parts: int) -> tuple[Group, ...]:
    """The group as `parts` groups of nearly equally many layers, larger ones first."""
    if not 1 <= parts <= len(group.layers):
        raise SpecError(f"{len(group.layers)} layers cannot make {parts} groups")
    if parts == 1:
        return (group,)
    size, rest = divmod(len(group.layers), parts)
    ends = [i * size + min(i, rest) for i in range(parts + 1)]
    return tuple(
        Group(name=f"{group.name}/{i}", layers=group.layers[lo:hi])
        for i, (lo, hi) in enumerate(pairwise(ends))
    )


def scaled(group: Group, factor: int) -> Group:
    """The group with `factor` times as many tokens per block."""
    layers = tuple(
        replace(layer, block_tokens=layer.block_tokens * factor, states=layer.states * factor)
        for layer in group.layers
    )
    return replace(group, layers=layers)


# ── groups that engines and slabs can live with ───────────────────────────────────────


def short_rows(group: Group) -> tuple[Group, ...]:
    """A recurrent group with very long rows, cut into equal parts, so that slabs stay
    small; uneven parts, which would pad each other, only where a slab cannot hold it."""
    if not isinstance(group.retention, State) or group.page_bytes <= LONG_ROW_BYTES:
        return (group,)
    num_layers = len(group.layers)
    fewest = ceil_div(group.page_bytes, LONG_ROW_BYTES)
    for parts in range(fewest, min(4 * fewest, num_layers) + 1):
        if num_layers % parts == 0:
            return split(group, parts)
    return split(group, min(num_layers, ceil_div(group.page_bytes, MAX_SLAB_BYTES)))


def equal_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups cut until none has longer rows than the full-attention group (the shortest
    one, where there is none); recurrent ones until none has more layers than it."""
    lasting = [group for group in groups if isinstance(group.retention, Full)]
    unit = lasting[0] if lasting else min(groups, key=lambda group: group.page_bytes)

    def parts(group: Group) -> int:
        if isinstance(group.retention, State):
            return ceil_div(len(group.layers), len(unit.layers))
        return min(len(group.layers), ceil_div(group.page_bytes, unit.page_bytes))

    return tuple(part for group in groups for part in split(group, parts(group)))


def level_pages(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Attention blocks scaled up until a page is no smaller than a recurrent page."""
    states = [
        layer.page_bytes
        for group in groups
        if isinstance(group.retention, State)
        for layer in group.layers
    ]
    if not states:
        return tuple(groups)
    return tuple(
        group
        if isinstance(group.retention, State)
        else scaled(group, ceil_div(max(states), min(layer.page_bytes for layer in group.layers)))
        for group in groups
    )
