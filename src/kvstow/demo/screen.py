"""The demo on one screen: who does what, the plan, the answers, the transfers, the verdict."""

from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvstow.demo.messages import PlanFacts
from kvstow.demo.story import DemoState, PromptState
from kvstow.plan.words import counted

QUESTION_WIDTH = 62


class Screen:
    """Redraws itself in a terminal; elsewhere prints steps as they come, and the end once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._said: dict[str, str] = {}

    def draw(self, show: DemoState) -> None:
        """DemoState the demo as it stands."""
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
    parts: list[RenderableType] = [_title(show)]
    if show.doing and not all(what == "ready" for what in show.doing.values()):
        parts.append(_processes(show))
    if show.plans:
        parts.append(_plans(show))
    if any(answer.prefilled for answer in show.answers):
        parts += [_answers(show), _transfers(show)]
    notes = [*show.notes]
    for number, answer in enumerate(show.answers, 1):
        why = [" ".join(lost.why.split("\n\n")[0].split()) for lost in answer.lost]
        notes += [f"prompt {number}: computed where it is decoded: {each}" for each in why]
    parts += [Text(f"note: {note}", style="yellow") for note in notes]
    if show.identical is not None:
        parts.append(_verdict(show))
    return Group(*parts)


def _title(show: DemoState) -> Text:
    text = Text("kvstow demo", style="bold")
    text.append("  prefill in one process, rows over NIXL, decode in another", style="not bold dim")
    return text


def _processes(show: DemoState) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, what in show.doing.items():
        busy = what not in ("ready", "killed")
        table.add_row(Spinner("dots") if busy else Text("·"), name, Text(what, style="dim"))
    return table


# ── the plan ──────────────────────────────────────────────────────────────────────────


def _plans(show: DemoState) -> Table:
    table = _table("plan")
    for column in ("side", "group"):
        table.add_column(column, no_wrap=True)
    for column in ("layers", "tokens\nin block", "bytes\nof row", "rows\nin slab", "slab", "arena"):
        table.add_column(column, justify="right", no_wrap=True)
    sides = sorted(show.plans, reverse=True)
    alike = len({_facts(show.plans[side]) for side in sides}) == 1
    for side in sides[:1] if alike else sides:
        plan = show.plans[side]
        name = "both" if alike and len(sides) > 1 else side
        for i, group in enumerate(plan.groups):
            table.add_row(
                name if i == 0 else "",
                group.name,
                str(group.layers),
                str(group.block_tokens),
                f"{group.row_bytes:,}",
                str(group.rows_per_slab),
                size(plan.slab_bytes) if i == 0 else "",
                size(plan.arena_bytes) if i == 0 else "",
            )
    how = [f"{side}: {what}" for side, what in show.how.items() if what != "one process"]
    orders = dict.fromkeys(show.plans[side].order for side in sides)
    table.caption = "; ".join([show.model, f"order {' and '.join(orders)}", *how])
    table.caption_justify = "left"
    return table


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


def _facts(plan: PlanFacts) -> tuple[object, ...]:
    return (plan.order, plan.groups, plan.slab_bytes)


# ── the answers ───────────────────────────────────────────────────────────────────────


def _answers(show: DemoState) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim")
    table.add_column(overflow="fold")
    for number, answer in enumerate(show.answers, 1):
        if not answer.prefilled:
            continue
        table.add_row(str(number), Text(_asked(answer.text), style="cyan"))
        table.add_row("", Text.assemble(" ".join(answer.streamed.split()) or "…", _mark(answer)))
    return Padding(table, (0, 0, 0, 1))


def _asked(text: str) -> str:
    """The question itself: the last line, with dots for what stands before it."""
    lines = text.strip().splitlines()
    short = lines[-1] if len(lines[-1]) <= QUESTION_WIDTH else lines[-1][: QUESTION_WIDTH - 1] + "…"
    return f"[{len(lines) - 1} lines] {short}" if len(lines) > 1 else short


def _mark(answer: PromptState) -> tuple[str, str]:
    match answer.identical:
        case None:
            return ("", "")
        case True:
            count = len(answer.decoded.tokens) if answer.decoded else 0
            again = answer.from_store
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
    for number, answer in enumerate(show.answers, 1):
        if answer.prefilled:
            for row in _transfer_rows(number, answer):
                table.add_row(*row)
    return table


def _transfer_rows(number: int, answer: PromptState) -> list[list[RenderableType]]:
    rows: list[list[RenderableType]] = []
    for pull in answer.pulled:
        rows.append(
            [
                str(number),
                str(len(answer.tokens)),
                str(pull.rows),
                size(pull.nbytes),
                str(pull.descriptors),
                str(pull.per_layer),
                f"{pull.seconds * 1e3:.0f}",
                f"{pull.nbytes / pull.seconds / 1e9:.2f}",
                Text(" ".join(dict.fromkeys((pull.fence, pull.digest))), style="green"),
            ]
        )
    for lost in answer.lost:
        rows.append(
            [
                str(number),
                str(len(answer.tokens)),
                "–",
                "–",
                "–",
                "–",
                f"{lost.seconds * 1e3:.0f}",
                "–",
                Text("failed", style="red"),
            ]
        )
    if not rows:
        return [[str(number), str(len(answer.tokens))]]
    rows[0] += [
        f"{answer.decoded.to_first * 1e3:,.0f}" if answer.decoded else "",
        f"{answer.judged.to_first * 1e3:,.0f}" if answer.judged else "",
    ]
    return rows


# ── the verdict ───────────────────────────────────────────────────────────────────────


def _verdict(show: DemoState) -> RenderableType:
    pulls = [pull for answer in show.answers for pull in answer.pulled]
    fell_back = sum(bool(answer.lost) for answer in show.answers)
    again = sum(answer.from_store is not None for answer in show.answers)
    lines = [
        Text("identical: every token is the single process's", style="bold green")
        if show.identical
        else Text("DIFFERENT: see above", style="bold red")
    ]
    descriptors = counted(sum(p.descriptors for p in pulls), "descriptor")
    facts = (
        f"{counted(len(pulls), 'transfer')}, {size(sum(p.nbytes for p in pulls))} in "
        f"{descriptors}; layer by layer, K and V apart, {sum(p.per_layer for p in pulls):,}"
    )
    lines.append(Text(facts))
    if fell_back:
        verb = "was" if fell_back == 1 else "were"
        text = f"{counted(fell_back, 'transfer')} failed and {verb} computed instead"
        lines.append(Text(text, style="yellow"))
    if again:
        lines.append(
            Text(f"{counted(again, 'prompt')} answered again from disk by a fresh process")
        )
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
