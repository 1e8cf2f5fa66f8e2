"""Does an attention kernel honour the strides of packed rows?

A kernel is run on caches that lie in rows, with one stride after the other made longer than the
kernel might assume. All bytes around the pages read as not-a-number, block tables are random,
and the result is compared with a float64 computation that never saw the cache:

    ┃ NaN ┃ page of block 2 ┃ NaN ┃ page of block 0 ┃ NaN …

So a kernel that computes an address from a wrong stride reads NaN or another token's content.
Of a window, blocks that the next token does not see are not listed, as in service: their place
in the block table is 0, the null block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstow.errors import SpecError
from kvstow.memory.arena import POISON, TORCH_TYPES, Arena
from kvstow.plan.layout import Layout
from kvstow.plan.spec import DType
from kvstow.plan.view import ceil_div
from kvstow.testing.strides import (
    KERNEL_ERRORS,
    SEED,
    TOLERANCE,
    KernelCheck,
    KernelReport,
    check_callable,
    element_of,
    shapes,
    stride_variants,
    window_of,
)

PagedAttention = Callable[..., torch.Tensor]
"""`(query [sequence, head, dim], keys [block, head, token, dim], values [block, head, token, dim],
block_table [sequence, logical block], lengths [sequence]) → [sequence, head, dim]`: one new token
per sequence attends to its `lengths` cached tokens, scores scaled by `dim ** -0.5`. Keys and
values are views into the arena, as strided as the layout says. Where layers have a window the
kernel is called with `window=tokens` as well: it sees the last so many cached tokens."""

LatentAttention = Callable[..., torch.Tensor]
"""`(query [sequence, head, dim], latents [block, token, dim], block_table, lengths) → [sequence,
head, latent]`: MLA, absorbed. `dim` is the latent's and the rotary part's together, all heads share
one latent, scores are scaled by `dim ** -0.5`, and values are the latent's part alone."""

_FP8 = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)


def check_attention(
    attention: PagedAttention,
    layout: Layout,
    *,
    device: str | torch.device = "cpu",
    query_groups: int = 2,
) -> KernelReport:
    """Run a kernel on the layout itself, and on placements that differ in one stride each.

    Looks at one layer of each shape that has fields `k` and `v` with one axis.
    `query_groups` query heads share a kv head. Raises SpecError for a kernel that cannot be
    called so or returns something else, and for a layout that is too small to tell.
    """
    trial = _Trial(attention, _KEYS_AND_VALUES, torch.device(device), query_groups)
    return trial.report(layout, with_variants=True)


def check_latent_attention(
    attention: LatentAttention,
    layout: Layout,
    *,
    device: str | torch.device = "cpu",
    query_heads: int = 4,
) -> KernelReport:
    """`check_attention` for MLA: layers with fields `latent` and `rope` of one element type."""
    trial = _Trial(attention, _LATENTS, torch.device(device), query_heads)
    return trial.report(layout, with_variants=True)


