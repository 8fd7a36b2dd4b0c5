"""Contributions of one rank to a step: gradients by bucket, and their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from fddp.core.numerics.overflow import stays_finite
from fddp.core.numerics.weighting import WeightScale
from fddp.core.plan.bucket import Bucket
from fddp.core.protocol.expected_counts import Arrivals, expected_counts
from fddp.native import extension
from fddp.native.buffer_pool import BufferPool
from fddp.native.layout import Layout
from fddp.native.pack import pack_, pack_add_
from fddp.runtime.program import Program
from fddp.runtime.shards import Chunk

if TYPE_CHECKING:
    from fddp._C import GradientCounter

Leaves = Sequence[Tensor | None]


class GraphInfo(Protocol):
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
    """Contributions of a rank without input, or of one that has failed: none.

    Attributes:
        weight: weight of this rank in the mean.
        own_weight: weight of the gradients of this call, without accumulated ones.
        aliases_buffer: returns True if a buffer's slices are the gradients of some leaves, which
            may be reduced in place; None if they never are.
        allocates_early: True if the buckets are allocated when the step begins.
        earlier_weights: weights of this rank's summands before the last.
    """

    weight: float = 0.0
    own_weight: float = 0.0
    aliases_buffer: Callable[[Sequence[int], Tensor, Any], bool] | None = None
    allocates_early: bool = False
    earlier_weights: Sequence[float] = ()

    @property
    def backward(self) -> BackwardContributions | None:
        """Gradients that arrive during backward, if there are any."""
        return None

    def only(self) -> GradientCounter | list[Tensor | None] | None:
        """Return the only gradients to pack, of weight `own_weight`: those of a backward pass, or
        those by leaf; None if there are others."""
        return None

    def is_complete(self) -> bool:
        """Return True if every leaf has a gradient, and none is late."""
        return False

    def spans(self, bucket: int) -> Sequence[Tensor]:
        """Partial sums of a bucket beside the one in its buffer."""
        return ()

    def release(self) -> None:
        """Release memory of earlier summands."""

    def parts(self, bucket: int) -> list[WeightedGradients]:
        """Summands of a bucket."""
        return []

    def pack_(self, bucket: int, buffer: Tensor, layout: Layout, scale: WeightScale) -> float:
        """Write the bucket, with zeros for missing gradients. Return the bound on magnitudes of
        `fddp.native.pack.pack_`."""
        return _pack_parts_(buffer, layout, self.parts(bucket), scale)

    def untaken(self, bucket: int) -> list[WeightedGradients]:
        """Gradients that the leaves hold: all before the bucket is packed, which takes them, and
        those that were late after it. Of a retained bucket, all at any time."""
        return []

    def pack_late_(self, bucket: int, buffer: Tensor, layout: Layout, scale: WeightScale) -> float:
        """Write the gradients that arrived after the bucket was packed, and zeros elsewhere."""
        return _pack_parts_(buffer, layout, self.untaken(bucket), scale)

    def retain_sources(self) -> None:
        """Retain the sources of a bucket if packing may turn a finite number into infinity."""

    def sources(self, bucket: int) -> list[WeightedGradients] | None:
        """Gradients that were packed into the bucket, if it is the one packed last. None if already
        released."""
        return self.parts(bucket)

    def pack_chunk_(self, chunk: Chunk, buffer: Tensor) -> float:
        """Write this rank's shards into its chunk; as `pack_`."""
        return pack_(buffer, chunk.layout, [None] * len(chunk.parts), 0.0)

    def aliased_memory(self, bucket: int, pool: BufferPool) -> Tensor | None:
        """Memory of the bucket if its gradients are views of it already, else None."""
        return None

    def used(self, program: Program) -> list[bool]:
        """For each reduced leaf, True if there is a gradient."""
        return [False] * len(program.plan.reduced)

    def late(self, program: Program) -> list[bool]:
        """For each bucket, True if a gradient arrived after it was packed."""
        return [False] * len(program.plan.buckets)

    def order(self, program: Program) -> Sequence[int]:
        """Slots of the control word of the reduced leaves, in the order of their gradients."""
        return ()

    def arrived(self) -> int:
        """Number of gradients that have arrived during backward."""
        counter = None if self.backward is None else self.backward.leaf_set
        return 0 if counter is None else counter.arrival_count()

    def ready_times_s(self) -> list[float]:
        """For each differentiated leaf, the time of its last gradient on the clock of
        `time.perf_counter`; NaN if there was none. Empty if there was no backward pass."""
        return []

    def unreduced(self, program: Program) -> Sequence[int]:
        """Leaves in no bucket, whose results are those of `local`."""
        return program.plan.local

    def local(self, leaf: int) -> Tensor | None:
        """Result of a leaf that is not reduced: this rank's own gradient, if it has a weight."""
        return None


