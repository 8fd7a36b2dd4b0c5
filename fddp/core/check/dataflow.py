"""Symbolic execution of the operations of one bucket.

A buffer is a list of pieces: ranges of elements with the same history. A piece that is not sharded
can be cut further, for example if parts of a bucket are reduced separately. A sharded piece can't,
because the bounds of its chunks depend on its start and stop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from fddp.core.check.explain import explain
from fddp.core.check.findings import Location, fail_bucket, join_names, nontrivial, paths_in
from fddp.core.check.ordering import Order
from fddp.core.check.symbolic import Algebra, Branch, Value
from fddp.core.schedule.op import Buffer, Op
from fddp.core.schedule.schedule import Schedule
from fddp.core.text import leaf_text


class _Piece(NamedTuple):
    """Elements with the same history."""

    start: int
    stop: int
    shard: tuple[str, ...]  # axes of size above 1 that divide the elements, outer cut first
    value: Value  # of each element
    last: int  # position of the last operation on the elements
    unpacked: bool = False  # by that operation

    def clip(self, start: int, stop: int) -> _Piece:
        return self._replace(start=max(start, self.start), stop=min(stop, self.stop))


class _Memory:
    """Pieces of one buffer, in ascending order and without overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []

    def find(self, start: int, stop: int) -> list[_Piece]:
        """Return the pieces that overlap with [start, stop)."""
        i, j = self._range(start, stop)
        return self._pieces[i:j]

    def put(self, start: int, stop: int, pieces: list[_Piece]) -> None:
        """Replace [start, stop) by the given pieces."""
        i, j = self._range(start, stop)
        if i < j:
            first, last = self._pieces[i], self._pieces[j - 1]
            left = [first._replace(stop=start)] if first.start < start else []
            right = [last._replace(start=stop)] if last.stop > stop else []
            pieces = [*left, *pieces, *right]
        self._pieces[i:j] = pieces
        self._starts[i:j] = [piece.start for piece in pieces]

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        i, j = bisect_right(self._starts, start), bisect_left(self._starts, stop)
        if i and self._pieces[i - 1].stop > start:
            i -= 1
        return i, max(i, j)


