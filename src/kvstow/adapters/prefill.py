"""How long a model takes to compute prompts, measured where it runs.

On CUDA the time is the device's own, between two events in its stream: nothing waits for it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

PROMPT_TOKENS = 16
"""Passes with fewer tokens of a sequence decode."""

MOST_PASSES = 8
"""Passes that a device may be behind; older ones are not measured."""


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass of the model: its tokens, and points in the device's work."""

    tokens: int
    begin: "torch.cuda.Event | float"
    end: "torch.cuda.Event | float"

    @property
    def seconds(self) -> float | None:
        """How long it took; None while the device is not there yet."""
        if isinstance(self.begin, torch.cuda.Event) and isinstance(self.end, torch.cuda.Event):
            return self.begin.elapsed_time(self.end) / 1e3 if self.end.query() else None
        assert isinstance(self.begin, float)
        assert isinstance(self.end, float)
        return self.end - self.begin


class PrefillMeter:
    """Tells `note` the tokens and seconds of passes over prompts. Called by the model's thread."""

    def __init__(self, note: Callable[[int, float], None], device: torch.device) -> None:
        self._note = note
        self._cuda = device.type == "cuda"
        self._over: deque[_Pass] = deque(maxlen=MOST_PASSES)
        self._open: _Pass | None = None

    def begin(self, tokens: int) -> None:
        """A pass begins, with so many tokens of prompts; the one before is over."""
        if self._open is not None and self._open.end is not self._open.begin:
            self._over.append(self._open)
        while self._over and (seconds := self._over[0].seconds) is not None:
            self._note(self._over.popleft().tokens, seconds)
        now = self._now() if tokens >= PROMPT_TOKENS else None
        self._open = None if now is None else _Pass(tokens, now, now)

    def mark(self) -> None:
        """The pass has come this far."""
        if self._open is not None:
            self._open.end = self._now()

    def _now(self) -> "torch.cuda.Event | float":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
