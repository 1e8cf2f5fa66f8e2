"""A number for what some blocks hold, whatever the layout, the ranks, the device.

    digest = Σ  word · T(layer, state) · P(field, head, position)      modulo 2^64
           words

Two sides with different order, tensor parallelism or tokens per block get the same number for
the same content: words and keys are those of the whole model (`digest_keys`).
`docs/concepts/digest.md` says what it detects, and how surely.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

import numpy as np
import torch

from kvstow.errors import BlockError, SpecError
from kvstow.memory.arena import Arena
from kvstow.memory.digest_keys import (
    CellKeys,
    Words,
    cell_keys,
    few_heads,
    layer_seed,
    state_keys,
)
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints, ceil_div
from kvstow.route.blocks import Blocks, Tokens, first_missing
from kvstow.route.overlap import Interval
from kvstow.route.route import Claims

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
    to parts of fields (with those of `plan_sources`, what several ranks hold alike counts once),
    `layers` to some layers, `heads` to some of the model's heads. Blocks of a window
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
    what = DigestOf(
        blocks,
        num_tokens,
        layers=layers,
        start_token=start_token,
        claims=claims,
        heads=heads,
        every=every,
        phase=phase,
    )
    return prepared(arena, [what])()[0]


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
    parts = [_parts(arena, what) for what in digests]
    if arena.device.type == "cuda":
        return _on_device(arena, parts)
    return lambda: tuple(sum(_on_host(arena, p) for p in each) % MODULUS for each in parts)


# ── what counts ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Blocks that count in a digest, of pages that differ only in where they start.

    Of every layer, which has an `offset` and a `seed`, block `ids[i]` starts at
    `offset + ids[i] · block_stride` and holds `states` states, from number
    `logical[i] · states` on. Those inside `interval` count.
    """

    ids: Ints
    logical: Ints
    interval: Interval
    offsets: Ints
    seeds: Words
    keys: CellKeys
    states: int
    block_stride: int
    head_stride: int
    token_stride: int

    @property
    def unit(self) -> int:
        """The length of words; single bytes where cells do not start at words' multiples."""
        return self.keys.unit if self.are_multiples(self.keys.unit) else 1

    def are_multiples(self, number: int) -> bool:
        """Whether every cell starts at a multiple of this many bytes from the arena's base."""
        strides = self.block_stride, self.head_stride, self.token_stride
        return not any(stride % number for stride in strides) and not (self.offsets % number).any()


def _parts(arena: Arena, what: DigestOf) -> list[Part]:
    """The blocks of a digest by geometry of pages, those left out of which nothing counts."""
    _check(arena.layout, what)
    parts = [
        part
        for group, listed in _by_group(arena, what.blocks).items()
        for part in _group_parts(arena, group, listed, what)
    ]
    if what.every > 1:
        parts = [_sampled(part, what.every, what.phase) for part in parts]
    return [part for part in parts if len(part.ids)]


def _check(layout: Layout, what: DigestOf) -> None:
    """SpecError for layers, tokens or phases that do not exist: their digest would be 0."""
    unknown = [name for name in what.layers or () if name not in layout.layers]
    if unknown:
        raise SpecError(f"no layers {unknown[:8]} in the arena of {layout.model!r}")
    if min(what.start_token, what.num_tokens) < 0:
        raise SpecError(f"tokens [{what.start_token}, {what.num_tokens}) do not exist")
    if not 0 <= what.phase < what.every:
        raise SpecError(
            f"every {what.every}, phase {what.phase}: a phase is at least 0 and below every"
        )


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


def _group_parts(arena: Arena, number: int, listed: Blocks, what: DigestOf) -> Iterator[Part]:
    ids, group = arena.checked(number, listed.ids), arena.layout.groups[number].group
    for pages in arena.layout.page_sets[number]:
        names = [n for n in pages.layers if what.layers is None or n in what.layers]
        if not names:
            continue
        spec, place = pages.spec, pages.place
        low, high = counted_states(group, spec, what.num_tokens, what.start_token)
        at = _counting(group, spec, listed.index, (low, high))
        for first_head, keys, chosen in _keyed(spec, names, what):
            which = [i for i, name in enumerate(pages.layers) if name in chosen]
            yield Part(
                ids=ids[at],
                logical=listed.index[at],
                interval=(low, high),
                offsets=pages.offsets[which] + first_head * place.head_stride,
                seeds=np.array([layer_seed(pages.layers[i]) for i in which], np.uint64),
                keys=keys,
                states=spec.states,
                block_stride=place.block_stride,
                head_stride=place.head_stride,
                token_stride=place.token_stride,
            )


def _keyed(
    spec: LayerSpec, names: Sequence[str], what: DigestOf
) -> Iterator[tuple[int, CellKeys, set[str]]]:
    """Layers with the same keys: the first head that counts, keys from there on, and names."""
    by_keys: dict[CellKeys, set[str]] = {}
    if what.claims is None:
        by_keys[cell_keys(spec, None)] = set(names)
    else:
        for name in names:
            by_keys.setdefault(cell_keys(spec, what.claims.get(name, {})), set()).add(name)
    for keys, alike in by_keys.items():
        first, some = (0, keys) if what.heads is None else few_heads(keys, spec.heads, what.heads)
        if some.table.any():
            yield first, some, alike


def counted_states(group: Group, spec: LayerSpec, num_tokens: int, start_token: int) -> Interval:
    """States of a layer that the token after `num_tokens` looks at, from `start_token` on.

    A state of several tokens counts when one of them does; of summaries, the running one.
    """
    span, tokens = spec.tokens_per_state, Tokens(start_token, num_tokens).needed(group)
    if tokens.first >= tokens.end:
        return 0, 0
    return tokens.first // span, ceil_div(tokens.end, span)


