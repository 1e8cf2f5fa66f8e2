"""What is to be done in a demo, what happens in order, and what has happened so far."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvstow.demo.messages import (
    Answer,
    ChildFailed,
    Continue,
    Done,
    Finish,
    Finished,
    FromChild,
    Load,
    Lost,
    Prefill,
    Prefilled,
    Progress,
    Pulled,
    Ready,
    Reply,
    RowOptions,
    Token,
)
from kvstow.demo.processes import Children, DemoError
from kvstow.plan.layout import Layout, Order
from kvstow.plan.manifest import decode

_LOG = """\
Watch log of the lighthouse at Grey Point, third week of March.
Monday: wind from the north west, force five, rising. The supply boat turned back at the bar and
will try again with the morning tide. Lamp cleaned, two mantles replaced, oil down to nine drums.
Tuesday: fog from before dawn. Horn sounded every ninety seconds for eleven hours. A trawler
answered at noon, asked for a bearing, and was given one hundred and ten degrees. Nobody slept.
Wednesday: the fog lifted at four in the morning. The supply boat came in at seven with flour,
lamp oil, letters, and a cat that the harbour master says is a better sailor than he is. The cat
was named Admiral. Oil now at twenty one drums. The generator runs, the spare one does not.
Thursday: clear and cold. Painted the north rail. Admiral caught a rat as large as himself and
brought it up all one hundred and forty steps to the lantern room to be praised.
Friday: a coaster, the Ellen Mary, lost her rudder two miles out. Signalled the lifeboat station
by lamp at six in the evening; they had her in tow by eight. No one was hurt. The master sent a
bottle of rum and a sack of coal by the pilot boat with his thanks.
Saturday: rain. Letters written. The spare generator was taken apart on the kitchen table, and a
mouse nest was found where the fuel filter should have been. Admiral was informed.
Sunday: calm sea, slow swell from the west. Inspection by the district engineer, who found the
lamp in order, the log in order, and the cat asleep in the chart drawer, which is not in order.
"""

PROMPTS: tuple[str, ...] = (
    "What is the capital of France? Answer in one sentence.",
    f"{_LOG}\nWhat was the name of the cat, and what did it catch on Thursday?",
    f"{_LOG}\nWhich ship lost her rudder, and how was she helped?",
    "Write a haiku about a lighthouse in winter.",
    "Explain in two sentences why a bicycle stays upright when it moves.",
)
"""The second and the third share all but their last line."""


PULL_KEYS = ("descriptors", "regions", "rows", "seconds", "fence", "digest", "direction")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """A demo: the model, both sides' layouts, what else to show."""

    model: str = "smollm2"
    prompts: tuple[str, ...] = PROMPTS
    new_tokens: int = 24
    block_tokens: int = 16
    block_tokens_decode: int = 16
    order: Order = "BLHNC"
    order_decode: Order = "BLHNC"
    memory: int = 256 << 20
    offload: Path | None = None
    kill_prefill: bool = False


# ── what has happened so far ──────────────────────────────────────────────────────────


@dataclass(slots=True)
class PromptState:
    """One prompt: how its rows travelled, and what two sides made of it."""

    text: str
    tokens: tuple[int, ...] = ()
    pulled: Pulled | None = None
    lost: Lost | None = None
    streamed: str = ""
    decoded: Done | None = None
    judged: Done | None = None
    again: Done | None = None
    """By a fresh process, from the rows on disk."""

    @property
    def identical(self) -> bool | None:
        """Whether all sides chose the same tokens; None while one of them is at work."""
        if self.decoded is None or self.judged is None:
            return None
        answers = [self.decoded, *([] if self.again is None else [self.again])]
        return all(answer.tokens == self.judged.tokens for answer in answers)


