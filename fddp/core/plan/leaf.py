"""Descriptions of the leaves of a pytree, without tensors."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Bytes per element of the dtypes that can be reduced."""

MAX_COUNT = 2**63 - 1
"""Largest size, offset or cap: torch uses 64-bit integers."""

MAX_RANK = 64
"""Largest number of dimensions of a leaf: the limit of the iterators of torch and NumPy."""


class LeafSpec(NamedTuple):
    """Description of one leaf.

    Attributes:
        path: keys on the path to the leaf, joined by dots; unique in the tree.
        shape: sizes, in elements.
        dtype: name without a library's prefix, such as `"float32"`; `"none"` for the leaf `None`.
        strides: strides in elements if the leaf is dense but not contiguous (channels_last);
            `None` if contiguous.
        device: device type; `"cuda#0"`, `"cuda#1"` if one tree uses several devices of a type.
        sparse: True if its gradient is declared sparse.

    >>> leaf = LeafSpec("layers.0.weight", (2, 3), "float32")
    >>> leaf.numel, leaf.nbytes, leaf.reducible
    (6, 24, True)
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    device: str = "cpu"
    sparse: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of its dense gradient in bytes; 0 for a dtype without gradients."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)

    @property
    def reducible(self) -> bool:
        """True for a floating or complex dtype, whose gradient can be reduced."""
        return self.dtype in ITEM_BYTES


kind_of = itemgetter(2, 4, 5)
"""Dtype, device and sparsity of a leaf, which all leaves of a bucket share."""


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a leaf's gradient in its bucket, or `None` for contiguous strides.

    A bucket keeps a permuted dense layout. Any other layout (expanded, sliced) becomes contiguous.
    Strides of dimensions of size 1 have no effect and differ between libraries; they are replaced
    by those of the dense layout, so that ranks agree.

    >>> dense_strides((2, 3, 4, 5), (60, 1, 15, 3))
    (60, 1, 15, 3)
    >>> dense_strides((2, 3), (3, 1)), dense_strides((2, 3), (0, 1))
    (None, None)
    """
    if 0 in shape:
        return None
    dense = [0] * len(shape)
    span = 1
    innermost_first = sorted(range(len(shape)), key=lambda dim: (strides[dim], shape[dim]))
    for dim in innermost_first:
        if shape[dim] > 1 and strides[dim] != span:
            return None
        dense[dim] = span
        span *= shape[dim]
    wide = [dim for dim in innermost_first if shape[dim] > 1]
    return None if wide == sorted(wide, reverse=True) else tuple(dense)


def is_counts(values: object, at_least: int = 0) -> TypeGuard[tuple[int, ...]]:
    """Return True if `values` is a tuple of ints (not bool) from `at_least` to `MAX_COUNT`."""
    if not isinstance(values, tuple) or not {*map(type, values)} <= {int}:
        return False
    return not values or (min(values) >= at_least and max(values) <= MAX_COUNT)


def leaf_problem(leaf: object) -> str | None:
    """Return the error text for an invalid leaf of a plan, or `None` if it is valid."""
    if type(leaf) is not LeafSpec:
        return f"must be a LeafSpec, got {reprlib.repr(leaf)}"
    path, shape, dtype, strides, device, sparse = leaf
    if not (type(path) is type(dtype) is type(device) is str):
        texts = reprlib.repr((path, dtype, device))
        return f"must have a str for path, dtype and device, got {texts}"
    if type(sparse) is not bool:
        return f"({path!r}): sparse must be a bool, got {reprlib.repr(sparse)}"
    if not is_counts(shape) or len(shape) > MAX_RANK:
        return (
            f"({path!r}): shape must be a tuple of at most {MAX_RANK} non-negative 64-bit ints, "
            f"got {reprlib.repr(shape)}"
        )
    if prod(shape) * ITEM_BYTES.get(dtype, 1) > MAX_COUNT:
        return f"({path!r}): shape {shape} of {dtype} has more bytes than fit 64 bits"
    return None if strides is None else _strides_problem(leaf)


def _strides_problem(leaf: LeafSpec) -> str | None:
    # The bucket's buffer is accessed with these strides, so they must stay within its bounds.
    if not is_counts(leaf.strides) or len(leaf.strides) != len(leaf.shape):
        return (
            f"({leaf.path!r}): strides must be None or a tuple of {len(leaf.shape)} non-negative "
            f"64-bit ints for the shape {leaf.shape}, got {reprlib.repr(leaf.strides)}"
        )
    dense = dense_strides(leaf.shape, leaf.strides)
    if leaf.strides != dense:
        return (
            f"({leaf.path!r}): strides {leaf.strides} for the shape {leaf.shape} must be None or "
            f"dense and not contiguous; dense_strides returns {dense}"
        )
    return None
