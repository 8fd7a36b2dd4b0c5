"""What a plan knows of one leaf of a tree: a description, never the tensor."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from math import prod
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
"""The dtypes that gradients are reduced in, and the bytes of one element."""

MAX_COUNT = 2**63 - 1
"""Sizes, offsets and caps are 64-bit integers in torch."""

MAX_RANK = 64
"""Dimensions of a leaf: the limit of torch's and NumPy's iterators."""


class LeafSpec(NamedTuple):
    """Description of one leaf.

    Attributes:
        path: the leaf's identity, the entries on the way to it joined by dots.
        shape: sizes, in elements.
        dtype: name without a library's prefix, as `"float32"`; `"none"` for the leaf `None`.
        strides: in elements, where the leaf is dense in another order than the contiguous one
            (as in channels_last); `None` for contiguous.
        device: device type; `"cuda#0"`, `"cuda#1"` where one tree lives on several of a type.
        sparse: whether its gradient is declared sparse.

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
        """Bytes of its dense gradient: 0 for a dtype that has none."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)

    @property
    def reducible(self) -> bool:
        """Whether it has a gradient that can be reduced: a floating or complex dtype."""
        return self.dtype in ITEM_BYTES


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides that a gradient of this leaf is laid out with, or `None` for contiguous ones.

    Only a dense order without overlap can be kept in a bucket, so every other one (expanded,
    sliced) is `None` as well. Strides of dimensions of size 1 address nothing and differ from
    library to library: they come back as the dense order implies them, so that ranks agree.

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
    """Whether `values` is a tuple of true ints (no bool) from `at_least` to 64 bits."""
    if not isinstance(values, tuple):
        return False
    for value in values:
        if type(value) is not int or not at_least <= value <= MAX_COUNT:
            return False
    return True


def leaf_problem(leaf: object) -> str | None:
    """What is wrong with one leaf of a plan, whatever made it, or `None`."""
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
    # A bucket's memory is read and written with these strides: they must not lead out of it.
    if not is_counts(leaf.strides) or len(leaf.strides) != len(leaf.shape):
        return (
            f"({leaf.path!r}): strides must be None or a tuple of {len(leaf.shape)} non-negative "
            f"64-bit ints for the shape {leaf.shape}, got {reprlib.repr(leaf.strides)}"
        )
    dense = dense_strides(leaf.shape, leaf.strides)
    if leaf.strides != dense:
        return (
            f"({leaf.path!r}): strides {leaf.strides} over the shape {leaf.shape} must be None or "
            f"dense in another order than the contiguous one; dense_strides makes "
            f"them {dense}"
        )
    return None
