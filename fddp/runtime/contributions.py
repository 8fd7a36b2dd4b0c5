"""Contributions of one rank to a step: gradients by bucket, and their weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fddp.core.numerics.overflow import stays_finite
from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.expected_counts import Arrivals, expected_counts
from fddp.native import extension
from fddp.native.pack import pack_, pack_add_, sum_squares
from fddp.runtime.program import Program

if TYPE_CHECKING:
    from fddp._C import GradientCounter

Leaves = Sequence[Tensor | None]


class BackwardPrediction(Protocol):
    """Prediction for a backward pass before it runs, as a `GraphView` of the extension is.

    Attributes:
        used: for each leaf, True if a gradient may arrive.
        opaque: True if gradients may arrive that the graph does not show.
    """

    @property
    def used(self) -> Sequence[bool]: ...

    @property
    def opaque(self) -> bool: ...


class WeightedGradients(NamedTuple):
    """Gradients of one bucket's leaves, in bucket order, and their weight."""

    sources: Leaves
    weight: float


class Accumulated(NamedTuple):
    """Weighted sums of gradients over earlier micro-batches, by leaf, and their total weight."""

    sums: Leaves
    weight: float


class Contributions:
    """Complete gradients of one rank, or its shards (see [Note: shards]).

    Args:
        leaves: by leaf; None where one is missing, or for a rank that contributes nothing.
        weight: weight of this rank in the mean. Without a weight the leaves are not read.

    Attributes:
        leaves: as above; None also without a weight.
        weight: weight of this rank's gradients, accumulated ones included.
        own_weight: factor on the gradients of this call alone.
        allocates_early: True if the buckets are allocated when the step begins.
    """

    # Gradients that arrive during backward: the leaves that collect them, the number that each is
    # expected to get, and the weighted sums to which they are added.
    leaf_set: GradientCounter | None = None
    expected: Sequence[int] = ()
    accumulated: Accumulated | None = None
    # Returns True if a buffer's slices are the gradients of some leaves, which may be reduced in
    # place. None if they never are.
    aliases_buffer: Callable[[Sequence[int], Tensor, Any], bool] | None = None

    def __init__(self, leaves: list[Tensor | None] | None = None, weight: float = 0.0) -> None:
        self.leaves = leaves if weight > 0.0 else None
        self.weight = self.own_weight = weight
        self.allocates_early = self.leaves is not None

    def sources(
        self, program: Program, bucket: int, *, late: bool = False
    ) -> list[WeightedGradients]:
        """Summands of a bucket.

        Args:
            late: True for those alone that arrived after the bucket was packed.
        """
        if self.leaves is None or late:
            return []
        members = program.plan.buckets[bucket].leaves
        return [WeightedGradients([self.leaves[i] for i in members], self.weight)]

    def used(self, program: Program) -> list[bool]:
        """For each reduced leaf, True if there is a gradient."""
        if self.leaves is None:
            return [False] * len(program.plan.reduced)
        return [self.leaves[i] is not None for i in program.plan.reduced]

    def late(self, program: Program) -> list[bool]:
        """For each bucket, True if a gradient arrived after it was packed."""
        return [False] * len(program.plan.buckets)

    @property
    def gives_order(self) -> bool:
        """True if the order of the gradients is known at the end of the step."""
        return self.leaf_set is not None

    def order(self, program: Program) -> Sequence[int]:
        """Leaves in the order of their gradients."""
        arrivals = self.leaf_set.arrivals() if self.leaf_set else []
        return [*dict.fromkeys(program.differentiated[k] for k in arrivals)]

    def release(self) -> None:
        """Release the gradients, which are packed."""
        self.leaves = self.accumulated = None

    def local(self, program: Program) -> dict[int, Tensor | None]:
        """Results of leaves that are not reduced: this rank's own gradients, if it has a weight."""
        plan, own = program.plan, self.leaves
        unreduced: Iterable[int] = plan.local
        if program.schedule.result == "replicated":  # shards are also of leaves without gradients
            unreduced = (leaf for leaf in range(len(plan.leaves)) if leaf not in plan.bucket_of)
        return {leaf: None if own is None else _copy(own[leaf]) for leaf in unreduced}


