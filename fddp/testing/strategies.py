"""Hypothesis strategies: trees, plans, topologies, schedules, gradients and their arrivals.

Examples are small, include the relevant edge cases, and are always valid. Tensors are filled from a
drawn seed, so that failing examples are short, with numbers of magnitude 1, so that no dtype
overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from fddp import BucketPlan, Schedule, Topology, make_schedule
from fddp.extend import Algorithm, LeafSpec, Scaling, dense_strides, plan_leaves, tree_flatten

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)
"""Dtypes of gradients that can be reduced."""

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
"""Algorithms of `make_schedule`."""

_WITHOUT_GRADIENT = (None, torch.int64, torch.int32, torch.bool)
_KEYS = ("weight", "bias", "layers", "0", "norm", "embedding", "head", "scale")
_AXES = (("world",), ("host", "local"), ("pod", "host", "local"))
_SHAPES = st.lists(st.integers(0, 4), max_size=4)  # 4 dimensions: those of channels_last
_SEEDS = st.integers(0, 2**16)
_RARELY = st.sampled_from((False, False, True))


@st.composite
def param_trees(
    draw: st.DrawFn, *, max_leaves: int = 6, dtypes: Sequence[torch.dtype] = DTYPES
) -> Any:
    """Trees of parameters: nested dicts, lists and tuples of tensors.

    Leaves include scalars, empty tensors, dense tensors in other memory orders (such as
    channels_last), integers, and `None`. At least one leaf has a gradient.

    Args:
        max_leaves: maximum number of leaves.
        dtypes: dtypes of the leaves with gradients.

    Example:
        >>> from hypothesis import find
        >>> from fddp import tree_map
        >>> tree_map(lambda leaf: leaf.shape, find(param_trees(), lambda tree: len(tree) == 2))
        {'weight': torch.Size([]), 'bias': torch.Size([])}
    """
    kinds = st.sampled_from((*dtypes, *_WITHOUT_GRADIENT))
    others = draw(st.lists(kinds, max_size=max_leaves - 1))
    kind_of_each = draw(st.permutations([draw(st.sampled_from(dtypes)), *others]))
    leaves = [None if kind is None else draw(_tensors(kind)) for kind in kind_of_each]
    return _nested(draw, leaves)


def gradients(params: Any, ranks: int) -> st.SearchStrategy[list[Any]]:
    """Gradient trees of `params` for all ranks, as for `assert_mean`.

    Any leaf may be `None` on any rank, expanded, or in any memory order. Integers have no gradient.

    Args:
        params: a tree of tensors.
        ranks: number of trees.

    Example:
        >>> from hypothesis import find
        >>> find(gradients({"w": torch.zeros(2)}, ranks=2), lambda trees: True)
        [{'w': None}, {'w': None}]
    """
    leaves, treedef = tree_flatten(params)
    tree = st.tuples(*map(_gradient, leaves)).map(lambda own: treedef.unflatten(list(own)))
    return st.lists(tree, min_size=ranks, max_size=ranks)


@st.composite
def plans(draw: st.DrawFn, *, max_leaves: int = 8, sparse: bool = False) -> BucketPlan:
    """Bucket plans over leaves of any dtypes, in any order, with small caps.

    A plan has at least one bucket. Some leaves may be in no bucket.

    Args:
        max_leaves: maximum number of leaves.
        sparse: True to include leaves with sparse gradients.

    Example:
        >>> from hypothesis import find
        >>> [bucket.leaves for bucket in find(plans(), lambda plan: len(plan.buckets) > 1).buckets]
        [(0,), (1,)]
    """
    count = draw(st.integers(1, max_leaves))
    leaves = [draw(_leaf_specs(f"p{number:02}", sparse)) for number in range(count)]
    reducible = [index for index, leaf in enumerate(leaves) if leaf.reducible]
    assume(reducible)
    order = draw(st.permutations(reducible))[: draw(st.integers(1, len(reducible)))]
    caps_bytes = draw(st.lists(st.integers(1, 512), min_size=1, max_size=2))
    return plan_leaves(leaves, order=order, caps_bytes=caps_bytes)


@st.composite
def topologies(draw: st.DrawFn, *, max_ranks: int = 8, max_axes: int = 3) -> Topology:
    """Topologies of one to three axes, including axes of size 1.

    Args:
        max_ranks: maximum world size.
        max_axes: maximum number of axes, at most 3.

    Example:
        >>> from hypothesis import find
        >>> find(topologies(), lambda topology: topology.world_size == 6).world_size
        6
    """
    names = draw(st.sampled_from(_AXES[:max_axes]))
    sizes: dict[str, int] = {}
    room = max_ranks
    for name in names:
        sizes[name] = draw(st.integers(1, room))
        room //= sizes[name]
    return Topology(**sizes)


@st.composite
def schedules(
    draw: st.DrawFn,
    plan: st.SearchStrategy[BucketPlan] | None = None,
    topology: st.SearchStrategy[Topology] | None = None,
    *,
    algorithms: Sequence[Algorithm] = ALGORITHMS,
    deterministic: bool = False,
    piggyback: bool = True,
) -> Schedule:
    """Schedules of `make_schedule`, with any scaling, split and `reduce_dtype`.

    Args:
        plan: strategy of plans; by default `plans(sparse=True)`.
        topology: strategy of topologies; by default `topologies()`.
        algorithms: algorithms to draw from, if they support plan and topology.
        deterministic, piggyback: as for `make_schedule`.

    Example:
        >>> from hypothesis import find
        >>> from fddp import Topology
        >>> schedule = find(schedules(algorithms=["hierarchical"]), lambda schedule: True)
        >>> schedule.topology, schedule.scaling
        (Topology(host=1, local=1), 'before')
    """
    drawn = draw(plans(sparse=True) if plan is None else plan)
    ranks = draw(topologies() if topology is None else topology)
    divides = not any(bucket.sparse for bucket in drawn.buckets)
    suits = {
        "all_reduce": True,
        "hierarchical": len(ranks.axes) > 1,
        "reduce_scatter": divides,
        "all_gather": divides and not deterministic,
    }
    suitable = [algorithm for algorithm in algorithms if suits[algorithm]]
    assume(suitable)
    scalings = [s for s in get_args(Scaling) if s != "average" or not deterministic]
    split_bytes = draw(st.none() | st.integers(1, 512))
    return make_schedule(
        drawn,
        ranks,
        algorithm=draw(st.sampled_from(suitable)),
        scaling=draw(st.sampled_from(scalings)),
        reduce_dtype=draw(st.sampled_from((None, "float32", "float64"))),
        split_mb=None if split_bytes is None else split_bytes / 2**20,
        deterministic=deterministic,
        piggyback=piggyback,
    )


def arrivals(plan: BucketPlan, ranks: int) -> st.SearchStrategy[list[list[int]]]:
    """Orders of gradient arrival on all ranks, as for `assert_same_collectives`.

    On a rank, each leaf may arrive once, or some never, or some several times, as with tied weights
    and checkpoints.

    Args:
        plan: the plan; arrivals are indices of its leaves.
        ranks: number of lists.

    Example:
        >>> from hypothesis import find
        >>> leaves = [LeafSpec("a", (2,), "float32"), LeafSpec("b", (2,), "float32")]
        >>> plan = plan_leaves(leaves, order=[1, 0], caps_bytes=[1])
        >>> find(arrivals(plan, ranks=2), lambda orders: orders[0].count(1) == 2)
        [[1, 1], []]
    """
    leaves = [*plan.reduced, *plan.local]
    repeats_and_omissions = st.lists(st.sampled_from(leaves), max_size=3 * len(leaves))
    one_rank = st.one_of(repeats_and_omissions, st.permutations(leaves))
    return st.lists(one_rank, min_size=ranks, max_size=ranks)


def _nested(draw: st.DrawFn, leaves: list[Any]) -> Any:
    children: list[Any] = []
    while leaves:
        count = draw(st.integers(1, len(leaves)))
        deeper = count > 1 and (children or count < len(leaves))
        children.append(_nested(draw, leaves[:count]) if deeper else leaves[0])
        leaves = leaves[count:] if deeper else leaves[1:]
    container = draw(st.sampled_from((dict, list, tuple)))
    if container is not dict:
        return container(children)
    count = len(children)
    if count > len(_KEYS):
        return {f"layer{number}": child for number, child in enumerate(children)}
    keys = draw(st.lists(st.sampled_from(_KEYS), min_size=count, max_size=count, unique=True))
    return dict(zip(keys, children, strict=True))


@st.composite
def _tensors(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Dense tensors in any memory order."""
    shape = draw(_SHAPES)
    order = draw(_orders(len(shape)))
    stored = _numbers([shape[dim] for dim in order], dtype, draw(_SEEDS))
    return stored.permute([order.index(dim) for dim in range(len(shape))])


