"""A model's facts as read from its `config.json`: untrusted values behind typed questions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from kvstow.errors import ModelError

_MOST = 2**40


def is_count(value: object) -> bool:
    """Whether it is a whole number (JSON's true and false are not)."""
    return type(value) is int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model's facts. A key that is absent and a key that is null are the same."""

    name: str
    facts: Mapping[str, object] = field(repr=False)

    def __contains__(self, key: str) -> bool:
        return self.facts.get(key) is not None

    @property
    def model_type(self) -> str:
        return self.text("model_type", "")

    def error(self, message: str, hint: str = "") -> ModelError:
        """The error to raise about this model."""
        return ModelError(f"{self.name}: {message}" + (f"\n\nhint: {hint}" if hint else ""))

    def missing(self, *keys: str) -> ModelError:
        """The error for a fact that none of `keys` gives."""
        wanted = " or ".join(repr(key) for key in keys)
        return self.error(f"no {wanted} in the configuration", f"add {keys[0]!r} to it")

    def present(self, *keys: str) -> str | None:
        """The first of `keys` that has a value."""
        return next((key for key in keys if key in self), None)

    def count(self, *keys: str, default: int | None = None) -> int:
        """The positive whole number under the first of `keys` that has a value."""
        key = self.present(*keys)
        if key is None:
            if default is None:
                raise self.missing(*keys)
            return default
        value = self.facts[key]
        if not is_count(value) or cast(int, value) < 1:
            raise self.error(f"{key} is {value!r}, not a whole number > 0")
        if cast(int, value) > _MOST:
            raise self.error(f"{key} is {value!r}, more than {_MOST}")
        return cast(int, value)

    def text(self, key: str, default: str) -> str:
        """The string under `key`."""
        value = self.facts.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}, not a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under `key`."""
        value = self.facts.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}, not true or false")
        return value

    def items(self, key: str) -> list[object]:
        """The list under `key`."""
        value = self.facts.get(key)
        if not isinstance(value, list | tuple):
            raise self.error(f"{key} is {value!r}, not a list")
        return list(cast(list[object], value))

    def counts(self, key: str) -> list[int]:
        """The list of whole numbers >= 0 under `key`."""
        values = self.items(key)
        bad = [v for v in values if not is_count(v) or cast(int, v) < 0]
        if bad:
            raise self.error(f"{key} holds {bad[0]!r}, not a whole number >= 0")
        return cast(list[int], values)

    def texts(self, key: str) -> list[str]:
        """The list of strings under `key`."""
        values = self.items(key)
        bad = [v for v in values if not isinstance(v, str)]
        if bad:
            raise self.error(f"{key} holds {bad[0]!r}, not a string")
        return cast(list[str], values)

    def inner(self, key: str) -> "Config":
        """The object under `key`, as facts of its own."""
        value = self.facts.get(key)
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {value!r}, not an object")
        return Config(name=f"{self.name}: {key}", facts=cast(Mapping[str, object], value))
