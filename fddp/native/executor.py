"""Typed interface of the executor of steps; see [Note: one executor] in csrc/step/executor.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, Protocol, cast
from weakref import ReferenceType

from fddp.native import extension

if TYPE_CHECKING:
    from torch import Tensor

    from fddp._C import FlightRing, GradientCounter

NativeConstants = NewType("NativeConstants", object)
"""Constants of a program on one rank, in compiled form."""

NativeInstr = NewType("NativeInstr", object)
"""An instruction."""

NativeInstrs = NewType("NativeInstrs", object)
"""A list of instructions."""


class Phase(IntEnum):
    """Phases of the launch rule; see `core/protocol/launch.py`."""

    BACKWARD = 0
    COMPLETE = 1
    FREE = 2


class Executor(Protocol):
    """Runs the instructions of one step.

    Attributes:
        is_finite, may_overflow: as in a control word, from packing.
        position: position in the schedule of the operation under way, or -1.
    """

    is_finite: bool
    may_overflow: bool
    position: int

    def __call__(self, bucket: int) -> None:
        """Note that all expected gradients of a bucket have arrived, and run the list as far as the
        launch rule allows during backward. Never raises."""

    def pack_leaves(self, leaves: list[Tensor | None], factor: float) -> bool:
        """Pack gradients by leaf of the plan, times a factor. Return True if none is missing."""

    def pack_counted(self, counter: GradientCounter, factor: float) -> None:
        """Pack the gradients that a counter collects, times a factor."""

    def pack_in_python(self) -> None:
        """Pack by the functions of the instructions from now on."""

    def set_buffer(self, bucket: int, buffer: Tensor) -> None:
        """Set the memory of a bucket."""

    def buffer(self, bucket: int) -> Tensor | None:
        """Return the memory of a bucket; None if it has none yet."""

    def buffers(self) -> list[Tensor | None]:
        """Return the memory of all buckets."""

    def run(self, phase: int) -> bool:
        """Run the list as far as the launch rule allows. Return True if it has ended.

        Raises:
            BaseException: the error of an instruction, now or during backward; with `FREE` only.
        """

    def run_list(self, list: NativeInstrs, phase: int) -> bool:
        """Run the next list; as `run`. The list before it must have ended."""

    def drain(self) -> None:
        """Wait for all collectives in flight."""

    def wait_at(self, position: int) -> None:
        """Wait for the collective at a position, if there is one."""

    def send_word(
        self, values: Tensor, fingerprint: int, bucket: int, list: NativeInstrs, phase: int
    ) -> None:
        """Write a control word with a fingerprint, behind a bucket or, for -1, into memory of its
        own, and run the next list, which sends it."""

    def send_written_word(self, word: Tensor, list: NativeInstrs, phase: int) -> None:
        """As `send_word`, for a control word that was written."""

    def word(self) -> Tensor | None:
        """Return the control word, or its sum once it was read; None if none was written."""

    def read_word(self, position: int, values: Tensor, fingerprint: int) -> bool:
        """Wait for the collective at a position, which brings the sum of the control words. Return
        True if all are equal to `values` with the fingerprint."""

    def results(self) -> list[Tensor | None]:
        """Return by leaf the slices of the buffers."""

    def note_magnitude(self, is_finite: bool) -> None:
        """Note a packed bucket with large or unknown numbers."""

    def ready_s(self) -> list[float]:
        """Return the time at which each bucket was ready; infinite before."""

    def launch_s(self) -> list[float]:
        """Return the time at which each bucket was first sent; NaN before."""


class NativeCollectives(NamedTuple):
    """All-reduces that a step starts and waits for.

    Attributes:
        native: their compiled form.
        adopt: returns the `Work` for the handle of a collective in flight.
    """

    native: object
    adopt: Callable[[Any], Any]


def new_executor(
    constants: NativeConstants,
    collectives: NativeCollectives,
    ring: FlightRing,
    source: int,
    number: int,
    step: ReferenceType[Any],
    first: NativeInstrs,
) -> Executor:
    """Return the executor of a step.

    Args:
        constants, collectives: constants and collectives of the program.
        ring: ring of the flight recorder.
        source: number of the schedule in the ring.
        number: number of the step.
        step: weak reference to the step, which the functions of instructions receive.
        first: list to run first.
    """
    new = extension.load().Executor
    made = new(constants, collectives.native, ring, source, number, step, first)
    return cast("Executor", made)


def instr_type() -> Callable[..., NativeInstr]:
    """Return the type of instructions."""
    return cast("Callable[..., NativeInstr]", extension.load().Instr)


def instrs(made: Sequence[NativeInstr]) -> NativeInstrs:
    """Return a list of instructions."""
    return NativeInstrs(extension.load().Instrs(list(made)))


def collectives_of_one() -> NativeCollectives:
    """Return the collectives of a group of one rank."""
    return NativeCollectives(extension.load().CollectivesOfOne(), _itself)


def collectives_in_python(all_reduce: Callable[..., Any]) -> NativeCollectives:
    """Return collectives by a transport's method `all_reduce`."""
    return NativeCollectives(extension.load().CollectivesInPython(all_reduce), _itself)


def collectives_in_memory(backend: Any, adopt: Callable[[Any], Any]) -> NativeCollectives:
    """Return the collectives of a `ShmBackend`."""
    return NativeCollectives(backend.collectives_of_steps(), adopt)


def _itself(work: Any) -> Any:
    return work
