"""`SyncInfo` of a finished step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from fddp.core.numerics.noise_scale import SquaredNorms
from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.launch import TraceAction
from fddp.core.timeline import BucketTimes, StepTimes
from fddp.native.pack import Stats
from fddp.runtime.contributions import ArrivingContributions, BackwardContributions
from fddp.runtime.hook_sums import HookSums, StageWork
from fddp.runtime.step import Outcome, Step
from fddp.telemetry.step_info import SyncInfo, Trace
from fddp.telemetry.waits import waits_since


def make_info(
    outcome: Outcome, backward_s: tuple[float, float], *, begun_s: float = math.inf
) -> SyncInfo:
    """Return the `SyncInfo` of a finished step; to be called on the thread that finished it.

    Args:
        outcome: outcome of a step with `record_time`.
        backward_s: times at which backward began and ended.
        begun_s: time at which the forward pass began, if that was before the step was opened.
    """
    step, report = outcome.step, outcome.report
    assert report is not None
    program, transport = step.program, step.transport
    end_s = time.perf_counter()
    skipped = outcome.skipped or (step.flags is not None and step.flags.has_skipped)
    stats = Stats(math.nan, False) if skipped else outcome.stats or Stats(math.nan, False)
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
            hooks=tuple(step.sums.spans) if isinstance(step.sums, HookSums) else (),
        ),
        trace=_trace(step),
        skipped=skipped,
        stop=report.stop > 0,
        squared_norms=_squared_norms(step, report, stats.sq_norm),
        held_bytes=step.pool.held_bytes(),
    )


def _squared_norms(step: Step, report: ControlReport, sq_norm: float) -> dict[str, SquaredNorms]:
    """Squared norms by group of leaves; that of the whole mean is `sq_norm`."""
    groups = step.program.groups
    if not groups:
        return {}
    means = [sq_norm]
    if math.isnan(sq_norm) or report.late:  # late gradients are not in the control word
        means = [math.nan] * len(groups)
    elif len(groups) > 1:
        means = step.program.by_group(step.results.squares)
    totals: Sequence[float] = report.squares
    if report.measured < step.transport.world_size:
        totals = [math.nan] * len(groups)
    numbers = zip(groups, step.own_squares, totals, means, strict=True)
    return {
        name: SquaredNorms(own, total, mean, report.active, report.total_weight)
        for name, own, total, mean in numbers
    }


def ready_times_s(step: Step) -> dict[int, float]:
    """Return the time of the last gradient of each differentiable leaf, on the clock of
    `time.perf_counter`; NaN for leaves without gradient."""
    own, leaves = step.contributions, step.program.differentiated
    if isinstance(own, ArrivingContributions):
        return {leaf: own.times_s[leaf] for leaf in leaves}
    if not isinstance(own, BackwardContributions):
        return dict.fromkeys(leaves, step.begun_s)
    times_s = dict.fromkeys(leaves, math.nan)
    if own.leaf_set is not None:
        for number, time_s in zip(
            own.leaf_set.arrivals(), own.leaf_set.arrival_times(), strict=True
        ):
            times_s[leaves[number]] = time_s
    return times_s


def _trace(step: Step) -> Trace:
    contributions, program = step.contributions, step.program
    if not contributions.expected:
        return Trace((), (), (), ())
    events: list[int | TraceAction] = []
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
    for leaf, time_s in ready_times_s(step).items():
        leaves_s[leaf] = time_s
    return tuple(leaves_s)


def _bucket_times(step: Step, end_s: float) -> tuple[BucketTimes, ...]:
    """Times of the buckets. Sparse buckets are gathered after backward and have no times."""
    numels = step.program.schedule.buffer_numels  # without the control word's tail
    times = []
    for bucket, (ready_s, launch_s) in enumerate(
        zip(step.executor.ready_s(), step.executor.launch_s(), strict=True)
    ):
        work, buffer = step.works.get(bucket), step.executor.buffer(bucket)
        done_s = None if work is None else work.done_s
        nbytes = 0 if buffer is None else numels[bucket] * buffer.element_size()
        times.append(
            BucketTimes(
                bucket=bucket,
                nbytes=work.nbytes if isinstance(work, StageWork) else nbytes,
                ready_s=ready_s,
                launch_s=ready_s if math.isnan(launch_s) else launch_s,
                done_s=end_s if done_s is None else done_s,
            )
        )
    return tuple(times)
