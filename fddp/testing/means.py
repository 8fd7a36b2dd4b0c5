"""`assert_mean`: the results of a `GradSync` are the weighted mean."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fddp import GradSync
from fddp.extend import entrance, exchange, leaf_text, tree_flatten

_Leaves = Sequence[Tensor | None]


@entrance
def assert_mean(
    sync: GradSync,
    trees: Sequence[Any],
    weights: Sequence[float] | None = None,
    *,
    through: Callable[..., Any] | None = None,
    rtol: float | None = None,
) -> Any:
    """Assert that all ranks get the weighted mean of their gradients. A collective call.

    The reference is computed in float64 or complex128. Also asserted: structure, shapes and dtypes
    are preserved; all ranks have the same bits; a result is None if and only if no rank of positive
    weight has a gradient; a local leaf keeps the rank's own gradient; inputs are not written.

    Args:
        sync: synchronises this rank's tree. If its algorithm yields shards, they are gathered.
        trees: gradient trees of all ranks, the same list on every rank.
        weights: weights of all ranks; by default 1.
        through: function to call instead of `sync`, for example one that compresses gradients. It
            gets this rank's tree, and `weight=` if weights are given.
        rtol: tolerance of an element, relative to the mean of the ranks' magnitudes; by default the
            rounding error of the leaf's dtype.

    Returns:
        The result of the synchronisation.

    Raises:
        AssertionError: an assertion fails; on every rank, with rank and leaf.
        ValueError: the number of trees or weights is not the world size.

    Example:
        >>> import fddp, torch
        >>> def run(group):
        ...     params = {"w": torch.zeros(3)}
        ...     trees = [{"w": torch.randn(3, generator=torch.Generator().manual_seed(rank))}
        ...              for rank in range(2)]
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         assert_mean(sync, trees)
        ...         assert_mean(sync, trees, weights=[1.0, 7.0])
        ...         rounded = lambda tree: fddp.tree_map(lambda g: g.bfloat16().float(), tree)
        ...         assert_mean(sync, trees, through=lambda tree: sync(rounded(tree)), rtol=2**-8)
        ...         try:
        ...             assert_mean(sync, trees, through=lambda tree: sync(rounded(tree)))
        ...         except AssertionError as error:
        ...             return str(error)
        >>> print(fddp.loopback(2, run)[0])
        rank 0: leaf 'w' is off by ... times the mean of the ranks' magnitudes
        where at most 4.768e-07 ...
    """
    __tracebackhide__ = True
    for name, values in (("trees", trees), ("weights", weights)):
        if values is not None and len(values) != sync.world_size:
            raise ValueError(f"{name} must have one for each of {sync.world_size} ranks")
    own = trees[sync.rank]
    before = _snapshots(own)
    call = through or (partial(_gathered, sync) if sync.schedule.result == "sharded_mean" else sync)
    result = call(own) if weights is None else call(own, weight=weights[sync.rank])
    counted = [1.0] * sync.world_size if weights is None else [float(w) for w in weights]
    problem = _write_problem(before) or _problem(sync, trees, counted, result, rtol)
    received = exchange([problem, _bits(sync, result, problem)], (str, object), sync.group)
    for rank, (text, _) in enumerate(received):
        if text:
            raise AssertionError(f"rank {rank}: {text}")
    for rank, (_, bits) in enumerate(received):
        differing = [path for path, digest in bits.items() if digest != received[0][1][path]]
        if differing:
            raise AssertionError(
                f"ranks 0 and {rank} got different bits for {leaf_text(differing[0])}"
            )
    return result


def _gathered(sync: GradSync, grads: Any, *, weight: float = 1.0) -> Any:
    return sync.all_gather(sync.reduce_scatter(grads, weight=weight))


class _Snapshot(NamedTuple):
    """Copy of a leaf, to detect writes."""

    path: str
    leaf: Tensor
    copy: Tensor
    version: int | None


def _snapshots(tree: Any) -> list[_Snapshot]:
    leaves, treedef = tree_flatten(tree)
    return [
        _Snapshot(path, leaf, leaf.detach().clone(), _version(leaf))
        for path, leaf in zip(treedef.paths, leaves, strict=True)
        if leaf is not None
    ]


def _write_problem(before: list[_Snapshot]) -> str:
    """Name a leaf that was written, or return ""."""
    for path, leaf, copy, version in before:
        if _version(leaf) != version or _digest(leaf) != _digest(copy):
            return f"{leaf_text(path, 'input gradients')} was written"
    return ""


def _version(leaf: Tensor) -> int | None:
    return None if leaf.is_inference() else leaf._version


def _problem(
    sync: GradSync, trees: Sequence[Any], weights: list[float], result: Any, rtol: float | None
) -> str:
    own, treedef = tree_flatten(trees[sync.rank])
    found, found_def = tree_flatten(result)
    if found_def != treedef:
        return f"the result has another structure: {found_def.paths} instead of {treedef.paths}"
    every = [tree_flatten(tree)[0] for tree in trees]
    local = set(sync.plan.local)
    for leaf, path in enumerate(treedef.paths):
        if leaf in local:
            parts, counted = [own[leaf]], [weights[sync.rank]]
        else:
            parts, counted = [leaves[leaf] for leaves in every], weights
        shape = sync.plan.leaves[leaf].shape
        problem = _leaf_problem(_Mean.of(parts, counted, shape), found[leaf], parts, rtol)
        if problem and sync.plan.leaves[leaf].reducible:
            return f"{leaf_text(path)} {problem}"
    return ""


@dataclass(frozen=True)
class _Mean:
    """Weighted mean in the widest dtype, with the mean of magnitudes as scale of rounding errors.

    Attributes:
        value: the mean; None if no part has positive weight.
        magnitude: mean of magnitudes, real, of the same shape.
        world_size: number of parts.
    """

    value: Tensor | None
    magnitude: Tensor | None
    world_size: int

    @classmethod
    def of(cls, parts: _Leaves, weights: list[float], shape: tuple[int, ...]) -> _Mean:
        pairs = [(p, w) for p, w in zip(parts, weights, strict=True) if p is not None and w > 0.0]
        if not pairs:
            return cls(None, None, len(parts))
        total = sum(weights)
        widest = torch.complex128 if pairs[0][0].is_complex() else torch.float64
        terms = [_dense(part).to(widest) * (weight / total) for part, weight in pairs]
        value, magnitude = terms[0], terms[0].abs()
        for term in terms[1:]:
            value, magnitude = value + term, magnitude + term.abs()
        return cls(value, magnitude, len(parts))


def _leaf_problem(mean: _Mean, found: Any, parts: _Leaves, rtol: float | None) -> str:
    if mean.value is None or mean.magnitude is None:
        return "" if found is None else "is a tensor, but no rank of positive weight has a gradient"
    if not isinstance(found, Tensor):
        return f"is {found}, but a rank of positive weight has a gradient"
    given = next(part for part in parts if part is not None)
    if (found.dtype, found.shape) != (given.dtype, given.shape):
        return (
            f"is {found.dtype} of shape {tuple(found.shape)}, and the input is {given.dtype} of "
            f"shape {tuple(given.shape)}"
        )
    return _distance_problem(mean, mean.value, mean.magnitude, _dense(found), rtol)


def _distance_problem(
    mean: _Mean, value: Tensor, magnitude: Tensor, found: Tensor, rtol: float | None
) -> str:
    finite = torch.isfinite(value)
    if not torch.equal(finite, torch.isfinite(found)):
        return "is finite where the mean is not, or vice versa"
    if not finite.any():
        return ""
    info = torch.finfo(found.dtype)
    # Rounded are each rank's share, each sum, the rescaling, and the final cast.
    roundings = mean.world_size + 2
    limit = info.eps * roundings if rtol is None else rtol
    distance = (found.to(value.dtype) - value).abs()[finite]
    magnitude = magnitude[finite]
    # Rescaling also amplifies underflow, up to 64 times in float16.
    smallest = info.smallest_normal * info.eps
    beyond = distance > limit * magnitude + 64 * smallest * roundings
    if not beyond.any():
        return ""
    worst = (distance / magnitude).nan_to_num()[beyond].max()
    return (
        f"is off by {float(worst):.4g} times the mean of the ranks' magnitudes where at most "
        f"{limit:.4g} is correct; pass rtol for lossy synchronisation"
    )


def _bits(sync: GradSync, result: Any, problem: str) -> dict[str, str]:
    """Return digests by path of the leaves that must be equal on all ranks."""
    if problem:
        return {}
    leaves, treedef = tree_flatten(result)
    return {treedef.paths[leaf]: _digest(leaves[leaf]) for leaf in sync.plan.reduced}


def _digest(leaf: Tensor | None) -> str:
    if leaf is None:
        return "none"
    row = _dense(leaf).cpu().clone(memory_format=torch.contiguous_format).view(-1)
    return hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest()


def _dense(leaf: Tensor) -> Tensor:
    leaf = leaf.detach()
    return (leaf.to_dense() if leaf.is_sparse else leaf).resolve_conj().resolve_neg()
