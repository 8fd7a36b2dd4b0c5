"""Scaling of a step's sums, and the checks of its control word.

`Sums` is that of plain collectives; `HookSums` (hook_sums.py) that of a communication hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fddp.core.numerics.weighting import WeightScale, weight_problem
from fddp.core.protocol.control_word import ControlReport
from fddp.core.schedule.schedule import summands
from fddp.runtime.program import Program


class Sums:
    """Sums of plain collectives.

    Args:
        program: program of the step.

    Attributes:
        averages: True if the collectives divide their sums.
        applies_scale: True if results are multiplied by a factor that depends on the weights.
    """

    def __init__(self, program: Program) -> None:
        schedule = program.schedule
        self.averages = schedule.scaling == "average"
        self.applies_scale = schedule.result != "replicated"
        self._program = program
        self._scale = program.scale

    def scale(self, weight: float) -> WeightScale:
        """Scale of this rank's gradients, before the control word is known."""
        return self._scale

    def repair_scale(self, weight: float) -> WeightScale:
        """Scale of gradients that are reduced after a first reduction of their bucket."""
        return self._scale

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
            and report.total_weight == self._scale.ranks
            and schedule.result != "replicated"
            and schedule.scaling != "after"
        )

    def problem(self, report: ControlReport, *, allow_idle_ranks: bool) -> str | None:
        """Describe why the weights of all ranks can't be reduced, or return None."""
        return weight_problem(report.total_weight / report.active, self._program.narrow)

    def new_states(
        self, states: Sequence[Any], report: ControlReport, results: Sequence[Tensor | None]
    ) -> Sequence[Any]:
        """Return the state of the hook by bucket after a step that succeeded.

        Args:
            states: the states before it.
            results: results by leaf.
        """
        return states
