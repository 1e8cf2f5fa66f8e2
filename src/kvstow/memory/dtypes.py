"""Element types: ours, torch's, and what stands in where one has none."""

from collections.abc import Mapping

import torch

from kvstow.plan.spec import DType, LayerSpec

TORCH_TYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT64: torch.float64,
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DType.FLOAT8_E5M2: torch.float8_e5m2,
    DType.FLOAT4_E2M1: torch.uint8,
    DType.INT32: torch.int32,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.INT4: torch.uint8,
}
"""4-bit elements are bytes, two each."""

RAW_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands for elements of several types, by their bytes."""

NUMPY_LACKS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def page_type(spec: LayerSpec) -> torch.dtype:
    """The fields' element type where they have one; integers as wide, or bytes, otherwise."""
    kinds = {TORCH_TYPES[field.dtype] for field in spec.fields}
    units = {field.dtype.unit for field in spec.fields}
    if len(kinds) == 1:
        return kinds.pop()
    return RAW_TYPES[units.pop() if len(units) == 1 else 1]
