"""The demo on one screen: who does what, the plan, the answers, the transfers, the verdict."""

from collections.abc import Iterator
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvstow.demo.story import DemoState, PromptState
from kvstow.plan.layout import Layout
from kvstow.text import plural

QUESTION_WIDTH = 62


class Screen:
    """Redraws itself in a terminal; elsewhere prints steps as they come, and the end once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._said: dict[str, str] = {}

    def draw(self, show: DemoState) -> None:
        """Show the demo as it stands."""
        if self._live is not None:
            self._live.update(picture(show), refresh=True)
            return
        for name, what in show.doing.items():
            if self._said.get(name) != what:
                self._said[name] = what
                self._console.print(f"{name}: {what}", style="dim", highlight=False)

    def finish(self, show: DemoState) -> None:
        """Leave the whole story on the screen."""
        if self._live is not None:
            self._live.update(picture(show), refresh=True)
        else:
            self._console.print(picture(show))

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()


def picture(show: DemoState) -> RenderableType:
    """Everything, from top to bottom."""
    parts: list[RenderableType] = [_title()]
    if show.doing and not all(what == "ready" for what in show.doing.values()):
        parts.append(_processes(show))
    if show.layouts:
        parts.append(_plans(show))
    if any(prompt.streamed for prompt in show.prompts):
        parts += [_answers(show), _transfers(show)]
    notes = [*show.notes]
    for number, prompt in enumerate(show.prompts, 1):
        if prompt.lost is not None:
            why = " ".join(prompt.lost.why.split("\n\n")[0].split())
            notes.append(f"prompt {number}: computed where it is decoded: {why}")
    parts += [Text(f"note: {note}", style="yellow") for note in notes]
    if show.identical is not None:
        parts.append(_verdict(show))
    return Group(*parts)


def _title() -> Text:
    text = Text("kvstow demo", style="bold")
    return text.append("  prefill in one process, rows over NIXL, decode in another", style="dim")


def _processes(show: DemoState) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, what in show.doing.items():
        is_busy = what not in ("ready", "killed")
        table.add_row(Spinner("dots") if is_busy else Text("·"), name, Text(what, style="dim"))
    return table


# ── the plan ──────────────────────────────────────────────────────────────────────────


def _plans(show: DemoState) -> Table:
    table = _table("plan")
    for column in ("side", "group"):
        table.add_column(column, no_wrap=True)
    for column in ("layers", "tokens\nin block", "bytes\nof row", "rows\nin slab", "slab", "arena"):
        table.add_column(column, justify="right", no_wrap=True)
    layouts = dict(sorted(show.layouts.items(), reverse=True))
    if len(layouts) > 1 and len(set(layouts.values())) == 1:
        layouts = {"both": next(iter(layouts.values()))}
    for side, layout in layouts.items():
        for row in _plan_rows(side, layout):
            table.add_row(*row)
    orders = dict.fromkeys(layout.order for layout in layouts.values())
    table.caption = f"{show.model}; order {' and '.join(orders)}"
    table.caption_justify = "left"
    return table


def _plan_rows(side: str, layout: Layout) -> Iterator[list[str]]:
    for g, rows in enumerate(layout.groups):
        yield [
            "" if g else side,
            rows.group.name,
            str(len(rows.group.layers)),
            str(rows.group.block_tokens),
            f"{layout.row_bytes(g):,}",
            str(rows.rows_per_slab),
            "" if g else size(layout.slab_bytes),
            "" if g else size(layout.nbytes),
        ]


def _table(title: str) -> Table:
    """Columns close together: all of it fits eighty characters."""
    return Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )


# ── the answers ───────────────────────────────────────────────────────────────────────


def _answers(show: DemoState) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim")
    table.add_column(overflow="fold")
    for number, prompt in enumerate(show.prompts, 1):
        if prompt.streamed:
            table.add_row(str(number), Text(_question(prompt.text), style="cyan"))
            table.add_row("", Text.assemble(" ".join(prompt.streamed.split()), _mark(prompt)))
    return Padding(table, (0, 0, 0, 1))


def _question(text: str) -> str:
    """The question itself: the last line, and how many stand before it."""
    lines = text.strip().splitlines()
    short = lines[-1] if len(lines[-1]) <= QUESTION_WIDTH else lines[-1][: QUESTION_WIDTH - 1] + "…"
    return f"[{len(lines) - 1} lines] {short}" if len(lines) > 1 else short


def _mark(prompt: PromptState) -> tuple[str, str]:
    match prompt.identical:
        case None:
            return ("", "")
        case True:
            count = len(prompt.decoded.tokens) if prompt.decoded else 0
            again = prompt.again
            disk = f", again from disk after {again.to_first * 1e3:,.0f} ms" if again else ""
            return (f"  = {count} tokens identical{disk}", "green")
        case False:
            return ("  ≠ differs from the single process", "bold red")


# ── the transfers ─────────────────────────────────────────────────────────────────────


def _transfers(show: DemoState) -> Table:
    table = _table("rows, times in ms")
    for column in ("", "tokens", "rows", "bytes", "descr.", "by\nlayer", "time", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fence,\ndigest", no_wrap=True)
    for column in ("first\ntoken", "recom-\nputed"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, prompt in enumerate(show.prompts, 1):
        if prompt.streamed:
            times = [
                f"{d.to_first * 1e3:,.0f}" if d else "" for d in (prompt.decoded, prompt.judged)
            ]
            table.add_row(str(number), str(len(prompt.tokens)), *_transfer(prompt), *times)
    return table


def _transfer(prompt: PromptState) -> list[RenderableType]:
    if pull := prompt.pulled:
        return [
            str(pull.rows),
            size(pull.nbytes),
            str(pull.descriptors),
            str(pull.per_layer),
            f"{pull.seconds * 1e3:.0f}",
            f"{pull.nbytes / pull.seconds / 1e9:.2f}",
            Text(" ".join(dict.fromkeys((pull.fence, pull.digest))), style="green"),
        ]
    if lost := prompt.lost:
        seconds = f"{lost.seconds * 1e3:.0f}"
        return ["–", "–", "–", "–", seconds, "–", Text("failed", style="red")]
    return [""] * 7


# ── the verdict ───────────────────────────────────────────────────────────────────────


def _verdict(show: DemoState) -> RenderableType:
    pulls = [prompt.pulled for prompt in show.prompts if prompt.pulled]
    failures = sum(prompt.lost is not None for prompt in show.prompts)
    again = sum(prompt.again is not None for prompt in show.prompts)
    descriptors = plural(sum(pull.descriptors for pull in pulls), "descriptor")
    lines = [
        Text("identical: every token is the single process's", style="bold green")
        if show.identical
        else Text("DIFFERENT: see above", style="bold red"),
        Text(
            f"{plural(len(pulls), 'transfer')}, {size(sum(pull.nbytes for pull in pulls))} in "
            f"{descriptors}; layer by layer, K and V apart, {sum(p.per_layer for p in pulls):,}"
        ),
    ]
    if failures:
        verb = "was" if failures == 1 else "were"
        text = f"{plural(failures, 'transfer')} failed and {verb} computed instead"
        lines.append(Text(text, style="yellow"))
    if again:
        prompts = plural(again, "prompt")
        lines.append(Text(f"{prompts} answered again from disk by a fresh process"))
    if show.seconds:
        lines.append(Text(f"{show.seconds:.0f} s in all", style="dim"))
    return Padding(Group(*lines), (0, 0, 0, 1))


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
