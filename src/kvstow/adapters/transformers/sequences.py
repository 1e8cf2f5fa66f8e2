# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The sequences behind one cache: requests of the ledger, their tables, their states.

A forward pass asks layer by layer. The first attention layer that brings more tokens than
there is room for makes the ledger grow for all layers; those that follow find the rows there.

Recurrent layers may come before that: they change the running rows before the ledger has had
a chance to say that the states of now are to be copied aside. So where such a layer is the
first that a pass touches, the rows are copied before it touches them, and what the ledger
wants copied then comes from there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvstow.adapters.transformers.attention import LayerPages
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.adapters.transformers.prompts import HeardTokens, check_continues, padding_of
from kvstow.adapters.transformers.ropes import RopeKind
from kvstow.adapters.transformers.rows import BatchTable, TokenRows, gathered
from kvstow.adapters.transformers.states import PassClock, RecurrentStates, StatePass, torn
from kvstow.blocks.ledger import Admission
from kvstow.blocks.prompt import Prompt
from kvstow.blocks.table import RowCopy
from kvstow.errors import BlockError
from kvstow.plan.retention import Encoder, State, Window

Tensor = torch.Tensor


class Sequences:
    """Sequences of one length; `num_tokens` of each have their rows."""

    def __init__(
        self,
        memory: ModelMemory,
        *,
        requests: Sequence[int] = (),
        num_tokens: int = 0,
        encoder_tokens: int = 0,
        store: PrefixStore | None = None,
    ) -> None:
        self.memory = memory
        self._store = store if memory.ledger.prefixes is not None else None
        self._prompts: list[Prompt] = []
        self.requests: list[int] = list(requests)
        self.num_tokens = num_tokens
        self.hit_tokens = num_tokens
        self.encoder_tokens = encoder_tokens
        self._known = self._saved_tokens = 0
        self._grown_tokens = self._fixed_tokens = num_tokens
        self._seen: dict[str, int] = {}
        self._rows = TokenRows(memory.arena)
        self.running = RecurrentStates(memory)
        self._pass = StatePass(memory)
        self._rope = RopeKind(memory.rope)
        self._first_touched = ""
        self._growing = [
            g
            for g, group in enumerate(memory.ledger.groups)
            if not isinstance(group.retention, State | Encoder)
        ]
        self._token_layers = [
            spec.name for g in self._growing for spec in memory.ledger.groups[g].layers
        ]
        self._clock = PassClock(memory)
        self._has_beams = self._forgets = False
        self.announced_by: object | None = None
        """The model whose pass is under way, once it was seen to be given the known tokens."""
        self.heard = HeardTokens()
        for request in self.requests:
            if memory.ledger.num_tokens(request) != num_tokens:
                raise BlockError(
                    f"request {request} holds {memory.ledger.num_tokens(request)} tokens, not "
                    f"{num_tokens}\n\nhint: num_tokens is what the request was admitted with"
                )
        if self.requests:
            self._refresh()

    # ── sequences ─────────────────────────────────────────────────────────────────

    def admit(self, prompts: list[Prompt]) -> None:
        """Admit sequences whose tokens are known; equally long hits are not computed again."""
        self._forgets = True
        named = self._named(prompts)
        if named is None:
            self.begin(len(prompts))
            return
        prompts = named
        self._rope.begin(len(prompts[0]))
        hits = {self.memory.ledger.hit_tokens(prompt) for prompt in prompts}
        if not self._load(prompts, max(hits)):
            if len(hits) > 1:
                self.begin(len(prompts))
                return
            self._admit(prompts)
            self.num_tokens = hits.pop()
        self.hit_tokens = self._grown_tokens = self.num_tokens
        self._known = self._fixed_tokens = len(prompts[0])
        self._prompts, self._forgets = prompts, False

    def _named(self, prompts: list[Prompt]) -> list[Prompt] | None:
        """Prompts in the names of the rows that serve them: None where the rope is that of the
        longest sequence of the batch."""
        if self.memory.rope is None:
            return prompts
        named = [self.memory.rope.named(prompt) for prompt in prompts if not padding_of(prompt)]
        whole = [prompt for prompt in named if prompt is not None]
        return whole if len(whole) == len(prompts) else None

    def _load(self, prompts: Sequence[Prompt], hit_tokens: int) -> bool:
        """Admit sequences with what the store has of them, if that is more; whether it was."""
        if self._store is None:
            return False
        stored = {self._store.num_tokens(prompt) for prompt in prompts}
        if len(stored) > 1 or (length := stored.pop()) <= hit_tokens:
            return False
        hits = self._admit(prompts, num_tokens=length)
        if all(map(self._store.load, prompts, self.requests, hits, [length] * len(prompts))):
            self.memory.ledger.received(self.requests)
            self._refresh()
            self.num_tokens = length
            return True
        self.memory.ledger.release(self.requests, computed_tokens=hits)
        self.requests = []
        return False

    def begin(self, batch_size: int) -> None:
        """Admit sequences of which nothing is known, unless there are some already."""
        if self.requests:
            if len(self.requests) != batch_size:
                raise BlockError(
                    f"a cache of {len(self.requests)} sequences was given {batch_size}\n\n"
                    "hint: give it one row of tokens for each beam or returned sequence"
                )
            return
        self._admit([1] * batch_size)
        self.num_tokens = 0

    def _admit(self, wanted: Sequence[Prompt | int], *, num_tokens: int = 1) -> list[int]:
        """All sequences or none, with rows for so many tokens; how many of each are there."""
        ledger = self.memory.ledger
        admitted: list[Admission] = []
        try:
            for each in wanted:
                admitted.append(ledger.admit(each, num_tokens=num_tokens))
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
        if self.requests:
            if self._store is not None:
                self._store.begin_pass(0, 0)
            try:
                self._save()
            finally:
                computed = self._rope.of(self.computed_tokens)
                self.memory.ledger.release(self.requests, computed_tokens=computed)
        self.requests, self._prompts = [], []
        self.num_tokens = self.hit_tokens = self._known = self._saved_tokens = 0
        self._grown_tokens = self._fixed_tokens = self.encoder_tokens = 0
        self._seen.clear()
        self.heard = HeardTokens()
        self._rope.begin(0)
        self._clock.is_uncounted = self._has_beams = self._forgets = False
        self.running.forget()
        self._pass.forget()

    def _save_in_time(self, layer: str) -> None:
        """Where a pass begins with this layer, store what the sequences hold before windows and
        states move on: at the end of what is known, and states wherever a whole block ends."""
        self._check_announced(layer)
        computed, known = self.computed_tokens, self._known
        if self._store is None or layer != self._first_touched or computed <= self._saved_tokens:
            return
        ends = computed >= known > self._saved_tokens
        at_block_end = self.memory.whole_tokens(computed) == computed
        if ends or (self.memory.has_states and at_block_end and computed <= known):
            self._save()

    @property
    def has_store(self) -> bool:
        """Whether beginnings of these sequences are kept in a store."""
        return self._store is not None and bool(self._prompts)

    def _save(self) -> None:
        """Store what is known and computed of the sequences."""
        if self._store is None or not self._prompts:
            return
        self.settle()
        computed = self.computed_tokens
        self._saved_tokens = min(self._known, computed)
        length = self._rope.of(self._saved_tokens)
        for prompt, request in zip(self._prompts, self.requests, strict=True):
            is_running = length == computed and not self.is_torn
            self._store.save(prompt, request, length, is_running=is_running)

    def reorder_beams(self, origins: Sequence[int]) -> None:
        """Rearrange, and note that nobody will say which tokens a sequence has had."""
        self._has_beams = True
        self.heard = HeardTokens()  # not rearranged again and again: beams are never remembered
        self.rearrange(origins)

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was; rows stay shared."""
        self.settle()
        ledger = self.memory.ledger
        left = set(range(len(self.requests)))
        forked: list[int] = []
        try:
            for origin in origins:
                if origin in left:
                    left.remove(origin)
                    forked.append(self.requests[origin])
                else:
                    forked.append(self._fork(self.requests[origin]))
        except BaseException:
            for request in set(forked) - set(self.requests):
                ledger.release(request)
            raise
        for origin in left:
            ledger.release(self.requests[origin])
        self.requests = forked
        self._prompts = [self._prompts[origin] for origin in origins] if self._prompts else []
        self._fixed_tokens = self._grown_tokens
        self.heard.rearrange(origins)
        self.running.forget_before()
        self._refresh()

    def _fork(self, request: int) -> int:
        fork = self.memory.ledger.fork(request)
        self.memory.copy(fork.copies)
        return fork.request

    def remember(self, tokens: Tensor) -> None:
        """Say which tokens the sequences are, so that later ones may begin like them.

        Whole blocks of them stay cached when the sequences are released; nothing of sequences
        that could not be named when they began.
        """
        if self._forgets:
            return
        if not self._known:
            raise BlockError(
                "sequences that began without their tokens cannot be remembered\n\n"
                "hint: give the cache its tokens: Cache(memory, tokens=input_ids)"
            )
        self.count()
        if self._has_beams:
            raise BlockError(
                "beams cannot be remembered: the answers of a beam search are not in the order of "
                "the cache's sequences, and may not be among them\n\n"
                "hint: the prompt is kept without it"
            )
        check_continues(tokens, self._prompts, self._known, self.num_tokens)
        self.heard.check(tokens, self._known, self.num_tokens)
        given = tokens[:, self._known : self.num_tokens].cpu().numpy()
        for request, row in zip(self.requests, given, strict=True):
            self.memory.ledger.append(request, row)
        self._prompts = [
            prompt.extended(row) for prompt, row in zip(self._prompts, given, strict=True)
        ]
        self._known = max(self._known, self.num_tokens)
        self._fixed_tokens = max(self._fixed_tokens, self._known)

    def crop(self, num_tokens: int) -> None:
        """Take tokens back, down to `num_tokens`: those that follow are written over them.

        Rows that others share or may find, windows that have moved on for good, and states
        cannot go back; then nothing is changed.
        """
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
        if lost and num_tokens < self.num_tokens:
            raise BlockError(f"{self.num_tokens} tokens cannot become {num_tokens}: {lost}")
        self.num_tokens = num_tokens
        self._rope.crop(num_tokens)
        self._seen = dict.fromkeys(self._seen, num_tokens)

    # ── tokens that are known ─────────────────────────────────────────────────────

    @property
    def known_tokens(self) -> int:
        """Tokens of each sequence that somebody has told."""
        return self._known

    @property
    def prompts(self) -> list[Prompt]:
        """What is known of each sequence."""
        return self._prompts

    @property
    def next_token(self) -> int:
        """The first token of the next pass."""
        self.count()
        return self.num_tokens

    def _check_announced(self, layer: str) -> None:
        """Refuses known tokens' rows of a pass that the memory's model did not make."""
        unseen = self.memory.watch is not None and self.announced_by is None
        if unseen and layer == self._first_touched and self.num_tokens < self._known:
            raise BlockError(
                f"tokens from {self.num_tokens} on are known, and are computed by another model "
                "than the one that the cache's memory was made for, or past that model's hooks\n\n"
                "hint: call the model itself, model(...), or leave tokens out of Cache(...)"
            )

    def _check_rope(self, start: int, end: int) -> None:
        """Nothing is kept of a pass whose rope is not the one that the prompts are named by."""
        if self._rope.has(end):
            return
        if start >= self._known:
            self._rope.leave(start)
        elif start == 0:
            self._forget_prompts()
        else:
            raise BlockError(
                f"{start} of {self._known} tokens are here as they are in a prompt of that length, "
                f"and a pass ends at {end}, where the model's rope is another one\n\n"
                "hint: compute the rest of the prompt in one pass, or leave tokens out of the cache"
            )

    def _forget_prompts(self) -> None:
        """Begin again without names, where nothing has been computed."""
        batch_size = len(self.requests)
        self.memory.ledger.release(self.requests, computed_tokens=0)
        self._prompts, self._forgets = [], True
        self._known = self._fixed_tokens = 0
        self._admit([1] * batch_size)

    # ── tokens ────────────────────────────────────────────────────────────────────

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

    def step(self, layer: str, tokens: int) -> None:
        """Make room for so many more tokens of a layer, and of all others that follow."""
        self._first_touched = self._first_touched or layer
        if layer == self._first_touched:
            self._check_whole(is_torn=self.is_torn)
            self._check_rope(self.seen(layer), self.seen(layer) + tokens)
        self._save_in_time(layer)
        self._measure(layer, tokens)
        wanted = self.seen(layer) + tokens
        if wanted > self.num_tokens:
            self._check_whole(is_torn=self._seen_differ)
            self._grow(wanted)

    def _measure(self, layer: str, tokens: int) -> None:
        """Let a remote store know what computing costs: from a pass's first layer to its last."""
        if self._store is not None and layer == self._first_touched:
            self._store.begin_pass(tokens, len(self.requests))
        elif self._store is not None:
            self._store.mark_pass()

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

    def _grow(self, wanted: int) -> None:
        if self.num_tokens < self._known < wanted and self.hit_tokens:
            raise BlockError(
                f"{self.hit_tokens} of {self._known} tokens were found, and the model was given "
                f"{wanted - self.num_tokens} more: the prompt again, or tokens behind it\n\n"
                "hint: give it the prompt's last tokens first; assisted generation computes whole "
                "prompts, so leave tokens out there"
            )
        copies: tuple[RowCopy, ...] = ()
        if wanted > max(1, self._grown_tokens):
            self.settle()
            copies = self.memory.ledger.grow(self.requests, wanted)
            self.running.copy(copies, self.num_tokens)
        self._grown_tokens = max(wanted, self._grown_tokens)
        same_blocks = self._rows.have_room(self._growing, wanted)
        self.num_tokens = wanted
        if copies or not same_blocks:
            self._refresh()

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

    def encode(self, layer: str, fields: Mapping[str, Tensor]) -> None:
        """Write all positions of the encoder."""
        _, spec, _ = self.memory.layout.layers[layer]
        assert isinstance(spec.retention, Encoder)
        self.encoder_tokens = min(states.shape[2] for states in fields.values())
        if self.encoder_tokens > spec.retention.tokens:
            raise BlockError(
                f"layer {layer!r}: rows for {spec.retention.tokens} encoder positions, not "
                f"{self.encoder_tokens}\n\n"
                f"hint: ModelMemory.of(model, encoder_tokens={self.encoder_tokens})"
            )
        for field, states in fields.items():
            self._rows.write(layer, field, states, 0)

    def held(self, layer: str, field: str, start: int) -> Tensor | None:
        """All entries from `start` on, of the encoder's positions where these are the layer's."""
        encoded = isinstance(self.memory.layout.layers[layer][1].retention, Encoder)
        end = self.encoder_tokens if encoded else self.seen(layer)
        if start >= end:
            return None
        return self._rows.gathered(layer, field, start, end)

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
        self._save_in_time(layer)
        if layer == self._first_touched:
            self.running.keep(self.num_tokens)

    # ── tables ────────────────────────────────────────────────────────────────────

    def _refresh(self) -> None:
        """Read the ledger's tables anew; lent states go back, their rows may be others."""
        device = self.memory.arena.device
        blocks = [self.memory.ledger.blocks(request) for request in self.requests]
        for g, group in enumerate(self.memory.ledger.groups):
            ids = np.stack([each[g].ids for each in blocks])
            placed = torch.from_numpy(ids).to(device)
            if isinstance(group.retention, State):
                self.running.set(g, placed[:, 0])
            else:
                first = int(blocks[0][g].index[0]) if ids.shape[1] else 0
                self._rows.set(g, BatchTable(placed, first, group.block_tokens))
