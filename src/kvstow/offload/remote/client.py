"""What we ask of a store, and which store a URL names.

A store keeps named bytes. We ask it four things, each for many names at once:

    put      make objects that are not there yet; one that is there stays as it is
    get      ranges of objects; an object as a whole is a range that reaches past its end
    exists   which objects are there
    delete   objects are gone, whether they were there or not

An object that is missing is an answer, and so is one that is refused: stores answer for each object
of a batch, and every answer is looked at. Whatever else goes wrong is `StoreUnreachable`.

    s3://BUCKET/PREFIX?endpoint=http://127.0.0.1:8333&region=…
    redis://HOST:PORT/DB?prefix=NAME            rediss:// with TLS, &ca_file=… for an own authority
    mooncake://MASTER:PORT/PREFIX?metadata=http://HOST:PORT/metadata&protocol=tcp

Options of every store: `tenant`, `budget` and `load` (seconds), `queue` (bytes), `max_bytes` and
`tenant_bytes` (limits). Passwords are better kept out of URLs: S3 takes them from
`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, Redis from a file named by `password_file`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from kvstow.errors import KvstowError, StoreError
from kvstow.offload.tier import Bools, Bytes
from kvstow.plan.view import parse_size

Range = tuple[int, int]
"""Start and end of bytes of an object, half open."""

Refused = dict[str, str]
"""Names of objects that a store did not make or remove, and why: "no room", "busy"."""

NO_ROOM, BUSY = "no room", "busy"

THERE = "there"
"""Why an object was not made that is there already. Mooncake does not say."""

Answer = list[Bytes] | None
"""Ranges of an object, as they came; None for one that is not there."""


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

    def put(self, blobs: Sequence[Blob]) -> Refused:
        """Objects that were not made, because the store refused them or has them."""
        ...

    def get(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        """Per object, the bytes of its ranges. Ranges that reach past its end come short."""
        ...

    def exists(self, names: Sequence[str]) -> Bools: ...

    def delete(self, names: Sequence[str]) -> Refused:
        """Objects that are still there."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Listing(BlobClient, Protocol):
    """A client that can say what is there, and since when: its store can be collected."""

    def list_blobs(self, prefix: str) -> Iterator[BlobFacts]:
        """Every object whose name begins with `prefix`, in any order."""
        ...


def whole_objects(client: BlobClient, names: Sequence[str], most: int) -> list[Bytes | None]:
    """Whole objects; of one of more than `most` bytes, one more."""
    answers = client.get([(name, [(0, most + 1)]) for name in names])
    return [None if parts is None else parts[0] for parts in answers]


# ── URLs ──────────────────────────────────────────────────────────────────────────────

FORMS = (
    "s3://BUCKET/PREFIX?endpoint=URL, redis://HOST:PORT/DB?prefix=NAME, "
    "mooncake://MASTER:PORT/PREFIX?metadata=URL"
)
_TENANT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """What an operator may say about a remote tier."""

    tenant: str = "shared"
    """Whose rows these are: tenants share nothing, and have limits of their own."""
    budget: float = 0.25
    """Seconds that a look-up may cost a request."""
    load: float = 10.0
    """Seconds that loading the rows of one batch may take."""
    queue: int = 256 << 20
    """Bytes that may wait to be written; more are dropped."""
    max_bytes: int | None = None
    """The most that the whole store may hold, by the collector's last count."""
    tenant_bytes: int | None = None
    """The most that the tenant may hold."""

    def __post_init__(self) -> None:
        if not _TENANT.fullmatch(self.tenant):
            raise StoreError(
                f"tenant {self.tenant!r} is not 1 to 64 letters, digits, dots, dashes or "
                "underscores, or it is a step in a path"
            )
        for name, value in (("budget", self.budget), ("load", self.load)):
            if not 0 < value <= 3600:
                raise StoreError(f"{name}={value} is not in (0, 3600] seconds")


_COMMON: dict[str, Callable[[str], object]] = {
    "tenant": str,
    "budget": float,
    "load": float,
    "queue": parse_size,
    "max_bytes": parse_size,
    "tenant_bytes": parse_size,
}
_S3 = ("endpoint", "region", "access_key_id", "secret_access_key", "session_token")
_REDIS = ("prefix", "password_file")
_MOONCAKE = ("metadata", "local", "protocol", "device", "stage")
_OWN = {"s3": _S3, "redis": _REDIS, "rediss": (*_REDIS, "ca_file"), "mooncake": _MOONCAKE}


def parse(url: str) -> tuple[SplitResult, dict[str, str], RemoteOptions]:
    """The parts of a URL: its address, the options of its store, the options of every store."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise StoreError(f"not a store URL: {error}\n\nhint: {FORMS}") from None
    if parts.scheme not in _OWN or not parts.netloc:
        raise StoreError(f"{_shown(parts)} is not a store URL\n\nhint: {FORMS}")
    own: dict[str, str] = {}
    common: dict[str, object] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in _OWN[parts.scheme]:
            own[name] = value
        elif name in _COMMON:
            common[name] = _converted(name, value)
        else:
            names = ", ".join((*_OWN[parts.scheme], *_COMMON))
            raise StoreError(f"{_shown(parts)}: no option {name!r}\n\nhint: one of {names}")
    return parts, own, RemoteOptions(**common)  # pyright: ignore[reportArgumentType]


def _converted(name: str, value: str) -> object:
    try:
        return _COMMON[name](value)
    except (ValueError, KvstowError) as error:
        raise StoreError(f"option {name}={value!r}: {error}") from error


def _shown(parts: SplitResult) -> str:
    """The URL without user, password and options."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def open_client(url: str) -> tuple[BlobClient, RemoteOptions]:
    """A client for the store that a URL names, and the options it carries.

    Raises BackendMissing where the store's package is not installed.
    """
    parts, own, options = parse(url)
    prefix = parts.path.strip("/")
    if parts.scheme == "s3":
        from kvstow.offload.remote.s3 import S3Client

        return S3Client(parts.netloc, prefix, options=own, seconds=options.load), options
    if parts.scheme == "mooncake":
        return _mooncake(parts.netloc, prefix, own), options
    return _redis(parts, own, options.load), options


def _redis(parts: SplitResult, own: dict[str, str], seconds: float) -> BlobClient:
    from kvstow.offload.remote.redis import RedisClient

    address = parts.netloc
    if own.get("password_file"):
        password = _password(Path(own["password_file"]))
        address = f":{quote(password, safe='')}@{address.rpartition('@')[2]}"
    url = f"{parts.scheme}://{address}{parts.path}"
    prefix, ca_file = own.get("prefix", "kvstow"), own.get("ca_file")
    return RedisClient(url, prefix, seconds=seconds, ca_file=ca_file)


def _password(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise StoreError(f"password_file {file}: cannot be read: {reason}") from error


def _mooncake(master: str, prefix: str, own: dict[str, str]) -> BlobClient:
    if not own.get("metadata"):
        raise StoreError(
            f"mooncake://{master}: no metadata server\n\n"
            "hint: …?metadata=http://HOST:PORT/metadata, or P2PHANDSHAKE"
        )
    from kvstow.offload.remote.mooncake import STAGE_BYTES, MooncakeClient

    return MooncakeClient(
        master,
        prefix,
        metadata=own["metadata"],
        local=own.get("local", "127.0.0.1"),
        protocol=own.get("protocol", "tcp"),
        device=own.get("device", ""),
        stage_bytes=parse_size(own["stage"]) if "stage" in own else STAGE_BYTES,
    )
