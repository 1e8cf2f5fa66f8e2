"""What happens in a demo, in order."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvstow.demo.messages import (
    ChildFailed,
    Continue,
    Done,
    Encode,
    Encoded,
    Finish,
    FromChild,
    Judge,
    Load,
    Lost,
    PlanFacts,
    Prefill,
    Prefilled,
    Progress,
    Pulled,
    Ready,
    Reload,
    Stored,
    Token,
)
from kvstow.demo.options import DemoOptions
from kvstow.demo.processes import Children, DemoError


@dataclass(slots=True)
class PromptState:
    """One prompt: how its rows travelled, and what two sides made of it."""

    text: str
    tokens: tuple[int, ...] = ()
    prefilled: list[Prefilled] = field(default_factory=list[Prefilled])
    pulled: list[Pulled] = field(default_factory=list[Pulled])
    lost: list[Lost] = field(default_factory=list[Lost])
    stored: list[Stored] = field(default_factory=list[Stored])
    streamed: str = ""
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
class DemoState:
    """A demo under way."""

    settings: DemoOptions
    answers: list[PromptState]
    model: str = ""
    doing: dict[str, str] = field(default_factory=dict[str, str])
    plans: dict[str, PlanFacts] = field(default_factory=dict[str, PlanFacts])
    how: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @staticmethod
    def of(settings: DemoOptions) -> "DemoState":
        return DemoState(
            settings=settings, answers=[PromptState(text) for text in settings.prompts]
        )

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

    def _prompt(self, answer: PromptState) -> dict[str, Any]:
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


Redraw = Callable[[DemoState], None]
SILENCE_SECONDS = 600.0
REDRAW_SECONDS = 0.1


def run(settings: DemoOptions, redraw: Redraw) -> DemoState:
    """Run the whole demo; `redraw` is called whenever something has happened.

    Every process that was started has ended when this returns or raises.
    """
    began = time.monotonic()
    show = DemoState.of(settings)
    with Children() as children:
        story = Story(show, children, redraw)
        story.load()
        story.encode()
        for prompt in range(len(show.answers)):
            story.ask(prompt)
        if settings.offload is not None:
            story.ask_the_store()
        show.doing.clear()
        show.seconds = time.monotonic() - began
    redraw(show)
    return show


class Story:
    """The demo's steps, each waiting for what it has set off."""

    def __init__(self, show: DemoState, children: Children, redraw: Redraw) -> None:
        self.show, self.children, self.redraw = show, children, redraw
        self.settings = show.settings
        self.prefill = [f"prefill{r}" for r in range(self.settings.tp_prefill)]
        self.decode = [f"decode{r}" for r in range(self.settings.tp_decode)]

    # ── getting ready ─────────────────────────────────────────────────────────────

    def load(self) -> None:
        """All import at once; the judge loads first: it may have to unpack the weights."""
        self._start(["single", *self.prefill, *self.decode])
        self.children["single"].send(Load(model=self.settings.model, role="single"))
        self._wait(Ready, {"single"})
        self._load_ranks("prefill", self.prefill)
        self._load_ranks("decode", self.decode)
        self._wait(Ready, {*self.prefill, *self.decode})

    def _start(self, names: list[str]) -> None:
        for name in names:
            self.show.doing[name] = "starting"
            self.children.start(name)

    def _load_ranks(self, role: str, names: list[str]) -> None:
        decodes = role == "decode"
        meeting = free_port() if len(names) > 1 else 0
        for rank, name in enumerate(names):
            self.children[name].send(
                Load(
                    model=self.settings.model,
                    role=role,
                    rank=rank,
                    ranks=len(names),
                    meeting=meeting,
                    block_tokens=self.settings.block_tokens_decode
                    if decodes
                    else self.settings.block_tokens,
                    order=self.settings.order_decode if decodes else self.settings.order,
                    memory=self.settings.memory,
                    store=str(self.settings.offload or "") if decodes else "",
                )
            )

    def encode(self) -> None:
        self.children["single"].send(Encode(texts=self.settings.prompts))
        self._wait(Encoded, {"single"})

    # ── one prompt ────────────────────────────────────────────────────────────────

    def ask(self, prompt: int) -> None:
        """Prefill, hand over, decode; the judge answers meanwhile."""
        answer = self.show.answers[prompt]
        self._send(
            self.prefill,
            Prefill(prompt=prompt, tokens=answer.tokens, readers=len(self.decode)),
        )
        self._wait(Prefilled, set(self.prefill))
        tickets = tuple(part.ticket for part in answer.prefilled)
        killed = self.settings.kill_prefill and prompt == len(self.show.answers) // 2
        if killed:
            self._kill_prefill(prompt)
        limit = self.settings.new_tokens
        first = answer.prefilled[0].first
        answer.streamed = answer.prefilled[0].text
        self.children["single"].send(Judge(prompt=prompt, tokens=answer.tokens, limit=limit))
        self._send(
            self.decode,
            Continue(
                prompt=prompt, tokens=answer.tokens, first=first, tickets=tickets, limit=limit
            ),
        )
        self._wait(Done, {"single", *self.decode})
        if killed and prompt + 1 < len(self.show.answers):
            self._start(self.prefill)
            self._load_ranks("prefill", self.prefill)
            self._wait(Ready, set(self.prefill))
        elif not killed:
            self._send(self.prefill, Finish(prompt=prompt))

    def _kill_prefill(self, prompt: int) -> None:
        for name in self.prefill:
            self.children[name].kill()
            self.show.doing[name] = "killed"
        self.show.notes.append(
            f"prompt {prompt + 1}: prefill was killed after it had handed out its ticket"
        )

    # ── the store ─────────────────────────────────────────────────────────────────

    def ask_the_store(self) -> None:
        """A fresh decode process answers from what the first one left on disk."""
        for name in self.decode:
            self.children[name].hang_up()
            self.children[name].end()
        self._start(self.decode)
        self._load_ranks("decode", self.decode)
        self._wait(Ready, set(self.decode))
        for prompt, answer in enumerate(self.show.answers):
            if not answer.stored:
                continue
            reload = Reload(
                prompt=prompt,
                tokens=answer.tokens,
                first=answer.prefilled[0].first,
                limit=self.settings.new_tokens,
            )
            self._send(self.decode, reload)
            self._wait(Done, set(self.decode))

    # ── listening ─────────────────────────────────────────────────────────────────

    def _send(self, names: list[str], message: Prefill | Finish | Continue | Reload) -> None:
        for name in names:
            self.children[name].send(message)

    def _wait(self, kind: type[FromChild], names: set[str]) -> None:
        """Listen until each of these processes has said something of that kind."""
        waiting = set(names)
        silent_since = time.monotonic()
        while waiting:
            event = self.children.next(REDRAW_SECONDS)
            self.redraw(self.show)
            if event is None:
                if time.monotonic() - silent_since > SILENCE_SECONDS:
                    raise DemoError(
                        f"no word from {', '.join(sorted(waiting))} for {SILENCE_SECONDS:.0f} s"
                    )
                continue
            silent_since = time.monotonic()
            name, message = event
            self._note(name, message)
            if isinstance(message, kind):
                waiting.discard(name)

    def _note(self, name: str, message: FromChild) -> None:
        """Put what was said where the screen will find it."""
        show = self.show
        leads = not name[-1].isdigit() or name.endswith("0")
        match message:
            case ChildFailed(error=error, trace=trace):
                raise DemoError(f"{name}: {error}" + (f"\n\n{trace}" if trace else ""))
            case Progress(what=what):
                show.doing[name] = what
            case Ready():
                show.doing[name] = "ready"
                show.model = message.model
                if message.plan is not None and leads:
                    show.plans[name.rstrip("0123456789")] = message.plan
                    show.how[name.rstrip("0123456789")] = message.how
            case Encoded(tokens=tokens):
                for answer, own in zip(show.answers, tokens, strict=True):
                    answer.tokens = own
            case Prefilled():
                show.answers[message.prompt].prefilled.append(message)
            case Pulled():
                show.answers[message.prompt].pulled.append(message)
            case Lost():
                show.answers[message.prompt].lost.append(message)
            case Stored():
                show.answers[message.prompt].stored.append(message)
            case Token():
                answer = show.answers[message.prompt]
                if name == "decode0" and answer.decoded is None:
                    answer.streamed += message.text
            case Done():
                self._finished(name, message)

    def _finished(self, name: str, message: Done) -> None:
        answer = self.show.answers[message.prompt]
        if name == "single":
            answer.judged = message
        elif name == "decode0" and answer.decoded is None:
            answer.decoded = message
        elif name == "decode0":
            answer.from_store = message


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
