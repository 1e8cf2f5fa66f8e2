"""Model configurations of any shape: a plan that can be written and read, or an error of ours."""

import json

from fuzzing import Reader, damaged_json, folder, fuzzed
from kvstow.errors import KvstowError, ModelError, PlanError, SpecError
from kvstow.plan.identity import config_fields
from kvstow.plan.manifest import decode, encode
from kvstow.plan.models import catalogue, load_model
from kvstow.plan.sizing.plan import Deployment

OWN = (ModelError, SpecError, PlanError)
FILE = folder() / "config.json"


def facts() -> list[bytes]:
    """The catalogue's models, and a T5 and a nested configuration as they are found outside."""
    t5 = {"model_type": "t5", "num_heads": 4, "d_kv": 8, "num_layers": 2, "n_positions": 32}
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
    }
    nested = {"model_type": "gemma3", "text_config": {**llama, "model_type": "gemma3_text"}}
    known = [dict(load_model(name).facts) for name in catalogue()]
    return [json.dumps(each).encode() for each in (t5, llama, nested, *known)]


def read(data: bytes) -> str:
    FILE.write_bytes(data)
    try:
        config = load_model(FILE)
        config_fields(config.facts)
        layout = Deployment(model=config, num_slabs=3).layout()
    except OWN as error:
        return f"refused: {type(error).__name__} | {error}"
    except KvstowError as error:
        raise AssertionError(f"{type(error).__name__} is not an error about a model") from error
    assert decode(encode(layout)) == layout
    return "accepted"


READER = Reader(name="configs", read=read, valid=facts, mutate=damaged_json, times=4)


@fuzzed(READER)
def test_a_damaged_configuration_is_planned_or_refused(data):
    READER.outcome(data)
