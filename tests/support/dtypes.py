"""Dtypes that tests run over."""

from __future__ import annotations

import torch

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
"""Dtypes of gradients, by short name."""

SUMMED = [*DTYPES.values(), torch.int32, torch.int64, torch.uint8]
"""Dtypes that transports sum."""

MOVED = [*SUMMED, torch.bool, torch.int16]
"""Dtypes that transports gather and broadcast."""


DTYPE_NAMES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
DTYPE_NAMES += ["uint8", "int8", "int16", "int32", "int64", "bool"]
