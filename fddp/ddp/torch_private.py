"""Private names of torch: buffers, inputs and `Join` as in torch's DDP."""

from __future__ import annotations

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs

__all__ = [
    "DisableTorchFunctionSubclass",
    "JoinConfig",
    "cast_forward_inputs",
    "preserve_version_counter",
    "to_kwargs",
]

# Bits are copied, whatever a class makes of `copy_`.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# A graph may have saved a buffer that is broadcast in place.
preserve_version_counter = _unsafe_preserve_version_counter

# Nested inputs, on the module's device and in its dtype.
to_kwargs = _to_kwargs
cast_forward_inputs = _cast_forward_inputs

# `Join` creates it for each `Joinable`, which reads it.
JoinConfig = _JoinConfig
