"""A transformers `Cache` whose every byte lies in kvstow rows."""

from collections.abc import Iterable, Sequence
from functools import cache as once
from typing import Any, Self

import torch
from transformers import Cache as TransformersCache
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvstow.adapters.transformers.inspect import cache_name, own_cache_class
from kvstow.adapters.transformers.layers import layer_of
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.passes import eager
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.adapters.transformers.sequences import Sequences
from kvstow.adapters.transformers.tokens import naming_fault, prompts_of
from kvstow.errors import ModelError
from kvstow.offload.store import Store
from kvstow.plan.layout import Order
from kvstow.plan.retention import State, Window
from kvstow.route.blocks import Blocks


class Cache(TransformersCache):
    """The cache of one batch of sequences, for `generate` or a forward pass.

        with Cache(model, memory="2GiB") as cache:
            model.generate(**inputs, past_key_values=cache)

    Caches that share a memory, and so what it still knows of common prefixes, are made of it:
    `Cache(ModelMemory.of(model, budget="2GiB"))`. The options from `block_tokens` to `in_place`
    are those of `ModelMemory.of`, for a cache that makes its own.

    Sequences are admitted when the first keys arrive. Give `tokens` (the `input_ids` that the
    model will be given, and `attention_mask` where there is padding) to admit them at once: then
    what the memory still knows of a common prefix is not computed again. Where tokens stand for
    images or other content, `extra` must tell for which, sequence by sequence, as in `Prompt.of`.
    Or give the `requests` of the ledger that hold their tokens already, such as pulled ones.

    Tokens that the model is given behind those, an answer's, are known by then: the next turn of a
    conversation finds them too.

    With a `store`, known tokens that it has rows for are not computed either. What was computed
    of them is stored at the end of the prompt, and of the answer when the cache is closed. Of a
    recurrent model only states at the end of a whole block are found again: see `prefill`. A store
    keeps rows of one computation only.

    Rows go back when the cache is closed, and the memory with them if it is the cache's own.
    """

    def __new__(cls, model: PreTrainedModel | ModelMemory, **_: Any) -> "Cache":
        """Of MiniMax's own class as well: it takes no other."""
        if isinstance(model, str):
            raise TypeError(
                f"Cache needs a loaded model, not the name {model!r}\n\n"
                "hint: AutoModelForCausalLM.from_pretrained(name)"
            )
        kind = model.own_cache if isinstance(model, ModelMemory) else own_cache_class(model)
        return object.__new__(lightning_cache() if kind == "MiniMaxCache" else cls)

    def __init__(  # pyright: ignore[reportInconsistentConstructor]
        self,
        model: PreTrainedModel | ModelMemory,
        *,
        memory: int | str | None = None,
        block_tokens: int = 16,
        order: Order = "BLHNC",
        rollback_tokens: int = 0,
        in_place: bool = False,
        store: Store | None = None,
        tokens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        extra: Sequence[Iterable[tuple[int, bytes]]] = (),
        requests: Sequence[int] = (),
    ) -> None:
        shares = isinstance(model, ModelMemory)
        if shares == (memory is not None):
            raise TypeError(
                "Cache(model, memory='2GiB') makes a memory, Cache(ModelMemory.of(...)) uses one: "
                f"memory is {memory!r} for a {type(model).__name__}"
            )
        held = (
            model
            if isinstance(model, ModelMemory)
            else ModelMemory.of(
                model,
                budget=memory or 0,
                block_tokens=block_tokens,
                order=order,
                rollback_tokens=rollback_tokens,
                in_place=in_place,
            )
        )
        self._own_memory = None if shares else held
        self.batch = Sequences(
            held,
            requests=requests,
            store=PrefixStore(held, store) if store is not None else None,
        )
        if tokens is not None:
            self._admit(held, tokens, attention_mask, extra)
        self._found_tokens = self.batch.num_tokens if tokens is not None else 0
        layers = [layer_of(self.batch, i) for i in range(held.num_layers)]
        TransformersCache.__init__(self, layers=layers)

    def _admit(
        self,
        memory: ModelMemory,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        extra: Sequence[Iterable[tuple[int, bytes]]],
    ) -> None:
        prompts = prompts_of(tokens, mask, extra)
        special = memory.placeholder_tokens, memory.padding_token
        fault = naming_fault(prompts, *special, has_mask=mask is not None)
        if fault:
            self.batch.begin_unnamed(len(prompts), fault)
        else:
            self.batch.admit(prompts)

    def prefill(self, model: PreTrainedModel, tokens: torch.Tensor) -> None:
        """Compute a prompt of a recurrent model up to its last whole block.

        Only there is its state one that a store can find again: the pass that `generate` makes
        of a whole prompt ends somewhere inside a block. Does nothing for other models.
        """
        start = self.num_tokens
        end = self.memory.whole_tokens(tokens.shape[1] - 1)
        if self.memory.has_states and end > start:
            with torch.no_grad():
                model(tokens[:, start:end], use_cache=True, **{cache_name(model): self})

    def __deepcopy__(self, memo: object) -> "Cache":
        """Refused: rows belong to the memory, and others may share them."""
        raise TypeError(
            "a cache of rows cannot be copied\n\nhint: Cache(memory, tokens=...) finds a prompt "
            "that the memory has computed; batch_repeat_interleave(n) goes on n times"
        )

    @property
    def memory(self) -> ModelMemory:
        return self.batch.memory

    @property
    def found_tokens(self) -> int:
        """Tokens that were found, in memory or in the store, and not computed."""
        return self._found_tokens

    @property
    def requests(self) -> tuple[int, ...]:
        """The ledger's name of each sequence."""
        return tuple(self.batch.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of every sequence, padding included."""
        return self.batch.num_tokens

    @eager
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen; all layers where none of them counts tokens."""
        if any(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return TransformersCache.get_seq_length(self, layer_idx)
        return self.num_tokens

    @eager
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A state of a layer, as it lies in the rows; None before the first tokens."""
        return self._state(layer_idx, "conv", state_idx)

    @eager
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A state of a layer, as it lies in the rows; None before the first tokens."""
        return self._state(layer_idx, "recurrent", state_idx)

    def _state(self, layer_idx: int, kind: str, state_idx: int) -> torch.Tensor | None:
        layer: Any = self.layers[layer_idx]
        if not layer.has_previous_state[state_idx]:
            return None
        return self.batch.state(layer.state_name, f"{kind}{state_idx}")

    def blocks(self, sequence: int) -> dict[int, Blocks]:
        """The blocks of one sequence by group, with everything written into them.

        Refused where the model is not what it was when the memory was made.
        """
        if change := self.memory.passes.change():
            raise ModelError(
                f"{change}: its rows would be taken for what it computes now\n\n"
                "hint: make another ModelMemory after such a change"
            )
        self.batch.settle()
        return self.memory.ledger.blocks(self.batch.requests[sequence])

    # ── beams ─────────────────────────────────────────────────────────────────────

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence `i` goes on from what was sequence `beam_idx[i]`; rows are shared."""
        beams: Any = beam_idx
        self.batch.rearrange(beams.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences only."""
        self.reorder_cache(torch.arange(len(self.batch.requests), device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, neighbours alike."""
        self.batch.rearrange([i for i in range(len(self.batch.requests)) for _ in range(repeats)])

    # ── tokens taken back ─────────────────────────────────────────────────────────

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens of every sequence, or all there are.

        A positive number is a ValueError, as in transformers.

        `rollback_tokens` of the memory says how many that may be where layers have windows;
        recurrent layers, prefixes and beams that have split do not go back at all.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) would remove a positive number of tokens\n\n"
                f"hint: crop(-{tokens_to_remove}) takes back the last {tokens_to_remove}"
            )
        self.batch.crop(-tokens_to_remove)

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
        """Give all rows back, and the memory if it is this cache's own."""
        self.batch.release()
        if self._own_memory is not None:
            self._own_memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@once
def lightning_cache() -> type[Cache]:
    """The class for MiniMax: keys and values of some layers, the state of lightning attention of
    the others."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class LightningCache(Cache, MiniMaxCache):
        def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
            """The state of a layer; None before the first tokens."""
            return self.get_recurrent_state(layer_idx)

        def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
            """Replace the state of a layer."""
            layer: Any = self.layers[layer_idx]
            layer.update_recurrent_state(linear_cache)
            layer.has_previous_state[0] = True

        def __len__(self) -> int:
            return TransformersCache.__len__(self)

    return LightningCache
