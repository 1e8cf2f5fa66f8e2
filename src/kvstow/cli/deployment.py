"""The model that a command plans: read, with what was assumed said on stderr."""

from fnmatch import fnmatchcase

from kvstow.cli.output import MISUSED, note, refuse
from kvstow.errors import ModelError
from kvstow.plan.deployment import Deployment, RankLayers
from kvstow.plan.pack import Alignment


def on_rank(deployment: Deployment, rank: int) -> RankLayers:
    """What the rank holds. Ends with 2 on options that name no model, rank or layer."""
    if rank >= deployment.num_ranks:
        refuse(
            f"--rank {rank} is not one of the {deployment.num_ranks} ranks of --tp "
            f"{deployment.tp} --pp {deployment.pp}\n\n"
            f"hint: ranks count from 0 to {deployment.num_ranks - 1}",
            code=MISUSED,
        )
    try:
        deployment.facts()
    except ModelError as error:
        refuse(str(error), code=MISUSED)
    held = deployment.on_rank(rank)
    for line in held.model.notes:
        note(line)
    _check_patterns(deployment.alignment, [layer.name for layer in held.model.layers])
    if deployment.memory is None and deployment.num_slabs is None:
        note("planned for 16 GiB; say --memory SIZE or --num-slabs N for another arena")
    return held


def check_arena(memory: int | None, num_slabs: int | None) -> None:
    """Ends with 2 where both say how large the arena is."""
    if memory is not None and num_slabs is not None:
        refuse(
            f"--memory {memory} and --num-slabs {num_slabs} both say how "
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
