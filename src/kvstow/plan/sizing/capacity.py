"""What requests cost in a layout, exactly: rows, bytes, slabs, concurrency.

A request needs a fixed part (windows, states, encoder rows: bounded for any length) and
a part that grows with its tokens. Slabs are handed out whole, so `k` requests fit when
their rows, rounded up to slabs group by group, do. That is kvstow's own packing; what fits into
the blocks of vLLM is `vllm_concurrency`.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

from kvstow.plan.group import Group, level_pages
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import Chunk, Encoder, Full, State, Window, seen_blocks
from kvstow.plan.view import ceil_div

PREFILL_TOKENS = 2048
"""Tokens computed in one step while a prompt is read: one request at a time does so."""


def request_rows(layout: Layout, num_tokens: int, *, in_flight: int = 1) -> tuple[int, ...]:
    """Rows per group of a request of `num_tokens`, at its fullest moment."""
    return tuple(rows.group.rows_needed(num_tokens, in_flight=in_flight) for rows in layout.groups)


def request_bytes(layout: Layout, num_tokens: int) -> int:
    """Bytes of those rows, padding included."""
    rows = request_rows(layout, num_tokens)
    return sum(n * layout.row_stride(g) for g, n in enumerate(rows))


def fixed_bytes(layout: Layout) -> int:
    """The part that does not grow: the most that windows, states and encoder rows take."""
    return sum(
        (rows.group.rows_bound(in_flight=1) or 0) * layout.row_stride(g)
        for g, rows in enumerate(layout.groups)
    )


def stored_bytes(layout: Layout, num_tokens: int, shared_tokens: int = 0) -> tuple[int, int]:
    """Bytes of the rows that whoever goes on from `num_tokens` needs: of each request, and of the
    first `shared_tokens` of all, which are there once."""
    each = once = 0
    for g, rows in enumerate(layout.groups):
        group = rows.group
        blocks = len(seen_blocks(group.retention, num_tokens, group.block_tokens))
        shared = shared_tokens // group.block_tokens if isinstance(group.retention, Full) else 0
        each += (blocks - shared) * layout.row_bytes(g)
        once += shared * layout.row_bytes(g)
    return each, once


def bytes_per_token(layout: Layout) -> Fraction:
    """The part that grows, per token."""
    return sum(
        (
            Fraction(layout.row_stride(g), rows.group.block_tokens)
            for g, rows in enumerate(layout.groups)
            if rows.group.rows_bound(in_flight=1) is None
        ),
        Fraction(0),
    )


def slabs_needed(layout: Layout, num_requests: int, num_tokens: int, shared_tokens: int = 0) -> int:
    """Slabs that so many requests take at once, one of them in the middle of its prefill.

    Blocks of the first `shared_tokens` are there once for all, where every token is kept.
    """
    return _slabs(layout, num_requests, _each_and_once(layout, num_tokens, shared_tokens))


Rows = Sequence[tuple[int, int]]
"""Per group, the rows of each further request, and those of the first."""


def _each_and_once(layout: Layout, num_tokens: int, shared_tokens: int) -> Rows:
    """The first one is in the middle of its prefill, and the others have its shared blocks."""
    groups = [rows.group for rows in layout.groups]
    steady = request_rows(layout, num_tokens)
    busiest = request_rows(layout, num_tokens, in_flight=PREFILL_TOKENS)
    shared = [
        shared_tokens // group.block_tokens if isinstance(group.retention, Full) else 0
        for group in groups
    ]
    return [(n - s, most) for n, s, most in zip(steady, shared, busiest, strict=True)]


def _slabs(layout: Layout, num_requests: int, rows: Rows) -> int:
    def needed(group: int) -> int:
        each, once = rows[group]
        return ceil_div((num_requests - 1) * each + once, layout.groups[group].rows_per_slab)

    return max(sum(map(needed, sharing)) for sharing in layout.sharing)


def fits(layout: Layout, num_requests: int, num_tokens: int) -> bool:
    """Whether so many requests fit at once, one of them in the middle of its prefill."""
    return slabs_needed(layout, num_requests, num_tokens) <= layout.num_slabs - NULL_SLABS


def concurrency(layout: Layout, num_tokens: int, shared_tokens: int = 0) -> float:
    """How many requests of `num_tokens` fit, were slabs divisible: as vLLM counts it."""
    rows = _each_and_once(layout, num_tokens, shared_tokens)
    whole = request_rows(layout, num_tokens)
    counts: list[float] = []
    for sharing in layout.sharing:
        part = {g: Fraction(1, layout.groups[g].rows_per_slab) for g in sharing}
        each = sum(rows[g][0] * part[g] for g in sharing)
        once = sum((whole[g] - rows[g][0]) * part[g] for g in sharing)
        counts.append(float((layout.num_slabs - NULL_SLABS - once) / each))
    return max(0.0, min(counts))


# ── vLLM's blocks ─────────────────────────────────────────────────────────────────────


def vllm_concurrency(
    groups: Sequence[Group], nbytes: int, num_tokens: int, *, in_flight: int, shared_tokens: int = 0
) -> float:
    """How many requests of `num_tokens` fit into so many bytes, as vLLM counts it in its log.

    It cuts each kind of layers into groups of equally many, pads their pages to one size, and
    lets all of them draw on one pool: a block of any of them takes the same bytes. A request holds
    of a window what it sees and what is `in_flight`, and of recurrent layers the running
    state and a checkpoint. Where all layers are of one kind, they are one group.
    """
    groups = level_pages(groups)
    pages = [max(layer.page_bytes for layer in group.layers) for group in groups]
    counts = [len(group.layers) for group in groups]
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    block_bytes = groups[0].page_bytes if len(groups) == 1 else size * max(pages)
    each = once = 0
    for group, page, count in zip(groups, pages, counts, strict=True):
        wider = 1 if max(pages) % page else max(pages) // page
        block_tokens = group.block_tokens * wider
        shared = shared_tokens // block_tokens if isinstance(group.retention, Full) else 0
        needed = _vllm_blocks(group, num_tokens, block_tokens, in_flight, alone=len(groups) == 1)
        parts = ceil_div(count, size)
        each += parts * (needed - shared)
        once += parts * shared
    return max(0.0, (nbytes // block_bytes - once) / each)


def _vllm_blocks(
    group: Group, num_tokens: int, block_tokens: int, in_flight: int, *, alone: bool
) -> int:
    """Blocks of a group that vLLM reserves for a request."""
    match group.retention:
        case Full():
            return ceil_div(num_tokens, block_tokens)
        case Window(tokens):
            return ceil_div(min(tokens - 1 + in_flight, num_tokens), block_tokens) + 1
        case Chunk(tokens):
            return ceil_div(min(tokens + in_flight, num_tokens), block_tokens)
        case State():
            return 1 if alone else 2
        case Encoder(tokens):
            return ceil_div(tokens, block_tokens)


# ── the most that fits ────────────────────────────────────────────────────────────────


def max_requests(layout: Layout, num_tokens: int, shared_tokens: int = 0) -> int:
    """The most requests of `num_tokens` that fit at once."""
    rows = _each_and_once(layout, num_tokens, shared_tokens)
    free = layout.num_slabs - NULL_SLABS
    return _last(lambda k: _slabs(layout, k, rows) <= free, _all_rows(layout))


def max_tokens(layout: Layout) -> int | None:
    """The longest request that fits; None where length costs nothing (states, windows)."""
    if not bytes_per_token(layout) and fits(layout, 1, 1 << 40):
        return None
    longest = max(rows.group.block_tokens for rows in layout.groups) * _all_rows(layout)
    return _last(lambda n: fits(layout, 1, n), longest)


def _all_rows(layout: Layout) -> int:
    return sum(layout.num_blocks(g) for g in range(len(layout.groups)))


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number in `[0, limit]` for which it holds; it holds for 0, and never
    again once it does not."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
