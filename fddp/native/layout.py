"""Layout of a bucket's leaves in its flat buffer, and statistics of a pass over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fddp.core.plan.plan import BucketPlan
from fddp.native import extension

if TYPE_CHECKING:
    from fddp import _C


class Stats(NamedTuple):
    """Statistics of the values written in one pass.

    Attributes:
        sq_norm: sum of squared magnitudes in float64; NaN if not requested.
        finite: True if no value is NaN or infinite, or if not requested.
    """

    sq_norm: float
    finite: bool


UNMEASURED = Stats(float("nan"), True)


@dataclass(frozen=True)
class Layout:
    """Slices of a flat buffer, one per leaf.

    Attributes:
        offsets: start of each leaf's slice, in elements; ascending, without overlap.
        shapes: each leaf's sizes.
        strides: each leaf's strides, in elements: the dense order of its slice.
        numel: number of elements of the buffer.

    Raises:
        ValueError: the slices overlap, reach past `numel`, or are not dense.

    Example:
        >>> layout = Layout(offsets=(0, 6), shapes=((2, 3), ()), strides=((1, 2), ()), numel=7)
        >>> len(layout.offsets)
        2
    """

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    numel: int
    # Compiled form, so that calls need no conversion.
    native: _C.Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        native = extension.compiled.Layout(self.offsets, self.shapes, self.strides, self.numel)
        object.__setattr__(self, "native", native)

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.offsets, self.shapes, self.strides, self.numel)

    @classmethod
    def of(cls, plan: BucketPlan, bucket: int) -> Layout:
        """Return the layout of a plan's bucket.

        Example:
            >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
            >>> leaves = (LeafSpec("bias", (2,), "float32"), LeafSpec("weight", (2, 3), "float32"))
            >>> Layout.of(plan_leaves(leaves, order=(1, 0), caps_bytes=(1024,)), 0)
            Layout(offsets=(0, 6), shapes=((2, 3), (2,)), strides=((3, 1), (1,)), numel=8)
        """
        leaves = [plan.leaves[leaf] for leaf in plan.buckets[bucket].leaves]
        return cls(
            offsets=plan.buckets[bucket].offsets,
            shapes=tuple(leaf.shape for leaf in leaves),
            strides=tuple(leaf.strides or contiguous_strides(leaf.shape) for leaf in leaves),
            numel=plan.buckets[bucket].numel,
        )

    def part(self, positions: Sequence[int]) -> Layout:
        """Return the layout of the slices at some positions, in the same buffer.

        Example:
            >>> layout = Layout(offsets=(0, 6), shapes=((6,), (1,)), strides=((1,), (1,)), numel=7)
            >>> layout.part([1])
            Layout(offsets=(6,), shapes=((1,),), strides=((1,),), numel=7)
        """
        return Layout(
            offsets=tuple(self.offsets[p] for p in positions),
            shapes=tuple(self.shapes[p] for p in positions),
            strides=tuple(self.strides[p] for p in positions),
            numel=self.numel,
        )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    Example:
        >>> contiguous_strides((2, 3, 4))
        (12, 4, 1)
    """
    steps = [max(size, 1) for size in shape]
    return tuple(prod(steps[dim:]) for dim in range(1, len(steps) + 1))


def views(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """Return each leaf's slice as a view, which shares the buffer's storage and version counter."""
    start = buffer.storage_offset()
    slots = zip(layout.shapes, layout.strides, layout.offsets, strict=True)
    return [buffer.as_strided(shape, strides, start + offset) for shape, strides, offset in slots]
