"""CURVE keys: who we are, and whom we talk to."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from zmq.utils import z85

from kvstow.errors import SpecError, TransferError

KEY_CHARACTERS = 40
MAX_KEYS_BYTES = 16 << 20

_Key = Annotated[str, msgspec.Meta(min_length=KEY_CHARACTERS, max_length=KEY_CHARACTERS)]


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    public: _Key
    secret: _Key
    peers: list[_Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A CURVE key pair, and the public keys of the agents it may talk to (Z85 text).

    An agent with keys lets nobody else in and dials nobody else, whatever a ticket says.
    """

    public: str
    secret: str = field(repr=False)
    peers: frozenset[str] = field(repr=False)

    @staticmethod
    def fresh() -> "Keys":
        """A new pair, without peers yet."""
        public, secret = zmq.curve_keypair()
        return Keys(public=public.decode(), secret=secret.decode(), peers=frozenset())

    @staticmethod
    def read(file: Path) -> "Keys":
        """The pair and its peers in a file; SpecError if the file has none."""
        try:
            with file.open("rb") as stream:
                document = msgspec.json.decode(stream.read(MAX_KEYS_BYTES), type=_KeysFile)
        except (OSError, msgspec.DecodeError) as error:
            raise SpecError(
                f"keys_file {file}: {getattr(error, 'strerror', None) or error}\n\n"
                'hint: a JSON object with "public", "secret" and a list "peers", all Z85 text'
            ) from error
        return Keys(public=document.public, secret=document.secret, peers=frozenset(document.peers))


def check_key(key: str, keys: Keys | None, address: str) -> None:
    """TransferError unless an agent with these keys may dial one with that public key."""
    if keys is None:
        if key:
            raise _refused(address, "wants keys, and this agent has none")
        return
    if key not in keys.peers:
        what = f"the key {key[:4]}…" if key else "no key"
        raise _refused(
            address, f"{what} is not one of the {len(keys.peers)} that this agent talks to"
        )
    try:
        whole = len(key) == KEY_CHARACTERS and len(z85.decode(key.encode())) == 32
    except (ValueError, KeyError, UnicodeEncodeError):
        whole = False
    if not whole:
        raise _refused(address, f"{len(key)} characters are not a key of {KEY_CHARACTERS}")


def _refused(address: str, why: str) -> TransferError:
    return TransferError(
        f"agent at {address}: {why}\n\nhint: list the public key of every agent to talk "
        f"to in Keys(peers=...)",
        kind="refused",
        peer=address,
    )
