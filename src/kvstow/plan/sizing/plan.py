"""A model on its ranks: model × tp × pp × block tokens × dtype × packing → layouts.

    Deployment   what the operator chooses
    Plan         what a rank holds, the layouts of all ranks, and what fits

`plan_model` is the front door.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvstow.errors import ModelError, PlanError
from kvstow.plan.group import Group, grouped
from kvstow.plan.layout import Layout, Order, parse_order
from kvstow.plan.models import Model, load_model, model_layers
from kvstow.plan.models.config import Config, Source, as_unicode
from kvstow.plan.models.serving import precision
from kvstow.plan.pack import PACKINGS, Alignment, Packing, Site, packed_as
from kvstow.plan.sizing.capacity import max_requests, request_bytes
from kvstow.plan.view import check_count, parse_size
from kvstow.text import plural

DEFAULT_MEMORY = 16 << 30
"""What is planned for where neither memory nor a number of slabs is given."""

MAX_BLOCK_TOKENS = 1 << 20
MAX_RANKS = 1 << 16

USUAL_TOKENS = 8192
"""The request by which ranks are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on `tp` × `pp` ranks that are planned alike.

    Rank `r` is tensor-parallel rank `r % tp` of stage `r // tp`. `memory` is bytes per
    rank; `num_slabs` may be given in its place, and 16 GiB is planned for without either.
    `name` is what the model is called in place of its own name.
    """

    model: Source
    name: str | None = None
    tp: int = 1
    pp: int = 1
    block_tokens: int | None = None
    kv_dtype: str | None = None
    order: Order = "BLHNC"
    packing: Packing = "slab"
    memory: int | None = None
    num_slabs: int | None = None
    alignment: Alignment = field(default_factory=Alignment)

    def __post_init__(self) -> None:
        check_count("tp", self.tp, most=MAX_RANKS, error=PlanError)
        check_count("pp", self.pp, most=MAX_RANKS, error=PlanError)
        check_count("tp × pp", self.num_ranks, most=MAX_RANKS, error=PlanError)
        if self.block_tokens is not None:
            check_count("block_tokens", self.block_tokens, most=MAX_BLOCK_TOKENS, error=PlanError)
        if self.packing not in PACKINGS:
            raise PlanError(f"packing {self.packing!r} is none of {', '.join(PACKINGS)}")
        if self.memory is not None and self.num_slabs is not None:
            raise PlanError(
                f"memory {self.memory} and num_slabs {self.num_slabs} both say how large the "
                "arena is\n\nhint: give one of them"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def budget(self) -> int | None:
        """Bytes of the arena; None where the number of slabs is given."""
        if self.memory is None and self.num_slabs is None:
            return DEFAULT_MEMORY
        return self.memory

    def check_rank(self, rank: int) -> None:
        """Raises PlanError for a rank that is none of the deployment's."""
        if type(rank) is not int or not 0 <= rank < self.num_ranks:
            raise PlanError(
                f"rank {rank!r}: tp {self.tp} × pp {self.pp} is {plural(self.num_ranks, 'rank')}"
                f"\n\nhint: ranks count from 0 to {self.num_ranks - 1}"
            )

    def facts(self) -> Config:
        """The model's facts. Raises ModelError also for a cache dtype that does not exist."""
        if self.kv_dtype is not None and str(self.kv_dtype).lower() != "auto":
            precision(str(self.kv_dtype))
        config = load_model(self.model)
        return config if self.name is None else replace(config, name=as_unicode(self.name))

    def on_rank(self, rank: int) -> "Plan":
        """The plan of one rank."""
        self.check_rank(rank)
        held = model_layers(
            self.facts(),
            tp=self.tp,
            tp_rank=rank % self.tp,
            pp=self.pp,
            pp_rank=rank // self.tp,
            block_tokens=self.block_tokens,
            kv_dtype=self.kv_dtype,
        )
        return Plan(deployment=self, rank=rank, held=held, groups=grouped(held.layers))

    def stages(self) -> tuple["Plan", ...]:
        """Of every stage the first rank. Ranks of one stage hold equally many bytes."""
        return tuple(self.on_rank(rank) for rank in range(0, self.num_ranks, self.tp))

    def layout(self, rank: int = 0) -> Layout:
        """One rank's layout."""
        return self.on_rank(rank).layout


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model on a rank: what the rank holds, and the layouts of all ranks, each planned once, when
    it is first needed.

    A request lives on all ranks at once, so the fullest rank decides what fits.
    """

    deployment: Deployment
    rank: int
    held: Model
    """The layers of this rank."""
    groups: tuple[Group, ...]

    @property
    def model(self) -> str:
        """The model's name."""
        return self.held.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed about the model."""
        return self.held.notes

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the longest-lasting group, before any packing scales it."""
        return self.groups[0].block_tokens

    @property
    def kv_dtype(self) -> str:
        """The cache dtype of the deployment, or the first one that the model has."""
        kv_dtype = self.deployment.kv_dtype
        if kv_dtype is not None and kv_dtype.lower() != "auto":
            return kv_dtype
        return self.groups[0].layers[0].fields[0].dtype.value

    def changed(self, **changes: Any) -> "Plan":
        """The same layers with another order, packing or memory."""
        return replace(self, deployment=replace(self.deployment, **changes))

    @cached_property
    def layout(self) -> Layout:
        """Where every byte of this rank lies."""
        deployment = self.deployment
        site = Site(
            model=self.model,
            order=deployment.order,
            tp=(self.rank % deployment.tp, deployment.tp),
            pp=(self.rank // deployment.tp, deployment.pp),
            alignment=deployment.alignment,
        )
        return packed_as(
            deployment.packing,
            self.groups,
            budget=deployment.budget,
            num_slabs=deployment.num_slabs,
            site=site,
        )

    @cached_property
    def stages(self) -> tuple[Layout, ...]:
        """A layout of each stage that keeps anything: its ranks hold equally many bytes."""
        tp = self.deployment.tp
        stages: list[Layout] = []
        for stage in range(self.deployment.pp):
            if stage == self.rank // tp:
                stages.append(self.layout)
                continue
            with suppress(ModelError):  # a stage that keeps nothing
                stages.append(self.deployment.layout(stage * tp))
        return tuple(stages)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Every rank's layout, by rank."""
        by_rank = {each.pp[0] * each.tp[1] + each.tp[0]: each for each in self.stages}
        ranks = range(self.deployment.num_ranks)
        return tuple(by_rank.get(rank) or self.deployment.layout(rank) for rank in ranks)

    @property
    def limiting_rank(self) -> int:
        """The rank on which the fewest requests fit (of 8,192 tokens); the first of several."""
        return self.limiting(USUAL_TOKENS).pp[0] * self.deployment.tp

    def max_requests(self, *, tokens: int) -> int:
        """The most requests of so many tokens that fit at once, on every rank."""
        return max_requests(self.limiting(tokens), tokens)

    def bytes_per_request(self, *, tokens: int) -> int:
        """Bytes that a request of so many tokens holds on the rank that limits how many fit."""
        return request_bytes(self.limiting(tokens), tokens)

    def limiting(self, tokens: int) -> Layout:
        """The layout of the stage on which the fewest requests of so many tokens fit."""
        check_count("tokens", tokens, error=PlanError)
        return min(self.stages, key=lambda layout: max_requests(layout, tokens))

    def everywhere(self) -> "Plan":
        """This plan, all stages planned. Raises PlanError if the model does not fit on each."""
        assert self.stages
        return self

    def __repr__(self) -> str:
        deployment, layout = self.deployment, self.layout
        groups = [
            f"  {rows.group.name}: {len(rows.group.layers)} layers, {rows.group.block_tokens} "
            f"tokens per block, rows of {layout.row_bytes(g):,} bytes"
            for g, rows in enumerate(layout.groups)
        ]
        return "\n".join(
            (
                f"Plan of {self.model}: rank {self.rank} of tp {deployment.tp} × pp "
                f"{deployment.pp}, order {layout.order}, packing {deployment.packing}",
                *groups,
                f"  {layout.num_slabs:,} slabs of {layout.slab_bytes:,} bytes, "
                f"{layout.nbytes:,} in all",
                f"  {self.max_requests(tokens=USUAL_TOKENS):,} requests of {USUAL_TOKENS:,} tokens "
                f"fit, {self.bytes_per_request(tokens=USUAL_TOKENS):,} bytes each "
                f"(rank {self.limiting_rank})",
            )
        )


def repacked(layout: Layout, order: Order, packing: Packing) -> Layout:
    """The same groups and slabs in another order, with the planner's own alignment."""
    site = Site(model=layout.model, order=order, tp=layout.tp, pp=layout.pp)
    groups = tuple(rows.group for rows in layout.groups)
    made = packed_as(packing, groups, num_slabs=layout.num_slabs, site=site)
    return made if layout.identity is None else made.identified(layout.identity)


def plan_model(
    model: Source,
    memory: int | str | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    rank: int = 0,
    order: str = "BLHNC",
    block_tokens: int | None = None,
    kv_dtype: str | None = None,
    packing: Packing = "slab",
    num_slabs: int | None = None,
    alignment: Alignment | None = None,
) -> Plan:
    """The plan of a model: a catalogue name, a `config.json`, its directory, or its facts.

    `memory` is what each rank has for the cache, a number of bytes or `"20GiB"`; 16 GiB
    where neither it nor `num_slabs` is given. `order` may be written `blhnc`, `HND` or
    `NHD`. Raises ModelError for a model that cannot be read or split, PlanError for
    memory that it does not fit into.
    """
    deployment = Deployment(
        model=model,
        tp=tp,
        pp=pp,
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        order=parse_order(order),
        packing=packing,
        memory=None if memory is None else parse_size(memory),
        num_slabs=num_slabs,
        alignment=alignment or Alignment(),
    )
    deployment.check_rank(rank)
    plan = replace(deployment, model=deployment.facts()).on_rank(rank)
    return plan.everywhere()