class BackwardContributions(Contributions):
    """Gradients that arrive while backward runs, added to those of earlier micro-batches.

    Args:
        weight: weight of this backward pass; 0 if there is none, and `arm` is not called.
        factor: factor on its gradients; None if that is their weight.
        accumulated: weighted sums of earlier micro-batches.
        idle: buckets that are left out; any gradient for one is late.
        aliases_buffer: as in `Contributions`.
        packs_early: True to pack large gradients as they arrive, into memory that is allocated
            when the step begins.
    """

    # Of the graph, from `arm` on.
    _opaque = False
    _visible: Sequence[bool] = ()
    # Arrivals of the step before, if this backward pass is expected to be like it.
    _previous: Arrivals | None = None

    def __init__(
        self,
        *,
        weight: float,
        factor: float | None = None,
        accumulated: Accumulated | None,
        idle: Collection[int] = (),
        aliases_buffer: Callable[[Sequence[int], Tensor, Any], bool] | None = None,
        packs_early: bool = True,
    ) -> None:
        self.leaves = None
        self.weight = weight + (accumulated.weight if accumulated else 0.0)
        self.own_weight = weight if factor is None else factor
        self.accumulated = accumulated
        self.aliases_buffer = aliases_buffer
        self.allocates_early = packs_early
        self._idle = idle

    def collect(self, leaf_set: GradientCounter) -> None:
        """Take the gradients that arrive in these leaves; `arm` follows."""
        self.leaf_set = leaf_set

    def arm(
        self,
        program: Program,
        view: BackwardPrediction,
        previous: Arrivals | None,
        buffer_of: Callable[[int], Tensor],
        scale: WeightScale,
        on_bucket: Callable[[int], None],
        *,
        keeps_sources: bool = False,
        sums_squares: bool = False,
    ) -> None:
        """Prepare for backward; see `Step.arm`.

        Args:
            program: program of the step.
            view, previous: as there.
            buffer_of: returns the memory of a bucket whose leaves are packed as they arrive.
            scale: factor on all gradients.
            on_bucket: called for each bucket when its gradients are complete.
            keeps_sources, sums_squares: as in `pack_bucket_`.
        """
        leaf_set = self.leaf_set
        assert leaf_set is not None
        self._visible = view.used
        self._opaque = view.opaque
        if (
            previous is not None
            and previous.as_expected
            and previous.opaque == view.opaque
            and previous.visible == view.used
        ):
            expected = previous.counts
            self._previous = previous
        else:
            expected = expected_counts(view.used, opaque=view.opaque, previous=previous)
        self.expected = expected
        new_slot, members = extension.compiled.EagerSlot, program.member_numbers
        factor = scale.before(self.own_weight)
        early = program.early if self.allocates_early else {}
        eager = [
            new_slot(
                members[bucket][position],
                buffer_of(bucket),
                slot.native,
                factor,
                sums_squares,
            )
            for bucket, leaves in early.items()
            if bucket not in self._idle
            if not (keeps_sources and _may_overflow(self, program, bucket, scale))
            for position, slot in leaves
        ]
        leaf_set.arm(program.members, expected, eager, on_bucket)
        if 0 in expected:
            for bucket, numbers in enumerate(members):
                if not any(expected[k] for k in numbers):
                    on_bucket(bucket)

    def arrivals(self) -> Arrivals:
        """Return the arrivals of this backward pass, for the next step's expected counts."""
        assert self.leaf_set is not None
        expected = self.leaf_set.is_as_expected()
        if expected and self._previous is not None:
            return self._previous
        counts = self.expected if expected else self.leaf_set.counts()
        return Arrivals(self._visible, counts, as_expected=expected, opaque=self._opaque)

    def sources(
        self, program: Program, bucket: int, *, late: bool = False
    ) -> list[WeightedGradients]:
        """Summands of a bucket, which the leaves release, unless it is retained: a further call
        returns those that have arrived since. Of a retained bucket, all at any time."""
        found = []
        if self.leaf_set is not None:
            keep = bucket in program.schedule.retained
            found.append(WeightedGradients(self.leaf_set.take(bucket, keep), self.own_weight))
        return found if late else found + _earlier(self, program, bucket)

    def used(self, program: Program) -> list[bool]:
        leaf_set, accumulated = self.leaf_set, self.accumulated
        if leaf_set and not accumulated and program.plan.reduced == program.differentiated:
            return leaf_set.used()
        used = [False] * len(program.plan.leaves)
        if leaf_set:
            for leaf, flag in zip(program.differentiated, leaf_set.used(), strict=True):
                used[leaf] = flag
        sums = accumulated.sums if accumulated else [None] * len(used)
        return [used[i] or sums[i] is not None for i in program.plan.reduced]

    def late(self, program: Program) -> list[bool]:
        if self.leaf_set is None:
            return super().late(program)
        late = self.leaf_set.late()
        if self._idle:
            used = self.leaf_set.used()
            for bucket in self._idle:
                late[bucket] = any(used[k] for k in program.member_numbers[bucket])
        return late

    def local(self, program: Program) -> dict[int, Tensor | None]:
        return {leaf: self._local(leaf, program.number[leaf]) for leaf in program.plan.local}

    def _local(self, leaf: int, number: int) -> Tensor | None:
        own = self.leaf_set.take_one(number) if self.leaf_set else None
        earlier = self.accumulated.sums[leaf] if self.accumulated else None
        if earlier is None:
            return own
        total = earlier if own is None else own * self.own_weight + earlier
        return total.detach() / self.weight


