# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
"""Layers that keep a window of tokens, and one entry for every `rate` tokens of all (DeepSeek-V4).

    layers.3              the last tokens; keys are values
    layers.3.compressor   one entry per `rate` tokens, for good
    layers.3.indexer      likewise, where the layer chooses among its entries
    layers.3.state        what the next entries are made of: tokens that do not make a whole
                          entry yet, and the tokens of the last entry where entries overlap

How many tokens wait in the state, and whether there is a last entry, follows from the number
of tokens seen; so nothing is stored of that.
"""

import torch

from kvstow.adapters.transformers.batch import Batch
from kvstow.adapters.transformers.layers import RowsLayer
from kvstow.errors import ModelError

Tensor = torch.Tensor


class CompressedLayer(RowsLayer):
    """The window, the entries and the unfinished tokens of one layer, as the model asks for them.

    The model calls, for `compressor` and perhaps `indexer`: `store_compression_weights`, then
    `update_overlap_state` where entries overlap and there are new ones, then
    `update_compressor_states`. Only the last of these counts the tokens as seen.
    """

    def __init__(self, batch: Batch, name: str, window: int | None, rate: int) -> None:
        super().__init__(batch, name, window)
        self.compress_rate = rate
        self._arriving: dict[str, int] = {}

    @property
    def values(self) -> Tensor | None:
        """The keys."""
        return self.keys

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
