"""Typed interface of the executor of steps; see [Note: one executor] in csrc/step/executor.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NewType, Protocol, cast
from weakref import ReferenceType

from fddp.native import extension

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.native.autograd_leaves import GradientCounter
    from fddp.native.flight_ring import FlightRing

Instr = NewType("Instr", object)
"""An operation of a schedule, as the executor runs it."""

NativeProgram = NewType("NativeProgram", object)
"""The list of instructions of a program on one rank, with its constants."""

NativeCalls = NewType("NativeCalls", object)
"""Functions of Python that run what is not native."""

Guard = Literal["always", "unless idle", "if used", "late"]
"""Condition of an instruction. Idle buckets are left out because no rank used them in the step
before, unless a gradient came all the same, which is then late."""


class Phase(IntEnum):
    """Phases of the launch rule; see `core/protocol/launch.py`."""

    BACKWARD = 0
    COMPLETE = 1
    FREE = 2


class Executor(Protocol):
    """Runs the list of one step.

    Attributes:
        is_finite, may_overflow: as in a control word, from packing.
        is_regular: True if the report is that of regular words: nothing is repaired, and results
            need no factor.
        gives_views: True if results are slices of the buffers.
        position: position in the schedule of the operation under way, or -1.
    """

    is_finite: bool
    may_overflow: bool
    is_regular: bool
    gives_views: bool
    position: int

    def __call__(self, bucket: int) -> None:
        """Note that all expected gradients of a bucket have arrived, and run the list as far as the
        launch rule allows during backward. Never raises."""

    def pack_leaves(self, leaves: list[Tensor | None], factor: float) -> None:
        """Pack gradients by leaf of the plan, times a factor."""

    def pack_counted(self, counter: GradientCounter, factor: float) -> None:
        """Pack the gradients that a counter collects, times a factor."""

    def set_regular_word(self, values: Tensor, fingerprint: int) -> None:
        """Send `values` with a fingerprint as the control word, if all gradients have arrived by
        then."""

    def leave_to_python(self) -> None:
        """Pack by functions of Python from now on, and send no regular word."""

    def set_buffer(self, bucket: int, buffer: Tensor) -> None:
        """Set the memory of a bucket."""

    def buffer(self, bucket: int) -> Tensor | None:
        """Return the memory of a bucket; None if it has none yet."""

    def buffers(self) -> list[Tensor | None]:
        """Return the memory of all buckets."""

    def run(self, phase: int) -> None:
        """Run the list as far as the launch rule allows; with `FREE`, to its end.

        Raises:
            BaseException: the error of an instruction, now or during backward; with `FREE` only.
        """

    def drain(self) -> None:
        """Wait for all collectives in flight."""

    def word(self) -> Tensor | None:
        """Return the control word, or its sum once the report was read; None if none was
        written."""

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
    program: NativeProgram,
    calls: NativeCalls,
    collectives: NativeCollectives,
    ring: FlightRing,
    source: int,
    number: int,
    step: ReferenceType[Any],
    idle: Sequence[int] = (),
    *,
    records_times: bool = False,
    measures: bool = False,
) -> Executor:
    """Return the executor of a step.

    Args:
        program, calls, collectives: of the step.
        ring: ring of the flight recorder.
        source: number of the schedule in the ring.
        number: number of the step.
        step: weak reference to the step, which the functions of Python receive.
        idle: buckets that are left out.
        records_times: True if Python starts collectives, to record their times.
        measures: True if Python makes the results, and measures them.
    """
    native = collectives.native
    new = extension.load().Executor
    made = new(program, calls, native, ring, source, number, step, idle, records_times, measures)
    return cast("Executor", made)


def step_calls(
    run: Callable[[Any, int, bool], Any],
    fail_pack: Callable[[Any, int, Exception], None],
    write_word: Callable[[Any], Tensor | None],
    read_report: Callable[[Any, bool], tuple[Sequence[int], bool]],
) -> NativeCalls:
    """Return the functions that run what is not native.

    Args:
        run: runs the operation at a position of a step. It returns the work of a collective, and
            receives True if the caller waits for it next.
        fail_pack: packs zeros at a position, whose bucket could not be packed natively.
        write_word: returns the control word of this rank, in the memory that is reduced; None for
            a regular one.
        read_report: acts on the sum of the control words, and receives True if it is that of
            regular ones. Returns the late buckets, and True if nothing is repaired and results
            need no factor.
    """
    return NativeCalls(extension.load().StepCalls(run, fail_pack, write_word, read_report))


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
