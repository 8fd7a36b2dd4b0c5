"""Buckets of gradients, and the assignment of leaves to them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import itemgetter

from fddp.core.plan.leaf import ITEM_BYTES, LeafSpec, kind_of


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
        *offsets, numel = packed_offsets(leaves, members)
        dtype, device, sparse = kind_of(leaves[members[0]])
        return cls(tuple(members), tuple(offsets), numel, dtype, device, cap_bytes, sparse)

    @property
    def nbytes(self) -> int:
        """Size of the bucket in bytes."""
        return self.numel * ITEM_BYTES[self.dtype]


def packed_offsets(leaves: Sequence[LeafSpec], members: Sequence[int]) -> list[int]:
    """Return the offset of each member of a bucket, in elements, and then the bucket's size.

    >>> packed_offsets([LeafSpec("a", (2, 3), "float32"), LeafSpec("b", (), "float32")], [1, 0])
    [0, 1, 7]
    """
    return list(accumulate([prod(leaves[leaf].shape) for leaf in members], initial=0))


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
    order = list(order)
    closed: list[tuple[int, Bucket]] = []  # each with the place of its last leaf in the order
    left: list[tuple[int, Bucket]] = []
    for (dtype, device, sparse), places in _places_of_kinds(leaves, order).items():
        members = [order[place] for place in places]
        ends = list(accumulate([prod(leaves[leaf].shape) for leaf in members]))
        start, start_numel, number = 0, 0, 0
        while start < len(members):
            cap_bytes = 0 if sparse else caps_bytes[min(number, len(caps_bytes) - 1)]
            # The first leaf with which the bucket has at least as many elements as its cap.
            cap_numel = -(-cap_bytes // ITEM_BYTES[dtype])
            last = start if sparse else bisect_left(ends, start_numel + cap_numel, start)
            stop = min(last + 1, len(members))
            numel = ends[stop - 1] - start_numel
            offsets = (0, *(end - start_numel for end in ends[start : stop - 1]))
            bucket = Bucket(
                tuple(members[start:stop]), offsets, numel, dtype, device, cap_bytes, sparse
            )
            (closed if last < len(members) else left).append((places[stop - 1], bucket))
            start, start_numel, number = stop, ends[stop - 1], number + 1
    by_place = itemgetter(0)
    return [bucket for _, bucket in (*sorted(closed, key=by_place), *sorted(left, key=by_place))]


def _places_of_kinds(
    leaves: Sequence[LeafSpec], order: Sequence[int]
) -> dict[tuple[str, str, bool], list[int]]:
    """Return the places in `order` of the leaves of each dtype, device and sparsity."""
    places: dict[tuple[str, str, bool], list[int]] = {}
    for place, leaf in enumerate(order):
        places.setdefault(kind_of(leaves[leaf]), []).append(place)
    return places
