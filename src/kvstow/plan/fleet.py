"""All ranks that serve one model alike, and the layout of each of them."""

from dataclasses import dataclass, field
from typing import Literal

from kvstow.errors import PlanError
from kvstow.plan.group import Group, grouped
from kvstow.plan.layout import Layout, Order
from kvstow.plan.models import Model, model_layers
from kvstow.plan.models.config import Source
from kvstow.plan.pack import Alignment, Site, packed, separate, union

Packing = Literal["slab", "union", "separate"]


def repacked(groups: tuple[Group, ...], packing: Packing, num_slabs: int, site: Site) -> Layout:
    """The groups under one packing, in a given number of slabs."""
    match packing:
        case "slab":
            return packed(groups, num_slabs=num_slabs, site=site)
        case "union":
            return union(groups, num_slabs=num_slabs, site=site)
        case "separate":
            return separate(groups, num_slabs=num_slabs, site=site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A model on `tp` × `pp` ranks. Rank `r` is tensor-parallel rank `r % tp` of stage
    `r // tp`."""

    model: Source
    tp: int = 1
    pp: int = 1
    block_tokens: int | None = None
    kv_dtype: str | None = None
    order: Order = "BLHNC"
    packing: Packing = "slab"
    num_slabs: int = 16
    alignment: Alignment = field(default_factory=Alignment)

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise PlanError(f"tp {self.tp} × pp {self.pp} is not a number of ranks")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def specs(self, rank: int) -> Model:
        """What one rank keeps."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(
                f"rank {rank} is not one of the {self.num_ranks} ranks of tp {self.tp} × "
                f"pp {self.pp}\n\nhint: ranks count from 0 to {self.num_ranks - 1}"
            )
        return model_layers(
            self.model,
            tp=self.tp,
            tp_rank=rank % self.tp,
            pp=self.pp,
            pp_rank=rank // self.tp,
            block_tokens=self.block_tokens,
            kv_dtype=self.kv_dtype,
        )

    def layout(self, rank: int) -> Layout:
        """One rank's layout."""
        model = self.specs(rank)
        site = Site(
            model=model.name,
            order=self.order,
            tp=(rank % self.tp, self.tp),
            pp=(rank // self.tp, self.pp),
            alignment=self.alignment,
        )
        return repacked(grouped(model.layers), self.packing, self.num_slabs, site)

    def layouts(self) -> tuple[Layout, ...]:
        """Every rank's layout, by rank: what `sources` chooses among."""
        return tuple(self.layout(rank) for rank in range(self.num_ranks))
