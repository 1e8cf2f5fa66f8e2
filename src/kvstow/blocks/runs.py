"""Runs: ids that follow one another. A run of blocks is one descriptor in a transfer."""

import numpy as np

from kvstow.plan.blocklist import Ints


def run_lengths(ids: Ints) -> tuple[Ints, Ints]:
    """Where each run of ascending ids starts, and how long it is."""
    breaks = np.nonzero(ids[1:] - ids[:-1] != 1)[0] + 1
    bounds = np.empty(len(breaks) + 2, np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = 0, breaks, len(ids)
    return bounds[:-1], bounds[1:] - bounds[:-1]


def num_runs(ids: Ints) -> int:
    """How many runs the ids make, in the order in which they are."""
    return int(np.count_nonzero(ids[1:] - ids[:-1] != 1)) + 1 if len(ids) else 0


def fewest_runs(ids: Ints, count: int) -> Ints:
    """`count` of the ascending ids in few runs: the tightest run that is long enough, or
    the longest ones where none is."""
    if len(ids) <= count:
        return ids
    if ids[-1] - ids[0] == len(ids) - 1:
        return ids[:count]
    starts, lengths = run_lengths(ids)
    fitting = np.nonzero(lengths >= count)[0]
    if len(fitting):
        start = int(starts[fitting[lengths[fitting].argmin()]])
        return ids[start : start + count]
    order = np.argsort(-lengths, kind="stable")
    reach = lengths[order].cumsum()
    last = int(np.searchsorted(reach, count))
    chosen = order[: last + 1]
    ends = starts[chosen] + lengths[chosen]
    ends[-1] -= reach[last] - count
    edges = np.zeros(len(ids) + 1, np.int64)
    np.add.at(edges, starts[chosen], 1)
    np.add.at(edges, ends, -1)
    return ids[edges[:-1].cumsum() > 0]


def distinct(ascending: Ints) -> Ints:
    """The values of an ascending array, each once."""
    if len(ascending) < 2:
        return ascending
    keep = np.empty(len(ascending), np.bool_)
    keep[0] = True
    np.not_equal(ascending[1:], ascending[:-1], out=keep[1:])
    return ascending[keep]


def span(ascending: Ints) -> slice | Ints:
    """Ascending ids, each once, as a slice where they are one run: cheaper to index with."""
    if len(ascending) and ascending[-1] - ascending[0] == len(ascending) - 1:
        return slice(int(ascending[0]), int(ascending[-1]) + 1)
    return ascending


def span_of_any(ids: Ints) -> slice | Ints:
    """The same for ids in any order, which may be named twice."""
    if len(ids) == 0 or ids[-1] - ids[0] != len(ids) - 1:
        return ids
    if np.count_nonzero(ids[1:] - ids[:-1] != 1):
        return ids
    return slice(int(ids[0]), int(ids[-1]) + 1)
