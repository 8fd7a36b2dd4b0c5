"""Captures of device work in a graph, such as a CUDA graph, which is replayed without the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def is_capturing(device_type: str) -> bool:
    """Return True if the current stream of a type of devices is captured in a graph."""
    return _probe(device_type)()


@cache
def _probe(device_type: str) -> Callable[[], bool]:
    module = torch.get_device_module(device_type)
    found: Callable[[], bool] = getattr(module, "is_current_stream_capturing", _never)
    return found


def _never() -> bool:
    return False
