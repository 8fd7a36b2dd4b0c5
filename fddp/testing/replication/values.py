"""Values of a run: snapshots of leaves, and their bits."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fddp.extend import is_dtensor
from fddp.testing.replication.leaves import CONSTANTS, RANDOM_STATES, leaves_of


class Part(NamedTuple):
    """Snapshot of this rank's part of a DTensor."""

    local: Tensor


class Opaque(NamedTuple):
    """Snapshot of a leaf that can't be compared."""

    kind: str


def snapshot(leaf: Any) -> Any:
    """Copy of a leaf that later writes do not change: a tensor, a constant or bytes; `Part` for a
    DTensor of which each rank holds another part, and `Opaque` for what can't be compared."""
    if is_dtensor(leaf):
        own = snapshot(leaf.to_local())
        return own if all(p.is_replicate() for p in leaf.placements) else Part(own)
    if isinstance(leaf, Tensor):
        dense = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
        return dense.resolve_conj().resolve_neg().cpu().clone()
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    if isinstance(leaf, RANDOM_STATES):
        return repr(_listed(_state_of(leaf)))
    if isinstance(leaf, CONSTANTS):
        return leaf
    if hasattr(leaf, "__array__"):
        return _of_array(leaf)
    return Opaque(f"{type(leaf).__module__}.{type(leaf).__qualname__}")


def is_same(leaf: Any, other: Any) -> bool:
    """Return True if two snapshots have the same bits."""
    if isinstance(leaf, Part) and isinstance(other, Part):
        leaf, other = leaf.local, other.local
    if not (isinstance(leaf, Tensor) and isinstance(other, Tensor)):
        return type(leaf) is type(other) and (leaf == other or leaf != leaf)
    return leaf.dtype == other.dtype and leaf.shape == other.shape and _bits(leaf) == _bits(other)


def has_content(leaf: Any) -> bool:
    """Return True if a snapshot is of numbers, or of what can't be compared."""
    if isinstance(leaf, Tensor):
        return leaf.numel() > 0
    return isinstance(leaf, int | float | complex | Opaque) and not isinstance(leaf, Enum)


def digest(value: Any) -> bytes | None:
    """Digest of the numbers of a value, gradients included; None if it has none."""
    try:
        leaves = [leaf for _, leaf in leaves_of("", value)]
        gradients = [leaf.grad for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_leaf]
        found = [snapshot(leaf) for leaf in (*leaves, *gradients)]
    except Exception:  # of any object that a local variable may hold
        return None
    found = [leaf for leaf in found if not isinstance(leaf, Opaque)]
    if all(leaf is None for leaf in found):
        return None
    total = hashlib.blake2b(digest_size=16)
    for leaf in found:
        total.update(_bits(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode())
    return total.digest()


def shapes_of(value: Any) -> frozenset[tuple[int, ...]]:
    """Shapes of the leaves of a value."""
    try:
        return frozenset(tuple(getattr(leaf, "shape", ())) for _, leaf in leaves_of("", value))
    except Exception:  # of any object that a local variable may hold
        return frozenset()


def may_be_one_of(result: Any, trees: Sequence[Any]) -> bool:
    """Return True if a result may take the place of one of several trees: if it has a leaf of the
    kind and shape of one of theirs. A loss takes that of no parameters, which are only read then,
    and of no learning rate that is a number."""
    kinds = {_kind(path, leaf) for tree in trees for path, leaf in leaves_of("", tree)}
    return any(_kind(path, leaf) in kinds for path, leaf in leaves_of("", result))


def _kind(path: str, leaf: Any) -> Any:
    shape = tuple(getattr(leaf, "shape", ()))
    key = path if all(size == 1 for size in shape) else ""
    kind = type(leaf) if not hasattr(leaf, "shape") else None
    return shape, key, kind


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


def _state_of(source: Any) -> Any:
    """State of a source of random numbers."""
    if isinstance(source, random.Random):
        return source.getstate()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.get_state()


def _listed(state: Any) -> Any:
    """A state with lists in place of arrays, whose texts are not cut."""
    if isinstance(state, dict):
        return {name: _listed(part) for name, part in state.items()}
    if isinstance(state, tuple):
        return [_listed(part) for part in state]
    return state.tolist() if isinstance(state, np.ndarray) else state


def _of_array(leaf: Any) -> Any:
    """Snapshot of an array of NumPy or JAX."""
    try:
        array = np.array(leaf)
    except TypeError:  # keys of JAX
        return _of_array(sys.modules["jax"].random.key_data(leaf))
    try:
        return torch.from_numpy(array)
    except TypeError:  # no dtype of torch
        if array.dtype.hasobject:
            return Opaque(f"array of {array.dtype}")
        return str(array.dtype), array.shape, array.tobytes()


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
