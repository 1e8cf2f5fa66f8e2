"""Triton kernels, and the only package that imports triton.

copy       many runs of bytes in one launch
digest     the digest's sum over pages
attention  paged attention that reads keys and values where they lie

Without a CUDA device they run in Triton's interpreter: set TRITON_INTERPRET=1 before the first
import.
"""

from importlib.util import find_spec

from kvstow.errors import BackendMissing

if find_spec("triton") is None:
    raise BackendMissing("triton", "torch")
