"""Operators on plain tensors: run eagerly, or recorded in the graph that is being traced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fddp.collectives.calls import Call
from fddp.collectives.execute import run_eagerly


def run(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Run a call, or record it where a tracer is active; as `run_eagerly`."""
    if torch._C._len_torch_dispatch_stack():
        from fddp.collectives import torch_library  # registers operators; loaded by tracing only

        return torch_library.emit(call, leaves)
    return run_eagerly(call, leaves)
