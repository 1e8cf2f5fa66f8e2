# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The running rows of a batch: the recurrent states of its sequences, and how they were.

A state is lent as a view of the rows where these lie at one stride, and otherwise as a copy
that goes back into the rows before anybody else looks.
"""

from collections.abc import Sequence

import torch

from kvstow.adapters.transformers.batch.rows import one_stride
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.blocks.table import RowCopy
from kvstow.errors import BlockError
from kvstow.plan.retention import State

Tensor = torch.Tensor


class RecurrentStates:
    """One row per sequence in every recurrent group."""

    def __init__(self, memory: ModelMemory) -> None:
        self.memory = memory
        self._ids: dict[int, Tensor] = {}
        self._lent: dict[tuple[str, str], Tensor] = {}
        self._views: dict[tuple[str, str], Tensor] = {}
        self._before: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._before_tokens = -1

    def set(self, group: int, ids: Tensor) -> None:
        """Say which rows they are; what was lent of others must have gone back."""
        before = self._ids.get(group)
        if before is not None and torch.equal(before, ids):
            return
        self._ids[group] = ids
        for layer, field in [*self._lent]:
            if self.memory.layout.layers[layer][0] == group:
                del self._lent[layer, field]

    def forget(self) -> None:
        """Lend nothing any more, and remember nothing."""
        self._lent.clear()
        self.forget_before()

    # ── states ────────────────────────────────────────────────────────────────────

    def fields(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's fields by name."""
        spec = self.memory.layout.layers[layer][1]
        return {field.name: field.shape for field in spec.fields}

    def lend(self, layer: str, field: str) -> Tensor:
        """The states of all sequences; changes reach the rows, at once or by `settle`."""
        if (layer, field) not in self._lent:
            self._lent[layer, field] = self._states(layer, field)
        return self._lent[layer, field]

    def settle(self) -> None:
        """Bring lent copies back into their rows."""
        for (layer, field), lent in self._lent.items():
            rows = self._rows(layer, field)
            if lent.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
                rows.index_copy_(0, self._ids[self.memory.layout.layers[layer][0]], lent)

    def _states(self, layer: str, field: str) -> Tensor:
        rows = self._rows(layer, field)
        ids = self._ids[self.memory.layout.layers[layer][0]]
        step = one_stride(ids)
        if step is None:
            return rows.index_select(0, ids)
        first = int(ids[0])
        return rows[first : first + (len(ids) - 1) * step + 1 : step]

    def _rows(self, layer: str, field: str) -> Tensor:
        """A field of all blocks, without its axes of size one for head and token."""
        if (layer, field) not in self._views:
            self._views[layer, field] = self.memory.arena.field(layer, field)[:, 0, 0]
        return self._views[layer, field]

    # ── how they were ─────────────────────────────────────────────────────────────

    def keep(self, num_tokens: int) -> None:
        """Keep the rows as they are after `num_tokens` tokens, where that ends a block."""
        if self._before_tokens == num_tokens:
            return
        self.settle()
        self._before = {
            (group, block): tuple(part.clone() for part in self.memory.row(group, block))
            for group, ids in self._ids.items()
            if num_tokens % self.memory.ledger.groups[group].block_tokens == 0
            for block in ids.tolist()
        }
        self._before_tokens = num_tokens

    def forget_before(self) -> None:
        """What was kept is of other rows."""
        self._before.clear()
        self._before_tokens = -1

    def copy(self, copies: tuple[RowCopy, ...], num_tokens: int) -> None:
        """Copy rows as they were after `num_tokens` tokens: as kept, or as they still are."""
        rest: list[RowCopy] = []
        for copy in copies:
            before = self._before.get((copy.group, copy.source))
            if before is None or self._before_tokens != num_tokens:
                rest.append(copy)
                continue
            now = self.memory.row(copy.group, copy.destination)
            for source, destination in zip(before, now, strict=True):
                destination.copy_(source)
        self.memory.copy(tuple(rest))


class StatePass:
    """Which states a forward pass has reached, from the first layer's to the last one's.

    A pass that an exception ended has changed the states of some layers and not of others.
    Together they are no state that a sequence was ever in. `is_torn` says so.
    """

    def __init__(self, memory: ModelMemory) -> None:
        specs = [
            spec
            for group in memory.ledger.groups
            if isinstance(group.retention, State)
            for spec in group.layers
        ]
        kinds = ("conv", "recurrent")
        names = {
            spec.name: [f.name for f in spec.fields if f.name.startswith(kinds)] for spec in specs
        }
        self._last_field = {name: fields[-1] for name, fields in names.items() if fields}
        """What a pass reaches last of each layer. Others' states come with tokens."""
        last = max(int(name.split(".")[1]) for name in memory.layout.layers)
        self._ends_with_tokens = f"layers.{last}.state" not in self._last_field
        self._first = ""
        self.forget()

    def forget(self) -> None:
        """No pass has begun."""
        self._left: set[str] = set()
        self._is_ahead = False

    @property
    def is_torn(self) -> bool:
        """Whether the last pass has not reached some states, or it has reached all of them and
        not the tokens of the layer behind them."""
        return bool(self._left) or (self._ends_with_tokens and self._is_ahead)

    def begins_again(self, layer: str) -> bool:
        """Whether a pass that reaches this layer is another one than the last, which is not over.

        A pass may look at its first layer several times before it reaches others.
        """
        is_new = layer == self._first and layer not in self._left
        return is_new and 0 < len(self._left) < len(self._last_field) - 1

    def reach(self, layer: str, field: str) -> None:
        """A pass has reached a field; the first layer begins it."""
        if layer not in self._last_field:
            return
        self._first = self._first or layer
        if layer == self._first and layer not in self._left:
            self._left = set(self._last_field)
        if field == self._last_field[layer]:
            self._left.discard(layer)
        self._is_ahead = True

    def stored(self) -> None:
        """All layers that keep tokens have those of the pass."""
        self._is_ahead = False


class PassClock:
    """Notes how many tokens a pass has where every layer is recurrent, and so none brings tokens.

    One layer, the first that was seen, tells it: a pass of several tokens says how many, and one
    that has only read the state by the time the next one begins was of a single token.
    """

    def __init__(self, memory: ModelMemory) -> None:
        groups = memory.ledger.groups
        self.is_needed = all(isinstance(group.retention, State) for group in groups)
        self._layer = ""
        self.is_uncounted = False
        """Whether a pass has begun, and has not said how many tokens it has."""

    def is_told_by(self, layer: str) -> bool:
        """Whether this is the layer that tells it."""
        if not self.is_needed:
            return False
        self._layer = self._layer or layer
        return layer == self._layer


def torn(seen: Sequence[int], num_tokens: int) -> BlockError:
    """The error of a cache whose layers have seen so many tokens each, of so many in all."""
    fewest, most = min(seen, default=num_tokens), max(*seen, num_tokens, 0)
    return BlockError(
        f"the last pass was interrupted: some layers hold {fewest} tokens, others up to {most}\n\n"
        "hint: begin again with a new cache, or cache.reset(); crop() takes tokens back where no "
        "layer is recurrent"
    )
