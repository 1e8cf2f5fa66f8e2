"""The memory of one model in one process: a layout, its arena, its ledger."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Self

import torch
from transformers import PreTrainedModel

from kvstow.adapters.transformers.attention import attend_in_place
from kvstow.adapters.transformers.identity import model_identity
from kvstow.adapters.transformers.inspect import Rank, kept_layers, twin_cache
from kvstow.adapters.transformers.passes import (
    ModelPasses,
    padding_token,
    placeholder_tokens,
    why_not_reused,
)
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.table import RowCopy
from kvstow.memory.arena import Arena
from kvstow.plan.group import Group, grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, Order
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import State, Window
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import parse_size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModelMemory:
    """Rows for a model's caches, made by `ModelMemory.of`."""

    arena: Arena
    ledger: Ledger
    passes: ModelPasses
    """Tells the sequences behind a cache of the model's passes."""
    num_layers: int
    """Layers of the model, those that keep nothing included."""
    own_cache: str = "DynamicCache"
    """The class of the cache that the model makes for itself."""
    rollback_tokens: int = 0
    """Windows keep so many tokens longer than they are seen: see `Cache.crop`."""
    in_place: bool = False
    """Attention reads the rows; otherwise they are gathered for it."""
    placeholder_tokens: frozenset[int] = frozenset()
    """Tokens that stand for an image, a clip or a sound: their ids do not tell which."""
    padding_token: int | None = None
    """The token that `generate` takes for padding, where nobody gives it a mask."""
    on_close: Callable[[], None] | None = None
    """Gives the model its own attention back."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        *,
        budget: int | str,
        block_tokens: int = 16,
        order: Order = "BLHNC",
        tp: Rank = (0, 1),
        name: str = "",
        identity: Identity | None = None,
        rollback_tokens: int = 0,
        in_place: bool = False,
    ) -> Self:
        """`budget` bytes (or `"2GiB"`) on the model's device, in rows of what the model keeps.

        The model is not run. Prefixes are found again later, unless `why_not_reused` has a reason.
        Where ranks share out the model's heads, `tp` says which of how many this is.

        `identity` says which computation fills the rows, so that only caches of the same one
        exchange them. It is made from the model itself (see `model_identity`), which needs all
        its weights here: where they are split over ranks, give the one from before.

        `rollback_tokens` is how many tokens a cache may take back at a time where layers have
        windows: the candidates of assisted generation, say.

        With `in_place` (CUDA) the model's attention becomes one that reads rows where they
        lie, and the model needs a `Cache` until the memory is closed.
        """
        computation = identity or model_identity(model, name=name)
        cache = twin_cache(model)
        specs = kept_layers(cache, block_tokens=block_tokens, tp=tp)
        groups = grouped(_with_rollback(spec, rollback_tokens) for spec in specs)
        site = Site(model=computation.model, order=order, tp=tp)
        layout = packed(groups, budget=parse_size(budget), site=site).identified(computation)
        arena = Arena(layout, device=model.device)
        return cls(
            arena=arena,
            ledger=Ledger(Pool(layout), caching=_finds_prefixes(groups, model, identity)),
            passes=ModelPasses(model),
            num_layers=len(cache),
            own_cache=type(cache).__name__,
            rollback_tokens=rollback_tokens,
            in_place=in_place,
            placeholder_tokens=placeholder_tokens(model),
            padding_token=padding_token(model),
            on_close=attend_in_place(model) if in_place else None,
        )

    @property
    def layout(self) -> Layout:
        return self.arena.layout

    @property
    def pool(self) -> Pool:
        return self.ledger.pool

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return any(isinstance(group.retention, State) for group in self.ledger.groups)

    def whole_tokens(self, num_tokens: int) -> int:
        """The tokens among the first `num_tokens` that are in whole blocks of every group."""
        unit = lcm(*(group.block_tokens for group in self.ledger.groups))
        return num_tokens // unit * unit

    def copy(self, copies: tuple[RowCopy, ...]) -> None:
        """Copy whole rows, one after another."""
        for copy in copies:
            rows = self.row(copy.group, copy.source), self.row(copy.group, copy.destination)
            for source, destination in zip(*rows, strict=True):
                destination.copy_(source)

    def row(self, group: int, block: int) -> tuple[torch.Tensor, ...]:
        """The bytes of one block: one tensor where blocks are rows."""
        return tuple(
            self.arena.bytes[run.offset : run.end] for run in self.layout.runs(group, block)
        )

    def close(self) -> None:
        """Let go of the arena; a model that has read it in place has its own attention again."""
        self.arena.close()
        self.passes.close()
        if self.on_close is not None:
            self.on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _finds_prefixes(
    groups: Sequence[Group], model: PreTrainedModel, identity: Identity | None
) -> bool:
    """Whether what the model keeps of a prompt serves another prompt that begins alike."""
    has_states = any(isinstance(group.retention, State) for group in groups)
    reason = why_not_reused(model, has_states=has_states, is_vouched=identity is not None)
    if reason:
        log.warning("%s is computed and not reused: %s", type(model).__name__, reason)
    return not reason


def _with_rollback(spec: LayerSpec, tokens: int) -> LayerSpec:
    if not isinstance(spec.retention, Window):
        return spec
    return replace(spec, retention=Window(spec.retention.tokens + tokens))
