"""Parts of a batch: rows of each rank, and batches made of other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

import fddp
from fddp.extend import counted, leaf_text, tree_flatten

_SCALAR = bool | int | float | complex | str | None


def split_rows(batch: Any, ratios: Sequence[int]) -> list[Any]:
    """Cut a batch into a part for each rank, along the first axis of each array.

    Scalars, texts and None are those of each rank.

    Args:
        batch: a tree of arrays.
        ratios: numbers of rows in relation to each other, by rank.

    Raises:
        TypeError: a leaf has no rows, and is no scalar.
        ValueError: the rows are too few.
    """
    leaves, treedef = tree_flatten(batch)
    for path, leaf in zip(treedef.paths, leaves, strict=True):
        if not hasattr(leaf, "shape") and not isinstance(leaf, _SCALAR):
            raise TypeError(
                f"{leaf_text(path)} of the batch is a {type(leaf).__name__}, which has no rows; "
                f"pass arrays, or a function of the batch and the ratios as split="
            )
    if not any(map(has_rows, leaves)):
        raise ValueError("the batch has no array with rows; pass arrays, or a function as split=")

    def part_of(rank: int) -> Any:
        def rows_of(rows: int) -> np.ndarray[Any, Any]:
            ends = [0, *accumulate(part_sizes(rows, ratios))]
            return np.arange(ends[rank], ends[rank + 1])

        return with_rows(batch, rows_of)

    return [part_of(rank) for rank in range(len(ratios))]


def part_sizes(rows: int, ratios: Sequence[int]) -> list[int]:
    """Numbers of rows by rank: one each, and the others in the ratios, rounded down.

    Raises:
        ValueError: there are too few rows for these ranks, or for parts that differ; or even parts
            can't be even.

    Example:
        >>> part_sizes(8, (3, 5)), part_sizes(8, (1, 2, 5))
        ([3, 5], [1, 2, 5])
    """
    ranks, is_even = len(ratios), len(set(ratios)) == 1
    if rows < ranks + (not is_even):
        raise ValueError(
            f"{counted(rows, 'row')} can't be divided over {ranks} ranks in the ratio "
            f"{_colons(ratios)}; pass a larger batch"
        )
    if is_even and rows % ranks:
        raise ValueError(f"{rows} rows are no even parts on {ranks} ranks; pass another batch")
    ends = [0, *((rows - ranks) * end // sum(ratios) for end in accumulate(ratios))]
    return [1 + end - start for start, end in pairwise(ends)]


def sizes_text(batch: Any, ratios: Sequence[int]) -> str:
    """Numbers of rows by rank as text."""
    rows = next((len(leaf) for leaf in tree_flatten(batch)[0] if has_rows(leaf)), 0)
    sizes = [*map(str, part_sizes(rows, ratios))]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]} of {rows} rows"


def with_rows(batch: Any, rows_of: Callable[[int], np.ndarray[Any, Any]]) -> Any:
    """Return a batch of other rows: of their indices, by the number of rows of an array."""
    return fddp.tree_map(
        lambda leaf: leaf[rows_of(len(leaf))] if has_rows(leaf) else leaf,
        batch,
    )


def repeated(batch: Any, count: int) -> Any:
    """Return a batch with all rows `count` times."""
    return with_rows(batch, lambda rows: np.tile(np.arange(rows), count))


def first_half(batch: Any) -> Any:
    """Return the first half of the rows, at least one."""
    return with_rows(batch, lambda rows: np.arange((rows + 1) // 2))


def divisible(batch: Any, ranks: int) -> Any:
    """Return the first rows, as many as can be divided evenly."""
    return with_rows(batch, lambda rows: np.arange(rows - rows % ranks))


def other_orders(batch: Any) -> list[Any]:
    """Return the rows in reverse order, and with the second half first."""
    return [
        with_rows(batch, lambda rows: np.arange(rows)[::-1].copy()),
        with_rows(batch, lambda rows: np.roll(np.arange(rows), rows // 2)),
    ]


def scaled(batch: Any, factor: float) -> Any:
    """Return a batch with other floating-point numbers."""
    return fddp.tree_map(
        lambda leaf: leaf * factor if has_rows(leaf) and _is_floating(leaf) else leaf, batch
    )


def all_counted(batch: Any) -> Any:
    """Return a batch without negative integers, such as labels that are ignored, and with ones for
    masks."""

    def leaf_of(leaf: Any) -> Any:
        if not has_rows(leaf):
            return leaf
        if "bool" in str(leaf.dtype):
            return leaf | True
        if bool(((leaf == 0) | (leaf == 1)).all()):
            return leaf * 0 + 1
        return leaf if _is_floating(leaf) else leaf * (leaf > 0)

    return fddp.tree_map(leaf_of, batch)


def has_rows(leaf: Any) -> bool:
    """Return True for an array of one axis or more."""
    is_array = isinstance(leaf, Tensor | np.ndarray) or hasattr(leaf, "__jax_array__")
    return (is_array or hasattr(leaf, "__array__")) and len(leaf.shape) > 0


def _is_floating(leaf: Any) -> bool:
    return "float" in str(leaf.dtype)


def _colons(ratios: Sequence[int]) -> str:
    return ":".join(map(str, ratios))
