"""A measured profile of an engine: the rates that a simulation takes in place of assumed ones.

    {"prefill_rate": 21400, "decode_rate": 3100, "step_seconds": 0.012,
     "model": "llama-3.1-8b", "machine": "one H100"}

`kvstow bench serving URL --output FILE` measures one; anybody may write one by hand.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from kvstow.errors import TraceError
from kvstow.simulate.replay import Pace

MAX_BYTES = 1 << 20

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates in tokens per second, of all requests together; what is absent is not known."""

    prefill_rate: _Positive | None = None
    decode_rate: _Positive | None = None
    step_seconds: _Positive | None = None
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    model: str = ""
    machine: str = ""
    measured: dict[str, float | str] = {}
    """What the rates were found from; for people."""

    def pace(self, pace: Pace) -> Pace:
        """The pace with what is known here."""
        known = {
            "prefill_rate": self.prefill_rate,
            "decode_rate": self.decode_rate,
            "step_seconds": self.step_seconds,
            "chunk_tokens": self.chunk_tokens,
        }
        return replace(pace, **{name: value for name, value in known.items() if value is not None})


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises TraceError, with the file and the reason."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Profile)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: {error}\n\nhint: a profile is an object with prefill_rate, decode_rate, "
            "step_seconds, chunk_tokens; and model, machine, measured as notes"
        ) from error
