"""Follows the operations of one bucket, and what they leave in its memory.

Memory is known as pieces of elements that went through the same. A piece that is not divided may
be cut further, as when parts of a bucket travel one after the other. One that axes divide is known
only as a whole: where its chunks lie depends on where it starts and stops.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from fddp.core.check.explain import explain
from fddp.core.check.findings import fail, fail_bucket, in_words, paths_in, wide
from fddp.core.check.ordering import Order
from fddp.core.check.symbolic import Algebra, Branch, Value
from fddp.core.schedule.op import Buffer, Op
from fddp.core.schedule.schedule import Schedule


class _Piece(NamedTuple):
    """Elements that went through the same.

    Attributes:
        start: first element.
        stop: element after the last.
        shard: axes of more than one place that divide them, outer cut first.
        value: what they hold.
        last: position of the operation that touched them last.
        unpacked: whether that handed them out.
    """

    start: int
    stop: int
    shard: tuple[str, ...]
    value: Value
    last: int
    unpacked: bool = False

    def clip(self, start: int, stop: int) -> _Piece:
        """The part in [start, stop)."""
        return self._replace(start=max(start, self.start), stop=min(stop, self.stop))


class _Memory:
    """One buffer: its pieces in ascending order, without overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []

    def find(self, start: int, stop: int) -> list[_Piece]:
        """The pieces that have elements in [start, stop)."""
        i, j = self._range(start, stop)
        return self._pieces[i:j]

    def put(self, start: int, stop: int, pieces: list[_Piece]) -> None:
        """Puts pieces in place of all there was in [start, stop)."""
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
    """The operations of one bucket, in one branch.

    Args:
        schedule: the schedule.
        bucket: the bucket.
        branch: what the control word says.
        algebra: arithmetic with what elements hold.
        order: what comes before what, among the bucket's operations.
    """

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
        """Judges the operations, which are given in launch order, and what they leave.

        Raises:
            ScheduleError: an operation meets what it can't work on, or the result is wrong.
        """
        for position in positions:
            op = self._schedule.ops[position]
            # Nothing happens to no elements.
            if op.when in self._branch.whens and op.region.start < op.region.stop:
                _STEPS[op.kind](self, position, op)
        self._check_all_is_unpacked()

    # Operations

    def _pack(self, position: int, op: Op) -> None:
        start, stop, memory = op.region.start, op.region.stop, self._memory[op.region.buffer]
        for piece in memory.find(start, stop):
            if self._schedule.result == "replicated":
                fail(
                    self._schedule,
                    position,
                    f"op {piece.last} and others before it work on the elements "
                    f"{piece.start}:{piece.stop} already; pack the shards of each element once",
                )
            self._check_free(position, piece)
            if piece.shard and not start <= piece.start <= piece.stop <= stop:
                self._fail_extent(position, piece)
        shard = wide(self._schedule, op.region.shard)
        value = self._algebra.packed(op.when, self._branch)
        memory.put(start, stop, [_Piece(start, stop, shard, value, position)])

    def _gather(self, position: int, op: Op) -> None:
        start, stop = op.region.start, op.region.stop
        value = self._algebra.gathered_sparse(self._branch)
        self._memory["bucket"].put(start, stop, [_Piece(start, stop, (), value, position)])

    def _all_reduce(self, position: int, op: Op) -> None:
        self._reduce(position, op)

    def _reduce_scatter(self, position: int, op: Op) -> None:
        pieces = self._reduce(position, op)
        shard = wide(self._schedule, (*op.region.shard, *op.axes))
        if shard == pieces[0].shard:
            return  # along axes of one place: the only chunk is all of it
        start, stop = op.region.start, op.region.stop
        if any(piece.value != pieces[0].value for piece in pieces):
            fail(
                self._schedule,
                position,
                f"parts of its elements {start}:{stop} went through different reductions, and a "
                f"chunk may hold some of each; divide the parts by themselves",
            )
        whole = pieces[0]._replace(start=start, stop=stop, shard=shard)
        self._memory[op.region.buffer].put(start, stop, [whole])

    def _reduce(self, position: int, op: Op) -> list[_Piece]:
        divided = [axis for axis in wide(self._schedule, op.axes) if axis in op.region.shard]
        if divided:
            fail(
                self._schedule,
                position,
                f"its elements are divided along {in_words(op.region.shard)}: ranks along "
                f"{divided[0]} hold different ones, which would be added up; join them first, or "
                f"leave {divided[0]!r} out",
            )
        pieces = self._change(position, op, self._algebra.reduced)
        if self._schedule.deterministic:
            self._check_association(position, op, pieces)
        return pieces

    def _check_association(self, position: int, op: Op, pieces: Sequence[_Piece]) -> None:
        """Sums run along the innermost axes first: what is summed is always a run of these."""
        names = wide(self._schedule, self._schedule.topology.names)
        for summed in {term.summed for piece in pieces for term, _ in piece.value}:
            inmost = names[len(names) - len(summed) :]
            if summed != {*inmost}:
                fail(
                    self._schedule,
                    position,
                    f"with it, sums run along {in_words(wide(self._schedule, op.axes))} before the "
                    f"axes within, and the schedule is deterministic; sum along "
                    f"{in_words(inmost)} first",
                )

    def _all_gather(self, position: int, op: Op) -> None:
        shard = op.region.shard
        kept = len(shard) - len(op.axes)
        if kept < 0 or shard[kept:] != op.axes:
            fail(
                self._schedule,
                position,
                f"it joins chunks along {in_words(op.axes)} where its elements are divided along "
                f"{in_words(shard) or 'no axis'}; join along the last of these axes first",
            )
        kept_shard = wide(self._schedule, shard[:kept])
        pieces = self._change(position, op, self._algebra.gathered)
        joined_pieces = [piece._replace(shard=kept_shard) for piece in pieces]
        self._memory[op.region.buffer].put(op.region.start, op.region.stop, joined_pieces)

    def _change(
        self, position: int, op: Op, change: Callable[[Value, tuple[str, ...]], Value]
    ) -> list[_Piece]:
        """What a collective makes of the values that are there."""
        memory = self._memory[op.region.buffer]
        pieces = [
            piece._replace(value=change(piece.value, op.axes))
            for piece in self._take(position, op, op.region.buffer)
        ]
        memory.put(op.region.start, op.region.stop, pieces)
        return pieces

    def _add(self, position: int, op: Op) -> None:
        targets = self._take(position, op, "bucket")
        repairs = self._take(position, op, "repair")
        # Where they are not divided, either may be cut more finely.
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

    def _unpack(self, position: int, op: Op) -> None:
        pieces = self._take(position, op, "bucket")
        self._check_division(position, op)
        due = self._algebra.expected(self._branch)
        for piece in pieces:
            is_padding = piece.start >= self._numel
            if not is_padding and self._algebra.unpacked(piece.value) != due:
                self._fail_result(position, piece)
        self._memory["bucket"].put(
            op.region.start, op.region.stop, [piece._replace(unpacked=True) for piece in pieces]
        )

    # What operations meet

    def _take(self, position: int, op: Op, buffer: Buffer) -> list[_Piece]:
        """The pieces of an operation's region, which it may work on and touches now."""
        start, stop, shard = op.region.start, op.region.stop, wide(self._schedule, op.region.shard)
        taken, end = [], start
        for piece in self._memory[buffer].find(start, stop):
            if piece.start > end:
                break
            self._check_free(position, piece)
            if piece.shard != shard or (shard and (piece.start, piece.stop) != (start, stop)):
                self._fail_extent(position, piece)
            taken.append(piece.clip(start, stop)._replace(last=position))
            end = piece.stop
        if end < stop:
            until = next((p.start for p in self._memory[buffer].find(end, stop)), stop)
            fail(
                self._schedule,
                position,
                f"nothing has been packed into the elements {end}:{until} of the {buffer} buffer "
                f"before it{self._branch.text}; pack them first",
            )
        return taken

    def _check_free(self, position: int, piece: _Piece) -> None:
        if piece.unpacked:
            fail(
                self._schedule,
                position,
                f"op {piece.last} has handed out the elements {piece.start}:{piece.stop}, and "
                f"results never change; do this before",
            )
        if not self._order.holds(piece.last, position):
            fail(
                self._schedule,
                position,
                f"{self._schedule.describe(piece.last)} may still be working on the elements "
                f"{piece.start}:{piece.stop}; let it depend on op {piece.last}, also through "
                f"others",
            )

    def _fail_extent(self, position: int, piece: _Piece) -> NoReturn:
        region = self._schedule.ops[position].region
        mine, theirs = (_divided(wide(self._schedule, r.shard)) for r in (region, piece))
        fail(
            self._schedule,
            position,
            f"it takes the elements {region.start}:{region.stop} as {mine}, and "
            f"{self._schedule.describe(piece.last)} left {piece.start}:{piece.stop} {theirs}; give "
            f"it the same elements, divided alike",
        )

    # The result

    @property
    def _numel(self) -> int:
        return self._schedule.plan.buckets[self._bucket].numel

    def _check_division(self, position: int, op: Op) -> None:
        """Whether each rank has the part of the result that it is to have."""
        shard, result = wide(self._schedule, op.region.shard), self._schedule.result
        axes = wide(self._schedule, self._schedule.topology.names)
        due = axes if result == "sharded_mean" else ()
        if {*shard} != {*due}:
            fail(
                self._schedule,
                position,
                f"its elements are {_divided(shard)}, and the result {result!r} wants them "
                f"{_divided(due)}; state another result, or divide or join them before",
            )

    def _fail_result(self, position: int, piece: _Piece) -> NoReturn:
        got = self._algebra.unpacked(piece.value)
        due = self._algebra.expected(self._branch)
        problem = explain(self._schedule.topology, got, due)
        stop = min(piece.stop, self._numel)
        paths = paths_in(self._schedule, self._bucket, piece.start, stop)
        leaves = (
            f"leaf {paths[0]!r}" if len(paths) == 1 else f"leaves {paths[0]!r} to {paths[-1]!r}"
        )
        fail(
            self._schedule,
            position,
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
            fail_bucket(
                self._schedule,
                self._bucket,
                f"no operation unpacks its elements from {end} on, of leaf {paths[0]!r}; unpack "
                f"every element",
            )


def _divided(shard: tuple[str, ...]) -> str:
    return f"divided along {in_words(shard)}" if shard else "not divided"


_STEPS: Mapping[str, Callable[[Flow, int, Op], None]] = MappingProxyType(
    {
        "pack": Flow._pack,
        "gather": Flow._gather,
        "all_reduce": Flow._all_reduce,
        "reduce_scatter": Flow._reduce_scatter,
        "all_gather": Flow._all_gather,
        "add": Flow._add,
        "unpack": Flow._unpack,
    }
)
