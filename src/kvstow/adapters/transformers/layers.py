# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
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

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvstow.adapters.transformers.attention import noted
from kvstow.adapters.transformers.batch.sequences import Sequences
from kvstow.adapters.transformers.model.passes import eager
from kvstow.errors import BlockError, ModelError

Tensor = torch.Tensor


class RowsLayer(CacheLayerMixin):
    """Keys and values of one layer; `window` is None where every token is kept."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, batch: Sequences, name: str, window: int | None) -> None:
        self.batch, self.name, self.window = batch, name, window
        self.is_initialized = False
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The keys that the next token will see, gathered; None where there are none."""
        return self.batch.held(self.name, "k", self.first_seen())

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values that the next token will see, gathered; None where there are none."""
        return self.batch.held(self.name, "v", self.first_seen())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Admits the sequences, unless they have been admitted already."""
        self.batch.begin(key_states.shape[0])
        self.is_initialized = True

    @eager
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns what the queries may attend to."""
        self.lazy_initialization(key_states, value_states)
        start = self.first_seen()
        self.batch.step(self.name, key_states.shape[-2])
        if self.batch.memory.in_place:
            pages = self.batch.stored_in_place(self.name, key_states, value_states, self.window)
            keys, values = noted(key_states, pages), value_states
        else:
            keys = self.batch.store(self.name, "k", key_states, start)
            values = self.batch.store(self.name, "v", value_states, start)
        self.batch.done(self.name, key_states.shape[-2])
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences are reordered once for all layers: see `Cache.reorder_cache`."""
        raise NotImplementedError(f"layer {self.name!r} is not reordered on its own")


class IndexedRowsLayer(RowsLayer):
    """Keys and values, and the keys of a sparse attention's indexer."""

    @eager
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the new indexer keys; returns all of them: `[batch, token, content]`."""
        name = f"{self.name}.indexer"
        self.batch.begin(indexer_key_states.shape[0])
        tokens = indexer_key_states.shape[-2]
        self.batch.step(name, tokens)
        keys = self.batch.store(name, "key", indexer_key_states.unsqueeze(1), 0)
        self.batch.done(name, tokens)
        return keys.squeeze(1)


class LayerStates(MutableMapping[int, Any]):
    """One kind of state of a layer, by state index: a window onto the running rows."""

    def __init__(self, layer: "StateLayer", kind: str, count: int) -> None:
        self.layer, self.kind, self.count = layer, kind, count

    @eager
    def __getitem__(self, index: int) -> Tensor | None:
        if (self.kind, index) == ("conv", 0):
            self.layer.begin_pass()
        return self.layer.lent(f"{self.kind}{index}")

    @eager
    def __setitem__(self, index: int, value: Tensor) -> None:
        self.layer.put(f"{self.kind}{index}", value)

    def __delitem__(self, index: int) -> None:
        raise TypeError("a state cannot be taken out of its row")

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


class StateLayer(LinearAttentionCacheLayerMixin):
    """Convolution and recurrent states of one layer, in the running row of each sequence.

    Models change the tensors that they are handed in place, so what is handed out is the row
    itself where it can be.
    """

    is_compileable = False

    def __init__(self, batch: Sequences, name: str, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.batch, self.state_name = batch, f"{name}.state"
        fields = batch.running.fields(self.state_name)
        self.conv_states: Any = LayerStates(self, "conv", number_of_states)
        self.recurrent_states: Any = LayerStates(self, "recurrent", number_of_states)
        self.conv_kernel_size: dict[int, Any] = {}
        for index in range(number_of_states):
            self.is_conv_states_initialized[index] = f"conv{index}" in fields
            self.is_recurrent_states_initialized[index] = f"recurrent{index}" in fields
            self.conv_kernel_size[index] = fields.get(f"conv{index}", (None,))[-1]
            self.has_previous_state[index] = batch.num_tokens > 0

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
    ) -> None:
        """Admits the sequences, unless they have been admitted already."""
        given = conv_states if conv_states is not None else recurrent_states
        if given is not None:
            self.batch.begin(given.shape[0])

    def begin_pass(self) -> None:
        """A model that reads the first convolution's state begins a pass by it."""
        self.batch.begin_pass(self.state_name)

    def lent(self, field: str) -> Tensor | None:
        """The state of all sequences; what is written to it reaches the rows."""
        return self.batch.lend(self.state_name, field)

    def put(self, field: str, value: Tensor) -> None:
        """Overwrite the state of all sequences."""
        lent = self.lent(field)
        if lent is None or lent.shape != value.shape or lent.dtype != value.dtype:
            raise BlockError(
                f"{self.state_name!r}: {field!r} cannot hold {value.dtype} {tuple(value.shape)}"
            )
        lent.copy_(value)

    @eager
    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Append the new inputs; returns them with their left context in front."""
        self.lazy_initialization(conv_states=conv_states)
        if state_idx == 0:
            self.batch.pass_tokens(self.state_name, conv_states.shape[-1])
        width = self.conv_kernel_size[state_idx]
        before = self.lent(f"conv{state_idx}")
        if self.has_previous_state[state_idx] and before is not None:
            seen = torch.cat([before, conv_states], dim=-1)
        else:
            missing = max(0, width - conv_states.shape[-1])
            seen = torch.nn.functional.pad(conv_states, (missing, 0)) if missing else conv_states
            self.has_previous_state[state_idx] = True
        self.conv_states[state_idx] = seen[..., -width:]
        return seen

    @eager
    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Replace the state; returns it as it lies in the rows."""
        self.lazy_initialization(recurrent_states=recurrent_states)
        self.recurrent_states[state_idx] = recurrent_states
        return self.recurrent_states[state_idx]

    def reset(self) -> None:
        """Forget the sequences."""
        self.batch.release()
        for index in range(self.number_of_states):
            self.has_previous_state[index] = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences are reordered once for all layers: see `Cache.reorder_cache`."""
        raise NotImplementedError(f"layer {self.state_name!r} is not reordered on its own")


class StateAndRowsLayer(StateLayer, RowsLayer):
    """A layer that keeps both: keys and values of the tokens, and a state."""

    is_compileable = False

    def __init__(
        self, batch: Sequences, name: str, window: int | None, number_of_states: int
    ) -> None:
        RowsLayer.__init__(self, batch, name, window)
        StateLayer.__init__(self, batch, name, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come by position, states by name."""
        if args:
            RowsLayer.lazy_initialization(self, *args)
        else:
            StateLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget the sequences."""
        StateLayer.reset(self)
        self.is_initialized = False

    def get_max_length(self) -> int:
        """The window of the attention part."""
        return RowsLayer.get_max_length(self)


class EmptyLayer(LinearAttentionCacheLayerMixin):
    """A layer that keeps nothing: a mixture of experts, say, that counts as one of its own."""

    def __init__(self) -> None:
        super().__init__()

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
    ) -> None:
        """There is nothing to begin."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0) -> Tensor:
        """Refused: nothing was kept when the model was tried."""
        raise ModelError("a layer that kept nothing when it was tried now has a state")

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
        """Refused, for the same reason."""
        return self.update_conv_state(recurrent_states, state_idx)


