"""Cache layers over rows: what transformers asks of a layer, answered from an arena.

    update(k, v)      writes the new tokens into the rows of each sequence, then gathers what
                      the queries may see: `[batch, head, token, content]`, the same numbers
                      in the same order as the default cache's
    conv, recurrent   views of the running rows where these lie at one stride, and otherwise
                      copies that go back into the rows before anybody else looks

Sequence `i` of the batch is one request of the ledger; all have the same length, padding
included, which is how transformers counts. What a model calls is marked `eager`: a compiled one
leaves its graph for it.
"""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvstow.adapters.transformers.attention import noted
from kvstow.adapters.transformers.passes import eager
from kvstow.adapters.transformers.sequences import Sequences
from kvstow.errors import BlockError
from kvstow.plan.retention import Window
from kvstow.plan.spec import LayerSpec

Tensor = torch.Tensor


def layer_of(batch: Sequences, index: int) -> Any:
    """The layer object for one of the model's layers, by what it keeps."""
    name = f"layers.{index}"
    layers = batch.memory.layout.layers
    attention = layers[name][1] if name in layers else None
    if attention is None:
        return StateLayer(batch, name)
    if f"{name}.compressor" in layers:
        rate = layers[f"{name}.compressor"][1].tokens_per_state
        return CompressedLayer(batch, name, attention, rate)
    if f"{name}.state" in layers:
        return StateAndRowsLayer(batch, name, attention)
    if f"{name}.indexer" in layers:
        return IndexedRowsLayer(batch, name, attention)
    return RowsLayer(batch, name, attention)


class RowsLayer(CacheLayerMixin):
    """Keys and values of one layer, or keys that are values; `window` is how far back a token
    sees, less than is kept where tokens may be taken back. None where it sees all."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, batch: Sequences, name: str, spec: LayerSpec) -> None:
        self.batch, self.name = batch, name
        self._fields = [field.name for field in spec.fields]
        self.window: int | None = None
        self.is_initialized = False
        self.is_sliding = isinstance(spec.retention, Window)
        if isinstance(spec.retention, Window):
            self.window = spec.retention.tokens - batch.memory.rollback_tokens
            self.sliding_window = self.window

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The keys that the next token will see, gathered; None where there are none."""
        return self.batch.held(self.name, self._fields[0], self.first_seen())

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values that the next token will see, gathered; None where there are none."""
        return self.batch.held(self.name, self._fields[-1], self.first_seen())

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """There is nothing to do: a pass admits the sequences when it begins."""

    @eager
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns what the queries may attend to."""
        self.is_initialized = True
        tokens = key_states.shape[-2]
        self.batch.reach(self.name, len(key_states), tokens)
        if self.batch.memory.in_place:
            pages = self.batch.stored_in_place(self.name, key_states, value_states, self.window)
            keys, values = noted(key_states, pages), value_states
        else:
            start = self.first_seen()
            new = zip(self._fields, (key_states, value_states), strict=False)
            kept = [self.batch.store(self.name, field, states, start) for field, states in new]
            keys, values = kept[0], kept[-1]
        self.batch.done(self.name, tokens)
        return keys, values

    def first_seen(self) -> int:
        """The oldest token that the next query may see."""
        seen = self.get_seq_length()
        return 0 if self.window is None else max(seen - self.window + 1, 0)

    @eager
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys `update` will return, and the position of the first."""
        first = self.first_seen()
        return self.get_seq_length() - first + query_length, first

    @eager
    def get_seq_length(self) -> int:
        """Tokens that this layer has seen."""
        return self.batch.seen(self.name)

    def get_max_length(self) -> int:
        """The window; -1, in transformers' words, where there is none."""
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        """Forget the sequences."""
        self.batch.release()
        self.is_initialized = False


