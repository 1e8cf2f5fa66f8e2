"""A model as it is to be served, and the layout that follows from it."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from kvstow.cli.options import Packing
from kvstow.cli.output import MISUSED, note, refuse
from kvstow.errors import ModelError
from kvstow.plan.layout import Layout, Order
from kvstow.plan.pack import Alignment

if TYPE_CHECKING:
    from kvstow.plan.group import Group
    from kvstow.plan.models import Model

USUAL_MEMORY = 16 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What the shared options say. Without `memory` and `num_slabs`, 16 GiB."""

    model: str
    tp: int = 1
    pp: int = 1
    rank: int = 0
    block_tokens: int | None = None
    kv_dtype: str | None = None
    memory: int | None = None
    num_slabs: int | None = None
    alignment: Alignment = field(default_factory=Alignment)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model's layers on one rank, grouped, and the memory to plan for."""

    deployment: Deployment
    model: "Model"
    groups: "tuple[Group, ...]"
    budget: int | None

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the longest-lasting group, before any packing scales it."""
        return self.groups[0].block_tokens

    @property
    def kv_dtype(self) -> str:
        """The cache dtype that was asked for, or the first one that the model has."""
        asked = self.deployment.kv_dtype
        if asked is not None and asked.lower() != "auto":
            return asked
        return self.groups[0].layers[0].fields[0].dtype.value

    def layout(self, order: Order, packing: Packing) -> Layout:
        """The layout under one order and packing."""
        from kvstow.plan.pack import Site, packed, separate, union

        match packing:
            case "slab":
                pack = packed
            case "union":
                pack = union
            case "separate":
                pack = separate
        asked = self.deployment
        return pack(
            self.groups,
            budget=self.budget,
            num_slabs=asked.num_slabs,
            site=Site(
                model=self.model.name,
                order=order,
                tp=(asked.tp_rank, asked.tp),
                pp=(asked.pp_rank, asked.pp),
                alignment=asked.alignment,
            ),
        )


def served(deployment: Deployment) -> Served:
    """Read the model. Says on stderr what was assumed; ends with 2 on contradictory options."""
    from kvstow.plan.group import grouped
    from kvstow.plan.models import load_model, model_layers
    from kvstow.plan.models.serving import precision

    _check(deployment)
    try:
        config = load_model(deployment.model)
        if deployment.kv_dtype is not None and deployment.kv_dtype.lower() != "auto":
            precision(deployment.kv_dtype)
    except ModelError as error:
        refuse(str(error), code=MISUSED)
    model = model_layers(
        config,
        tp=deployment.tp,
        tp_rank=deployment.tp_rank,
        pp=deployment.pp,
        pp_rank=deployment.pp_rank,
        block_tokens=deployment.block_tokens,
        kv_dtype=deployment.kv_dtype,
    )
    for line in model.notes:
        note(line)
    _check_patterns(deployment.alignment, [layer.name for layer in model.layers])
    budget = deployment.memory
    if budget is None and deployment.num_slabs is None:
        budget = USUAL_MEMORY
        note("planned for 16 GiB; say --memory SIZE or --num-slabs N for another arena")
    return Served(deployment=deployment, model=model, groups=grouped(model.layers), budget=budget)


def _check(deployment: Deployment) -> None:
    ranks = deployment.tp * deployment.pp
    if deployment.rank >= ranks:
        refuse(
            f"--rank {deployment.rank} is not one of the {ranks} ranks of --tp {deployment.tp} "
            f"--pp {deployment.pp}\n\nhint: ranks count from 0 to {ranks - 1}",
            code=MISUSED,
        )
    if deployment.memory is not None and deployment.num_slabs is not None:
        refuse(
            f"--memory {deployment.memory} and --num-slabs {deployment.num_slabs} both say how "
            "large the arena is\n\nhint: give one of them",
            code=MISUSED,
        )


def _check_patterns(alignment: Alignment, names: list[str]) -> None:
    """A demand on layers that do not exist is a slip of the pen."""
    for demand in alignment.demands:
        if not any(fnmatchcase(name, demand.layers) for name in names):
            refuse(
                f"--align {demand.layers}={demand.offset_multiple} matches none of the "
                f"{len(names)} layers\n\nhint: page, row, base, or a pattern of names like "
                f"{names[0]!r}",
                code=MISUSED,
            )
