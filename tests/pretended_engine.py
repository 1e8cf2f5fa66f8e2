"""A small pretended engine: it fills memory and keeps ids; our two sides around it are real."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch

from kvstow.adapters.vllm.cache.layout import (
    CacheDeclaration,
    DeclaredRegion,
    axes_of,
    declared_layout,
)
from kvstow.adapters.vllm.cache.pages import DeclaredPage
from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.mail import MailAddress
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
    StepResults,
)
from kvstow.adapters.vllm.scheduler.events import TierEvents
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.adapters.vllm.scheduler.parts import EngineState
from kvstow.adapters.vllm.scheduler.recall import Recall
from kvstow.adapters.vllm.scheduler.side import SchedulerSide
from kvstow.adapters.vllm.worker.part import RankPart
from kvstow.adapters.vllm.worker.side import WorkerSide
from kvstow.memory.allocate import host_bytes
from kvstow.memory.arena import Arena
from kvstow.plan.retention import Full, Retention, Window
from kvstow.plan.spec import DType, Extent
from kvstow.transfer.transport.local import Fabric, LocalTransport
from recorded_vllm import IDENTITY, Pool, engine_state

TOKENS, HEADS, CONTENT, NUM_BLOCKS = 4, 2, 8, 24
PROMPT = list(range(500, 518))
"""18 tokens: four whole blocks, and half of one."""


WINDOW = Window(8)


def declaration(
    order: str,
    tp: tuple[int, int] = (0, 1),
    block_tokens: int | None = None,
    window: Window = WINDOW,
    plain: bool = False,
) -> CacheDeclaration:
    """Two layers with a window over two with full attention, one set of ids; `plain`: without the
    former.

    With `block_tokens` its kernels keep so many tokens in order; otherwise pages are opaque.
    """
    tokens = block_tokens or TOKENS
    mine = HEADS // tp[1]
    heads = Extent("head", HEADS, ((tp[0] * mine, tp[0] * mine + mine),))
    page = mine * tokens * CONTENT * 4
    rows = order.startswith("B")

    def pages(names: tuple[str, ...], retention: Retention) -> tuple[DeclaredPage, ...]:
        return tuple(
            DeclaredPage(
                layer=name,
                retention=retention,
                block_tokens=tokens,
                heads=heads,
                states=tokens,
                content=CONTENT,
                dtype=DType.FLOAT32,
                in_token_order=block_tokens is not None,
            )
            for name in names
        )

    kinds = {("w.0", "w.1"): window, ("f.0", "f.1"): Full()}
    groups = list(kinds)[plain:]
    return CacheDeclaration(
        identity=IDENTITY,
        order=order,
        num_blocks=NUM_BLOCKS,
        groups=tuple(pages(names, kinds[names]) for names in groups),
        regions=tuple(
            DeclaredRegion(
                layers=names,
                nbytes=2 * page * NUM_BLOCKS,
                layer_stride=page if rows else page * NUM_BLOCKS,
                block_stride=2 * page if rows else page,
                offset=0,
            )
            for names in groups
        ),
        tp=tp,
    )


def views_of(declared: CacheDeclaration, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the layers as an engine makes them from its own words."""
    raw = memory.view(torch.float32)
    page = declared.groups[0][0]
    views = {
        name: raw.as_strided(
            (NUM_BLOCKS, HEADS // declared.tp[1], page.states * CONTENT),
            (region.block_stride // 4, page.states * CONTENT, 1),
            (region.offset + i * region.layer_stride) // 4,
        )
        for region in declared.regions
        for i, name in enumerate(region.layers)
    }
    if page.in_token_order:
        views = {name: view.unflatten(2, (page.states, CONTENT)) for name, view in views.items()}
    return views


WayToTell = Literal["in steps", "at once"]


@dataclass(kw_only=True)
class Seen(StepResults):
    """What came of a step, and what the rank has counted in it."""

    counts: dict[str, Any]


PartKind = TypeVar("PartKind", bound=RankPart)


@dataclass
class Engine:
    """A scheduler's side, a worker's side, and memory."""

    desk: SchedulerSide
    hands: WorkerSide
    views: dict[str, torch.Tensor]

    @staticmethod
    def start(
        fabric: Fabric,
        name: str,
        settings: ConnectorOptions,
        order: str,
        *,
        told: WayToTell = "in steps",
        tp: tuple[int, int] = (0, 1),
        block_tokens: int | None = None,
        window: Window = WINDOW,
        plain: bool = False,
    ) -> "Engine":
        """`plain`: one group, in memory that others map."""
        declared = declaration(order, tp, block_tokens, window, plain)
        nbytes = declared.regions[0].nbytes
        host = host_bytes(nbytes, align=4096, huge_pages=not plain, pinned=False)
        views = views_of(declared, host.memory)
        layout = declared_layout(declared, base_align=64)
        axes = ("block", "head", "token", "content") if block_tokens else axes_of(layout.order)
        arena = Arena.adopt(layout, dict(views), axes=axes)
        arena.file = host.file
        desk = SchedulerSide(engine_state(declared, settings, pulls_early=plain))
        hands = WorkerSide(arena, settings, transport=LocalTransport(fabric), name=name)
        has_mail = told == "at once"
        endpoint = hands.endpoint
        desk.meet([endpoint if has_mail else replace(endpoint, inbox=MailAddress())])
        return Engine(desk, hands, views)

    def part(self, kind: type[PartKind]) -> PartKind:
        """The rank's part of that kind."""
        return next(part for part in self.hands.parts if isinstance(part, kind))

    def step(self) -> Seen:
        """What an engine does in a step in which it computes nothing."""
        step = self.desk.take_step(computes=False)
        self.hands.begin(step)
        self.hands.load()
        self.hands.save()
        results = self.hands.results(idle=True)
        self.desk.apply(results, tuple(results.sent))
        told = {each.name: getattr(results, each.name) for each in fields(results)}
        return Seen(**told, counts=self._counts())

    def _counts(self) -> dict[str, Any]:
        counts = self.hands.rank.counts.take()
        counts.pop("pull_seconds", None)
        counts.pop("load_seconds", None)
        return counts

    def until(self, over: Callable[[Seen], bool], seconds: float = 30) -> Seen:
        """Steps, until one ends with what is waited for."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if over(found := self.step()):
                return found
        raise AssertionError("nothing came of it")

    def fill(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for view in self.views.values():
            view.copy_(torch.rand(view.shape, generator=rng))

    def prefill(
        self, ids: tuple[tuple[int, ...], ...], prompt: list[int] = PROMPT, id: str = "p"
    ) -> dict[str, object]:
        """Finish a request whose cache is in these blocks; what its answer carries."""
        request = EngineRequest(id=id, tokens=[*prompt, 1], params={"do_remote_decode": True})
        stays, params = self.desk.finished(request, ids, len(prompt))
        assert stays
        assert params is not None
        return params

    def decode(
        self,
        params: object,
        ids: tuple[tuple[int, ...], ...],
        computed: int = 0,
        prompt: list[int] = PROMPT,
    ) -> int:
        """Queue a request with tickets, and give it blocks; how many tokens it waits for."""
        request = EngineRequest(id="d", tokens=prompt, params=params)  # pyright: ignore
        self.desk.arrived(request)
        count = self.desk.matched("d", computed)
        assert count is not None
        self.desk.allocated("d", ids, count)
        return count


class RecallAlone(Recall):
    """The part of a scheduler's side that brings rows back and stores them, by itself."""

    def ask(
        self,
        request: EngineRequest,
        keys: RequestKeys | None = None,
        *,
        has_tickets: bool = False,
    ) -> LookUpKeys | None:
        """A request is queued; what the workers are asked about it."""
        sizes = {group.block_tokens for group in self._groups}
        keys = keys or RequestKeys(self._identity, request, sizes, ahead=self._engine.ahead)
        self.arrived(request, keys, has_tickets=has_tickets)
        lookups = self._engine.take_step().lookups
        return lookups[0] if lookups else None

    @staticmethod
    def of(
        engine: EngineState, events: TierEvents | None = None, ranks: Sequence[str] = ("0",)
    ) -> tuple["RecallAlone", Pool]:
        """For an engine with these ranks, and its pool."""
        made, pool = RecallAlone(engine, events), Pool()
        engine.pool = pool  # pyright: ignore
        made.index.expect(ranks)
        return made, pool

    @property
    def counts(self) -> EngineCounts:
        return self._engine.counts

    def matched(self, id: str, num_computed: int) -> int | None:
        """Tokens beyond those that are computed."""
        reach = self.reach(id, num_computed, num_computed)
        return None if reach is None else reach - num_computed

    def order(self, id: str, ids: BlockIds, start: int, num_tokens: int) -> LoadBlocks:
        """The order of a load."""
        self.load(id, ids, start, num_tokens)
        return self._engine.take_step().loads[0]

    def answer(self, answer: KeysPresent) -> None:
        self.apply(StepResults(present={answer.request: answer}))