class IndexedRowsLayer(RowsLayer):
    """Keys and values, and the keys of a sparse attention's indexer."""

    @eager
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the new indexer keys; returns all of them: `[batch, token, content]`."""
        name, tokens = f"{self.name}.indexer", indexer_key_states.shape[-2]
        self.batch.reach(name, len(indexer_key_states), tokens)
        keys = self.batch.store(name, "key", indexer_key_states.unsqueeze(1), 0)
        self.batch.done(name, tokens)
        return keys.squeeze(1)


class StateLayer(LinearAttentionCacheLayerMixin):
    """Convolution and recurrent states of one layer, in the running row of each sequence.

    Models change the tensors that they are handed in place, so what is handed out is the row
    itself where it can be. A layer that keeps nothing, a mixture of experts that counts as one of
    its own, has no fields.
    """

    is_compileable = False

    def __init__(self, batch: Sequences, name: str) -> None:
        self.batch, self.state_name = batch, f"{name}.state"
        layers = batch.memory.layout.layers
        fields = layers[self.state_name][1].fields if self.state_name in layers else ()
        kinds = [field.name.rstrip("0123456789") for field in fields]
        count = max(kinds.count("conv"), kinds.count("recurrent"), 1)
        super().__init__(number_of_states=count)  # pyright: ignore[reportUnknownMemberType]
        self.has_previous_state = dict.fromkeys(range(count), bool(fields) and batch.num_tokens > 0)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """There is nothing to do: a pass admits the sequences when it begins."""

    def put(self, field: str, value: Tensor) -> Tensor:
        """Overwrite the state of all sequences; returns it as it lies in the rows."""
        lent = self.batch.changing(self.state_name, field)
        if lent.shape != value.shape or lent.dtype != value.dtype:
            raise BlockError(
                f"{self.state_name!r}: {field!r} cannot hold {value.dtype} {tuple(value.shape)}"
            )
        return lent.copy_(value)

    @eager
    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Append the new inputs; returns them with their left context in front."""
        before = self.batch.changing(self.state_name, f"conv{state_idx}")
        width = before.shape[-1]
        if self.has_previous_state[state_idx]:
            seen = torch.cat([before, conv_states], dim=-1)
        else:
            missing = max(0, width - conv_states.shape[-1])
            seen = torch.nn.functional.pad(conv_states, (missing, 0)) if missing else conv_states
            self.has_previous_state[state_idx] = True
        self.put(f"conv{state_idx}", seen[..., -width:])
        return seen

    @eager
    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Replace the state; returns it as it lies in the rows."""
        return self.put(f"recurrent{state_idx}", recurrent_states)

    def reset(self) -> None:
        """Forget the sequences."""
        self.batch.release()
        self.has_previous_state = dict.fromkeys(self.has_previous_state, False)


class StateAndRowsLayer(StateLayer, RowsLayer):
    """A layer that keeps both: keys and values of the tokens, and a state."""

    is_compileable = False

    def __init__(self, batch: Sequences, name: str, spec: LayerSpec) -> None:
        RowsLayer.__init__(self, batch, name, spec)
        StateLayer.__init__(self, batch, name)

    def reset(self) -> None:
        """Forget the sequences."""
        StateLayer.reset(self)
        self.is_initialized = False

    def get_max_length(self) -> int:
        """The window of the attention part."""
        return RowsLayer.get_max_length(self)


class CompressedLayer(RowsLayer):
    """The window, the entries and the unfinished tokens of one layer, as the model asks for them.

    The model calls, for `compressor` and perhaps `indexer`: `store_compression_weights`, then
    `update_overlap_state` where entries overlap and there are new ones, then
    `update_compressor_states`.
    """

    def __init__(self, batch: Sequences, name: str, spec: LayerSpec, rate: int) -> None:
        super().__init__(batch, name, spec)
        self.compress_rate = rate

    @eager
    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Those waiting and the new ones, as far as they make whole entries; the rest waits.

        Returns the position of the first of them as well.
        """
        seen = self.batch.num_tokens
        waiting = seen % self.compress_rate
        kv = self._joined(f"{name}.kv", waiting, kv)
        gate = self._joined(f"{name}.gate", waiting, gate)
        usable = kv.shape[1] - kv.shape[1] % self.compress_rate
        return kv[:, :usable], gate[:, :usable], seen - waiting

    @eager
    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """The tokens of the last entry, those of the newest taking their place."""
        first = self.batch.num_tokens < self.compress_rate
        prior: list[Tensor | None] = []
        for kind, chunk in (("kv", chunk_kv), ("gate", chunk_gate)):
            held = self._state(f"{name}.overlap_{kind}")
            prior.append(None if first else held.clone())
            held.copy_(chunk[:, -1, :, :head_dim])
        return prior[0], prior[1]

    @eager
    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store the new entries; returns all of them: `[batch, entry, content]`."""
        entries = self.batch.store(f"{self.name}.{name}", "entry", compressed.unsqueeze(1), 0)
        return entries.squeeze(1)

    def _joined(self, field: str, waiting: int, new: Tensor) -> Tensor:
        held = self._state(field)
        whole = torch.cat([held[:, :waiting], new], dim=1) if waiting else new
        left = whole.shape[1] % self.compress_rate
        held[:, :left] = whole[:, whole.shape[1] - left :]
        return whole

    def _state(self, field: str) -> Tensor:
        return self.batch.changing(f"{self.name}.state", field)