def check_in_place(
    attention: PagedAttention,
    layout: Layout,
    *,
    device: str | torch.device = "cpu",
    query_groups: int = 2,
) -> KernelReport:
    """Run a kernel on the layout itself alone: right or wrong there, not why."""
    trial = _Trial(attention, _KEYS_AND_VALUES, torch.device(device), query_groups)
    return trial.report(layout, with_variants=False)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a kernel is called with: a query, views of these fields, block table and lengths."""

    fields: tuple[str, str]
    arguments: tuple[str, ...]
    in_one_view: bool

    def views(self, arena: Arena, layer: str) -> list[torch.Tensor]:
        if self.in_one_view:
            return [arena.tensor(layer)[:, 0]]
        return [arena.field(layer, field) for field in self.fields]


_KEYS_AND_VALUES = _Subject(
    ("k", "v"), ("query", "keys", "values", "block_table", "lengths"), in_one_view=False
)
_LATENTS = _Subject(
    ("latent", "rope"), ("query", "latents", "block_table", "lengths"), in_one_view=True
)


@dataclass(frozen=True, slots=True)
class _Trial:
    attention: Callable[..., torch.Tensor]
    subject: _Subject
    device: torch.device
    query_groups: int

    def report(self, layout: Layout, *, with_variants: bool) -> KernelReport:
        """Try the kernel on one layer of each shape; where it is right, with not-a-number in
        unfilled slots as well."""
        checks: list[KernelCheck] = []
        needs_clean_tail = False
        for layer in shapes(layout, self.subject.fields):
            variants = stride_variants(layout.layers[layer][1]) if with_variants else []
            placed = {"the layout itself": layout, **dict(variants)}
            right = {name: self.check(each, layer, name) for name, each in placed.items()}
            checks += right.values()
            plain = "compact" if with_variants else "the layout itself"
            if right[plain].is_right:
                dirty = self.check(placed[plain], layer, "unfilled slots", tail=float("nan"))
                needs_clean_tail = needs_clean_tail or not dirty.is_right
        return KernelReport(tuple(checks), needs_clean_tail)

    def check(self, layout: Layout, layer: str, name: str, *, tail: float = 1.0) -> KernelCheck:
        """Fill a poisoned arena with random sequences and run the kernel once."""
        group, spec, _ = layout.layers[layer]
        dtype, window = element_of(spec, self.subject.fields), window_of(spec)
        named = {} if window is None else {"window": window}
        check_callable(self.attention, self.subject.arguments, **named)
        rng = np.random.Generator(np.random.PCG64(SEED))
        lengths, table = requests(rng, layout.num_blocks(group), spec.states)
        with Arena(layout, device=self.device) as arena:
            arena.bytes.fill_(POISON)
            contents = _written(rng, arena, layer, self.subject.fields, (lengths, table), tail)
            if window is not None:
                _forget(arena, layer, self.subject.fields, (lengths, table), window, tail)
            keys, values = contents
            if self.subject.in_one_view:
                keys, values = torch.cat(contents, dim=-1), contents[0]
            shape = (len(lengths), spec.heads.size * self.query_groups, keys.shape[-1])
            query = torch.as_tensor(rng.standard_normal(shape))
            query = query.to(torch.bfloat16 if dtype in _FP8 else TORCH_TYPES[dtype])
            before = arena.bytes.clone()
            expected = reference(query, keys, values, lengths, window)
            try:
                returned = self.attention(
                    query.to(self.device),
                    *self.subject.views(arena, layer),
                    torch.as_tensor(table, dtype=torch.int32, device=self.device),
                    torch.as_tensor(lengths, dtype=torch.int32, device=self.device),
                    **named,
                )
            except KERNEL_ERRORS as problem:
                why = f"{type(problem).__name__}: {problem}"
                return KernelCheck(layer, name, why, is_refused=True)
            wrote = not torch.equal(before, arena.bytes)
        error = _difference(returned, expected)
        result = f"error {error:.1e}" + (", wrote to the cache" * wrote)
        return KernelCheck(layer, name, result, is_right=not wrote and error <= TOLERANCE[dtype])


def _difference(returned: object, expected: torch.Tensor) -> float:
    """‖result − reference‖ / ‖reference‖; SpecError for something of another shape."""
    if not isinstance(returned, torch.Tensor):
        raise SpecError(f"the kernel returned {type(returned).__name__}, not a tensor")
    if returned.shape != expected.shape:
        raise SpecError(
            f"the kernel returned shape {tuple(returned.shape)}, not {tuple(expected.shape)}"
            "\n\nhint: one row per sequence and query head"
        )
    off = returned.detach().to("cpu", torch.float64) - expected
    return float((off.square().sum() / expected.square().sum()).sqrt())


Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Lengths = list[int]
Requests = tuple[Lengths, Table]


def requests(rng: np.random.Generator, num_blocks: int, states: int) -> Requests:
    """Sequences of awkward lengths, and blocks for them in random order; block 0 is nobody's."""
    wished = [1, states, states + 1, 2 * states, 3 * states - 1, 3 * states + states // 2]
    ids = rng.permutation(np.arange(1, num_blocks))
    lengths: Lengths = []
    used = 0
    width = max(1, *(ceil_div(length, states) for length in wished))
    table = np.zeros((len(wished), width), np.int64)
    for length in wished:
        count = ceil_div(length, states)
        if length < 1 or used + count > len(ids):
            continue
        table[len(lengths), :count] = ids[used : used + count]
        lengths.append(length)
        used += count
    if not lengths or max(lengths) <= states:
        raise SpecError(
            f"a layout of {num_blocks} blocks has no room for a sequence of two blocks beside "
            f"shorter ones, so nothing would be tested\n\nhint: {_ENOUGH_BLOCKS} blocks are enough"
        )
    return lengths, table[: len(lengths)]


_ENOUGH_BLOCKS = 15
"""For all sequences that are wished for, and the null block."""


def _forget(
    arena: Arena,
    layer: str,
    fields: Sequence[str],
    requests: Requests,
    window: int,
    tail: float,
) -> None:
    """Give back the blocks before each sequence's window: the table has the null block there.

    What lies in them, and in slots before the window, is as good as what lies in unfilled slots.
    """
    lengths, table = requests
    for field in fields:
        view = arena.field(layer, field)
        junk = torch.full((), 100.0 * tail, dtype=torch.float32).to(view.dtype)
        view[0] = junk
        for i, length in enumerate(lengths):
            for token in range(max(0, length - window)):
                block, slot = int(table[i, token // view.shape[2]]), token % view.shape[2]
                view[block, :, slot] = junk
    for i, length in enumerate(lengths):
        table[i, : max(0, length - window) // arena.layout.layers[layer][1].states] = 0


def _written(
    rng: np.random.Generator,
    arena: Arena,
    layer: str,
    fields: Sequence[str],
    requests: Requests,
    tail: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values for every token, put where they belong; unfilled slots of a
    sequence's blocks hold `tail` times something large. Contents are `[sequence, token, head,
    dim]`."""
    lengths, table = requests
    contents: list[torch.Tensor] = []
    for field in fields:
        view = arena.field(layer, field)
        heads, states, dim = view.shape[1:]
        content = torch.as_tensor(rng.standard_normal((len(lengths), max(lengths), heads, dim)))
        content = content.to(view.dtype)
        for i, length in enumerate(lengths):
            for logical in range(ceil_div(length, states)):
                start = logical * states
                page = torch.full((states, heads, dim), 100.0 * tail).to(view.dtype)
                filled = min(states, length - start)
                page[:filled] = content[i, start : start + filled]
                view[int(table[i, logical])] = page.transpose(0, 1).to(view.device)
        contents.append(content)
    return contents[0], contents[1]


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: Lengths,
    window: int | None = None,
) -> torch.Tensor:
    """The same attention in float64, from contents `[sequence, token, head, dim]`."""
    groups = query.shape[1] // keys.shape[2]
    rows: list[torch.Tensor] = []
    for i, length in enumerate(lengths):
        seen = slice(0 if window is None else max(0, length - window), length)
        k = keys[i, seen].double().repeat_interleave(groups, dim=1)
        v = values[i, seen].double().repeat_interleave(groups, dim=1)
        scores = torch.einsum("hd,thd->ht", query[i].double(), k) * query.shape[-1] ** -0.5
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v))
    return torch.stack(rows)
