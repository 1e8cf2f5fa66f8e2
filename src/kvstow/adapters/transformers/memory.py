# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The memory of one model in one process: a layout, its arena, its ledger."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Self

import torch
from transformers import EncoderDecoderCache, PreTrainedModel

from kvstow.adapters.transformers.attention import attend_in_place
from kvstow.adapters.transformers.model.identity import model_identity, user_hooks
from kvstow.adapters.transformers.model.inspect import (
    ALL_HEADS,
    HeadShard,
    crossed_layers,
    encoder_positions,
    follows_tokens,
    kept_layers,
    padding_token,
    placeholder_tokens,
    resumes,
    trial,
)
from kvstow.adapters.transformers.model.ropes import LengthRope, length_ropes
from kvstow.adapters.transformers.model.watch import ModelWatch
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.table import RowCopy
from kvstow.memory.arena import Arena
from kvstow.plan.group import Group, grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, Order
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Encoder, State, Window
from kvstow.plan.spec import LayerSpec
from kvstow.plan.words import parse_size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModelMemory:
    """Rows for a model's caches. Made by `ModelMemory.of`, or from parts made elsewhere."""

    arena: Arena
    ledger: Ledger
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
    rope: LengthRope | None = None
    """A rope that follows the sequence's length: see `ropes`."""
    watch: ModelWatch | None = None
    """Looks at what the model is given for tokens that are known; None where no model is known
    or no prefix is found."""
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
        shard: HeadShard = ALL_HEADS,
        name: str = "",
        identity: Identity | None = None,
        rollback_tokens: int = 0,
        encoder_tokens: int | None = None,
        in_place: bool = False,
    ) -> Self:
        """`budget` bytes (or `"2GiB"`) on the model's device, in rows of what the model keeps.

        Runs the model on a few tokens to see what that is. Prefixes are found again later,
        unless the model cannot go on from a state (see `resumes`), attends to an encoder, or
        keeps of a token what others do not (see `follows_tokens`).

        `identity` says which computation fills the rows, so that only caches of the same one
        exchange them. It is made from the model itself (see `model_identity`), which needs all
        its weights here: where they are split over ranks, give the one from before.

        `rollback_tokens` is how many tokens a cache may take back at a time where layers have
        windows: the candidates of assisted generation, say.

        `encoder_tokens` is how many positions of an encoder a sequence may have, where the
        configuration does not say.

        With `in_place` (CUDA) the model's attention becomes one that reads rows where they
        lie, and the model needs a `Cache` until the memory is closed.
        """
        known = identity or model_identity(model, name=name)
        cache = trial(model)
        specs = kept_layers(cache, block_tokens=block_tokens, shard=shard)
        if isinstance(cache, EncoderDecoderCache):
            most = encoder_tokens or encoder_positions(model)
            specs += crossed_layers(cache, most, block_tokens=block_tokens, shard=shard)
        groups = grouped(_with_rollback(spec, rollback_tokens) for spec in specs)
        site = Site(model=known.model, order=order, tp=(shard.rank, shard.size))
        layout = packed(groups, budget=parse_size(budget), site=site).identified(known)
        arena = Arena(layout, device=model.device)
        caching = _finds_prefixes(groups, model, vouched=identity is not None)
        return cls(
            arena=arena,
            ledger=Ledger(Pool(layout), caching=caching),
            num_layers=len(cache),
            own_cache=type(cache).__name__,
            rollback_tokens=rollback_tokens,
            in_place=in_place,
            placeholder_tokens=placeholder_tokens(model),
            padding_token=padding_token(model),
            on_close=attend_in_place(model) if in_place else None,
            rope=next(iter(length_ropes(model)), None),
            watch=ModelWatch(model, vouched=identity is not None) if caching else None,
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
        if self.watch is not None:
            self.watch.close()
        if self.on_close is not None:
            self.on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _finds_prefixes(groups: Sequence[Group], model: PreTrainedModel, *, vouched: bool) -> bool:
    """Whether what the model keeps of a prompt serves another prompt that begins alike."""
    hooks = [] if vouched else list(user_hooks(model))
    if hooks:
        log.warning("no prefixes are found: nobody knows what hooks do to rows (%s)", hooks[0])
        return False
    kinds = {type(group.retention) for group in groups}
    if Encoder in kinds or not follows_tokens(model):
        return False
    return State not in kinds or resumes(model)


def _with_rollback(spec: LayerSpec, tokens: int) -> LayerSpec:
    if not isinstance(spec.retention, Window):
        return spec
    return replace(spec, retention=Window(spec.retention.tokens + tokens))
