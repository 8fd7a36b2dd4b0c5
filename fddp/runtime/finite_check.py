"""What one step makes of numbers that are not finite: finds them, and ends the step if that is due.

All ranks decide alike. By contributions, because the control word counts the ranks whose are not
finite. By results, because whole ones have the same bits on all ranks. Of shards the ranks vote, in
steps in which the control word leaves a doubt; in other steps nobody looks at results. Of what a
hook of torch's kind gives they vote in each step: it may be each rank's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fddp.core.numerics.overflow import MOST_AFTER, max_safe_magnitude
from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.messages import decode_all
from fddp.errors import NonFiniteError, RankLostError, SyncTimeoutError
from fddp.hooks.hook import Hook
from fddp.runtime.contributions import Part
from fddp.runtime.nonfinite import Account, Finder, Holding, Policy, StopStepError, nonfinite_error
from fddp.runtime.program import Program
from fddp.runtime.results import Results
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport.base import Transport


class Judge:
    """Judges the numbers of one step.

    Args:
        policy: what becomes of the step if one is not finite.
        program: what the step carries out.
        results: is told whether to look at what is put in.
        hook: the communication hook; None where there is none.
        recorder: takes note of votes and of what ranks tell each other.

    Attributes:
        finite: whether all that this rank has packed is finite.
        large: whether a sum may overflow by what this rank gives to it.
    """

    def __init__(
        self,
        policy: Policy,
        program: Program,
        results: Results,
        hook: Hook[Any] | None,
        recorder: Recorder,
    ) -> None:
        self.finite = True
        self.large = False
        self._policy = policy
        self._program = program
        self._results = results
        self._hook = hook
        self._recorder = recorder
        self._finder = Finder(policy, program.paths)
        # The same on all ranks:
        self._doubts = False  # whether a sum may have overflowed
        self._outgrown = False  # whether weights were above those that gradients were scaled for

    def packed(
        self,
        bucket: int,
        buffer: Tensor,
        peak: float,
        sources: Callable[[int], Sequence[Part] | None],
    ) -> None:
        """Takes note of gradients that were packed.

        Args:
            bucket: theirs.
            buffer: what they were packed into.
            peak: the bound that packing gave.
            sources: gives what was packed into a bucket, where it is still there.
        """
        schedule, planned = self._program.schedule, self._program.plan.buckets[bucket]
        is_finite = not math.isinf(peak)
        limit = max_safe_magnitude(
            schedule.wire_dtypes[bucket], planned.dtype, schedule.topology.world_size
        )
        self.finite = self.finite and is_finite
        self.large = self.large or not peak <= limit
        layout = self._program.layouts[bucket]
        if self._finder.wants(buffer, finite=is_finite):
            parts = sources(bucket)
            grads = None if parts is None else [part.sources for part in parts]
            self._finder.look_into(planned.leaves, layout, buffer, grads)

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
            report.may_overflow > 0
            or bool(report.late)  # of what came late it does not speak
            or self._hook is not None
            or not scale.keeps_range(report.total_weight, report.active)
            or scale.after(report.total_weight) > MOST_AFTER
        )
        is_raw = self._hook is not None and self._hook.raw
        mean = report.total_weight / report.active
        self._outgrown = not is_raw and mean > scale.unit
        has_sparse = any(bucket.sparse for bucket in self._program.plan.buckets)
        self._results.looks = self._results.looks or self._doubts or has_sparse

    def judge_results(self, transport: Transport, step: int) -> None:
        """Looks at what came out; a collective call where ranks hold different results.

        Raises:
            StopStepError: a result is not finite, on all ranks.
        """
        if self._policy == "propagate":
            return
        finite = self._results.finite
        if self._doubts and self._holding != "alike":
            finite = self._all_vote_for(finite, transport, step)
        if not finite:
            raise StopStepError

    def _all_vote_for(self, finite: bool, transport: Transport, step: int) -> bool:
        votes = torch.tensor([not finite], dtype=torch.float64, device=transport.control_device)
        entry = self._recorder.launched("vote on results", step, votes.nbytes)
        try:
            work = transport.all_reduce(votes, wait_soon=True)
            entry.waited_s = time.perf_counter()
            work.wait(f"the vote on results of step {step}")
        except (RankLostError, SyncTimeoutError) as error:
            error.step = step  # it is of no bucket
            raise
        entry.done_s = time.perf_counter()
        return not votes.item()

    def error(self, transport: Transport, step: int) -> NonFiniteError | None:
        """The error of a step that was ended, if callers asked for one; a collective call then."""
        if self._policy != "raise":
            return None
        program, reduced = self._program, set(self._program.reduced)
        leaves = enumerate(self._results.leaves)
        account = self._finder.account([leaf if i in reduced else None for i, leaf in leaves])
        own = account.encode()
        entry = self._recorder.launched("exchange of counts", step, len(own))
        entry.waited_s = entry.launched_s
        accounts = decode_all(transport.exchange(own), Account.decode, "counts")
        entry.done_s = time.perf_counter()
        wires = {
            program.paths[leaf]: program.schedule.wire_dtypes[number]
            for number, bucket in enumerate(program.plan.buckets)
            for leaf in bucket.leaves
        }
        name = None if self._hook is None else self._hook.name
        return nonfinite_error(
            step, accounts, wires, name, holding=self._holding, outgrown=self._outgrown
        )

    @property
    def _holding(self) -> Holding:
        if self._hook is not None and self._hook.raw:
            return "own"
        return "parts" if self._program.schedule.result == "sharded_mean" else "alike"
