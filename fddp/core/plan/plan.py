"""Bucket plans: the assignment of gradients to buckets, and the order of buckets.

A plan is a frozen value. Pure functions compute it from leaf descriptions, not from tensors. It can
be printed, compared, hashed, saved, sent to another rank and tested without a process group.
`fddp.plan_buckets` plans a tree.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import index
from sys import intern
from types import MappingProxyType

from fddp.core.plan import text as plan_text
from fddp.core.plan.bucket import Bucket as Bucket
from fddp.core.plan.leaf import ITEM_BYTES, MAX_COUNT, is_counts, leaf_problem
from fddp.core.plan.leaf import LeafSpec as LeafSpec


@dataclass(frozen=True, repr=False)
class BucketPlan:
    """Buckets over the leaves of a tree, as returned by `fddp.plan_buckets`.

    The fields are validated against each other on construction. Leaves in no bucket are not
    reduced: their dtype has no gradient, or they were not selected.

    Attributes:
        leaves: all leaves of the tree, in canonical order.
        buckets: buckets in the order in which they are expected to fill.
        caps_bytes: caps of the first, second, ... bucket of a dtype and device; the last repeats.
        order: indices of the bucketed leaves in the order of assignment to buckets.

    Raises:
        ValueError: the fields are inconsistent; the message names the field and both values.

    >>> leaves = (LeafSpec("bias", (2,), "float32"), LeafSpec("weight", (2, 3), "float32"))
    >>> plan = plan_leaves(leaves, order=(1, 0), caps_bytes=(16,))
    >>> plan
    BucketPlan: 2 buckets, 2 of 2 leaves, 3.052e-05 MiB, caps 1.526e-05 MiB
    bucket  leaves  first leaf  last leaf  dtype    device        MiB    cap MiB
         0       1  weight      weight     float32  cpu     2.289e-05  1.526e-05
         1       1  bias        bias       float32  cpu     7.629e-06  1.526e-05
    >>> BucketPlan.from_json(plan.to_json()) == plan
    True
    """

    leaves: tuple[LeafSpec, ...]
    buckets: tuple[Bucket, ...]
    caps_bytes: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_leaves(self.leaves)
        _check_caps(self.caps_bytes)
        bucketed = _check_buckets(self.buckets, self.leaves)
        _check_order(self.order, bucketed)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[BucketPlan], tuple[object, ...]]:
        # Drops cached properties, and validates the fields again on loading.
        return type(self), (self.leaves, self.buckets, self.caps_bytes, self.order)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of all leaves, in canonical order; interned to make comparisons cheap."""
        return tuple(intern(leaf.path) for leaf in self.leaves)

    @cached_property
    def bucket_of(self) -> Mapping[int, int]:
        """Bucket index by leaf index. Leaves in no bucket are absent."""
        return MappingProxyType(
            {leaf: number for number, bucket in enumerate(self.buckets) for leaf in bucket.leaves}
        )

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Indices of the bucketed leaves, in canonical order."""
        return tuple(sorted(self.order))

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Indices of the reducible leaves in no bucket, in canonical order."""
        bucketed = set(self.order)
        return tuple(
            i for i, leaf in enumerate(self.leaves) if leaf.reducible and i not in bucketed
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan in hex; the same in all processes and Python versions."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def shared_digest(self) -> str:
        """SHA-256 of the fields that ranks must agree on: all but leaves in no bucket."""
        return hashlib.sha256(plan_text.shared_json(self).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON text. `from_json` restores an equal plan."""
        return plan_text.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """Restore a plan from `to_json`.

        Raises:
            ValueError: the text is malformed or the plan is inconsistent; the message names the
                field.
        """
        return cls(**plan_text.parse(text))

    def __repr__(self) -> str:
        return plan_text.table(self)

    def _repr_html_(self) -> str:
        return plan_text.html_table(self)


class _OpenBucket:
    """Open bucket of one dtype and device."""

    __slots__ = ("closed", "last_position", "leaves", "numel", "offsets")

    def __init__(self) -> None:
        self.closed = 0  # number of closed buckets of this dtype and device
        self.last_position = 0  # of its last leaf, in the order of assignment
        self.leaves: list[int] = []
        self.offsets: list[int] = []
        self.numel = 0

    def close(self, dtype: str, device: str, cap_bytes: int) -> Bucket:
        """Return the bucket and open the next one."""
        bucket = Bucket(
            tuple(self.leaves), tuple(self.offsets), self.numel, dtype, device, cap_bytes
        )
        self.closed += 1
        self.leaves, self.offsets, self.numel = [], [], 0
        return bucket


def assign_buckets(
    leaves: Sequence[LeafSpec], order: Iterable[int], caps_bytes: Sequence[int]
) -> list[Bucket]:
    """Assign leaves to buckets in order, as DDP does.

    Each dtype and device has its own open bucket, which closes when it reaches its cap. The next
    bucket of that dtype and device has the next cap; the last cap repeats. A sparse leaf has its
    own bucket. Buckets are returned in the order in which they closed. Buckets below their cap
    follow in the order of their last leaf, which is the order in which they become ready.
    `torch.distributed._compute_bucket_assignment_by_size` returns the same buckets, but the order
    of the last ones depends on a hash table.

    Args:
        leaves: all leaves; those in `order` are reducible.
        order: indices of the leaves to assign.
        caps_bytes: one or more caps.

    >>> leaves = [LeafSpec(name, (4,), "float32") for name in "abc"]
    >>> buckets = assign_buckets(leaves, order=(2, 1, 0), caps_bytes=(16, 64))
    >>> [(bucket.leaves, bucket.offsets, bucket.cap_bytes) for bucket in buckets]
    [((2,), (0,), 16), ((1, 0), (0, 4), 64)]
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[str, str], _OpenBucket] = {}
    last_cap = len(caps_bytes) - 1
    for position, leaf in enumerate(order):
        _, shape, dtype, _, device, sparse = leaves[leaf]
        if sparse:
            buckets.append(Bucket((leaf,), (0,), prod(shape), dtype, device, 0, sparse=True))
            continue
        open_bucket = open_buckets.get((dtype, device))
        if open_bucket is None:
            open_bucket = open_buckets[dtype, device] = _OpenBucket()
        open_bucket.leaves.append(leaf)
        open_bucket.offsets.append(open_bucket.numel)
        open_bucket.numel += prod(shape)
        open_bucket.last_position = position
        cap_bytes = caps_bytes[min(open_bucket.closed, last_cap)]
        if open_bucket.numel * ITEM_BYTES[dtype] >= cap_bytes:
            buckets.append(open_bucket.close(dtype, device, cap_bytes))
    for (dtype, device), left in sorted(
        open_buckets.items(), key=lambda item: item[1].last_position
    ):
        if left.leaves:
            buckets.append(left.close(dtype, device, caps_bytes[min(left.closed, last_cap)]))
    return buckets


def plan_leaves(
    leaves: Sequence[LeafSpec],
    *,
    order: Sequence[int],
    caps_bytes: Sequence[int],
    from_back: bool = False,
) -> BucketPlan:
    """Plan buckets for the leaves of `order`. Other leaves are not reduced.

    Args:
        leaves: all leaves of a tree, in canonical order.
        order: indices of the leaves to reduce, in the order of assignment to buckets.
        caps_bytes: caps of the first, second, ... bucket of a dtype and device; the last repeats.
        from_back: fill buckets from the last leaf of `order`, so that the first cap applies to the
            bucket that is launched last.

    Raises:
        ValueError: `order` holds an index that is repeated, out of range or not of a reducible
            leaf, or `caps_bytes` is not one or more positive ints.

    >>> plan = plan_leaves([LeafSpec("step", (), "int64"), LeafSpec("w", (3,), "float32")],
    ...                    order=[1], caps_bytes=[1024])
    >>> plan.reduced, plan.bucket_of[1]
    ((1,), 0)
    """
    leaves, order, caps_bytes = tuple(leaves), tuple(map(index, order)), tuple(caps_bytes)
    _check_caps(caps_bytes)
    _check_indices(order, leaves, "order")
    if from_back:
        buckets = tuple(reversed(assign_buckets(leaves, order[::-1], caps_bytes)))
    else:
        buckets = tuple(assign_buckets(leaves, order, caps_bytes))
    return BucketPlan(leaves, buckets, caps_bytes, order)


def rebucket(
    plan: BucketPlan,
    ready_order: Iterable[int],
    *,
    caps_bytes: Sequence[int] | None = None,
    from_back: bool = False,
) -> BucketPlan:
    """Plan the leaves of `plan` again, for a measured order of gradients.

    Leaves then share a bucket with leaves that become ready at about the same time, and the small
    first bucket is launched early.

    Args:
        plan: the original plan; its bucket boundaries are discarded.
        ready_order: leaf indices in the order in which their gradients were ready. Other bucketed
            leaves follow in the order of `plan`.
        caps_bytes: new caps; None for those of `plan`.
        from_back: as in `plan_leaves`.

    Raises:
        ValueError: an index is repeated, or its leaf is in no bucket of `plan`.

    >>> leaves = [LeafSpec(name, (4,), "float32") for name in "abc"]
    >>> plan = plan_leaves(leaves, order=(2, 1, 0), caps_bytes=(16, 64))
    >>> [bucket.leaves for bucket in rebucket(plan, [0]).buckets]
    [(0,), (2, 1)]
    """
    ready = tuple(map(index, ready_order))
    _check_indices(ready, plan.leaves, "ready_order")
    bucketed = set(plan.order)
    for leaf in ready:
        if leaf not in bucketed:
            raise ValueError(
                f"ready_order holds {_name(leaf, plan.leaves)}, which is in no bucket of the plan; "
                f"plan.reduced lists the {len(bucketed)} bucketed leaves"
            )
    seen = set(ready)
    order = ready + tuple(leaf for leaf in plan.order if leaf not in seen)
    caps_bytes = plan.caps_bytes if caps_bytes is None else caps_bytes
    return plan_leaves(plan.leaves, order=order, caps_bytes=caps_bytes, from_back=from_back)


def _name(leaf: int, leaves: Sequence[LeafSpec]) -> str:
    return f"leaf {leaf} ({leaves[leaf].path!r})"


def _check_leaves(leaves: object) -> None:
    if not isinstance(leaves, tuple):
        raise ValueError(f"leaves must be a tuple of LeafSpec, got {reprlib.repr(leaves)}")
    for position, leaf in enumerate(leaves):
        problem = leaf_problem(leaf)
        if problem is not None:
            raise ValueError(f"leaves[{position}] {problem}")
    paths = [leaf.path for leaf in leaves]
    if len(set(paths)) != len(paths):
        [(path, count)] = Counter(paths).most_common(1)
        raise ValueError(f"leaves has the path {path!r} {count} times; paths must differ")


def _check_caps(caps_bytes: object) -> None:
    if not is_counts(caps_bytes, at_least=1) or not caps_bytes:
        raise ValueError(
            "caps_bytes must be a tuple of one or more positive 64-bit ints, "
            f"got {reprlib.repr(caps_bytes)}"
        )


def _check_indices(indices: object, leaves: Sequence[LeafSpec], where: str) -> None:
    """Check that leaf indices are in range, reducible and unique."""
    if not is_counts(indices):
        raise ValueError(
            f"{where} must be a tuple of non-negative leaf indices, got {reprlib.repr(indices)}"
        )
    if indices and max(indices) >= len(leaves):
        raise ValueError(f"{where} holds leaf {max(indices)}, but there are {len(leaves)} leaves")
    if len(set(indices)) != len(indices):
        [(leaf, count)] = Counter(indices).most_common(1)
        raise ValueError(f"{where} holds {_name(leaf, leaves)} {count} times")
    if not {leaves[leaf].dtype for leaf in indices} <= ITEM_BYTES.keys():
        leaf = next(leaf for leaf in indices if not leaves[leaf].reducible)
        raise ValueError(
            f"{where} holds {_name(leaf, leaves)} of dtype {leaves[leaf].dtype!r}, which has no "
            f"gradient to reduce; reducible dtypes are {', '.join(ITEM_BYTES)}"
        )


def _check_buckets(buckets: object, leaves: Sequence[LeafSpec]) -> set[int]:
    """Check the buckets and return the indices of their leaves."""
    if not isinstance(buckets, tuple):
        raise ValueError(f"buckets must be a tuple of Bucket, got {reprlib.repr(buckets)}")
    for position, bucket in enumerate(buckets):
        if type(bucket) is not Bucket:
            raise ValueError(f"buckets[{position}] must be a Bucket, got {reprlib.repr(bucket)}")
        _check_indices(bucket.leaves, leaves, f"buckets[{position}].leaves")
        _check_bucket(bucket, leaves, f"buckets[{position}]")
    bucketed = [leaf for bucket in buckets for leaf in bucket.leaves]
    if len(set(bucketed)) != len(bucketed):
        [(leaf, count)] = Counter(bucketed).most_common(1)
        raise ValueError(f"{_name(leaf, leaves)} is in {count} buckets; at most one is allowed")
    return set(bucketed)


def _check_bucket(bucket: Bucket, leaves: Sequence[LeafSpec], where: str) -> None:
    if not bucket.leaves:
        raise ValueError(f"{where} has no leaves")
    for leaf in bucket.leaves:
        _, _, dtype, _, device, sparse = leaves[leaf]
        if dtype != bucket.dtype or device != bucket.device:
            raise ValueError(
                f"{where} has dtype {bucket.dtype!r} on {bucket.device!r}, but "
                f"{_name(leaf, leaves)} has dtype {dtype!r} on {device!r}"
            )
        if sparse is not bucket.sparse:
            raise ValueError(
                f"{where} has sparse={bucket.sparse!r}, but {_name(leaf, leaves)} has "
                f"sparse={sparse!r}"
            )
    if bucket.sparse and len(bucket.leaves) != 1:
        raise ValueError(f"{where} is sparse and has {len(bucket.leaves)} leaves; it must have 1")
    _check_extent(bucket, leaves, where)


def _check_extent(bucket: Bucket, leaves: Sequence[LeafSpec], where: str) -> None:
    # Any other layout leaves gaps of uninitialised memory, which would be reduced.
    *offsets, numel = accumulate((leaves[leaf].numel for leaf in bucket.leaves), initial=0)
    if not is_counts(bucket.offsets) or bucket.offsets != tuple(offsets):
        raise ValueError(
            f"{where}.offsets must be {reprlib.repr(tuple(offsets))} for its leaves, "
            f"got {reprlib.repr(bucket.offsets)}"
        )
    if type(bucket.numel) is not int or bucket.numel != numel or bucket.nbytes > MAX_COUNT:
        raise ValueError(
            f"{where}.numel must be {numel} for its leaves, and its bytes must fit 64 bits, "
            f"got {reprlib.repr(bucket.numel)}"
        )
    cap_bytes = bucket.cap_bytes
    if not is_counts((cap_bytes,)) or (cap_bytes == 0) is not bucket.sparse:
        raise ValueError(
            f"{where}.cap_bytes must be {'0' if bucket.sparse else 'a positive 64-bit int'} where "
            f"sparse={bucket.sparse}, got {reprlib.repr(cap_bytes)}"
        )


def _check_order(order: object, bucketed: set[int]) -> None:
    if not is_counts(order) or len(order) != len(bucketed) or set(order) != bucketed:
        raise ValueError(
            "order must hold each bucketed leaf once, "
            f"{reprlib.repr(sorted(bucketed))}, got {reprlib.repr(order)}"
        )
