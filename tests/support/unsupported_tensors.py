"""Tensors that no operator takes."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


class Tagged(Tensor):
    """A subclass of Tensor, as DTensor is one."""


def quantized() -> dict[str, Tensor]:
    """Return a tree with a quantized leaf."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
