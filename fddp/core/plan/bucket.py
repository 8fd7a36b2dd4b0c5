"""Buckets of gradients, and the assignment of leaves to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from fddp.core.plan.leaf import ITEM_BYTES, LeafSpec


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

    @classmethod
    def of(cls, leaves: Sequence[LeafSpec], members: Sequence[int], cap_bytes: int) -> Bucket:
        """Pack some leaves of a tree, given by their indices, of one dtype and device."""
        *offsets, numel = accumulate([prod(leaves[leaf].shape) for leaf in members], initial=0)
        _, _, dtype, _, device, sparse = leaves[members[0]]
        return cls(tuple(members), tuple(offsets), numel, dtype, device, cap_bytes, sparse)

    @property
    def nbytes(self) -> int:
        """Size of the bucket in bytes."""
        return self.numel * ITEM_BYTES[self.dtype]


def assign_buckets(
    leaves: Sequence[LeafSpec], order: Iterable[int], caps_bytes: Sequence[int]
) -> list[Bucket]:
    """Assign the leaves of `order`, which are reducible, to buckets in this order, as DDP does.

    Each dtype and device has its own open bucket, which closes when it reaches its cap. The next
    bucket of that dtype and device has the next cap; the last cap repeats. A sparse leaf has its
    own bucket. Buckets are returned in the order in which they closed. Buckets below their cap
    follow in the order of their last leaf, which is the order in which they become ready.
    `torch.distributed._compute_bucket_assignment_by_size` returns the same buckets, but the order
    of the last ones depends on a hash table.

    >>> leaves = [LeafSpec(name, (4,), "float32") for name in "abc"]
    >>> buckets = assign_buckets(leaves, order=(2, 1, 0), caps_bytes=(16, 64))
    >>> [(bucket.leaves, bucket.offsets, bucket.cap_bytes) for bucket in buckets]
    [((2,), (0,), 16), ((1, 0), (0, 4), 64)]
    """
    buckets: list[Bucket] = []
    # By dtype and device: leaves and bytes of the open bucket, number of closed ones.
    members: dict[tuple[str, str], list[int]] = {}
    nbytes: defaultdict[tuple[str, str], int] = defaultdict(int)
    closed: defaultdict[tuple[str, str], int] = defaultdict(int)
    last_cap = len(caps_bytes) - 1
    for leaf in order:
        _, shape, dtype, _, device, sparse = leaves[leaf]
        if sparse:
            buckets.append(Bucket.of(leaves, [leaf], 0))
            continue
        kind = dtype, device
        # Inserted anew, so that open buckets stay in the order of their last leaf.
        own = members[kind] = members.pop(kind, [])
        own.append(leaf)
        nbytes[kind] += prod(shape) * ITEM_BYTES[dtype]
        cap_bytes = caps_bytes[min(closed[kind], last_cap)]
        if nbytes[kind] >= cap_bytes:
            buckets.append(Bucket.of(leaves, members.pop(kind), cap_bytes))
            nbytes[kind] = 0
            closed[kind] += 1
    for kind, own in members.items():
        buckets.append(Bucket.of(leaves, own, caps_bytes[min(closed[kind], last_cap)]))
    return buckets
