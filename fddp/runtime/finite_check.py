"""What one step makes of numbers that are not finite: finds them, and ends the step if that is due.

All ranks decide alike. By contributions, because the control word counts the ranks whose are not
finite. By results, because whole ones have the same bits on all ranks. Of shards the ranks vote, in
steps in which the control word leaves a doubt; in other steps nobody looks at results. Of what a
hook of torch's kind gives they vote in each step: it may be each rank's own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from fddp.core.numerics.overflow import MOST_AFTER
from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.messages import decode_all
from fddp.errors import NonFiniteError, RankLostError, SyncTimeoutError
from fddp.hooks.hook import Hook
from fddp.runtime.contributions import Contributions
from fddp.runtime.nonfinite import Account, Finder, Holding, Policy, StopStepError, nonfinite_error
from fddp.runtime.program import BucketProgram, Program
from fddp.runtime.results import Results
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport.base import Transport


class FiniteCheck:
    """Judges the numbers of one step.

    Args:
        policy: what becomes of the step if one is not finite.
        program: what the step carries out.
        results: is told whether to look at what is put in.
        hook: the communication hook; None where there is none.
        recorder: takes note of votes and of what ranks tell each other.
    """

    def __init__(
        self,
        policy: Policy,
        program: Program,
        results: Results,
        hook: Hook[Any] | None,
        recorder: Recorder,
    ) -> None:
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
        self, bucket: BucketProgram, buffer: Tensor, source: Contributions, *, finite: bool
    ) -> None:
        """Look into a packed bucket, if errors are to name its leaves.

        Args:
            bucket: the bucket.
            buffer: its buffer, which is reduced in place later.
            source: contributions that were packed.
            finite: False if packing found a number that is not finite.
        """
        if self._finder.wants(buffer, finite=finite):
            parts = source.sources(bucket.index)
            grads = None if parts is None else [part.sources for part in parts]
            self._finder.look_into(bucket.leaves, bucket.layout, buffer, grads)

    def gathered(self, leaf: int, sources: list[Tensor | None]) -> None:
        """Takes note of this rank's gradients of a sparse leaf, whose sum is there."""
        if not self._results.finite:
            self._finder.look_at([leaf] * len(sources), sources)

    def on_report(self, report: ControlReport, scale: WeightScale) -> None:
        """Draws the consequences of the control word.

        Raises:
            StopStepError: a contribution is not finite, on all ranks.
        """
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

    def check_results(self, transport: Transport, step: int) -> None:
        """Looks at what came out; a collective call where ranks hold different results.

        Raises:
            StopStepError: a result is not finite, on all ranks.
        """
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
