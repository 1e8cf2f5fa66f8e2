"""Plans, packs, pages, moves and keeps KV caches for LLM inference.

What most programs need is here. A name is imported when it is first used, so the names that
plan, route and simulate work without torch:

    import kvstow

    plan = kvstow.plan_model("llama-3.1-8b", memory="20GiB", tp=2)
    arena = kvstow.Arena(plan.layout, device="cuda:0")

The rooms behind it: `plan` (layouts), `route` (from layout to layout), `blocks` (who owns
which row), `simulate`, `memory` (bytes on one machine), `events` (for routers), `transfer`
(between processes), `offload` (kept elsewhere), `adapters` (engines), `render`, `cli`, `demo`,
`testing`, `errors` (the tree of exceptions), `observe` (metrics and events), `threads`, `child`,
and `text` (tables and numbers for people).
`kvstow.transformers` and `kvstow.vllm` are short names of two adapters.
"""

from importlib import import_module

__version__ = "0.1.0.dev0"

_EXTRAS = {"torch": "torch", "transformers": "transformers", "vllm": "vllm"}
"""What some names need, and the extra that installs it."""


def _modules() -> dict[str, str]:
    """By name, the module that it comes from: the lines `from module import name as name` of the
    stub file beside this one, where each name is written down once."""
    with open(f"{__file__}i", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in lines}


_MODULE_OF = _modules()
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, module in _MODULE_OF.items() if module != __name__
)
"""Without the modules `testing`, `transformers` and `vllm`: `from kvstow import *` would import
them, and each needs what not everybody has installed."""


def __getattr__(name: str) -> object:
    """Import the module behind a name when the name is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvstow' has no attribute {name!r}")
    try:
        if _MODULE_OF[name] == __name__:
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
    return sorted({*globals(), *_MODULE_OF})
