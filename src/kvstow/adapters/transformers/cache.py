# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A transformers `Cache` whose every byte lies in kvstow rows."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import Cache as TransformersCache
from transformers import EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from kvstow.adapters.transformers.layers import (
    CompressedLayer,
    CrossLayer,
    EmptyLayer,
    IndexedRowsLayer,
    RowsLayer,
    StateAndRowsLayer,
    StateLayer,
)
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.sequences import Sequences
from kvstow.plan.retention import State, Window
from kvstow.plan.spec import LayerSpec
from kvstow.route.blocks import Blocks


class Cache(TransformersCache):
    """The cache of one batch of sequences, for `generate` or a forward pass.

    `Cache(memory)` admits its sequences when the first keys arrive. Give `tokens`
    (`input_ids`, and `attention_mask` where there is padding) to admit them at once: then
    what the memory still knows of a common prefix is not computed again. Or give the
    `requests` of the ledger that hold `num_tokens` tokens already, such as pulled ones, and
    `encoder_tokens` positions of an encoder, where there is one.

    Rows go back when the cache is closed.
    """

    def __new__(cls, memory: ModelMemory, **_: Any) -> "Cache":
        """Of the model's own class as well, where it takes no other."""
        if memory.own_cache == "MiniMaxCache":
            from kvstow.adapters.transformers.lightning import LightningCache

            return object.__new__(LightningCache)
        if memory.own_cache == "EncoderDecoderCache":
            return object.__new__(CrossCache)
        return object.__new__(cls)

    def __init__(  # pyright: ignore[reportInconsistentConstructor]
        self,
        memory: ModelMemory,
        *,
        tokens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        requests: Sequence[int] = (),
        num_tokens: int = 0,
        encoder_tokens: int = 0,
    ) -> None:
        self.batch = Sequences(
            memory, requests=requests, num_tokens=num_tokens, encoder_tokens=encoder_tokens
        )
        if tokens is not None:
            self.batch.admit(tokens, attention_mask)
        TransformersCache.__init__(
            self, layers=[_layer(self.batch, i) for i in range(memory.num_layers)]
        )

    @property
    def memory(self) -> ModelMemory:
        return self.batch.memory

    @property
    def requests(self) -> tuple[int, ...]:
        """The ledger's name of each sequence."""
        return tuple(self.batch.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of every sequence, padding included."""
        self.batch.count()
        return self.batch.num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen; all layers where none of them counts tokens."""
        if any(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return TransformersCache.get_seq_length(self, layer_idx)
        return self.num_tokens

    def blocks(self, sequence: int) -> dict[int, Blocks]:
        """The blocks of one sequence by group, with everything written into them."""
        self.batch.settle()
        return self.memory.ledger.blocks(self.batch.requests[sequence])

    def remember(self, tokens: torch.Tensor) -> None:
        """Let later requests reuse these sequences' whole blocks: `generate`'s output."""
        self.batch.remember(tokens)

    # ── beams ─────────────────────────────────────────────────────────────────────

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence `i` goes on from what was sequence `beam_idx[i]`; rows are shared."""
        self.batch.rearrange(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences only."""
        kept = torch.arange(len(self.batch.requests), device=indices.device)[indices]
        self.batch.rearrange(kept.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, neighbours alike."""
        self.batch.rearrange([i for i in range(len(self.batch.requests)) for _ in range(repeats)])

    # ── tokens taken back ─────────────────────────────────────────────────────────

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens of every sequence.

        `rollback_tokens` of the memory says how many that may be where layers have windows;
        recurrent layers, prefixes and beams that have split do not go back at all.
        """
        self.batch.crop(self.num_tokens - abs(tokens_to_remove))

    @property
    def is_croppable(self) -> bool:
        """Whether tokens of such a model can be taken back at all."""
        kinds = {type(group.retention) for group in self.memory.ledger.groups}
        return State not in kinds and (Window not in kinds or self.memory.rollback_tokens > 0)

    def reset(self) -> None:
        """Forget all sequences; the next keys begin new ones."""
        for layer in self.layers:
            layer.reset()

    # ── its end ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Give all rows back."""
        self.batch.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _layer(batch: Sequences, index: int) -> Any:
    """The layer object for one of the model's layers, by what it keeps."""
    name = f"layers.{index}"
    layers = batch.memory.layout.layers
    attention = layers[name][1] if name in layers else None
    state = layers[f"{name}.state"][1] if f"{name}.state" in layers else None
    entries = layers[f"{name}.compressor"][1] if f"{name}.compressor" in layers else None
    match attention, state:
        case LayerSpec(), LayerSpec() if entries is not None:
            rate = entries.tokens_per_state
            return CompressedLayer(batch, name, _window(batch, attention), rate)
        case None, None:
            return EmptyLayer()
        case None, LayerSpec():
            return StateLayer(batch, name, _num_states(state))
        case LayerSpec(), LayerSpec():
            return StateAndRowsLayer(batch, name, _window(batch, attention), _num_states(state))
        case LayerSpec(), None if f"{name}.indexer" in layers:
            return IndexedRowsLayer(batch, name, None)
        case _:
            assert attention is not None
            return RowsLayer(batch, name, _window(batch, attention))


def _num_states(spec: LayerSpec) -> int:
    kinds = ("conv", "recurrent")
    return max(sum(field.name.startswith(kind) for field in spec.fields) for kind in kinds)


def _window(batch: Sequences, spec: LayerSpec) -> int | None:
    """How far back a token of the layer sees: less than is kept where tokens may be taken back."""
    if not isinstance(spec.retention, Window):
        return None
    return spec.retention.tokens - batch.memory.rollback_tokens


class CrossCache(Cache, EncoderDecoderCache):
    """Both caches of such a model, as the two that it looks for."""

    def __init__(self, memory: ModelMemory, **given: Any) -> None:
        super().__init__(memory, **given)
        names = [f"layers.{i}.cross" for i in range(memory.num_layers)]
        self.self_attention_cache = TransformersCache(layers=self.layers)
        self.cross_attention_cache = TransformersCache(
            layers=[CrossLayer(self.batch, x) for x in names]
        )
        self._note_whether_encoded()

    def reset(self) -> None:
        """Forget all sequences; the next ones bring their encoder's positions."""
        super().reset()
        self._note_whether_encoded()

    def __len__(self) -> int:
        return TransformersCache.__len__(self)

    def _note_whether_encoded(self) -> None:
        encoded = self.batch.encoder_tokens > 0
        self.is_updated = dict.fromkeys(range(self.memory.num_layers), encoded)