class Flow:
    """Symbolic execution of one bucket for one decision of the control word."""

    def __init__(
        self, schedule: Schedule, bucket: int, branch: Branch, algebra: Algebra, order: Order
    ) -> None:
        self._schedule = schedule
        self._bucket = bucket
        self._branch = branch
        self._algebra = algebra
        self._order = order
        self._memory: dict[Buffer, _Memory] = {"bucket": _Memory(), "repair": _Memory()}

    def follow(self, positions: Sequence[int]) -> None:
        """Execute the operations at `positions`, in launch order, and check the result.

        Raises:
            ScheduleError: the input of an operation is invalid, or the result is wrong.
        """
        for position in positions:
            op = self._schedule.ops[position]
            if op.when in self._branch.whens and op.region.start < op.region.stop:
                _STEPS[op.kind](self, Location(self._schedule, position), op)
        self._check_all_is_unpacked()

    # Operations

    def _pack(self, at: Location, op: Op) -> None:
        start, stop, memory = op.region.start, op.region.stop, self._memory[op.region.buffer]
        for piece in memory.find(start, stop):
            if self._schedule.result == "replicated":
                at.fail(
                    f"op {piece.last} already uses the elements {piece.start}:{piece.stop}; pack "
                    f"the shards of each element once"
                )
            self._check_free(at, piece)
            if piece.shard and not start <= piece.start <= piece.stop <= stop:
                self._fail_extent(at, piece)
        shard = nontrivial(self._schedule, op.region.shard)
        value = self._algebra.packed(op.when, self._branch)
        memory.put(start, stop, [_Piece(start, stop, shard, value, at.position)])

    def _gather(self, at: Location, op: Op) -> None:
        start, stop = op.region.start, op.region.stop
        value = self._algebra.gathered_sparse(self._branch)
        self._memory["bucket"].put(start, stop, [_Piece(start, stop, (), value, at.position)])

    def _stage(self, at: Location, op: Op) -> None:
        self._change(at, op, lambda value, axes: value)

    def _reduce_scatter(self, at: Location, op: Op) -> None:
        pieces = self._reduce(at, op)
        shard = nontrivial(self._schedule, (*op.region.shard, *op.axes))
        if shard == pieces[0].shard:
            return  # along axes of size 1, the only chunk is the whole region
        start, stop = op.region.start, op.region.stop
        if any(piece.value != pieces[0].value for piece in pieces):
            at.fail(
                f"parts of its elements {start}:{stop} are results of different reductions, and a "
                f"chunk may hold elements of several; reduce-scatter each part separately"
            )
        whole = pieces[0]._replace(start=start, stop=stop, shard=shard)
        self._memory[op.region.buffer].put(start, stop, [whole])

    def _reduce(self, at: Location, op: Op) -> list[_Piece]:
        divided = [axis for axis in nontrivial(self._schedule, op.axes) if axis in op.region.shard]
        if divided:
            at.fail(
                f"its elements are sharded along {join_names(op.region.shard)}: ranks along "
                f"{divided[0]} hold different elements, which would be summed; all-gather them "
                f"first, or omit the axis {divided[0]!r}"
            )
        pieces = self._change(at, op, self._algebra.reduced)
        if self._schedule.deterministic:
            self._check_association(at, op, pieces)
        return pieces

    def _check_association(self, at: Location, op: Op, pieces: Sequence[_Piece]) -> None:
        """Check that sums run along the innermost axes first, as deterministic schedules do."""
        names = nontrivial(self._schedule, self._schedule.topology.names)
        for summed in {term.summed for piece in pieces for term, _ in piece.value}:
            inmost = names[len(names) - len(summed) :]
            if summed != {*inmost}:
                at.fail(
                    f"it sums along {join_names(nontrivial(self._schedule, op.axes))} before the "
                    f"inner axes, but the schedule is deterministic; sum along "
                    f"{join_names(inmost)} first"
                )

    def _all_gather(self, at: Location, op: Op) -> None:
        shard = op.region.shard
        kept = len(shard) - len(op.axes)
        if kept < 0 or shard[kept:] != op.axes:
            at.fail(
                f"it gathers chunks along {join_names(op.axes)}, but its elements are sharded "
                f"along {join_names(shard) or 'no axis'}; gather along the last of these axes "
                f"first"
            )
        kept_shard = nontrivial(self._schedule, shard[:kept])
        pieces = self._change(at, op, self._algebra.gathered)
        joined_pieces = [piece._replace(shard=kept_shard) for piece in pieces]
        self._memory[op.region.buffer].put(op.region.start, op.region.stop, joined_pieces)

    def _change(
        self, at: Location, op: Op, change: Callable[[Value, tuple[str, ...]], Value]
    ) -> list[_Piece]:
        """Apply a collective to the values of its region and return the new pieces."""
        memory = self._memory[op.region.buffer]
        pieces = [
            piece._replace(value=change(piece.value, op.axes))
            for piece in self._take(at, op, op.region.buffer)
        ]
        memory.put(op.region.start, op.region.stop, pieces)
        return pieces

    def _add(self, at: Location, op: Op) -> None:
        targets = self._take(at, op, "bucket")
        repairs = self._take(at, op, "repair")
        # Pieces that are not sharded may be cut differently in the two buffers.
        sums = [
            target.clip(repair.start, repair.stop)._replace(
                value=self._algebra.added(target.value, repair.value)
            )
            for target in targets
            for repair in repairs
            if target.start < repair.stop and repair.start < target.stop
        ]
        self._memory["bucket"].put(op.region.start, op.region.stop, sums)
        self._memory["repair"].put(op.region.start, op.region.stop, repairs)

    def _unpack(self, at: Location, op: Op) -> None:
        pieces = self._take(at, op, "bucket")
        self._check_division(at, op)
        expected = self._algebra.expected(self._branch)
        for piece in pieces:
            is_padding = piece.start >= self._numel
            if not is_padding and self._algebra.unpacked(piece.value) != expected:
                self._fail_result(at, piece)
        done = [piece._replace(unpacked=True) for piece in pieces]
        self._memory["bucket"].put(op.region.start, op.region.stop, done)

    # Inputs of operations

    def _take(self, at: Location, op: Op, buffer: Buffer) -> list[_Piece]:
        """Check the pieces of an operation's region and return them as used by the operation."""
        start, stop = op.region.start, op.region.stop
        shard = nontrivial(self._schedule, op.region.shard)
        taken, end = [], start
        for piece in self._memory[buffer].find(start, stop):
            if piece.start > end:
                break
            self._check_free(at, piece)
            if piece.shard != shard or (shard and (piece.start, piece.stop) != (start, stop)):
                self._fail_extent(at, piece)
            taken.append(piece.clip(start, stop)._replace(last=at.position))
            end = piece.stop
        if end < stop:
            until = next((p.start for p in self._memory[buffer].find(end, stop)), stop)
            at.fail(
                f"the elements {end}:{until} of the {buffer} buffer are not packed before it"
                f"{self._branch.text}; pack them first"
            )
        return taken

    def _check_free(self, at: Location, piece: _Piece) -> None:
        if piece.unpacked:
            at.fail(
                f"op {piece.last} has already unpacked the elements {piece.start}:{piece.stop}, "
                f"and results are immutable; place it before op {piece.last}"
            )
        if not self._order.holds(piece.last, at.position):
            at.fail(
                f"{self._schedule.describe(piece.last)} may still be using the elements "
                f"{piece.start}:{piece.stop}; make it depend on op {piece.last}, directly or "
                f"indirectly"
            )

    def _fail_extent(self, at: Location, piece: _Piece) -> NoReturn:
        region = self._schedule.ops[at.position].region
        mine, theirs = (_divided(nontrivial(self._schedule, r.shard)) for r in (region, piece))
        at.fail(
            f"it expects the elements {region.start}:{region.stop} {mine}, but "
            f"{self._schedule.describe(piece.last)} left {piece.start}:{piece.stop} {theirs}; use "
            f"the same elements and shard axes"
        )

    # Results

    @property
    def _numel(self) -> int:
        return self._schedule.plan.buckets[self._bucket].numel

    def _check_division(self, at: Location, op: Op) -> None:
        """Check that the unpacked elements are sharded as the result requires."""
        shard, result = nontrivial(self._schedule, op.region.shard), self._schedule.result
        axes = nontrivial(self._schedule, self._schedule.topology.names)
        expected = axes if result == "sharded_mean" else ()
        if {*shard} != {*expected}:
            at.fail(
                f"its elements are {_divided(shard)}, but the result {result!r} requires them to "
                f"be {_divided(expected)}; change the result, or reduce-scatter or all-gather "
                f"first"
            )

    def _fail_result(self, at: Location, piece: _Piece) -> NoReturn:
        got = self._algebra.unpacked(piece.value)
        expected = self._algebra.expected(self._branch)
        problem = explain(self._schedule.topology, got, expected)
        stop = min(piece.stop, self._numel)
        paths = paths_in(self._schedule, self._bucket, piece.start, stop)
        leaves = leaf_text(paths[0])
        if len(paths) > 1:
            leaves = f"leaves {paths[0]!r} to {paths[-1]!r}"
        at.fail(
            f"rank 0 ends with bucket {self._bucket}, {leaves} (elements {piece.start}:{stop})"
            f"{self._branch.text}, {problem.text}",
            paths=paths,
            ranks=(0, *problem.ranks),
        )

    def _check_all_is_unpacked(self) -> None:
        end = 0
        for piece in self._memory["bucket"].find(0, self._numel):
            if piece.start > end or not piece.unpacked:
                break
            end = piece.stop
        if end < self._numel:
            paths = paths_in(self._schedule, self._bucket, end, end + 1)
            first = f"{end}, {leaf_text(paths[0])}"
            problem = f"no operation unpacks its elements from {first}; unpack every element"
            fail_bucket(self._schedule, self._bucket, problem)


def _divided(shard: tuple[str, ...]) -> str:
    return f"sharded along {join_names(shard)}" if shard else "not sharded"


_STEPS: Mapping[str, Callable[[Flow, Location, Op], object]] = MappingProxyType(
    {
        "pack": Flow._pack,
        "gather": Flow._gather,
        "stage": Flow._stage,
        "all_reduce": Flow._reduce,
        "reduce_scatter": Flow._reduce_scatter,
        "all_gather": Flow._all_gather,
        "add": Flow._add,
        "unpack": Flow._unpack,
    }
)
