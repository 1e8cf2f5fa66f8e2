"""What requests cost in a layout, exactly: rows, bytes, slabs, concurrency.

A request needs a fixed part (windows, states, encoder rows: bounded for any length) and
a part that grows with its tokens. Slabs are handed out whole, so `k` requests fit when
their rows, rounded up to slabs group by group, do.
"""

from collections.abc import Callable
from fractions import Fraction

from kvstow.plan.layout import NULL_SLABS, Layout
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


def slabs_needed(layout: Layout, num_requests: int, num_tokens: int) -> int:
    """Slabs that so many requests take at once, one of them in the middle of its prefill."""
    return _slabs(layout, num_requests, *_steady_and_busiest(layout, num_tokens))


def _steady_and_busiest(layout: Layout, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows per group of a request that decodes, and of one in the middle of its prefill."""
    steady = request_rows(layout, num_tokens)
    return steady, request_rows(layout, num_tokens, in_flight=PREFILL_TOKENS)


def _slabs(
    layout: Layout, num_requests: int, steady: tuple[int, ...], busiest: tuple[int, ...]
) -> int:
    most = 0
    for sharing in layout.sharing:
        slabs = 0
        for g in sharing:
            rows = (num_requests - 1) * steady[g] + busiest[g]
            slabs += ceil_div(rows, layout.groups[g].rows_per_slab)
        most = max(most, slabs)
    return most


def fits(layout: Layout, num_requests: int, num_tokens: int) -> bool:
    """Whether so many requests fit at once, one of them in the middle of its prefill."""
    return slabs_needed(layout, num_requests, num_tokens) <= layout.num_slabs - NULL_SLABS


def concurrency(layout: Layout, num_tokens: int) -> float:
    """How many requests of `num_tokens` fit, were slabs divisible: as vLLM counts it."""
    rows = request_rows(layout, num_tokens)
    shares = [
        sum(Fraction(rows[g], layout.groups[g].rows_per_slab) for g in sharing)
        for sharing in layout.sharing
    ]
    return float((layout.num_slabs - NULL_SLABS) / max(shares))


def max_requests(layout: Layout, num_tokens: int) -> int:
    """The most requests of `num_tokens` that fit at once."""
    rows = _steady_and_busiest(layout, num_tokens)
    free = layout.num_slabs - NULL_SLABS
    return _last(lambda k: _slabs(layout, k, *rows) <= free, _all_rows(layout))


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
