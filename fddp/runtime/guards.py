"""Context manager for communication under a tracer or a `torch.func` transform."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fddp.runtime.inputs import outside_transforms


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Disable dispatch modes, transforms and gradients, and create new tensors on the CPU."""
    cpu = torch.device("cpu")
    with _disable_current_modes(), outside_transforms(), torch.no_grad(), cpu:
        yield
