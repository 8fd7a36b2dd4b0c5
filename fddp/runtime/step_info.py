"""`SyncInfo` of a finished step."""

from __future__ import annotations

import math
import time

from fddp.core.protocol.readiness import Action
from fddp.core.timeline import BucketTimes, StepTimes
from fddp.native.pack import Stats
from fddp.runtime.contributions import BackwardContributions
from fddp.runtime.hook_step import HookedBucket
from fddp.runtime.state import BucketState, Outcome
from fddp.runtime.step import Step
from fddp.telemetry.step_info import SyncInfo, Trace
from fddp.telemetry.waits import waits_since


def make_info(
    step: Step, outcome: Outcome, backward_s: tuple[float, float], *, begun_s: float = math.inf
) -> SyncInfo:
    """Return the `SyncInfo` of a finished step; to be called on the thread that finished it.

    Args:
        step: a step with `record_time`.
        outcome: outcome of the step.
        backward_s: times at which backward began and ended.
        begun_s: time at which the forward pass began, if that was before the step was opened.
    """
    program, report, transport = step.program, outcome.report, step.transport
    end_s = time.perf_counter()
    stats = outcome.stats or Stats(math.nan, False)
    begun_s = min(begun_s, step.opened_s, backward_s[0])
    flags = list(zip(program.plan.reduced, report.used, strict=True))
    return SyncInfo(
        step=step.number,
        world_size=transport.world_size,
        active=report.active,
        total_weight=report.total_weight,
        used=tuple(program.plan.paths[leaf] for leaf, used in flags if used),
        unused=tuple(program.plan.paths[leaf] for leaf, used in flags if not used),
        grad_norm=math.sqrt(stats.sq_norm),
        all_finite=stats.finite and report.nonfinite == 0,
        repaired=tuple(action.bucket for _, action in step.log if action.kind == "repair"),
        transport=transport.name,
        transport_reason=transport.reason,
        timeline=StepTimes(
            _bucket_times(step, end_s),
            *backward_s,
            end_s,
            _leaves_s(step),
            begun_s=begun_s,
            waits=waits_since(begun_s),
            hooks=tuple(step.hook_spans),
        ),
        trace=_trace(step),
        skipped=outcome.skipped,
    )


def _trace(step: Step) -> Trace:
    contributions, program = step.contributions, step.program
    if not isinstance(contributions, BackwardContributions) or not contributions.expected:
        return Trace((), (), (), ())
    events: list[int | Action] = []
    arrivals = contributions.leaf_set.arrivals() if contributions.leaf_set else []
    logged = 0
    for count, action in step.log:
        events += [*arrivals[logged:count], action]
        logged = count
    bucket_of = dict.fromkeys(range(len(program.differentiated)), -1)
    for bucket, members in enumerate(program.member_numbers):
        bucket_of.update(dict.fromkeys(members, bucket))
    return Trace(
        program.schedule.sequence,
        tuple(bucket_of.values()),
        tuple(contributions.expected),
        tuple(events),
    )


def _leaves_s(step: Step) -> tuple[float, ...]:
    leaves_s = [math.nan] * len(step.program.plan.leaves)
    for leaf, time_s in step.ready_times_s().items():
        leaves_s[leaf] = time_s
    return tuple(leaves_s)


def _bucket_times(step: Step, end_s: float) -> tuple[BucketTimes, ...]:
    numels = step.program.schedule.buffer_numels  # without the control word's tail
    return tuple(_times(b, state, numels[b], end_s) for b, state in enumerate(step.buckets))


def _times(bucket: int, state: BucketState, numel: int, end_s: float) -> BucketTimes:
    """Times of a bucket. Sparse buckets are gathered after backward and have no times."""
    work = state.hooked if isinstance(state, HookedBucket) else None
    hooked = None if work is None else work.collectives
    last = state.work or hooked
    done_s = None if last is None else last.done_s
    nbytes = 0 if state.buffer is None else numel * state.buffer.element_size()
    return BucketTimes(
        bucket=bucket,
        nbytes=nbytes if hooked is None else hooked.nbytes,
        ready_s=state.ready_s,
        launch_s=state.ready_s if math.isnan(state.launch_s) else state.launch_s,
        done_s=end_s if done_s is None else done_s,
    )
