"""Preparation of calls: validated arguments, flattened trees, and the programs kept for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

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
from fddp.native.memory import PLAIN_INSTEAD, is_dtensor, wrapper_kind
from fddp.native.operands import operands
from fddp.telemetry.call_site import Site
from fddp.transport.operation import SUMMABLE_DTYPES
from fddp.tree.describe import leaf_specs
from fddp.tree.foreign import adapted
from fddp.tree.pytree import TreeDef, flatten

if TYPE_CHECKING:
    from fddp._C import Operands
CalledOperator: TypeAlias = Operator | Literal["sync_on_backward"]

_MOST_KNOWN = 256  # call sites, and programs, of one communicator


class CallSpec(NamedTuple):
    """Validated arguments of a call.

    Attributes:
        operator: name of the operator.
        place: ranks that take part.
        root: source rank of `broadcast_from`; else -1.
        plan: the caller's plan, if any.
        tiled: True if ranks are concatenated along the first axis instead of a new one.
    """

    operator: CalledOperator
    place: GroupPosition
    root: int = -1
    plan: BucketPlan | None = None
    tiled: bool = False


class KnownCall(NamedTuple):
    """Program of the last call at a call site.

    Attributes:
        spec: arguments of the call.
        paths: paths of the tree.
        present: positions of the leaves that are not None; None if all leaves are present.
        program: the program for the leaves.
        operands: metadata of the leaves.
    """

    spec: CallSpec
    paths: tuple[str, ...]
    present: tuple[int, ...] | None
    program: OperatorProgram
    operands: Operands

    def rebuilt(self, treedef: TreeDef, results: Sequence[Tensor]) -> Any:
        """The tree of the call with other leaves."""
        if self.spec.tiled:
            results = untiled(self.spec, results)
        if self.present is None:
            return treedef.unflatten(results)
        whole: list[Tensor | None] = [None] * len(self.paths)
        for position, result in zip(self.present, results, strict=True):
            whole[position] = result
        return treedef.unflatten(whole)


class CallCache:
    """Calls that a communicator has run, and their programs.

    Attributes:
        cap_bytes: size at which a bucket is closed.
        by_site: the last call at each call site, by its instruction.
        programs: programs by arguments and leaves; several call sites may share one.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.by_site: dict[tuple[CodeType, int], KnownCall] = {}
        self.programs: dict[Any, OperatorProgram] = {}

    def prepare(
        self, spec: CallSpec, tree: Any, site: Site
    ) -> tuple[list[Tensor], TreeDef, KnownCall]:
        """Flatten a tree, and look up or build the program for its leaves.

        Returns:
            The leaves that are not None, in canonical order, the tree without leaves, and the call.

        Raises:
            TypeError: a leaf is not a tensor, or the operator does not support its dtype.
            ValueError: a leaf's shape does not fit the operator.
            PlanMismatchError: the plan is for another tree.
        """
        key = (site.code, site.instruction)
        leaves, treedef = adapted(*flatten(tree), "tree")
        paths = treedef.paths
        if spec.tiled:
            leaves = tiles(spec, leaves, paths)
        known = self.by_site.get(key)
        if (
            known is None
            or known.spec != spec
            or known.paths is not paths
            or not known.operands.matches(leaves)
        ):
            _make_room(self.by_site)
            known = self.by_site[key] = self._known(spec, leaves, paths)
        if known.present is not None:
            leaves = [leaves[k] for k in known.present]
        return leaves, treedef, known

    def _known(self, spec: CallSpec, leaves: Sequence[Any], paths: tuple[str, ...]) -> KnownCall:
        present = tuple(k for k, leaf in enumerate(leaves) if leaf is not None)
        own = [leaves[k] for k in present]
        key = (spec, paths, present, tuple(map(_form, own)))
        program = self.programs.get(key)
        if program is None:
            program = program_of(self.cap_bytes, spec, paths, present, own)
            _make_room(self.programs)
            self.programs[key] = program
        is_whole = len(present) == len(leaves)
        return KnownCall(spec, paths, None if is_whole else present, program, operands(leaves))

    def clear(self) -> None:
        """Forget all calls and programs."""
        self.by_site.clear()
        self.programs.clear()


def _make_room(cache: dict[Any, Any]) -> None:
    if len(cache) >= _MOST_KNOWN:
        cache.clear()


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    shape = None if leaf.is_nested else leaf.shape
    return (shape, leaf.dtype, leaf.device, leaf.layout)


