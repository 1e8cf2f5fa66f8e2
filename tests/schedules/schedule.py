"""One schedule: a seed decides who does what next, and everything that goes wrong.

While it runs, and when it has come to rest, it looks at what must always be true:

    accepted rows hold what was computed, then and as long as somebody holds them
    no row changes that is not the destination of a transfer that may still write
    every transfer ends in its time, and its rows come to rest
    no row, lease, counter, post or serving is left over

`Broken` says what was not, at which step of which seed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.messages import Begun
from kvstow.transfer.options import DigestPolicy, Options
from kvstow.transfer.ticket import Ticket
from schedules.world import BLOCK_TOKENS, Held, Node, Packet, Pull, World, truth

DRAIN_SECONDS = 20.0
SILENT_BEATS = 32
"""A consumer that is gone is forgotten after a little less, and what was written for it with it."""

DIGESTS: tuple[DigestPolicy, ...] = ("off", "off", "off", "sample", "always")
TICK = 0.1


class Broken(AssertionError):
    """Something that must always be true is not."""


@dataclass(eq=False)
class Offer:
    """A ticket that somebody has given out."""

    ticket: Ticket
    node: Node
    model: str
    request: int
    num_blocks: int


@dataclass(eq=False)
class Report:
    """What a schedule did."""

    seed: int
    outcomes: Counter[str] = field(default_factory=Counter[str])
    injected: Counter[str] = field(default_factory=Counter[str])
    trace: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Faults:
    """How often something goes wrong in a schedule."""

    drop: float
    double: float
    spoil: float
    reorder: float
    stop: float
    kill: float
    cut: float
    copy: float
    late: float
    flip: float


class Schedule:
    """A world, and the hand that moves it."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.random = self.world.random
        self.report = Report(seed)
        self.churns = self.random.random() < 0.3
        """Leases are short, nobody renews them, and rows are soon somebody else's."""
        self.faults = self._drawn_faults()
        self.world.copy_faults, self.world.late_share = self.faults.copy, self.faults.late
        self.world.flips = self.faults.flip
        self.world.slowness = 0.8 if self.churns else self.random.choice((0.0, 0.0, 0.5))
        self.offers: list[Offer] = []
        self.step = 0
        self._requests = 0
        self._options = self._drawn_options()
        names = ["a", "b", "c"][: self.random.choice((2, 2, 3))]
        for name in names:
            model = "beta" if self.random.random() < 0.04 else "alpha"
            self.world.started(name, model, self._options)

    def _drawn_faults(self) -> Faults:
        def some(share: float, rate: float) -> float:
            return self.random.random() * rate if self.random.random() < share else 0.0

        return Faults(
            drop=some(0.3, 0.1),
            double=some(0.3, 0.1),
            spoil=some(0.2, 0.05),
            reorder=some(0.4, 0.5),
            stop=some(0.4, 0.04),
            kill=some(0.3, 0.02),
            cut=some(0.3, 0.03),
            copy=some(0.3, 0.05),
            late=self.random.choice((1.0, 0.3, 0.05)),
            flip=some(0.15, 0.3),
        )

    def _drawn_options(self) -> Options:
        return Options(
            lease_seconds=0.1 if self.churns else self.random.choice((0.15, 0.5, 2.0)),
            transfer_seconds=self.random.choice((1.0, 3.0)),
            contact_seconds=0.8,
            heartbeat_seconds=3.0 if self.churns else self.random.choice((0.2, 0.2, 3.0)),
            drain_seconds=self.random.choice((0.1, 0.3)),
            quarantine_seconds=0.5,
            direction=self.random.choice(("read", "read", "write", "write", None)),
            digest="always" if self.faults.flip else self.random.choice(DIGESTS),
            engines=1,
        )

    # ── running ───────────────────────────────────────────────────────────────────

    def run(self, steps: int = 250) -> Report:
        """Run to the end; Broken if something was not true."""
        try:
            for _ in range(steps):
                self.step += 1
                self._act()
            self._come_to_rest()
            self._check_nothing_is_left()
        except Broken as error:
            raise Broken(f"seed {self.report.seed}, step {self.step}: {error}") from None
        self.report.injected.update(self.world.injected)
        return self.report

    def _act(self) -> None:
        acts: list[tuple[float, Callable[[], None]]] = [
            (10, self._turn_somebody),
            (4 if self.churns else 8, self._carry_a_packet),
            (2.5, self._let_time_pass),
            (1.2, self._offer),
            (1.8, self._pull),
            (3.0 if self.churns else 1.0, self._compute),
            (4.0 if self.churns else 1.5, self._let_go),
            (0.15, self._withdraw),
            (0.15, self._abort),
            (0.3, self._go_deaf_or_listen),
            (5.0 if self.churns else 0.3, self._outlive_a_lease),
            (20 * self.faults.stop, self._stop_or_go_on),
            (20 * self.faults.kill, self._kill),
            (20 * self.faults.cut, self._cut_or_heal),
        ]
        weights = [weight for weight, _ in acts]
        ((_, act),) = self.random.choices(acts, weights)
        self.report.trace.append(f"{self.step} {act.__name__}")
        act()

    def _any(self) -> Node:
        return self.random.choice(list(self.world.nodes.values()))

    def _turn_somebody(self) -> None:
        node = self._any()
        if not node.stopped:
            self._turn(node)

    def _turn(self, node: Node) -> None:
        if self.random.random() < 0.7:
            node.worker.turn()
        node.agent.loop.step(0)
        node.agent.settle()
        self._judge(node)
        for each in self.world.nodes.values():
            self._check_memory(each)

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
        packet = packets[at]
        if dice.random() >= faults.double:
            del packets[at]
        else:
            self.world.count("doubled")
        if dice.random() < faults.drop:
            self.world.count("dropped")
            return
        if dice.random() < faults.spoil:
            packet = self._spoilt(packet)
        if at:
            self.world.count("reordered")
        self.world.network.deliver(packet)

    def _spoilt(self, packet: Packet) -> Packet:
        self.world.count("spoilt")
        data = bytearray(packet.data)
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return packet._replace(data=bytes(data[: self.random.choice((len(data), -1))]))

    def _let_time_pass(self) -> None:
        likely = (8, 8, 4, 3, 0) if self.churns else (8, 8, 4, 2, 1)
        (step,) = self.random.choices((0.0005, 0.002, 0.01, 0.05, 0.3), likely)
        self.world.clock.now += step

    # ── what owners do ────────────────────────────────────────────────────────────

    def _fill(self, node: Node, num_blocks: int) -> Held | None:
        """Compute a request into rows of its own."""
        if node.pool.num_free(0) < num_blocks:
            return None
        ids = node.pool.hold(0, num_blocks)
        self._requests += 1
        for block, row in enumerate(ids.tolist()):
            data = truth(node.model, self._requests, block, node.memory.shape[1])
            node.memory[row] = node.shadow[row] = np.frombuffer(data, np.uint8)
        held = Held(ids, node.model, self._requests)
        node.held.append(held)
        return held

    def _compute(self) -> None:
        node = self._any()
        if not node.stopped:
            self._fill(node, self.random.choice((1, 2, 4)))

    def _offer(self) -> None:
        node = self._any()
        if node.stopped:
            return
        node.agent.settle()
        held = self._fill(node, self.random.choice((1, 2, 3, 5)))
        if held is None:
            return
        ticket = node.agent.offer_blocks(
            {0: Blocks.first(held.ids)},
            BLOCK_TOKENS * len(held.ids),
            readers=self.random.choice((1, 1, 2)),
        )
        ticket = Ticket.parse(str(ticket))
        self.offers.append(Offer(ticket, node, node.model, held.request, len(held.ids)))
        if self.random.random() < (
            0.95 if self.churns else 0.6
        ):  # the request ends here; the lease keeps its rows
            self._release(node, held)

    def _release(self, node: Node, held: Held) -> None:
        node.held.remove(held)
        node.pool.release(0, held.ids)

    def _let_go(self) -> None:
        node = self._any()
        if node.held and not node.stopped:
            node.agent.settle()
            self._release(node, self.random.choice(node.held))

    def _pull(self) -> None:
        node = self._any()
        if not self.offers or node.stopped:
            return
        offer = self.random.choice(self.offers[-4:])
        if offer.node.name == node.name or node.pool.num_free(0) < offer.num_blocks:
            return
        node.agent.settle()
        ids = node.pool.hold(0, offer.num_blocks)
        until = self.world.clock.now + self._options.transfer_seconds
        pull = Pull(None, ids, offer.request, offer.model, until)
        transfer = node.agent.pull(offer.ticket, into={0: Blocks.first(ids)})
        pull.transfer = transfer
        node.pulls.append(pull)

    def _withdraw(self) -> None:
        offers = [o for o in self.offers if self.world.nodes.get(o.node.name) is o.node]
        if offers:
            offer = self.random.choice(offers)
            offer.node.agent.withdraw(offer.ticket)

    def _abort(self) -> None:
        node = self._any()
        if node.pulls:
            self.random.choice(node.pulls).transfer.abort()

    # ── what happens to processes ─────────────────────────────────────────────────

    def _stop_or_go_on(self) -> None:
        node = self._any()
        node.stopped = not node.stopped
        self.world.count("stopped")

    def _go_deaf_or_listen(self) -> None:
        """What is said to a process is late, while its engine works as ever."""
        node = self._any()
        self.world.network.deaf ^= {node.channel.address}
        self.world.count("deaf")

    def _outlive_a_lease(self) -> None:
        """A lease runs out while somebody reads under it who does not hear of that, and its
        rows are soon others'."""
        node = self._any()
        readers = [each for each in self.world.nodes.values() if self._reads(each)]
        if node.stopped or not readers:
            return
        self.world.network.deaf |= {reader.channel.address for reader in readers}
        self.world.network.deaf.discard(node.channel.address)
        self.world.clock.now += self._options.lease_seconds
        for _ in range(2):
            self._turn(node)
        for held in tuple(node.held):
            self._release(node, held)
        while self._fill(node, 3) is not None:
            pass
        self.world.count("outlived leases")

    def _reads(self, node: Node) -> bool:
        """Whether a producer has said that it keeps what this one is reading."""
        sources = [s for peer in node.agent.peers.all.values() for s in peer.readers.values()]
        return any(s.lease and s.mailbox.has(Begun) for s in sources)

    def _kill(self) -> None:
        node = self._any()
        self.world.kill(node.name)
        self.world.count("killed")
        self.world.started(node.name, node.model, self._options)

    def _cut_or_heal(self) -> None:
        names = self.random.sample(sorted(self.world.nodes), 2)
        self.world.cut ^= {frozenset(names)}
        self.world.count("cut")

    # ── what must be true ─────────────────────────────────────────────────────────

    def _judge(self, node: Node) -> None:
        """See which pulls have ended, and which have come to rest."""
        for pull in tuple(node.pulls):
            transfer = pull.transfer
            if transfer.done and not pull.is_judged:
                pull.is_judged = True
                if transfer.error is None:
                    self._accepted(node, pull)
                    continue
                self.report.outcomes[transfer.error.kind] += 1
                node.agent.settle()
                node.pool.release(0, pull.ids)
            if pull.is_judged and transfer.quiet:
                pull.is_quiet = True
                node.shadow[pull.ids] = node.memory[pull.ids]
                node.pulls.remove(pull)

    def _accepted(self, node: Node, pull: Pull) -> None:
        self.report.outcomes["accepted"] += 1
        pull.is_quiet = True
        node.pulls.remove(pull)
        if pull.model != node.model:
            raise Broken(f"{node.name} of {node.model} has accepted rows of {pull.model}")
        held = Held(pull.ids, pull.model, pull.request)
        self._check_held(node, held, "accepted")
        node.shadow[pull.ids] = node.memory[pull.ids]
        node.held.append(held)

    def _check_held(self, node: Node, held: Held, what: str) -> None:
        nbytes = node.memory.shape[1]
        for block, row in enumerate(held.ids.tolist()):
            if node.memory[row].tobytes() != truth(held.model, held.request, block, nbytes):
                raise Broken(f"{node.name}: row {row}, {what}, is not block {block} of request "
                             f"{held.request}")  # fmt: skip

    def _check_memory(self, node: Node) -> None:
        """Rows that nobody may write to are what they were."""
        if np.array_equal(node.memory, node.shadow):
            return
        changed = set(np.flatnonzero((node.memory != node.shadow).any(axis=1)).tolist())
        for held in node.held:
            if changed & {int(i) for i in held.ids}:
                self._check_held(node, held, "held")
        strange = changed - node.open_rows
        if strange:
            raise Broken(f"{node.name}: rows {sorted(strange)} have changed, and nobody may "
                         f"write to them")  # fmt: skip

    # ── the end ───────────────────────────────────────────────────────────────────

    def _come_to_rest(self) -> None:
        """No more faults, everybody gets turns, until nothing is under way."""
        world = self.world
        self.faults = Faults(0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0)
        world.flips = 0.0
        world.copy_faults, world.late_share, world.slowness = 0.0, 1.0, 0.0
        world.cut.clear()
        world.network.deaf.clear()
        for node in world.nodes.values():
            node.stopped = False
        seconds = DRAIN_SECONDS + SILENT_BEATS * self._options.heartbeat_seconds
        for _ in range(int(seconds / TICK)):
            self.step += 1
            self._round()
            if self._is_at_rest():
                return
        late = [(n.name, p.request, p.transfer.done) for n in world.nodes.values() for p in n.pulls]
        raise Broken(f"not at rest {seconds:.0f} s later: pulls {late}, leases "
                     f"{[len(n.agent.server.leases) for n in world.nodes.values()]}")  # fmt: skip

    def _round(self) -> None:
        world = self.world
        for _ in range(3):
            packets, world.network.packets = world.network.packets, []
            for packet in packets:
                world.network.deliver(packet)
            for node in world.nodes.values():
                self._turn(node)
            world.clock.now += 0.002
        world.clock.now += TICK
        slack = 4 * TICK
        for node in world.nodes.values():
            for pull in node.pulls:
                if not pull.transfer.done and world.clock.now > pull.until + slack:
                    self._note_late(node, pull)

    def _note_late(self, node: Node, pull: Pull) -> None:
        raise Broken(f"{node.name}: the pull of request {pull.request} has not ended "
                     f"{self.world.clock.now - pull.until:.2f} s after its deadline")  # fmt: skip

    def _is_at_rest(self) -> bool:
        return all(
            not node.pulls and not len(node.agent.server.leases) and not node.agent.server.servings
            and not self._posts_under_way(node)
            for node in self.world.nodes.values()
        )  # fmt: skip

    def _posts_under_way(self, node: Node) -> int:
        """Posts that may still end. One that has failed never says so; a few of them may wait
        for the next engine, if no row does."""
        return sum(flight._error is None for flight in node.agent.endpoint.flights)

    def _check_nothing_is_left(self) -> None:
        for node in self.world.nodes.values():
            node.agent.settle()
            for held in tuple(node.held):
                self._check_held(node, held, "held")
                self._release(node, held)
            endpoint = node.agent.endpoint
            left = {
                "rows held": node.pool.num_held(0),
                "rows in quarantine": node.pool.num_quarantined(0),
                "leases": len(node.agent.server.leases),
                "posts": self._posts_under_way(node),
                "counters": max(0, endpoint.num_counters_in_use - len(endpoint.flights)),
                "pulls": len(node.agent.pulls),
                "quarantine": node.agent.quarantine.rows,
            }
            if any(left.values()):
                raise Broken(f"{node.name}: left over: { {k: v for k, v in left.items() if v} }")
            node.agent.loop.close()


def run(seed: int, steps: int = 250) -> Report:
    """Run one schedule."""
    return Schedule(seed).run(steps)
