"""Where communication itself runs: outside of whatever traces or transforms the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fddp.runtime.inputs import outside_transforms


@contextmanager
def outside_tracing() -> Iterator[None]:
    """In here, tensors are themselves, whatever traces or transforms the caller, and new ones are
    on the CPU, whatever the caller's default."""
    cpu = torch.device("cpu")
    with _disable_current_modes(), outside_transforms(), torch.no_grad(), cpu:
        yield