def _orders(ndim: int) -> st.SearchStrategy[Sequence[int]]:
    dims = tuple(range(ndim))
    channels_last = (*dims[:1], *dims[2:], *dims[1:2])
    return st.one_of(st.just(dims), st.just(channels_last), st.permutations(dims))


def _numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), generator=generator, dtype=dtype)
    return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)


def _gradient(leaf: Tensor | None) -> st.SearchStrategy[Tensor | None]:
    if leaf is None or not (leaf.is_floating_point() or leaf.is_complex()):
        return st.none()
    dtype, shape = leaf.dtype, tuple(leaf.shape)
    axes = tuple(range(len(shape)))[::-1]
    return st.one_of(
        st.none(),
        _SEEDS.map(lambda seed: _numbers(shape, dtype, seed)),
        _SEEDS.map(lambda seed: _numbers(shape[::-1], dtype, seed).permute(axes)),
        _SEEDS.map(lambda seed: _numbers((), dtype, seed).expand(shape)),
    )


@st.composite
def _leaf_specs(draw: st.DrawFn, path: str, sparse: bool) -> LeafSpec:
    names = [str(kind).removeprefix("torch.").lower() for kind in (*DTYPES, *_WITHOUT_GRADIENT)]
    dtype = draw(st.sampled_from(names))
    if dtype == "none":
        return LeafSpec(path, (), dtype)
    shape = tuple(draw(_SHAPES))
    order = draw(_orders(len(shape)))
    strides, span = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = span
        span *= shape[dim]
    leaf = LeafSpec(path, shape, dtype, dense_strides(shape, strides))
    may_be_sparse = sparse and leaf.reducible and len(shape) > 0
    return leaf._replace(sparse=True, strides=None) if may_be_sparse and draw(_RARELY) else leaf
