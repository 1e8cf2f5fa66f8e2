"""Offers and pulls of a schedule, and what must be true of them."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstow.errors import OutOfBlocks, TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.messages import Begun
from kvstow.transfer.slots import SLOTS
from kvstow.transfer.tickets.ticket import Ticket
from schedules.rows import Claim, EngineRows, LedgerRows
from schedules.truth import Request
from schedules.world import Held, Node, Pull

if TYPE_CHECKING:
    from schedules.schedule import Schedule


PATIENCE = 50
"""Turns that a reader gets whose lease has run out, so that some of them get to the end."""


@dataclass(eq=False)
class Offer:
    """Tickets of all ranks of a deployment for one request."""

    tickets: tuple[Ticket, ...]
    nodes: tuple[Node, ...]
    request: Request
    readers: int


class Transfers:
    """What nodes give to each other."""

    def __init__(self, schedule: "Schedule") -> None:
        self.schedule = schedule
        self.offers: list[Offer] = []

    @property
    def world(self) -> Any:
        return self.schedule.world

    # ── acts ──────────────────────────────────────────────────────────────────────

    def offer(self) -> None:
        """A request is computed on all ranks of a deployment, and offered."""
        schedule, dice = self.schedule, self.schedule.random
        nodes = [self.world.nodes[name] for name in dice.choice(schedule.deployments)]
        if any(node.stopped or node.model != nodes[0].model for node in nodes):
            return
        if len(nodes) == 1 and nodes[0].held and dice.random() < 0.25:
            self._offer_again(nodes[0])
            return
        request = schedule.new_request(nodes[0].model)
        held = [schedule.fill(node, request) for node in nodes]
        readers = dice.choice((1, 1, 2)) * (2 if len(nodes) == 1 and self._has_ranks() else 1)
        if all(held):
            pairs = [(n, h) for n, h in zip(nodes, held, strict=True) if h is not None]
            tickets = tuple(self._ticket(node, one, readers) for node, one in pairs)
            self.offers.append(Offer(tickets, tuple(nodes), request, readers))
        ends = dice.random() < (0.95 if schedule.churns else 0.6) or not all(held)
        for node, one in zip(nodes, held, strict=True):
            if ends and one is not None:  # the request ends here; the lease keeps its rows
                schedule.release(node, one)

    def _offer_again(self, node: Node) -> None:
        """A node offers what it has computed, or has from others."""
        held = self.schedule.random.choice(node.held)
        tickets = (self._ticket(node, held, 1),)
        self.offers.append(Offer(tickets, (node,), held.request, 1))

    def offer_too_soon(self) -> None:
        """A node offers rows that a pull is writing to, or has failed to fill. That is refused; if
        it were not, somebody would accept what lies there."""
        nodes = [n for n in self.world.nodes.values() if isinstance(n.rows, LedgerRows)]
        pulls = [(n, p) for n in nodes if not n.stopped for p in n.pulls if not p.is_judged]
        if not pulls:
            return
        node, pull = self.schedule.random.choice(pulls)
        try:
            ticket = self._ticket(node, Held(pull.claim, pull.source, {}), 1)
        except TransferError:
            self.world.count("offered too soon")
        else:  # it has just been accepted
            self.offers.append(Offer((ticket,), (node,), pull.source, 1))

    def _has_ranks(self) -> bool:
        return any(len(names) > 1 for names in self.schedule.deployments)

    def _ticket(self, node: Node, held: Held, readers: int) -> Ticket:
        tokens = len(held.request.tokens)
        ticket = node.agent.offer_blocks(node.rows.blocks(held.claim), tokens, readers=readers)
        return Ticket.parse(str(ticket))

    def pull(self) -> None:
        """A node pulls what another deployment has offered, all of it or its beginning."""
        schedule, dice = self.schedule, self.schedule.random
        node = schedule.any_node()
        offers = [
            o for o in self.offers[-4:] if node and node.name not in {n.name for n in o.nodes}
        ]
        fresh = [offer for offer in offers if offer.readers > 0]
        if node is None or not offers:
            return
        offer = fresh[-1] if fresh and dice.random() < 0.93 else dice.choice(offers)
        offer.readers -= 1
        length = len(offer.request.tokens)
        tokens = length if dice.random() < 0.8 else dice.randint(1, length)
        pull = self._begun(node, offer, tokens)
        if pull is not None:
            node.pulls.append(pull)

    def _begun(self, node: Node, offer: Offer, tokens: int) -> Pull | None:
        schedule = self.schedule
        request = offer.request.cut(tokens)
        node.agent.settle()
        try:
            claim = node.rows.claim(request)
        except OutOfBlocks:
            self.world.count("out of rows")
            return None
        schedule.check_claim(node, claim)
        pull = Pull(None, claim, request, self.world.clock.now + schedule.options.transfer_seconds)
        node.pulls.append(pull)  # its rows may change from now on
        start = self._computed_here(node, claim, tokens)
        tickets = offer.tickets
        if schedule.random.random() < 0.05 * schedule.roughness:
            tickets, pull.must_fail = self._forged(tickets), "the ticket was forged"
        try:
            pull.transfer = node.agent.pull(
                tickets, into=claim.new, start_token=start, num_tokens=tokens
            )
        except TransferError as error:
            schedule.count(f"{error.kind}, at once")
            node.rows.drop(claim)
        node.pulls.remove(pull)
        return pull if pull.transfer is not None else None

    def _computed_here(self, node: Node, claim: Claim, tokens: int) -> int:
        """The first token that is pulled: those before it were found, or are computed here, so that
        a pull may begin inside a row."""
        start, dice = claim.hit_tokens, self.schedule.random
        most = min(tokens - start, node.shape.block_tokens)
        if most < 2 or dice.random() > 0.3:
            return start
        start += dice.randrange(1, most)
        for g, new in claim.new.items():
            node.write(g, new.ids, new.index, claim.request, claim.hit_tokens, start)
        self.world.count("pulls that begin inside a row")
        return start

    def _forged(self, tickets: tuple[Ticket, ...]) -> tuple[Ticket, ...]:
        """The same tickets, for another layout, of another computation or for other blocks."""
        self.world.count("forged tickets")
        first, dice = tickets[0], self.schedule.random.random()
        if dice < 0.4:
            return self._altered(first), *tickets[1:]
        if dice < 0.7:
            return replace(first, fingerprint=first.fingerprint[::-1]), *tickets[1:]
        return replace(first, identity=first.identity[::-1]), *tickets[1:]

    def _altered(self, ticket: Ticket) -> Ticket:
        """The ticket with its blocks in another order, or with others, as they are now there."""
        nodes = [n for n in self.world.nodes.values() if n.agent.endpoint.start == ticket.start]
        if not nodes:
            return replace(ticket, lease=ticket.lease ^ 1)
        blocks = {
            g: Blocks(b.ids[::-1] if len(b) > 1 else b.ids % 3 + 1, b.index, b.partial)
            for g, b in ticket.blocks.items()
        }
        generations = nodes[0].agent.endpoint.generations(blocks)
        changed = replace(ticket, blocks=blocks, generations=generations)
        same = all((blocks[g].ids == b.ids).all() for g, b in ticket.blocks.items())
        return replace(ticket, lease=ticket.lease ^ 1) if same else changed

    def take_back(self) -> None:
        """An engine takes rows back that are pulled into; it waits before it uses them again."""
        nodes = [n for n in self.world.nodes.values() if isinstance(n.rows, EngineRows)]
        pulls = [(n, p) for n in nodes if not n.stopped for p in n.pulls if not p.transfer.done]
        if pulls:
            node, pull = self.schedule.random.choice(pulls)
            for g, new in pull.claim.new.items():
                node.rows.owner.retire(g, new.ids)
            pull.must_fail = "its rows were taken back"
            self.world.count("rows taken back")

    def withdraw(self) -> None:
        offers = [o for o in self.offers if all(self._lives(node) for node in o.nodes)]
        if offers:
            offer = self.schedule.random.choice(offers)
            for node, ticket in zip(offer.nodes, offer.tickets, strict=True):
                node.agent.withdraw(ticket)

    def _lives(self, node: Node) -> bool:
        return self.world.nodes.get(node.name) is node

    def abort(self) -> None:
        node = self.schedule.any_node()
        if node is not None and node.pulls:
            self.schedule.random.choice(node.pulls).transfer.abort()

    def outlive_a_lease(self) -> None:
        """A lease runs out while somebody reads under it who does not hear of that, and its
        rows are soon others'."""
        schedule, network = self.schedule, self.world.network
        reading = [(n.channel.address, a) for n in self.world.nodes.values() for a in self._read(n)]
        if not reading:
            return
        address = schedule.random.choice(reading)[1]
        node = next(n for n in self.world.nodes.values() if n.channel.address == address)
        if node.stopped:
            return
        network.deaf |= {reader for reader, producer in reading if producer == address}
        network.deaf.discard(address)
        self.world.clock.now += schedule.options.lease_seconds
        for _ in range(2):
            schedule.turn(node)
        for held in tuple(node.held):
            schedule.release(node, held)
        while schedule.fill(node, schedule.new_request(node.model)) is not None:
            pass
        self.world.count("outlived leases")
        readers = [n for n in self.world.nodes.values() if n.channel.address in network.deaf]
        for reader in readers * PATIENCE:  # they read on
            if not reader.stopped and any(not pull.transfer.done for pull in reader.pulls):
                schedule.turn(reader)

    def _read(self, node: Node) -> set[str]:
        """Addresses of producers that have said that they keep what this node is reading."""
        return {
            peer.address
            for peer in node.agent.peers.all.values()
            if any(s.lease and s.mailbox.has(Begun) for s in peer.readers.values())
        }

    # ── what must be true ─────────────────────────────────────────────────────────

    def judge(self, node: Node) -> None:
        """See which pulls have ended, and which have come to rest."""
        accepted: list[Pull] = []
        for pull in tuple(node.pulls):
            transfer = pull.transfer
            if transfer.done and not pull.is_judged:
                pull.is_judged = True
                if transfer.error is None:
                    self._accepted(node, pull)
                    accepted.append(pull)
                    continue
                self.schedule.count(transfer.error.kind)
                self.schedule.note(f"{node.name} {transfer.error.kind}")
                node.agent.settle()
                node.rows.drop(pull.claim)
                for twin in pull.twins:
                    node.rows.drop(twin)
            if pull.is_judged and transfer.quiet:
                pull.is_quiet = True
                self._closed(node, pull)
        for pull in accepted:
            self._end_twins(node, pull)

    def _end_twins(self, node: Node, pull: Pull) -> None:
        """Requests that were forked from an accepted one end; they are offered before, if that is
        not refused, and somebody asks the same once more."""
        node.agent.settle()
        for twin in pull.twins:
            try:
                ticket = self._ticket(node, Held(twin, twin.request, {}), 1)
            except TransferError:
                self.world.count("offered too soon")
            else:
                self.offers.append(Offer((ticket,), (node,), twin.request, 1))
            node.rows.release(twin)
            self.schedule.fill(node, self.schedule.longer(twin.request))

    def _closed(self, node: Node, pull: Pull) -> None:
        """Nobody may write to its rows from now on."""
        node.pulls.remove(pull)
        for g, new in pull.claim.new.items():
            rows = node.places.rows[g][new.ids]
            node.shadow[rows] = node.memory[rows]

    def _accepted(self, node: Node, pull: Pull) -> None:
        schedule = self.schedule
        schedule.count("accepted")
        for way in pull.transfer.stats.directions:
            self.world.count(f"pulled: {way}")
        schedule.note(f"{node.name} accepted")
        pull.is_quiet = True
        self._closed(node, pull)
        if pull.must_fail:
            schedule.broken(f"{node.name} has accepted {pull.source}: {pull.must_fail}")
        if pull.source.model != node.model:
            schedule.broken(f"{node.name} of {node.model} has accepted rows of {pull.source.model}")
        end, claim = len(pull.source.tokens), pull.claim
        first: dict[int, int] = {}
        for g, new in claim.new.items():
            first[g] = schedule.first_seen(node, g, end)
            start = max(first[g], claim.hit_tokens)
            schedule.check_rows(node, g, new.ids, new.index, pull.source, start, end, "accepted")
        node.held.append(Held(claim, pull.source, first))

    def check_deadlines(self, *, slack: float) -> None:
        now = self.world.clock.now
        for node in self.world.nodes.values():
            for pull in node.pulls:
                if not pull.transfer.done and now > pull.until + slack:
                    self.schedule.broken(
                        f"{node.name}: the pull of {pull.source} has not ended "
                        f"{now - pull.until:.2f} s after its deadline"
                    )

    # ── the end ───────────────────────────────────────────────────────────────────

    def are_at_rest(self) -> bool:
        has_dead_memory = any(memory.is_gone for memory in self.world.mapped)
        return not has_dead_memory and not any(map(self._is_busy, self.world.nodes.values()))

    def _is_busy(self, node: Node) -> bool:
        server = node.agent.server
        moving = bool(node.pulls or len(server.leases) or server.servings)
        moving |= bool(node.agent.loop._commands)
        return moving or self._posts_under_way(node) > 0

    def unfinished(self) -> str:
        nodes = self.world.nodes.values()
        pulls = [(n.name, p.source, p.transfer.done) for n in nodes for p in n.pulls]
        return f"pulls {pulls}, leases {[len(n.agent.server.leases) for n in nodes]}"

    def _posts_under_way(self, node: Node) -> int:
        """Posts that may still end. One that has failed never says so; a few of them may wait
        for the next engine, if no row does."""
        return sum(flight._error is None for flight in node.agent.endpoint.flights)

    def left(self, node: Node) -> dict[str, int]:
        """What must be nothing when every transfer has ended."""
        endpoint = node.agent.endpoint
        failed = len(endpoint.flights)
        return {
            "leases": len(node.agent.server.leases),
            "posts": self._posts_under_way(node),
            "counters": max(0, len(endpoint._counters) - len(endpoint._spare_counters) - failed),
            "pulls": len(node.agent.pulls.running),
            "quarantine": node.agent.quarantine.rows,
            "stage slots": max(0, SLOTS - endpoint.stage.num_free - failed),
            "engines": len(self.world.fabric.members) - len(self.world.nodes),
            "mappings of dead processes": sum(memory.is_gone for memory in self.world.mapped),
        }
