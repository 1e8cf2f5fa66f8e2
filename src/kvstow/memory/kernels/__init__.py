"""Triton kernels, and the only package that imports triton.

copy       many runs of bytes in one launch
sums       sums over words: of digests, of rows
attention  paged attention that reads keys and values where they lie

Without a CUDA device they run in Triton's interpreter: set TRITON_INTERPRET=1 before the first
import.
"""

from importlib import import_module

from kvstow.errors import BackendMissing

try:
    import_module("triton")
except ModuleNotFoundError as error:
    raise BackendMissing("triton", "torch") from error
