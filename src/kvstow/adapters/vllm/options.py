"""Options of the connector, read from the engine's `kv_connector_extra_config`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kvstow.errors import PlanError, SpecError, TransferError
from kvstow.offload.journal import JournalKind
from kvstow.offload.remote.url import parse
from kvstow.plan.layout import Layout
from kvstow.plan.words import parse_size
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.discovery import check_source
from kvstow.transfer.options import DigestPolicy, Options, Way

FOREIGN = {
    "num_threads": "leave it out: rows are not split over threads",
    "consumer_ranks": "leave it out: decode says how many ranks it has when it connects",
}
"""Options of vLLM's own connectors and of earlier versions, and what to write instead."""

SIZES = ("host_bytes", "disk_bytes", "store_bytes_per_second")
"""Options in bytes, which may be written in words: "8GiB"."""

HOST_SIZE = "cpu_bytes_to_use"
"""What vLLM's offloading connectors call `host_bytes`."""

SIDE_CHANNEL = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
"""Where manifests made for vLLM's connectors say on which address an engine is to be found."""

LISTEN = "tcp://127.0.0.1:*"

QUARANTINE_SECONDS = 10.0
"""Blocks of a request whose prefill instance has died are held so long: then the engine is
replaced, and nothing can write to them any more."""

PACKED = "enable_cross_layers_blocks"
"""An option of vLLM's connectors: true is our default layout, false is vLLM's own."""

COMPARED = "enforce_handshake_compat"
"""An option of vLLM's connectors: true is what we always do, false is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """What an operator may say.

    `host_bytes` above zero turns offloading on; the disk tier lies below the host tier. With
    `host_shared`, a name, most of it is shared memory: its rows outlive the process, and ranks of
    the machine that hold the same rows read each other's. `remote` is the URL of a store that
    other machines and layouts read (see `offload.remote.url`). Each rank stores no more than
    `store_bytes_per_second`, where that is above zero. `manifest_file` is where a rank writes its
    layout. `unverified` says why the model's weights need not be looked at; without it, weights
    that cannot be found are refused. With `events`, what the tiers hold is published in vLLM's own
    stream of KV events. `journal` says what is noted of stored prompts for `kvstow why`, in the
    directory `journal_path`, or in `disk_path` where that is empty. `direction` forces one of the
    ways in which rows are pulled; empty leaves it to the agent. With `mapped`, engines of one node
    and user map each other's cache. Where `listen` or `lend` name a port, it is the first rank's,
    and those of the others count up from it.

    `lend` is an address at which other engines may ask for rows in host memory. `peers` are those
    that this one asks, as `transfer.discovery` spells them, where at least `peers_tokens` tokens
    would have to be computed. They have `peers_seconds` to answer, and `peers_pull_seconds` to
    deliver.

    With `step_while_loading` vLLM's step loop is changed: it takes the next step at once while
    something is loaded, instead of pausing for a millisecond.
    """

    model: str = ""
    unverified: str = ""
    layout: str = "BLHNC"
    listen: str = LISTEN
    keys_file: str = ""
    lease_seconds: float = 60.0
    transfer_seconds: float = 60.0
    contact_seconds: float = 5.0
    digest: DigestPolicy = "sample"
    direction: Way | Literal[""] = ""
    mapped: bool = True
    host_bytes: int = 0
    host_shared: str = ""
    disk_path: str = ""
    disk_bytes: int = 0
    remote: str = ""
    store_bytes_per_second: int = 0
    manifest_file: str = ""
    events: bool = False
    journal: JournalKind = "digests"
    journal_path: str = ""
    lend: str = ""
    peers: tuple[str, ...] = ()
    peers_tokens: int = 256
    peers_seconds: float = 0.25
    peers_pull_seconds: float = 5.0
    step_while_loading: bool = False

    @staticmethod
    def of(
        options: dict[str, Any],
        *,
        environ: Mapping[str, str] = os.environ,
        num_engines: int = 1,
    ) -> "ConnectorOptions":
        """The settings; SpecError for an option that is not known or of another type.

        Options of vLLM's own connectors that mean something here are taken in our words. Of
        several engines with the same settings (data parallelism) each finds a port of its own.
        """
        options = _in_our_words(options)
        options.setdefault("listen", _side_channel(environ, num_engines))
        known: dict[str, object] = {field.name: field.default for field in fields(ConnectorOptions)}
        for name, value in options.items():
            if name not in known:
                hint = f"\n\nhint: {FOREIGN[name]}" if name in FOREIGN else ""
                raise SpecError(f"option {name!r} is none of {', '.join(known)}{hint}")
            wanted = type(known[name])
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise SpecError(f"option {name!r} is {value!r}, not of type {wanted.__name__}")
        return ConnectorOptions(**options)

    def __post_init__(self) -> None:
        if self.events and not self.offloads:
            raise SpecError(
                "option 'events' is true, and there are no tiers to tell of\n\n"
                "hint: set host_bytes, or leave it out: vLLM publishes what its device holds itself"
            )
        self._check_peers()
        if self.digest not in get_args(DigestPolicy):
            raise SpecError(f"digest is {self.digest!r}, none of {get_args(DigestPolicy)}")
        if self.direction not in ("", *get_args(Way)):
            raise SpecError(f"direction is {self.direction!r}, none of {get_args(Way)}")
        if self.journal not in get_args(JournalKind):
            raise SpecError(f"journal is {self.journal!r}, none of {get_args(JournalKind)}")
        if self.journal_path and not self.offloads:
            raise SpecError(
                f"journal_path is {self.journal_path!r}, and nothing is stored\n\n"
                "hint: set host_bytes, or leave it out"
            )
        if self.store_bytes_per_second < 0:
            raise SpecError(
                f"store_bytes_per_second is {self.store_bytes_per_second}, below 0\n\n"
                "hint: 0 stores as fast as it goes"
            )
        if min(self.host_bytes, self.disk_bytes) < 0 or bool(self.disk_path) != (
            self.disk_bytes > 0 and self.host_bytes > 0
        ):
            raise SpecError(
                f"host_bytes is {self.host_bytes}, disk_path {self.disk_path!r}, disk_bytes "
                f"{self.disk_bytes}\n\nhint: a disk tier needs disk_path, disk_bytes, host_bytes"
            )
        if self.remote and not self.host_bytes:
            raise SpecError(
                "remote is given, host_bytes is 0\n\nhint: a remote tier needs host_bytes"
            )
        if self.remote:
            parse(self.remote)

    def _check_peers(self) -> None:
        if self.lend and not self.offloads:
            raise SpecError(
                f"lend is {self.lend!r}, host_bytes is 0\n\nhint: rows in host memory are lent"
            )
        if self.peers_tokens < 0 or min(self.peers_seconds, self.peers_pull_seconds) <= 0:
            raise SpecError(
                f"peers_tokens is {self.peers_tokens}, peers_seconds {self.peers_seconds}, "
                f"peers_pull_seconds {self.peers_pull_seconds}\n\nhint: times are above 0"
            )
        for source in self.peers:
            try:
                check_source(source)
            except TransferError as error:
                raise SpecError(f"peers: {error}") from None

    @property
    def offloads(self) -> bool:
        return self.host_bytes > 0

    @property
    def journal_directory(self) -> Path | None:
        """Where stored prompts are noted; None where they are not."""
        where = self.journal_path or self.disk_path
        return Path(where) if where and self.journal != "off" else None

    @property
    def agent(self) -> Options:
        """Times of the transfer agent, and what is forced."""
        return Options(
            lease_seconds=self.lease_seconds,
            transfer_seconds=self.transfer_seconds,
            contact_seconds=self.contact_seconds,
            digest=self.digest,
            direction=self.direction or None,
            mapped=self.mapped,
            quarantine_seconds=QUARANTINE_SECONDS,
        )

    def keys(self) -> Keys | None:
        """The key pair in `keys_file`, and whom it lets in; None where there is no file."""
        return Keys.read(Path(self.keys_file)) if self.keys_file else None


def rank_address(address: str, layout: Layout) -> str:
    """The address of a rank: ports count up from the first rank's; `*` stays as it is."""
    head, _, port = address.rpartition(":")
    if not port.isdecimal() or port == "0":
        return address
    return f"{head}:{int(port) + layout.pp[0] * layout.tp[1] + layout.tp[0]}"