class TreeContributions(Contributions):
    """Complete gradients, by leaf."""

    allocates_early = True

    def __init__(self, program: Program, leaves: list[Tensor | None], weight: float) -> None:
        self.weight = self.own_weight = weight
        self._program = program
        self._leaves = leaves

    def only(self) -> list[Tensor | None] | None:
        return self._leaves if self.weight > 0.0 else None

    def is_complete(self) -> bool:
        found = self._leaves
        return self.weight > 0.0 and all(found[i] is not None for i in self._program.plan.reduced)

    def parts(self, bucket: int) -> list[WeightedGradients]:
        members = self._program.plan.buckets[bucket].leaves
        return (
            [WeightedGradients([self._leaves[i] for i in members], self.weight)]
            if self.weight
            else []
        )

    def used(self, program: Program) -> list[bool]:
        if not self.weight:
            return super().used(program)
        return [self._leaves[i] is not None for i in program.plan.reduced]

    def local(self, leaf: int) -> Tensor | None:
        grad = self._leaves[leaf]
        return grad.detach().clone() if grad is not None and self.weight else None


class ShardContributions(Contributions):
    """Shards by leaf; see [Note: shards]. Integer leaves are included: shards of parameters are
    gathered, too."""

    weight = 1.0

    def __init__(self, shards: Leaves) -> None:
        self._shards = shards

    def pack_chunk_(self, chunk: Chunk, buffer: Tensor) -> float:
        return pack_(buffer, chunk.layout, chunk.sources(self._shards), 1.0)

    def used(self, program: Program) -> list[bool]:
        return [self._shards[i] is not None for i in program.plan.reduced]

    def unreduced(self, program: Program) -> Sequence[int]:
        bucketed = program.plan.bucket_of
        return [leaf for leaf in range(len(self._shards)) if leaf not in bucketed]

    def local(self, leaf: int) -> Tensor | None:
        own = self._shards[leaf]
        return None if own is None else own.detach().clone()


