"""What callers hand in, checked; every problem names the leaf and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from fddp.errors import TransformError, TreeMismatchError, WeightError
from fddp.plan import LeafSpec
from fddp.program import Program
from fddp.tree import TreeDef, check_paths, flatten

_LARGEST_WEIGHT = 2.0**512


def matched_leaves(
    tree: Any, program: Program, what: str, *, differentiable: bool = False
) -> tuple[list[Tensor | None], TreeDef]:
    """The tree's leaves in canonical order, if they are those of the plan.

    Args:
        tree: what the caller passed.
        program: knows the paths, shapes and dtypes.
        what: the tree in words, for errors: "gradients".
        differentiable: whether the leaves are to be differentiated, so that none may be missing.

    Raises:
        TreeMismatchError: other paths, shapes or dtypes, or a leaf that is no tensor.
    """
    leaves, treedef = program.trees.flatten(tree)
    check_paths(treedef, program.paths, what)
    position = program.leaf_types.first_misfit(leaves, differentiable)
    if position >= 0:
        raise TreeMismatchError(_misfit(leaves[position], program.plan.leaves[position], what))
    return leaves, treedef


def matched_shards(tree: Any, program: Program) -> tuple[list[Tensor | None], TreeDef]:
    """The tree's leaves in canonical order, if they are shards that this rank owns.

    Raises:
        TreeMismatchError: other paths, sizes or dtypes, or a leaf that is no tensor.
    """
    leaves, treedef = flatten(tree)
    check_paths(treedef, program.paths, "shards")
    bucketed = program.plan.bucket_of
    for leaf, spec in enumerate(program.plan.leaves):
        if leaf not in bucketed and not isinstance(leaves[leaf], Tensor | None):
            raise TreeMismatchError(_misfit(leaves[leaf], spec, "shards"))
    for leaf in program.reduced:
        shard, spec, numel = leaves[leaf], program.plan.leaves[leaf], program.shards.numels[leaf]
        found = (
            f"{str(shard.dtype).removeprefix('torch.')} of shape {tuple(shard.shape)}"
            if isinstance(shard, Tensor)
            else f"a {type(shard).__name__}"
        )
        if shard is not None and found != f"{spec.dtype} of shape {(numel,)}":
            raise TreeMismatchError(
                f"leaf {spec.path!r} of the shards is {found} where this rank owns {numel} "
                f"elements of {spec.dtype}; pass what shard or reduce_scatter of this GradSync gave"
            )
    return leaves, treedef


def _misfit(leaf: object, spec: LeafSpec, what: str) -> str:
    where = f"leaf {spec.path!r} of the {what}"
    if leaf is None:
        return (
            f"{where} is None where the plan has a tensor; build a new GradSync for changed "
            f"parameters"
        )
    if not isinstance(leaf, Tensor):
        return f"{where} is a {type(leaf).__name__}; pass a tensor or None"
    shape = "a nested shape" if leaf.is_nested else f"shape {tuple(leaf.shape)}"
    found = f"{str(leaf.dtype).removeprefix('torch.')} of {shape}"
    wanted = "no gradient" if spec.dtype == "none" else f"{spec.dtype} of shape {spec.shape}"
    if found == wanted:
        return (
            f"{where} is an inference tensor, which has no gradient; clone it outside "
            f"torch.inference_mode"
        )
    return (
        f"{where} is {found} where the plan has {wanted}; build a new GradSync for changed "
        f"parameters"
    )


def check_writable(leaves: Sequence[Tensor | None], program: Program) -> None:
    """Whether results can be written into each tensor, and into no two at one place.

    Raises:
        TreeMismatchError: the first leaf that can't be written.
    """
    written: list[tuple[Tensor, str]] = []
    for leaf, spec in zip(leaves, program.plan.leaves, strict=True):
        if leaf is None:
            continue
        problem = _unwritable(leaf, spec)
        if problem is not None:
            raise TreeMismatchError(
                f"leaf {spec.path!r} of shape {tuple(leaf.shape)} {problem}; pass another tensor "
                f"to reduce_, or call sync(grads), which returns new ones"
            )
        if leaf.layout is torch.strided and leaf.numel():
            written.append((leaf, spec.path))
    _check_apart(written)


def _check_apart(tensors: Sequence[tuple[Tensor, str]]) -> None:
    open_spans: list[tuple[int, Tensor, str]] = []
    for leaf, path in sorted(tensors, key=lambda pair: pair[0].data_ptr()):
        start = leaf.data_ptr()
        open_spans = [span for span in open_spans if span[0] > start]
        for _, other, other_path in open_spans:
            if _share_elements(other, leaf):
                raise TreeMismatchError(
                    f"leaves {other_path!r} and {path!r} share memory, so both results can't be "
                    f"written; pass tensors of their own to reduce_, or call sync(grads), which "
                    f"returns new ones"
                )
        open_spans.append((start + _extent(leaf) * leaf.element_size(), leaf, path))


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Exactly, by marking the elements of the one: columns of one matrix only interleave."""
    distance, rest = divmod(second.data_ptr() - first.data_ptr(), first.element_size())
    if rest or first.element_size() != second.element_size():
        return True
    marks = torch.zeros(
        max(_extent(first), distance + _extent(second)), dtype=torch.bool, device="cpu"
    )
    marks.as_strided(first.shape, first.stride()).fill_(True)
    return bool(marks.as_strided(second.shape, second.stride(), distance).any())


def _unwritable(leaf: Tensor, spec: LeafSpec) -> str | None:
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        return "is an inference tensor"
    if spec.reducible and (leaf.layout is torch.sparse_coo) != spec.sparse:
        return f"has layout {leaf.layout}, and its gradients are declared " + (
            "sparse" if spec.sparse else "dense"
        )
    if leaf.layout is torch.strided and _overlaps(leaf):
        return f"has strides {leaf.stride()}: its elements share memory"
    return None


def _extent(leaf: Tensor) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))


def checked_weight(weight: object) -> float:
    """A weight as a float.

    Raises:
        WeightError: it is no number, negative, not finite, or so large that sums are not.
    """
    if not isinstance(weight, (SupportsFloat, SupportsIndex)):
        raise WeightError(f"a weight must be a number, got {weight!r}")
    try:
        value = float(weight)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise WeightError(f"a weight must be a number, got {weight!r}") from error
    if not 0.0 <= value <= _LARGEST_WEIGHT:
        raise WeightError(f"a weight must be at least 0 and at most 2**512, got {value}")
    return value


def check_no_transform(what: str) -> None:
    """Gradients made inside a transform are not values yet.

    Raises:
        TransformError: a `torch.func` transform is active.
    """
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        kind = str(interpreter.key()).rpartition(".")[2].lower()
        raise TransformError(
            f"{what} was called inside torch.func.{kind}, where it can't communicate; transform "
            f"the loss function instead and call it outside: sync(torch.func.grad(loss_fn)(params))"
        )


def outside_transforms() -> AbstractContextManager[object]:
    """Lets collectives run although a transform is active, to report that one was."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def _overlaps(tensor: Tensor) -> bool:
    """Whether two indices lead to one element, by the strides in ascending order."""
    end = 0
    dims = [(s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    for stride, size in sorted(dims):
        if stride <= end:
            return tensor.numel() > 0
        end += stride * (size - 1)
    return False
