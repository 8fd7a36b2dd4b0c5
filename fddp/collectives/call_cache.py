"""Cache of operator programs and flattened trees, by call site."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fddp.collectives.communicator import Communicator
from fddp.collectives.group_position import OperatorArgs, checked_root
from fddp.collectives.operator_program import (
    GIVES_ROWS,
    TAKES_ROWS,
    GroupPosition,
    Operator,
    OperatorProgram,
    bucketed,
)
from fddp.core.plan.leaf import LeafSpec
from fddp.core.plan.plan import BucketPlan
from fddp.core.text import counted, leaf_text
from fddp.errors import PlanMismatchError
from fddp.native.operands import operands
from fddp.telemetry.call_site import Site
from fddp.transport.operation import SUMMABLE_DTYPES
from fddp.tree.describe import leaf_specs
from fddp.tree.foreign import adapted
from fddp.tree.pytree import TreeDef, flatten

if TYPE_CHECKING:
    from fddp._C import Operands


class CallSpec(NamedTuple):
    """Validated arguments of a call.

    Attributes:
        operator: name of the operator.
        place: ranks that take part.
        root: source rank of `broadcast_from`; else -1.
        plan: the caller's plan, if any.
        tiled: True if ranks are concatenated along the first axis instead of a new one.
    """

    operator: Operator | Literal["sync_on_backward"]
    place: GroupPosition
    root: int = -1
    plan: BucketPlan | None = None
    tiled: bool = False


class FlattenedCall(NamedTuple):
    """A flattened tree and its program.

    Attributes:
        leaves: leaves that are not None, in canonical order.
        entry: cache entry of such trees.
        treedef: the tree without its leaves.
    """

    leaves: list[Tensor]
    entry: CacheEntry
    treedef: TreeDef

    def rebuilt(self, results: Sequence[Tensor]) -> Any:
        """A tree of the same structure with other leaves."""
        present, results = self.entry.present, untiled(self.entry.call, results)
        if present is None:
            return self.treedef.unflatten(results)
        whole: list[Tensor | None] = [None] * len(self.treedef.paths)
        for position, result in zip(present, results, strict=True):
            whole[position] = result
        return self.treedef.unflatten(whole)


class CacheEntry(NamedTuple):
    """Cached results for one call site.

    Attributes:
        call: arguments of the last call there.
        paths: paths of the tree.
        present: positions of the leaves that are not None; None if all leaves are present.
        program: the program for the leaves.
        operands: metadata of the leaves.
    """

    call: CallSpec
    paths: tuple[str, ...]
    present: tuple[int, ...] | None
    program: OperatorProgram
    operands: Operands


def checked_spec(args: OperatorArgs, place: GroupPosition) -> CallSpec:
    """Validate the caller's arguments.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    operator, plan = args.operator, args.plan
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(f"{operator}: plan must be a BucketPlan, got {type(plan).__name__}")
    root = checked_root(args.root, place) if operator == "broadcast_from" else -1
    return CallSpec(operator, place, root, plan, args.tiled)


def flatten_call(
    communicator: Communicator, call: CallSpec, tree: Any, site: Site
) -> FlattenedCall:
    """Flatten a tree, and look up or build the program for its leaves.

    Raises:
        TypeError: a leaf is not a tensor, or the operator does not support its dtype.
        ValueError: a leaf's shape does not fit the operator.
        PlanMismatchError: the plan is for another tree.
    """
    patterns: dict[Any, CacheEntry] = communicator.known.setdefault("patterns", {})
    key = (site.code, site.instruction)
    entry = patterns.get(key)
    leaves, treedef = adapted(*flatten(tree), "tree")
    leaves = tiles(call, leaves, treedef.paths)
    if (
        entry is not None
        and entry.call == call
        and entry.paths is treedef.paths
        and entry.operands.matches(leaves)
    ):
        return FlattenedCall(_select(leaves, entry.present), entry, treedef)
    if len(patterns) >= _MOST_PATTERNS:
        patterns.clear()
    found = patterns[key] = _cache_entry(communicator, call, leaves, treedef)
    return FlattenedCall(_select(leaves, found.present), found, treedef)


def _cache_entry(
    communicator: Communicator,
    call: CallSpec,
    leaves: Sequence[Any],
    treedef: TreeDef,
) -> CacheEntry:
    there = tuple(k for k, leaf in enumerate(leaves) if leaf is not None)
    own = [leaves[k] for k in there]
    key = (call, treedef.paths, there, tuple(_key(leaf) for leaf in own))
    program = communicator.cached(
        "programs", key, lambda: program_of(communicator, call, treedef.paths, there, own)
    )
    present = None if len(there) == len(leaves) else there
    return CacheEntry(call, treedef.paths, present, program, operands(leaves))


