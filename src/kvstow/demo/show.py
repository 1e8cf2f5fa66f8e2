"""What has happened so far: the facts behind the screen and the report."""

from dataclasses import dataclass, field
from typing import Any

from kvstow.demo.messages import Done, Lost, Plan, Prefilled, Pulled, Reloaded, Stored
from kvstow.demo.settings import Settings


@dataclass(slots=True)
class Answer:
    """One prompt: how its rows travelled, and what two sides made of it."""

    text: str
    tokens: tuple[int, ...] = ()
    prefilled: list[Prefilled] = field(default_factory=list[Prefilled])
    pulled: list[Pulled] = field(default_factory=list[Pulled])
    lost: list[Lost] = field(default_factory=list[Lost])
    stored: list[Stored] = field(default_factory=list[Stored])
    reloaded: list[Reloaded] = field(default_factory=list[Reloaded])
    streamed: str = ""
    again: str = ""
    decoded: Done | None = None
    judged: Done | None = None
    from_store: Done | None = None

    @property
    def identical(self) -> bool | None:
        """Whether both sides chose the same tokens; None while one of them is at work."""
        if self.decoded is None or self.judged is None:
            return None
        same = self.decoded.tokens == self.judged.tokens
        if self.from_store is not None:
            same = same and self.from_store.tokens == self.judged.tokens
        return same


@dataclass(slots=True)
class Show:
    """A demo under way."""

    settings: Settings
    answers: list[Answer]
    model: str = ""
    doing: dict[str, str] = field(default_factory=dict[str, str])
    plans: dict[str, Plan] = field(default_factory=dict[str, Plan])
    how: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @staticmethod
    def of(settings: Settings) -> "Show":
        return Show(settings=settings, answers=[Answer(text) for text in settings.prompts])

    @property
    def identical(self) -> bool | None:
        """Whether every answer is; None while one is missing."""
        verdicts = [answer.identical for answer in self.answers]
        if False in verdicts:
            return False
        return None if None in verdicts else True

    def report(self) -> dict[str, Any]:
        """The stable keys of `--json`, and more."""
        pulled = [(i, pull) for i, answer in enumerate(self.answers) for pull in answer.pulled]
        return {
            "model": self.model,
            "identical": bool(self.identical),
            "prompts": [self._prompt(answer) for answer in self.answers],
            "transfers": [
                {
                    "prompt": i,
                    "bytes": pull.nbytes,
                    "descriptors": pull.descriptors,
                    "regions": pull.regions,
                    "rows": pull.rows,
                    "seconds": pull.seconds,
                    "fence": pull.fence,
                    "digest": pull.digest,
                    "direction": pull.direction,
                }
                for i, pull in pulled
            ],
            "per_layer": {
                "descriptors": sum(pull.per_layer for _, pull in pulled),
                "regions": sum(g.tensors for g in self.plans["decode"].groups)
                if "decode" in self.plans
                else 0,
            },
            "how": self.how,
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def _prompt(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt": answer.text,
            "prompt_tokens": len(answer.tokens),
            "text": answer.streamed,
            "identical": answer.identical,
            "fallback": [lost.why for lost in answer.lost],
        }
        if answer.decoded is not None and answer.judged is not None:
            found["tokens"] = list(answer.decoded.tokens)
            found["to_first_token"] = {
                "transferred": answer.decoded.to_first,
                "recomputed": answer.judged.to_first,
            }
        if answer.from_store is not None:
            found["to_first_token"]["reloaded"] = answer.from_store.to_first
        return found
