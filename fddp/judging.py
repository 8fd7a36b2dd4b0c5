"""What one step makes of numbers that are not finite: finds them, and ends the step if that is due.

All ranks decide alike. By contributions, because the control word counts the ranks whose are not
finite. By results, because whole ones have the same bits on all ranks; of shards the ranks vote, in
steps in which the control word leaves a doubt. In other steps nobody looks at results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fddp.control import ControlReport
from fddp.errors import NonFiniteError
from fddp.nonfinite import Account, Finder, Policy, StopStepError, nonfinite_error
from fddp.peaks import MOST_AFTER, bound
from fddp.program import Program
from fddp.results import Results
from fddp.scaling import WeightScale
from fddp.transports.base import Transport


class Judge:
    """Judges the numbers of one step.

    Args:
        policy: what becomes of the step if one is not finite.
        program: what the step carries out.
        results: is told whether to look at what is put in.
        hook: name of the communication hook; None where there is none.

    Attributes:
        finite: whether all that this rank has packed is finite.
        large: whether a sum may overflow by what this rank gives to it.
    """

    def __init__(
        self, policy: Policy, program: Program, results: Results, hook: str | None
    ) -> None:
        self.finite = True
        self.large = False
        self._policy = policy
        self._program = program
        self._results = results
        self._hook = hook
        self._finder = Finder(policy, program.paths)
        self._doubts = False  # whether a sum may have overflowed, the same on all ranks

    def packed(self, bucket: int, buffer: Tensor, peak: float) -> None:
        """Takes note of gradients that were packed, with the bound that packing gave."""
        schedule, planned = self._program.schedule, self._program.plan.buckets[bucket]
        is_finite = not math.isinf(peak)
        limit = bound(schedule.wire_dtypes[bucket], planned.dtype, schedule.topology.world_size)
        self.finite = self.finite and is_finite
        self.large = self.large or not peak <= limit
        layout = self._program.layouts[bucket]
        self._finder.look_into(planned.leaves, layout, buffer, finite=is_finite)

    def gathered(self, leaf: int, sources: list[Tensor | None]) -> None:
        """Takes note of this rank's gradients of a sparse leaf, whose sum is there."""
        if not self._results.finite:
            self._finder.look_at([leaf] * len(sources), sources)

    def know(self, report: ControlReport, scale: WeightScale) -> None:
        """Draws the consequences of the control word.

        Raises:
            StopStepError: a contribution is not finite, on all ranks.
        """
        if self._policy == "propagate":
            return
        if report.nonfinite:
            raise StopStepError
        self._doubts = (
            report.large > 0
            or bool(report.late)  # of what came late it does not speak
            or self._hook is not None
            or not scale.keeps_range(report.total_weight, report.active)
            or scale.after(report.total_weight) > MOST_AFTER
        )
        has_sparse = any(bucket.sparse for bucket in self._program.plan.buckets)
        self._results.looks = self._results.looks or self._doubts or has_sparse

    def judge_results(self, transport: Transport, step: int) -> None:
        """Looks at what came out; a collective call where shards are in doubt.

        Raises:
            StopStepError: a result is not finite, on all ranks.
        """
        if self._policy == "propagate":
            return
        finite = self._results.finite
        if self._doubts and self._program.schedule.result == "sharded_mean":
            votes = torch.tensor([not finite], dtype=torch.float64, device=transport.control_device)
            transport.all_reduce(votes, soon=True).wait(f"the vote on results of step {step}")
            finite = not votes.item()
        if not finite:
            raise StopStepError

    def error(self, transport: Transport, step: int) -> NonFiniteError | None:
        """The error of a step that was ended, if callers asked for one; a collective call then."""
        if self._policy != "raise":
            return None
        program, reduced = self._program, set(self._program.reduced)
        leaves = enumerate(self._results.leaves)
        account = self._finder.account([leaf if i in reduced else None for i, leaf in leaves])
        accounts = [Account.decode(text) for text in transport.exchange(account.encode())]
        wires = {
            program.paths[leaf]: program.schedule.wire_dtypes[number]
            for number, bucket in enumerate(program.plan.buckets)
            for leaf in bucket.leaves
        }
        sharded = program.schedule.result == "sharded_mean"
        return nonfinite_error(step, accounts, wires, self._hook, sharded=sharded)
