"""Every token sees what it should: a ledger driven by an engine that remembers every write.

The engine writes, for every token and group, a value that stands for the token and all
before it; before it does, it reads what the token would see. A row that is written
destroys what other groups had in its slab.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from block_layouts import layouts
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.blocks.table import RowCopy
from kvstow.errors import OutOfBlocks
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Chunk, Encoder, Full, State, Window

LAYOUTS = layouts()
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


def visible(group: Group, position: int) -> set[int]:
    """The positions before it that a token sees, from the definition of each retention."""
    before = range(position)
    match group.retention:
        case Full():
            return set(before)
        case Window(tokens):
            return {p for p in before if p > position - tokens}
        case Chunk(tokens):
            return {p for p in before if p // tokens == position // tokens}
        case State() | Encoder():
            return set()


@dataclass
class Running:
    """A request as the engine knows it: `tokens` so far, of which it has told `told`."""

    request: int
    tokens: list[int]
    salt: bytes
    told: bool
    step: int = 1
    encoder: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def meaning(self, num_tokens: int) -> tuple[object, ...]:
        return (self.salt, *self.tokens[:num_tokens])


class Engine:
    """Rows and what is in them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rows: dict[tuple[int, int], dict[int, object]] = {}

    def write(self, group: int, block: int, position: int, value: object) -> None:
        members = next(s for s in self.layout.sharing if group in s)
        slab = block // self.layout.groups[group].rows_per_slab
        for other in members:
            size = self.layout.groups[other].rows_per_slab
            if other != group:
                for row in range(slab * size, (slab + 1) * size):
                    self.rows.pop((other, row), None)
        self.rows.setdefault((group, block), {})[position] = value

    def copy(self, copies: tuple[RowCopy, ...]) -> None:
        for copy in copies:
            content = dict(self.rows.get((copy.group, copy.source), {}))
            self.rows.pop((copy.group, copy.destination), None)
            for position, value in content.items():
                self.write(copy.group, copy.destination, position, value)

    def compute(self, ledger: Ledger, run: Running, start: int, end: int) -> None:
        """Compute tokens `[start, end)`, all of them at once."""
        for g, part in ledger.blocks(run.request).items():
            group = ledger.groups[g]
            rows = dict(zip(part.index.tolist(), part.ids.tolist(), strict=True))
            match group.retention:
                case State():
                    if start:
                        assert self.rows[g, rows[0]][0] == run.meaning(start)
                    self.write(g, rows[0], 0, run.meaning(end))
                case Encoder():
                    assert run.encoder.setdefault(g, tuple(rows.values())) == tuple(rows.values())
                case _:
                    self.attend(g, group, rows, run, start, end)

    def attend(
        self, g: int, group: Group, rows: dict[int, int], run: Running, start: int, end: int
    ) -> None:
        for position in range(start, end):
            self.write(g, rows[position // group.block_tokens], position, run.meaning(position + 1))
        for position in range(start, end):
            for seen in visible(group, position):
                content = self.rows[g, rows[seen // group.block_tokens]]
                assert content[seen] == run.meaning(seen + 1), (group.name, position, seen)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(LAYOUTS)), caching=st.booleans())
    def begin(self, name: str, caching: bool) -> None:
        self.layout = LAYOUTS[name]
        self.ledger = Ledger(Pool(self.layout), caching=caching)
        self.engine = Engine(self.layout)
        self.running: list[Running] = []
        self.next_token = 1

    @rule(tokens=TOKENS, salt=st.sampled_from([b"", b"", b"x"]), told=st.booleans(), data=st.data())
    def admit(self, tokens: list[int], salt: bytes, told: bool, data: st.DataObject) -> None:
        first = data.draw(st.integers(1, len(tokens)))
        prompt = Prompt.of(tokens, salt=salt) if told else len(tokens)
        before = self.holdings()
        try:
            admission = self.ledger.admit(prompt, num_tokens=first)
        except OutOfBlocks:
            assert self.holdings() == before
            return
        assert admission.hit_tokens < len(tokens)
        end = max(first, admission.hit_tokens)
        run = Running(admission.request, tokens, salt, told, max(1, end - admission.hit_tokens))
        self.running.append(run)
        self.engine.copy(admission.copies)
        self.engine.compute(self.ledger, run, admission.hit_tokens, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(0, 5))
    def grow(self, data: st.DataObject, more: int) -> None:
        runs = data.draw(st.lists(st.sampled_from(self.running), unique_by=id, min_size=1))
        self.grown(runs, [data.draw(st.integers(min(1, more), more)) for _ in runs])

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 3))
    def decode(self, steps: int) -> None:
        """All requests go on, and no two of them the same way."""
        for _ in range(steps):
            self.grown(self.running, [1] * len(self.running))

    def grown(self, runs: list[Running], more: list[int]) -> None:
        before = [self.ledger.num_tokens(run.request) for run in runs]
        after = [n + m for n, m in zip(before, more, strict=True)]
        lengths = [len(run.tokens) for run in runs]
        for run, end in zip(runs, after, strict=True):
            while len(run.tokens) < end:
                self.next_token += 1
                run.tokens = [*run.tokens, self.next_token]
        try:
            copies = self.ledger.grow([run.request for run in runs], after)
        except OutOfBlocks:
            assert [self.ledger.num_tokens(run.request) for run in runs] == before
            for run, length in zip(runs, lengths, strict=True):
                run.tokens = run.tokens[:length]
            return
        self.engine.copy(copies)
        for run, start, end in zip(runs, before, after, strict=True):
            run.step = max(run.step, end - start)
            self.engine.compute(self.ledger, run, start, end)
            if run.told and len(run.tokens) > self.known(run):
                self.ledger.append(run.request, run.tokens[self.known(run) :])

    def known(self, run: Running) -> int:
        slot = int(self.ledger._requests.slots(run.request)[0])
        source = self.ledger._requests.sources[slot]
        return 0 if source is None else len(source.prompt)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.running))
        if len(run.tokens) > self.ledger.num_tokens(run.request):
            self.grown([run], [len(run.tokens) - self.ledger.num_tokens(run.request)])
        before = self.holdings()
        try:
            admission = self.ledger.fork(run.request)
        except OutOfBlocks:
            assert self.holdings() == before
            return
        self.engine.copy(admission.copies)
        self.running.append(
            Running(
                admission.request, list(run.tokens), run.salt, run.told, run.step, dict(run.encoder)
            )
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), finished=st.booleans())
    def release(self, data: st.DataObject, finished: bool) -> None:
        runs = data.draw(st.lists(st.sampled_from(self.running), unique_by=id, min_size=1))
        self.running = [run for run in self.running if not any(run is r for r in runs)]
        self.ledger.release([r.request for r in runs], computed_tokens=None if finished else 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), late=st.booleans())
    def fail_to_fill_a_row(self, data: st.DataObject, late: bool) -> None:
        """A writer spoils a row of a request, in quarantine; the request is over, and nobody
        may be given what is left of the row."""
        run = data.draw(st.sampled_from(self.running))
        rows = [
            (g, block)
            for g, part in self.ledger.blocks(run.request).items()
            for block in part.ids.tolist()
            if self.ledger.pool.holds(g, block)[0] == 1
        ]
        if not rows:
            return
        g, block = data.draw(st.sampled_from(rows))
        self.ledger.pool.quarantine(g, block)
        if late:
            self.ledger.pool.unquarantine(g, block)
        self.running = [other for other in self.running if other is not run]
        self.ledger.release(run.request)
        if not late:
            self.ledger.pool.unquarantine(g, block)
        self.engine.rows.pop((g, block), None)
        assert self.ledger.pool.holds(g, block).tolist() == [0]
        assert not self.ledger.pool.kept(g, block).any()
        if self.ledger.prefixes:
            assert block not in self.ledger.prefixes.rows(g).tolist()

    def holdings(self) -> dict[int, dict[int, tuple[list[int], list[int]]]]:
        return {
            run.request: {
                g: (part.ids.tolist(), part.index.tolist())
                for g, part in self.ledger.blocks(run.request).items()
            }
            for run in self.running
        }

    @invariant()
    def the_books_balance(self) -> None:
        self.ledger.check()
        assert len(self.ledger) == len(self.running)
        for g in range(len(self.ledger.groups)):
            mine = {
                int(block)
                for run in self.running
                for part in (self.ledger.blocks(run.request)[g],)
                for block in part.ids
            }
            assert self.ledger.pool.num_held(g) == len(mine)

    @invariant()
    def holdings_are_bounded(self) -> None:
        for run in self.running:
            for g, part in self.ledger.blocks(run.request).items():
                bound = self.ledger.groups[g].rows_bound(in_flight=run.step)
                assert bound is None or len(part) <= bound, self.ledger.groups[g].name

    @invariant()
    def everything_comes_back(self) -> None:
        if not self.running:
            assert all(self.ledger.pool.num_held(g) == 0 for g in range(len(self.ledger.groups)))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(stateful_step_count=30, deadline=None)


def test_the_machine_meets_hits_copies_and_refusals() -> None:
    """The rules above would prove nothing if these never happened."""
    layout = LAYOUTS["recurrent"]
    ledger = Ledger(Pool(layout))
    engine = Engine(layout)
    tokens = [0, 1] * 8
    run = Running(ledger.admit(Prompt.of(tokens), num_tokens=8).request, tokens, b"", told=True)
    engine.compute(ledger, run, 0, 8)
    copies = ledger.grow(run.request, 16)
    assert [copy.group for copy in copies] == [1]
    engine.copy(copies)
    engine.compute(ledger, run, 8, 16)
    again = ledger.admit(Prompt.of([*tokens[:10], 0, 0]))
    assert again.hit_tokens == 8
    assert len(again.copies) == 1
    with pytest.raises(OutOfBlocks):
        ledger.admit(10_000)
    assert np.array_equal(
        ledger.blocks(run.request)[0].ids[:4], ledger.blocks(again.request)[0].ids[:4]
    )
