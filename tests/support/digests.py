"""Digests of trees of tensors."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from fddp.tree.pytree import flatten


def digest(tree: Any) -> str:
    """Return the MD5 of a tree's paths and bits; sparse leaves count as dense."""
    seen = hashlib.md5(usedforsecurity=False)
    leaves, treedef = flatten(tree)
    for leaf, path in zip(leaves, treedef.paths, strict=True):
        dense = None if leaf is None else leaf.to_dense().contiguous().flatten()
        seen.update(path.encode())
        seen.update(b"" if dense is None else dense.view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
