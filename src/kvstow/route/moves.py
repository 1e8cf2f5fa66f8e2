"""Lanes times block pairs: byte offsets, no Python object per move.

Pairs come by destination block, the moves of a pair together. Lanes that continue a
neighbour's are not moves of their own: the move that they continue is longer.

    pairs     a         b         c         d
    moves   │ · · · · │ · ─── · │ ─── · · │ · · · · │      one lane goes on from b to c
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from kvstow.plan.view import Ints
from kvstow.route.joining import Joined, Sets
from kvstow.route.lanes import Lanes
from kvstow.route.meeting import Meeting, ranges
from kvstow.route.seams import Seams
from kvstow.route.territory import Pieces

AT_ONCE = 1 << 14
"""Moves that are written together where pairs have unequal numbers: few enough for a cache."""


class _Form(NamedTuple):
    """What is written for a pair: some of the lanes of its kind."""

    source: Ints
    source_stride: Ints
    destination: Ints
    destination_stride: Ints
    nbytes: Ints


class _Rows(NamedTuple):
    """Pairs: their blocks, and the form of each."""

    source: Ints
    destination: Ints
    form: Ints

    def some(self, which: slice | Ints) -> "_Rows":
        return _Rows(self.source[which], self.destination[which], self.form[which])


class Forms:
    """What is written for pairs: all lanes of each kind, then of each set of lanes those that
    are not in it."""

    def __init__(self, kinds: Sequence[Lanes], sets: Sets) -> None:
        whole = [_Form(lanes.pieces.source, lanes.source_stride,
                       lanes.pieces.destination, lanes.destination_stride,
                       lanes.pieces.nbytes) for lanes in kinds]  # fmt: skip
        self._each = [*whole, *(
            _Form(*(column[~flags] for column in whole[kind])) for kind, flags in sets[1:]
        )]  # fmt: skip
        self.sizes = np.array([len(form.nbytes) for form in self._each], np.int64)
        self._tables: dict[tuple[int, ...], _Form] = {}

    def __len__(self) -> int:
        return len(self._each)

    def places(self, form: Ints, start: int) -> Ints:
        """Where the first move of each row is, if those of all are written from there on."""
        sizes = self.sizes.take(form)
        return np.cumsum(sizes) - sizes + start

    def write(self, rows: _Rows, num_forms: int, out: Ints) -> int:
        """Writes the moves of all rows, in their order, which have one of the first forms;
        returns how many these are."""
        if not len(rows.form):
            return 0
        used = tuple(range(num_forms))
        if len({int(size) for size in self.sizes[:num_forms]}) > 1:
            used = tuple(np.flatnonzero(np.bincount(rows.form)).tolist())
        sizes = {int(self.sizes[form]) for form in used}
        if sizes == {0}:
            return 0
        if 0 in sizes:
            rows = rows.some(np.flatnonzero(self.sizes.take(rows.form)))
            sizes.remove(0)
        if len(sizes) > 1:
            return self._write_uneven(rows, out)
        size = sizes.pop()
        into = out[:, : len(rows.form) * size].reshape(3, -1, size)
        self._write_even(self._table(used, size), rows, into)
        return len(rows.form) * size

    def _table(self, used: tuple[int, ...], size: int) -> _Form:
        """Of forms that have so many lanes or none, the rows of each column, or the only row
        where all are equal."""
        if used not in self._tables:
            columns: list[Ints] = []
            for each in zip(*self._each, strict=True):
                table = np.zeros((len(each), size), np.int64)
                rows = [i for i in used if len(each[i])]
                table[rows] = [each[i] for i in rows]
                same = (table[rows] == table[rows[0]]).all()
                columns.append(table[rows[0]] if same else table)
            self._tables[used] = _Form(*columns)
        return self._tables[used]

    def _write_even(self, table: _Form, rows: _Rows, out: Ints) -> None:
        """Writes rows that have as many moves each: a row of `out` for each."""
        _affine(table.source, table.source_stride, rows.form, rows.source[:, None], out[0])
        _affine(table.destination, table.destination_stride, rows.form,
                rows.destination[:, None], out[1])  # fmt: skip
        out[2] = _chosen(table.nbytes, rows.form)

    def _write_uneven(self, rows: _Rows, out: Ints) -> int:
        """Writes rows that do not have as many moves each; returns how many these are."""
        table = _Form(*map(np.concatenate, zip(*self._each, strict=True)))
        first = np.cumsum(self.sizes) - self.sizes
        step, end = max(1, AT_ONCE // int(self.sizes.max())), 0
        for start in range(0, len(rows.form), step):
            lot = rows.some(slice(start, start + step))
            count = self.sizes.take(lot.form)
            lane = ranges(first.take(lot.form), count)
            into = out[:, end : end + len(lane)]
            for i, (blocks, offsets, strides) in enumerate((
                (lot.source, table.source, table.source_stride),
                (lot.destination, table.destination, table.destination_stride),
            )):  # fmt: skip
                np.multiply(blocks.repeat(count), strides.take(lane), out=into[i])
                into[i] += offsets.take(lane)
            into[2] = table.nbytes.take(lane)
            end += len(lane)
        return end


def _affine(offsets: Ints, strides: Ints, form: Ints, blocks: Ints, out: Ints) -> None:
    """`out[i] = offsets[form[i]] + blocks[i] · strides[form[i]]`."""
    np.multiply(blocks, _chosen(strides, form), out=out)
    out += _chosen(offsets, form)


def _chosen(table: Ints, form: Ints) -> Ints:
    """The row of the table for each form; the only row, if that is all."""
    return table.take(form, axis=0) if table.ndim > 1 else table


@dataclass(frozen=True, kw_only=True, eq=False)
class Weave:
    """Kinds of pairs that a request has, ready to be expanded."""

    kinds: Sequence[Lanes]
    seams: Seams

    @cached_property
    def forms(self) -> Forms:
        """Those of pairs with at most one neighbour that they continue."""
        return Forms(self.kinds, Joined(self.kinds, self.seams).continuing)


def expanded(meeting: Meeting, weave: Weave) -> tuple[Pieces, list[Ints]]:
    """The moves of all pairs, by destination block; and what the source lacks."""
    kinds, forms = weave.kinds, weave.forms
    joined, missing, end = Joined(kinds, weave.seams), list[Ints](), 0
    moves = np.empty((3, meeting.most * max(map(len, kinds))), np.int64)
    for lot, own, lacking in meeting.lots():
        for pairs, sets in joined.of(lot, own):
            form, num_forms = pairs.kind, len(kinds)
            if sets is not None:
                form = np.where(sets[0], sets[0] + (len(kinds) - 1), form)
                num_forms = len(kinds) - 1 + len(joined.continuing)
                forms = forms if num_forms == len(forms) else Forms(kinds, joined.continuing)
                joined.note(pairs, *sets, partial(forms.places, form, end))
            rows = _Rows(pairs.source, pairs.destination, form)
            end += forms.write(rows, num_forms, moves[:, end:])
        missing += [lacking] if lacking.size else []
    joined.lengthen(moves[2])
    found = moves[:, :end] if 2 * end > moves.shape[1] else moves[:, :end].copy()
    return Pieces(*found), missing
