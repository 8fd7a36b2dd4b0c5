"""Buckets of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from fddp.core.plan.leaf import ITEM_BYTES


@dataclass(frozen=True)
class Bucket:
    """Leaves that are reduced together, packed without gaps.

    Attributes:
        leaves: indices of the leaves in the plan, in packing order.
        offsets: offset of each leaf, in elements.
        numel: number of elements of the bucket.
        dtype: dtype of all its leaves.
        device: device of all its leaves.
        cap_bytes: size at which the bucket was closed; 0 for a sparse bucket.
        sparse: True if the bucket is one leaf with a sparse gradient; `numel` is its dense size.
    """

    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str
    device: str
    cap_bytes: int
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the bucket in bytes."""
        return self.numel * ITEM_BYTES[self.dtype]
