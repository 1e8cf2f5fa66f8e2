# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""What is known of the tokens of one batch, and what may be kept under their names.

Rows are found again by the tokens that a cache was told first, and by those that `remember` told
of an answer. What is told has to be what the model was given: anything else is refused, or
nothing is kept of it.
"""

from collections.abc import Sequence

import torch

from kvstow.adapters.transformers.batch.prompts import padding_of
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.model.ropes import RopeKind
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError

Tensor = torch.Tensor


class KnownTokens:
    """The prompts of a batch's sequences; none where nobody told them or they cannot be named."""

    def __init__(self, memory: ModelMemory, store: PrefixStore | None) -> None:
        self.memory = memory
        self.store = store if memory.ledger.prefixes is not None else None
        self._rope = RopeKind(memory.rope)
        self.announced_by: object | None = None
        """The model whose pass is under way, once it was seen to be given the known tokens."""
        self.forget()

    def forget(self) -> None:
        """The sequences have ended."""
        self.prompts: list[Prompt] = []
        self.num_tokens = 0
        """Tokens of each sequence that somebody has told."""
        self.heard = HeardTokens()
        self._saved_tokens = 0
        self._has_beams = self._is_unnamed = False
        self._rope.begin(0)

    # ── prompts ───────────────────────────────────────────────────────────────────

    def named(self, prompts: list[Prompt]) -> list[Prompt] | None:
        """Prompts in the names of the rows that serve them: None where the rope is that of the
        longest sequence of the batch."""
        rope = self.memory.rope
        if rope is None:
            return prompts
        named = [rope.named(prompt) for prompt in prompts if not padding_of(prompt)]
        whole = [prompt for prompt in named if prompt is not None]
        return whole if len(whole) == len(prompts) else None

    def begin(self, prompts: list[Prompt]) -> None:
        """The sequences begin with these prompts, all of one length."""
        self.prompts, self.num_tokens = prompts, len(prompts[0])
        self._rope.begin(self.num_tokens)

    def leave_unnamed(self) -> None:
        """The sequences have no names that rows could be found by; `remember` does nothing."""
        self.prompts, self.num_tokens = [], 0
        self._is_unnamed = True

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was."""
        self.prompts = [self.prompts[origin] for origin in origins] if self.prompts else []
        self.heard.rearrange(origins)

    def note_beams(self) -> None:
        """Nobody will say which tokens a sequence has had."""
        self._has_beams = True
        self.heard = HeardTokens()  # not rearranged again and again: beams are never remembered

    def remember(self, tokens: Tensor, requests: Sequence[int], num_tokens: int) -> None:
        """Say which tokens the sequences are that hold `num_tokens` of them."""
        if self._is_unnamed:
            return
        if not self.num_tokens:
            raise BlockError(
                "sequences that began without their tokens cannot be remembered\n\n"
                "hint: give the cache its tokens: Cache(memory, tokens=input_ids)"
            )
        if self._has_beams:
            raise BlockError(
                "beams cannot be remembered: the answers of a beam search are not in the order of "
                "the cache's sequences, and may not be among them\n\n"
                "hint: the prompt is kept without it"
            )
        check_continues(tokens, self.prompts, self.num_tokens, num_tokens)
        self.heard.check(tokens, self.num_tokens, num_tokens)
        given = tokens[:, self.num_tokens : num_tokens].cpu().numpy()
        for request, row in zip(requests, given, strict=True):
            self.memory.ledger.append(request, row)
        self.prompts = [
            prompt.extended(row) for prompt, row in zip(self.prompts, given, strict=True)
        ]
        self.num_tokens = max(self.num_tokens, num_tokens)

    # ── passes ────────────────────────────────────────────────────────────────────

    def check_announced(self, start: int) -> None:
        """Refuses known tokens' rows of a pass that the memory's model did not make."""
        unseen = self.memory.watch is not None and self.announced_by is None
        if unseen and start < self.num_tokens:
            raise BlockError(
                f"tokens from {start} on are known, and are computed by another model "
                "than the one that the cache's memory was made for, or past that model's hooks\n\n"
                "hint: call the model itself, model(...), or leave tokens out of Cache(...)"
            )

    def check_end(self, start: int, wanted: int, hit_tokens: int) -> None:
        """Refuses a pass over tokens `[start, wanted)` that goes on behind the known ones, where
        some were found: it is a pass over the whole prompt."""
        if start < self.num_tokens < wanted and hit_tokens:
            raise BlockError(
                f"{hit_tokens} of {self.num_tokens} tokens were found, and the model was given "
                f"{wanted - start} more: the prompt again, or tokens behind it\n\n"
                "hint: give it the prompt's last tokens first; assisted generation computes whole "
                "prompts, so leave tokens out there"
            )

    def names(self, start: int, end: int) -> bool:
        """Whether the prompts' names hold for a pass over tokens `[start, end)`.

        Not where its rope is another one than theirs and nothing has been computed; tokens behind
        the known ones are then left out of what may be found.
        """
        if self._rope.has(end):
            return True
        if start >= self.num_tokens:
            self._rope.leave(start)
            return True
        if start > 0:
            raise BlockError(
                f"{start} of {self.num_tokens} tokens are here as they are in a prompt of that "
                f"length, and a pass ends at {end}, where the model's rope is another one\n\n"
                "hint: compute the rest of the prompt in one pass, or leave tokens out of the cache"
            )
        return False

    def crop(self, num_tokens: int) -> None:
        """Tokens from `num_tokens` on were taken back."""
        self._rope.crop(num_tokens)

    def findable(self, computed: int) -> int:
        """How many of so many computed tokens may be found as a prefix."""
        return self._rope.of(computed)

    # ── a store ───────────────────────────────────────────────────────────────────

    @property
    def has_store(self) -> bool:
        """Whether beginnings of these sequences are kept in a store."""
        return self.store is not None and bool(self.prompts)

    def stored_tokens(self, prompts: Sequence[Prompt]) -> int:
        """Tokens that the store has of every prompt; 0 where these are not equally many."""
        if self.store is None:
            return 0
        stored = {self.store.num_tokens(prompt) for prompt in prompts}
        return stored.pop() if len(stored) == 1 else 0

    def is_due(self, computed: int) -> bool:
        """Whether what was computed is to be stored before windows and states move on: at the end
        of what is known, and states wherever a whole block ends."""
        if self.store is None or computed <= self._saved_tokens:
            return False
        ends = computed >= self.num_tokens > self._saved_tokens
        at_block_end = self.memory.whole_tokens(computed) == computed
        return ends or (self.memory.has_states and at_block_end and computed <= self.num_tokens)

    def save(self, requests: Sequence[int], computed: int, *, is_torn: bool) -> None:
        """Store what is known and computed of the sequences. States are left out where a pass was
        interrupted (`is_torn`), or where they are those of later tokens."""
        if self.store is None:
            return
        self._saved_tokens = min(self.num_tokens, computed)
        length = self.findable(self._saved_tokens)
        for prompt, request in zip(self.prompts, requests, strict=True):
            is_running = length == computed and not is_torn
            self.store.save(prompt, request, length, is_running=is_running)


# ── what was told, and what the model was given ───────────────────────────────────────


def check_continues(
    tokens: torch.Tensor, prompts: Sequence[Prompt], known: int, num_tokens: int
) -> None:
    """Refuses tokens that cannot be those of the sequences: fewer than the `num_tokens` that they
    hold, or not beginning with the `known` tokens of their prompts."""
    if tokens.ndim != 2 or len(tokens) != len(prompts):
        raise BlockError(f"{len(prompts)} sequences, tokens are {tuple(tokens.shape)}")
    if tokens.shape[1] < num_tokens:
        raise BlockError(
            f"{tokens.shape[1]} tokens are told of sequences that hold {num_tokens}\n\n"
            "hint: give the prompt and the answer, as generate returns them"
        )
    begun = tokens[:, :known].cpu().numpy()
    if any((row != p.tokens[: len(row)]).any() for row, p in zip(begun, prompts, strict=True)):
        raise BlockError(
            "the tokens do not begin like those that the cache was made for\n\n"
            "hint: give the prompt and the answer, as generate returns them"
        )


class HeardTokens:
    """The tokens that a model was given, pass by pass; None where not as in a prompt."""

    def __init__(self) -> None:
        self._passes: list[tuple[int, Tensor | None]] = []
        self._fault = ""

    def hear(self, start: int, ids: Tensor | None, fault: str = "") -> None:
        """A pass computes these tokens from `start` on; `fault` says why a prompt's rows would be
        others."""
        self._passes.append((start, None if fault else ids))
        self._fault = fault or self._fault

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was."""
        rows = list(origins)
        self._passes = [(at, None if ids is None else ids[rows]) for at, ids in self._passes]

    def check(self, tokens: Tensor, known: int, num_tokens: int) -> None:
        """Refuses tokens that are not those that the model was given behind the known ones.

        Of what was given for one place several times, as after `crop`, the last counts.
        """
        if not self._passes:
            return
        given = torch.full((len(tokens), max(0, num_tokens - known)), -1)
        for start, ids in self._passes:
            first, skipped = max(0, start - known), max(0, known - start)
            part = given[:, first:] * 0 - 1 if ids is None else ids[:, skipped:].cpu()
            room = given[:, first:][:, : part.shape[1]]
            room.copy_(part[:, : room.shape[1]])
        if not torch.equal(given, tokens[:, known:num_tokens].cpu().to(given.dtype)):
            fault = f": {self._fault}" if self._fault else ""
            raise BlockError(
                f"tokens from {known} on are not those that the model was given{fault}\n\n"
                "hint: give the prompt and the answer, as generate returns them"
            )
