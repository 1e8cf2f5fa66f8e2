"""The sequences behind one cache, each a request of the ledger, all of one length.

The model says when a pass begins and how many tokens it has (`passes`). All layers have room for
them then, before one of them has changed anything. Layers store their part; when the pass ends,
its tokens count. What a pass that did not end has left is never found, nor gone on from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstow.adapters.transformers.attention import LayerPages
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.adapters.transformers.rows import BatchTable, RecurrentStates, TokenRows
from kvstow.adapters.transformers.tokens import KnownTokens
from kvstow.blocks.ledger import Admission
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError, ModelError
from kvstow.plan.retention import State, Window

Tensor = torch.Tensor


class Sequences:
    """Sequences of `num_tokens` tokens each. All of them change or none."""

    def __init__(
        self,
        memory: ModelMemory,
        *,
        requests: Sequence[int] = (),
        store: PrefixStore | None = None,
    ) -> None:
        lengths = {memory.ledger.num_tokens(request) for request in requests} or {0}
        if len(lengths) > 1:
            raise BlockError(
                f"requests hold {' and '.join(map(str, sorted(lengths)))} tokens\n\n"
                "hint: all sequences of a cache are of one length; make several caches"
            )
        num_tokens = lengths.pop()
        self.memory = memory
        self.requests: list[int] = list(requests)
        """The ledger's name of each sequence."""
        self.num_tokens = num_tokens
        self.prompts = KnownTokens(memory, store)
        self._running = RecurrentStates(memory.arena)
        self._rows = TokenRows(memory.arena)
        self._fixed_tokens = num_tokens
        """Tokens that are not taken back."""
        self._grown_tokens = num_tokens
        """Tokens that have rows: more than the sequences have where some were taken back."""
        self._end: int | None = None
        """Where the pass that is under way ends; None between passes."""
        self._seen: dict[str, int] = {}
        """Tokens that layers have stored or changed for, those of this pass that were reached."""
        if self.requests:
            self._refresh()

    # ── sequences ─────────────────────────────────────────────────────────────────

    def admit(self, prompts: list[Prompt]) -> None:
        """Admit sequences whose tokens are known; equally long hits are not computed again."""
        if self.memory.ledger.prefixes is None:
            self.begin(len(prompts))
            return
        change = self.memory.passes.change()
        num_tokens = None if change else self._admit_known(prompts)
        if num_tokens is None:
            self.begin_unnamed(len(prompts), change)
            return
        self.prompts.begin(prompts)
        self.num_tokens = self._grown_tokens = num_tokens
        self._fixed_tokens = len(prompts[0])

    def _admit_known(self, prompts: list[Prompt]) -> int | None:
        """Admit prompts with what the store has of them, if that is more than the memory has; how
        many tokens of each are there. None, and nothing admitted, where these differ."""
        hits = {self.memory.ledger.hit_tokens(prompt) for prompt in prompts}
        stored = self.prompts.stored_tokens(prompts)
        if stored > max(hits) and self._load(prompts, stored):
            return stored
        if len(hits) > 1:
            return None
        self._admit(prompts)
        return hits.pop()

    def _load(self, prompts: Sequence[Prompt], num_tokens: int) -> bool:
        """Admit prompts whose first tokens come from the store; whether all came, or none is
        admitted."""
        assert self.prompts.store is not None
        hits = self._admit(prompts, num_tokens=num_tokens)
        has_all = False
        try:
            has_all = all(
                self.prompts.store.load(prompt, request, hit, num_tokens)
                for prompt, request, hit in zip(prompts, self.requests, hits, strict=True)
            )
        finally:
            if not has_all:
                self._release(hits)
        if has_all:
            self.memory.ledger.received(self.requests)
            self._refresh()
        return has_all

    def begin(self, batch_size: int) -> None:
        """Admit sequences of which nothing is known, unless there are some already."""
        if not self.requests:
            self._admit([1] * batch_size)
        elif len(self.requests) != batch_size:
            raise BlockError(
                f"a cache of {len(self.requests)} sequences was given {batch_size}\n\n"
                "hint: give it one row of tokens for each beam or returned sequence"
            )

    def begin_unnamed(self, batch_size: int, reason: str) -> None:
        """Admit sequences that are computed and not reused; those without a pass begin again."""
        self._release(0)
        self.prompts.forget(reason)
        self._fixed_tokens = 0
        self.begin(batch_size)

    def _admit(self, prompts: Sequence[Prompt | int], *, num_tokens: int = 1) -> list[int]:
        """All sequences or none, with rows for so many tokens; how many of each are there."""
        ledger = self.memory.ledger
        admitted: list[Admission] = []
        try:
            for prompt in prompts:
                admitted.append(ledger.admit(prompt, num_tokens=num_tokens))
                self.memory.copy(admitted[-1].copies)
        except BaseException:
            for admission in admitted:
                ledger.release(admission.request, computed_tokens=admission.hit_tokens)
            raise
        self.requests = [admission.request for admission in admitted]
        self._refresh()
        return [admission.hit_tokens for admission in admitted]

    def release(self) -> None:
        """Give all rows back. What every layer has stored may be found as a prefix later."""
        try:
            self.prompts.name_answer(self.requests, self.num_tokens)
            self._save()
        finally:
            self._release(self.num_tokens)
        self.num_tokens = self._grown_tokens = self._fixed_tokens = 0
        self._end = None
        self._seen.clear()
        self.prompts.forget()
        self._running.forget()

    def _release(self, computed_tokens: int | Sequence[int]) -> None:
        if self.requests:
            self.memory.ledger.release(self.requests, computed_tokens=computed_tokens)
        self.requests = []

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was; rows stay shared."""
        self._running.settle()
        ledger = self.memory.ledger
        left = set(range(len(self.requests)))
        forked: list[int] = []
        try:
            for origin in origins:
                if origin in left:
                    left.remove(origin)
                    forked.append(self.requests[origin])
                else:
                    fork = ledger.fork(self.requests[origin])
                    forked.append(fork.request)
                    self.memory.copy(fork.copies)
        except BaseException:
            for request in set(forked) - set(self.requests):
                ledger.release(request)
            raise
        for origin in left:
            ledger.release(self.requests[origin])
        self.requests = forked
        self._refresh()
        self.prompts.rearrange(origins)
        self._fixed_tokens = self._grown_tokens

    def crop(self, tokens: int) -> None:
        """Take the last tokens back, or all there are: those that follow are written over them.

        Rows that others share or may find, windows that have moved on for good, and states
        cannot go back; then nothing is changed.
        """
        most = max((self.num_tokens, *self._seen.values()))
        num_tokens = max(0, most - tokens)
        taken = self._grown_tokens - num_tokens
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
        if lost and num_tokens < most:
            raise BlockError(f"{most} tokens cannot become {num_tokens}: {lost}")
        if not self.memory.has_states and num_tokens <= self.num_tokens:
            self.num_tokens, self._end = num_tokens, None
            self._seen.clear()

    # ── passes ────────────────────────────────────────────────────────────────────

    def begin_pass(
        self, batch_size: int, num_tokens: int, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """A pass of so many tokens begins: every layer has room for them afterwards.

        `arguments` are the model's; None where a model computes that nobody watches.
        """
        self._check_whole()
        self.begin(batch_size)
        fault = self.prompts.begin_pass(self.num_tokens, arguments)
        if fault and self.num_tokens:
            raise BlockError(
                f"{self.num_tokens} of {self.prompts.num_tokens} tokens are here as in a prompt, "
                f"the rest is not: {fault}\n\nhint: leave tokens out of Cache(...)"
            )
        if fault:
            self.begin_unnamed(batch_size, fault)
        if self.prompts.is_due(self.num_tokens):
            self._save()
        self._grow(self.num_tokens + num_tokens)
        self._end = self.num_tokens + num_tokens

    def end_pass(self, *, is_whole: bool) -> None:
        """The pass is over: all layers have its tokens, or an exception has ended it."""
        if is_whole and self._end is not None:
            self.num_tokens = self._end
            self._seen.clear()
        self._end = None

    def reach(self, layer: str, batch_size: int, tokens: int) -> None:
        """A pass reaches a layer with so many new tokens. The first one that is reached begins
        the pass of a model that nobody watches."""
        if self._end is None and (not self._seen or layer in self._seen):
            self.begin_pass(batch_size, tokens)
            self._end = None

    def done(self, layer: str, tokens: int) -> None:
        """Note that a layer has stored so many more tokens."""
        self._seen[layer] = self.seen(layer) + tokens
        if self._end is None and self._seen.keys() >= self._token_layers:
            self._end = self._seen[layer]
            self.end_pass(is_whole=True)

    def seen(self, layer: str) -> int:
        """Tokens that one layer has stored."""
        return self._seen.get(layer, self.num_tokens)

    @property
    def _token_layers(self) -> set[str]:
        """The layers that keep something of every token."""
        return {
            name
            for name, (_, spec, _) in self.memory.layout.layers.items()
            if not isinstance(spec.retention, State)
        }

    def _check_whole(self) -> None:
        """Refuses to go on after a pass that was interrupted: what follows would be wrong, and
        the store would keep it."""
        if self._seen:
            raise BlockError(
                f"the last pass was interrupted: some layers hold {self.num_tokens} tokens, others "
                f"up to {max(self._seen.values())}\n\nhint: begin again with a new cache, or "
                "cache.reset(); crop() takes tokens back where no layer is recurrent"
            )

    def _save(self) -> None:
        """Store what is known and computed of the sequences."""
        self._running.settle()
        self.prompts.save(self.requests, self.num_tokens, is_torn=bool(self._seen))

    def _grow(self, end: int) -> None:
        """Rows for the tokens up to `end`; states that the ledger wants to keep are copied."""
        copies = ()
        if end > max(1, self._grown_tokens):
            self._running.settle()
            copies = self.memory.ledger.grow(self.requests, end)
            self.memory.copy(copies)
        self._grown_tokens = max(end, self._grown_tokens)
        if copies or not self._rows.have_room(end):
            self._refresh()

    def _refresh(self) -> None:
        """Read the ledger's tables anew; lent states go back, their rows may be others."""
        device = self.memory.arena.device
        blocks = [self.memory.ledger.blocks(request) for request in self.requests]
        for g, group in enumerate(self.memory.ledger.groups):
            ids = np.stack([each[g].ids for each in blocks])
            placed = torch.from_numpy(ids).to(device)  # pyright: ignore[reportUnknownMemberType]
            if isinstance(group.retention, State):
                self._running.set(g, placed[:, 0])
            else:
                first = int(blocks[0][g].index[0]) if ids.shape[1] else 0
                self._rows.set(g, BatchTable(placed, first, group.block_tokens, {}))

    # ── rows and states ───────────────────────────────────────────────────────────

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
        return table.gathered(pages, start, seen + states.shape[2])

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

    def state(self, layer: str, field: str) -> Tensor | None:
        """The states of all sequences; what a pass writes to them reaches the rows, at once or
        by `settle`. None where there is no such state."""
        if field not in self._running.fields(layer) or not self.requests:
            return None
        if self._end is not None:
            self._seen[layer] = self._end
        return self._running.lend(layer, field)

    def changing(self, layer: str, field: str) -> Tensor:
        """The states of all sequences, which a pass is about to change."""
        if self._end is None:
            raise BlockError(
                f"{layer!r} would change in a pass that no model has announced\n\nhint: call the "
                "model that the memory was made of, not a part or a copy of it"
            )
        state = self.state(layer, field)
        if state is None:
            raise ModelError(f"{layer!r} kept no {field!r} when the model was tried")
        return state

    def settle(self) -> None:
        """Bring lent copies back into their rows."""
        self._running.settle()
