"""What a finished session shows: the `SyncInfo` of its step."""

from __future__ import annotations

import math
import time

from fddp.core.protocol.readiness import Action
from fddp.core.timeline import BucketTimes, StepTimes
from fddp.native.pack import Stats
from fddp.runtime.context import BucketState, Outcome
from fddp.runtime.contributions import BackwardContributions
from fddp.runtime.step import Session
from fddp.telemetry.step_info import SyncInfo, Trace
from fddp.telemetry.waits import waits_since


def make_info(
    session: Session,
    outcome: Outcome,
    backward_s: tuple[float, float],
    *,
    begun_s: float = math.inf,
) -> SyncInfo:
    """What a session showed, on the thread that has ended it.

    Args:
        session: a finished one, with stamps.
        outcome: what it ended with.
        backward_s: when backward began and ended.
        begun_s: when the forward pass began, if that was before the session was opened.
    """
    program, report, setting = session.setting.program, outcome.report, session.setting
    end_s = time.perf_counter()
    stats = outcome.stats or Stats(math.nan, False)
    begun_s = min(begun_s, session.opened_s, backward_s[0])
    flags = list(zip(program.reduced, report.used, strict=True))
    return SyncInfo(
        step=setting.step,
        world_size=setting.transport.world_size,
        active=report.active,
        total_weight=report.total_weight,
        used=tuple(program.paths[leaf] for leaf, used in flags if used),
        unused=tuple(program.paths[leaf] for leaf, used in flags if not used),
        grad_norm=math.sqrt(stats.sq_norm),
        all_finite=stats.finite and report.nonfinite == 0,
        repaired=tuple(action.bucket for _, action in session.log if action.kind == "repair"),
        transport=setting.transport.name,
        transport_reason=setting.transport.reason,
        timeline=StepTimes(
            _bucket_times(session, end_s),
            *backward_s,
            end_s,
            _leaves_s(session),
            begun_s=begun_s,
            waits=waits_since(begun_s),
            hooks=tuple(session.hook_spans),
        ),
        trace=_trace(session),
        skipped=outcome.skipped,
    )


def _trace(session: Session) -> Trace:
    contributions, program = session.contributions, session.setting.program
    if not isinstance(contributions, BackwardContributions) or not contributions.expected:
        return Trace((), (), (), ())
    events: list[int | Action] = []
    arrivals, told = contributions.arrival_log(), 0
    for count, action in session.log:
        events += [*arrivals[told:count], action]
        told = count
    bucket_of = dict.fromkeys(range(len(program.differentiated)), -1)
    for bucket, members in enumerate(program.member_numbers):
        bucket_of.update(dict.fromkeys(members, bucket))
    return Trace(
        program.schedule.sequence, tuple(bucket_of.values()), contributions.expected, tuple(events)
    )


def _leaves_s(session: Session) -> tuple[float, ...]:
    leaves_s = [math.nan] * len(session.setting.program.plan.leaves)
    for leaf, time_s in session.ready_times_s().items():
        leaves_s[leaf] = time_s
    return tuple(leaves_s)


def _bucket_times(session: Session, end_s: float) -> tuple[BucketTimes, ...]:
    numels = session.setting.program.schedule.buffer_numels  # without the control word's tail
    return tuple(_times(b, state, numels[b], end_s) for b, state in enumerate(session.buckets))


def _times(bucket: int, state: BucketState, numel: int, end_s: float) -> BucketTimes:
    """Sparse buckets travel after the end of backward and have no stamps of their own."""
    last = state.work or state.hooked
    done_s = last.done_s if last is not None else None
    held = 0 if state.buffer is None else numel * state.buffer.element_size()
    return BucketTimes(
        bucket=bucket,
        nbytes=held if state.hooked is None else state.hooked.nbytes,
        ready_s=state.ready_s,
        launch_s=state.ready_s if math.isnan(state.launch_s) else state.launch_s,
        done_s=end_s if done_s is None else done_s,
    )
