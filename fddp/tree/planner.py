"""Bucket plans of trees."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from fddp.core.entrance import entrance, suggest_keywords
from fddp.core.plan.defaults import MIB
from fddp.core.plan.leaf import ITEM_BYTES, MAX_COUNT, LeafSpec
from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.schedule.builder import Algorithm
from fddp.core.schedule.topology import Topology
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import Cost, ReadyTimes
from fddp.core.text import counted, leaf_text
from fddp.errors import NoGradientError
from fddp.tree.describe import leaf_specs
from fddp.tree.modules import named_params
from fddp.tree.pytree import flatten, insertion_order

_INEXACT_PREFIXES = ("float", "bfloat", "complex")
_TWO_RANKS = Topology(world=2)


@entrance
@suggest_keywords
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

    Needs no process group and reads only attributes of the leaves. For the same leaves, order and
    caps, the buckets are those of torch's DistributedDataParallel.

    Args:
        tree: any pytree of torch tensors (also on the meta device), NumPy arrays, JAX arrays and
            `jax.ShapeDtypeStruct`; `None` is a leaf without gradient. An `nn.Module` stands for
            its parameters with `requires_grad`, by name.
        bucket_cap_mb: size in MB (of 1024 * 1024 bytes) at which a bucket is closed. A list has the
            caps of the first, second, ... bucket of each dtype and device; the last one repeats,
            and `first_bucket_mb` is ignored.
        first_bucket_mb: cap of the first bucket of each dtype and device, small so that it launches
            early. It applies even if it is above `bucket_cap_mb`.
        order: indices (into the plan's leaves) of the leaves to reduce, in the order in which they
            fill the buckets. Default: reverse insertion order of the tree's containers, which
            approximates the order in which gradients arrive.
        sparse: paths of leaves whose gradients are sparse; each gets a bucket of its own.
        select: predicate on the path of each reducible leaf; leaves for which it is False are not
            reduced.

    Raises:
        NoGradientError: there is no floating or complex leaf, or `select` rejects all.
        TypeError: a leaf is not an array, or has a floating dtype that cannot be reduced (float8).
        ValueError: a cap, a path in `sparse` or an index in `order` is invalid.

    >>> import numpy as np
    >>> tree = {"weight": np.zeros((4, 2)), "bias": np.zeros(4), "step": np.zeros((), np.int64)}
    >>> plan = plan_buckets(tree, bucket_cap_mb=1.0, first_bucket_mb=1e-5)
    >>> [leaf.path for leaf in plan.leaves]
    ['bias', 'step', 'weight']
    >>> [bucket.leaves for bucket in plan.buckets]
    [(0,), (2,)]
    >>> import torch
    >>> plan_buckets(torch.nn.Linear(2, 3)).paths
    ('bias', 'weight')
    """
    caps_bytes = _caps_bytes(bucket_cap_mb, first_bucket_mb)
    specs, offered = _described(tree, sparse, select)
    if order is None:
        return plan_leaves(specs, order=offered, caps_bytes=caps_bytes)
    plan = plan_leaves(specs, order=list(order), caps_bytes=caps_bytes)
    _check_complete(plan, set(offered))
    return plan


@entrance
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

    For leaves of one dtype on one device and the algorithm "all_reduce", no other plan with
    buckets contiguous in ready order simulates faster. For several dtypes or devices, which share
    the links, and for other algorithms, the plan is the best one found. In simulation it is never
    slower than `plan_buckets` with its default caps, in registration or in ready order.

    Args:
        tree: as in `plan_buckets`.
        ready_times_s: seconds from the start of a step to each gradient, by path or for each leaf
            in the plan's order; NaN for a leaf without a gradient. See `simulate`.
        cost: cost model of the links, or one for each axis of the topology.
        topology: the ranks.
        algorithm: algorithm that reduces the buckets; see `make_schedule`.
        sparse: as in `plan_buckets`; these buckets come last.
        select: as in `plan_buckets`.

    Returns:
        A plan in ready order. The cap of each bucket is its size, and the cap of the plan, for a
        later `rebucket`, is the size of its largest bucket; unless a plan of `plan_buckets` is
        best.

    Raises:
        NoGradientError, TypeError: as `plan_buckets`.
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
    """Describe all leaves, and list those to reduce in reverse insertion order."""
    tree = named_params(tree)
    leaves, treedef = flatten(tree)
    specs = leaf_specs(treedef.paths, leaves, _sparse_paths(sparse, treedef.paths))
    for spec in specs:
        if spec.sparse and not spec.reducible:
            raise ValueError(
                f"sparse holds {spec.path!r} of dtype {spec.dtype}, which has no gradient; name "
                "leaves of a floating or complex dtype"
            )
    selected = _selected(specs, select)
    offered = [leaf for leaf in reversed(insertion_order(tree, treedef)) if leaf in selected]
    return specs, offered


