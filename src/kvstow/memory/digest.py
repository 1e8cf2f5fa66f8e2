"""A number for what some blocks hold, whatever the layout, the ranks, the device.

    digest = Σ  word · T(layer, state) · P(field, head, position)      modulo 2^64
           words

Two sides with different order, tensor parallelism or tokens per block get the same number for
the same content: words and keys are those of the whole model (`digest_keys`).
`docs/concepts/digest.md` says what it detects, and how surely.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstow.errors import BlockError, SpecError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.digest_cells import CopiedCells, are_few, are_few_copies, few_on_device
from kvstow.memory.digest_device import on_device
from kvstow.memory.digest_keys import Words, shares, state_keys
from kvstow.memory.digest_pages import (
    CountedBlocks,
    Intervals,
    Pages,
    keys_in,
    pages_of,
    picked,
    unit_of,
)
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, Tokens, first_missing
from kvstow.route.lanes import state_tokens
from kvstow.route.overlap import Interval
from kvstow.route.route import Claims

__all__ = [
    "MODULUS",
    "DigestOf",
    "Listed",
    "copied",
    "counted_states",
    "digest",
    "prepared",
    "shares",
]

MODULUS = 1 << 64

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
    asked = DigestOf(
        blocks,
        num_tokens,
        layers=layers,
        start_token=start_token,
        claims=claims,
        heads=heads,
        every=every,
        phase=phase,
    )
    return prepared(arena, [asked])()[0]


@dataclass(frozen=True, slots=True)
class DigestOf:
    """What one digest counts, as `digest` says."""

    blocks: "Listed | Blocks | Sequence[int] | Ints"
    num_tokens: int
    _: KW_ONLY
    layers: Collection[str] | None = None
    start_token: int = 0
    claims: Claims | None = None
    heads: Interval | None = None
    every: int = 1
    phase: int = 0


def prepared(arena: Arena, digests: Sequence[DigestOf]) -> Callable[[], tuple[int, ...]]:
    """Digests, ready to be taken: what can be done before the bytes are there is done.

    What is returned counts the bytes as they lie when it is called, as often as it is called;
    on CUDA, in the stream that is current now, and not in two threads at once.
    """
    parts = [_parts(arena, asked) for asked in digests]
    if arena.device.type == "cuda" and are_few(parts):
        return few_on_device(arena, parts)
    on = on_device if arena.device.type == "cuda" else _on_host
    counts = [[on(arena, *part) for part in each] for each in parts]

    def taken() -> tuple[int, ...]:
        running = [[count() for count in each] for each in counts]  # all run before one is awaited
        return tuple(sum(map(int, each)) % MODULUS for each in running)

    return taken


def copied(arena: Arena, digests: Sequence[DigestOf]) -> CopiedCells | None:
    """What digests count, on its way to the host, if it is a few cells of a device: no kernel
    runs for it. It starts after what the current stream was given before."""
    if arena.device.type != "cuda" or not cuda.has_batch():
        return None
    parts = [_parts(arena, asked) for asked in digests]
    return CopiedCells(arena, parts) if are_few_copies(parts) else None


def _parts(arena: Arena, asked: DigestOf) -> list[CountedBlocks]:
    """The blocks of a digest by like pages, those left out of which nothing counts."""
    tokens = asked.start_token, asked.num_tokens
    _check(arena.layout, asked.layers, tokens, asked.every, asked.phase)
    found: list[CountedBlocks] = []
    for group, listed in _by_group(arena, asked.blocks).items():
        ids = arena.checked(group, listed.ids)
        placed = arena.layout.groups[group]
        for pages in pages_of(arena, group, asked.layers, asked.claims, asked.heads):
            intervals = counted_states(placed.group, pages.spec, tokens[1], tokens[0])
            counting = _counting(placed.group, pages.spec, listed.index, intervals)
            part = CountedBlocks(pages, ids[counting], listed.index[counting], intervals)
            found.append(picked(part, asked.every, asked.phase) if asked.every > 1 else part)
    return [part for part in found if len(part.ids)]


def _check(
    layout: Layout, layers: Collection[str] | None, tokens: Interval, every: int, phase: int
) -> None:
    """SpecError for layers, tokens or phases that do not exist: their digest would be 0."""
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
            missing = first_missing(index[start:stop], first, end)
            raise BlockError(
                f"group {group.name!r}: the digest needs logical blocks {missing.tolist()}, "
                f"the request lists {index[:8].tolist()}"
            )
        slices.append(slice(start, stop))
    one, other = slices
    return one if other.start == other.stop else np.union1d(np.r_[one], np.r_[other])


# ── on the host ───────────────────────────────────────────────────────────────────────────

CHUNK_BYTES = 512 << 10
"""Cells gathered at a time on the host: they stay in the second-level cache."""


def _on_host(
    arena: Arena, pages: Pages, ids: Ints, index: Ints, intervals: Intervals
) -> Callable[[], int]:
    return partial(_host_sum, arena, pages, ids, index, intervals)


def _host_sum(arena: Arena, pages: Pages, ids: Ints, index: Ints, intervals: Intervals) -> int:
    unit, states = unit_of(pages), pages.states
    table = keys_in(pages.keys, unit)
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
    pages: Pages,
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
