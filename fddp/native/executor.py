"""Phases and collectives of the executor of steps; see [Note: one executor] in
csrc/step/executor.h."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from fddp.native import extension

if TYPE_CHECKING:
    from fddp._C import Collectives, ShmBackend


class Phase(IntEnum):
    """Phases of the launch rule; see `core/protocol/launch.py`."""

    BACKWARD = 0
    COMPLETE = 1
    FREE = 2


class NativeCollectives(NamedTuple):
    """All-reduces that a step starts and waits for.

    Attributes:
        native: their compiled form.
        adopt: returns the `Work` for the handle of a collective in flight.
    """

    native: Collectives
    adopt: Callable[[Any], Any]


def collectives_of_one() -> NativeCollectives:
    """Return the collectives of a group of one rank."""
    return NativeCollectives(extension.compiled.CollectivesOfOne(), _itself)


def collectives_in_python(all_reduce: Callable[..., Any]) -> NativeCollectives:
    """Return collectives by a transport's method `all_reduce`."""
    return NativeCollectives(extension.compiled.CollectivesInPython(all_reduce), _itself)


def collectives_in_memory(backend: ShmBackend, adopt: Callable[[Any], Any]) -> NativeCollectives:
    """Return the collectives of a `ShmBackend`."""
    return NativeCollectives(backend.collectives_of_steps(), adopt)


def _itself(work: Any) -> Any:
    return work