@dataclass(slots=True)
class DemoState:
    """A demo under way."""

    options: DemoOptions
    prompts: list[PromptState]
    model: str = ""
    doing: dict[str, str] = field(default_factory=dict[str, str])
    """What each process is at."""
    layouts: dict[str, Layout] = field(default_factory=dict[str, Layout])
    """The rows of prefill and decode."""
    notes: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @staticmethod
    def of(options: DemoOptions) -> "DemoState":
        return DemoState(options=options, prompts=[PromptState(text) for text in options.prompts])

    @property
    def identical(self) -> bool | None:
        """Whether every answer is; None while one is missing."""
        verdicts = [prompt.identical for prompt in self.prompts]
        if False in verdicts:
            return False
        return None if None in verdicts else True

    def report(self) -> dict[str, Any]:
        """The stable keys of `--json`, and more."""
        pulls = [(i, prompt.pulled) for i, prompt in enumerate(self.prompts) if prompt.pulled]
        decode = self.layouts["decode"].groups if "decode" in self.layouts else ()
        return {
            "model": self.model,
            "identical": bool(self.identical),
            "prompts": [self._prompt(prompt) for prompt in self.prompts],
            "transfers": [
                {"prompt": i, "bytes": pull.nbytes} | {key: getattr(pull, key) for key in PULL_KEYS}
                for i, pull in pulls
            ],
            "per_layer": {
                "descriptors": sum(pull.per_layer for _, pull in pulls),
                "regions": sum(rows.group.num_tensors for rows in decode),
            },
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def _prompt(self, prompt: PromptState) -> dict[str, Any]:
        times = {
            "transferred": prompt.decoded,
            "recomputed": prompt.judged,
            "reloaded": prompt.again,
        }
        return {
            "prompt": prompt.text,
            "prompt_tokens": len(prompt.tokens),
            "text": prompt.streamed,
            "identical": prompt.identical,
            "fallback": [prompt.lost.why] if prompt.lost else [],
            "tokens": list(prompt.decoded.tokens) if prompt.decoded else [],
            "to_first_token": {what: done.to_first for what, done in times.items() if done},
        }


# ── what happens ──────────────────────────────────────────────────────────────────────

Redraw = Callable[[DemoState], None]
SILENCE_SECONDS = 600.0
REDRAW_SECONDS = 0.1

Expected = TypeVar("Expected", Ready, Prefilled, Finished, Done)


def run(options: DemoOptions, redraw: Redraw) -> DemoState:
    """Run the whole demo; `redraw` is called whenever something has happened.

    Every process that was started has ended when this returns or raises.
    """
    began = time.monotonic()
    show = DemoState.of(options)
    with Children() as children:
        story = Story(show, children, redraw)
        story.load()
        for prompt in show.prompts:
            story.hand_over(prompt)
        if options.offload is not None:
            story.answer_again()
        show.doing.clear()
        show.seconds = time.monotonic() - began
    redraw(show)
    return show


class Story:
    """The demo's steps, each waiting for what it has set off."""

    def __init__(self, show: DemoState, children: Children, redraw: Redraw) -> None:
        self.show, self.children, self.redraw = show, children, redraw
        self.options = show.options
        self._prompt: PromptState | None = None
        self._replies: dict[str, Reply] = {}

    def load(self) -> None:
        """All import at once; the judge loads first: it may have to unpack the weights."""
        for name in ("single", "prefill", "decode"):
            self._start(name)
        self.children.send("single", Load(model=self.options.model, texts=self.options.prompts))
        ready = self._wait("single", Ready)
        self.show.model = ready.model
        for prompt, tokens in zip(self.show.prompts, ready.prompts, strict=True):
            prompt.tokens = tokens
        for name in ("prefill", "decode"):
            self._load_rows(name)
        for name in ("prefill", "decode"):
            self.show.layouts[name] = decode(self._wait(name, Ready).manifest.encode())

    def _start(self, name: str) -> None:
        self.show.doing[name] = "starting"
        self.children.start(name)

    def _load_rows(self, name: str) -> None:
        options, decodes = self.options, name == "decode"
        rows = RowOptions(
            block_tokens=options.block_tokens_decode if decodes else options.block_tokens,
            order=options.order_decode if decodes else options.order,
            memory=options.memory,
        )
        store = "" if decodes else str(options.offload or "")
        self.children.send(name, Load(model=options.model, rows=rows, store=store))

    def hand_over(self, prompt: PromptState) -> None:
        """Prefill, hand over, decode; the judge answers meanwhile."""
        limit = self.options.new_tokens
        self._prompt = prompt
        self.children.send("prefill", Prefill(tokens=prompt.tokens))
        offer = self._wait("prefill", Prefilled)
        prompt.streamed = offer.text
        is_killed = self.options.kill_prefill and prompt is self.show.prompts[-1]
        if is_killed:
            self.children.kill("prefill")
            self.show.doing["prefill"] = "killed"
            self.show.notes.append("prefill was killed after it had handed out its last ticket")
        self.children.send("single", Answer(tokens=prompt.tokens, limit=limit))
        self.children.send(
            "decode",
            Continue(tokens=prompt.tokens, first=offer.first, ticket=offer.ticket, limit=limit),
        )
        prompt.decoded = self._wait("decode", Done)
        prompt.judged = self._wait("single", Done)
        if not is_killed:
            self.children.send("prefill", Finish())
            self._wait("prefill", Finished)

    def answer_again(self) -> None:
        """A fresh process answers from the rows that prefill has left on disk."""
        self._prompt = None
        self._start("again")
        self._load_rows("again")
        self._wait("again", Ready)
        for prompt in self.show.prompts:
            self.children.send("again", Answer(tokens=prompt.tokens, limit=self.options.new_tokens))
            done = self._wait("again", Done)
            prompt.again = done if done.found else None

    # ── listening ─────────────────────────────────────────────────────────────────

    def _wait(self, name: str, kind: type[Expected]) -> Expected:
        """Listen to all until one of them has replied."""
        silent_since = time.monotonic()
        while name not in self._replies:
            event = self.children.next(REDRAW_SECONDS)
            if event is not None:
                silent_since = time.monotonic()
                self._note(*event)
            elif time.monotonic() - silent_since > SILENCE_SECONDS:
                raise DemoError(f"no word from {name} for {SILENCE_SECONDS:.0f} s")
            self.redraw(self.show)
        reply = self._replies.pop(name)
        if not isinstance(reply, kind):
            raise DemoError(f"{name} said {type(reply).__name__}, not {kind.__name__}")
        return reply

    def _note(self, name: str, message: FromChild) -> None:
        """Put what was said where the screen, or whoever waits for it, will find it."""
        prompt = self._prompt
        match message:
            case ChildFailed(error=error):
                raise DemoError(f"{name}: {error}")
            case Progress(what=what):
                self.show.doing[name] = what
            case Pulled() if prompt is not None:
                prompt.pulled = message
            case Lost() if prompt is not None:
                prompt.lost = message
            case Token(text=text):
                if name == "decode" and prompt is not None:
                    prompt.streamed += text
            case Ready() | Prefilled() | Finished() | Done():
                if isinstance(message, Ready):
                    self.show.doing[name] = "ready"
                self._replies[name] = message
            case _:
                raise DemoError(f"{name} said {type(message).__name__} of no prompt")
