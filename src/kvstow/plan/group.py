"""Layers that share one block table, and how many blocks a request needs of each."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvstow.errors import SpecError
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, Sink, State, Window
from kvstow.plan.spec import LayerSpec


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


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key by which `layers.2` comes before `layers.10`."""
    parts = re.split(r"(\d+)", name)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def grouped(layers: Iterable[LayerSpec]) -> tuple[Group, ...]:
    """The fewest groups: one per retention and tokens per block; lasting ones first."""
    kinds: dict[tuple[Retention, int], list[LayerSpec]] = {}
    names: set[str] = set()
    for layer in sorted(layers, key=lambda layer: natural(layer.name)):
        if layer.name in names:
            raise SpecError(f"layer {layer.name!r} is there twice")
        names.add(layer.name)
        kinds.setdefault((layer.retention, layer.block_tokens), []).append(layer)
    if not kinds:
        raise SpecError("a model without layers has no groups")
    ordered = sorted(kinds, key=lambda kind: (_rank(kind[0]), -kind[1]))
    titles = [title(retention) for retention, _ in ordered]
    return tuple(
        Group(
            name=name if titles.count(name) == 1 else f"{name}.{kind[1]}",
            layers=tuple(kinds[kind]),
        )
        for name, kind in zip(titles, ordered, strict=True)
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


def title(retention: Retention) -> str:
    """A short name: `full`, `window128`, `state`."""
    match retention:
        case Full():
            return "full"
        case Encoder(tokens):
            return f"encoder{tokens}"
        case Chunk(tokens):
            return f"chunk{tokens}"
        case Sink(sink_tokens, tokens):
            return f"sink{sink_tokens}+{tokens}"
        case Window(tokens):
            return f"window{tokens}"
        case State():
            return "state"


def _rank(retention: Retention) -> tuple[int, int, int]:
    match retention:
        case Full():
            return (0, 0, 0)
        case Encoder(tokens):
            return (1, -tokens, 0)
        case Chunk(tokens):
            return (2, -tokens, 0)
        case Sink(sink_tokens, tokens):
            return (3, -tokens, -sink_tokens)
        case Window(tokens):
            return (4, -tokens, 0)
        case State(checkpoints):
            return (5, 0, -checkpoints)


def bounded_rows(group: Group, *, in_flight: int) -> int | None:
    """The most rows one request can hold, for any length; None where it grows for good.

    `in_flight` tokens are computed in one step: a window must still reach back from the
    first of them while the last of them is written.
    """
    step = group.block_tokens
    match group.retention:
        case Full():
            return None
        case Encoder(tokens):
            return -(-tokens // step)
        case State(checkpoints):
            return 1 + checkpoints
        case Chunk(tokens) if tokens % step == 0:
            return -(-(tokens - 1 + in_flight) // step)
        case Chunk(tokens) | Window(tokens):
            return _spanned(tokens - 1 + in_flight, step)
        case Sink(sink_tokens, tokens):
            return -(-sink_tokens // step) + _spanned(tokens - 1 + in_flight, step)


def _spanned(tokens: int, step: int) -> int:
    """The most blocks that `tokens` consecutive tokens can touch."""
    return (tokens + step - 2) // step + 1


def rows_needed(group: Group, num_tokens: int, *, in_flight: int = 1) -> int:
    """Rows a request of `num_tokens` holds at its fullest moment."""
    if isinstance(group.retention, State | Encoder):
        return bounded_rows(group, in_flight=in_flight) or 0
    rows = -(-num_tokens // group.block_tokens)
    bound = bounded_rows(group, in_flight=min(in_flight, max(1, num_tokens)))
    return rows if bound is None else min(rows, bound)


def rows_needed_by_all(
    groups: Sequence[Group], num_tokens: int, *, in_flight: int = 1
) -> tuple[int, ...]:
    return tuple(rows_needed(group, num_tokens, in_flight=in_flight) for group in groups)
