"""A number for what some blocks hold, whatever the layout, the ranks, the device.

    digest = Σ  word · T(layer, state) · P(field, head, position)      modulo 2^64
           words

Two sides with different order, tensor parallelism or tokens per block get the same number for
the same content: words and keys are those of the whole model (`digest_keys`).
`docs/concepts/digest.md` says what it detects, and how surely.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import gcd
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import BlockError, SpecError
from kvstow.memory.arena import Arena
from kvstow.memory.digest_keys import CellKeys, Words, cell_keys, seed, shares, state_keys
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, PlacedGroup, placed_sections
from kvstow.plan.spec import Extent, LayerSpec
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.lanes import state_tokens
from kvstow.route.overlap import Interval
from kvstow.route.route import Claims

__all__ = ["MODULUS", "Intervals", "Listed", "counted_states", "digest", "prepared", "shares"]

MODULUS = 1 << 64

Intervals = tuple[Interval, Interval]

Listed = Mapping[int, Blocks | Sequence[int] | Ints] | Mapping[str, Blocks | Sequence[int] | Ints]
"""The blocks of a request by the number or the name of their group. Ids in place of `Blocks` are
those of the request's blocks from the first on."""


def digest(
    arena: Arena,
    blocks: Listed | Blocks | Sequence[int] | Ints,
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

    >>> from kvstow.memory.copy import copy
    >>> from kvstow.plan.group import grouped
    >>> from kvstow.plan.models import model_layers
    >>> from kvstow.plan.pack import packed
    >>> layout = packed(grouped(model_layers("Llama-3.2-1B").layers), num_slabs=8)
    >>> here, there = Arena(layout), Arena(layout)
    >>> _ = here.bytes.random_(0, 256)
    >>> copy(here, there, blocks=[1, 2], into=[7, 4]).wait()
    >>> digest(here, [1, 2], 25) == digest(there, [7, 4], 25)
    True
    >>> digest(here, [1, 2], 25) == digest(there, [4, 7], 25)
    False
    """
    return prepared(
        arena,
        blocks,
        num_tokens,
        layers=layers,
        start_token=start_token,
        claims=claims,
        heads=heads,
        every=every,
        phase=phase,
    )()


def prepared(
    arena: Arena,
    blocks: Listed | Blocks | Sequence[int] | Ints,
    num_tokens: int,
    *,
    layers: Collection[str] | None = None,
    start_token: int = 0,
    claims: Claims | None = None,
    heads: Interval | None = None,
    every: int = 1,
    phase: int = 0,
) -> Callable[[], int]:
    """A digest, ready to be taken: what can be done before the bytes are there is done.

    What is returned counts the bytes as they lie when it is called, as often as it is called;
    on CUDA, in the stream that is current now, and not in two threads at once.
    """
    _check(arena.layout, layers, (start_token, num_tokens), every, phase)
    on = _on_device if arena.device.type == "cuda" else _on_host
    counts: list[Callable[[], int | torch.Tensor]] = []
    for group, listed in _by_group(arena, blocks).items():
        ids = arena.checked(group, listed.ids)
        placed = arena.layout.groups[group]
        for pages in _pages(arena, group, layers, claims, heads):
            intervals = counted_states(placed.group, pages.spec, num_tokens, start_token)
            counting = _counting(placed.group, pages.spec, listed.index, intervals)
            part = pages, ids[counting], listed.index[counting]
            if every > 1:
                part = _picked(*part, intervals, every, phase)
            if len(part[1]):
                counts.append(on(arena, *part, intervals))

    def taken() -> int:
        running = [count() for count in counts]  # on CUDA all run before one is waited for
        return sum(map(int, running)) % MODULUS

    return taken


def _check(
    layout: Layout, layers: Collection[str] | None, tokens: Interval, every: int, phase: int
) -> None:
    """SpecError for what would count nothing and look like a digest."""
    unknown = [name for name in layers or () if name not in layout.layers]
    if unknown:
        raise SpecError(f"no layers {unknown[:8]} in the arena of {layout.model!r}")
    if min(tokens) < 0:
        raise SpecError(f"tokens [{tokens[0]}, {tokens[1]}) do not exist")
    if not 0 <= phase < every:
        raise SpecError(f"every {every}, phase {phase}: a phase is at least 0 and below every")


# ── which states count ────────────────────────────────────────────────────────────────────


def counted_states(group: Group, spec: LayerSpec, num_tokens: int, start_token: int) -> Intervals:
    """States of a layer that the token after `num_tokens` looks at, from `start_token` on.

    Two half-open intervals, the second one empty but for sinks. A state of several tokens
    counts when one of them does; of summaries, the running one.
    """
    span = state_tokens(spec)
    intervals = [
        (tokens.first // span, -(-tokens.end // span)) if tokens.first < tokens.end else (0, 0)
        for tokens in Tokens(start_token, num_tokens).needed(group)
    ]
    return intervals[0], intervals[1] if len(intervals) > 1 else (0, 0)


def _by_group(arena: Arena, blocks: Listed | Blocks | Sequence[int] | Ints) -> dict[int, Blocks]:
    """The blocks by the number of their group; those of the only group may come without it."""
    if isinstance(blocks, Mapping):
        return {
            arena.group(group): ids if isinstance(ids, Blocks) else Blocks.first(ids)
            for group, ids in blocks.items()
        }
    names = [placed.group.name for placed in arena.layout.groups]
    if len(names) > 1:
        raise BlockError(
            f"the layout has {len(names)} groups, and each has blocks of its own: {names}\n\n"
            f"hint: {{{names[0]!r}: [1, 2], …}}"
        )
    return {0: blocks if isinstance(blocks, Blocks) else Blocks.first(blocks)}


def _counting(group: Group, spec: LayerSpec, index: Ints, intervals: Intervals) -> slice | Ints:
    """Which of the listed blocks count; BlockError for a list that lacks one."""
    slices: list[slice] = []
    for low, high in intervals:
        first, end = low // spec.states, -(-high // spec.states)
        start, stop = np.searchsorted(index, (first, end)).tolist()
        if stop - start != end - first:
            missing = np.setdiff1d(np.arange(first, end), index)
            raise BlockError(
                f"group {group.name!r}: the digest needs logical blocks {missing[:8].tolist()}, "
                f"the request lists {index[:8].tolist()}"
            )
        slices.append(slice(start, stop))
    one, other = slices
    return one if other.start == other.stop else np.union1d(np.r_[one], np.r_[other])


# ── pages ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Layers whose pages, or sections of them, differ only in where they start, one `offset`
    and `seed` for each.

    Block `b` starts at `offset + b · block_stride` and holds `states` states. `spec` is the
    first layer's.
    """

    spec: LayerSpec
    keys: CellKeys
    states: int
    block_stride: int
    head_stride: int
    token_stride: int
    offsets: Ints
    seeds: Words

    @property
    def heads_outside(self) -> bool:
        return self.head_stride > self.token_stride

    def all_multiples(self, number: int) -> bool:
        """Whether every cell starts at a multiple of this many bytes from the arena's base."""
        strides = self.block_stride, self.head_stride, self.token_stride
        return not any(stride % number for stride in strides) and not (self.offsets % number).any()


_whole: WeakKeyDictionary[Arena, dict[int, list[_Pages]]] = WeakKeyDictionary()
"""The pages of whole groups: an arena's never change, and large models have many layers."""


def _pages(
    arena: Arena,
    group: int,
    layers: Collection[str] | None,
    claims: Claims | None,
    heads: Interval | None,
) -> list[_Pages]:
    """A group's layers, or some of them, or some of their heads; those with like pages together."""
    placed = arena.layout.groups[group]
    if layers is not None or claims is not None:
        alike = _alike(placed, layers, claims)
    else:
        known = _whole.setdefault(arena, {})
        alike = known.get(group) or known.setdefault(group, _alike(placed, None, None))
    if heads is None:
        return alike
    return [few for pages in alike if (few := _with_heads(pages, heads)) is not None]


def _alike(
    placed: PlacedGroup, layers: Collection[str] | None, claims: Claims | None
) -> list[_Pages]:
    kinds: dict[tuple[CellKeys, tuple[int, ...]], list[tuple[LayerSpec, int]]] = {}
    sections = (
        section
        for layer, place in zip(placed.group.layers, placed.placements, strict=True)
        for section in placed_sections(layer, place)
    )
    for spec, place in sections:
        if layers is None or spec.name in layers:
            numbers = spec.states, place.block_stride, place.head_stride, place.token_stride
            kind = cell_keys(spec, claims), numbers
            kinds.setdefault(kind, []).append((spec, place.offset))
    return [
        _Pages(
            members[0][0],
            keys,
            *numbers,
            offsets=np.array([offset for _, offset in members]),
            seeds=np.array([seed("layer", spec.name) for spec, _ in members], np.uint64),
        )
        for (keys, numbers), members in kinds.items()
    ]


def _with_heads(pages: _Pages, heads: Interval) -> _Pages | None:
    """The part of the pages that some heads are, if they hold any of them."""
    some = _few_heads(pages.keys, pages.spec.heads, heads)
    if some is None:
        return None
    first, keys = some
    return replace(pages, keys=keys, offsets=pages.offsets + first * pages.head_stride)


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


def _picked(
    pages: _Pages, ids: Ints, index: Ints, intervals: Intervals, every: int, phase: int
) -> tuple[_Pages, Ints, Ints]:
    """The states that leave `phase`, each as a block of its own that holds one state."""
    one, other = (np.arange(lo + (phase - lo) % every, hi, every) for lo, hi in intervals)
    states = np.union1d(one, other) if len(other) else one
    rows, slots = ids[np.searchsorted(index, states // pages.states)], states % pages.states
    unit = gcd(pages.block_stride, pages.token_stride)
    blocks = (rows * pages.block_stride + slots * pages.token_stride) // unit
    return replace(pages, states=1, block_stride=unit), blocks, states


def _unit(pages: _Pages) -> int:
    """The length of words; single bytes where cells do not start at words' multiples."""
    return pages.keys.unit if pages.all_multiples(pages.keys.unit) else 1


def _keys_in(keys: CellKeys, unit: int) -> Words:
    """The keys for words of this length."""
    if unit == keys.unit:
        return keys.table
    shifts = np.arange(keys.unit, dtype=np.uint64) * np.uint64(8)
    return (keys.table[..., None] << shifts).reshape(keys.table.shape[0], -1)


# ── on the host ───────────────────────────────────────────────────────────────────────────

CHUNK_BYTES = 512 << 10
"""Cells gathered at a time on the host: they stay in the second-level cache."""


def _on_host(
    arena: Arena, pages: _Pages, ids: Ints, index: Ints, intervals: Intervals
) -> Callable[[], int]:
    return partial(_host_sum, arena, pages, ids, index, intervals)


def _host_sum(arena: Arena, pages: _Pages, ids: Ints, index: Ints, intervals: Intervals) -> int:
    unit, states = _unit(pages), pages.states
    table = _keys_in(pages.keys, unit)
    states_at = index[:, None] * states + np.arange(states)
    counted = _inside(states_at, intervals)
    step = max(1, CHUNK_BYTES // (states * table.size * unit))
    sums = np.zeros((), np.uint64)
    for offset, layer in zip(pages.offsets.tolist(), pages.seeds, strict=True):
        cells = _cells(arena, pages, offset, table.shape, unit, int(ids.max()) + 1)
        factors = state_keys(layer, states_at) * counted
        for at in range(0, len(ids), step):
            part = cells[ids[at : at + step]]  # as it lies: head or token outside
            if pages.heads_outside:
                inner = np.einsum("bhnw,hw->bhn", part, table).sum(axis=1, dtype=np.uint64)
            else:
                inner = np.einsum("bnj,j->bn", part.reshape(*part.shape[:2], -1), table.reshape(-1))
            sums += (inner * factors[at : at + step]).sum(dtype=np.uint64)
    return int(sums)


def _cells(
    arena: Arena,
    pages: _Pages,
    offset: int,
    table_shape: tuple[int, ...],
    unit: int,
    num_blocks: int,
) -> npt.NDArray[np.uint32]:
    """Cells of a layer in words: block, then head and token as they lie, then word."""
    heads, words = table_shape
    axes = [(heads, pages.head_stride), (pages.states, pages.token_stride)]
    outer, inner = axes if pages.heads_outside else reversed(axes)
    return np.ndarray(
        (num_blocks, outer[0], inner[0], words),
        f"<u{unit}",
        arena.bytes.numpy(),
        offset,
        (pages.block_stride, outer[1], inner[1], unit),
    )


def _inside(states: Ints, intervals: Intervals) -> Words:
    (low, high), (low2, high2) = intervals
    counted = ((states >= low) & (states < high)) | ((states >= low2) & (states < high2))
    return counted.astype(np.uint64)


# ── on a device ───────────────────────────────────────────────────────────────────────────


def _on_device(
    arena: Arena, pages: _Pages, ids: Ints, index: Ints, intervals: Intervals
) -> Callable[[], torch.Tensor]:
    from kvstow.memory.kernels.digest import cell_sums

    unit = _unit(pages)
    offsets = pages.offsets // unit
    numbers = np.concatenate((ids, index, offsets, pages.seeds.view(np.int64)))  # one copy for all
    there = torch.as_tensor(numbers, device=arena.device)
    n, m = len(ids), len(offsets)
    return cell_sums(
        arena.bytes[: arena.nbytes // unit * unit].view({1: torch.uint8, 4: torch.uint32}[unit]),
        _device_keys(pages.keys, unit, arena.device),
        (there[:n], there[n : 2 * n]),
        (there[2 * n : 2 * n + m], there[2 * n + m :]),
        (pages.block_stride // unit, pages.head_stride // unit, pages.token_stride // unit),
        pages.states,
        (*intervals[0], *intervals[1]),
        aligned=unit == 4 and arena.address % 16 == 0 and pages.all_multiples(16),
    )


@lru_cache(maxsize=64)
def _device_keys(keys: CellKeys, unit: int, device: torch.device) -> torch.Tensor:
    """Keys on a device, copied there once."""
    return torch.as_tensor(_keys_in(keys, unit).view(np.int64), device=device)
