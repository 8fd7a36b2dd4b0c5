"""Assertion on the overlap of communication with backward."""

from __future__ import annotations

import math

from fddp import GradSync, SyncInfo
from fddp.extend import entrance

_SMALL = 0.05  # of backward, or of a bucket's exposed time: below it, a wait is no reason


@entrance
def assert_overlap(sync: GradSync, info: SyncInfo, fraction: float) -> None:
    """Assert that at least a fraction of the communication of a step overlaps with backward.

    Args:
        sync: the `GradSync` that took the step.
        info: information on the step, of `with_info=True`; for a step in a graph,
            `sync.graph_info`. On one rank, its first steps have another plan than later ones.
        fraction: from 0 to 1, of the time with a collective in flight on this rank; see
            `Timeline.hidden_fraction`.

    Raises:
        AssertionError: less overlaps. The error names the bucket that ran longest after backward,
            and what it waited for.
        ValueError: `fraction` is out of range.

    Example:
        >>> import fddp, torch
        >>> from fddp.testing import assert_overlap
        >>> def step(group):
        ...     params = [torch.ones(3, 3), torch.ones(3, 3)]
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         take = sync.value_and_grad(lambda p: (p[0] @ p[1]).sum(), with_info=True)
        ...         assert_overlap(sync, take(params)[2], 0.0)
        >>> _ = fddp.loopback(2, step)
    """
    __tracebackhide__ = True
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction={fraction}: it must be from 0 to 1")
    found = info.timeline.to_timeline().hidden_fraction
    if found < fraction:
        raise AssertionError(
            f"{found:.0%} of the communication of step {info.step} overlaps with backward, where "
            f"{fraction:.0%} should; {_reason(sync, info)}"
        )


def _reason(sync: GradSync, info: SyncInfo) -> str:
    times, plan, sequence = info.timeline, sync.plan, sync.schedule.sequence
    start_s, end_s = times.backward_start_s, times.backward_end_s
    known = {bucket.bucket: bucket for bucket in times.buckets if not math.isnan(bucket.launch_s)}
    if not known:
        return "no bucket was sent"

    def name(bucket: int) -> str:
        leaves = plan.buckets[bucket].leaves
        first, last = plan.paths[leaves[0]], plan.paths[leaves[-1]]
        return f"bucket {bucket} ({first if first == last else f'{first} .. {last}'})"

    def at(time_s: float) -> str:
        return f"{(time_s - start_s) * 1e3:.1f} ms"

    worst = max(known.values(), key=lambda bucket: bucket.done_s - max(bucket.launch_s, end_s))
    exposed_s = worst.done_s - max(worst.launch_s, end_s)
    text = f"{name(worst.bucket)} ran for {exposed_s * 1e3:.1f} ms after backward"
    earlier = sequence[: sequence.index(worst.bucket)] if worst.bucket in sequence else ()
    before = [known[bucket] for bucket in earlier if bucket in known]
    last_ready = max(before, key=lambda bucket: bucket.ready_s, default=None)
    if last_ready is not None and last_ready.ready_s > worst.ready_s:
        return (
            f"{text}: it was ready at {at(worst.ready_s)} of {at(end_s)}, and waited for "
            f"{name(last_ready.bucket)}, which comes before it and was ready at "
            f"{at(last_ready.ready_s)}"
        )
    if worst.ready_s > end_s - _SMALL * (end_s - start_s):
        leaves = plan.buckets[worst.bucket].leaves
        when = {leaf: times.leaves_s[leaf] for leaf in leaves if leaf < len(times.leaves_s)}
        latest = max(when, key=lambda leaf: (not math.isnan(when[leaf]), when[leaf]), default=None)
        leaf = "" if latest is None else f", of {plan.paths[latest]!r},"
        return f"{text}: its last gradient{leaf} came at {at(worst.ready_s)} of {at(end_s)}"
    last_done = max(before, key=lambda bucket: bucket.done_s, default=None)
    if last_done is not None and last_done.done_s > worst.launch_s + _SMALL * exposed_s:
        return (
            f"{text}: it was sent at {at(worst.launch_s)} of {at(end_s)}, and the link was busy "
            f"with {name(last_done.bucket)} until {at(last_done.done_s)}"
        )
    return (
        f"{text}: it was sent at {at(worst.launch_s)} of {at(end_s)}, and {worst.nbytes} bytes "
        f"took {(worst.done_s - worst.launch_s) * 1e3:.1f} ms"
    )
