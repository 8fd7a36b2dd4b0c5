"""Detection of non-finite numbers in one step.

All ranks must reach the same decision. Contributions: the control word counts the ranks with
non-finite ones. Results: all ranks have the same bits of replicated results, so each rank decides
alone. Ranks vote on shards and on results of raw hooks, which may differ from rank to rank. Results
are only checked if the control word does not rule out an overflow; those of hooks always are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fddp.core.numerics.overflow import MOST_AFTER
from fddp.core.protocol.control_word import ControlReport
from fddp.errors import NonFiniteError, RankLostError, SyncTimeoutError
from fddp.hooks.hook import Hook
from fddp.native.layout import views
from fddp.runtime.agreement import exchange
from fddp.runtime.contributions import Leaves, WeightedGradients
from fddp.runtime.nonfinite import (
    COUNTS,
    Count,
    NonFiniteCounts,
    Policy,
    ResultKind,
    StopStepError,
    counted,
    nonfinite_error,
    tally,
)
from fddp.runtime.program import BucketProgram, Program
from fddp.runtime.results import Results
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport.base import Transport
from fddp.tree.pytree import flatten


class FiniteCheck:
    """Checks the numbers of one step. `recorder` records the votes and exchanges."""

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
        self._tallies: list[tuple[int, Tensor]] = []  # by leaf, still on their devices
        # The same on all ranks:
        self._may_have_overflowed = False

    @property
    def names_leaves(self) -> bool:
        """True if errors name the leaves of gradients."""
        return self._policy == "raise"

    def packed(
        self,
        bucket: BucketProgram,
        buffer: Tensor,
        sources: Sequence[WeightedGradients] | None,
        *,
        finite: bool,
        again: bool,
    ) -> None:
        """Count non-finite numbers of a packed bucket, if errors are to name its leaves.

        Args:
            bucket: the bucket.
            buffer: its memory, which is not reduced yet.
            sources: as in `Packed`.
            finite: finding of packing.
            again: True if all gradients of the bucket were packed a second time.
        """
        if again:
            self._forget(bucket)
        # Packing checks on the CPU only.
        if self._policy != "raise" or (finite and buffer.is_cpu):
            return
        if sources is None:
            self._count(bucket, [views(buffer, bucket.layout)])
        else:
            self._count(bucket, [part.sources for part in sources])

    def gathered(self, leaf: int, sources: list[Tensor | None]) -> None:
        """Count non-finite numbers of this rank's gradients of a sparse leaf, after the sum."""
        if self._policy == "raise" and not self._results.finite:
            self._count_sparse(leaf, sources)

    def on_report(
        self, report: ControlReport, sources_of: Callable[..., list[WeightedGradients]]
    ) -> None:
        """Act on the control word. `sources_of` is `Step.sources`.

        Raises:
            StopStepError: a contribution is not finite; on all ranks.
        """
        if report.nonfinite:
            if self._policy == "raise":
                self._count_unpacked(report.late, sources_of)
            raise StopStepError
        self._may_have_overflowed = (
            report.may_overflow > 0
            or bool(report.late)  # late gradients are not part of the control word
            or self._hook is not None
            or self._program.scale.after(report.total_weight) > MOST_AFTER
        )
        has_sparse = any(bucket.sparse for bucket in self._program.plan.buckets)
        if self._may_have_overflowed or has_sparse:
            self._results.check_finite()

    def _count_unpacked(
        self, late: Collection[int], sources_of: Callable[..., list[WeightedGradients]]
    ) -> None:
        """Count non-finite numbers of sparse and late gradients, which are not packed before the
        control word is read."""
        retained = self._program.schedule.retained
        for bucket in self._program.buckets:
            index = bucket.index
            if bucket.sparse:
                (leaf,) = bucket.leaves
                self._count_sparse(leaf, [part.sources[0] for part in sources_of(index)])
            elif index in late:
                if index in retained:
                    self._forget(bucket)
                sources = sources_of(index, late=index not in retained)
                self._count(bucket, [part.sources for part in sources])

    def _count(self, bucket: BucketProgram, grads: Sequence[Leaves]) -> None:
        """Count non-finite numbers of dense gradients, given by summand and leaf."""
        for leaf, *summands in zip(bucket.leaves, *grads, strict=True):
            present = [summand for summand in summands if summand is not None]
            if present:
                self._tallies.append((leaf, tally(*present)))

    def _count_sparse(self, leaf: int, sources: Leaves) -> None:
        self._tallies += [(leaf, tally(source)) for source in sources if source is not None]

    def _forget(self, bucket: BucketProgram) -> None:
        """Remove the counts of a bucket whose gradients are counted again."""
        self._tallies = [pair for pair in self._tallies if pair[0] not in bucket.leaves]

    def check_results(self, transport: Transport, step: int) -> None:
        """Check the results; a collective call if ranks have different results. Raises
        StopStepError if one is not finite, on all ranks."""
        finite = self._results.finite
        if self._may_have_overflowed and self._result_kind != "replicated":
            finite = self._vote(finite, transport, step)
        if not finite:
            raise StopStepError

    def _vote(self, finite: bool, transport: Transport, step: int) -> bool:
        votes = torch.tensor([not finite], dtype=torch.float64, device=transport.control_device)
        sum_votes(votes, transport, self._recorder, step)
        return not votes.item()

    def error(
        self, transport: Transport, step: int, states: Sequence[Any]
    ) -> NonFiniteError | None:
        """Return the error of a stopped step under the policy "raise", after a collective call;
        else None. `states` are those of the hook, by bucket, before the step."""
        if self._policy != "raise":
            return None
        program, leaves = self._program, self._results.leaves
        tallies = sorted(self._tallies, key=lambda pair: pair[0])
        sums = [(i, tally(leaf)) for i in program.plan.reduced if (leaf := leaves[i]) is not None]
        counts, overflowed = (
            counted((program.plan.paths[i], numbers) for i, numbers in found)
            for found in (tallies, sums)
        )
        own = NonFiniteCounts(counts, overflowed, states=_in_states(states)).to_json()
        entry = self._recorder.launched("exchange of counts", step, len(json.dumps(own)))
        entry.note_wait()
        received = exchange(transport, own, COUNTS, "counts")
        entry.note_done()
        wires = {
            program.plan.paths[leaf]: program.schedule.wire_dtypes[number]
            for number, bucket in enumerate(program.plan.buckets)
            for leaf in bucket.leaves
        }
        name = None if self._hook is None else self._hook.name
        return nonfinite_error(
            step,
            [NonFiniteCounts.from_json(counts) for counts in received],
            wires,
            name,
            result_kind=self._result_kind,
        )

    @property
    def _result_kind(self) -> ResultKind:
        if self._hook is not None and self._hook.raw:
            return "own"
        return "sharded" if self._program.schedule.result == "sharded_mean" else "replicated"


def sum_votes(votes: Tensor, transport: Transport, recorder: Recorder, step: int) -> None:
    """Replace votes on the results of a step by their sums over ranks."""
    entry = recorder.launched("vote on results", step, votes.nbytes)
    try:
        work = transport.all_reduce(votes, wait_soon=True)
        entry.note_wait()
        work.wait(f"the vote on results of step {step}")
    except (RankLostError, SyncTimeoutError) as error:
        error.step = step  # it is of no bucket
        raise
    entry.note_done()


def _in_states(states: Sequence[Any]) -> dict[str, Count]:
    """Count non-finite numbers in the states of a hook."""
    found: list[tuple[str, Tensor]] = []
    for bucket, state in enumerate(states):
        leaves, treedef = flatten(state)
        for path, leaf in zip(treedef.paths, leaves, strict=True):
            if isinstance(leaf, Tensor):
                found.append((f"{path} of bucket {bucket}", tally(leaf)))
    return counted(found)
