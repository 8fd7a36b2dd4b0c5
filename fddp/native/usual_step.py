"""Typed interface of the compiled interpreter of usual steps; see [Note: usual steps] in
csrc/step/usual_step.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, Protocol
from weakref import ReferenceType

from fddp.native import extension

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.native.autograd_leaves import GradientCounter
    from fddp.native.flight_ring import FlightRing

NativeProgram = NewType("NativeProgram", object)
"""Schedule prepared for one rank, in compiled form."""


class StepSetup(Protocol):
    """What the usual steps of a program have in common."""

    def begin(
        self,
        moment: tuple[int, int, int],
        ring: FlightRing,
        buffers: list[Tensor],
        word: Tensor,
        gradients: list[Tensor | None] | GradientCounter,
        interpreter: ReferenceType[Any],
    ) -> UsualStep | None:
        """Begin a step. Return None if a gradient is missing.

        Args:
            moment: number of the step, its fingerprint, and the number of the schedule in `ring`.
            ring: ring of the flight recorder.
            buffers: memory of the buckets.
            word: control word of a usual step with any fingerprint.
            gradients: whole gradients by leaf of the plan, or the counter that collects them.
            interpreter: reference to an object whose `bucket_ready(bucket)` is called for buckets
                that become ready after Python has taken over.
        """


class UsualState(Protocol):
    """State in which Python continues.

    Attributes:
        cursor: number of the next operation among `Program.usual`.
        ready: for each bucket, True if its gradients have arrived.
        word: this rank's control word or the sum, once it was written.
        unpacked: positions of operations before the cursor whose results Python has to make.
        is_finite, may_overflow: as in a control word.
        failed_op: position in the schedule of the operation that raised the error, or -1.
    """

    cursor: int
    ready: list[bool]
    word: Tensor | None
    unpacked: list[int]
    is_finite: bool
    may_overflow: bool
    failed_op: int

    def take_in_flight(self) -> list[tuple[int, int, Any, int]]:
        """Return position, bucket, handle and number in the ring of each collective that was not
        waited for. A second call returns none."""

    def raise_error(self) -> None:
        """Raise the error of the operation that failed, if there is one."""


class UsualStep(Protocol):
    """One step in the compiled interpreter."""

    waits: list[tuple[float, float]]

    def __call__(self, bucket: int) -> None:
        """Note that all expected gradients of a bucket have arrived."""

    def finish(self) -> bool:
        """Run to the end after backward. Return False if Python has to continue."""

    def results(self) -> list[Tensor | None]:
        """Return the results by leaf, once `finish` has returned True."""

    def take_over(self) -> UsualState:
        """Stop, and return the state."""


def step_setup(program: NativeProgram, collectives: NativeCollectives, factor: float) -> StepSetup:
    """Return the setup of a program's steps.

    Args:
        program, collectives: the program, and the collectives that it starts.
        factor: factor on gradients before the reduction.
    """
    setup: StepSetup = extension.load().StepSetup(program, collectives.native, factor)
    return setup


class NativeCollectives(NamedTuple):
    """All-reduces that a step starts and waits for.

    Attributes:
        native: their compiled form.
        adopt: returns the `Work` for the handle of a collective in flight.
    """

    native: object
    adopt: Callable[[Any], Any]


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