def _counting(group: Group, spec: LayerSpec, index: Ints, interval: Interval) -> slice:
    """Which of the listed blocks count; BlockError for a list that lacks one."""
    first, end = interval[0] // spec.states, ceil_div(interval[1], spec.states)
    start, stop = np.searchsorted(index, (first, end)).tolist()
    if stop - start != end - first:
        missing = first_missing(index[start:stop], first, end)
        raise BlockError(
            f"group {group.name!r}: the digest needs logical blocks {missing.tolist()}, "
            f"the request lists {index[:8].tolist()}"
        )
    return slice(start, stop)


def _sampled(part: Part, every: int, phase: int) -> Part:
    """The states that leave `phase`, each as a block of its own that holds one state."""
    low, high = part.interval
    states = np.arange(low + (phase - low) % every, high, every)
    rows = part.ids[np.searchsorted(part.logical, states // part.states)]
    unit = gcd(part.block_stride, part.token_stride)
    starts = rows * part.block_stride + states % part.states * part.token_stride
    return replace(part, ids=starts // unit, logical=states, states=1, block_stride=unit)


# ── on the host ───────────────────────────────────────────────────────────────────────────

CHUNK_BYTES = 512 << 10
"""Cells gathered at a time on the host: they stay in the second-level cache."""


def _on_host(arena: Arena, part: Part) -> int:
    """The sum over one part."""
    unit, ids = part.unit, part.ids
    table = part.keys.in_words(unit)
    states = part.logical[:, None] * part.states + np.arange(part.states)
    counted = ((states >= part.interval[0]) & (states < part.interval[1])).astype(np.uint64)
    heads_outside = part.head_stride > part.token_stride
    step = max(1, CHUNK_BYTES // (part.states * table.size * unit))
    sums = np.zeros((), np.uint64)
    for offset, seed in zip(part.offsets.tolist(), part.seeds, strict=True):
        axes = [(len(table), part.head_stride), (part.states, part.token_stride)]
        outer, inner = axes if heads_outside else reversed(axes)
        cells = np.ndarray(  # as they lie: head or token outside
            (int(ids.max()) + 1, outer[0], inner[0], table.shape[1]),
            f"<u{unit}",
            arena.bytes.numpy(),
            offset,
            (part.block_stride, outer[1], inner[1], unit),
        )
        factors = state_keys(seed, states) * counted
        for at in range(0, len(ids), step):
            some = cells[ids[at : at + step]]
            if heads_outside:
                sum_ = np.einsum("bhnw,hw->bhn", some, table).sum(axis=1, dtype=np.uint64)
            else:
                sum_ = np.einsum("bnj,j->bn", some.reshape(*some.shape[:2], -1), table.reshape(-1))
            sums += (sum_ * factors[at : at + step]).sum(dtype=np.uint64)
    return int(sums)


# ── on a device ───────────────────────────────────────────────────────────────────────────


def _on_device(arena: Arena, digests: Sequence[Sequence[Part]]) -> Callable[[], tuple[int, ...]]:
    """Several digests in one copy and one launch; what is returned launches it."""
    from kvstow.memory.kernels.sums import block_sums

    parts = [part for each in digests for part in each]
    if not parts:
        return lambda: (0,) * len(digests)
    unit = min(part.unit for part in parts)
    tables = [part.keys.in_words(unit) for part in parts]
    first_keys = accumulate((table.size for table in tables), initial=0)
    numbers = [
        _numbers(part, table.shape, first_key, unit)
        for part, table, first_key in zip(parts, tables, first_keys, strict=False)
    ]
    entries = np.concatenate([_entries(part, i, unit) for i, part in enumerate(parts)], axis=1)
    there = torch.as_tensor(np.concatenate((entries.ravel(), *numbers)), device=arena.device)
    launch = block_sums(
        arena.bytes[: arena.nbytes // unit * unit].view({1: torch.uint8, 4: torch.uint32}[unit]),
        _device_keys(tuple(part.keys for part in parts), unit, arena.device),
        there[: entries.size].view(entries.shape),
        there[entries.size :],
        tile=(max(part.states for part in parts), max(table.shape[1] for table in tables)),
        aligned=unit == 4
        and arena.address % 16 == 0
        and all(part.are_multiples(16) for part in parts),
    )
    lengths = [sum(len(part.offsets) * len(part.ids) for part in each) for each in digests]
    slices = [slice(*pair) for pair in pairwise(accumulate(lengths, initial=0))]

    def take() -> tuple[int, ...]:
        sums = launch().cpu().numpy().view(np.uint64)
        return tuple(int(sums[each].sum(dtype=np.uint64)) for each in slices)

    return take


def _numbers(part: Part, keys: tuple[int, ...], first_key: int, unit: int) -> Ints:
    """What the kernel knows of a part, in words."""
    strides = part.head_stride // unit, part.token_stride // unit
    return np.array([*part.interval, part.states, *keys, *strides, first_key], np.int64)


def _entries(part: Part, number: int, unit: int) -> Ints:
    """What the kernel knows of each layer of each block of a part."""
    starts = np.add.outer(part.offsets, part.ids * part.block_stride)
    entries = np.empty((4, *starts.shape), np.int64)
    entries[0] = starts // unit
    entries[1] = part.seeds[:, None].view(np.int64)
    entries[2] = part.logical * part.states
    entries[3] = number
    return entries.reshape(4, -1)


@lru_cache(maxsize=16)
def _device_keys(keys: tuple[CellKeys, ...], unit: int, device: torch.device) -> torch.Tensor:
    """Keys on a device, one part's after the other's, copied there once."""
    tables = [each.in_words(unit).ravel() for each in keys]
    return torch.as_tensor(np.concatenate(tables).view(np.int64), device=device)
