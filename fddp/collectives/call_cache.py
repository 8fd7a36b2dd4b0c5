"""What operators know of the trees that they are given: worked out once for each call site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fddp.collectives.communicator import Communicator
from fddp.collectives.operator_program import GroupPosition, Operator, OperatorProgram, bucketed
from fddp.core.plan.leaf import LeafSpec
from fddp.core.plan.plan import BucketPlan
from fddp.errors import PlanMismatchError
from fddp.native.operands import Operands, operands
from fddp.telemetry.call_site import Site
from fddp.transport.operation import SUMMABLE_DTYPES
from fddp.tree.cached import KnownTrees
from fddp.tree.describe import leaf_specs
from fddp.tree.foreign import adapted
from fddp.tree.pytree import TreeDef, flatten


class CallSpec(NamedTuple):
    """What the caller asks for.

    Attributes:
        operator: what to do.
        place: with whom.
        root: for `broadcast_from`, whose values; -1 elsewhere.
        plan: the buckets, if the caller has a plan.
        tiled: whether the ranks' axis is the leaves' first one.
    """

    operator: Operator | Literal["sync_on_backward"]
    place: GroupPosition
    root: int = -1
    plan: BucketPlan | None = None
    tiled: bool = False


class FlattenedCall(NamedTuple):
    """A tree taken apart.

    Attributes:
        leaves: those that are not None, in canonical order.
        pattern: what is known of trees like it.
        treedef: the tree without its leaves.
    """

    leaves: list[Tensor]
    pattern: CacheEntry
    treedef: TreeDef

    @property
    def program(self) -> OperatorProgram:
        """What to do with the leaves."""
        return self.pattern.program

    def rebuilt(self, results: Sequence[Tensor]) -> Any:
        """The tree around other leaves."""
        present = self.pattern.present
        if present is None:
            return self.treedef.unflatten(results)
        whole: list[Tensor | None] = [None] * len(self.treedef.paths)
        for position, result in zip(present, results, strict=True):
            whole[position] = result
        return self.treedef.unflatten(whole)


class CacheEntry(NamedTuple):
    """What is known of trees that were seen at one place in the code.

    Attributes:
        call: what was asked for there.
        paths: the trees' paths.
        present: positions of the leaves that are not None; None if all are.
        program: what to do.
        operands: what the leaves are.
        trees: takes such trees apart.
    """

    call: CallSpec
    paths: tuple[str, ...]
    present: tuple[int, ...] | None
    program: OperatorProgram
    operands: Operands
    trees: KnownTrees


def flatten_call(
    communicator: Communicator, call: CallSpec, tree: Any, site: Site
) -> FlattenedCall:
    """A tree's leaves, and the program for them.

    Raises:
        TypeError: a leaf is no tensor, or of a dtype that the operator does not take.
        ValueError: a leaf's shape does not fit the operator.
        PlanMismatchError: the plan is for another tree.
    """
    patterns: dict[Any, CacheEntry] = communicator.known.setdefault("patterns", {})
    key = (site.code, site.instruction)
    entry = patterns.get(key)
    if entry is None or entry.call != call:
        leaves, treedef = adapted(*flatten(tree), "tree")
        leaves = tiles(call, leaves, treedef.paths)
    else:
        leaves, treedef = adapted(*entry.trees.flatten(tree), "tree")
        leaves = tiles(call, leaves, treedef.paths)
        if treedef.paths is entry.paths and entry.operands.matches(leaves):
            return FlattenedCall(_those(leaves, entry.present), entry, treedef)
    if len(patterns) >= _MOST_PATTERNS:
        patterns.clear()
    found = patterns[key] = _cache_entry(communicator, call, leaves, treedef, entry)
    return FlattenedCall(_those(leaves, found.present), found, treedef)


def _cache_entry(
    communicator: Communicator,
    call: CallSpec,
    leaves: Sequence[Any],
    treedef: TreeDef,
    before: CacheEntry | None,
) -> CacheEntry:
    there = tuple(k for k, leaf in enumerate(leaves) if leaf is not None)
    own = [leaves[k] for k in there]
    key = (call, treedef.paths, there, tuple(_key(leaf) for leaf in own))
    programs: dict[Any, OperatorProgram] = communicator.known.setdefault("programs", {})
    program = programs.get(key)
    if program is None:
        program = program_of(communicator, call, treedef.paths, there, own)
        if len(programs) >= _MOST_PROGRAMS:
            programs.clear()
        programs[key] = program
    present = None if len(there) == len(leaves) else there
    # A helper that many call sees many trees: what it knows of the last ones is not thrown away.
    trees = KnownTrees() if before is None else before.trees
    return CacheEntry(call, treedef.paths, present, program, operands(leaves), trees)


def tiles(call: CallSpec, leaves: list[Any], paths: Sequence[str]) -> list[Any]:
    """Leaves for a `tiled` operator: `reduce_scatter` takes them cut into the ranks' parts.

    Raises:
        ValueError: a leaf is a scalar, or has no equal parts.
    """
    if not call.tiled:
        return leaves
    n = call.place.size if call.operator == "reduce_scatter" else 1
    tiled = []
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, Tensor):
            if leaf.dim() == 0 or leaf.shape[0] % n:
                raise ValueError(
                    f"{call.operator}: leaf {path!r} of shape {tuple(leaf.shape)} can't be cut "
                    f"into {n} equal parts along its first axis; pad it, or leave tiled=True out"
                )
            if call.operator == "reduce_scatter":
                leaf = leaf.reshape(n, leaf.shape[0] // n, *leaf.shape[1:])
        tiled.append(leaf)
    return tiled


def _those(leaves: list[Any], present: tuple[int, ...] | None) -> list[Tensor]:
    return leaves if present is None else [leaves[k] for k in present]


# Of which `torch.amax` knows on every device.
_COMPARED = (SUMMABLE_DTYPES - {torch.complex64, torch.complex128}) | {torch.int16, torch.bool}

_MOST_PATTERNS = 256
_MOST_PROGRAMS = 256


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
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        found = f"of layout {leaf.layout}" if isinstance(leaf, Tensor) else type(leaf).__name__
        raise TypeError(f"{operator}: leaf {path!r} is {found}; it takes dense tensors and None")
    dtype = leaf.dtype
    inexact = dtype.is_floating_point or dtype.is_complex
    if operator == "pmean" and not inexact:
        raise TypeError(
            f"pmean: leaf {path!r} is of {dtype}, whose mean is no number of that dtype; use psum, "
            f"or convert it to a floating dtype"
        )
    if operator == "sync_on_backward":
        return
    if operator in ("psum", "pmean", "reduce_scatter") and dtype not in SUMMABLE_DTYPES:
        raise TypeError(
            f"{operator}: leaf {path!r} is of {dtype}, which can't be summed; convert it to one of "
            f"{', '.join(sorted(map(str, SUMMABLE_DTYPES)))}"
        )
    if operator == "pmax" and dtype.is_complex:
        raise TypeError(f"pmax: leaf {path!r} is of {dtype}, which has no order; take its abs()")
    if operator == "pmax" and dtype not in _COMPARED:
        raise TypeError(
            f"pmax: leaf {path!r} is of {dtype}, of which torch finds no maximum; convert it to "
            f"one of {', '.join(sorted(map(str, _COMPARED)))}"
        )


def _unit(call: CallSpec, spec: LeafSpec) -> LeafSpec:
    if call.operator != "reduce_scatter":
        return spec
    n = call.place.size
    if not spec.shape or spec.shape[0] != n:
        raise ValueError(
            f"reduce_scatter: leaf {spec.path!r} of shape {spec.shape} needs a leading axis of "
            f"{n}, one slice for each rank; pass tiled=True to cut a longer one into {n} parts"
        )
    return spec._replace(shape=spec.shape[1:])


def _planned(
    plan: BucketPlan,
    present: Sequence[int],
    specs: Sequence[LeafSpec],
    otherwise: tuple[tuple[int, ...], ...],
) -> tuple[tuple[int, ...], ...]:
    """The plan's buckets over the leaves that are there; what it does not reduce comes behind."""
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
            f"the plan is for {len(plan.leaves)} leaves, and the tree has more; make a plan for "
            f"this tree (fddp.plan_buckets), or leave plan= out"
        )
    buckets = [tuple(there[leaf] for leaf in bucket.leaves) for bucket in plan.buckets]
    planned = {k for bucket in buckets for k in bucket}
    rest = [tuple(k for k in bucket if k not in planned) for bucket in otherwise]
    return (*buckets, *(bucket for bucket in rest if bucket))
