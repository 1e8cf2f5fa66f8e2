"""What happened in a demo, for people and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

from kvstow.plan.layout import Layout
from kvstow.text import human, plural, table

WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTransfer:
    """Rows that arrived and were accepted."""

    nbytes: int
    descriptors: int
    regions: int
    rows: int
    per_layer: int
    """Descriptors that the same blocks need with K and V of every layer apart."""
    seconds: float
    fence: str
    digest: str
    direction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """All tokens of an answer; `to_first` is from the rows (or nothing) to the next token."""

    tokens: tuple[int, ...]
    text: str
    to_first: float
    found_tokens: int = 0
    """Tokens of the prompt that were not computed."""
    transfer: DemoTransfer | None = None
    failure: str = ""
    """Why rows did not arrive, or were not accepted: the prompt was computed instead."""


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt and its answers, by how its rows came about: `transferred` to the decode process,
    `recomputed` by a single one, perhaps `reloaded` from disk."""

    text: str
    tokens: Sequence[int]
    answers: dict[str, DemoAnswer] = field(default_factory=dict[str, DemoAnswer])

    @property
    def identical(self) -> bool:
        """Whether all answers have the same tokens."""
        return len({answer.tokens for answer in self.answers.values()}) == 1

    def as_json(self) -> dict[str, Any]:
        answer = self.answers["transferred"]
        return {
            "prompt": self.text,
            "prompt_tokens": len(self.tokens),
            "text": answer.text,
            "identical": self.identical,
            "fallback": [answer.failure] if answer.failure else [],
            "tokens": list(answer.tokens),
            "to_first_token": {way: each.to_first for way, each in self.answers.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """A demo that is over."""

    model: str
    layouts: Sequence[Layout]
    """The rows of prefill and decode."""
    prompts: Sequence[DemoPrompt]
    seconds: float

    @property
    def failure(self) -> str | None:
        """What makes the command fail."""
        differing = [str(i) for i, prompt in enumerate(self.prompts, 1) if not prompt.identical]
        return f"answers differ: prompt {', '.join(differing)}" if differing else None

    @property
    def transfers(self) -> list[tuple[int, DemoTransfer]]:
        """Those that succeeded, each with the place of its prompt."""
        answers = enumerate(prompt.answers["transferred"] for prompt in self.prompts)
        return [(i, answer.transfer) for i, answer in answers if answer.transfer]

    def as_json(self) -> dict[str, Any]:
        """The stable keys of `--json`."""
        return {
            "model": self.model,
            "identical": self.failure is None,
            "prompts": [prompt.as_json() for prompt in self.prompts],
            "transfers": [
                {"prompt": i, "bytes": transfer.nbytes} | asdict(transfer)
                for i, transfer in self.transfers
            ],
            "per_layer": {
                "descriptors": sum(transfer.per_layer for _, transfer in self.transfers),
                "regions": sum(rows.group.num_tensors for rows in self.layouts[1].groups),
            },
            "seconds": self.seconds,
        }

    # ── text ──────────────────────────────────────────────────────────────────────

    def __str__(self) -> str:
        answers = "\n".join(self._answer(i, each) for i, each in enumerate(self.prompts, 1))
        return "\n\n".join([self._plan(), answers, self._moved(), "\n".join(self._verdict())])

    def _plan(self) -> str:
        layouts = dict(zip(("prefill", "decode"), self.layouts, strict=True))
        if self.layouts[0] == self.layouts[1]:
            layouts = {"both": self.layouts[0]}
        rows = [
            (
                "" if g else side,
                rows.group.name,
                str(len(rows.group.layers)),
                str(rows.group.block_tokens),
                f"{layout.row_bytes(g):,}",
                str(rows.rows_per_slab),
                "" if g else human(layout.nbytes),
            )
            for side, layout in layouts.items()
            for g, rows in enumerate(layout.groups)
        ]
        columns = ("plan", "group", "layers", "tokens", "bytes of row", "rows in slab", "arena")
        orders = " and ".join(dict.fromkeys(layout.order for layout in layouts.values()))
        return f"{self.model}; order {orders}\n\n{table(columns, rows, num_left=2)}"

    def _answer(self, number: int, prompt: DemoPrompt) -> str:
        """The question's last line, the answer, and what its tokens are compared with."""
        before, _, question = prompt.text.strip().rpartition("\n")
        lines = f"[{len(before.splitlines())} lines] " if before else ""
        times = ", ".join(
            f"{way} {answer.to_first * 1e3:,.0f} ms" for way, answer in prompt.answers.items()
        )
        answer = prompt.answers["transferred"]
        verdict = f"{len(answer.tokens)} tokens identical" if prompt.identical else "DIFFERENT"
        paragraphs = (
            f"{number}  {lines}{question}",
            f"   {' '.join(answer.text.split())}",
            f"   = {verdict}; first token: {times}",
        )
        return "\n".join(fill(each, WIDTH, subsequent_indent="   ") for each in paragraphs)

    def _moved(self) -> str:
        columns = (
            "prompt",
            "tokens",
            "rows",
            "bytes",
            "descr.",
            "by layer",
            "ms",
            "GB/s",
            "checks",
        )
        rows = [
            (
                str(i + 1),
                str(len(self.prompts[i].tokens)),
                str(transfer.rows),
                human(transfer.nbytes),
                str(transfer.descriptors),
                str(transfer.per_layer),
                f"{transfer.seconds * 1e3:.0f}",
                f"{transfer.nbytes / transfer.seconds / 1e9:.2f}",
                " ".join(dict.fromkeys((transfer.fence, transfer.digest))),
            )
            for i, transfer in self.transfers
        ]
        return table(columns, rows, num_left=0)

    def _verdict(self) -> Iterator[str]:
        for number, prompt in enumerate(self.prompts, 1):
            if failure := prompt.answers["transferred"].failure:
                why = " ".join(failure.partition("\n\n")[0].split())
                yield fill(f"note: prompt {number} was computed where it is decoded: {why}", WIDTH)
        if self.failure is None:
            yield "identical: every token is the single process's"
        transfers = [transfer for _, transfer in self.transfers]
        nbytes = human(sum(transfer.nbytes for transfer in transfers))
        descriptors = plural(sum(transfer.descriptors for transfer in transfers), "descriptor")
        per_layer = sum(transfer.per_layer for transfer in transfers)
        yield (
            f"{plural(len(transfers), 'transfer')}, {nbytes} in {descriptors}; layer by layer, "
            f"K and V apart, {per_layer:,}"
        )
        again = sum("reloaded" in prompt.answers for prompt in self.prompts)
        if again:
            yield f"{plural(again, 'prompt')} answered again from disk by a fresh process"
        yield f"{self.seconds:.0f} s in all"
