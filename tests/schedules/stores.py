"""Rows that the nodes of a schedule keep in tiers, and what must be true of them."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstow.errors import OutOfBlocks, StoreError
from kvstow.offload.keys import PromptRows
from kvstow.offload.tier import held_by_any
from schedules.disks import NO_DISK_FAULTS, Load, Storage
from schedules.truth import Request
from schedules.world import Held, Node

if TYPE_CHECKING:
    from schedules.schedule import Schedule


TURNS = 3
"""Turns that movers get at a time: a row takes several of them to reach the disk."""

NEXT_TOKEN = 1 << 20
"""A token that nobody has computed: what is found is the beginning of a longer prompt."""


class Stores:
    """What nodes keep in host memory and on disk."""

    def __init__(self, schedule: "Schedule") -> None:
        self.schedule = schedule
        self._owners: dict[Any, str] = {}
        self._saved: list[Request] = []

    @property
    def world(self) -> Any:
        return self.schedule.world

    def open(self, node: Node) -> None:
        """Open a node's tiers. Another model's store is refused, and nothing else is."""
        machine = self.world.machine
        path = machine.path(node.shape)
        owner = self._owners.get(path, node.model)
        try:
            node.storage = Storage(machine, node)
        except StoreError as error:
            self.schedule.count("store refused")
            if owner == node.model and machine.faults is NO_DISK_FAULTS and machine.is_honest:
                self.schedule.broken(f"{node.name}: its own store is refused: {error}")
            return
        if owner != node.model:
            self.schedule.broken(f"{node.name} of {node.model} has opened the store of {owner}")
        self._owners[path] = node.model

    def _nodes(self) -> list[Node]:
        return [
            node
            for node in self.world.nodes.values()
            if node.storage is not None and not node.stopped
        ]

    def _any(self) -> Node | None:
        nodes = self._nodes()
        return self.schedule.random.choice(nodes) if nodes else None

    # ── acts ──────────────────────────────────────────────────────────────────────

    def save(self) -> None:
        """Keep the whole blocks of a request that a node holds."""
        node = self._any()
        if node is None or not node.held:
            return
        held = self.schedule.random.choice(node.held)
        storage, known = node.storage, self.world.machine.known
        assert storage is not None
        step = node.shape.block_tokens
        keys = held.request.keys(step)
        self._saved.append(held.request)
        for block, key in enumerate(keys):
            known.setdefault(key, (held.request, (block + 1) * step))
        for g, blocks in node.rows.blocks(held.claim).items():
            blocks = blocks.whole
            whole = blocks.index < len(keys)
            named = [keys[i] for i in blocks.index[whole].tolist()]
            try:
                storage.saves.append(storage.mover.store(g, blocks.ids[whole], named))
                self.schedule.count("saved")
            except StoreError:
                self.schedule.count("save refused")
        if self.schedule.random.random() < 0.4:  # the request ends, and others want its rows
            self.schedule.release(node, held)
            for _ in range(3):
                self.schedule.fill(node, self.schedule.new_request(node.model))

    def load(self) -> None:
        """Look for the beginning of a prompt, and load it."""
        node, dice = self._any(), self.schedule.random
        alike = [r for r in self._saved[-8:] if node and r.model == node.model]
        if node is None or not alike:
            return
        assert node.storage is not None
        saved = dice.choice(alike[-3:])
        adapter = saved.adapter if dice.random() < 0.8 else dice.choice(("", "tuned"))
        longer = Request(saved.model, (*saved.tokens, NEXT_TOKEN), adapter)
        if dice.random() < 0.5:  # then it comes from disk
            keys = longer.keys(node.shape.block_tokens)
            for g in range(len(node.places.rows)):
                node.storage.host.evict(g, keys)
        tiers = node.storage.tiers
        rows = PromptRows(tiers[0].layout, longer.identity, longer.prompt)
        found = rows.longest(len(saved.tokens), partial(held_by_any, tiers))
        if not found:
            self.schedule.count("nothing stored")
            return
        self._begin(node, longer.cut(found), rows.seen(found))

    def _begin(self, node: Node, request: Request, listed: Any) -> None:
        schedule = self.schedule
        node.agent.settle()
        try:
            claim = node.rows.claim(request)
        except OutOfBlocks:
            self.world.count("out of rows")
            return
        schedule.check_claim(node, claim)
        assert node.storage is not None
        load = Load(claim, request, [])
        node.storage.loads.append(load)
        for g, keyed in listed.items():
            new = claim.new[g]
            wanted = np.isin(keyed.index, new.index)
            ids = new.ids[np.isin(new.index, keyed.index)]
            keys = [key for key, one in zip(keyed.keys, wanted.tolist(), strict=True) if one]
            try:
                job = node.storage.mover.load(g, keys, ids)
            except StoreError:
                schedule.count("load refused")
                job = None
            load.jobs.append((g, job, keyed.index[wanted]))  # type: ignore[arg-type]
        self._settle(node)

    def evict(self) -> None:
        node, dice = self._any(), self.schedule.random
        if node is None or not self.world.machine.known:
            return
        assert node.storage is not None
        keys = dice.sample(list(self.world.machine.known), min(2, len(self.world.machine.known)))
        dice.choice(node.storage.tiers).evict(dice.randrange(len(node.places.rows)), keys)

    def turn_somebody(self) -> None:
        for _ in range(TURNS):
            busy = [n for n in self._nodes() if n.storage is not None and n.storage.is_busy]
            if busy:
                self.turn(self.schedule.random.choice(busy))

    def turn(self, node: Node) -> None:
        """Go on with a node's mover; a process may end there."""
        storage = node.storage
        if storage is None:
            return
        if storage.is_busy:
            storage.turn()
        if storage.is_dead:
            self.schedule.kill(node)
            return
        self._settle(node)
        self.schedule.check_memory(node)

    # ── what must be true ─────────────────────────────────────────────────────────

    def _settle(self, node: Node) -> None:
        """See which loads have ended; what they brought must be true."""
        storage = node.storage
        assert storage is not None
        storage.mover.reap()
        storage.saves = [job for job in storage.saves if not job.over]
        for load in tuple(storage.loads):
            if all(job is None or job.over for _, job, _ in load.jobs):
                storage.loads.remove(load)
                self._loaded(node, load)

    def _loaded(self, node: Node, load: Load) -> None:
        schedule, step = self.schedule, node.shape.block_tokens
        complete = True
        for g, new in load.claim.new.items():
            rows = node.places.rows[g][new.ids]
            node.shadow[rows] = node.memory[rows]
        for g, job, index in load.jobs:
            complete &= job is not None and job.error is None and bool(job.moved.all())
            if job is None:
                continue
            for at in np.flatnonzero(job.moved).tolist():
                block = int(index[at])
                ids, which = job.ids[at : at + 1], index[at : at + 1]
                tokens = block * step, (block + 1) * step
                schedule.check_rows(node, g, ids, which, load.request, *tokens, "loaded")
        schedule.count("loaded" if complete else "load incomplete")
        if not complete:
            node.rows.drop(load.claim)
            return
        end = len(load.request.tokens)
        first = {g: schedule.first_seen(node, g, end) for g in load.claim.blocks}
        held = Held(load.claim, load.request, first)
        schedule.check_held(node, held, "loaded")
        node.rows.received(load.claim)
        node.held.append(held)
        if schedule.random.random() < 0.4:  # it ends, and others begin like it
            schedule.release(node, held)
            for length in range(1, end):
                schedule.fill(node, schedule.longer(load.request.cut(length)))

    def check_disks(self) -> None:
        """Every row on disk is true; on an honest disk, every row that is listed is there."""
        machine = self.world.machine
        before, machine.faults = machine.faults, NO_DISK_FAULTS
        for node in self._nodes():
            assert node.storage is not None
            self._check_tier(node.storage, node.storage.disk)
        machine.faults = before

    def _check_tier(self, storage: Storage, tier: Any) -> None:
        for g in range(len(tier.layout.groups)):
            keys = tier.keys(g)
            wrong, there = storage.wrong_rows(tier, g, keys)
            if wrong:
                self.schedule.broken(wrong[0])
            if there < len(keys) and self.world.machine.is_honest:
                self.schedule.broken(
                    f"{tier.name} tier: {there} of {len(keys)} rows of group {g} can be read, and "
                    f"nothing has gone wrong"
                )
            self.schedule.report.outcomes["rows checked in tiers"] += there

    # ── the end ───────────────────────────────────────────────────────────────────

    def are_at_rest(self) -> bool:
        stores = [node.storage for node in self._nodes() if node.storage is not None]
        return not any(storage.is_busy or storage.loads for storage in stores)

    def left(self, node: Node) -> dict[str, int]:
        """What must be nothing when everything was moved; the node's tiers are closed."""
        storage = node.storage
        if storage is None:
            return {}
        storage.mover.reap()
        storage.host.check()
        self._check_tier(storage, storage.host)
        self._check_tier(storage, storage.disk)
        if storage.dropped and self.world.machine.is_honest:
            self.schedule.broken(f"rows were dropped, nothing has gone wrong: {storage.dropped}")
        groups = range(len(storage.host.layout.groups))
        held = sum(storage.host._pool.num_held(g) for g in groups)
        storage.mover.close()
        nameless = len(storage.nameless)
        storage.disk.close()
        open_files = storage.files.num_open
        storage.is_dead = True
        storage.host.close()
        return {
            "saves": len(storage.saves),
            "files without names": nameless,
            "rows held in the host tier": held,
            "open files": open_files,
        }
