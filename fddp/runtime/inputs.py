"""Checks of callers' arguments; every error names the leaf and the way out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from fddp.core.plan.plan import LeafSpec
from fddp.core.text import leaf_text
from fddp.errors import TransformError, TreeMismatchError, WeightError
from fddp.native.memory import PLAIN_INSTEAD, shares_elements, wrapper_kind
from fddp.native.torch_private import (
    DispatchModeKey,
    disable_current_modes,
    dispatch_depth,
    dispatch_mode,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from fddp.runtime.program import Program
from fddp.tree.foreign import ForeignTreeDef, adapted, holds_foreign
from fddp.tree.pytree import TreeDef, check_paths, flatten

_LARGEST_WEIGHT = 2.0**512


def matched_leaves(
    tree: Any, program: Program, what: str, *, differentiable: bool = False
) -> tuple[list[Tensor | None], TreeDef]:
    """Return the leaves of a tree in canonical order, if they match the plan.

    Args:
        tree: the caller's tree.
        program: has paths, shapes and dtypes.
        what: name of the tree for errors, such as "gradients".
        differentiable: True if the leaves will be differentiated; none may then be missing.

    Raises:
        TreeMismatchError: other paths, shapes or dtypes, or a leaf that is no tensor.
    """
    leaves, treedef = flatten(tree)
    check_paths(treedef, program.plan.paths, what)
    position = program.leaf_types.first_mismatch(leaves, differentiable)
    if program.foreign or (position >= 0 and holds_foreign(leaves)):
        leaves, treedef = _adapted(leaves, treedef, what, differentiable)
        position = program.leaf_types.first_mismatch(leaves, differentiable)
    if position >= 0:
        raise TreeMismatchError(misfit(leaves[position], program.plan.leaves[position], what))
    return leaves, treedef


def _adapted(
    leaves: list[Any], treedef: TreeDef, what: str, differentiable: bool
) -> tuple[list[Any], TreeDef]:
    if differentiable:
        raise TreeMismatchError(
            f"{what} are JAX arrays, which torch can't differentiate; pass the gradients: "
            f"loss, grads = jax.value_and_grad(loss_fn)(params), then grads = sync(grads)"
        )
    return adapted(leaves, treedef, what, always=True)


def matched_shards(tree: Any, program: Program) -> tuple[list[Tensor | None], TreeDef]:
    """Return the leaves of a tree in canonical order, if they are the shards of this rank.

    Raises:
        TreeMismatchError: other paths, sizes or dtypes, or a leaf that is no tensor.
    """
    leaves, treedef = adapted(*flatten(tree), "shards", always=program.foreign)
    check_paths(treedef, program.plan.paths, "shards")
    bucketed = program.plan.bucket_of
    for leaf, spec in enumerate(program.plan.leaves):
        if leaf not in bucketed and not isinstance(leaves[leaf], Tensor | None):
            raise TreeMismatchError(misfit(leaves[leaf], spec, "shards"))
    for leaf in program.plan.reduced:
        shard, spec, numel = leaves[leaf], program.plan.leaves[leaf], program.shards.numels[leaf]
        found = (
            f"{str(shard.dtype).removeprefix('torch.')} of shape {tuple(shard.shape)}"
            if isinstance(shard, Tensor)
            else f"a {type(shard).__name__}"
        )
        if shard is not None and found != f"{spec.dtype} of shape {(numel,)}":
            raise TreeMismatchError(
                f"{leaf_text(spec.path, 'shards')} is {found} where this rank owns {numel} "
                f"elements of {spec.dtype}; pass shards from shard or reduce_scatter of this "
                f"GradSync"
            )
    return leaves, treedef


def misfit(leaf: object, spec: LeafSpec, what: str) -> str:
    """Error text of a leaf that does not match the plan."""
    where = leaf_text(spec.path, what)
    if leaf is None:
        return (
            f"{where} is None where the plan has a tensor; build a new GradSync for changed "
            f"parameters"
        )
    if not isinstance(leaf, Tensor):
        return f"{where} is a {type(leaf).__name__}; pass a tensor or None"
    kind = wrapper_kind(leaf)
    if kind and not leaf.is_nested:
        return f"{where} is a {kind}, whose memory does not hold its values; {PLAIN_INSTEAD}"
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


def check_writable(leaves: Sequence[Tensor | None], treedef: TreeDef, program: Program) -> None:
    """Check that results can be written into all tensors, and that no two share memory.

    Raises:
        TreeMismatchError: a leaf can't be written; names the first.
    """
    if isinstance(treedef, ForeignTreeDef):
        raise TreeMismatchError(
            f"reduce_ writes into its argument, and arrays of {treedef.library} can't be "
            f"written; call sync(grads), which returns new ones"
        )
    written: list[tuple[Tensor, str]] = []
    for leaf, spec in zip(leaves, program.plan.leaves, strict=True):
        if leaf is None:
            continue
        problem = _unwritable(leaf, spec)
        if problem is not None:
            raise TreeMismatchError(
                f"{leaf_text(spec.path)} of shape {tuple(leaf.shape)} {problem}; pass another "
                f"tensor to reduce_, or call sync(grads), which returns new ones"
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
    """Return True if two tensors share elements. Elements are marked one by one, because columns of
    a matrix interleave without sharing any."""
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
    if leaf._is_zerotensor():
        return "is a zero tensor, which has no memory"
    if leaf.layout is torch.strided and shares_elements(leaf):
        return f"has strides {leaf.stride()}: its elements share memory"
    return None


def _extent(leaf: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))


def checked_weight(weight: object) -> float:
    """A weight as a float.

    Raises:
        WeightError: it is no number, negative, not finite, or so large that sums are not.
    """
    if type(weight) is float and 0.0 <= weight <= _LARGEST_WEIGHT:
        return weight
    if not isinstance(weight, (SupportsFloat, SupportsIndex)):
        raise WeightError(f"a weight must be a number, got {weight!r}")
    try:
        value = float(weight)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise WeightError(f"a weight must be a number, got {weight!r}") from error
    if not 0.0 <= value <= _LARGEST_WEIGHT:
        raise WeightError(f"a weight must be at least 0 and at most 2**512, got {value}")
    return value


_INSTEAD = (
    "transform the loss function instead and call it outside: "
    "sync(torch.func.grad(loss_fn)(params)); fddp.pmean and fddp.sync_on_backward work inside "
    "transforms, and can be traced"
)


def check_no_transform(what: str, instead: str = _INSTEAD) -> None:
    """Check that no transform or tracer is active; gradients inside a transform are no values.

    Args:
        what: name of the call, for errors.
        instead: advice, for errors.

    Raises:
        TransformError: a `torch.func` transform is active, or a tracer.
    """
    interpreter = peek_interpreter_stack()
    if interpreter is not None:
        kind = str(interpreter.key()).rpartition(".")[2].lower()
        raise TransformError(
            f"{what} was called inside torch.func.{kind}, where it can't communicate; {instead}"
        )
    if is_traced():
        raise TransformError(
            f"{what} was called while a tracer records it (make_fx, torch.func.linearize, "
            f"torch.export), which would treat its results as constants; {instead}"
        )


_NOTHING_TO_SUSPEND = nullcontext()


class _Differentiated(threading.local):
    """Nesting depth of loss functions on this thread."""

    depth = 0


_differentiated = _Differentiated()


class differentiated:  # noqa: N801  # a context manager, as torch.enable_grad
    """Mark the execution of a loss function that fddp differentiates, and enable gradients."""

    __slots__ = ("_gradients",)

    def __enter__(self) -> None:
        self._gradients = None if torch.is_grad_enabled() else torch.enable_grad()
        if self._gradients is not None:
            self._gradients.__enter__()
        _differentiated.depth += 1

    def __exit__(self, *_: object) -> None:
        _differentiated.depth -= 1
        if self._gradients is not None:
            self._gradients.__exit__(None, None, None)


def check_no_derivatives(
    leaves: list[Tensor | None], program: Program, what: str, *, graphs: bool
) -> None:
    """Check that nothing differentiates through the leaves; results have no derivatives.

    Graphs outside of a loss function are allowed: gradients often have one that is never used.

    Args:
        leaves: the caller's leaves in canonical order.
        program: has the paths.
        what: name of the tree for errors, such as "gradients".
        graphs: True to reject leaves with a graph within a loss function.

    Raises:
        TransformError: a leaf has a forward-mode tangent or, within a loss function of fddp, a
            graph.
    """
    recorded = graphs and _differentiated.depth > 0 and torch.is_grad_enabled()
    position = program.leaf_types.first_differentiated(leaves, recorded)
    if position < 0:
        return
    where = leaf_text(program.plan.paths[position], what)
    node = getattr(leaves[position], "grad_fn", None) if recorded else None
    if node is not None:
        raise TransformError(
            f"{where} was computed from the parameters of the loss function "
            f"({type(node).__name__}), and the result has no derivatives; use fddp.pmean(grads) to "
            f"differentiate through the mean, or pass grad.detach() for its value"
        )
    raise TransformError(
        f"{where} has a forward-mode tangent (torch.autograd.forward_ad), and the result has no "
        f"derivatives; use fddp.pmean and fddp.sync_on_backward, which have derivatives in both "
        f"modes"
    )


def outside_inference_mode() -> AbstractContextManager[object]:
    """Leave inference mode, which results outlive."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING_TO_SUSPEND


def is_transformed() -> bool:
    """Return True if `outside_transforms` has something to suspend."""
    return (
        torch.is_inference_mode_enabled()
        or peek_interpreter_stack() is not None
        or dispatch_depth() > 0
    )


def outside_transforms() -> AbstractContextManager[object]:
    """Suspend transforms and tracers, so that collectives can report them as errors, and inference
    mode, which results outlive."""
    if not is_transformed():
        return _NOTHING_TO_SUSPEND
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    if peek_interpreter_stack() is not None:
        stack.enter_context(temporarily_clear_interpreter_stack())
    if is_traced():
        stack.enter_context(disable_current_modes())
    return stack


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Disable dispatch modes, transforms and gradients, and create new tensors on the CPU."""
    cpu = torch.device("cpu")
    with disable_current_modes(), outside_transforms(), torch.no_grad(), cpu:
        yield


def is_traced() -> bool:
    """Return True if a mode that records operations, or only their shapes, is active."""
    if not dispatch_depth():
        return False
    tracers = (DispatchModeKey.PROXY, DispatchModeKey.FAKE, DispatchModeKey.FUNCTIONAL)
    return any(dispatch_mode(key) is not None for key in tracers)
