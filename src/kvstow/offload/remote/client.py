"""What we ask of a store: named bytes and five verbs, each for many names at once.

    put         make objects that are not there yet; one that is there stays as it is
    get         whole objects
    get_ranges  parts of objects
    exists      which objects are there
    delete      objects are gone, whether they were there or not

An object that is missing is an answer, and so is one that is refused: stores answer for each object
of a batch, and every answer is looked at. Whatever else goes wrong is `StoreUnreachable`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstow.errors import StoreError
from kvstow.offload.tier import Bools, Bytes

Range = tuple[int, int]
"""Start and end of bytes of an object, half open."""

Refused = dict[str, str]
"""Names of objects that a store did not make or remove, and why: "no room", "busy"."""

NO_ROOM, BUSY = "no room", "busy"

Arrived = Callable[[int, Bytes | None], None]
"""Takes an object that has come, with its number among those that were asked for; None for one that
is not there. Called once for each, in any order, on any thread."""

RangesArrived = Callable[[int, list[Bytes] | None], None]
"""The same for ranges of an object."""

THERE = "there"
"""Why an object was not made that is there already. Mooncake does not say."""


class StoreUnreachable(StoreError):
    """A store that does not answer, or answers with an error."""


class StoreFull(StoreError):
    """A store that answers, and has no room for an object without which rows are not found."""


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

    @property
    def puts_at_once(self) -> int:
        """Calls of `put` that together are faster than one."""
        ...

    def memory(self, nbytes: int) -> Bytes:
        """Memory that `put` sends from without another copy. It lasts as long as the client."""
        ...

    def put(self, blobs: Sequence[Blob]) -> Refused:
        """Objects that were not made, because the store refused them or has them."""
        ...

    def get(self, names: Sequence[str], most: int, arrived: Arrived) -> None:
        """Whole objects, each as soon as it is there. One of more than `most` bytes may come as
        missing."""
        ...

    def get_ranges(
        self, wanted: Sequence[tuple[str, Sequence[Range]]], arrived: RangesArrived
    ) -> None:
        """Per object, the bytes of its ranges. Ranges that reach past its end come short."""
        ...

    def exists(self, names: Sequence[str]) -> Bools: ...

    def delete(self, names: Sequence[str]) -> Refused:
        """Objects that are still there."""
        ...

    def close(self) -> None: ...


def whole_objects(client: BlobClient, names: Sequence[str], most: int) -> list[Bytes | None]:
    """Whole objects, when all of them have come."""
    found: list[Bytes | None] = [None] * len(names)
    client.get(names, most, found.__setitem__)
    return found


@runtime_checkable
class Listing(BlobClient, Protocol):
    """A client that can say what is there, and since when: its store can be collected."""

    def list_blobs(self, prefix: str) -> Iterator[BlobFacts]:
        """Every object whose name begins with `prefix`, in any order."""
        ...