class CompressedLayer(RowsLayer):
    """The window, the entries and the unfinished tokens of one layer, as the model asks for them.

    The model calls, for `compressor` and perhaps `indexer`: `store_compression_weights`, then
    `update_overlap_state` where entries overlap and there are new ones, then
    `update_compressor_states`. Only the last of these counts the tokens as seen.
    """

    def __init__(self, batch: Sequences, name: str, window: int | None, rate: int) -> None:
        super().__init__(batch, name, window)
        self.compress_rate = rate
        self._arriving: dict[str, int] = {}

    @property
    def values(self) -> Tensor | None:
        """The keys."""
        return self.keys

    @eager
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns what the queries may attend to, keys being values."""
        self.lazy_initialization(key_states, value_states)
        start, tokens = self.first_seen(), key_states.shape[-2]
        self.batch.step(self.name, tokens)
        keys = self.batch.store(self.name, "k", key_states, start)
        self.batch.done(self.name, tokens)
        return keys, keys

    @eager
    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Those waiting and the new ones, as far as they make whole entries; the rest waits.

        Returns the position of the first of them as well.
        """
        seen = self.batch.seen(f"{self.name}.{name}")
        waiting = seen % self.compress_rate
        self._arriving[name] = kv.shape[1]
        kv = self._joined(f"{name}.kv", waiting, kv)
        gate = self._joined(f"{name}.gate", waiting, gate)
        usable = kv.shape[1] - kv.shape[1] % self.compress_rate
        return kv[:, :usable], gate[:, :usable], seen - waiting

    @eager
    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """The tokens of the last entry, those of the newest taking their place."""
        first = self.batch.seen(f"{self.name}.{name}") < self.compress_rate
        prior: list[Tensor | None] = []
        for kind, chunk in (("kv", chunk_kv), ("gate", chunk_gate)):
            held = self._state(f"{name}.overlap_{kind}")
            prior.append(None if first else held.clone())
            held.copy_(chunk[:, -1, :, :head_dim])
        return prior[0], prior[1]

    @eager
    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Store the new entries; returns all of them: `[batch, entry, content]`."""
        layer = f"{self.name}.{name}"
        entries = self.batch.store(layer, "entry", compressed.unsqueeze(1), 0)
        self.batch.done(layer, self._arriving.pop(name))
        return entries.squeeze(1)

    def reset(self) -> None:
        """Forget the sequences."""
        super().reset()
        self._arriving.clear()

    def _joined(self, field: str, waiting: int, new: Tensor) -> Tensor:
        held = self._state(field)
        whole = torch.cat([held[:, :waiting], new], dim=1) if waiting else new
        left = whole.shape[1] % self.compress_rate
        held[:, :left] = whole[:, whole.shape[1] - left :]
        return whole

    def _state(self, field: str) -> Tensor:
        held = self.batch.lend(f"{self.name}.state", field)
        if held is None:
            raise ModelError(f"layer {self.name!r} kept no {field!r} when it was tried")
        return held
