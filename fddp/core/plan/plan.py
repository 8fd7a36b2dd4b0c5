"""Bucket plans: which gradient goes into which bucket, where, and in which order.

A plan is a frozen value. It is made by pure functions from leaf descriptions, never from tensors,
so that it can be printed, compared, hashed, saved, sent to another rank and tested without a
process group. `fddp.plan_buckets` makes one from a tree.
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
    """Buckets over the leaves of a tree; `fddp.plan_buckets` makes one.

    Whatever builds a plan (a planner, `from_json`, `dataclasses.replace`, a hand), its parts are
    checked against each other. Leaves in no bucket are not reduced: they hold integers or nothing,
    or were declined.

    Attributes:
        leaves: every leaf of the tree, in canonical order.
        buckets: in the order in which they are expected to fill.
        caps_bytes: caps of the first, second, ... bucket of a dtype and device; the last repeats.
        order: the bucketed leaves in the order in which they were offered to the buckets.

    Raises:
        ValueError: the parts do not fit together; the message names the field and both values.

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
        # Pickles leave the cached properties behind, and are judged when they are read.
        return type(self), (self.leaves, self.buckets, self.caps_bytes, self.order)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of all leaves, in canonical order; interned, so that comparing them is cheap."""
        return tuple(intern(leaf.path) for leaf in self.leaves)

    @cached_property
    def bucket_of(self) -> Mapping[int, int]:
        """Bucket index by leaf index; leaves in no bucket are absent."""
        return MappingProxyType(
            {leaf: number for number, bucket in enumerate(self.buckets) for leaf in bucket.leaves}
        )

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Indices of the bucketed leaves, in canonical order."""
        return tuple(sorted(self.order))

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Indices of the leaves that could be reduced and are in no bucket, in canonical order."""
        bucketed = set(self.order)
        return tuple(
            position
            for position, leaf in enumerate(self.leaves)
            if leaf.reducible and position not in bucketed
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan, in hex: the same in every process and Python version."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def shared_digest(self) -> str:
        """SHA-256 of what ranks must agree on: they may differ in leaves that are in no bucket."""
        return hashlib.sha256(plan_text.shared_json(self).encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as a JSON text, from which `from_json` makes an equal one."""
        return plan_text.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the text is not such a document, or its plan does not hold together; the
                message names the field.
        """
        document = plan_text.parse(text)
        return cls(
            leaves=tuple(LeafSpec(**fields) for fields in document.leaves),
            buckets=tuple(Bucket(**fields) for fields in document.buckets),
            caps_bytes=document.caps_bytes,
            order=document.order,
        )

    def __repr__(self) -> str:
        return plan_text.table(self)

    def _repr_html_(self) -> str:
        return plan_text.html_table(self)


class _Filling:
    """The open bucket of one dtype and device."""

    __slots__ = ("closed", "last_offer", "leaves", "numel", "offsets")

    def __init__(self) -> None:
        self.closed = 0  # buckets of this dtype and device that came before
        self.last_offer = 0  # position in the offered order
        self.leaves: list[int] = []
        self.offsets: list[int] = []
        self.numel = 0

    def close(self, dtype: str, device: str, cap_bytes: int) -> Bucket:
        """The bucket as it is; the next one is open then."""
        bucket = Bucket(
            tuple(self.leaves), tuple(self.offsets), self.numel, dtype, device, cap_bytes
        )
        self.closed += 1
        self.leaves, self.offsets, self.numel = [], [], 0
        return bucket


def assign_buckets(
    leaves: Sequence[LeafSpec], order: Iterable[int], caps_bytes: Sequence[int]
) -> list[Bucket]:
    """Offer leaves to buckets, one after the other, as DDP does.

    Each dtype and device fills a bucket of its own, which closes as soon as it holds its cap or
    more; the next one of that dtype and device then has the next cap, and the last cap repeats. A
    sparse leaf is a bucket by itself. Buckets come in the order in which they closed. Those that
    never reached their cap follow by their last offered leaf, which is when they become ready.
    `torch.distributed._compute_bucket_assignment_by_size` gives the same buckets, but leaves the
    order of the last ones to a hash table.

    Args:
        leaves: the specs that `order` indexes; each offered one is reducible.
        order: leaf indices in the order in which they are offered.
        caps_bytes: one or more.

    >>> leaves = [LeafSpec(name, (4,), "float32") for name in "abc"]
    >>> buckets = assign_buckets(leaves, order=(2, 1, 0), caps_bytes=(16, 64))
    >>> [(bucket.leaves, bucket.offsets, bucket.cap_bytes) for bucket in buckets]
    [((2,), (0,), 16), ((1, 0), (0, 4), 64)]
    """
    buckets: list[Bucket] = []
    filling: dict[tuple[str, str], _Filling] = {}
    last_cap = len(caps_bytes) - 1
    for position, leaf in enumerate(order):
        _, shape, dtype, _, device, sparse = leaves[leaf]
        if sparse:
            buckets.append(Bucket((leaf,), (0,), prod(shape), dtype, device, 0, sparse=True))
            continue
        open_bucket = filling.get((dtype, device))
        if open_bucket is None:
            open_bucket = filling[dtype, device] = _Filling()
        open_bucket.leaves.append(leaf)
        open_bucket.offsets.append(open_bucket.numel)
        open_bucket.numel += prod(shape)
        open_bucket.last_offer = position
        cap_bytes = caps_bytes[min(open_bucket.closed, last_cap)]
        if open_bucket.numel * ITEM_BYTES[dtype] >= cap_bytes:
            buckets.append(open_bucket.close(dtype, device, cap_bytes))
    for (dtype, device), left in sorted(filling.items(), key=lambda item: item[1].last_offer):
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
    """The plan that offers the leaves of `order`, and no others, to buckets of these caps.

    Args:
        leaves: every leaf of a tree, in canonical order.
        order: indices of the leaves to reduce, in the order in which they are offered.
        caps_bytes: caps of the first, second, ... bucket of a dtype and device; the last repeats.
        from_back: count caps, and fill buckets, from the last leaf of `order` on, so that a small
            first cap is that of the bucket which leaves last.

    Raises:
        ValueError: `order` holds an index twice, out of range or of a leaf that is not reducible,
            or `caps_bytes` is empty or holds something else than positive ints.

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
    """The plan with the same leaves and caps for a measured order of gradients.

    Leaves then share a bucket with those that become ready about when they do, and the small
    first bucket leaves early.

    Args:
        plan: the plan to start from; its bucket boundaries are not kept.
        ready_order: leaf indices in the order in which their gradients were ready. Bucketed
            leaves that are not in it follow, in the order in which `plan` had them.
        caps_bytes: other caps; None for those of `plan`.
        from_back: as for `plan_leaves`.

    Raises:
        ValueError: an index is repeated, or that of a leaf which is in no bucket of `plan`.

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
                f"plan.reduced has the {len(bucketed)} that are"
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
    """Judge indices of leaves to reduce: in range, reducible, each at most once."""
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
            f"gradient to reduce; the dtypes that have are {', '.join(ITEM_BYTES)}"
        )


def _check_buckets(buckets: object, leaves: Sequence[LeafSpec]) -> set[int]:
    """Judge the buckets; returns the leaves in them."""
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
        raise ValueError(f"{_name(leaf, leaves)} is in {count} buckets; it must be in one at most")
    return set(bucketed)


def _check_bucket(bucket: Bucket, leaves: Sequence[LeafSpec], where: str) -> None:
    if not bucket.leaves:
        raise ValueError(f"{where} has no leaves")
    for leaf in bucket.leaves:
        _, _, dtype, _, device, sparse = leaves[leaf]
        if dtype != bucket.dtype or device != bucket.device:
            raise ValueError(
                f"{where} is of {bucket.dtype!r} on {bucket.device!r}, but {_name(leaf, leaves)} "
                f"is of {dtype!r} on {device!r}"
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
    # Any other layout would leave gaps, whose bytes nobody writes and every rank would sum.
    *offsets, numel = accumulate((leaves[leaf].numel for leaf in bucket.leaves), initial=0)
    if not is_counts(bucket.offsets) or bucket.offsets != tuple(offsets):
        raise ValueError(
            f"{where}.offsets must be {reprlib.repr(tuple(offsets))} for its leaves, "
            f"got {reprlib.repr(bucket.offsets)}"
        )
    if type(bucket.numel) is not int or bucket.numel != numel or bucket.nbytes > MAX_COUNT:
        raise ValueError(
            f"{where}.numel must be {numel} for its leaves and fit 64 bits in bytes, "
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
            "order must hold each leaf that is in a bucket once, "
            f"{reprlib.repr(sorted(bucketed))}, got {reprlib.repr(order)}"
        )
