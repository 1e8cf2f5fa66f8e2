"""Options of the connector, read from the engine's `kv_connector_extra_config`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvstow.errors import PlanError, SpecError, TransferError
from kvstow.offload.journal import JournalKind
from kvstow.offload.remote.client import parse
from kvstow.plan.layout import Layout
from kvstow.plan.view import parse_size
from kvstow.transfer.channel.address import check_source
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.options import DigestPolicy, Options, Way

FOREIGN = {
    "num_threads": "leave it out: rows are not split over threads",
    "enable_cross_layers_blocks": 'leave it out: "layout" is "BLHNC", unless "" leaves it to vLLM',
    "enforce_handshake_compat": "leave it out: instances that do not fit are never joined",
}
"""Options of vLLM's own connectors, and what to write instead."""

HOST_SIZE = "cpu_bytes_to_use"
"""What vLLM's offloading connectors call `host_bytes`."""

SIZES = (HOST_SIZE, "host_bytes", "disk_bytes", "store_bytes_per_second")
"""Options in bytes, which may be written in words: "8GiB"."""

ABOVE_HOST = ("host_shared", "disk_path", "remote", "events", "journal_path", "lend")
"""Options that mean nothing without a host tier."""

SIDE_CHANNEL = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
"""Where manifests made for vLLM's connectors say on which address an engine is to be found."""

LISTEN = "tcp://127.0.0.1:*"

QUARANTINE_SECONDS = 10.0
"""Blocks of a request whose prefill instance has died are held so long: then the engine is
replaced, and nothing can write to them any more."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """What an operator may say: docs/guides/vllm.md has a table of all of it.

    `host_bytes` above zero turns offloading on; the other tiers lie below it. Where `listen` or
    `lend` name a port, it is the first rank's, and those of the others count up from it. `peers`
    are spelled as `transfer.channel.address` does, `remote` as `offload.remote.client`.
    """

    model: str = ""
    unverified: str = ""
    layout: str = "BLHNC"
    listen: str = LISTEN
    keys_file: str = ""
    lease_seconds: Seconds = 60.0
    transfer_seconds: Seconds = 60.0
    contact_seconds: Seconds = 5.0
    digest: DigestPolicy = "sample"
    direction: Way | Literal[""] = ""
    mapped: bool = True
    copy_programs: Count = 0
    early_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.02
    host_bytes: Count = 0
    host_shared: str = ""
    disk_path: str = ""
    disk_bytes: Count = 0
    remote: str = ""
    store_bytes_per_second: Count = 0
    manifest_file: str = ""
    events: bool = False
    journal: JournalKind = "digests"
    journal_path: str = ""
    lend: str = ""
    peers: tuple[str, ...] = ()
    peers_tokens: Count = 256
    peers_seconds: Seconds = 0.25
    peers_pull_seconds: Seconds = 5.0
    step_while_loading: bool = False

    @staticmethod
    def of(
        options: dict[str, Any],
        *,
        environ: Mapping[str, str] = os.environ,
        num_engines: int = 1,
    ) -> "ConnectorOptions":
        """The settings; SpecError for an option that is not known or of another type.

        Of several engines with the same settings (data parallelism) each finds a port of its own.
        """
        options = _in_our_words(options)
        options.setdefault("listen", _side_channel(environ, num_engines))
        names = [field.name for field in fields(ConnectorOptions)]
        for name in options.keys() - names:
            hint = f"\n\nhint: {FOREIGN[name]}" if name in FOREIGN else ""
            raise SpecError(f"option {name!r} is none of {', '.join(names)}{hint}")
        try:
            return msgspec.convert(options, ConnectorOptions)
        except msgspec.ValidationError as error:
            raise SpecError(f"kv_connector_extra_config: {error}") from None

    def __post_init__(self) -> None:
        for name in ABOVE_HOST:
            if getattr(self, name) and not self.offloads:
                raise SpecError(
                    f"option {name!r} is {getattr(self, name)!r}, and host_bytes is 0\n\n"
                    "hint: set host_bytes, or leave the other one out"
                )
        if bool(self.disk_path) != bool(self.disk_bytes):
            raise SpecError(
                f"disk_path is {self.disk_path!r}, disk_bytes {self.disk_bytes}\n\n"
                "hint: a disk tier needs both"
            )
        if self.remote:
            parse(self.remote)
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
            copy_programs=self.copy_programs or None,
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
    """The options with sizes in bytes, under our own names."""
    ours = dict(options)
    for name in SIZES:
        if isinstance(ours.get(name), str):
            try:
                ours[name] = parse_size(ours[name])
            except PlanError as error:
                raise SpecError(f"option {name!r}: {error}") from None
    if HOST_SIZE in ours:
        size = ours.pop(HOST_SIZE)
        if ours.setdefault("host_bytes", size) != size:
            raise SpecError(
                f"option {HOST_SIZE!r} is {size!r} and host_bytes is {ours['host_bytes']!r}\n\n"
                "hint: leave the first one out; both say the same"
            )
    if isinstance(ours.get("peers"), str):
        ours["peers"] = [part.strip() for part in ours["peers"].split(",") if part.strip()]
    return ours
