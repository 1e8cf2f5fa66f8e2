"""Runs: ids that follow one another. A run of blocks is one descriptor in a transfer."""

from typing import TypeAlias

import numpy as np

from kvstow.plan.view import Ints

Where: TypeAlias = "slice[int, int, None] | Ints"
"""Ids to index an array with: a slice with both ends where they are one run, each once."""


NONE = np.zeros(0, np.int64)
"""No ids."""


def run_lengths(ids: Ints) -> tuple[Ints, Ints]:
    """Where each run of ascending ids starts, and how long it is."""
    breaks = np.nonzero(ids[1:] - ids[:-1] != 1)[0] + 1
    bounds = np.empty(len(breaks) + 2, np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = 0, breaks, len(ids)
    return bounds[:-1], bounds[1:] - bounds[:-1]


def num_runs(ids: Ints) -> int:
    """How many runs the ids make, in the order in which they are."""
    return int(np.count_nonzero(ids[1:] - ids[:-1] != 1)) + 1 if len(ids) else 0


def fewest_runs(ids: Ints, count: int, *, most: int | None = None) -> Ints:
    """`count` of the ascending ids in few runs: the tightest run that is long enough, or
    the longest ones where none is; fewer ids where those would be more than `most` runs."""
    if len(ids) == 0 or ids[-1] - ids[0] == len(ids) - 1:
        return ids[:count]
    if len(ids) <= count and most is None:
        return ids
    starts, lengths = run_lengths(ids)
    fitting = np.nonzero(lengths >= count)[0]
    if len(fitting):
        start = int(starts[fitting[lengths[fitting].argmin()]])
        return ids[start : start + count]
    chosen = np.argsort(-lengths, kind="stable")[:most]
    reach = lengths[chosen].cumsum()
    chosen = chosen[: int(np.searchsorted(reach, count)) + 1]
    ends = starts[chosen] + lengths[chosen]
    ends[-1] -= max(0, reach[len(chosen) - 1] - count)
    edges = np.zeros(len(ids) + 1, np.int64)
    np.add.at(edges, starts[chosen], 1)
    np.add.at(edges, ends, -1)
    return ids[edges[:-1].cumsum() > 0]


def span(ascending: Ints) -> Where:
    """Ascending ids, each once, as a slice where they are one run: cheaper to index with."""
    if len(ascending) and ascending.item(-1) - ascending.item(0) == len(ascending) - 1:
        return slice(ascending.item(0), ascending.item(-1) + 1)
    return ascending


def span_of_any(ids: Ints) -> Where:
    """The same for ids in any order, which may be named twice."""
    where = span(ids)
    if isinstance(where, slice) and ids.tobytes() != np.arange(where.start, where.stop).tobytes():
        return ids
    return where


def ids_at(where: Where) -> Ints:
    """The ids that a slice stands for."""
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where


def num_at(where: Where) -> int:
    """How many ids there are."""
    return where.stop - where.start if isinstance(where, slice) else len(where)
