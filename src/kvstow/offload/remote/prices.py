"""What loading costs and what computing costs, both measured.

Rows whose loading would take longer than their tokens take to compute are not loaded. Rows are
loaded while either price is unknown.
"""

from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

FORGET_SECONDS = 60.0

WEIGHT = 0.25
"""How much the newest measurement of a store counts."""

HALF_LIFE_TOKENS = 8192
"""After so many newer tokens a measurement of computing counts half: short passes say little."""


@dataclass(slots=True)
class ReadRate:
    """What loading has cost lately: seconds before the first byte, and bytes per second."""

    latency: float = 0.0
    bytes_per_second: float = 0.0
    _at: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    def note(self, nbytes: int, seconds: float) -> None:
        """One call brought so many bytes. Small ones say what a call costs, large ones the rate."""
        with self._lock:
            self._at = monotonic()
            if nbytes < 1 << 16:
                self.latency += (seconds - self.latency) * (WEIGHT if self.latency else 1.0)
            else:
                rate = nbytes / max(seconds - self.latency, 1e-6)
                weight = WEIGHT if self.bytes_per_second else 1.0
                self.bytes_per_second += (rate - self.bytes_per_second) * weight

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes would take; 0 where nothing was measured lately, so that a
        store which was slow once is tried again."""
        if not self.bytes_per_second or monotonic() - self._at > FORGET_SECONDS:
            return 0.0
        return self.latency + nbytes / self.bytes_per_second


class PrefillRate:
    """Tokens of prompts that are computed in a second: given, or else measured.

    0 as long as it is not known.
    """

    def __init__(self, given: float = 0.0) -> None:
        self._given = given
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self._given or (self._tokens / self._seconds if self._seconds else 0.0)

    def note(self, tokens: int, seconds: float) -> None:
        """So many tokens took so many seconds to compute."""
        if tokens > 0 and seconds > 0:
            kept = 0.5 ** (tokens / HALF_LIFE_TOKENS)
            self._tokens = kept * self._tokens + tokens
            self._seconds = kept * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """How long so many tokens would take; for ever where that is not known."""
        return tokens / self.tokens_per_second if self.tokens_per_second else float("inf")