class ArrivingContributions(Contributions):
    """Gradients that are given one group after the other, as a graph computes them.

    Args:
        leaves: number of leaves of the plan.
        weight: weight of this rank.
        order: leaves in the order of their gradients; empty if it is not needed.
    """

    def __init__(self, leaves: int, weight: float, order: Sequence[int] = ()) -> None:
        super().__init__(None, weight)
        self._order = order
        self._given: list[Tensor | None] = [None] * leaves
        # Times of the gradients, on the clock of `time.perf_counter`.
        self.times_s = [math.nan] * leaves
        self._used = [False] * leaves

    def give(self, leaves: Sequence[int], grads: Leaves) -> None:
        """Take the gradients of some leaves, before these are packed."""
        now_s = time.perf_counter()
        for leaf, grad in zip(leaves, grads, strict=True):
            self._given[leaf] = grad
            self.times_s[leaf] = now_s
            self._used[leaf] = grad is not None and self.weight > 0.0

    def has(self, leaves: Sequence[int]) -> bool:
        """Return True if all of these leaves were given."""
        return not any(math.isnan(self.times_s[leaf]) for leaf in leaves)

    @property
    def gives_order(self) -> bool:
        return len(self._order) > 0

    def order(self, program: Program) -> Sequence[int]:
        return self._order

    def own(self, leaves: Sequence[int]) -> None:
        """Copy those gradients of some leaves that have not been packed, or may be once more: a
        graph uses their memory again."""
        for leaf in leaves:
            grad = self._given[leaf]
            if grad is not None:
                self._given[leaf] = grad.clone()

    def sources(
        self, program: Program, bucket: int, *, late: bool = False
    ) -> list[WeightedGradients]:
        """Summands of a bucket, which are released, unless it is retained."""
        if late or self.weight == 0.0:
            return []
        members = program.plan.buckets[bucket].leaves
        grads = [self._given[leaf] for leaf in members]
        if bucket not in program.schedule.retained:
            for leaf in members:
                self._given[leaf] = None
        return [WeightedGradients(grads, self.weight)]

    def used(self, program: Program) -> list[bool]:
        return [self._used[leaf] for leaf in program.plan.reduced]

    def release(self) -> None:
        self._given = [None] * len(self._given)


