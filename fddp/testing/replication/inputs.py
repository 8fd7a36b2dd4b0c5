"""Varying inputs: as another rank may have them, and with extreme numbers.

Tensors, arrays of NumPy, modules and objects are changed in place, so that what refers to them
follows.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fddp.extend import to_array, to_tensor, tree_flatten
from fddp.testing.replication.leaves import RANDOM_STATES, attributes, is_leaf, leaves_of
from fddp.testing.replication.values import digest, has_content, is_same, snapshot

_SEED = 20260101
_SHRUNK = 0.9
_SMALL = 0.1  # in place of zero
_DRAWS = 8
_LIST = 3  # Python integers that are drawn from each other; fewer are a tuple of sizes

Change = Callable[[str, Any], Any]
"""Called with the path and the value of a leaf; returns another in its place."""


def of_another_rank(name: str, value: Any) -> Any:
    """Change an input.

    Elements of floating-point tensors are put in another order and made smaller. Integers and
    booleans are drawn from their own values, so that labels stay labels, and counts change.

    Raises:
        ValueError: a leaf has no other values, or the input has no numbers.
    """

    def change(path: str, leaf: Any) -> Any:
        before = [snapshot(part) for _, part in leaves_of(path, leaf)]
        other = _other(leaf)
        after = [snapshot(part) for _, part in leaves_of(path, other)]
        for one, two in zip(before, after, strict=True):
            if has_content(one) and is_same(one, two):
                raise ValueError(
                    f"{path} of type {type(leaf).__name__} can't be given the values of another "
                    f"rank; pass a function of the rank that returns `{name}`"
                )
        return other

    before = digest(value)
    other = _mapped(name, value, change)
    if digest(other) == before:
        raise ValueError(
            f"`{name}` has no numbers that can be changed; pass a function of the rank for it"
        )
    return other


def scaled(name: str, value: Any, factor: float) -> Any:
    """Multiply the floating-point numbers of an input. An integer is a factor on Python's integers
    instead; those of tensors, and booleans, become the lowest of them, or the highest if it is not
    zero."""

    def scale(path: str, leaf: Any) -> Any:
        if type(leaf) is int:
            return leaf * factor if isinstance(factor, int) else leaf
        if isinstance(leaf, float | complex):
            return leaf if isinstance(factor, int) else leaf * factor
        return _in_tensors(leaf, lambda tensor: _scale_(tensor, factor))

    return _mapped(name, value, scale)


def _mapped(name: str, value: Any, change: Change, visited: dict[int, Any] | None = None) -> Any:
    """Replace the leaves of an input."""
    visited = {} if visited is None else visited
    leaves, treedef = tree_flatten(value)
    paths = [f"{name}[{path!r}]" if path else name for path in treedef.paths]
    lists = _lists(treedef.paths, leaves)
    for at, positions in lists.items():
        drawn = change(f"{name}[{at!r}]", torch.tensor([leaves[n] for n in positions])).tolist()
        for position, number in zip(positions, drawn, strict=True):
            leaves[position] = number
    listed = {position for positions in lists.values() for position in positions}
    for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if position not in listed:
            leaves[position] = _mapped_leaf(path, leaf, change, visited)
    return treedef.unflatten(leaves)


def _mapped_leaf(path: str, leaf: Any, change: Change, visited: dict[int, Any]) -> Any:
    if isinstance(leaf, torch.nn.Module | torch.optim.Optimizer):
        buffers = leaf.named_buffers() if isinstance(leaf, torch.nn.Module) else ()
        for at, tensor in (*leaves_of(path, leaf), *buffers):
            if isinstance(tensor, Tensor):
                change(at, tensor)
        return leaf
    found = {} if is_leaf(leaf) else attributes(leaf)
    if not found:
        return change(path, leaf)
    if id(leaf) not in visited:
        visited[id(leaf)] = leaf
        has_settings = type(leaf).__module__.startswith("torch.")  # such as those of a DataLoader
        for name, value in found.items():
            if not (has_settings and isinstance(value, int | float)):
                object.__setattr__(leaf, name, _mapped(f"{path}.{name}", value, change, visited))
    return leaf


def _lists(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, list[int]]:
    """Positions of Python integers that are elements of one list, by its path."""
    found = defaultdict[str, list[int]](list)
    for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        at, _, key = path.rpartition(".")
        if type(leaf) is int and key.isdigit():
            found[at].append(position)
    return {at: positions for at, positions in found.items() if len(positions) >= _LIST}


def _other(leaf: Any) -> Any:
    """A leaf with other numbers; the leaf itself if it has none."""
    if isinstance(leaf, torch.Generator):
        return leaf.manual_seed(leaf.initial_seed() + 1)
    if isinstance(leaf, RANDOM_STATES):
        leaf.random()
        return leaf
    if isinstance(leaf, bool):
        return not leaf
    if type(leaf) is int:
        return _neighbour(leaf, lowest=1)  # a count stays positive
    if isinstance(leaf, float | complex):
        return leaf * _SHRUNK or _SMALL
    return _in_tensors(leaf, _redraw_)


def _in_tensors(leaf: Any, change_: Callable[[Tensor], None]) -> Any:
    """Change a tensor or an array. Others are returned as they are."""
    if isinstance(leaf, Tensor):
        is_expanded = 0 in leaf.stride() if leaf.layout is torch.strided else False
        whole = leaf.detach().clone(memory_format=torch.contiguous_format) if is_expanded else leaf
        if leaf.layout is torch.strided:
            change_(whole)
        else:
            change_(leaf._values() if leaf.layout is torch.sparse_coo else leaf.values())
        return whole
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
        array = np.asarray(leaf)
        change_(torch.from_numpy(array))
        return leaf if isinstance(leaf, np.ndarray) else array[()]
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(leaf, jax.Array):
        return leaf
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(leaf, 1)
    tensor = to_tensor(leaf).clone()
    change_(tensor)
    return to_array(tensor)


@torch.no_grad()
def _redraw_(tensor: Tensor) -> None:
    flat = tensor.detach().reshape(-1)
    generator = torch.Generator().manual_seed(_SEED)
    if flat.dtype is torch.bool and len(flat) == 1:
        other = ~flat
    elif flat.is_floating_point() or flat.is_complex():
        order = torch.randperm(len(flat), generator=generator).to(flat.device)
        numbers = torch.rand(len(flat), generator=generator, dtype=torch.float64)
        real = flat.real.dtype if flat.is_complex() else flat.dtype
        factors = (0.5 + 0.4 * numbers).to(flat.device, real)
        other = flat[order] * factors if flat.any() else _SMALL * factors
    else:
        other = _drawn(flat.cpu().long(), generator).to(flat.device)
    tensor.detach().copy_(other.view(tensor.shape))


def _drawn(flat: Tensor, generator: torch.Generator) -> Tensor:
    """Draw integers from their own values, such that many counts change.

    Of several draws it is the one in which the counts of the most elements change, and those of the
    lowest and the highest value, which often mark padding. Equal integers give no other; half of
    them become the neighbour of theirs.
    """
    if len(flat) == 0:
        return flat
    values, kinds, counts = torch.unique(flat, return_inverse=True, return_counts=True)
    if len(values) == 1:
        other = flat.clone()
        other[::2] = _neighbour(int(values[0]), lowest=int(len(flat) == 1))
        return other

    def rating(draw: Tensor) -> tuple[bool, bool, float]:
        drawn_counts = kinds[draw].bincount(minlength=len(values))
        moved = drawn_counts != counts
        share = float((moved * counts).sum()) / len(flat)
        several = int((drawn_counts > 0).sum()) > 1 or len(flat) == 2
        return bool(flat[draw].any()), several, share + int(moved[0]) + int(moved[-1])

    draws = (torch.randint(len(flat), flat.shape, generator=generator) for _ in range(_DRAWS))
    return flat[max(draws, key=rating)]


def _neighbour(value: int, lowest: int) -> int:
    """The next smaller integer if it is not below the lowest one; else the next larger one."""
    return value - 1 if value > lowest else value + 1


@torch.no_grad()
def _scale_(tensor: Tensor, factor: float) -> None:
    if tensor.is_floating_point():
        tensor.detach().mul_(1 if isinstance(factor, int) else factor)
    elif isinstance(factor, int) and not tensor.is_complex() and tensor.numel():
        tensor.detach().fill_(tensor.max() if factor else tensor.min())
