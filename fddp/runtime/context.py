"""Constants and outcome of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport
from fddp.native.buffer_pool import BufferPool
from fddp.native.layout import Stats
from fddp.runtime.hook_binding import BoundHook
from fddp.runtime.nonfinite import Policy
from fddp.runtime.program import Program
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport.base import Transport


class Outcome(NamedTuple):
    """Outcome of a step.

    Attributes:
        leaves: the synchronised gradients, by leaf; local ones for leaves that are not reduced.
        report: what the control word said.
        stats: squared norm and finiteness of the synchronised gradients; None unless asked for.
        skipped: whether all ranks left the step out, because a number was not finite; the leaves
            are then all None.
    """

    leaves: list[Tensor | None]
    report: ControlReport
    stats: Stats | None
    skipped: bool = False


@dataclass(frozen=True)
class StepContext:
    """Constants of one step.

    Attributes:
        program: what to execute.
        transport: carries the collectives.
        pool: memory for buckets.
        scale: the agreed unit of weight.
        step: number of this synchronisation.
        method: the call that it belongs to.
        with_stats: whether times, norm and finiteness are wanted.
        recorder: takes note of operations.
        bound_hook: the communication hook, if there is one.
        idle: buckets that are left out, because no rank used them in the step before; a gradient
            for one makes it late. The same on all ranks.
        nonfinite: what becomes of the step if a number is not finite.
        when: what callers say of when this is, in words that are the same on all ranks.
    """

    program: Program
    transport: Transport
    pool: BufferPool
    scale: WeightScale
    step: int
    method: Method
    with_stats: bool
    recorder: Recorder
    bound_hook: BoundHook | None = None
    idle: frozenset[int] = frozenset()
    nonfinite: Policy = "propagate"
    when: str = ""

    @property
    def moment(self) -> str:
        """The step in words that must be the same on all ranks."""
        return f"{self.step}{self.when}"