def _caps_bytes(bucket_cap_mb: float | Sequence[float], first_bucket_mb: float) -> tuple[int, ...]:
    if isinstance(bucket_cap_mb, Sequence) and not isinstance(bucket_cap_mb, str):
        caps = {f"bucket_cap_mb[{number}]": cap for number, cap in enumerate(bucket_cap_mb)}
        if not caps:
            raise ValueError("bucket_cap_mb is an empty list; it must hold at least one cap")
    else:
        caps = {"first_bucket_mb": first_bucket_mb, "bucket_cap_mb": bucket_cap_mb}
    return tuple(_bytes(name, cap_mb) for name, cap_mb in caps.items())


def _bytes(name: str, cap_mb: Any) -> int:
    is_number = isinstance(cap_mb, Real) and not isinstance(cap_mb, bool)
    if not is_number or not 1 <= cap_mb * MIB <= MAX_COUNT:
        raise ValueError(
            f"{name} must be a finite number of MB (of {MIB} bytes) that is at least one "
            f"byte, got {cap_mb!r}"
        )
    return int(cap_mb * MIB)


def _sparse_paths(sparse: Iterable[str], paths: Sequence[str]) -> frozenset[str]:
    if isinstance(sparse, str):
        raise ValueError(f"sparse must be a collection of paths, got the single str {sparse!r}")
    declared = frozenset(sparse)
    unknown = sorted(declared.difference(paths), key=repr)
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), paths)
        raise ValueError(
            f"sparse holds {counted(len(unknown), 'path')} that the tree of "
            f"{counted(len(paths), 'leaf')} does not "
            f"have; the first is {unknown[0]!r}; similar: {', '.join(map(repr, close)) or '-'}"
        )
    return declared


def _selected(specs: Sequence[LeafSpec], select: Callable[[str], bool] | None) -> set[int]:
    """Return the indices of the leaves to reduce."""
    if select is None and specs and {spec.dtype for spec in specs} <= ITEM_BYTES.keys():
        return set(range(len(specs)))
    selected = set()
    for index, spec in enumerate(specs):
        supported = spec.dtype in ITEM_BYTES
        if not supported and not spec.dtype.startswith(_INEXACT_PREFIXES):
            continue
        if select is not None and not select(spec.path):
            continue
        if not supported:
            raise TypeError(
                f"{leaf_text(spec.path)} has dtype {spec.dtype}, in which gradients cannot be "
                f"reduced ({', '.join(ITEM_BYTES)} can); cast it, or keep it local: "
                f"select=lambda path: path != {spec.path!r}"
            )
        selected.add(index)
    if not selected:
        found = Counter(spec.dtype for spec in specs)
        there = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(found.items()))
        raise NoGradientError(
            f"there is nothing to reduce: the tree has {counted(len(specs), 'leaf')} "
            f"({there or 'empty'}), and no floating or complex leaf"
            f"{' that select accepts' if select else ''}"
        )
    return selected


def _check_complete(plan: BucketPlan, selected: set[int]) -> None:
    """Check that an explicit order holds exactly the leaves to reduce."""
    offered = set(plan.order)
    for problem, leaves in (
        ("leaves out", selected - offered),
        ("holds, though select rejects it,", offered - selected),
    ):
        if leaves:
            leaf = min(leaves)
            raise ValueError(
                f"order {problem} leaf {leaf} ({plan.leaves[leaf].path!r}) and {len(leaves) - 1} "
                f"more; it has {counted(len(offered), 'leaf')}, and {len(selected)} are to be "
                f"reduced"
            )
