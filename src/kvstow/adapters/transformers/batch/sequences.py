# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The sequences behind one cache: what its layers store, pass by pass, and what they are handed.

A forward pass asks layer by layer. The first attention layer that brings more tokens than
there is room for makes the ledger grow for all layers; those that follow find the rows there.

Recurrent layers may come before that: they change the running rows before the ledger has had
a chance to say that the states of now are to be copied aside. So where such a layer is the
first that a pass touches, the rows are copied before it touches them, and what the ledger
wants copied then comes from there.
"""

from collections.abc import Sequence

import torch

from kvstow.adapters.transformers.attention import LayerPages
from kvstow.adapters.transformers.batch.known import KnownTokens
from kvstow.adapters.transformers.batch.requests import BatchRequests
from kvstow.adapters.transformers.batch.rows import gathered
from kvstow.adapters.transformers.batch.states import PassClock, StatePass, torn
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError
from kvstow.plan.retention import Window

Tensor = torch.Tensor


class Sequences:
    """Sequences of one length; `num_tokens` of each have their rows."""

    def __init__(
        self,
        memory: ModelMemory,
        *,
        requests: Sequence[int] = (),
        num_tokens: int = 0,
        store: PrefixStore | None = None,
    ) -> None:
        self.memory = memory
        self.num_tokens = num_tokens
        self.hit_tokens = num_tokens
        self.known = KnownTokens(memory, store)
        self._requests = BatchRequests(memory, requests, num_tokens)
        self.running, self._rows = self._requests.running, self._requests.rows
        self._token_layers = self._requests.token_layers
        self._fixed_tokens = num_tokens
        self._seen: dict[str, int] = {}
        self._pass = StatePass(memory)
        self._clock = PassClock(memory)
        self._first_touched = ""

    @property
    def requests(self) -> list[int]:
        """The ledger's name of each sequence."""
        return self._requests.ids

    # ── sequences ─────────────────────────────────────────────────────────────────

    def admit(self, prompts: list[Prompt]) -> None:
        """Admit sequences whose tokens are known; equally long hits are not computed again."""
        passes = self.memory.passes
        change = "" if passes is None else passes.change()
        num_tokens = None if change else self._admit(prompts)
        if num_tokens is None:
            self.begin_unnamed(len(prompts), change)
            return
        self.known.begin(prompts)
        self.num_tokens = self.hit_tokens = self._requests.grown_tokens = num_tokens
        self._fixed_tokens = len(prompts[0])

    def begin_unnamed(self, batch_size: int, reason: str) -> None:
        """Admit sequences that are computed and not reused; those without a pass begin again."""
        self._requests.release(0)
        self.known.leave_unnamed(reason)
        self._fixed_tokens = 0
        self.begin(batch_size)

    def _admit(self, prompts: list[Prompt]) -> int | None:
        """Admit prompts with what the store has of them, if that is more than the memory has; how
        many tokens of each are there. None, and nothing admitted, where these differ."""
        hits = {self.memory.ledger.hit_tokens(prompt) for prompt in prompts}
        store, stored = self.known.store, self.known.stored_tokens(prompts)
        is_more = stored > max(hits)
        if store is not None and is_more and self._requests.load(prompts, store, stored):
            return stored
        if len(hits) > 1:
            return None
        self._requests.admit(prompts)
        return hits.pop()

    def begin(self, batch_size: int) -> None:
        """Admit sequences of which nothing is known, unless there are some already."""
        if self.requests:
            if len(self.requests) != batch_size:
                raise BlockError(
                    f"a cache of {len(self.requests)} sequences was given {batch_size}\n\n"
                    "hint: give it one row of tokens for each beam or returned sequence"
                )
            return
        self._requests.admit([1] * batch_size)
        self.num_tokens = 0

    def release(self) -> None:
        """Give all rows back. What every layer has stored may be found as a prefix later."""
        if self.requests:
            self.count()
            try:
                self.known.name_answer(self.requests, self.computed_tokens)
                self._save()
            finally:
                self._requests.release(self.computed_tokens)
        self.num_tokens = self.hit_tokens = 0
        self._requests.grown_tokens = self._fixed_tokens = 0
        self._seen.clear()
        self.known.forget()
        self._clock.is_uncounted = False
        self.running.forget()
        self._pass.forget()

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was; rows stay shared."""
        self.settle()
        self._requests.rearrange(origins)
        self.known.rearrange(origins)
        self._fixed_tokens = self._requests.grown_tokens

    def crop(self, num_tokens: int) -> None:
        """Take tokens back, down to `num_tokens`: those that follow are written over them.

        Rows that others share or may find, windows that have moved on for good, and states
        cannot go back; then nothing is changed.
        """
        taken = self._requests.grown_tokens - num_tokens
        groups = self.memory.ledger.groups
        lost = ""
        if self.memory.has_states:
            lost = "a recurrent state does not go back"
        elif num_tokens < self._fixed_tokens:
            lost = f"the first {self._fixed_tokens} are shared, known as a prefix, or came along"
        elif taken > self.memory.rollback_tokens and any(
            isinstance(group.retention, Window) for group in groups
        ):
            lost = (
                f"windows keep rows for taking back {self.memory.rollback_tokens}, not {taken}"
                f"\n\nhint: ModelMemory.of(model, rollback_tokens={taken})"
            )
        if lost and num_tokens < self.num_tokens:
            raise BlockError(f"{self.num_tokens} tokens cannot become {num_tokens}: {lost}")
        self.num_tokens = num_tokens
        self._seen = dict.fromkeys(self._seen, num_tokens)

    # ── tokens ────────────────────────────────────────────────────────────────────

    @property
    def next_token(self) -> int:
        """The first token of the next pass."""
        self.count()
        return self.num_tokens

    def seen(self, layer: str) -> int:
        """Tokens that one layer has stored."""
        return self._seen.get(layer, self.hit_tokens)

    @property
    def computed_tokens(self) -> int:
        """Tokens that every layer has stored: fewer than have rows if a pass was interrupted."""
        return min((self.seen(layer) for layer in self._token_layers), default=self.num_tokens)

    @property
    def is_torn(self) -> bool:
        """Whether a pass was interrupted, so that layers are not all after the same token."""
        return self._pass.is_torn or self._seen_differ

    @property
    def _seen_differ(self) -> bool:
        return any(self.seen(layer) != self.num_tokens for layer in self._token_layers)

    def _check_whole(self, *, is_torn: bool) -> None:
        """Refuses to go on after a pass that was interrupted: what follows would be wrong, and
        the store would keep it."""
        if is_torn:
            raise torn([self.seen(layer) for layer in self._token_layers], self.num_tokens)

    # ── passes ────────────────────────────────────────────────────────────────────

    def step(self, layer: str, tokens: int) -> None:
        """Make room for so many more tokens of a layer, and of all others that follow."""
        self._first_touched = self._first_touched or layer
        if layer == self._first_touched:
            self._check_whole(is_torn=self.is_torn)
            self._begin_tokens()
        end = self.seen(layer) + tokens
        if end > self.num_tokens:
            self._check_whole(is_torn=self._seen_differ)
            self._grow(end)

    def _begin_tokens(self) -> None:
        """A pass begins: is it as in a prompt, and is anything to be stored before windows and
        states move on?"""
        doubt = self.known.doubt(self.num_tokens)
        if doubt and self.num_tokens:
            raise BlockError(
                f"{self.num_tokens} of {self.known.num_tokens} tokens are here as in a prompt, the "
                f"rest is not: {doubt}\n\nhint: leave tokens out of Cache(...)"
            )
        if doubt:
            self.begin_unnamed(len(self.requests), doubt)
        if self.known.is_due(self.computed_tokens):
            self._save()

    def _save(self) -> None:
        """Store what is known and computed of the sequences."""
        if self.known.has_store:
            self.settle()
            self.known.save(self.requests, self.computed_tokens, is_torn=self.is_torn)

    def begin_pass(self, layer: str) -> None:
        """Note that a pass has begun, where no layer but this one would say so."""
        if self._clock.is_told_by(layer):
            self._check_whole(is_torn=self._pass.is_torn)
            self.count()
            self._touch(layer)
            self._clock.is_uncounted = True

    def pass_tokens(self, layer: str, tokens: int) -> None:
        """Note how many tokens the pass has, where no layer but this one would say so."""
        if self._clock.is_told_by(layer):
            self._check_whole(is_torn=self._pass.is_torn and not self._clock.is_uncounted)
            self._clock.is_uncounted = False
            self._grow(self.num_tokens + tokens)

    def count(self) -> None:
        """Note that the pass that has begun was of one token, unless it said otherwise."""
        if self._clock.is_uncounted:
            self._clock.is_uncounted = False
            self._grow(self.num_tokens + 1)

    def _grow(self, end: int) -> None:
        self._requests.grow(end, self.num_tokens)
        self.num_tokens = end

    # ── rows ──────────────────────────────────────────────────────────────────────

    def store(self, layer: str, field: str, states: Tensor, start: int) -> Tensor:
        """Write new entries, one per token or per several, and return all from `start` on."""
        seen = self.seen(layer) // self.memory.layout.layers[layer][1].tokens_per_state
        own = self._rows.own_heads(layer, states)
        pages, table = self._rows.write(layer, field, own, self.seen(layer))
        if seen == start:
            return states.contiguous()
        if own is not states:
            raise BlockError(
                f"layer {layer!r}: tokens before {seen} are here for {own.shape[1]} of "
                f"{states.shape[1]} heads\n\nhint: compute the prompt in one pass"
            )
        return gathered(pages, table, start, seen + states.shape[2])

    def stored_in_place(
        self, layer: str, keys: Tensor, values: Tensor, window: int | None
    ) -> LayerPages:
        """Write new tokens, and say where all of them lie."""
        seen = self.seen(layer)
        k_pages, table = self._rows.write(layer, "k", keys, seen)
        v_pages, _ = self._rows.write(layer, "v", values, seen)
        return LayerPages(k_pages, v_pages, table, seen + keys.shape[2], window)

    def held(self, layer: str, field: str, start: int) -> Tensor | None:
        """All entries from `start` on."""
        end = self.seen(layer)
        return None if start >= end else self._rows.gathered(layer, field, start, end)

    def done(self, layer: str, tokens: int) -> None:
        """Note that a layer has stored so many more tokens."""
        self._seen[layer] = self.seen(layer) + tokens
        if self.memory.has_states and not self._seen_differ:
            self._pass.stored()

    # ── states ────────────────────────────────────────────────────────────────────

    def lend(self, layer: str, field: str) -> Tensor | None:
        """The states of all sequences; changes reach the rows, at once or by `settle`."""
        if field not in self.running.fields(layer) or not self.requests:
            return None
        self._check_whole(is_torn=self._pass.begins_again(layer))
        if not self._clock.is_needed:
            self._touch(layer)
        self._pass.reach(layer, field)
        return self.running.lend(layer, field)

    def settle(self) -> None:
        """Bring lent copies back into their rows."""
        self.count()
        self.running.settle()

    def _touch(self, layer: str) -> None:
        """Keep the rows as they are before a pass, where a pass begins with this layer."""
        self._first_touched = self._first_touched or layer
        if layer == self._first_touched:
            self._begin_tokens()
            self.running.keep(self.num_tokens)
