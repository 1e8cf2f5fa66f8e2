"""The front door: every name of `import kvstow`, once, and the module that it comes from.

`__init__.py` reads these lines, and imports a module when one of its names is first used.
"""

from kvstow import testing as testing
from kvstow import transformers as transformers
from kvstow import vllm as vllm
from kvstow.blocks.ledger import Ledger as Ledger
from kvstow.blocks.pool import Pool as Pool
from kvstow.blocks.prompt import Prompt as Prompt
from kvstow.errors import ArenaError as ArenaError
from kvstow.errors import BackendMissing as BackendMissing
from kvstow.errors import BlockError as BlockError
from kvstow.errors import CopyError as CopyError
from kvstow.errors import KvstowError as KvstowError
from kvstow.errors import LayoutError as LayoutError
from kvstow.errors import ManifestError as ManifestError
from kvstow.errors import MemoryLayoutError as MemoryLayoutError
from kvstow.errors import ModelError as ModelError
from kvstow.errors import NotShared as NotShared
from kvstow.errors import OutOfBlocks as OutOfBlocks
from kvstow.errors import PlanError as PlanError
from kvstow.errors import RouteError as RouteError
from kvstow.errors import SpecError as SpecError
from kvstow.errors import StoreError as StoreError
from kvstow.errors import TraceError as TraceError
from kvstow.errors import TransferError as TransferError
from kvstow.errors import WrongThread as WrongThread
from kvstow.memory.arena import Arena as Arena
from kvstow.memory.copy import copy as copy
from kvstow.memory.digest import digest as digest
from kvstow.observe import Telemetry as Telemetry
from kvstow.offload.copies.mover import Mover as Mover
from kvstow.offload.disk.tier import DiskTier as DiskTier
from kvstow.offload.host.tier import HostTier as HostTier
from kvstow.offload.keys import block_keys as block_keys
from kvstow.offload.store import Store as Store
from kvstow.plan.group import grouped as grouped
from kvstow.plan.identity import Identity as Identity
from kvstow.plan.layout import Layout as Layout
from kvstow.plan.pack import packed as packed
from kvstow.plan.pack import separate as separate
from kvstow.plan.pack import union as union
from kvstow.plan.retention import Chunk as Chunk
from kvstow.plan.retention import Encoder as Encoder
from kvstow.plan.retention import Full as Full
from kvstow.plan.retention import State as State
from kvstow.plan.retention import Window as Window
from kvstow.plan.sizing.plan import Plan as Plan
from kvstow.plan.sizing.plan import plan_model as plan_model
from kvstow.plan.spec import DType as DType
from kvstow.plan.spec import Extent as Extent
from kvstow.plan.spec import Field as Field
from kvstow.plan.spec import LayerSpec as LayerSpec
from kvstow.route.blocks import Blocks as Blocks
from kvstow.route.route import plan_route as plan_route
from kvstow.transfer.agent import Agent as Agent
from kvstow.transfer.channel.curve import Keys as Keys
from kvstow.transfer.options import Options as Options
from kvstow.transfer.tickets.ticket import Ticket as Ticket
from kvstow.transfer.transport.local import Fabric as Fabric
from kvstow.transfer.transport.local import LocalTransport as LocalTransport
from kvstow.transfer.transport.nixl import NixlTransport as NixlTransport

__version__: str
__all__: list[str]
