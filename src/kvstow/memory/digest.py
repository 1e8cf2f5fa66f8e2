"""A number for what some blocks hold, whatever the layout, the ranks, the device.

Two sides with different order, tensor parallelism or tokens per block get the same number for
the same content; `docs/concepts/digest.md` says what it detects, and how surely.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import BlockError
from kvstow.memory.arena import Arena
from kvstow.memory.keys import CellKeys, Words, cell_keys, seed, shares, state_keys
from kvstow.plan.blocklist import Blocks
from kvstow.plan.group import Group
from kvstow.plan.layout import Placement
from kvstow.plan.pairing import Tokens
from kvstow.plan.route import Claims
from kvstow.plan.spec import LayerSpec
from kvstow.plan.territory import state_tokens

__all__ = ["counted_states", "digest", "shares"]

CHUNK_BYTES = 512 << 10
"""Cells gathered at a time on the host: they stay in the second-level cache."""

MODULUS = 1 << 64

Intervals = tuple[tuple[int, int], tuple[int, int]]


def digest(
    arena: Arena,
    blocks: Mapping[int, Blocks],
    num_tokens: int,
    *,
    layers: Collection[str] | None = None,
    start_token: int = 0,
    claims: Claims | None = None,
) -> int:
    """The digest, below 2^64, of what a request's blocks hold of tokens `[start, num_tokens)`.

    Sums over ranks, modulo 2^64, are digests of all that the ranks hold. `claims` restricts it
    to parts of fields, `layers` to some layers; `shares` makes claims by which several ranks
    count what they hold alike only once. Blocks of a window group count as far as the window of
    the next token reaches. On CUDA it runs in the current stream, and waits for the result.
    """
    total = 0
    for group, held in blocks.items():
        ids = arena.checked(group, held.ids)
        rows = arena.layout.groups[group]
        wanted = [
            _Layer(spec, place, cell_keys(spec, claims))
            for spec, place in zip(rows.group.layers, rows.placements, strict=True)
            if layers is None or spec.name in layers
        ]
        if not wanted:
            continue
        for kind in _alike(wanted):
            intervals = counted_states(rows.group, kind[0].spec, num_tokens, start_token)
            _check_listed(rows.group, kind[0].spec, held, intervals)
            if arena.device.type == "cuda":
                total += _on_device(arena, kind, ids, held.index, intervals)
            else:
                total += sum(_on_host(arena, one, ids, held.index, intervals) for one in kind)
    return total % MODULUS


def counted_states(group: Group, spec: LayerSpec, num_tokens: int, start_token: int) -> Intervals:
    """States of a layer that the token after `num_tokens` looks at, from `start_token` on.

    Two half-open intervals, the second one empty but for sinks. A state of several tokens
    counts when one of them does; of summaries, the running one.
    """
    span = state_tokens(spec)
    found = [
        (tokens.first // span, -(-tokens.end // span)) if tokens.first < tokens.end else (0, 0)
        for tokens in Tokens(start_token, num_tokens).needed(group)
    ]
    return found[0], found[1] if len(found) > 1 else (0, 0)


def _check_listed(group: Group, spec: LayerSpec, held: Blocks, intervals: Intervals) -> None:
    """Refuses a list of blocks that lacks one of those that count."""
    for low, high in intervals:
        first, end = low // spec.states, -(-high // spec.states)
        found = np.searchsorted(held.index, [first, end])
        if found[1] - found[0] != end - first:
            missing = np.setdiff1d(np.arange(first, end), held.index)
            raise BlockError(
                f"group {group.name!r}: the digest needs logical blocks {missing[:8].tolist()}, "
                f"the request lists {held.index[:8].tolist()}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    spec: LayerSpec
    place: Placement
    keys: CellKeys

    @property
    def geometry(self) -> tuple[int, ...]:
        p = self.place
        return (id(self.keys), p.block_stride, p.head_stride, p.token_stride, self.spec.states)

    @property
    def heads_outside(self) -> bool:
        return self.place.head_stride > self.place.token_stride


def _alike(layers: list[_Layer]) -> list[list[_Layer]]:
    """Layers whose pages differ only in where they start."""
    kinds: dict[tuple[int, ...], list[_Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.geometry, []).append(layer)
    return list(kinds.values())


def _word_keys(layer: _Layer) -> tuple[Words, int]:
    """Keys and word length; single bytes where pages do not start at words' multiples."""
    keys, place = layer.keys, layer.place
    numbers = (place.offset, place.block_stride, place.head_stride, place.token_stride)
    if keys.unit == 1 or not any(number % keys.unit for number in numbers):
        return keys.table, keys.unit
    shifts = np.arange(keys.unit, dtype=np.uint64) * np.uint64(8)
    return (keys.table[..., None] << shifts).reshape(keys.table.shape[0], -1), 1


