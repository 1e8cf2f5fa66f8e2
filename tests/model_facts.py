"""Small models and catalogue entries, as facts."""

from kvstow.plan.models import model_layers
from kvstow.plan.models.catalogue import entries
from kvstow.plan.spec import LayerSpec

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


BASE: dict[str, object] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def layers(model_type: str, **facts: object) -> tuple[LayerSpec, ...]:
    return model_layers({**BASE, "model_type": model_type, **facts}).layers


def config(name: str, **changes: object) -> dict[str, object]:
    return {**entries()[name]["config"], **changes}
