"""For tests of kvstow, and of engines that build on it.

attention    does an attention kernel honour the strides of packed rows?
cache_writes does a cache-writing kernel?
strides      what both are tried on: placements that differ in one stride
layouts      hypothesis strategies for layouts (needs hypothesis)
patterns     content that names its place
poison       freed rows that read as not-a-number
faulty       files that fail, tear and flip bits on purpose
tiny_models  models of every family with random weights (needs transformers)
servers      SeaweedFS, Valkey and Mooncake as processes of our own
measure      what `kvstow bench` measures

Names below are imported when they are first used, so that this package needs neither hypothesis
nor transformers.

>>> import kvstow.testing
>>> kvstow.testing.check_attention.__module__
'kvstow.testing.attention'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstow.testing.attention import (
        AttentionReport,
        check_attention,
        check_in_place,
        check_latent_attention,
    )
    from kvstow.testing.cache_writes import WriteReport, check_cache_write
    from kvstow.testing.faulty import FaultyFiles
    from kvstow.testing.patterns import block_contents, fill, pattern
    from kvstow.testing.poison import Poison, check_reads
    from kvstow.testing.tiny_models import tiny_model

__all__ = [
    "AttentionReport",
    "FaultyFiles",
    "Poison",
    "WriteReport",
    "block_contents",
    "check_attention",
    "check_cache_write",
    "check_in_place",
    "check_latent_attention",
    "check_reads",
    "fill",
    "pattern",
    "tiny_model",
]

_MODULES = {
    "AttentionReport": "attention",
    "FaultyFiles": "faulty",
    "Poison": "poison",
    "WriteReport": "cache_writes",
    "block_contents": "patterns",
    "check_attention": "attention",
    "check_cache_write": "cache_writes",
    "check_in_place": "attention",
    "check_latent_attention": "attention",
    "check_reads": "poison",
    "fill": "patterns",
    "pattern": "patterns",
    "tiny_model": "tiny_models",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
