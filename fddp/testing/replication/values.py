"""Values of a run: their leaves, their bits, and inputs as another rank may have them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fddp
from fddp.extend import to_array, tree_flatten

_SEED = 20260101


def leaves_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Paths and leaves of a value: of a tree, or of the state of a module or optimizer."""
    if isinstance(value, torch.nn.Module):
        tree: Any = dict(value.named_parameters())
    elif callable(getattr(value, "state_dict", None)):
        tree = value.state_dict()
    else:
        tree = value
    leaves, treedef = tree_flatten(tree)
    for path, leaf in zip(treedef.paths, leaves, strict=True):
        yield f"{name}[{path!r}]" if path else name, leaf


def snapshot(leaf: Any) -> Any:
    """Copy of a leaf that later writes do not change: a tensor, number or text; None for others."""
    if isinstance(leaf, Tensor):
        dense = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
        return dense.resolve_conj().resolve_neg().cpu().clone()
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    if isinstance(leaf, bool | int | float | complex | str):
        return leaf
    if hasattr(leaf, "__array__"):  # of NumPy or JAX
        return torch.from_numpy(np.array(leaf))
    return None


def is_same(leaf: Any, other: Any) -> bool:
    """Return True if two snapshots have the same bits."""
    if not (isinstance(leaf, Tensor) and isinstance(other, Tensor)):
        return type(leaf) is type(other) and (leaf == other or leaf != leaf)
    return leaf.dtype == other.dtype and leaf.shape == other.shape and _bits(leaf) == _bits(other)


def digest(value: Any) -> bytes | None:
    """Digest of the numbers of a value, gradients included; None if it has none."""
    try:
        found = [snapshot(leaf) for leaf in _with_gradients(value)]
    except Exception:  # of any object that a local variable may hold
        return None
    if all(leaf is None for leaf in found):
        return None
    total = hashlib.blake2b(digest_size=16)
    for leaf in found:
        total.update(_bits(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode())
    return total.digest()


def is_whole(tensor: Tensor) -> bool:
    """Return True if all elements are whole numbers: counts, masks, ones and zeros."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bool((real == real.round()).all())


def growth(value: Any, on_more: Any) -> float:
    """Factor by which a float tensor differs on more ranks; 1.0 if by rounding alone."""
    if not (isinstance(value, Tensor) and isinstance(on_more, Tensor)):
        return 1.0
    if not value.is_floating_point() or value.shape != on_more.shape or not value.numel():
        return 1.0
    before, after = value.double().flatten(), on_more.double().flatten()
    most = before.abs().max()
    if not (after - before).abs().max() > 32 * torch.finfo(value.dtype).eps * most:
        return 1.0
    return float(after.norm() / before.norm()) if most else float("inf")


def changed(value: Any, change_: Callable[[Tensor], None], factor: float = 1.0) -> Any:
    """An input with other numbers.

    Tensors, arrays of NumPy and modules are changed in place, so that what refers to them follows.

    Args:
        value: the input.
        change_: changes a tensor.
        factor: factor on Python's floating-point numbers.
    """

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            for tensor in (*leaf.parameters(), *leaf.buffers()):
                change_(tensor)
        elif isinstance(leaf, Tensor):
            change_(leaf)
        elif isinstance(leaf, np.ndarray):
            change_(torch.from_numpy(leaf))
        elif isinstance(leaf, torch.Generator):
            leaf.manual_seed(leaf.initial_seed() + 1)
        elif isinstance(leaf, float):
            return leaf * factor
        elif hasattr(leaf, "__array__") and hasattr(leaf, "at"):  # of JAX
            other = torch.from_numpy(np.array(leaf))
            change_(other)
            return to_array(other)
        return leaf

    return fddp.tree_map(leaf_of, value)


@torch.no_grad()
def shuffle_(tensor: Tensor) -> None:
    """Put elements in another order, and make floating ones smaller. Integers keep their values, so
    that labels stay labels."""
    generator = torch.Generator().manual_seed(_SEED)
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    flat = tensor.detach().reshape(-1)[order]
    if flat.is_floating_point() or flat.is_complex():
        factors = 0.5 + 0.4 * torch.rand(len(order), generator=generator, dtype=torch.float64)
        flat = flat * factors.to(flat.device, flat.real.dtype if flat.is_complex() else flat.dtype)
    tensor.detach().copy_(flat.view(tensor.shape))


@torch.no_grad()
def scale_(tensor: Tensor, factor: float) -> None:
    """Multiply floating-point elements by a factor, such as NaN."""
    if tensor.is_floating_point():
        tensor.detach().mul_(factor)


def _with_gradients(value: Any) -> Iterator[Any]:
    held = [param for _, param in leaves_of("", value)]
    if isinstance(value, torch.optim.Optimizer):
        held += [param for group in value.param_groups for param in group["params"]]
    for leaf in held:
        yield leaf
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            yield leaf.grad


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
