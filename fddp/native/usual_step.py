"""Typed interface of the compiled interpreter of usual steps; see [Note: usual steps] in
csrc/step/usual_step.h."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, Protocol, cast

from fddp.native import extension

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.native.autograd_leaves import GradientCounter

NativeProgram = NewType("NativeProgram", object)
"""Schedule prepared for one rank, in compiled form."""


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

    def set_source(self, source: list[Tensor | None] | GradientCounter) -> bool:
        """Set whole gradients by leaf of the plan, or the counter that collects them. Return False
        if one is missing."""

    def __call__(self, bucket: int) -> None:
        """Note that all expected gradients of a bucket have arrived."""

    def finish(self) -> bool:
        """Run to the end after backward. Return False if Python has to continue."""

    def results(self) -> list[Tensor | None]:
        """Return the results by leaf, once `finish` has returned True."""

    def take_over(self) -> UsualState:
        """Stop, and return the state."""


@cache
def usual_step_type() -> Callable[..., UsualStep]:
    """Return the constructor `UsualStep(program, collectives, ring, source, buffers, word,
    fingerprint, factor, number, interpreter)`.

    `ring` is that of the flight recorder, in which `source` identifies the schedule. `word` is the
    control word of a usual step with any fingerprint, `factor` that on gradients before the
    reduction, `number` that of the step. `interpreter` is a weak reference to an object whose
    `bucket_ready(bucket)` is called for buckets that become ready after Python has taken over.
    """
    return cast("Callable[..., UsualStep]", extension.load().UsualStep)


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


def collectives_in_memory(shm_group: Any, adopt: Callable[[Any], Any]) -> NativeCollectives:
    """Return the collectives of a group of ranks that share memory."""
    return NativeCollectives(extension.load().ShmCollectives(shm_group), adopt)


def _itself(work: Any) -> Any:
    return work
