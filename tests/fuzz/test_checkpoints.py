"""Checkpoints: a folder with any configuration, headers and notes has an identity, or none."""

import json
from random import Random

from fuzzing import Reader, damaged_bytes, damaged_json, folder, fuzzed
from kvstow.errors import ModelError, SpecError
from kvstow.plan.checkpoint import CACHE_NAME
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.manifest import decode, encode
from kvstow.plan.pack import packed
from planning import attention

FOLDER = folder()
LAYOUT = packed(grouped([attention("l.0")]), num_slabs=2)
NAMES = (b"config.json", b"model.safetensors", CACHE_NAME.encode())
CONFIG = {"model_type": "llama", "rope_scaling": {"factor": 8.0}, "layer_types": ["a"] * 80}
TENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]},
    "b": {"dtype": "F16", "shape": [600], "data_offsets": [8, 1208]},
}
NOTE = {"version": 1, "files": {"model.safetensors": [1440, 0]}, "weights": "00" * 16}


def safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(range(256)) * 5


WHOLE = {
    NAMES[0]: json.dumps(CONFIG).encode(),
    NAMES[1]: safetensors(json.dumps(TENSORS).encode()),
    NAMES[2]: json.dumps(NOTE).encode(),
}


def read(data: bytes) -> str:
    """Put one file into the folder, all others as they should be: `name`, newline, content."""
    name, _, content = data.partition(b"\n")
    for known, whole in WHOLE.items():
        (FOLDER / known.decode()).write_bytes(content if known == name else whole)
    try:
        identity = Identity.of(FOLDER)
    except (ModelError, SpecError) as error:
        return f"refused: {type(error).__name__} | {error}"
    assert len(identity.digest) == 32
    assert identity.differences(Identity.of(FOLDER)) == ()
    assert decode(encode(LAYOUT.identified(identity))).identity == identity
    return "accepted"


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    name, _, content = data.partition(b"\n")
    theirs = other.partition(b"\n")[2]
    if name != NAMES[1]:
        return name + b"\n" + damaged_json(random, content, theirs)
    if not random.randrange(4):
        return name + b"\n" + damaged_bytes(random, content, theirs)
    end = 8 + int.from_bytes(content[:8], "little")
    return name + b"\n" + safetensors(damaged_json(random, content[8:end], theirs))


READER = Reader(
    name="checkpoints",
    read=read,
    valid=lambda: [name + b"\n" + whole for name, whole in WHOLE.items()],
    mutate=mutate,
)


@fuzzed(READER)
def test_a_damaged_checkpoint_has_one_identity_or_is_refused(data):
    READER.outcome(data)
