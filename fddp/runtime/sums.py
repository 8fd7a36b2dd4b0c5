"""Scaling of a step's sums, and the checks of its control word.

`Sums` is that of plain collectives; `HookSums` (hook_sums.py) that of a communication hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.control_word import ControlReport
from fddp.core.schedule.schedule import summands
from fddp.runtime.program import BucketProgram, Program


class Sums:
    """Sums of plain collectives.

    Args:
        program: program of the step.
        scale: the agreed unit of weight.

    Attributes:
        averages: True if the collectives divide their sums.
        applies_scale: True if results are multiplied by a factor that depends on the weights.
    """

    def __init__(self, program: Program, scale: WeightScale) -> None:
        schedule = program.schedule
        self.averages = schedule.scaling == "average"
        self.applies_scale = schedule.result != "replicated"
        self._program = program
        self._scale = scale

    def scale(self, weight: float) -> WeightScale:
        """Scale of this rank's gradients, before the control word is known."""
        return self._scale

    def scale_after_report(
        self, bucket: BucketProgram, report: ControlReport, weight: float, *, repairs: bool
    ) -> WeightScale:
        """Scale of gradients that are packed after the control word was read: the agreed one, or
        one that fits for a bucket that is reduced again. `repairs` is True if the packed gradients
        are reduced after a first reduction of the bucket."""
        scale = self._scale
        if not bucket.rescaled:
            return scale
        if scale.keeps_range(report.total_weight, report.active):
            return scale
        return scale.fitting(report.total_weight, report.active)

    def result_factor(self, bucket: BucketProgram, report: ControlReport, weight: float) -> float:
        """Factor on a bucket that may have been reduced twice."""
        if not self.applies_scale:
            return 1.0
        scale = self.scale_after_report(bucket, report, weight, repairs=False)
        return scale.after(report.total_weight)

    def failure(self) -> tuple[Exception, str] | None:
        """Return an error of this rank's reductions, for the control word."""
        return None

    def is_regular(self, report: ControlReport) -> bool:
        """Return True if all ranks contribute with the agreed weights, and none has failed."""
        schedule = self._program.schedule
        return (
            report.agreed
            and not report.failed
            and report.active == summands(schedule)
            and report.total_weight == self._scale.reference
            and schedule.result != "replicated"
            and schedule.scaling != "after"
        )

    def problem(self, report: ControlReport, *, allow_idle_ranks: bool) -> str | None:
        """Describe why the weights of all ranks can't be reduced, or return None."""
        return None

    def on_report(self, report: ControlReport) -> None:
        """Act on the control word of a step that no rank has failed."""

    def rescaled(self, report: ControlReport) -> frozenset[int]:
        """Buckets that are reduced again because their sums were scaled for other weights."""
        if not self._program.rescaled or self._scale.keeps_range(
            report.total_weight, report.active
        ):
            return frozenset()
        return self._program.rescaled

    def new_states(
        self, states: Sequence[Any], report: ControlReport, results: Sequence[Tensor | None]
    ) -> Sequence[Any]:
        """Return the state of the hook by bucket after a step that succeeded.

        Args:
            states: the states before it.
            results: results by leaf.
        """
        return states
