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
        report: the control word summed over ranks.
        stats: squared norm and finiteness of the synchronised gradients; None unless requested.
        skipped: True if all ranks skipped the step because of a non-finite number; all leaves are
            then None.
    """

    leaves: list[Tensor | None]
    report: ControlReport
    stats: Stats | None
    skipped: bool = False


@dataclass(frozen=True)
class StepContext:
    """Constants of one step.

    Attributes:
        program: program to execute.
        transport: transport of the collectives.
        pool: memory for buckets.
        scale: the agreed unit of weight.
        step: number of the step.
        method: the call that opened it.
        with_stats: True to record times, norm and finiteness.
        recorder: flight recorder of the operations.
        bound_hook: the communication hook, if there is one.
        idle: buckets that are left out because no rank used them in the previous step; a gradient
            for one makes it late. The same on all ranks.
        nonfinite: policy for non-finite numbers.
        when: suffix of `moment` that callers may set; the same on all ranks.
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
        """Text that identifies the step; the same on all ranks in step."""
        return f"{self.step}{self.when}"
