"""Arrays of other libraries, converted at the border.

[Note: arrays of other libraries]
Inside fddp every leaf is a tensor or None. If a caller's tree holds arrays of another library,
`adapted` replaces them by tensors over the same memory right after flattening, and returns a tree
definition that converts results back to arrays on unflattening. One `GradSync` therefore serves all
libraries, and ranks of one job may use different ones. Trees of tensors skip the conversion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.core.plan.plan import BucketPlan, rebucket
from fddp.tree.pytree import TreeDef

if TYPE_CHECKING:
    import jax

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ForeignTreeDef(TreeDef):
    """Structure of a tree of arrays of another library.

    Attributes:
        library: name of the library, for errors.
        restore: converts the tensors of all leaves to arrays.
    """

    library: str = field(compare=False)
    restore: Callable[[Sequence[Tensor | None]], list[Any]] = field(compare=False, repr=False)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree around arrays over the memory of these tensors, in canonical order."""
        return super().unflatten(self.restore(leaves))


def aligned(plan: BucketPlan) -> BucketPlan:
    """Return the plan with leaves whose size is a multiple of 64 bytes first in each bucket.

    Their results then start at multiples of 64 bytes, which XLA requires to use memory without a
    copy. No torch backward produces these gradients, so their ready order is irrelevant.

    Example:
        >>> import torch
        >>> from fddp import plan_buckets
        >>> plan = plan_buckets({"weight": torch.ones(16), "bias": torch.ones(10)})
        >>> plan.buckets[0].leaves, aligned(plan).buckets[0].leaves
        ((0, 1), (1, 0))
    """
    odd = {leaf for leaf in plan.order if plan.leaves[leaf].nbytes % _ALIGNMENT_BYTES}
    return rebucket(plan, sorted(plan.order, key=odd.__contains__))


def is_foreign(leaf: Any) -> bool:
    """Return True if a leaf is a JAX array or tracer, the only supported foreign arrays.

    Example:
        >>> is_foreign(None)
        False
    """
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def holds_foreign(leaves: Sequence[Any]) -> bool:
    """Return True if any leaf of a tree is a foreign array."""
    if "jax" not in sys.modules:
        return False
    # One check per type: trees are large and have few types.
    return any(map(is_foreign, dict(zip(map(type, leaves), leaves, strict=True)).values()))


def adapted(
    leaves: list[Any], treedef: TreeDef, what: str, *, always: bool = False
) -> tuple[list[Any], TreeDef]:
    """Replace arrays of other libraries by tensors; see [Note: arrays of other libraries].

    Args:
        leaves, treedef: result of `fddp.tree.pytree.flatten`.
        what: name of the tree for errors, such as "gradients".
        always: True to return arrays as results even if all leaves are None.

    Returns:
        Leaves and tree definition; unchanged if no leaf is a foreign array.

    Raises:
        TransformError: a leaf is a tracer.
        TreeMismatchError: torch lacks a leaf's dtype, or a leaf is not in this process's memory.
    """
    if not always and not holds_foreign(leaves):
        return leaves, treedef
    from fddp.tree.jax_arrays import homes_of, to_arrays, to_tensors

    tensors = to_tensors(leaves, treedef.paths, what)
    restore = partial(to_arrays, homes=homes_of(leaves))
    return tensors, ForeignTreeDef(treedef._treespec, treedef._structure, "JAX", restore)


@entrance
def to_tensor(array: jax.Array) -> Tensor:
    """Return a tensor over a JAX array's memory. It must not be written to.

    Raises:
        TransformError: the array is a tracer.
        TreeMismatchError: torch lacks its dtype, or it is on several devices or not in CPU memory.

    Example:
        >>> import jax.numpy as jnp
        >>> from fddp.jax import to_tensor
        >>> array = jnp.arange(3.0)
        >>> to_tensor(array), to_tensor(array).data_ptr() == array.unsafe_buffer_pointer()
        (tensor([0., 1., 2.]), True)
    """
    from fddp.tree.jax_arrays import to_tensors

    (tensor,) = to_tensors([array], [""], "arrays")
    return cast(Tensor, tensor)


@entrance
def to_array(tensor: Tensor, device: Any = None) -> jax.Array:
    """Return a JAX array of a tensor's values, over its memory if that starts at a multiple of 64
    bytes.

    Args:
        tensor: a tensor in CPU memory, which must not be written to afterwards.
        device: JAX CPU device to which the array is committed; None for the first.

    Returns:
        An array of the same dtype. It is a copy if the tensor is expanded or has gaps between
        elements, or if JAX has 64-bit types disabled and substitutes the dtype.

    Raises:
        ValueError: the tensor is not in CPU memory, or is sparse; or an integer does not fit into
            the dtype that substitutes a 64-bit one.

    Example:
        >>> import torch
        >>> from fddp.jax import to_array
        >>> to_array(torch.arange(3.0)) + 1
        Array([1., 2., 3.], dtype=float32)
    """
    import jax

    from fddp.tree.jax_arrays import to_arrays

    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(
            f"the tensor is {tensor.layout} on {tensor.device}; to_array takes dense tensors in "
            f"CPU memory: pass tensor.cpu() or tensor.to_dense()"
        )
    values = tensor.detach().resolve_conj().resolve_neg()
    if torch.empty_like(values, device="meta").stride() != values.stride():
        values = values.contiguous()  # JAX accepts neither gaps nor shared elements
    is_whole = not values.dtype.is_floating_point and not values.is_complex()
    if is_whole and values.numel() and jax.dtypes.canonicalize_dtype("int64") != "int64":
        _check_fits(values)
    home = jax.local_devices(backend="cpu")[0] if device is None else device
    array: jax.Array
    (array,) = to_arrays([values], [home])
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if array.dtype == dtype else array.astype(dtype)


def _check_fits(values: Tensor) -> None:
    """Raise if JAX would substitute a narrower integer that can't hold a value."""
    narrow = {torch.int64: torch.int32, torch.uint64: torch.uint32}.get(values.dtype)
    if narrow is None:
        return
    lowest, highest = int(values.min()), int(values.max())
    limits = torch.iinfo(narrow)
    if not limits.min <= lowest <= highest <= limits.max:
        raise ValueError(
            f"the tensor has values from {lowest} to {highest}, which {str(narrow)[6:]} can't "
            f"hold, and JAX has no 64-bit types here; set jax_enable_x64"
        )
