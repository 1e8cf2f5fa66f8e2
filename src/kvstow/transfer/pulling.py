"""A transfer: legs from one or several sources into the same rows, accepted together or not
at all."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from kvstow.errors import RouteError, TransferError
from kvstow.route.sources import sources
from kvstow.transfer.channel.messages import Sample
from kvstow.transfer.contact import Contact
from kvstow.transfer.digesting import (
    digests,
    mismatches,
    packed_claims,
    prepared_digests,
    sample_bytes,
    samples,
)
from kvstow.transfer.generations import ids_of
from kvstow.transfer.home import Home, named
from kvstow.transfer.latch import Latch
from kvstow.transfer.leg import Goal, Leg, Plan
from kvstow.transfer.path import Way
from kvstow.transfer.straight import Ways

INLINE_BYTES = 8 << 20
"""A sample that is no larger is counted in the agent's own thread, made ready while the rows
move: in another thread it would start too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What an accepted transfer took.

    `digest` is `passed` when some of the bytes were compared, `off` otherwise.
    """

    nbytes: int
    descriptors: int
    seconds: float
    sources: int
    directions: tuple[Way, ...]
    fence: Literal["passed"] = "passed"
    digest: Literal["passed", "off"] = "off"


class Transfer:
    """A pull on its way. `poll` and `wait` may be called from any thread.

    The rows belong to the transfer until it is `quiet`, which may be later than its end
    if it failed: the agent keeps them from being reused until then.
    """

    def __init__(
        self,
        home: Home,
        goal: Goal,
        legs: Sequence[Leg],
        deadline: float,
        plans: "Plans",
        tend: Callable[[], None],
    ) -> None:
        self.legs = tuple(legs)
        self.goal = goal
        self.error: TransferError | None = None
        self.stats: Stats | None = None
        self.quarantined = False
        self.on_end: Callable[[TransferError | None], None] = lambda error: None
        self._home = home
        self._plans = plans
        self._tend = tend
        self._started = home.clock()
        self._deadline = deadline
        self._generations = home.generations(goal.into)
        self.done = False
        self.quiet = False
        self._has_ended = Latch()
        self._is_quiet = Latch()
        self._begun = False
        self._aborted = False
        self._samples: tuple[Sample, ...] = ()
        self._take: Callable[[], tuple[int, ...]] | None = None
        self._local: Future[tuple[int, ...]] | None = None

    # ── for the caller ────────────────────────────────────────────────────────────

    def poll(self) -> bool:
        """Whether the rows may be used; raises TransferError if they never may."""
        if not self.done:
            return False
        self._tend()
        if self.error is not None:
            raise self.error
        return True

    def wait(self, seconds: float | None = None) -> Stats:
        """The outcome. Raises TransferError if it failed, TimeoutError if it has not ended."""
        if not self._has_ended.wait(seconds):
            raise TimeoutError(f"transfer has not ended within {seconds} s")
        self.poll()
        assert self.stats is not None
        return self.stats

    def wait_quiet(self, seconds: float | None = None) -> bool:
        """Whether nothing writes to the rows any more; waits for it at most so long."""
        over = self._is_quiet.wait(seconds)
        self._tend()
        return over

    def abort(self) -> None:
        """Give up; ends as a TransferError of kind `aborted` unless it has ended already."""
        self._aborted = True

    # ── for the agent's thread ────────────────────────────────────────────────────

    def advance(self, now: float) -> None:
        """Move all legs on; end when the last is clean or the first has failed."""
        for leg in self.legs:
            leg.advance(now)
        if not self._begun and all(leg.state == "met" for leg in self.legs):
            self._begin(now)
        if not self.done:
            self._judge(now)
        if self.done and not self.quiet and all(leg.quiet for leg in self.legs):
            for leg in self.legs:
                leg.let_go()
            self.rest()

    def rest(self) -> None:
        """Nothing writes to the rows any more: all legs are quiet, or the engine is gone."""
        self.quiet = True
        self._is_quiet.set()

    def _begin(self, now: float) -> None:
        """Every source is there: decide who brings what, tell them all, and start."""
        self._begun = True
        try:
            plans = self._plans.plans([leg.contact for leg in self.legs])
        except RouteError as error:
            self.fail(TransferError(f"sources do not make a whole:\n{error}", kind="refused"), now)
            return
        goal = self.goal
        layouts = [leg.contact.layout for leg in self.legs if leg.contact.layout is not None]
        self._samples = samples(
            (self._home.layout, *layouts), goal.start_token, goal.num_tokens, goal.digest
        )
        for leg, plan in zip(self.legs, plans, strict=True):
            leg.begin(plan, self._samples, now)
        for leg in self.legs:
            leg.advance(now)
        home = self._home
        if goal.digest == "sample" and sample_bytes(home.layout, self._samples) <= INLINE_BYTES:
            self._take = prepared_digests(home.arena, goal.into, self._samples, None)

    def _judge(self, now: float) -> None:
        failed = next((leg.error for leg in self.legs if leg.error is not None), None)
        if failed is not None:
            self.fail(failed, now)
        elif self._aborted:
            self.fail(TransferError("transfer was aborted here", kind="aborted"), now)
        elif all(leg.state == "clean" for leg in self.legs) and self._digested(now):
            self._accept(now)
        elif now > self._deadline:
            late = [leg.contact.name for leg in self.legs if leg.state != "clean" or not leg.told]
            late = late or [leg.contact.name for leg in self.legs]
            self.fail(TransferError(
                f"peers {late}: no end within {self._deadline - self._started:.3g} s",
                kind="timeout", peer=late[0]), now)  # fmt: skip

    def _digested(self, now: float) -> bool:
        """Whether the digests agree, once all are there; fails the transfer if they differ."""
        if not self._samples:
            return True
        if self._local is None:
            self._local = self._counted()
        there = [leg.told for leg in self.legs if leg.told is not None]
        if not self._local.done() or len(there) < len(self.legs):
            return False
        wrong = mismatches(self._samples, self._local.result(), there)
        if not wrong:
            return True
        text = "; ".join(
            f"layers {list(w.sample.layers[:4])}, tokens [{w.sample.start_token}, "
            f"{w.sample.stop_token}): {w.here:016x} here, {w.there:016x} there" for w in wrong
        )  # fmt: skip
        self.fail(TransferError(f"bytes differ from what was offered: {text}", kind="digest"), now)
        return False

    def _counted(self) -> Future[tuple[int, ...]]:
        """The digests of what lies here now: at once if they are small, else beside us."""
        if self._take is None:
            what = (self._home.arena, self.goal.into, self._samples, None)
            return self._home.worker.submit(digests, *what)
        counted: Future[tuple[int, ...]] = Future()
        counted.set_result(self._take())
        self._take = None
        return counted

    def _accept(self, now: float) -> None:
        """The consumer's own fence: the rows must still be the ones that were given."""
        for g, before in self._generations.items():
            now_there = self._home.owner.generations[g].take(self.goal.into[g].ids)
            if now_there.tobytes() != before.tobytes():
                self.fail(TransferError("destination rows were given to others meanwhile",
                                        kind="fence"), now)  # fmt: skip
                return
        self.stats = Stats(
            nbytes=sum(leg.nbytes for leg in self.legs),
            descriptors=sum(leg.descriptors for leg in self.legs),
            seconds=now - self._started,
            sources=len(self.legs),
            directions=tuple(leg.direction for leg in self.legs),
            digest="passed" if self._samples else "off",
        )
        for leg in self.legs:
            leg.end("accepted")
        self._end("accepted", None)

    def fail(self, error: TransferError, now: float) -> None:
        """End as an error that names the destination rows of every group."""
        names = named(self._home.layout, ids_of(self.goal.into))
        peer = error.peer or (self.legs[0].contact.name if self.legs else "")
        listing = "; ".join(f"group {name!r}: {_few(ids)}" for name, ids in names.items())
        self.error = TransferError(
            f"{error}\n\nhint: nothing in these blocks may be used: {listing}",
            kind=error.kind, peer=peer, blocks=names)  # fmt: skip
        for leg in self.legs:
            leg.fail(self.error, now)
            leg.end("aborted" if error.kind == "aborted" else "failed")
        self._end(error.kind, self.error)

    def _end(self, outcome: str, error: TransferError | None) -> None:
        self._count(outcome)
        self.done = True
        self._has_ended.set()
        self.on_end(error)

    def _count(self, outcome: str) -> None:
        count, metrics = self._home.count, self._home.metrics
        count(metrics.transfers, outcome)
        seconds = self._home.clock() - self._started
        for leg in self.legs:
            count(metrics.bytes, leg.direction, leg.nbytes)
            count(metrics.descriptors, leg.direction, leg.descriptors)
            leg.contact.moved_bytes += leg.nbytes
            leg.contact.moved_seconds += seconds
        if self.stats is not None:
            metrics.seconds.observe(seconds)
        self._home.note("transfer", {
            "outcome": outcome, "seconds": seconds, "sources": len(self.legs),
            "peers": ", ".join(leg.contact.name for leg in self.legs),
            "bytes": sum(leg.nbytes for leg in self.legs),
            "descriptors": sum(leg.descriptors for leg in self.legs),
        })  # fmt: skip


class Plans:
    """Who brings what into this layout, for each set of sources computed once."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._known: dict[tuple[str, ...], tuple[Plan, ...]] = {}

    def plans(self, contacts: Sequence[Contact]) -> tuple[Plan, ...]:
        """One plan per source."""
        key = tuple(contact.fingerprint for contact in contacts)
        if key not in self._known:
            layouts = [contact.layout for contact in contacts if contact.layout is not None]
            found = {source.index: source for source in sources(layouts, self._home.layout)}
            alone = len(contacts) == 1
            self._known[key] = tuple(
                Plan(Ways(found[i].route), None if alone else packed_claims(found[i].claims))
                if i in found else Plan(None, None)
                for i in range(len(contacts))
            )  # fmt: skip
        return self._known[key]


def _few(ids: Sequence[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:8])
    return f"{shown}, … ({len(ids)})" if len(ids) > 8 else shown
