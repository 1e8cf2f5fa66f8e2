# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""What is known of the tokens of one batch, and what may be kept under their names.

Rows are found again by the tokens that a cache was told first, and by those that `remember` told
of an answer. What is told has to be what the model was given: other tokens are refused, and
nothing is kept of passes that are not as in a prompt.
"""

import logging
from collections.abc import Sequence

import torch

from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError

log = logging.getLogger(__name__)

Tensor = torch.Tensor

ANSWER_HINT = "hint: give the prompt and the answer, as generate returns them"


class KnownTokens:
    """The prompts of a batch's sequences; none where nobody told them or they are not reused."""

    def __init__(self, memory: ModelMemory, store: PrefixStore | None) -> None:
        self.memory = memory
        self.store = store if memory.ledger.prefixes is not None else None
        self.pass_of: object | None = None
        """The model whose pass is under way, once its tokens were compared."""
        self.forget()

    def forget(self) -> None:
        """The sequences have ended."""
        self.prompts: list[Prompt] = []
        self.num_tokens = 0
        """Tokens of each sequence that somebody has told."""
        self._passes: list[tuple[int, Tensor | None]] = []
        self._fault = ""
        self._saved_tokens = 0
        self._has_beams = self._is_unnamed = False

    # ── prompts ───────────────────────────────────────────────────────────────────

    def begin(self, prompts: list[Prompt]) -> None:
        """The sequences begin with these prompts, all of one length."""
        self.prompts, self.num_tokens = prompts, len(prompts[0])

    def leave_unnamed(self, reason: str) -> None:
        """The sequences are computed, and nothing of them is reused; `remember` does nothing."""
        if reason:
            log.warning("a batch is computed and not reused: %s", reason)
        self.prompts, self.num_tokens = [], 0
        self._is_unnamed = True

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was."""
        rows = list(origins)
        self.prompts = [self.prompts[origin] for origin in rows] if self.prompts else []
        self._passes = [(at, None if ids is None else ids[rows]) for at, ids in self._passes]

    def note_beams(self) -> None:
        """Nobody will say which tokens a sequence has had."""
        self._has_beams = True
        self._passes = []  # not rearranged again and again: beams are never remembered

    # ── passes ────────────────────────────────────────────────────────────────────

    def begin_pass(self, start: int, ids: Tensor | None, fault: str) -> None:
        """The model is given these tokens from `start` on; `fault` says why its rows would not be
        a prompt's. Refuses tokens that are not the known ones."""
        self._passes.append((start, None if fault else ids))
        self._fault = fault or self._fault
        if start < self.num_tokens and ids is not None:
            self._compare(ids, start)

    def _compare(self, ids: Tensor, start: int) -> None:
        if len(ids) != len(self.prompts):
            raise BlockError(
                f"a cache of {len(self.prompts)} sequences was given {len(ids)}\n\n"
                "hint: give it one row of tokens for each beam or returned sequence"
            )
        for sequence, (row, prompt) in enumerate(zip(ids.tolist(), self.prompts, strict=True)):
            expected = prompt.tokens[start : start + len(row)].tolist()
            for at, (token, known) in enumerate(zip(row, expected, strict=False), start):
                if token != known:
                    raise BlockError(
                        f"sequence {sequence}: the model is given {token} as token {at}, the cache "
                        f"was told {known}\n\nhint: give the model the tokens that follow the "
                        f"{start} that the cache holds; assisted generation gives whole prompts, "
                        "so leave tokens out of Cache(...) there"
                    )

    def doubt(self, start: int) -> str:
        """Why rows of the pass that begins at `start` cannot be named by the known tokens."""
        if start >= self.num_tokens or self.memory.passes is None:
            return ""
        if self.pass_of is None:
            return "another model computes them, or the model was called past its hooks"
        return self._fault

    # ── answers ───────────────────────────────────────────────────────────────────

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
        self._check_answer(tokens, num_tokens)
        answer = tokens[:, self.num_tokens : num_tokens].cpu().numpy()
        for request, row in zip(requests, answer, strict=True):
            self.memory.ledger.append(request, row)
        self.prompts = [p.extended(row) for p, row in zip(self.prompts, answer, strict=True)]
        self.num_tokens = max(self.num_tokens, num_tokens)

    def _check_answer(self, tokens: Tensor, num_tokens: int) -> None:
        """Refuses tokens that are not those of the sequences, which hold `num_tokens` each."""
        if tokens.ndim != 2 or len(tokens) != len(self.prompts):
            raise BlockError(f"{len(self.prompts)} sequences, tokens are {tuple(tokens.shape)}")
        if tokens.shape[1] < num_tokens:
            raise BlockError(
                f"{tokens.shape[1]} tokens for sequences that hold {num_tokens}\n\n{ANSWER_HINT}"
            )
        begun = tokens[:, : self.num_tokens].cpu().numpy()
        if any(
            (row != p.tokens[: len(row)]).any() for row, p in zip(begun, self.prompts, strict=True)
        ):
            raise BlockError(
                f"the tokens do not begin like those that the cache was made for\n\n{ANSWER_HINT}"
            )
        if self._passes and not torch.equal(
            self._computed(len(tokens), num_tokens),
            tokens[:, self.num_tokens : num_tokens].cpu().long(),
        ):
            fault = f": {self._fault}" if self._fault else ""
            raise BlockError(
                f"tokens from {self.num_tokens} on are not those that the model was given{fault}"
                f"\n\n{ANSWER_HINT}"
            )

    def _computed(self, num_sequences: int, num_tokens: int) -> Tensor:
        """The tokens that the model was given behind the known ones; −1 where not as in a prompt.

        Of what was given for one place several times, as after `crop`, the last counts.
        """
        known = self.num_tokens
        computed = torch.full((num_sequences, max(0, num_tokens - known)), -1)
        for start, ids in self._passes:
            first, skipped = max(0, start - known), max(0, known - start)
            part = torch.full_like(computed, -1) if ids is None else ids[:, skipped:].cpu()
            room = computed[:, first:][:, : part.shape[1]]
            room.copy_(part[:, : room.shape[1]])
        return computed

    # ── a store ───────────────────────────────────────────────────────────────────

    @property
    def has_store(self) -> bool:
        """Whether beginnings of these sequences are kept in a store."""
        return self.store is not None and bool(self.prompts)

    def stored_tokens(self, prompts: Sequence[Prompt]) -> int:
        """Tokens that the store has of every prompt; 0 where these are not equally many."""
        if self.store is None:
            return 0
        lengths = {self.store.num_tokens(prompt) for prompt in prompts}
        return lengths.pop() if len(lengths) == 1 else 0

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
        length = self._saved_tokens = min(self.num_tokens, computed)
        for prompt, request in zip(self.prompts, requests, strict=True):
            is_running = length == computed and not is_torn
            self.store.save(prompt, request, length, is_running=is_running)
