"""A number for what some blocks hold, whatever the layout, the ranks, the device.

Two sides with different order, tensor parallelism or tokens per block get the same number for
the same content; `docs/concepts/digest.md` says what it detects, and how surely.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import BlockError
from kvstow.memory.arena import Arena
from kvstow.memory.keys import CellKeys, Words, cell_keys, seed, shares, state_keys
from kvstow.plan.blocklist import Blocks
from kvstow.plan.group import Group
from kvstow.plan.layout import Placement
from kvstow.plan.overlap import Interval
from kvstow.plan.pairing import Tokens
from kvstow.plan.route import Claims
from kvstow.plan.spec import Extent, LayerSpec
from kvstow.plan.territory import state_tokens

__all__ = ["counted_states", "digest", "shares"]

CHUNK_BYTES = 512 << 10
"""Cells gathered at a time on the host: they stay in the second-level cache."""

MODULUS = 1 << 64

Ints = npt.NDArray[np.int64]
Intervals = tuple[tuple[int, int], tuple[int, int]]


def digest(
    arena: Arena,
    blocks: Mapping[int, Blocks],
    num_tokens: int,
    *,
    layers: Collection[str] | None = None,
    start_token: int = 0,
    claims: Claims | None = None,
    heads: Interval | None = None,
    every: int = 1,
    phase: int = 0,
) -> int:
    """The digest, below 2^64, of what a request's blocks hold of tokens `[start, num_tokens)`.

    Sums over ranks, modulo 2^64, are digests of all that the ranks hold. `claims` restricts it
    to parts of fields, `layers` to some layers, `heads` to some of the model's heads; `shares`
    makes claims by which several ranks count what they hold alike only once. Blocks of a window
    group count as far as the window of the next token reaches. Of the states that count, those
    count whose number, divided by `every`, leaves `phase`; no other is read. On CUDA it runs in
    the current stream, and waits for the result.
    """
    total = 0
    for group, held in blocks.items():
        ids = arena.checked(group, held.ids)
        rows = arena.layout.groups[group]
        wanted = [
            _Layer(spec, place, cell_keys(spec, claims), spec.states, place.block_stride)
            for spec, place in zip(rows.group.layers, rows.placements, strict=True)
            if layers is None or spec.name in layers
        ]
        if heads is not None:
            wanted = [few for layer in wanted if (few := _with_heads(layer, heads)) is not None]
        if not wanted:
            continue
        for kind in _alike(wanted):
            intervals = counted_states(rows.group, kind[0].spec, num_tokens, start_token)
            _check_listed(rows.group, kind[0].spec, held, intervals)
            pages = kind, ids, held.index
            if every > 1:
                pages = _picked(*pages, intervals, every, phase)
            if not len(pages[1]):
                continue
            if arena.device.type == "cuda":
                total += _on_device(arena, *pages, intervals)
            else:
                total += sum(_on_host(arena, one, *pages[1:], intervals) for one in pages[0])
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
    """A layer whose block `b` starts at `offset + b · block_stride` and holds `states` states."""

    spec: LayerSpec
    place: Placement
    keys: CellKeys
    states: int
    block_stride: int

    @property
    def geometry(self) -> tuple[int, ...]:
        p = self.place
        return (id(self.keys), self.block_stride, p.head_stride, p.token_stride, self.states)

    @property
    def heads_outside(self) -> bool:
        return self.place.head_stride > self.place.token_stride


def _with_heads(layer: _Layer, heads: Interval) -> _Layer | None:
    """The part of a layer that some heads are, if it holds any of them."""
    found = _few_heads(layer.keys, layer.spec.heads, heads)
    if found is None:
        return None
    first, keys = found
    place = replace(layer.place, offset=layer.place.offset + first * layer.place.head_stride)
    return replace(layer, keys=keys, place=place)


@lru_cache(maxsize=256)
def _few_heads(keys: CellKeys, held: Extent, heads: Interval) -> tuple[int, CellKeys] | None:
    """The first head that is one of these, as it lies, and the keys from there to the last."""
    numbers = np.concatenate([np.arange(*piece) for piece in held.pieces])
    inside = (numbers >= heads[0]) & (numbers < heads[1])
    if not inside.any():
        return None
    where = np.flatnonzero(inside)
    some = slice(where[0], where[-1] + 1)
    return int(where[0]), replace(keys, table=keys.table[some] * inside[some, None])


def _alike(layers: list[_Layer]) -> list[list[_Layer]]:
    """Layers whose pages differ only in where they start."""
    kinds: dict[tuple[int, ...], list[_Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.geometry, []).append(layer)
    return list(kinds.values())


def _picked(
    layers: list[_Layer], ids: Ints, index: Ints, intervals: Intervals, every: int, phase: int
) -> tuple[list[_Layer], Ints, Ints]:
    """The states that leave `phase`, each as a block of its own that holds one state."""
    one = layers[0]
    found = [np.arange(low + (phase - low) % every, high, every) for low, high in intervals]
    states = np.union1d(*found) if len(found[1]) else found[0]
    rows, slots = ids[np.searchsorted(index, states // one.states)], states % one.states
    unit = gcd(one.block_stride, one.place.token_stride)
    blocks = (rows * one.block_stride + slots * one.place.token_stride) // unit
    return [replace(layer, states=1, block_stride=unit) for layer in layers], blocks, states


def _unit(layer: _Layer) -> int:
    """The length of words; single bytes where pages do not start at words' multiples."""
    keys, place = layer.keys, layer.place
    numbers = (place.offset, layer.block_stride, place.head_stride, place.token_stride)
    return 1 if any(number % keys.unit for number in numbers) else keys.unit


