"""What tensors of a checkpoint may be made of."""

import torch

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)

#: Every dtype whose tensors are saved from their memory, of this torch.
DTYPES = sorted((getattr(torch, name) for name in _NAMES if hasattr(torch, name)), key=str)
