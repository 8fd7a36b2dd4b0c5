"""Buckets: leaves that are reduced together."""

from __future__ import annotations

from dataclasses import dataclass

from fddp.core.plan.leaf import ITEM_BYTES


@dataclass(frozen=True)
class Bucket:
    """Leaves that are reduced together, packed one after the other without gaps.

    Attributes:
        leaves: indices into the plan's leaves, in the order in which they were offered.
        offsets: where each leaf starts, in elements.
        numel: elements of the whole bucket.
        dtype: dtype of every leaf in it.
        device: device of every leaf in it.
        cap_bytes: the bucket was closed once it held that much; 0 for a sparse bucket.
        sparse: it is one leaf whose gradient is sparse; `numel` is that of a dense one.
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
        """Bytes of the whole bucket."""
        return self.numel * ITEM_BYTES[self.dtype]
