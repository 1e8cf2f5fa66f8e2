"""Plans, packs, pages, moves and keeps KV caches for LLM inference.

All that most programs need is here; nothing is imported before it is used, so the names
that plan, route and simulate work without torch:

    import kvstow

    plan = kvstow.plan_model("llama-3.1-8b", memory="20GiB", tp=2)
    arena = kvstow.Arena(plan.layout, device="cuda:0")

The rooms behind it: `plan` (layouts), `route` (from layout to layout), `blocks` (who owns
which row), `simulate`, `memory` (bytes on one machine), `events` (told to routers), `transfer`
(between processes), `offload` (kept elsewhere), `adapters` (engines), `render`, `cli`, `demo`,
`testing`; `errors` draws what may be raised, `observe` counts. `kvstow.transformers` and
`kvstow.vllm` are short names of two adapters.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from kvstow import testing as testing
    from kvstow import transformers as transformers
    from kvstow import vllm as vllm
    from kvstow.blocks.ledger import Ledger
    from kvstow.blocks.pool import Pool
    from kvstow.blocks.prompt import Prompt
    from kvstow.errors import (
        ArenaError,
        BackendMissing,
        BlockError,
        CopyError,
        KvstowError,
        LayoutError,
        ManifestError,
        MemoryLayoutError,
        ModelError,
        OutOfBlocks,
        PlanError,
        RouteError,
        SpecError,
        StoreError,
        TraceError,
        TransferError,
    )
    from kvstow.memory.arena import Arena
    from kvstow.memory.copy import copy
    from kvstow.memory.digest import digest
    from kvstow.observe import Telemetry
    from kvstow.offload.disk.tier import DiskTier
    from kvstow.offload.host.tier import HostTier
    from kvstow.offload.keys import block_keys
    from kvstow.offload.mover.mover import Mover
    from kvstow.offload.store import Store
    from kvstow.plan.deployment import Plan, plan_model
    from kvstow.plan.group import grouped
    from kvstow.plan.identity import Identity
    from kvstow.plan.layout import Layout
    from kvstow.plan.pack import packed, separate, union
    from kvstow.plan.retention import Chunk, Encoder, Full, Sink, State, Window
    from kvstow.plan.spec import DType, Extent, Field, LayerSpec
    from kvstow.route.blocks import Blocks
    from kvstow.route.route import route
    from kvstow.transfer.agent import Agent
    from kvstow.transfer.channel.curve import Keys
    from kvstow.transfer.options import Options
    from kvstow.transfer.tickets.ticket import Ticket
    from kvstow.transfer.transport.local import Fabric, LocalTransport
    from kvstow.transfer.transport.nixl import NixlTransport

_NAMES = {
    "kvstow.plan.deployment": ("Plan", "plan_model"),
    "kvstow.plan.identity": ("Identity",),
    "kvstow.plan.layout": ("Layout",),
    "kvstow.plan.spec": ("DType", "Extent", "Field", "LayerSpec"),
    "kvstow.plan.retention": ("Chunk", "Encoder", "Full", "Sink", "State", "Window"),
    "kvstow.plan.group": ("grouped",),
    "kvstow.plan.pack": ("packed", "separate", "union"),
    "kvstow.route.route": ("route",),
    "kvstow.route.blocks": ("Blocks",),
    "kvstow.blocks.pool": ("Pool",),
    "kvstow.blocks.ledger": ("Ledger",),
    "kvstow.blocks.prompt": ("Prompt",),
    "kvstow.memory.arena": ("Arena",),
    "kvstow.memory.copy": ("copy",),
    "kvstow.memory.digest": ("digest",),
    "kvstow.transfer.agent": ("Agent",),
    "kvstow.transfer.tickets.ticket": ("Ticket",),
    "kvstow.transfer.options": ("Options",),
    "kvstow.transfer.channel.curve": ("Keys",),
    "kvstow.transfer.transport.nixl": ("NixlTransport",),
    "kvstow.transfer.transport.local": ("Fabric", "LocalTransport"),
    "kvstow.offload.store": ("Store",),
    "kvstow.offload.host.tier": ("HostTier",),
    "kvstow.offload.disk.tier": ("DiskTier",),
    "kvstow.offload.mover.mover": ("Mover",),
    "kvstow.offload.keys": ("block_keys",),
    "kvstow.observe": ("Telemetry",),
    "kvstow.errors": (
        "ArenaError",
        "BackendMissing",
        "BlockError",
        "CopyError",
        "KvstowError",
        "LayoutError",
        "ManifestError",
        "MemoryLayoutError",
        "ModelError",
        "OutOfBlocks",
        "PlanError",
        "RouteError",
        "SpecError",
        "StoreError",
        "TraceError",
        "TransferError",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_PARTS = ("testing", "transformers", "vllm")
"""Modules that are imported when they are first used. They are not in `__all__`, since `from kvstow
import *` would import them, and each needs what not everybody has installed."""

_EXTRAS = {"torch": "torch", "transformers": "transformers", "vllm": "vllm"}
"""What some names need, and the extra that installs it."""

__all__ = [
    "Agent",
    "Arena",
    "ArenaError",
    "BackendMissing",
    "BlockError",
    "Blocks",
    "Chunk",
    "CopyError",
    "DType",
    "DiskTier",
    "Encoder",
    "Extent",
    "Fabric",
    "Field",
    "Full",
    "HostTier",
    "Identity",
    "Keys",
    "KvstowError",
    "LayerSpec",
    "Layout",
    "LayoutError",
    "Ledger",
    "LocalTransport",
    "ManifestError",
    "MemoryLayoutError",
    "ModelError",
    "Mover",
    "NixlTransport",
    "Options",
    "OutOfBlocks",
    "Plan",
    "PlanError",
    "Pool",
    "Prompt",
    "RouteError",
    "Sink",
    "SpecError",
    "State",
    "Store",
    "StoreError",
    "Telemetry",
    "Ticket",
    "TraceError",
    "TransferError",
    "Window",
    "block_keys",
    "copy",
    "digest",
    "grouped",
    "packed",
    "plan_model",
    "route",
    "separate",
    "union",
]


def __getattr__(name: str) -> object:
    """Import the module behind a name when the name is first used (PEP 562)."""
    if name not in _MODULE_OF and name not in _PARTS:
        raise AttributeError(f"module 'kvstow' has no attribute {name!r}")
    try:
        if name in _PARTS:
            return import_module(f"kvstow.{name}")
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        from kvstow.errors import BackendMissing

        raise BackendMissing(error.name, _EXTRAS[error.name]) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