def _keys_in(keys: CellKeys, unit: int) -> Words:
    """The keys for words of this length."""
    if unit == keys.unit:
        return keys.table
    shifts = np.arange(keys.unit, dtype=np.uint64) * np.uint64(8)
    return (keys.table[..., None] << shifts).reshape(keys.table.shape[0], -1)


def _on_host(
    arena: Arena,
    layer: _Layer,
    ids: Ints,
    index: Ints,
    intervals: Intervals,
) -> int:
    unit = _unit(layer)
    table = _keys_in(layer.keys, unit)
    cells = _cells(arena, layer, table.shape, unit, int(ids.max(initial=0)) + 1)
    states = layer.states
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
    arena: Arena, layer: _Layer, table_shape: tuple[int, ...], unit: int, num_blocks: int
) -> npt.NDArray[np.uint32]:
    """Cells of a layer in words: block, then head and token as they lie, then word."""
    place = layer.place
    heads, words = table_shape
    axes = [(heads, place.head_stride), (layer.states, place.token_stride)]
    outer, inner = axes if layer.heads_outside else reversed(axes)
    return np.ndarray(
        (num_blocks, outer[0], inner[0], words),
        f"<u{unit}",
        arena.bytes.numpy(),
        place.offset,
        (layer.block_stride, outer[1], inner[1], unit),
    )


def _inside(states: Ints, intervals: Intervals) -> Words:
    (low, high), (low2, high2) = intervals
    counted = ((states >= low) & (states < high)) | ((states >= low2) & (states < high2))
    return counted.astype(np.uint64)


def _on_device(
    arena: Arena, layers: list[_Layer], ids: Ints, index: Ints, intervals: Intervals
) -> int:
    from kvstow.memory.kernels import digest_cells

    one = layers[0]
    unit = _unit(one)
    if any(_unit(layer) != unit for layer in layers):
        return sum(_on_device(arena, [layer], ids, index, intervals) for layer in layers)
    place = one.place
    strides = (one.block_stride // unit, place.head_stride // unit, place.token_stride // unit)
    offsets = np.array([layer.place.offset // unit for layer in layers])
    seeds = np.array([seed("layer", layer.spec.name) for layer in layers], np.uint64)
    numbers = np.concatenate((ids, index, offsets, seeds.view(np.int64)))  # one copy for all
    there = torch.as_tensor(numbers, device=arena.device)
    n, m = len(ids), len(layers)
    return digest_cells(
        arena.bytes[: arena.nbytes // unit * unit].view({1: torch.uint8, 4: torch.uint32}[unit]),
        _device_keys(one.keys, unit, arena.device),
        (there[:n], there[n : 2 * n]),
        (there[2 * n : 2 * n + m], there[2 * n + m :]),
        strides,
        one.states,
        (*intervals[0], *intervals[1]),
        aligned=unit == 4 and arena.address % 16 == 0 and not any(
            number % 4 for number in (*strides, *offsets.tolist())),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _device_keys(keys: CellKeys, unit: int, device: torch.device) -> torch.Tensor:
    """Keys on a device, copied there once."""
    return torch.as_tensor(_keys_in(keys, unit).view(np.int64), device=device)
