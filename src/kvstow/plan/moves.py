"""Lanes times block pairs: byte offsets, no Python object per move.

Pairs come by destination block, the moves of a pair together. Where a pair follows one of
its own kind with the next block on both sides, its lanes that repeat are not moves of their
own: those of the first such pair grow.

    pairs     a       b       → b     → b    c           → continues the pair before
    moves   │ · · · │ · ─── · │ · · │ · · │ · · · │      the second lane repeats
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvstow.plan.blocklist import Ints
from kvstow.plan.joining import Links, joined, links
from kvstow.plan.lanes import Flags, Lanes, Overlap
from kvstow.plan.pairing import Pairs
from kvstow.plan.period import Kinds
from kvstow.plan.territory import Pieces

FEW_STRETCHES = 8
"""Up to so many stretches of pairs with as many moves each are written one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies between two arenas: `nbytes[i]` from byte `source[i]` to byte `destination[i]`."""

    source: Ints
    destination: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


class _Form(NamedTuple):
    """What is written for a pair: some of its lanes, and by how much each grows with every
    pair that continues it."""

    source: Ints
    source_stride: Ints
    destination: Ints
    destination_stride: Ints
    nbytes: Ints
    growth: Ints


class _Runs(NamedTuple):
    """Which pairs continue the one before them, so that their lanes that repeat are moves of
    that one; and which pairs are left with moves of their own."""

    continues: Flags
    kept: slice | Ints


class _Rows(NamedTuple):
    """Pairs that have moves: their blocks, the form of each, and how many pairs continue it;
    the last is empty where none continues another."""

    source: Ints
    destination: Ints
    form: Kinds
    continued: Ints

    def some(self, which: slice | Ints) -> "_Rows":
        """Some of the pairs."""
        continued = self.continued[which] if len(self.continued) else self.continued
        return _Rows(self.source[which], self.destination[which], self.form[which], continued)


def expanded(pairs: Pairs, lanes_of: Callable[[Overlap], Lanes]) -> Pieces:
    """The moves of all pairs, by destination block, neighbours made one."""
    if not len(pairs):
        none = np.empty(0, np.int64)
        return Pieces(none, none, none)
    kinds = [lanes_of(overlap) for overlap in pairs.kinds]
    runs, near = _runs(pairs, kinds, links(pairs, kinds))
    forms, rows = _formed(pairs, kinds, runs)
    moves = _written(forms, rows)
    if not len(near.before):
        return moves
    counts = _sizes(forms).take(rows.form)
    starts = np.zeros(len(pairs), np.int64)
    starts[runs.kept] = np.cumsum(counts) - counts
    return joined(moves, pairs, kinds, near, runs.continues, starts)


def _runs(pairs: Pairs, kinds: Sequence[Lanes], near: Links) -> tuple[_Runs, Links]:
    """The runs of pairs; and the links that these do not settle, between pairs that have lanes
    open towards each other."""
    continues = np.zeros(len(pairs), np.bool_)
    if not len(near.before):
        return _Runs(continues, slice(None)), near
    before, after = pairs.kind[near.before], pairs.kind[near.after]
    some = near.straight & np.array([lanes.any_repeats for lanes in kinds])[after]
    every = near.straight & np.array([lanes.all_repeat for lanes in kinds])[after]
    joins = ~every & np.array([lanes.any_ends_open for lanes in kinds])[before]
    joins &= np.array([lanes.any_starts_open for lanes in kinds])[after]
    continues[near.after[some]] = True
    kept = np.ones(len(pairs), np.bool_)
    kept[near.after[every]] = False
    return _Runs(continues, np.flatnonzero(kept)), near.some(joins)


def _formed(pairs: Pairs, kinds: Sequence[Lanes], runs: _Runs) -> tuple[list[_Form], _Rows]:
    """The forms of all kinds, each with all its lanes, then each with those that do not
    repeat; and the pairs that have moves."""
    forms = [_Form(lanes.pieces.source, lanes.source_stride,
                   lanes.pieces.destination, lanes.destination_stride,
                   lanes.pieces.nbytes, lanes.source_stride * lanes.repeats)
             for lanes in kinds]  # fmt: skip
    rows = _Rows(pairs.source, pairs.destination, pairs.kind, np.empty(0, np.int64))
    if not np.count_nonzero(runs.continues):
        return forms, rows
    rows = rows.some(runs.kept)
    heads = np.flatnonzero(~runs.continues)
    lengths = np.diff(heads, append=len(pairs))
    lengths -= 1
    if len(heads) == len(rows.form):
        return forms, rows._replace(continued=lengths)
    continued = np.zeros(len(pairs), np.int64)
    continued[heads] = lengths
    forms += [_Form(*(column[~lanes.repeats] for column in whole))
              for whole, lanes in zip(forms, kinds, strict=True)]  # fmt: skip
    form = rows.form + runs.continues[runs.kept] * np.int32(len(kinds))
    return forms, rows._replace(form=form, continued=continued[runs.kept])


def _sizes(forms: Sequence[_Form]) -> Ints:
    return np.array([len(form.nbytes) for form in forms], np.int64)


def _written(forms: Sequence[_Form], rows: _Rows) -> Pieces:
    """The moves of all rows, in their order."""
    if len(forms) == 1:
        return _in_stretches(forms, rows, [0, len(rows.source)])
    cuts = np.flatnonzero(rows.form[1:] != rows.form[:-1]) + 1
    if len(cuts) < FEW_STRETCHES:
        return _in_stretches(forms, rows, [0, *cuts.tolist(), len(rows.source)])
    return _by_size(forms, rows)


def _in_stretches(forms: Sequence[_Form], rows: _Rows, bounds: Sequence[int]) -> Pieces:
    """The moves, written for all rows from one bound to the next together, which are of one
    form."""
    lots = [(slice(*ends), forms[int(rows.form[ends[0]])]) for ends in pairwise(bounds)]
    sizes = [(lot.stop - lot.start) * len(form.nbytes) for lot, form in lots]
    moves = np.empty((3, sum(sizes)), np.int64)
    end = 0
    for (lot, form), size in zip(lots, sizes, strict=True):
        start, end = end, end + size
        _write(form, rows.some(lot), moves[:, start:end].reshape(3, -1, len(form.nbytes)))
    return Pieces(*moves)


def _by_size(forms: Sequence[_Form], rows: _Rows) -> Pieces:
    """The moves, written for all rows that have as many together."""
    sizes = _sizes(forms)
    if (sizes == sizes[0]).all():
        moves = np.empty((3, len(rows.form), sizes[0]), np.int64)
        _write(_table(forms), rows, moves)
        return Pieces(*moves.reshape(3, -1))
    counts = sizes.take(rows.form)
    starts = np.cumsum(counts)
    moves = np.empty((3, starts[-1]), np.int64)
    starts -= counts
    for size in {len(form.nbytes) for form in forms} - {0}:
        alike = np.flatnonzero(sizes == size)
        number = np.zeros(len(forms), np.int32)
        number[alike] = np.arange(len(alike), dtype=np.int32)
        which = np.flatnonzero(counts == size)
        some = rows.some(which)
        found = np.empty((3, len(which), size), np.int64)
        table = _table([forms[i] for i in alike.tolist()])
        _write(table, some._replace(form=number.take(some.form)), found)
        moves[:, np.add.outer(starts[which], np.arange(size))] = found
    return Pieces(*moves)


def _table(forms: Sequence[_Form]) -> _Form:
    """Forms with as many lanes each as one: rows of tables."""
    return _Form(*map(np.stack, zip(*forms, strict=True)))


def _write(table: _Form, rows: _Rows, out: Ints) -> None:
    """Writes rows that have as many moves each, in all three columns: a row of `out` for each."""
    _affine(table.source, table.source_stride, rows.form, rows.source, out[0])
    _affine(table.destination, table.destination_stride, rows.form, rows.destination, out[1])
    _affine(table.nbytes, table.growth, rows.form, rows.continued, out[2])


def _affine(offsets: Ints, strides: Ints, form: Kinds, blocks: Ints, out: Ints) -> None:
    """`out[i] = offsets[form[i]] + blocks[i] · strides[form[i]]`, of rows, or without the
    product where there are no `blocks`; of a single form, offsets and strides are no table."""
    if offsets.ndim > 1:
        offsets.take(form, axis=0, out=out, mode="clip")
        if len(blocks):
            even = (strides == strides[0, 0]).all()
            out += blocks[:, None] * (strides[0, 0] if even else strides.take(form, axis=0))
    elif len(blocks):
        np.multiply(blocks[:, None], strides, out=out)
        out += offsets
    else:
        out[:] = offsets