class BackwardContributions(Contributions):
    """Gradients that arrive while backward runs, added to those of earlier micro-batches.

    Args:
        program: the program of the step.
        weight: weight of this backward pass; 0 if there is none, and `arm` is not called.
        accumulated: weighted sums of earlier micro-batches.
        idle: buckets that are left out; any gradient for one is late.
        aliases_buffer: as in `Contributions`.
        packs_early: True to pack large gradients as they arrive, into memory that is allocated
            when the step begins.

    Attributes:
        in_place: buckets whose gradients are reduced in place.
        leaf_set: leaves that collect the gradients; None before `arm`.
        expected: number of gradients that a leaf is expected to get; empty before `arm`.
    """

    def __init__(
        self,
        program: Program,
        *,
        weight: float,
        accumulated: Accumulated | None,
        idle: Collection[int] = (),
        aliases_buffer: Callable[[Sequence[int], Tensor, Any], bool] | None = None,
        packs_early: bool = True,
    ) -> None:
        self.weight = weight + (accumulated.weight if accumulated else 0.0)
        self.own_weight = weight
        self._program = program
        self._accumulated = accumulated
        self._idle = idle
        self.aliases_buffer = aliases_buffer
        self.in_place: list[int] = []
        self.allocates_early = packs_early
        self.leaf_set: GradientCounter | None = None
        self.expected: Sequence[int] = ()
        self._opaque = False
        self._visible: Sequence[bool] = ()
        self._previous: Arrivals | None = None  # if this backward pass is expected to be like it
        self._scale: WeightScale | None = None
        self._factor = 0.0
        self._retains = False
        self._retained: tuple[int, list[WeightedGradients]] | None = None  # bucket packed last

    def arm(
        self,
        view: GraphInfo,
        previous: Arrivals | None,
        buffer_of: Callable[[int], Tensor],
        scale: WeightScale,
        on_bucket: Callable[[int], None],
    ) -> None:
        """Prepare for backward; see `Step.arm`.

        Args:
            view, previous: as there.
            buffer_of: returns the memory of a bucket whose leaves are packed as they arrive.
            scale: factor on all gradients.
            on_bucket: called for each bucket when its gradients are complete.
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
        self._scale, weight = scale, self.own_weight
        self._factor = factor = scale.before(weight)
        new_slot, members = extension.compiled.EagerSlot, self._program.member_numbers
        early = self._program.early if self.allocates_early else {}
        eager = [
            new_slot(members[bucket][position], buffer_of(bucket), slot.native, factor)
            for bucket, leaves in early.items()
            if bucket not in self._idle
            if not (self._retains and self._may_overflow(bucket, scale))
            for position, slot in leaves
        ]
        leaf_set.arm(self._program.members, expected, eager, on_bucket)
        if 0 in expected:
            for bucket, numbers in enumerate(members):
                if not any(expected[k] for k in numbers):
                    on_bucket(bucket)

    @property
    def backward(self) -> BackwardContributions:
        return self

    def collect(self, leaf_set: GradientCounter) -> None:
        """Take the gradients that arrive in these leaves; `arm` follows."""
        self.leaf_set = leaf_set

    def only(self) -> GradientCounter | None:
        return None if self._accumulated else self.leaf_set

    def is_complete(self) -> bool:
        return self.leaf_set is not None and self.leaf_set.is_complete()

    def arrivals(self) -> Arrivals:
        """Return the arrivals of this backward pass, for the next step's expected counts."""
        assert self.leaf_set is not None
        expected = self.leaf_set.is_as_expected()
        if expected and self._previous is not None:
            return self._previous
        counts = self.expected if expected else self.leaf_set.counts()
        return Arrivals(self._visible, counts, as_expected=expected, opaque=self._opaque)

    def ready_times_s(self) -> list[float]:
        ready_s = [math.nan] * len(self._program.differentiated)
        if self.leaf_set:
            for leaf, time_s in zip(
                self.leaf_set.arrivals(), self.leaf_set.arrival_times(), strict=True
            ):
                ready_s[leaf] = time_s
        return ready_s

    def parts(self, bucket: int) -> list[WeightedGradients]:
        return [
            *self.untaken(bucket),
            *_earlier(self._accumulated, self._program.plan.buckets[bucket]),
        ]

    def untaken(self, bucket: int) -> list[WeightedGradients]:
        if self.leaf_set is None:
            return []
        keep = bucket in self._program.schedule.retained
        return [WeightedGradients(self.leaf_set.take(bucket, keep), self.own_weight)]

    def pack_(self, bucket: int, buffer: Tensor, layout: Layout, scale: WeightScale) -> float:
        has_to_keep = self._retains and self._may_overflow(bucket, scale)
        if self.leaf_set is None or not buffer.is_cpu or has_to_keep:
            return self._pack_kept_(bucket, buffer, layout, scale, late=False)
        keep = bucket in self._program.schedule.retained
        factor = self._factor if scale is self._scale else scale.before(self.own_weight)
        packing = self._program.packings[bucket]
        peak = self.leaf_set.pack(bucket, buffer, packing, keep, factor)
        if self._accumulated is not None:
            plus = extension.compiled.add_bounds
            for sums, weight in _earlier(self._accumulated, self._program.plan.buckets[bucket]):
                peak = plus(peak, pack_add_(buffer, layout, sums, scale.before(weight)))
        return peak

    def aliased_memory(self, bucket: int, pool: BufferPool) -> Tensor | None:
        aliases, leaves = self.aliases_buffer, self._program.member_numbers[bucket]
        if aliases is None or bucket in self._program.schedule.retained:
            return None
        layout, numel = self._program.layouts[bucket].native, self._program.buffer_numels[bucket]
        memory = pool.reclaim(bucket, lambda b: len(b) == numel and aliases(leaves, b, layout))
        if memory is not None:
            self.in_place.append(bucket)
        return memory

    def pack_late_(self, bucket: int, buffer: Tensor, layout: Layout, scale: WeightScale) -> float:
        return self._pack_kept_(bucket, buffer, layout, scale, late=True)

    def retain_sources(self) -> None:
        self._retains = True

    def sources(self, bucket: int) -> list[WeightedGradients] | None:
        retained = self._retained
        if retained is None or retained[0] != bucket:
            return None
        self._retained = None
        return retained[1]

    def _may_overflow(self, bucket: int, scale: WeightScale) -> bool:
        """Return True if packing may turn a finite number into infinity."""
        factor = scale.before(self.own_weight) + (scale.before(1.0) if self._accumulated else 0.0)
        planned, wire = self._program.plan.buckets[bucket], self._program.schedule.wire_dtypes
        return not stays_finite(planned.dtype, wire[bucket], factor)

    def _pack_kept_(
        self, bucket: int, buffer: Tensor, layout: Layout, scale: WeightScale, *, late: bool
    ) -> float:
        """Pack, and keep the sources if they may be asked for."""
        parts = self.untaken(bucket) if late else self.parts(bucket)
        if self._retains:
            self._retained = bucket, parts
        return _pack_parts_(buffer, layout, parts, scale)

    def used(self, program: Program) -> list[bool]:
        if (
            self.leaf_set
            and not self._accumulated
            and program.plan.reduced == program.differentiated
        ):
            return self.leaf_set.used()
        used = [False] * len(program.plan.leaves)
        if self.leaf_set:
            for leaf, flag in zip(program.differentiated, self.leaf_set.used(), strict=True):
                used[leaf] = flag
        sums = self._accumulated.sums if self._accumulated else [None] * len(used)
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

    def order(self, program: Program) -> Sequence[int]:
        arrivals = self.leaf_set.arrivals() if self.leaf_set else ()
        arrived = dict.fromkeys(program.differentiated[k] for k in arrivals)
        slots = {leaf: slot for slot, leaf in enumerate(program.plan.reduced)}
        return [slots[leaf] for leaf in arrived if leaf in slots]

    def local(self, leaf: int) -> Tensor | None:
        own = self.leaf_set.take_one(self._program.number[leaf]) if self.leaf_set else None
        earlier = self._accumulated.sums[leaf] if self._accumulated else None
        if earlier is None:
            return own
        total = earlier if own is None else own * self.own_weight + earlier
        return total.detach() / self.weight


def _earlier(accumulated: Accumulated | None, bucket: Bucket) -> list[WeightedGradients]:
    """Sums of earlier micro-batches, which are weighted already."""
    if accumulated is None:
        return []
    return [WeightedGradients([accumulated.sums[i] for i in bucket.leaves], 1.0)]


def _pack_parts_(
    buffer: Tensor, layout: Layout, parts: Sequence[WeightedGradients], scale: WeightScale
) -> float:
    if not parts:
        return pack_(buffer, layout, [None] * len(layout.offsets), 0.0)
    (sources, weight), *others = parts
    plus = extension.compiled.add_bounds
    peak = pack_(buffer, layout, sources, scale.before(weight))
    for sources, weight in others:
        peak = plus(peak, pack_add_(buffer, layout, sources, scale.before(weight)))
    return peak


NOTHING = Contributions()
