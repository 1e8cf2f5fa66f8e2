"""The demo's models by name, and how they read and write text."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvstow.errors import ModelError

Progress = Callable[[str], None]
RANDOM = "random:"


class Language(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Spoken:
    """A checkpoint's own tokenizer; prompts take the chat form where it has one."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """The prompt as the model was taught to see one."""
        if self.tokenizer.chat_template is None:
            tokens = [int(token) for token in self.tokenizer(text).input_ids]
            begin = self.tokenizer.bos_token_id
            return tokens if begin is None or tokens[:1] == [begin] else [int(begin), *tokens]
        asked = [{"role": "user", "content": text}]
        return [
            int(token)
            for token in self.tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        ]

    def decode(self, tokens: list[int]) -> str:
        """The answer as text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes as tokens, for random weights: what they say means nothing."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return " ".join(f"{token:x}" for token in tokens)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that is ready to run."""

    name: str
    model: Any
    language: Language


def opened(name: str, progress: Progress) -> Opened:
    """The model of that name: packaged weights, a directory, or random ones of a family."""
    from kvstow.demo import weights

    if name.startswith(RANDOM):
        from kvstow.testing.tiny_models import tiny_model

        progress("drawing random weights")
        return Opened(name, tiny_model(name.removeprefix(RANDOM)), Bytes())
    if name in weights.PACKAGED:
        directory = weights.unpacked(weights.PACKAGED[name], progress=progress)
    elif Path(name).is_dir():
        directory = Path(name)
    else:
        known = ", ".join(weights.PACKAGED)
        raise ModelError(
            f"no model {name!r}\n\nhint: {known}, the directory of a checkpoint, or "
            f"{RANDOM}FAMILY such as {RANDOM}falcon_h1"
        )
    model, tokenizer = weights.load(directory, progress=progress)
    return Opened(directory.name, model, Spoken(tokenizer))
