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
from kvstow.memory.digest_keys import CellKeys, Words, cell_keys, layer_seed, state_keys
from kvstow.plan.group import Group
from kvstow.plan.layout import PageSet
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints, ceil_div
from kvstow.route.blocks import Blocks, Tokens, first_missing
from kvstow.route.overlap import Interval
from kvstow.route.route import Claims

MODULUS = 1 << 64

Listed = Blocks | Sequence[int] | Ints
"""A request's blocks of one group; ids stand for its blocks from the first on."""


def digest(
    arena: Arena,
    blocks: Mapping[int, Listed] | Mapping[str, Listed] | Listed,
    num_tokens: int,
) -> int:
    """The digest, below 2^64, of what a request's blocks hold of its first `num_tokens` tokens.

    Blocks are listed by the number or the name of their group, or alone where there is one group;
    of a window group they count as far as the window of the next token reaches. On CUDA it runs
    in the current stream, and waits for the result. `prepared` takes several, or parts of one.

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
    by_group = blocks if isinstance(blocks, Mapping) else {arena.only_group(): blocks}
    listed = {
        arena.group(group): ids if isinstance(ids, Blocks) else Blocks.first(ids)
        for group, ids in by_group.items()
    }
    return prepared(arena, [DigestOf(listed, num_tokens)])()[0]


@dataclass(frozen=True, slots=True)
class DigestOf:
    """What one digest counts: tokens `[start_token, num_tokens)` of blocks, by group.

    Sums over ranks, modulo 2^64, are digests of all that the ranks hold. `claims` restricts it
    to parts of fields (with those of `sources`, what several ranks hold alike counts once),
    `layers` to some layers, `heads` to some of the model's heads. Of the states that count, those
    count whose number, divided by `every`, leaves `phase`; no other is read.
    """

    blocks: Mapping[int, Blocks]
    num_tokens: int
    _: KW_ONLY
    layers: Collection[str] | None = None
    start_token: int = 0
    claims: Claims | None = None
    heads: Interval | None = None
    every: int = 1
    phase: int = 0

    def __post_init__(self) -> None:
        if min(self.start_token, self.num_tokens) < 0:
            raise SpecError(f"tokens [{self.start_token}, {self.num_tokens}) do not exist")
        if not 0 <= self.phase < self.every:
            raise SpecError(
                f"every {self.every}, phase {self.phase}: a phase is at least 0 and below every"
            )


class DigestCount:
    """Digests, ready to be taken, as often as wanted: of the bytes as they lie when it is started.

    On CUDA it runs in the stream that is current then, and not in two threads at once.
    """

    def __init__(self, take: Callable[[], Callable[[], tuple[int, ...]]]) -> None:
        self._take = take
        self._values: Callable[[], tuple[int, ...]] | None = None

    def start(self) -> None:
        """Begin to count; on a device, without waiting for it."""
        self._values = self._take()

    def values(self) -> tuple[int, ...]:
        """The digests, as soon as they are counted."""
        assert self._values is not None, "start it first"
        return self._values()

    def __call__(self) -> tuple[int, ...]:
        """Count, and wait for it."""
        self.start()
        return self.values()


def prepared(arena: Arena, digests: Sequence[DigestOf]) -> DigestCount:
    """What counts digests: what can be done before the bytes are there is done."""
    parts = [_parts(arena, what) for what in digests]
    if arena.device.type == "cuda":
        return DigestCount(_on_device(arena, parts))

    def take() -> Callable[[], tuple[int, ...]]:
        values = tuple(sum(_on_host(arena, p) for p in each) % MODULUS for each in parts)
        return lambda: values

    return DigestCount(take)


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
    parts = [
        _sampled(part, what.every, what.phase) if what.every > 1 else part
        for number, listed in what.blocks.items()
        for pages in arena.layout.page_sets[number]
        for part in _parts_of(arena, number, pages, listed, what)
    ]
    return [part for part in parts if len(part.ids)]


def _parts_of(
    arena: Arena, number: int, pages: PageSet, listed: Blocks, what: DigestOf
) -> Iterator[Part]:
    """One part for all layers that have the same keys."""
    whole = cell_keys(pages.spec, None, what.heads) if what.claims is None else None
    claims: Claims = what.claims or {}
    layers: dict[CellKeys, list[int]] = {}
    for i, name in enumerate(pages.layers):
        if what.layers is None or name in what.layers:
            keys = whole or cell_keys(pages.spec, claims.get(name, {}), what.heads)
            layers.setdefault(keys, []).append(i)
    if not layers:
        return
    group, place = arena.layout.groups[number].group, pages.place
    interval = counted_states(group, pages.spec, what.num_tokens, what.start_token)
    at = _counting(group, pages.spec, listed.index, interval)
    ids = arena.checked(number, listed.ids[at])
    for keys, alike in layers.items():
        if keys.table.size:
            yield Part(
                ids=ids,
                logical=listed.index[at],
                interval=interval,
                offsets=pages.offsets[alike] + keys.first_head * place.head_stride,
                seeds=np.array([layer_seed(pages.layers[i]) for i in alike], np.uint64),
                keys=keys,
                states=pages.spec.states,
                block_stride=place.block_stride,
                head_stride=place.head_stride,
                token_stride=place.token_stride,
            )


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
    counts = ((states >= part.interval[0]) & (states < part.interval[1])).astype(np.uint64)
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
        factors = state_keys(seed, states) * counts
        for at in range(0, len(ids), step):
            some = cells[ids[at : at + step]]
            if heads_outside:
                sum_ = np.einsum("bhnw,hw->bhn", some, table).sum(axis=1, dtype=np.uint64)
            else:
                sum_ = np.einsum("bnj,j->bn", some.reshape(*some.shape[:2], -1), table.reshape(-1))
            sums += (sum_ * factors[at : at + step]).sum(dtype=np.uint64)
    return int(sums)


# ── on a device ───────────────────────────────────────────────────────────────────────────


def _on_device(
    arena: Arena, digests: Sequence[Sequence[Part]]
) -> Callable[[], Callable[[], tuple[int, ...]]]:
    """Several digests in one copy and one launch. What is returned launches it, and returns what
    waits for its numbers."""
    from kvstow.memory.kernels.sums import block_sums

    parts = [part for each in digests for part in each]
    if not parts:
        return lambda: lambda: (0,) * len(digests)
    unit = min(part.unit for part in parts)
    tables = [part.keys.in_words(unit) for part in parts]
    first_keys = accumulate((table.size for table in tables), initial=0)
    facts = [
        [*part.interval, part.states, *table.shape, part.head_stride // unit,
         part.token_stride // unit, first_key]
        for part, table, first_key in zip(parts, tables, first_keys, strict=False)
    ]  # fmt: skip
    entries = np.concatenate([_entries(part, i, unit) for i, part in enumerate(parts)], axis=1)
    there = torch.as_tensor(np.concatenate((entries.ravel(), np.ravel(facts))), device=arena.device)
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

    def take() -> Callable[[], tuple[int, ...]]:
        sums = launch()
        return lambda: values(sums)

    def values(sums: torch.Tensor) -> tuple[int, ...]:
        here = sums.cpu().numpy().view(np.uint64)
        return tuple(int(here[each].sum(dtype=np.uint64)) for each in slices)

    return take


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
