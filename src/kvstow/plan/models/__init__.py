"""What a model keeps: from its configuration to the layer specs of one rank.

catalogue   real models by name
config      a model's facts: where they come from, typed questions about them
serving     what the operator chooses: ranks, tokens per block, element types
ranks       what one rank holds of an axis, and of the layers
families    model_type → what each decoder layer keeps
windows     what each layer sees: everything, a window, a chunk
attention   ordinary decoders           deepseek   latent and compressed attention
recurrent   kinds of recurrent state    hybrid     models that have such layers
seq2seq     encoder and decoder
weights     how many bytes the weights take, for sizing
"""

from dataclasses import dataclass

from kvstow.plan.models.catalogue import catalogue, unchecked
from kvstow.plan.models.config import Config, Source, load_model
from kvstow.plan.models.families import stack
from kvstow.plan.models.precision import ServingOptions
from kvstow.plan.models.ranks import TensorRank, stage
from kvstow.plan.spec import LayerSpec

__all__ = ["Config", "Model", "catalogue", "load_model", "model_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The layers that one rank holds, in the model's order, and what was assumed on the way."""

    name: str
    layers: tuple[LayerSpec, ...]
    notes: tuple[str, ...]
    stage_layers: int
    """Decoder layers of the rank's stage, whether or not they keep anything."""
    total_layers: int
    """Decoder layers of the model."""


def model_layers(
    source: Source,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    pp: int = 1,
    pp_rank: int = 0,
    block_tokens: int | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """The layer specs of one (tp, pp) rank of a model.

    `kv_dtype` None or `auto` is the model's own element type.
    """
    config = load_model(source)
    rank = TensorRank(tp, tp_rank)
    serving = ServingOptions(rank=rank, block_tokens=block_tokens, kv_dtype=kv_dtype)
    whole = stack(config, serving)
    mine = stage(len(whole.layers), pp=pp, pp_rank=pp_rank)
    layers = tuple(layer for i in mine for layer in whole.layers[i])
    if not layers:
        raise config.error(f"stage {pp_rank} of {pp} holds no layer that keeps anything")
    return Model(
        name=config.name,
        layers=layers,
        notes=(*whole.notes, *serving.notes(config), *unchecked(config.name, config.facts)),
        stage_layers=len(mine),
        total_layers=len(whole.layers),
    )
