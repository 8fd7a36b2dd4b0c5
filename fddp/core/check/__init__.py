"""Verification of schedules: a proof of the stated result for any number of ranks.

All ranks run the same operations in the same order. One list of operations is therefore executed
symbolically for all ranks (`symbolic.py`), at a cost that depends only on the number of operations.
Each bucket is executed for every decision of the control word (`dataflow.py`). Only dependencies
order operations (`ordering.py`). Buckets of the same form are executed once (`forms.py`).
"""

from __future__ import annotations

from fddp.core.check.execution import check_by_execution
from fddp.core.check.forms import is_proved_by_forms
from fddp.core.check.periodic import check_periodic_schedule
from fddp.core.check.virtual import check_virtual
from fddp.core.schedule.periodic import PeriodicSchedule
from fddp.core.schedule.schedule import Schedule


def check_schedule(schedule: Schedule | PeriodicSchedule) -> None:
    """Prove that a schedule is correct, or raise an error.

    A schedule of one step is correct if, for each bucket and each decision of the control word:

    - each element is unpacked once, on the ranks required by `schedule.result`;
    - it holds the gradient of each rank exactly once, late gradients included, divided by the
      number of ranks ("replicated": it holds the shard of its owner);
    - all ranks issue the same collectives;
    - the control word reaches all ranks, separately or piggybacked on a bucket that can hold it;
    - no operation depends on one that is launched later, which would deadlock;
    - no operation uses memory of an unfinished one, see [Note: required dependencies];
    - with virtual ranks, each is summed once, in the order of the tree, see [Note: virtual ranks].

    A periodic schedule (`fddp.periodic`) is correct if:

    - each leaf is in exactly one fragment;
    - in each period, the collective of each fragment is started once, at the step and along the
      axes that `Fragment.when` states, and its average is applied once, `Fragment.delay` steps
      later;
    - no fragment is started again while its collective is in flight, and none is applied that is
      not in flight.

    The cost does not depend on the number of ranks.

    Raises:
        ScheduleError: the schedule is wrong; the text names the operation or event, bucket, leaf
            and ranks, or the fragment, leaves and step.

    Example:
        >>> import dataclasses
        >>> from fddp.core.schedule.builder import make_schedule
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.topology import Topology
        >>> plan = plan_leaves([LeafSpec("w", (8,), "bfloat16")], order=[0], caps_bytes=[1])
        >>> schedule = make_schedule(plan, Topology(host=8, local=4))
        >>> check_schedule(schedule)
        >>> ops = tuple(op._replace(axes=("local",)) if op.kind == "all_reduce" else op
        ...             for op in schedule.ops)
        >>> check_schedule(dataclasses.replace(schedule, ops=ops))
        Traceback (most recent call last):
        ...
        fddp.errors.ScheduleError: op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0,
        leaf 'w' (elements 0:8), summed along local only: the gradients of ranks 4, 8, 12, ...
        are missing; reduce it along host too
    """
    if isinstance(schedule, PeriodicSchedule):
        check_periodic_schedule(schedule)
        return
    if not is_proved_by_forms(schedule):
        check_by_execution(schedule)
    check_virtual(schedule)