class Packed(NamedTuple):
    """A bucket that was packed.

    Attributes:
        peak: bound on the magnitudes of `fddp.native.pack.pack_`.
        sources: gradients that were packed; None if they are released already, and packing turned
            no finite number into infinity.
        squares: for each leaf, the sum of squares of what was packed; None unless asked for.
    """

    peak: float
    sources: list[WeightedGradients] | None
    squares: Tensor | None = None


def pack_bucket_(
    source: Contributions,
    program: Program,
    bucket: int,
    buffer: Tensor,
    scale: WeightScale,
    *,
    late: bool = False,
    keeps_sources: bool = False,
    sums_squares: bool = False,
) -> Packed:
    """Write the gradients of a bucket into its buffer, with zeros for missing ones.

    Args:
        source: contributions of this rank.
        program: program of the step.
        bucket: number of the bucket.
        buffer: memory of the bucket.
        scale: factor on the gradients.
        late: True for those alone that arrived after the bucket was packed.
        keeps_sources: True to return the sources if packing may turn a finite number into infinity.
        sums_squares: True to return the sums of squares of what was packed.
    """
    layout, counter = program.layouts[bucket], source.leaf_set
    sources: list[WeightedGradients] | None = None
    squares: Tensor | None = None
    if sums_squares and buffer.is_cpu:
        squares = torch.empty(len(layout.offsets), dtype=torch.float64)
    if (
        counter is not None
        and buffer.is_cpu
        and not late
        and not (keeps_sources and _may_overflow(source, program, bucket, scale))
    ):
        # Some gradients may have been packed as they arrived; the rest is released as it is packed.
        keep, factor = bucket in program.schedule.retained, scale.before(source.own_weight)
        peak = counter.pack(bucket, buffer, program.packings[bucket], keep, factor, squares)
        further = _earlier(source, program, bucket)
    else:
        sources = source.sources(program, bucket, late=late)
        nothing = WeightedGradients([None] * len(layout.offsets), 0.0)
        first, *further = sources or [nothing]
        peak = pack_(buffer, layout, first.sources, scale.before(first.weight), squares=squares)
    for grads, weight in further:
        own = pack_add_(buffer, layout, grads, scale.before(weight), squares=squares)
        peak = extension.compiled.add_bounds(peak, own)
    if sums_squares and squares is None:
        squares = sum_squares(buffer, layout)
    return Packed(peak, sources, squares)


def divisor_of_squares(scale: WeightScale, weight: float) -> float:
    """Return the factor of squared norms of packed gradients over those of gradients times their
    weight, which is positive."""
    return scale.before(1.0) ** 2 * weight


def _may_overflow(source: Contributions, program: Program, bucket: int, scale: WeightScale) -> bool:
    """Return True if packing may turn a finite number into infinity."""
    factor = scale.before(source.own_weight) + (scale.before(1.0) if source.accumulated else 0.0)
    dtype, wire = program.plan.buckets[bucket].dtype, program.schedule.wire_dtypes[bucket]
    return not stays_finite(dtype, wire, factor)


def _earlier(source: Contributions, program: Program, bucket: int) -> list[WeightedGradients]:
    """Sums of earlier micro-batches, which are weighted already."""
    if source.accumulated is None:
        return []
    sums, members = source.accumulated.sums, program.plan.buckets[bucket].leaves
    return [WeightedGradients([sums[i] for i in members], 1.0)]


def _copy(own: Tensor | None) -> Tensor | None:
    return None if own is None else own.detach().clone()


NOTHING = Contributions()
