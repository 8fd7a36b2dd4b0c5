"""Phases of the executor of steps; see [Note: one executor] in csrc/step/executor.h."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """Phases of the launch rule; see `core/protocol/launch.py`."""

    BACKWARD = 0
    COMPLETE = 1
    FREE = 2