def _on_host(
    arena: Arena,
    layer: _Layer,
    ids: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    intervals: Intervals,
) -> int:
    table, unit = _word_keys(layer)
    cells = _cells(arena, layer, table.shape, unit)
    states = layer.spec.states
    states_at = index[:, None] * states + np.arange(states)
    factors = state_keys(layer.spec.name, states_at) * _inside(states_at, intervals)
    step = max(1, CHUNK_BYTES // (states * table.size * unit))
    sums = np.zeros((), np.uint64)
    for at in range(0, len(ids), step):
        part = cells[ids[at : at + step]]  # in the order in which it lies: head or token outside
        if layer.heads_outside:
            inner = np.einsum("bhnw,hw->bhn", part, table).sum(axis=1, dtype=np.uint64)
        else:
            inner = np.einsum("bnj,j->bn", part.reshape(*part.shape[:2], -1), table.reshape(-1))
        sums += (inner * factors[at : at + step]).sum(dtype=np.uint64)
    return int(sums)


def _cells(
    arena: Arena, layer: _Layer, table_shape: tuple[int, ...], unit: int
) -> npt.NDArray[np.uint32]:
    """All cells of a layer in words: block, then head and token as they lie, then word."""
    place = layer.place
    heads, words = table_shape
    flat = arena.bytes.numpy()[place.offset :]
    axes = [(heads, place.head_stride), (layer.spec.states, place.token_stride)]
    outer, inner = axes if layer.heads_outside else reversed(axes)
    num_blocks = arena.layout.num_blocks(arena.layout.layers[layer.spec.name][0])
    return np.lib.stride_tricks.as_strided(
        flat[: flat.size // unit * unit].view(f"<u{unit}"),
        (num_blocks, outer[0], inner[0], words),
        (place.block_stride, outer[1], inner[1], unit),
    )


def _inside(states: npt.NDArray[np.int64], intervals: Intervals) -> Words:
    (low, high), (low2, high2) = intervals
    counted = ((states >= low) & (states < high)) | ((states >= low2) & (states < high2))
    return counted.astype(np.uint64)


def _on_device(
    arena: Arena,
    layers: list[_Layer],
    ids: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    intervals: Intervals,
) -> int:
    from kvstow.memory.kernels import digest_cells

    table, unit = _word_keys(layers[0])
    if any(_word_keys(layer)[1] != unit for layer in layers):
        return sum(_on_device(arena, [layer], ids, index, intervals) for layer in layers)
    place = layers[0].place
    block, head, token = place.block_stride, place.head_stride, place.token_stride
    strides = (block // unit, head // unit, token // unit)
    offsets = np.array([layer.place.offset // unit for layer in layers])
    seeds = np.array([seed("layer", layer.spec.name) for layer in layers], np.uint64)

    def there(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.as_tensor(array, device=arena.device)

    return digest_cells(
        arena.bytes[: arena.nbytes // unit * unit].view({1: torch.uint8, 4: torch.uint32}[unit]),
        there(table.view(np.int64)),
        (there(ids), there(index)),
        (there(offsets), there(seeds.view(np.int64))),
        strides,
        layers[0].spec.states,
        (*intervals[0], *intervals[1]),
        aligned=unit == 4 and arena.address % 16 == 0 and not any(
            number % 4 for number in (*strides, *offsets.tolist())),
    )  # fmt: skip
