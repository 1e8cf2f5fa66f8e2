"""A storage backend for SGLang's HiCache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstow", "interface_v1": 1,
        "module_path": "kvstow.adapters.sglang", "class_name": "KvstowHiCache",
        "disk": "/var/cache/kvstow", "disk_bytes": "100GiB", "model_dir": "/models/llama"}'

backend   SGLang's questions and orders, handed to a store of pages; the only importer of sglang
options   what an operator may set, and which computation makes the pages
pages     pages of SGLang's host pools as bytes, in place or gathered
hits      how many pages of a prefix can be restored, from what each pool has of it

`KvstowHiCache` is loaded when it is first asked for: everything else imports without SGLang.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstow.adapters.sglang.backend import KvstowHiCache

__all__ = ["KvstowHiCache"]


def __getattr__(name: str) -> Any:
    if name == "KvstowHiCache":
        from kvstow.adapters.sglang.backend import KvstowHiCache

        return KvstowHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
