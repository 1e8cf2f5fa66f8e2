"""For tests of engines that build on kvstow: conformance of kernels, and tiny models.

attention    does an attention kernel honour the strides of packed rows?
cache_writes does a cache-writing kernel?
strides      what both are tried on, and what is reported
tiny_models  models of every family with random weights (needs transformers)
bench_transfer, timed_agent
             what `kvstow bench` measures

Names below are imported when they are first used, so that this package needs neither torch nor
transformers.

>>> import kvstow.testing
>>> kvstow.testing.check_attention.__module__
'kvstow.testing.attention'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstow.testing.attention import check_attention, check_in_place, check_latent_attention
    from kvstow.testing.cache_writes import check_cache_write
    from kvstow.testing.strides import KernelReport
    from kvstow.testing.tiny_models import tiny_model

__all__ = [
    "KernelReport",
    "check_attention",
    "check_cache_write",
    "check_in_place",
    "check_latent_attention",
    "tiny_model",
]

_MODULES = {
    "KernelReport": "strides",
    "check_attention": "attention",
    "check_cache_write": "cache_writes",
    "check_in_place": "attention",
    "check_latent_attention": "attention",
    "tiny_model": "tiny_models",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
