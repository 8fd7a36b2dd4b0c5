"""Stages of communication hooks in a schedule.

[Note: stages in one order]
A hook reduces a bucket by several collectives, each of which needs the result of the one before.
Ranks must issue collectives in the same order, and learn at different times that one has finished.
So each stage is an operation of the schedule: "stage" operations, and the reduction itself as the
last stage. After the first stage of a bucket comes one further stage of each earlier bucket that
has one, latest first. Before an operation that needs a bucket's result, or the control word, come
rounds of one stage of each unfinished bucket. So two stages of three buckets, 0.1 to 2.2, and the
control word go out in the order 0.1, 1.1, 0.2, 2.1, control, 1.2, 2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import Schedule


def with_stages(
    schedule: Schedule, reductions: Mapping[int, int], stages: int, *, in_turn: bool = False
) -> Schedule:
    """Divide one reduction of each bucket into stages; see [Note: stages in one order].

    Args:
        schedule: a schedule with a separate control word.
        reductions: for each bucket, the position of the reduction.
        stages: number of stages; 1 changes nothing.
        in_turn: True if a bucket's reduction starts only when that of the one before has finished.

    Example:
        >>> import fddp, torch
        >>> tree = {"a": torch.ones(2), "b": torch.ones(2)}
        >>> plan = fddp.plan_buckets(tree, bucket_cap_mb=[8e-6])
        >>> schedule = fddp.make_schedule(plan, fddp.Topology(world=2), piggyback=False)
        >>> [(op.kind, op.bucket) for op in schedule.ops if op.when == "always"]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('pack', 0), ('all_reduce', 0), ('pack', 1), ('all_reduce', 1), ('control', -1),
         ('unpack', 0), ('unpack', 1)]
        >>> staged = with_stages(schedule, {0: 1, 1: 3}, stages=2)
        >>> [(op.kind, op.bucket) for op in staged.ops if op.when == "always"]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('pack', 0), ('stage', 0), ('pack', 1), ('stage', 1), ('control', -1),
         ('all_reduce', 0), ('all_reduce', 1), ('unpack', 0), ('unpack', 1)]
    """
    if stages == 1 and not in_turn:
        return schedule
    builder = _Builder(schedule, reductions, stages, in_turn=in_turn)
    return replace(schedule, ops=builder.build())


def count_stages(schedule: Schedule) -> int:
    """Return the number of stages in which each bucket is reduced; 0 without stages of a hook."""
    counts = Counter(op.bucket for op in schedule.ops if op.kind == "stage")
    return 1 + max(counts.values()) if counts else 0


class _Builder:
    def __init__(
        self, schedule: Schedule, reductions: Mapping[int, int], stages: int, *, in_turn: bool
    ) -> None:
        self._old = schedule.ops
        self._reductions = reductions
        self._stages = stages
        self._in_turn = in_turn
        self._ops: list[Op] = []
        self._position_of: dict[int, int] = {}  # by old position; of a reduction, its last stage
        self._started: dict[int, int] = {}  # by unfinished bucket: stages so far
        self._latest: dict[int, int] = {}  # by bucket: position of the latest stage
        self._finished = -1  # position of the last stage that was the last of its bucket

    def build(self) -> tuple[Op, ...]:
        bucket_of = {position: bucket for bucket, position in self._reductions.items()}
        due: list[int] = []  # buckets with a stage before the next operation
        for position, op in enumerate(self._old):
            if op.kind != "control":
                self._advance(due)
                due = []
            if position in bucket_of:
                due = list(reversed(self._started))
                self._start(bucket_of[position])
                continue
            needed = {bucket_of[dep] for dep in op.deps if dep in bucket_of}
            if op.when != "always" or op.kind in ("gather", "unpack"):  # reads the control word
                needed.update(self._started)
            while needed & self._started.keys():
                self._advance(list(self._started))
            self._position_of[position] = self._append(op, self._moved(op.deps))
        return tuple(self._ops)

    def _start(self, bucket: int) -> None:
        while self._in_turn and self._started:
            self._advance(list(self._started))
        deps = self._moved(self._old[self._reductions[bucket]].deps)
        if self._in_turn and self._finished >= 0:
            deps = tuple(dict.fromkeys((*deps, self._finished)))
        self._started[bucket] = 0
        self._append_stage(bucket, deps)

    def _advance(self, buckets: list[int]) -> None:
        for bucket in buckets:
            if bucket in self._started:
                self._append_stage(bucket, (self._latest[bucket],))

    def _append_stage(self, bucket: int, deps: tuple[int, ...]) -> None:
        position = self._reductions[bucket]
        self._started[bucket] += 1
        if self._started[bucket] < self._stages:
            self._latest[bucket] = self._append(self._old[position]._replace(kind="stage"), deps)
        else:
            self._position_of[position] = self._finished = self._append(self._old[position], deps)
            del self._started[bucket]

    def _append(self, op: Op, deps: tuple[int, ...]) -> int:
        self._ops.append(op._replace(deps=deps))
        return len(self._ops) - 1

    def _moved(self, deps: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._position_of[dep] for dep in deps)
