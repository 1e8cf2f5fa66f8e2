"""One schedule: a seed decides who does what next, and everything that goes wrong.

While it runs, and when it has come to rest, it looks at what must always be true:

    accepted rows, prefix hits and rows of a tier hold what was computed, then and later
    no byte changes that is not in a row which a transfer or a load may still write to
    no row is given out to which somebody may still write
    every transfer ends in its time, and its rows come to rest
    no row, lease, counter, post, slot, pin, job or file is left over
    a store whose disk is honest has every row that has a name, after a power cut too

`Broken` says what was not, at which step of which seed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from tempfile import gettempdir
from typing import Any

import numpy as np

from kvstow.errors import OutOfBlocks
from kvstow.transfer.channel.messages import Begun
from kvstow.transfer.options import DigestPolicy, Options, Way
from kvstow.transfer.transport.base import lost
from schedules.disks import NO_DISK_FAULTS, DiskFaults
from schedules.remotes import Remotes
from schedules.rows import Claim, LedgerRows
from schedules.stores import Stores
from schedules.transfers import Transfers
from schedules.truth import WINDOW, Ints, Request, Shape
from schedules.world import Held, Node, World

STEPS = 60
STORE_STEPS = 80
DRAIN_SECONDS = 20.0
SILENT_BEATS = 32
"""A consumer that is gone is forgotten after a little less, and what was written for it with it."""

LEAST_TICK, MOST_TICK = 0.01, 0.3
DIGESTS: tuple[DigestPolicy, ...] = ("off", "off", "off", "sample", "always")
WAYS: tuple[Way | None, ...] = ("read", "read", "write", "write", None)
CHURNING_WAYS: tuple[Way | None, ...] = ("read", "read", "slots", "write")
SLOT_WAYS: tuple[Way | None, ...] = ("slots", "slots", "slots", "read", "write")
ALIKE = (Shape(), Shape(), Shape("BLNHC"), Shape("LBHNC"), Shape("BLHNC", 4))
MIXED = (Shape(), Shape("BLNHC"), Shape("LBHNC"), Shape("LHBNC"), Shape("BLHNC", 4))
HYBRID = tuple(
    Shape(order, tokens, second="window")
    for order, tokens in (("BLHNC", 2), ("BLNHC", 2), ("BLHNC", 4))
)
RECURRENT = tuple(
    Shape(order, tokens, second="state") for order, tokens in (("BLHNC", 2), ("BLNHC", 2))
)
RANKS = (Shape(tp=(0, 2)), Shape(tp=(1, 2)))
LENGTHS = (2, 4, 4, 6, 8, 3, 5, 9)
LONG = (8, 9, 10, 12)
"""Windows leave some of these behind."""


class Broken(AssertionError):
    """Something that must always be true is not."""


@dataclass(eq=False)
class Report:
    """What a schedule did."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter[str])
    injected: Counter[str] = field(default_factory=Counter[str])
    trace: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often something goes wrong in a schedule."""

    drop: float = 0.0
    reorder: float = 0.0
    stop: float = 0.0
    kill: float = 0.0
    cut: float = 0.0
    deaf: float = 0.0
    leave: float = 0.0
    copy: float = 0.0
    late: float = 1.0
    flip: float = 0.0
    full: float = 0.0
    power: float = 0.0
    disk: DiskFaults = NO_DISK_FAULTS


CALM = Faults()


@dataclass(frozen=True)
class Process:
    """How a node is started, each time again."""

    name: str
    model: str
    shape: Shape
    options: Options
    engine_ids: bool


class Schedule:
    """A world, and the hand that moves it."""

    def __init__(self, seed: int, folder: str = "") -> None:
        self.world = World(seed, folder or gettempdir())
        self.random = self.world.random
        self.report = Report(seed)
        dice = self.random
        self.roughness = dice.choices((0.0, 0.35, 1.0), (3, 4, 3))[0]
        """How much goes wrong: where it is much, few transfers get far enough to go wrong in
        a way that somebody has to notice."""
        self.churns = self.roughness > 0 and dice.random() < 0.4
        """Leases are short, nobody renews them, and rows are soon somebody else's."""
        self.stores = dice.random() < 0.12
        self.shares = self.stores or dice.random() < 0.3
        """Requests begin like earlier ones."""
        self.lengths = LENGTHS
        self.faults = self._drawn_faults()
        self._apply(self.faults)
        self.writers_die = self.faults.kill > 0 and dice.random() < 0.5
        """Producers write, slowly, and are killed meanwhile."""
        self.maps = not (self.writers_die or self.faults.leave) and Random(-7 - seed).random() < 0.3
        """Nodes map each other's memory, where they are not forced to do otherwise."""
        is_slow = self.churns or self.writers_die
        self.world.slowness = 0.7 if is_slow else dice.choice((0.0, 0.0, 0.5))
        if self.maps:
            self.world.shares = True
        self.step = 0
        self.history: list[Request] = []
        self._fresh = 0
        self.options = self._drawn_options()
        self.processes: dict[str, Process] = {}
        self.deployments = self._drawn_deployments()
        self.transfers, self.tiers, self.remotes = Transfers(self), Stores(self), Remotes(self)
        dice = Random(-3 - seed)
        self.has_remote = self.shares and dice.random() < 0.4
        """Nodes keep rows on a store on the network."""
        if self.roughness and dice.random() < 0.7:
            self.remotes.store.trouble = 0.2 * dice.random()
        try:
            for process in self.processes.values():
                self.start(process)
        except AssertionError as error:
            self.world.close()
            raise self._named(error) from error
        self._acts = self._weighted_acts()
        self._limits = list(accumulate(weight for weight, _ in self._acts))

    # ── what is drawn ─────────────────────────────────────────────────────────────

    def _drawn_faults(self) -> Faults:
        def some(share: float, rate: float) -> float:
            dice = self.random
            return dice.random() * rate if dice.random() < share * self.roughness else 0.0

        disk = NO_DISK_FAULTS
        if self.stores and self.random.random() < 0.7:
            disk = DiskFaults(
                fails=some(0.8, 0.3),
                breaks=some(0.6, 0.2),
                syncs=some(0.9, 1.4),
                lies=some(0.35, 0.9),
                dies=some(0.6, 0.1),
            )
        return Faults(
            drop=some(0.4, 0.1),
            reorder=some(0.5, 0.5),
            stop=some(0.5, 0.04),
            kill=some(0.4, 0.02),
            cut=some(0.4, 0.03),
            deaf=some(0.5, 0.03),
            leave=self._drawn_leave(),
            copy=some(0.3, 0.05),
            late=self.random.choice((1.0, 0.3, 0.05)),
            flip=some(0.15, 0.3),
            full=some(0.15, 0.2),
            power=some(1.0, 0.12) if self.stores else 0.0,
            disk=disk,
        )

    def _drawn_leave(self) -> float:
        """How often lines are left, which is drawn apart: seeds without it stay as they are."""
        dice = Random(-1 - self.report.seed)
        return 0.15 * dice.random() if self.roughness and dice.random() < 0.35 else 0.0

    def _drawn_options(self) -> Options:
        dice = self.random
        is_left = self.faults.leave > 0  # orders to write come late, under leases that still run
        is_writing = self.writers_die or is_left
        slot_bytes = dice.choice((None, None, 32, 48, 300))
        ways = CHURNING_WAYS if self.churns else SLOT_WAYS if slot_bytes else WAYS
        digests = ("off",) if self.churns else DIGESTS
        return Options(
            lease_seconds=2.0 if is_left else 0.1 if self.churns else dice.choice((0.3, 1.0, 2.0)),
            transfer_seconds=dice.choice((1.0, 3.0)),
            contact_seconds=0.8,
            heartbeat_seconds=3.0 if self.churns else dice.choice((0.1, 0.2, 3.0)),
            drain_seconds=dice.choice((0.1, 0.3)),
            quarantine_seconds=0.5,
            direction=None if self.maps else "write" if is_writing else dice.choice(ways),
            mapped=self.maps,
            digest="always" if self.faults.flip else dice.choice(digests),
            slot_bytes=slot_bytes,
        )

    def _drawn_deployments(self) -> list[tuple[str, ...]]:
        """Which nodes there are; those of one deployment are ranks of it."""
        dice = self.random
        drawn = dice.random()
        if drawn < 0.15:
            shapes, found = [*RANKS, Shape()], [("a0", "a1"), ("b",)]
        else:
            kind = ALIKE if drawn < 0.5 else MIXED if drawn < 0.7 else HYBRID
            if self.stores and dice.random() < 0.3:
                kind = HYBRID
            elif kind is HYBRID and not self.stores and dice.random() < 0.5:
                kind = RECURRENT
            count = dice.choice((2, 3) if kind is MIXED else (2, 2, 2, 3))
            if kind in (HYBRID, RECURRENT):  # what windows leave behind must not be found
                self.shares, self.lengths = True, LONG
            shapes = [dice.choice(kind)] * count if kind is ALIKE else dice.choices(kind, k=count)
            found = [(name,) for name in "abc"[:count]]
        for name, shape in zip([n for names in found for n in names], shapes, strict=True):
            model = "beta" if dice.random() < 0.02 else "alpha"
            ids = not shape.is_hybrid and dice.random() < 0.25
            self.processes[name] = Process(name, model, shape, self.options, ids)
        return found

    def _weighted_acts(self) -> list[tuple[float, Callable[[], None]]]:
        faults, churns, transfers, tiers = self.faults, self.churns, self.transfers, self.tiers
        kept, less = (5.0, 0.5) if self.stores else (0.0, 1.0)
        acts = [
            (14 * less, self._turn_somebody),
            (less * (5 if churns else 9), self._carry_a_packet),
            (2.5 * less, self._let_time_pass),
            (1.5 * less, transfers.offer),
            (4.0 if churns else 2.5 * less, transfers.pull),
            (2.0 if churns or self.stores else 0.5, self._compute),
            (3.0 if churns else 1.2, self._let_go),
            (1.2 if self.shares else 0.5, self._fork),
            (0.3 * self.roughness, transfers.withdraw),
            (0.3 * self.roughness, transfers.abort),
            (0.6 * self.roughness, transfers.take_back),
            (0.0 if self.stores else 0.4 * self.roughness, transfers.offer_too_soon),
            (8.0 if churns else 0.0, transfers.outlive_a_lease),
            (20 * faults.deaf, self._go_deaf_or_listen),
            (20 * faults.leave, self._leave_a_line_or_hear_it),
            (20 * faults.stop, self._stop_or_go_on),
            (20 * faults.kill, self._kill),
            (1.0 if self.writers_die else 0.0, self._kill_a_writer),
            (20 * faults.cut, self._cut_or_heal),
            (20 * faults.power, self._cut_the_power),
            (kept, tiers.save),
            (kept, tiers.load),
            (0.1 * kept, tiers.evict),
            (3 * kept, tiers.turn_somebody),
            (5.0 * self.has_remote, self.remotes.save),
            (5.0 * self.has_remote, self.remotes.load),
            (5.0 * self.has_remote, self.remotes.turn),
        ]
        return [(weight, act) for weight, act in acts if weight]

    def _apply(self, faults: Faults) -> None:
        world = self.world
        self.faults = faults
        world.copy_faults, world.late_share, world.flips = faults.copy, faults.late, faults.flip
        world.full, world.machine.faults = faults.full, faults.disk

    # ── running ───────────────────────────────────────────────────────────────────

    def run(self) -> Report:
        """Run to the end; Broken if something was not true."""
        try:
            if self.churns or self.random.random() < 0.5:
                self._meet()
            for _ in range(STORE_STEPS if self.stores else STEPS):
                self.step += 1
                self._act()
            self._come_to_rest()
            self._check_nothing_is_left()
        except AssertionError as error:
            raise self._named(error) from error
        finally:
            self.report.injected.update(self.world.injected)
            self.world.close()
        return self.report

    def _named(self, error: AssertionError) -> Broken:
        return Broken(f"seed {self.report.seed}, step {self.step}: {error}")

    def _meet(self) -> None:
        """All nodes greet each other before anything goes wrong."""
        for node in self.world.nodes.values():
            others = {n.channel.address for n in self.world.nodes.values()}
            for address in sorted(others - {node.channel.address}):
                node.agent.peers.at(address, "").greet()
        for _ in range(3):
            self._round(LEAST_TICK)

    def _act(self) -> None:
        (act,) = self.random.choices(self._acts, cum_weights=self._limits)
        self.note(act[1].__qualname__)
        act[1]()

    def note(self, what: str) -> None:
        """A line of the trace: equal in every run of the seed."""
        self.report.trace.append(f"{self.step} {self.world.clock.now:.4f} {what}")

    def broken(self, what: str) -> None:
        """Something that must always be true is not."""
        raise Broken(what)

    def count(self, outcome: str) -> None:
        self.report.outcomes[outcome] += 1

    def any_node(self) -> Node | None:
        """One of the nodes that run."""
        nodes = [node for node in self.world.nodes.values() if not node.stopped]
        return self.random.choice(nodes) if nodes else None

    def start(self, process: Process) -> Node:
        """A process comes up, with its tiers."""
        node = self.world.started(
            process.name,
            process.model,
            process.shape,
            process.options,
            engine_ids=process.engine_ids,
        )
        if self.stores:
            self.tiers.open(node)
        return node

    # ── turns ─────────────────────────────────────────────────────────────────────

    def _turn_somebody(self) -> None:
        now = self.world.clock.now
        nodes = [n for n in self.world.nodes.values() if not n.stopped and n.has_work(now)]
        if nodes:
            self.turn(self.random.choice(nodes))
        elif self.world.network.packets:
            self._carry_a_packet()
        else:
            self._let_time_pass()

    def turn(self, node: Node) -> None:
        """One turn of a node's agent, and a look at all memory."""
        if self.random.random() < 0.7:
            node.worker.turn()
        node.agent.loop.step(0)
        node.agent.settle()
        if self.world.broken:
            raise Broken(self.world.broken)
        self.transfers.judge(node)
        for each in self.world.nodes.values():
            self.check_memory(each)

    def check_memory(self, node: Node) -> None:
        """Bytes that nobody may write to are what they were."""
        changed = node.changed()
        if len(changed):
            held = [
                (held.request, ids.tolist())
                for held in node.held
                for g, ids in ((g, b.ids) for g, b in held.claim.blocks.items())
                if np.isin(node.places.rows[g][ids], changed).any()
            ]
            raise Broken(
                f"{node.name}: bytes {changed[:8].tolist()} have changed, and nobody may write to "
                f"them; held there: {held}"
            )

    # ── messages and time ─────────────────────────────────────────────────────────

    def _carry_a_packet(self) -> None:
        packets, faults, dice = self.world.network.packets, self.faults, self.random
        if not packets:
            return
        at = dice.randrange(len(packets)) if dice.random() < faults.reorder else 0
        while at < len(packets) and self.world.network.is_deaf(packets[at]):
            at += 1
        if at == len(packets):
            return
        at = self.world.network.first_of_line(packets[at])
        packet = packets.pop(at)
        if dice.random() < faults.drop:
            self.world.count("dropped")
            return
        if at:
            self.world.count("reordered")
        self.world.network.deliver(packet)

    def _let_time_pass(self) -> None:
        likely = (8, 8, 4, 3, 0) if self.churns else (8, 8, 4, 2, self.roughness)
        (seconds,) = self.random.choices((0.0005, 0.002, 0.01, 0.05, 0.3), likely)
        self.world.clock.now += seconds

    # ── what owners do ────────────────────────────────────────────────────────────

    def new_request(self, model: str) -> Request:
        """Tokens that nobody has computed, or that begin like some that somebody has."""
        dice = self.random
        alike = [r for r in self.history[-8:] if r.model == model]
        length = dice.choice(self.lengths)
        start: tuple[int, ...] = ()
        adapter = "tuned" if self.stores and dice.random() < 0.2 else ""
        if self.shares and alike and dice.random() < 0.5:
            base = dice.choice(alike)
            start = base.tokens[: dice.randrange(len(base.tokens) + 1)]
            adapter = adapter if dice.random() < 0.3 else base.adapter
        fresh = tuple(range(self._fresh, self._fresh + max(1, length - len(start))))
        self._fresh += len(fresh)
        request = Request(model, (start + fresh)[:12], adapter)
        self.history.append(request)
        return request

    def longer(self, request: Request) -> Request:
        """The same request with one more token."""
        self._fresh += 1
        tokens = (*request.tokens, self._fresh - 1)
        return Request(request.model, tokens, request.adapter)

    def fill(self, node: Node, request: Request) -> Held | None:
        """Compute a request into rows of its own; what was cached of it must be true."""
        node.agent.settle()
        claim = self._claimed(node, request)
        if claim is None:
            self.world.count("out of rows")
            return None
        for g, new in claim.new.items():
            node.write(g, new.ids, new.index, request, 0, len(request.tokens))
        if self.random.random() < 0.5:  # the next token is on its way: windows move on
            node.rows.computed(claim)
        first = {g: int(b.index[0]) * node.shape.block_tokens for g, b in claim.blocks.items()}
        held = Held(claim, request, first)
        node.held.append(held)
        return held

    def _claimed(self, node: Node, request: Request) -> Claim | None:
        """Rows for a request; where there are recurrent states, it may stop on its way, so that a
        checkpoint is made there."""
        step, rows = node.shape.block_tokens, node.rows
        claim: Claim | None = None
        try:
            if node.shape.second != "state" or not isinstance(rows, LedgerRows):
                claim = rows.claim(request)
                self.check_claim(node, claim)
                return claim
            part = self.random.randrange(step, len(request.tokens) + 1, step)
            claim = rows.claim(request, part)
            self.check_claim(node, claim)
            if part > claim.hit_tokens:
                for g, new in claim.new.items():
                    node.write(g, new.ids, new.index, request, 0, part)
            claim = rows.finish(claim)
            self.check_given(node, claim)
        except OutOfBlocks:
            if claim is not None:
                rows.drop(claim)
            return None
        return claim

    def _fork(self) -> None:
        """A request goes on twice. What both have in a block is copied before one writes to it;
        where a pull was filling it, nobody knows what the copy is."""
        node, dice = self.any_node(), self.random
        if node is None or not isinstance(node.rows, LedgerRows):
            return
        node.agent.settle()
        pulls = [pull for pull in node.pulls if not pull.is_judged and not pull.must_fail]
        if pulls and dice.random() < 0.7:
            pull = dice.choice(pulls)
            twin = self._forked(node, pull.claim)
            if twin is not None:
                pull.twins.append(twin)
                self.world.count("forks of pulls")
        elif node.held:
            held = dice.choice(node.held)
            twin = self._forked(node, held.claim)
            if twin is not None:
                first = {
                    g: max(held.first[g], int(b.index[0]) * node.shape.block_tokens)
                    for g, b in twin.blocks.items()
                }
                node.held.append(Held(twin, twin.request, first))
                self.world.count("forks")

    def _forked(self, node: Node, claim: Claim) -> Claim | None:
        """A request that goes on from another one's rows with one token, which is computed."""
        assert isinstance(node.rows, LedgerRows)
        length, longer = len(claim.request.tokens), self.longer(claim.request)
        try:
            twin = node.rows.fork(claim, longer)
        except OutOfBlocks:
            self.world.count("out of rows")
            return None
        self.history.append(longer)
        for g, new in twin.new.items():
            node.write(g, new.ids, new.index, longer, length, length + 1)
        return twin

    def check_given(self, node: Node, claim: Claim) -> None:
        """Rows that are given out are nobody's."""
        open_rows = node.open_rows()
        if open_rows:
            is_open = np.zeros(len(node.memory), bool)
            for g, ids in open_rows:
                is_open[node.places.rows[g][ids]] = True
            for g, new in claim.new.items():
                if is_open[node.places.rows[g][new.ids]].any():
                    raise Broken(
                        f"{node.name}: rows {new.ids.tolist()} of group {g} are given out while "
                        f"somebody may write to them"
                    )

    def check_claim(self, node: Node, claim: Claim) -> None:
        """Rows that are given out are nobody's, and what was found in them is true."""
        self.check_given(node, claim)
        hit = claim.hit_tokens
        if hit:
            self.count("prefix hits")
            for g, blocks in claim.blocks.items():
                is_copy = node.shape.is_state(g)
                shared = len(blocks) - (0 if is_copy else len(claim.new[g]))
                ids, index = blocks.ids[:shared], blocks.index[:shared]
                first = self.first_seen(node, g, hit)
                self.check_rows(node, g, ids, index, claim.request, first, hit, "a prefix hit")

    def first_seen(self, node: Node, group: int, num_tokens: int) -> int:
        """The first token that the token behind so many certainly sees."""
        is_window = node.shape.second == "window" and group
        return max(0, num_tokens - WINDOW + 1) if is_window else 0

    def check_rows(
        self,
        node: Node,
        group: int,
        ids: Ints,
        index: Ints,
        request: Request,
        first: int,
        end: int,
        what: str,
    ) -> None:
        """Tokens `[first, end)` of a request are in these rows."""
        wrong = node.differs(group, ids, index, request, first, end)
        if wrong:
            raise Broken(
                f"{node.name}: group {group}, rows {ids.tolist()}, {what}: tokens {wrong} of "
                f"[{first}, {end}) are not those of {request}"
            )

    def check_held(self, node: Node, held: Held, what: str) -> None:
        for g, blocks in held.claim.blocks.items():
            first, end = held.first[g], len(held.request.tokens)
            self.check_rows(node, g, blocks.ids, blocks.index, held.request, first, end, what)

    def release(self, node: Node, held: Held) -> None:
        """The request ends; what is known of it may be found again."""
        node.held.remove(held)
        node.rows.release(held.claim)

    def _compute(self) -> None:
        node = self.any_node()
        if node is not None:
            self.fill(node, self.new_request(node.model))

    def _let_go(self) -> None:
        node = self.any_node()
        if node is not None and node.held:
            node.agent.settle()
            self.release(node, self.random.choice(node.held))

    # ── what happens to processes ─────────────────────────────────────────────────

    def _stop_or_go_on(self) -> None:
        node = self.random.choice(list(self.world.nodes.values()))
        node.stopped = not node.stopped
        self.world.count("stopped")

    def _go_deaf_or_listen(self) -> None:
        """What is said to a process is late, while its engine works as ever."""
        node = self.random.choice(list(self.world.nodes.values()))
        self.world.network.deaf ^= {node.channel.address}
        self.world.count("deaf")

    def _leave_a_line_or_hear_it(self) -> None:
        """A consumer gives a producer up and dials it again; what it said before comes late."""
        network, dice = self.world.network, self.random
        if network.left and dice.random() < 0.5:
            network.left.clear()
            return
        lines = [
            (node, peer)
            for node in self.world.nodes.values()
            for peer in node.agent.peers.all.values()
            if peer.state == "ready" and any(_is_ordered(each) for each in peer.readers.values())
        ]
        if lines:
            node, peer = dice.choice(lines)
            node.channel.leave(peer.line)
            peer.lose(lost(peer.name, "another post has failed"))
            self.world.count("lines left")

    def _kill(self) -> None:
        self.kill(self.random.choice(list(self.world.nodes.values())))
        self.world.count("killed")

    def _kill_a_writer(self) -> None:
        """A producer ends while it writes, and what it has sent comes later."""
        nodes = self.world.nodes.values()
        writers = [node for node in nodes if node.agent.endpoint.transport.writes]
        if writers:
            self.kill(self.random.choice(writers))
            self.world.count("killed")

    def kill(self, node: Node) -> None:
        """A process ends in the middle of everything, and is started again."""
        self.world.kill(node.name)
        self.start(self.processes[node.name])

    def _cut_or_heal(self) -> None:
        names = self.random.sample(sorted(self.world.nodes), 2)
        self.world.cut ^= {frozenset(names)}
        self.world.count("cut")

    def _cut_the_power(self) -> None:
        """All processes end at once, and their disk has what was synced."""
        names = list(self.world.nodes)
        for name in names:
            self.world.kill(name)
        self.world.machine.cut()
        for name in names:
            self.start(self.processes[name])
        self.tiers.check_disks()

    # ── the end ───────────────────────────────────────────────────────────────────

    def _come_to_rest(self) -> None:
        """No more faults, everybody gets turns, until nothing is under way."""
        world = self.world
        self._apply(CALM)
        world.slowness = 0.0
        world.cut.clear()
        world.network.deaf.clear()
        for node in world.nodes.values():
            node.stopped = False
        seconds = DRAIN_SECONDS + SILENT_BEATS * self.options.heartbeat_seconds
        until = world.clock.now + seconds
        late = self.random.choice((0.0, 0.3, 0.6, 1.0)) if world.network.left else 0.0
        late_until = world.clock.now + late
        tick = LEAST_TICK
        while world.clock.now < until:
            self.step += 1
            if world.clock.now > late_until:
                world.network.left.clear()
            self._round(tick)
            tick = min(1.5 * tick, MOST_TICK)
            if self.transfers.are_at_rest() and self.tiers.are_at_rest():
                return
        raise Broken(f"not at rest {seconds:.0f} s later: {self.transfers.unfinished()}")

    def _round(self, tick: float) -> None:
        world = self.world
        for _ in range(2):
            packets, world.network.packets = world.network.packets, []
            for packet in packets:
                if world.network.is_deaf(packet):
                    world.network.packets.append(packet)
                else:
                    world.network.deliver(packet)
            for node in tuple(world.nodes.values()):
                if node.has_work(world.clock.now):
                    self.turn(node)
                self.tiers.turn(node)
            world.clock.now += 0.002
        world.clock.now += tick
        self.transfers.check_deadlines(slack=2 * MOST_TICK)

    def _check_nothing_is_left(self) -> None:
        for node in self.world.nodes.values():
            node.agent.settle()
            for held in tuple(node.held):
                self.check_held(node, held, "held")
                self.release(node, held)
            left = {**node.rows.left(), **self.transfers.left(node), **self.tiers.left(node)}
            if any(left.values()):
                raise Broken(f"{node.name}: left over: { {k: v for k, v in left.items() if v} }")
            node.rows.check()


def _is_ordered(reader: Any) -> bool:
    """Whether a producer shall write, and has not said that it has heard of it."""
    return reader.direction == "write" and not reader.mailbox.has(Begun)


def run(seed: int, folder: str = "") -> Report:
    """Run one schedule; the library must be `prepared`."""
    return Schedule(seed, folder).run()
