"""Replay: a trace on a ledger, step by step, as an engine with continuous batching runs it.

Every step computes one token of every request that is past its prompt, and up to
`prefill_tokens` tokens of prompts, at most `chunk_tokens` of each. Requests are admitted
first come, first served, when all their prompt fits; when a step does not fit, the one
admitted last is preempted: it gives everything back and starts over later.

How long a step takes is a simple model of an engine:

    seconds = max(step_seconds, decoded tokens / decode_rate) + prompt tokens / prefill_rate

Prompt tokens that were found cached take no time. A request's first token is there at the end
of the step that computes the last of its prompt.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.rows import num_runs
from kvstow.errors import OutOfBlocks, TraceError
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout
from kvstow.plan.pack import ANYWHERE, Site, packed_as
from kvstow.plan.retention import Encoder, State
from kvstow.plan.view import ceil_div
from kvstow.simulate.trace import TraceRequest, output_of, prompt_of
from kvstow.text import human

# ── layouts ─────────────────────────────────────────────────────────────────────────────

PackingPolicy = Literal["slab", "union"]
POLICIES: tuple[PackingPolicy, ...] = get_args(PackingPolicy)


def layout_of(
    policy: PackingPolicy,
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    site: Site = ANYWHERE,
) -> Layout:
    """The layout that a policy makes of the groups.

    Under `union` states are kept at the distance of the scaled attention blocks, or no
    prefix of any length would end at both.
    """
    pack = partial(packed_as, policy, budget=budget, num_slabs=num_slabs, site=site)
    layout = pack(groups)
    attention = [
        rows.group.block_tokens
        for rows in layout.groups
        if not isinstance(rows.group.retention, State)
    ]
    if policy == "slab" or not attention or len(attention) == len(layout.groups):
        return layout
    return pack([_spaced(group, max(attention)) for group in groups])


def _spaced(group: Group, block_tokens: int) -> Group:
    """A recurrent group with checkpoints at another distance; others as they are."""
    if not isinstance(group.retention, State):
        return group
    layers = tuple(replace(layer, block_tokens=block_tokens) for layer in group.layers)
    return replace(group, layers=layers)


# ── waste ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Waste:
    """Bytes in use at one moment, by what they hold.

    needed          tokens and states themselves
    padding         nothing: rows are longer than their pages
    fragmentation   nothing: free rows in slabs that a group cannot give up
    rounding        nothing: token slots of blocks that are not full
    """

    needed: float
    padding: float
    fragmentation: float
    rounding: float

    @property
    def in_use(self) -> float:
        return self.needed + self.padding + self.fragmentation + self.rounding


def waste_of(ledger: Ledger, layout: Layout) -> Waste:
    """The bytes in use now."""
    needed = padding = fragmentation = rounding = 0.0
    for g, group in enumerate(ledger.groups):
        rows, page, stride = ledger.pool.num_held(g), group.page_bytes, layout.row_stride(g)
        padding += rows * (stride - page)
        fragmentation += ledger.pool.num_stranded(g) * stride
        unfilled = 0.0
        if not isinstance(group.retention, State | Encoder):
            unfilled = ledger.unfilled_tokens(g) / group.block_tokens * page
        rounding += unfilled
        needed += rows * page - unfilled
    return Waste(needed, padding, fragmentation, rounding)


def shares(samples: list[Waste]) -> dict[str, float]:
    """Parts of the bytes in use, averaged over the samples."""
    total = sum(sample.in_use for sample in samples)
    parts = {
        name: float(np.sum([getattr(sample, name) for sample in samples])) / total if total else 0.0
        for name in ("padding", "fragmentation", "rounding")
    }
    return parts | {"total": sum(parts.values())}


# ── the replay ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast an engine works: seconds per step, prompt tokens per step, steps per sample.

    `prefill_rate` and `decode_rate` are tokens per second, of all requests together.
    No request is admitted whose prompt would bring the held share of the arena above `load`.
    """

    step_seconds: float = 0.025
    prefill_rate: float = 10_000.0
    decode_rate: float = float("inf")
    prefill_tokens: int = 16_384
    chunk_tokens: int = 2_048
    sample_steps: int = 16
    load: float = 1.0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "prefill_rate", "decode_rate"):
            if not getattr(self, name) > 0:
                raise TraceError(f"{name} is {getattr(self, name)}, not above 0")
        for name in ("prefill_tokens", "chunk_tokens", "sample_steps"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise TraceError(f"{name} is {number!r}, not a whole number of at least 1")

    def __str__(self) -> str:
        """How long a step takes, as a sentence."""
        text = f"A step takes {self.step_seconds * 1e3:g} ms"
        if self.decode_rate < float("inf"):
            text += f", or the time for its decoded tokens at {self.decode_rate:,g} per second"
        if self.prefill_rate < float("inf"):
            text += f", plus prompt tokens at {self.prefill_rate:,g} per second"
        return f"{text}."

    def seconds(self, *, decoded: int, prefilled: int) -> float:
        """How long a step of so many decoded and prompt tokens takes."""
        return max(self.step_seconds, decoded / self.decode_rate) + prefilled / self.prefill_rate


@dataclass(frozen=True, slots=True)
class ReplaySample:
    """The ledger at one moment."""

    seconds: float
    requests: int
    waiting: int
    waste: Waste
    cached_bytes: int


@dataclass(slots=True)
class ReplayRecord:
    """What happened: samples over time, and sums."""

    samples: list[ReplaySample] = field(default_factory=list[ReplaySample])
    completed: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    rows: int = 0
    runs: int = 0
    fewest_runs: int = 0
    admitted: int = 0
    seconds: float = 0.0
    output_tokens: int = 0
    """Tokens of answers that were computed."""
    first_token_seconds: list[float] = field(default_factory=list[float])
    """From arrival to the first token, of every request that has one."""
    token_seconds: list[float] = field(default_factory=list[float])
    """From token to token, the mean of every request that is complete."""


@dataclass(slots=True)
class ReplayedRequest:
    """A request that waits, or that runs under a handle of the ledger.

    `target` tokens are computed before it decodes: its prompt, and what it had answered when it
    was preempted.
    """

    number: int
    request: TraceRequest
    target: int
    handle: int = -1
    num_tokens: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens >= self.target

    @property
    def is_complete(self) -> bool:
        return self.num_tokens >= self.request.num_tokens


class Replay:
    """One layout's ledger and the requests that run on it."""

    def __init__(self, layout: Layout, trace: Sequence[TraceRequest], pace: Pace) -> None:
        self.layout = layout
        self.pace = pace
        self._has_names = any(request.prefixes or request.output for request in trace)
        self.ledger = Ledger(Pool(layout), caching=self._has_names)
        self.record = ReplayRecord()
        self.seconds = 0.0
        self._waiting = deque(ReplayedRequest(i, r, r.prompt_tokens) for i, r in enumerate(trace))
        self._arrivals = [request.arrival for request in trace]
        self._running: list[ReplayedRequest] = []
        self._step = self._budget = self._decoded = self._prefilled = 0
        self._first_tokens: dict[int, float] = {}
        self._strides = [layout.row_stride(g) for g in range(len(layout.groups))]
        states = [g.block_tokens for g in self.ledger.groups if isinstance(g.retention, State)]
        self._boundary = min(states) if states and self._has_names else 0
        self._check_longest_fits(trace)

    def _check_longest_fits(self, trace: Sequence[TraceRequest]) -> None:
        """Raises for a request that would not fit into the empty pool."""
        longest = max(trace, key=lambda request: request.num_tokens)
        needs = self._needs(longest.num_tokens)
        try:
            self.ledger.pool.check_room(needs)
        except OutOfBlocks as error:
            why = str(error).partition("\n")[0]
            raise TraceError(
                f"a request of {longest.num_tokens:,} tokens does not fit into an empty pool of "
                f"{human(self.layout.nbytes)}: {why}\n\n"
                "hint: plan more memory, or take the request out of the trace"
            ) from error

    def _needs(self, num_tokens: int) -> dict[int, int]:
        step = self.pace.chunk_tokens
        return {
            g: group.rows_needed(num_tokens, in_flight=step)
            for g, group in enumerate(self.ledger.groups)
        }

    # ── time ──────────────────────────────────────────────────────────────────────

    def run(
        self,
        *,
        max_steps: int | None = None,
        max_seconds: float = float("inf"),
        progress: Callable[[int, int], None] | None = None,
    ) -> ReplayRecord:
        """Replay to the end, or for so many steps or seconds. `progress` is called with the
        numbers of finished requests and of all."""
        total = len(self._waiting)
        while self._waiting or self._running:
            if self.seconds >= max_seconds or (max_steps is not None and self._step >= max_steps):
                break
            self.step()
            if progress and self._step % self.pace.sample_steps == 0:
                progress(self.record.completed, total)
        if progress:
            progress(self.record.completed, total)
        return self.record

    def step(self) -> None:
        if not self._running and self._waiting:
            self.seconds = max(self.seconds, self._waiting[0].request.arrival)
        self._budget = self.pace.prefill_tokens
        self._decoded = self._prefilled = 0
        self._advance()
        self._admit_all()
        end = self.seconds + self.pace.seconds(decoded=self._decoded, prefilled=self._prefilled)
        self._time(end)
        self._finish()
        if self._step % self.pace.sample_steps == 0:
            self._sample()
        self._step += 1
        self.seconds = self.record.seconds = end

    # ── one step ──────────────────────────────────────────────────────────────────

    def _advance(self) -> None:
        """One more token, or one more chunk of its prompt, for every request."""
        goals = [
            run.num_tokens + 1 if run.is_decoding else self._chunk_end(run.num_tokens, run.target)
            for run in self._running
        ]
        while self._running:
            try:
                self.ledger.grow([run.handle for run in self._running], goals)
            except OutOfBlocks:
                self._preempt()
                goals.pop()
            else:
                break
        for run, goal in zip(self._running, goals, strict=True):
            was_decoding = run.is_decoding
            self._decoded += was_decoding
            self._prefilled += 0 if was_decoding else goal - run.num_tokens
            run.num_tokens = goal
            if run.is_decoding and not was_decoding:
                self._measure_runs(run.handle)

    def _chunk_end(self, start: int, target: int) -> int:
        """Where the next chunk of a prompt ends: at a checkpoint, if it passes one."""
        end = min(target, start + min(self.pace.chunk_tokens, max(0, self._budget)))
        if self._boundary and end // self._boundary > start // self._boundary:
            end = end // self._boundary * self._boundary
        self._budget -= end - start
        return end

    def _preempt(self) -> None:
        run = self._running.pop()
        self.ledger.release(run.handle)
        run.target = max(run.request.prompt_tokens, run.num_tokens)
        self._waiting.appendleft(run)
        self.record.preemptions += 1

    def _admit_all(self) -> None:
        while self._waiting and self._budget > 0:
            run = self._waiting[0]
            if run.request.arrival > self.seconds:
                return
            needs = self._needs(run.target)
            if self._running and self._load_with(needs) > self.pace.load:
                return
            try:
                self.ledger.pool.check_room(needs)
                self._admit(run)
            except OutOfBlocks:
                return
            self._running.append(self._waiting.popleft())

    def _load_with(self, needs: dict[int, int]) -> float:
        """The part of the arena that would be held with so many rows more."""
        held = sum(
            (self.ledger.pool.num_held(g) + needs[g]) * n for g, n in enumerate(self._strides)
        )
        return held / self.layout.nbytes

    def _admit(self, run: ReplayedRequest) -> None:
        target = run.target
        prompt = prompt_of(run.number, run.request, target) if self._has_names else target
        first = self._chunk_end(0, target)
        admission = self.ledger.admit(prompt, num_tokens=first)
        run.handle, run.num_tokens = admission.request, max(first, admission.hit_tokens)
        self._prefilled += run.num_tokens - admission.hit_tokens
        if target == run.request.prompt_tokens:
            self.record.prompt_tokens += target
            self.record.hit_tokens += admission.hit_tokens
        if run.is_decoding:
            self._measure_runs(run.handle)

    def _finish(self) -> None:
        done = [run for run in self._running if run.is_complete]
        for run in done:
            if run.request.output:
                tokens = output_of(run.number, run.request)
                self.ledger.append(run.handle, tokens[run.target - run.request.prompt_tokens :])
        if done:
            self.ledger.release([run.handle for run in done])
            self.record.completed += len(done)
            self._running = [run for run in self._running if not run.is_complete]

    # ── what is written down ──────────────────────────────────────────────────────

    def _time(self, end: float) -> None:
        """First tokens and last tokens of the step that ends then."""
        self.record.output_tokens += self._decoded
        for run in self._running:
            if run.is_decoding and run.number not in self._first_tokens:
                self._first_tokens[run.number] = end
                self.record.first_token_seconds.append(end - run.request.arrival)
            if run.is_complete:
                first = self._first_tokens.pop(run.number)
                self.record.token_seconds.append((end - first) / run.request.output_tokens)

    def _measure_runs(self, handle: int) -> None:
        """How a request's rows lie when all of its prompt has some."""
        for g, part in self.ledger.blocks(handle).items():
            self.record.rows += len(part)
            self.record.runs += num_runs(np.sort(part.ids))
            self.record.fewest_runs += ceil_div(len(part), self.layout.groups[g].rows_per_slab)
        self.record.admitted += 1

    def _sample(self) -> None:
        pool = self.ledger.pool
        arrived = bisect_right(self._arrivals, self.seconds)
        cached = sum(pool.num_cached(g) * n for g, n in enumerate(self._strides))
        self.record.samples.append(
            ReplaySample(
                self.seconds,
                len(self._running),
                arrived - self.record.completed - len(self._running),
                waste_of(self.ledger, self.layout),
                cached,
            )
        )
