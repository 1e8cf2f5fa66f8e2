"""Names of cache element types → how keys and values are stored.

Plain          the elements alone
PerTokenHead   narrow elements, then one float32 scale each for k and v of a token and head
NvFp4          4-bit elements, and one fp8 scale for every 16 of them
ScaledLatent   MLA: an fp8 latent, a float32 scale per 128 of it, a bfloat16 rope part
"""

from dataclasses import dataclass
from difflib import get_close_matches

from kvstow.errors import ModelError
from kvstow.plan.spec import DType


@dataclass(frozen=True, slots=True)
class Plain:
    dtype: DType


@dataclass(frozen=True, slots=True)
class PerTokenHead:
    dtype: DType


@dataclass(frozen=True, slots=True)
class NvFp4:
    pass


@dataclass(frozen=True, slots=True)
class ScaledLatent:
    pass


Precision = Plain | PerTokenHead | NvFp4 | ScaledLatent

_ELEMENTS = {
    "bfloat16": DType.BFLOAT16, "bf16": DType.BFLOAT16,
    "float16": DType.FLOAT16, "fp16": DType.FLOAT16, "half": DType.FLOAT16,
    "float32": DType.FLOAT32, "fp32": DType.FLOAT32, "float": DType.FLOAT32,
    "fp8": DType.FLOAT8_E4M3, "fp8_e4m3": DType.FLOAT8_E4M3, "float8_e4m3fn": DType.FLOAT8_E4M3,
    "fp8_e5m2": DType.FLOAT8_E5M2, "float8_e5m2": DType.FLOAT8_E5M2,
}  # fmt: skip

_PRECISIONS: dict[str, Precision] = {name: Plain(dtype) for name, dtype in _ELEMENTS.items()} | {
    "fp8_per_token_head": PerTokenHead(DType.FLOAT8_E4M3),
    "int8_per_token_head": PerTokenHead(DType.INT8),
    "int4_per_token_head": PerTokenHead(DType.INT4),
    "nvfp4": NvFp4(),
    "fp8_ds_mla": ScaledLatent(),
}


def element(name: str) -> DType | None:
    """The element type of that name, with or without `torch.` in front."""
    return _ELEMENTS.get(name.removeprefix("torch."))


def precision(name: str) -> Precision:
    """The precision of that name."""
    found = _PRECISIONS.get(name.lower().removeprefix("torch."))
    if found is None:
        close = get_close_matches(name.lower(), _PRECISIONS, n=3) or sorted(_PRECISIONS)
        raise ModelError(f"unknown cache dtype {name!r}\n\nhint: one of {', '.join(close)}")
    return found
