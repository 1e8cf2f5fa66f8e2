# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""What is known of the tokens of one batch, and what may be kept under their names.

Rows are found again by the tokens that a cache was told, and by those that the model was given
behind them. The model has to be given what was told: other tokens are refused, and nothing is kept
of passes that are not as in a prompt.
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
        self._answer: Tensor | None = None
        """Tokens that the model was given behind these; None where somebody did not say."""
        self._fault = ""
        self._saved_tokens = 0

    # ── prompts ───────────────────────────────────────────────────────────────────

    def begin(self, prompts: list[Prompt]) -> None:
        """The sequences begin with these prompts, all of one length."""
        self.prompts, self.num_tokens = prompts, len(prompts[0])
        self._answer = torch.empty((len(prompts), 0), dtype=torch.long)

    def leave_unnamed(self, reason: str) -> None:
        """The sequences are computed, and nothing of them is reused."""
        if reason:
            log.warning("a batch is computed and not reused: %s", reason)
        self.prompts, self.num_tokens = [], 0

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was."""
        rows = list(origins)
        self.prompts = [self.prompts[origin] for origin in rows] if self.prompts else []
        self._answer = self._answer[rows] if self._answer is not None else None

    # ── passes ────────────────────────────────────────────────────────────────────

    def begin_pass(self, start: int, ids: Tensor | None, fault: str) -> None:
        """The model is given these tokens from `start` on; `fault` says why its rows would not be
        a prompt's. Refuses tokens that are not the known ones."""
        self._fault = fault or self._fault
        if start < self.num_tokens and ids is not None:
            self._compare(ids, start)
        self._note_answer(max(0, start - self.num_tokens), start, None if fault else ids)

    def _note_answer(self, first: int, start: int, ids: Tensor | None) -> None:
        """Behind the known tokens come those that the model is given, unless some are not known.

        What was given for one place several times, as after `crop`, counts as given last.
        """
        if self._answer is None or ids is None or first > self._answer.shape[1]:
            self._answer = None
            return
        new = ids[:, max(0, self.num_tokens - start) :]
        self._answer = torch.cat([self._answer[:, :first].to(new.device), new], 1)

    def _compare(self, ids: Tensor, start: int) -> None:
        if len(ids) != len(self.prompts):
            raise BlockError(
                f"a cache of {len(self.prompts)} sequences was given {len(ids)}\n\n"
                "hint: give it one row of tokens for each beam or returned sequence"
            )
        for sequence, (row, prompt) in enumerate(zip(ids.tolist(), self.prompts, strict=True)):
            expected = prompt.tokens[start : start + len(row)].tolist()
            for at, (token, told) in enumerate(zip(row, expected, strict=False), start):
                if token != told:
                    raise BlockError(
                        f"sequence {sequence}: the model is given {token} as token {at}, the cache "
                        f"was told {told}\n\nhint: give the model the tokens that follow the "
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

    def name_answer(self, requests: Sequence[int], num_tokens: int) -> None:
        """What the model was given behind the prompts, up to `num_tokens`, is known from now on;
        nothing of a model that has changed meanwhile."""
        length, passes = num_tokens - self.num_tokens, self.memory.passes
        if self._answer is None or length <= 0 or not self.prompts:
            return
        if passes is None or passes.change():
            return
        answer = self._answer[:, :length].cpu().numpy()
        for request, row in zip(requests, answer, strict=True):
            self.memory.ledger.append(request, row)
        self.prompts = [p.extended(row) for p, row in zip(self.prompts, answer, strict=True)]
        self.num_tokens += answer.shape[1]
        self._answer = None

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
