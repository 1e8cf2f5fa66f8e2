"""What we ask of a store: named bytes and five verbs, each for many names at once.

    put         make objects that are not there yet; one that is there stays as it is
    get         whole objects
    get_ranges  parts of objects
    exists      which objects are there
    delete      objects are gone, whether they were there or not

An object that is missing is an answer. Whatever else goes wrong is `StoreUnreachable`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstow.errors import StoreError
from kvstow.offload.tier import Bools, Bytes

Range = tuple[int, int]
"""Start and end of bytes of an object, half open."""


class StoreUnreachable(StoreError):
    """A store that does not answer, or answers with an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """An object to be made."""

    name: str
    data: Bytes


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """What a listing says of an object. `modified` is in seconds since 1970."""

    name: str
    nbytes: int
    modified: float


class BlobClient(Protocol):
    """Named bytes somewhere else. Every call ends within the client's own time limit."""

    @property
    def where(self) -> str:
        """The store, for messages; without passwords."""
        ...

    def put(self, blobs: Sequence[Blob]) -> None: ...

    def get(self, names: Sequence[str], most: int) -> list[Bytes | None]:
        """Whole objects. One of more than `most` bytes may come as missing."""
        ...

    def get_ranges(self, wanted: Sequence[tuple[str, Sequence[Range]]]) -> list[list[Bytes] | None]:
        """Per object, the bytes of its ranges. Ranges that reach past its end come short."""
        ...

    def exists(self, names: Sequence[str]) -> Bools: ...

    def delete(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Listing(Protocol):
    """A client that can say what is there."""

    def list_blobs(self, prefix: str) -> Iterator[BlobFacts]:
        """Every object whose name begins with `prefix`, in any order."""
        ...
