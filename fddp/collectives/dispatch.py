"""Dispatch of operators on plain tensors: eager execution, or recording in a traced graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fddp.collectives.calls import Call
from fddp.collectives.execute import run_eagerly


def run(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Run a call, or record it if a tracer is active. Takes and returns what `run_eagerly` does."""
    if torch._C._len_torch_dispatch_stack():
        from fddp.collectives import torch_library  # registers operators; only tracing needs it

        return torch_library.emit(call, leaves)
    return run_eagerly(call, leaves)
