"""From a tree to its bucket plan."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from fddp.core.plan.leaf import ITEM_BYTES, MAX_COUNT, LeafSpec
from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.schedule.builder import Algorithm
from fddp.core.schedule.topology import Topology
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import Cost, ReadyTimes
from fddp.errors import NoGradientError
from fddp.tree.describe import leaf_specs
from fddp.tree.pytree import flatten, insertion_order

MIB_BYTES = 1024 * 1024
"""Bytes of what DDP, and so fddp, calls a MB."""

_INEXACT_PREFIXES = ("float", "bfloat", "complex")
_TWO_RANKS = Topology(world=2)


def plan_buckets(
    tree: Any,
    *,
    bucket_cap_mb: float | Sequence[float] = 25.0,
    first_bucket_mb: float = 1.0,
    order: Iterable[int] | None = None,
    sparse: Iterable[str] = (),
    select: Callable[[str], bool] | None = None,
) -> BucketPlan:
    """Plan the buckets in which the gradients of a tree are reduced.

    Needs no process group and no memory: of the leaves, only their attributes are read. For the
    same leaves, order and caps the buckets are those of torch's DistributedDataParallel.

    Args:
        tree: any pytree of torch tensors (on the meta device, too), NumPy arrays, JAX arrays and
            `jax.ShapeDtypeStruct`; `None` is a leaf without gradient.
        bucket_cap_mb: a bucket is closed once it holds that many MB (of 1024 * 1024 bytes). A
            list has the caps of the first, second, ... bucket of each dtype and device; its last
            one repeats, and `first_bucket_mb` is not used.
        first_bucket_mb: cap of the first bucket of each dtype and device, which is small so that
            it leaves early. It is used as given, also where it is more than `bucket_cap_mb`.
        order: indices (into the plan's leaves) of the leaves to reduce, in the order in which
            they are offered to the buckets; by default the reverse of the order in which the
            tree's containers were filled, about that in which gradients arrive.
        sparse: paths of leaves whose gradients are sparse; each has a bucket of its own.
        select: called with each reducible leaf's path; leaves it declines are in no bucket, and
            so stay local.

    Raises:
        NoGradientError: there is no floating or complex leaf, or `select` declines all.
        TypeError: a leaf is no array, or of a floating dtype that is not reduced (float8).
        ValueError: a cap, a path in `sparse` or an index in `order` is wrong.

    >>> import numpy as np
    >>> tree = {"weight": np.zeros((4, 2)), "bias": np.zeros(4), "step": np.zeros((), np.int64)}
    >>> plan = plan_buckets(tree, bucket_cap_mb=1.0, first_bucket_mb=1e-5)
    >>> [leaf.path for leaf in plan.leaves]
    ['bias', 'step', 'weight']
    >>> [bucket.leaves for bucket in plan.buckets]
    [(0,), (2,)]
    """
    caps_bytes = _caps_bytes(bucket_cap_mb, first_bucket_mb)
    specs, offered = _described(tree, sparse, select)
    if order is None:
        return plan_leaves(specs, order=offered, caps_bytes=caps_bytes)
    plan = plan_leaves(specs, order=list(order), caps_bytes=caps_bytes)
    _check_complete(plan, set(offered))
    return plan


def plan_optimal(
    tree: Any,
    ready_times_s: ReadyTimes,
    cost: Cost,
    *,
    topology: Topology = _TWO_RANKS,
    algorithm: Algorithm = "all_reduce",
    sparse: Iterable[str] = (),
    select: Callable[[str], bool] | None = None,
) -> BucketPlan:
    """Plan the buckets whose step is the shortest in simulation.

    For leaves of one dtype on one device and the algorithm "all_reduce", no other plan whose
    buckets are contiguous in ready order simulates faster. Several dtypes or devices, which share
    the links, and other algorithms get the best plan that is found. Never is it slower, in
    simulation, than `plan_buckets` with its default caps, in registration or in ready order.

    Args:
        tree: as in `plan_buckets`.
        ready_times_s: seconds from the start of a step until each gradient is there, by path or for
            each leaf in the plan's order; NaN for a leaf that gets none. See `simulate`.
        cost: the model of the links, or one for each axis of the topology.
        topology: the ranks.
        algorithm: how buckets are reduced; see `make_schedule`.
        sparse: as in `plan_buckets`; these buckets come last.
        select: as in `plan_buckets`.

    Returns:
        A plan whose order is that in which leaves are ready. The cap of each bucket is its size,
        and the cap of the plan, for a later `rebucket`, that of its largest bucket; unless one of
        `plan_buckets` is best.

    Raises:
        NoGradientError: there is no floating or complex leaf, or `select` declines all.
        TypeError: a leaf is no array, or of a floating dtype that is not reduced (float8).
        ValueError: as from `simulate`, `make_schedule`, or for a path in `sparse`.

    >>> import numpy as np
    >>> from fddp.core.sim.cost import CostModel
    >>> tree = {"a": np.zeros(1000), "b": np.zeros(1000), "c": np.zeros(1000)}
    >>> ready_times_s = {"c": 0.001, "b": 0.002, "a": 0.010}
    >>> plan = plan_optimal(tree, ready_times_s, CostModel(1e-3, 1e-9))
    >>> [[plan.paths[leaf] for leaf in bucket.leaves] for bucket in plan.buckets]
    [['c', 'b'], ['a']]
    """
    specs, offered = _described(tree, sparse, select)
    return optimal_plan(specs, offered, ready_times_s, Target(cost, topology, algorithm))


def _described(
    tree: Any, sparse: Iterable[str], select: Callable[[str], bool] | None
) -> tuple[Sequence[LeafSpec], list[int]]:
    """Every leaf, and those to reduce in the reverse of the order of registration."""
    leaves, treedef = flatten(tree)
    declared_sparse = _sparse_paths(sparse, treedef.paths)
    specs = leaf_specs(treedef.paths, leaves, declared_sparse)
    _check_sparse(specs)
    selected = _selected(specs, select)
    offered = [leaf for leaf in reversed(insertion_order(tree, treedef)) if leaf in selected]
    return specs, offered


def _caps_bytes(bucket_cap_mb: float | Sequence[float], first_bucket_mb: float) -> tuple[int, ...]:
    if isinstance(bucket_cap_mb, Sequence) and not isinstance(bucket_cap_mb, str):
        caps = {f"bucket_cap_mb[{number}]": cap for number, cap in enumerate(bucket_cap_mb)}
        if not caps:
            raise ValueError("bucket_cap_mb is an empty list; it must hold one cap at least")
    else:
        caps = {"first_bucket_mb": first_bucket_mb, "bucket_cap_mb": bucket_cap_mb}
    return tuple(_bytes(name, cap_mb) for name, cap_mb in caps.items())


def _bytes(name: str, cap_mb: Any) -> int:
    is_number = isinstance(cap_mb, Real) and not isinstance(cap_mb, bool)
    if not is_number or not 1 <= cap_mb * MIB_BYTES <= MAX_COUNT:
        raise ValueError(
            f"{name} must be a finite number of MB (of {MIB_BYTES} bytes) that makes at least one "
            f"byte, got {cap_mb!r}"
        )
    return int(cap_mb * MIB_BYTES)


def _check_sparse(specs: Sequence[LeafSpec]) -> None:
    for spec in specs:
        if spec.sparse and not spec.reducible:
            raise ValueError(
                f"sparse holds {spec.path!r}, of dtype {spec.dtype}, which has no gradient; name "
                "leaves of a floating or complex dtype"
            )


def _sparse_paths(sparse: Iterable[str], paths: Sequence[str]) -> frozenset[str]:
    if isinstance(sparse, str):
        raise ValueError(f"sparse must be a collection of paths, got the single str {sparse!r}")
    declared = frozenset(sparse)
    unknown = sorted(declared.difference(paths), key=repr)
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), paths)
        raise ValueError(
            f"sparse holds {len(unknown)} paths that the tree of {len(paths)} leaves does not "
            f"have, the first is {unknown[0]!r}; near it are: {', '.join(map(repr, close)) or '-'}"
        )
    return declared


def _selected(specs: Sequence[LeafSpec], select: Callable[[str], bool] | None) -> set[int]:
    """Indices of the leaves to reduce."""
    selected = set()
    for index, spec in enumerate(specs):
        supported = spec.dtype in ITEM_BYTES
        if not supported and not spec.dtype.startswith(_INEXACT_PREFIXES):
            continue
        if select is not None and not select(spec.path):
            continue
        if not supported:
            raise TypeError(
                f"leaf {spec.path!r} is of dtype {spec.dtype}, which gradients cannot be reduced "
                f"in ({', '.join(ITEM_BYTES)} can); cast it, or keep it local: "
                f"select=lambda path: path != {spec.path!r}"
            )
        selected.add(index)
    if not selected:
        found = Counter(spec.dtype for spec in specs)
        there = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(found.items()))
        raise NoGradientError(
            f"there is nothing to reduce: the tree has {len(specs)} leaves ({there or 'empty'}), "
            f"and no floating or complex one {'that select keeps' if select else 'among them'}"
        )
    return selected


def _check_complete(plan: BucketPlan, selected: set[int]) -> None:
    """The order that a caller gave must offer just the leaves that are to be reduced."""
    offered = set(plan.order)
    for problem, leaves in (
        ("leaves out", selected - offered),
        ("holds, though select declines it,", offered - selected),
    ):
        if leaves:
            leaf = min(leaves)
            raise ValueError(
                f"order {problem} leaf {leaf} ({plan.leaves[leaf].path!r}) and {len(leaves) - 1} "
                f"more; it has {len(offered)} leaves, to be reduced are {len(selected)}"
            )