def checked_spec(
    operator: CalledOperator, place: GroupPosition, plan: Any, root: Any, tiled: bool
) -> CallSpec:
    """Validate the caller's arguments.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if plan is not None and not isinstance(plan, BucketPlan):
        raise TypeError(f"{operator}: plan must be a BucketPlan, got {type(plan).__name__}")
    number = _checked_root(root, place) if operator == "broadcast_from" else -1
    return CallSpec(operator, place, number, plan, tiled)


def _checked_root(root: Any, place: GroupPosition) -> int:
    """`root` of `broadcast_from` as an int."""
    if isinstance(root, Tensor):
        raise TypeError(
            "broadcast_from: root must be an int that all ranks know, got a tensor; a root can't "
            "be batched by vmap"
        )
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TypeError(f"broadcast_from: root must be an int, got {root!r}")
    number = index(root)
    if not 0 <= number < place.size:
        raise ValueError(
            f"broadcast_from: root={number} is out of range; {place.size} ranks meet, numbered "
            f"from 0"
        )
    return number


def tiles(spec: CallSpec, leaves: list[Any], paths: Sequence[str]) -> list[Any]:
    """Leaves of a `tiled` call. For operators of `TAKES_ROWS` the first axis is split by rank.

    Raises:
        ValueError: a leaf is a scalar, or can't be split into equal parts.
    """
    if not spec.tiled:
        return leaves
    n = spec.place.size if spec.operator in TAKES_ROWS else 1
    tiled = []
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, Tensor):
            if leaf.dim() == 0 or leaf.shape[0] % n:
                raise ValueError(
                    f"{spec.operator}: {leaf_text(path)} of shape {tuple(leaf.shape)} can't be cut "
                    f"into {n} equal parts along its first axis; pad it, or leave tiled=True out"
                )
            if spec.operator in TAKES_ROWS:
                leaf = leaf.reshape(n, leaf.shape[0] // n, *leaf.shape[1:])
        tiled.append(leaf)
    return tiled


def untiled(spec: CallSpec, results: Sequence[Tensor]) -> Sequence[Tensor]:
    """Results of a call, where `tiled` concatenates ranks along the first axis."""
    if spec.tiled and spec.operator in GIVES_ROWS:
        return [result.flatten(0, 1) for result in results]
    return results


# Dtypes that `torch.amax` supports on every device.
_COMPARED = (SUMMABLE_DTYPES - {torch.complex64, torch.complex128}) | {torch.int16, torch.bool}

_SUMMED = (SUMMABLE_DTYPES, "which can't be summed")
# Dtypes that an operator takes, and the problem of others.
_TAKEN: dict[str, tuple[Collection[torch.dtype], str]] = {
    **dict.fromkeys(("psum", "pmean", "reduce_scatter"), _SUMMED),
    "pmax": (_COMPARED, "for which torch.amax is not implemented"),
}


def program_of(
    cap_bytes: int,
    spec: CallSpec,
    paths: Sequence[str],
    present: Sequence[int],
    leaves: Sequence[Any],
) -> OperatorProgram:
    """The program for `leaves`, which are at the positions `present` of the tree's `paths`."""
    own_paths = [paths[k] for k in present]
    for path, leaf in zip(own_paths, leaves, strict=True):
        _check(spec, path, leaf)
    whole = [leaf._replace(strides=None) for leaf in leaf_specs(own_paths, leaves)]
    units = tuple(_unit(spec, leaf) for leaf in whole)
    devices = tuple(leaf.device for leaf in leaves)
    buckets = bucketed(units, devices, cap_bytes)
    if spec.plan is not None:
        buckets = _planned(spec.plan, present, whole, buckets)
    operator = "pmean" if spec.operator == "sync_on_backward" else spec.operator
    return OperatorProgram(
        operator, spec.place, spec.root, units, devices, buckets, tiled=spec.tiled
    )


def _check(spec: CallSpec, path: str, leaf: Any) -> None:
    operator = spec.operator
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{operator}: {leaf_text(path)} is {type(leaf).__name__}; it takes dense tensors and "
            "None"
        )
    is_nested = leaf.is_nested and leaf.layout is torch.strided
    if is_nested or leaf.is_quantized or is_dtensor(leaf):
        raise TypeError(
            f"{operator}: {leaf_text(path)} is a {wrapper_kind(leaf)}; it takes dense tensors and "
            f"None: {PLAIN_INSTEAD}"
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


def _unit(spec: CallSpec, leaf: LeafSpec) -> LeafSpec:
    if spec.operator not in TAKES_ROWS:
        return leaf
    n = spec.place.size
    if not leaf.shape or leaf.shape[0] != n:
        raise ValueError(
            f"{spec.operator}: {leaf_text(leaf.path)} of shape {leaf.shape} needs a leading axis "
            f"of {n}, one slice for each rank; pass tiled=True to cut a longer one into {n} parts"
        )
    return leaf._replace(shape=leaf.shape[1:])


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