def tiles(call: CallSpec, leaves: list[Any], paths: Sequence[str]) -> list[Any]:
    """Leaves of a `tiled` call. For operators of `TAKES_ROWS` the first axis is split by rank.

    Raises:
        ValueError: a leaf is a scalar, or can't be split into equal parts.
    """
    if not call.tiled:
        return leaves
    n = call.place.size if call.operator in TAKES_ROWS else 1
    tiled = []
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, Tensor):
            if leaf.dim() == 0 or leaf.shape[0] % n:
                raise ValueError(
                    f"{call.operator}: {leaf_text(path)} of shape {tuple(leaf.shape)} can't be cut "
                    f"into {n} equal parts along its first axis; pad it, or leave tiled=True out"
                )
            if call.operator in TAKES_ROWS:
                leaf = leaf.reshape(n, leaf.shape[0] // n, *leaf.shape[1:])
        tiled.append(leaf)
    return tiled


def untiled(call: CallSpec, results: Sequence[Tensor]) -> Sequence[Tensor]:
    """Results of a call, where `tiled` concatenates ranks along the first axis."""
    if call.tiled and call.operator in GIVES_ROWS:
        return [result.flatten(0, 1) for result in results]
    return results


def _select(leaves: list[Any], present: tuple[int, ...] | None) -> list[Tensor]:
    return leaves if present is None else [leaves[k] for k in present]


# Dtypes that `torch.amax` supports on every device.
_COMPARED = (SUMMABLE_DTYPES - {torch.complex64, torch.complex128}) | {torch.int16, torch.bool}

_SUMMED = (SUMMABLE_DTYPES, "which can't be summed")
# Dtypes that an operator takes, and the problem of others.
_TAKEN: dict[str, tuple[Collection[torch.dtype], str]] = {
    **dict.fromkeys(("psum", "pmean", "reduce_scatter"), _SUMMED),
    "pmax": (_COMPARED, "for which torch.amax is not implemented"),
}

_MOST_PATTERNS = 256


def _key(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return (leaf.shape, leaf.dtype, leaf.device, leaf.layout)


def program_of(
    communicator: Communicator,
    call: CallSpec,
    paths: Sequence[str],
    present: Sequence[int],
    leaves: Sequence[Any],
) -> OperatorProgram:
    """The program for `leaves`, which are at the positions `present` of the tree's `paths`."""
    own_paths = [paths[k] for k in present]
    for path, leaf in zip(own_paths, leaves, strict=True):
        _check(call, path, leaf)
    specs = [spec._replace(strides=None) for spec in leaf_specs(own_paths, leaves)]
    units = tuple(_unit(call, spec) for spec in specs)
    devices = tuple(leaf.device for leaf in leaves)
    buckets = bucketed(units, devices, communicator.cap_bytes)
    if call.plan is not None:
        buckets = _planned(call.plan, present, specs, buckets)
    operator = "pmean" if call.operator == "sync_on_backward" else call.operator
    return OperatorProgram(
        operator, call.place, call.root, units, devices, buckets, tiled=call.tiled
    )


def _check(call: CallSpec, path: str, leaf: Any) -> None:
    operator = call.operator
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{operator}: {leaf_text(path)} is {type(leaf).__name__}; it takes dense tensors and "
            "None"
        )
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"{operator}: {leaf_text(path)} is of layout {leaf.layout}; it takes dense tensors and "
            f"None: pass its to_dense(), or average sparse gradients by a GradSync (sparse=)"
        )
    dtype = leaf.dtype
    inexact = dtype.is_floating_point or dtype.is_complex
    if operator == "pmean" and not inexact:
        raise TypeError(
            f"pmean: {leaf_text(path)} is of {dtype}, which can't represent a mean; use psum, or "
            f"convert it to a floating dtype"
        )
    if operator == "sync_on_backward":
        return
    if operator == "pmax" and dtype.is_complex:
        raise TypeError(
            f"pmax: {leaf_text(path)} is of {dtype}, which has no order; take its abs()"
        )
    taken, problem = _TAKEN.get(operator, ((dtype,), ""))
    if dtype not in taken:
        raise TypeError(
            f"{operator}: {leaf_text(path)} is of {dtype}, {problem}; convert it to one of "
            f"{', '.join(sorted(map(str, taken)))}"
        )


def _unit(call: CallSpec, spec: LeafSpec) -> LeafSpec:
    if call.operator not in TAKES_ROWS:
        return spec
    n = call.place.size
    if not spec.shape or spec.shape[0] != n:
        raise ValueError(
            f"{call.operator}: {leaf_text(spec.path)} of shape {spec.shape} needs a leading axis "
            f"of {n}, one slice for each rank; pass tiled=True to cut a longer one into {n} parts"
        )
    return spec._replace(shape=spec.shape[1:])


def _planned(
    plan: BucketPlan,
    present: Sequence[int],
    specs: Sequence[LeafSpec],
    otherwise: tuple[tuple[int, ...], ...],
) -> tuple[tuple[int, ...], ...]:
    """The plan's buckets over the leaves that are present, then buckets of unplanned leaves."""
    there = {leaf: k for k, leaf in enumerate(present)}
    for leaf, wanted in enumerate(plan.leaves):
        k = there.get(leaf)
        found = None if k is None else specs[k]
        if found is None and wanted.dtype == "none":
            continue
        if found is None or found[:3] != wanted[:3]:
            has = "None" if found is None else f"{found.path!r}, {found.dtype} of {found.shape}"
            raise PlanMismatchError(
                f"the plan has {wanted.path!r}, {wanted.dtype} of {wanted.shape}, where the tree "
                f"has {has}; make a plan for this tree (fddp.plan_buckets), or leave plan= out"
            )
    if len(plan.leaves) <= max(present, default=-1):
        raise PlanMismatchError(
            f"the plan is for {counted(len(plan.leaves), 'leaf')}, and the tree has more; make a "
            f"plan for this tree (fddp.plan_buckets), or leave plan= out"
        )
    buckets = [tuple(there[leaf] for leaf in bucket.leaves) for bucket in plan.buckets]
    planned = {k for bucket in buckets for k in bucket}
    rest = [tuple(k for k in bucket if k not in planned) for bucket in otherwise]
    return (*buckets, *(bucket for bucket in rest if bucket))
