"""Assertions on schedules: correctness, and equal collectives on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from fddp import Schedule, check_schedule
from fddp.errors import ScheduleError
from fddp.extend import Op, counted, entrance, is_collective, replay


@entrance
def assert_schedule_ok(schedule: Schedule) -> None:
    """Assert that `fddp.check_schedule` proves a schedule.

    Raises:
        AssertionError: the proof fails; the cause is the `ScheduleError`.

    Example:
        >>> from fddp import Topology, make_schedule, plan_buckets
        >>> import torch
        >>> plan = plan_buckets({"w": torch.zeros(4)})
        >>> assert_schedule_ok(make_schedule(plan, Topology(world=2)))
    """
    __tracebackhide__ = True
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        raise AssertionError(str(error)) from error.with_traceback(None)


@entrance
def assert_same_collectives(
    schedule: Schedule,
    arrivals: Sequence[Sequence[int]],
    *,
    expected: Sequence[Sequence[int]] | None = None,
) -> tuple[Op, ...]:
    """Assert that ranks issue the same collectives in the same order for these arrivals.

    Each rank's arrivals are replayed through the launch rule, which yields its late buckets. Before
    the control word, a rank decides by its own late buckets; after it, by those of all ranks.

    Args:
        schedule: the operations.
        arrivals: for each rank, indices of the plan's leaves in the order in which gradients
            arrive, as drawn by the strategy `arrivals`. Any number of ranks.
        expected: for each rank, the expected number of gradients of each of the plan's leaves; by
            default 1.

    Returns:
        The collectives that all ranks issue, in order.

    Raises:
        AssertionError: ranks diverge; the text names the ranks and their operations.
        ValueError: `arrivals` is empty, or `expected` has another length.

    Example:
        >>> from fddp import Topology, make_schedule, plan_buckets
        >>> import torch
        >>> tree = {"a": torch.zeros(4), "b": torch.zeros(4)}
        >>> plan = plan_buckets(tree, bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
        >>> schedule = make_schedule(plan, Topology(world=2))
        >>> ops = assert_same_collectives(schedule, [[1, 0, 1], []])
        >>> [(op.kind, op.bucket, op.when) for op in ops]  # bucket 0 has leaf 1
        [('all_reduce', 0, 'always'), ('all_reduce', 1, 'always'), ('all_reduce', 0, 'late')]
    """
    __tracebackhide__ = True
    if not arrivals:
        raise ValueError("arrivals must have a list for each rank, got none")
    counts = expected or [[1] * len(schedule.plan.leaves)] * len(arrivals)
    if len(counts) != len(arrivals):
        raise ValueError(
            f"expected has {counted(len(counts), 'rank')}, and arrivals has {len(arrivals)}"
        )
    late = [
        replay(schedule, own, wanted).late for own, wanted in zip(arrivals, counts, strict=True)
    ]
    everywhere = frozenset[int]().union(*late)
    issued = [_issued(schedule, own, everywhere) for own in late]
    for rank, positions in enumerate(issued):
        if positions != issued[0]:
            raise AssertionError(_first_divergence(schedule, rank, issued[0], positions))
    return tuple(schedule.ops[position] for position in issued[0])


def _issued(schedule: Schedule, own: frozenset[int], everywhere: frozenset[int]) -> list[int]:
    """Return the positions of the collectives of a rank with late buckets `own`."""
    known, positions = own, []
    for position, op in enumerate(schedule.ops):
        if is_collective(op) and (op.when == "always" or op.bucket in known):
            positions.append(position)
        if position == max(schedule.control, schedule.piggyback_op):
            known = everywhere
    return positions


def _first_divergence(schedule: Schedule, rank: int, first: list[int], other: list[int]) -> str:
    step = next(
        (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),
    )
    operations = [
        schedule.describe(positions[step]) if step < len(positions) else "nothing more"
        for positions in (first, other)
    ]
    return (
        f"ranks diverge at collective {step}: rank 0 issues {operations[0]} where rank {rank} "
        f"issues {operations[1]}; let conditions that may differ between ranks depend on the "
        f"control word"
    )
