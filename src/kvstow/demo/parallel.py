"""One model over several processes: torch.distributed where the model says how.

Each rank then computes, and keeps, its own heads. A model whose plan asks for more than
splitting matrices by columns and rows is computed whole by every rank, and each keeps its share
of the rows: enough to prefill, not to decode.
"""

from typing import Any, cast

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from kvstow.errors import ModelError

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def check_heads(model: Any, ranks: int) -> None:
    """Refuse a number of ranks that does not divide the model's heads."""
    heads = int(model.config.num_key_value_heads)
    queries = int(model.config.num_attention_heads)
    if heads % ranks or queries % ranks:
        raise ModelError(
            f"{queries} heads and {heads} kv heads cannot be shared out to {ranks} ranks\n\n"
            f"hint: use a number of ranks that divides {heads}"
        )


def can_split(model: Any, ranks: int) -> bool:
    """Whether torch.distributed can run the model on so many ranks."""
    plan = cast("dict[str, str] | None", getattr(model.config, "base_model_tp_plan", None))
    if not plan or any(style not in STYLES for style in plan.values()):
        return False
    return int(model.config.intermediate_size) % ranks == 0


def split(model: Any, *, rank: int, ranks: int, port: int) -> None:
    """Leave this rank its part of the model's matrices; ranks meet at a loopback port."""
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    plan = {where: STYLES[style]() for where, style in model.config.base_model_tp_plan.items()}
    parallelize_module(cast("torch.nn.Module", model.base_model), mesh, plan)


def agreed(mine: bool) -> bool:
    """Whether all ranks say so; a rank alone agrees with itself."""
    if not distributed.is_initialized():
        return mine
    votes = torch.tensor([mine], dtype=torch.int32)
    distributed.all_reduce(votes, distributed.ReduceOp.MIN)  # pyright: ignore[reportUnknownMemberType]
    return bool(votes[0])
