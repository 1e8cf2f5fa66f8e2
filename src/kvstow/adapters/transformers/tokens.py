"""The tokens of a batch: as prompts, and as far as they are known pass by pass.

Rows are found again by the tokens that a cache was told, and by those that the model was given
behind them. The model has to be given what was told: other tokens are refused. A pass that may
leave other rows than a prompt's (other positions or masks, embeddings, adapters by sequence, a
model that has changed) is computed, and its rows are not reused.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError

log = logging.getLogger(__name__)

Tensor = torch.Tensor

_PADDED = b"padded by "


def prompts_of(
    tokens: Tensor,
    mask: Tensor | None = None,
    extra: Sequence[Iterable[tuple[int, bytes]]] = (),
) -> list[Prompt]:
    """Sequences as prompts; equal tokens behind different padding are different prompts."""
    rows: Any = torch.as_tensor(tokens).cpu().numpy()
    if rows.ndim != 2 or not rows.size or len(extra) not in (0, len(rows)):
        raise BlockError(
            f"no sequences: tokens are {rows.shape}, with extra content of {len(extra)}\n\n"
            "hint: tokens are [sequence, token], and extra has an entry for each sequence"
        )
    content = extra or [()] * len(rows)
    return [
        Prompt.of(row, salt=b"" if pad == 0 else _PADDED + str(pad).encode(), extra=more)
        for row, pad, more in zip(rows, _padding(rows, mask), content, strict=True)
    ]


def _padding(rows: Any, mask: Tensor | None) -> list[int]:
    """How many tokens on the left of each sequence are padding."""
    if mask is None:
        return [0] * len(rows)
    seen: Any = torch.as_tensor(mask).cpu().numpy()
    if seen.shape != rows.shape:
        raise BlockError(f"the attention mask is {seen.shape}, tokens are {rows.shape}")
    padding = (seen == 0).sum(axis=1)
    if ((seen == 0).cumprod(axis=1).sum(axis=1) != padding).any():
        raise BlockError("the attention mask hides tokens that are not padding on the left")
    return padding.tolist()


def padding_of(prompt: Prompt) -> int:
    """How many tokens on the left of a prompt are none."""
    before, marker, count = prompt.salt.partition(_PADDED)
    return int(count) if marker and not before else 0


def naming_fault(
    prompts: Sequence[Prompt],
    placeholders: Collection[int],
    padding_token: int | None,
    *,
    has_mask: bool,
) -> str:
    """Why the prompts' tokens do not name their rows, in words; empty where they do.

    Tokens may stand for an image that nobody names. Padding without a mask is hidden by
    `generate`, and not by a forward pass.
    """
    for prompt in prompts:
        named = min((position for position, _ in prompt.extra), default=len(prompt))
        if np.isin(prompt.tokens[:named], list(placeholders)).any():
            return "tokens stand for images or other content, and Cache(..., extra=...) names none"
        if not has_mask and padding_token is not None and (prompt.tokens == padding_token).any():
            return f"tokens have the padding token {padding_token} among them, and no mask"
    return ""


class KnownTokens:
    """The prompts of a batch's sequences; none where nobody told them or they are not reused."""

    def __init__(self, memory: ModelMemory, store: PrefixStore | None) -> None:
        self.memory = memory
        self.store = store if memory.ledger.prefixes is not None else None
        self.forget()

    def forget(self, reason: str = "") -> None:
        """The sequences have ended, or are computed and not reused for that reason."""
        if reason:
            log.warning("a batch is computed and not reused: %s", reason)
        self.prompts: list[Prompt] = []
        self.num_tokens = 0
        """Tokens of each sequence that somebody has told."""
        self._answer: Tensor | None = None
        """Tokens that the model was given behind these; None where somebody did not say."""
        self._saved_tokens = 0

    def begin(self, prompts: list[Prompt]) -> None:
        """The sequences begin with these prompts, all of one length."""
        self.prompts, self.num_tokens = prompts, len(prompts[0])
        self._answer = torch.empty((len(prompts), 0), dtype=torch.long)

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was."""
        rows = list(origins)
        self.prompts = [self.prompts[origin] for origin in rows] if self.prompts else []
        self._answer = self._answer[rows] if self._answer is not None else None

    # ── passes ────────────────────────────────────────────────────────────────────

    def begin_pass(self, start: int, arguments: Mapping[str, Any] | None) -> str:
        """Why rows of known tokens would not be a prompt's after a pass from `start` on; empty if
        they are, or none of them is known. Refuses tokens that are not the known ones.

        `arguments` are the model's; None for a model that nobody watches.
        """
        if not self.prompts:
            return ""
        is_known = start < self.num_tokens
        if arguments is None:
            ids, fault = None, "another model computes them, or only a part of the model"
        else:
            ids = arguments.get("input_ids")
            if ids is not None and is_known:
                self._compare(ids, start)
            fault = self.memory.passes.change() or pass_fault(arguments, self.prompts, start)
        self._note_answer(max(0, start - self.num_tokens), start, None if fault else ids)
        return fault if is_known else ""

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
        untyped: Any = ids
        rows: list[list[int]] = untyped.tolist()
        for sequence, (row, prompt) in enumerate(zip(rows, self.prompts, strict=True)):
            expected = prompt.tokens[start : start + len(row)].tolist()
            for at, (token, other) in enumerate(zip(row, expected, strict=False), start):
                if token != other:
                    raise BlockError(
                        f"sequence {sequence}: the model is given {token} as token {at}, the cache "
                        f"was told {other}\n\nhint: give the model the tokens that follow the "
                        f"{start} that the cache holds; assisted generation gives whole prompts, "
                        "so leave tokens out of Cache(...) there"
                    )

    def name_answer(self, requests: Sequence[int], num_tokens: int) -> None:
        """What the model was given behind the prompts, up to `num_tokens`, is known from now on;
        nothing of a model that has changed meanwhile."""
        length = num_tokens - self.num_tokens
        if self._answer is None or length <= 0 or self.memory.passes.change():
            return
        answer = self._answer[:, :length].cpu().numpy()
        for request, row in zip(requests, answer, strict=True):
            self.memory.ledger.append(request, row)
        self.prompts = [p.extended(row) for p, row in zip(self.prompts, answer, strict=True)]
        self.num_tokens += answer.shape[1]
        self._answer = None

    # ── a store ───────────────────────────────────────────────────────────────────

    def stored_tokens(self, prompts: Sequence[Prompt]) -> int:
        """Tokens that the store has of every prompt; 0 where these are not equally many."""
        lengths = {0 if self.store is None else self.store.num_tokens(each) for each in prompts}
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
        if self.store is None or not self.prompts:
            return
        length = self._saved_tokens = min(self.num_tokens, computed)
        for prompt, request in zip(self.prompts, requests, strict=True):
            is_running = length == computed and not is_torn
            self.store.save(prompt, request, length, is_running=is_running)


def pass_fault(arguments: Mapping[str, Any], prompts: Sequence[Prompt], start: int) -> str:
    """Why a pass with these arguments may leave other rows than a prompt's; empty if it does not.

    Tokens from `start` on have to be given as ids, one after the other, behind the padding that
    the prompts name, which is hidden.
    """
    ids = arguments.get("input_ids")
    if ids is None:
        return "the model is given embeddings, not tokens"
    if arguments.get("adapter_names") is not None:
        return "the model is given adapters by sequence"
    pads = [padding_of(each) for each in prompts]
    padding = torch.tensor(pads)[:, None]
    end = start + ids.shape[1]
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is None and any(pads):
        return f"the cache was told padding of {pads} tokens, the model no mask"
    if mask is not None and not _hides_just_padding(mask, padding, end):
        return "the model is given a mask that hides more or less than the padding"
    if (positions is None and any(pads)) or _are_others(positions, padding, start):
        return "tokens are not at their own positions behind the padding"
    return ""


def _hides_just_padding(mask: Any, padding: Tensor, end: int) -> bool:
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < end:
        return False
    return torch.equal(mask[:, :end].cpu() != 0, torch.arange(end) >= padding)


def _are_others(positions: Tensor | None, padding: Tensor, start: int) -> bool:
    """Whether positions do not count from the first token behind the padding, as in `generate`.

    Those with several axes, of models that see images, are not looked at.
    """
    if positions is None or positions.ndim > 2:
        return False
    expected = torch.arange(start, start + positions.shape[-1]) - padding
    return bool(((positions.cpu() != expected) & (expected >= 0)).any())