def _side_channel(environ: Mapping[str, str], num_engines: int) -> str:
    """The address that vLLM's connectors would listen on, where somebody has set it."""
    host, port = (environ.get(name, "") for name in SIDE_CHANNEL)
    if not host and not port:
        return LISTEN
    host = f"[{host}]" if ":" in host else host or "127.0.0.1"
    return f"tcp://{host}:{port if port and num_engines == 1 else '*'}"


def _in_our_words(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those of vLLM's connectors; SpecError for one that cannot be obeyed."""
    ours = dict(options)
    if HOST_SIZE in ours:
        size = ours.pop(HOST_SIZE)
        if ours.setdefault("host_bytes", size) != size:
            raise SpecError(
                f"option {HOST_SIZE!r} is {size!r} and host_bytes is {ours['host_bytes']!r}\n\n"
                "hint: leave the first one out; both say the same"
            )
    for name in SIZES:
        if isinstance(ours.get(name), str):
            try:
                ours[name] = parse_size(ours[name])
            except PlanError as error:
                raise SpecError(f"option {name!r}: {error}") from None
    if isinstance(ours.get("peers"), str):
        ours["peers"] = [part.strip() for part in ours["peers"].split(",") if part.strip()]
    if isinstance(ours.get("peers"), list):
        ours["peers"] = tuple(str(each) for each in ours["peers"])
    if not _flag(ours, COMPARED, default=True):
        raise SpecError(
            f"option {COMPARED!r} is false, yet instances that do not fit are never joined\n\n"
            "hint: leave it out, and compare both instances' manifest_file with `kvstow route`"
        )
    if PACKED in options:
        layout = "BLHNC" if _flag(ours, PACKED, default=True) else ""
        if ours.setdefault("layout", layout) != layout:
            raise SpecError(
                f"option {PACKED!r} is {options[PACKED]!r} and layout is {ours['layout']!r}\n\n"
                "hint: leave the first one out; layout says it all"
            )
    return ours


def _flag(options: dict[str, Any], name: str, *, default: bool) -> bool:
    """Take out a truth value, which people also write as a string."""
    value = options.pop(name, default)
    if str(value).lower() not in ("true", "false"):
        raise SpecError(f"option {name!r} is {value!r}, neither true nor false")
    return str(value).lower() == "true"
