"""Snapshots of a rank's state: leaves, structure, digests, and memory for another rank's state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fddp.collectives.replicas.containers import containers_from_json, containers_to_json
from fddp.collectives.replicas.digest import bytes_of, digest_of
from fddp.core.plan.leaf import MAX_COUNT
from fddp.core.protocol.messages import AnyOf, Schema, decode
from fddp.core.text import leaf_text
from fddp.native.memory import PLAIN_INSTEAD, wrapper_kind
from fddp.tree.foreign import ForeignTreeDef, adapted
from fddp.tree.pytree import TreeDef, flatten

#: supported leaves
Leaf: TypeAlias = Tensor | bool | int | float | str | None

_DESCRIPTION: Schema = {
    "paths": [str],
    "leaves": [AnyOf(((str, [int], str), {"float": str}, {"int": str}, bool, str, None))],
    "containers": str,
    "obstacle": str,
}
_DIGEST_CHARS = 16


@dataclass(frozen=True)
class Snapshot:
    """A flattened state.

    Attributes:
        leaves: leaves in canonical order; arrays of other libraries as tensors.
        treedef: structure of the tree.
        containers: containers as JSON; empty if a rank without the tree can't build them.
        obstacle: the reason why it can't; else empty.
    """

    leaves: list[Leaf]
    treedef: TreeDef
    containers: str
    obstacle: str

    @classmethod
    def of(cls, tree: Any) -> Snapshot:
        """Snapshot of a tree.

        Raises:
            TypeError: a leaf is neither a plain, dense tensor nor a number, text or None.
        """
        leaves, treedef = flatten(tree)
        arrays = [None if _is_plain(leaf) else leaf for leaf in leaves]
        tensors, treedef = adapted(arrays, treedef, "tree")
        pairs = zip(leaves, tensors, strict=True)
        converted = [leaf if _is_plain(leaf) else tensor for leaf, tensor in pairs]
        for path, leaf in zip(treedef.paths, converted, strict=True):
            if not _is_plain(leaf):
                check_dense(leaf_text(path), leaf)
        return cls(converted, treedef, *_containers(tree, treedef.paths))

    def tree(self) -> Any:
        """Rebuild the tree."""
        if not isinstance(self.treedef, ForeignTreeDef):
            return self.treedef.unflatten(self.leaves)
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        pairs = zip(self.leaves, self.treedef.restore(tensors), strict=True)
        whole = [array if isinstance(leaf, Tensor) else leaf for leaf, array in pairs]
        return TreeDef(self.treedef._treespec, self.treedef._structure).unflatten(whole)

    def description(self) -> str:
        """Everything except the contents of tensors, as JSON."""
        document = {
            "paths": self.treedef.paths,
            "leaves": [*map(_described, self.leaves)],
            "containers": self.containers,
            "obstacle": self.obstacle,
        }
        return json.dumps(document, separators=(",", ":"))

    def runs(self) -> list[Tensor]:
        """Bytes of each tensor, shape `(n,)`; views of the tensors that are contiguous."""
        return [bytes_of(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)]

    def digests(self) -> list[str]:
        """Prefix of the SHA-256 of each leaf's type and contents."""
        return [_digest(leaf) for leaf in self.leaves]

    def laid_out_as(self, own: Snapshot | None) -> Snapshot:
        """The same values, with the strides of `own`'s tensors if it has the same paths."""
        if own is None or own.treedef.paths != self.treedef.paths:
            return self
        pairs = zip(self.leaves, own.leaves, strict=True)
        return replace(self, leaves=[_laid_out(leaf, like) for leaf, like in pairs])


def allocate_like(description: str, own: Snapshot | None) -> Snapshot:
    """Allocate the state that another rank described. Contents of tensors are undefined.

    The containers are those of this rank's own tree if that has the same paths.

    Raises:
        ValueError: the containers can't be built here, or the description is malformed.
        RuntimeError: out of memory.
    """
    document = decode(description, _DESCRIPTION)
    paths, kinds = tuple(document["paths"]), document["leaves"]
    containers, obstacle = document["containers"], document["obstacle"]
    if len(kinds) != len(paths) or bool(containers) == bool(obstacle):
        raise ValueError(
            f"the description has {len(kinds)} leaves, {len(paths)} paths, and containers "
            f"{containers!r:.40} with the obstacle {obstacle!r:.40}"
        )
    known = own is not None and own.treedef.paths == paths
    likes: Sequence[Leaf] = own.leaves if own is not None and known else [None] * len(paths)
    leaves = [_room(kind, like) for kind, like in zip(kinds, likes, strict=True)]
    if own is not None and known and (not containers or own.containers in ("", containers)):
        return replace(own, leaves=leaves)
    if not containers:
        raise ValueError(
            f"{obstacle}; pass a tree with the same leaves on this rank, with any values"
        )
    treedef = flatten(containers_from_json(containers))[1]
    if treedef.paths != paths:
        raise ValueError("the description's containers do not have the leaves that it lists")
    return Snapshot(leaves, treedef, containers, "")


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (bool, int, float, str))


def check_dense(name: str, leaf: Any) -> None:
    """Raise a `TypeError` for a leaf that is not a plain, dense tensor with memory."""
    if isinstance(leaf, (UninitializedBuffer, UninitializedParameter)):
        raise TypeError(
            f"{name} has no shape yet; run one forward pass through the lazy module first"
        )
    kind = ""
    if type(leaf) not in (Tensor, torch.nn.Parameter):
        kind = type(leaf).__name__
    else:
        kind = wrapper_kind(leaf)
    if not kind and leaf.layout is not torch.strided:
        kind = str(leaf.layout)
    elif not kind and leaf.is_meta:
        kind = "meta tensor"
    if kind:
        raise TypeError(
            f"{name} is a {kind}; leaves are plain, dense tensors with memory, arrays, numbers, "
            f"text or None: {PLAIN_INSTEAD}"
        )


def _containers(tree: Any, paths: Sequence[str]) -> tuple[str, str]:
    """The containers as JSON and an empty text, or an empty text and the obstacle."""
    try:
        text = containers_to_json(tree)
        made = flatten(containers_from_json(text))[1].paths
    except ValueError as error:
        return "", str(error)
    if made == paths:
        return text, ""
    return "", "the tree has containers other than dict, OrderedDict, list and tuple"


def _described(leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return [str(leaf.dtype).removeprefix("torch."), [*leaf.shape], leaf.device.type]
    if leaf is None or isinstance(leaf, (bool, str)):
        return leaf
    # As text, which is exact for floats and unbounded for integers.
    return {"float": float(leaf).hex()} if isinstance(leaf, float) else {"int": hex(leaf)}


def _room(kind: Any, like: Leaf) -> Leaf:
    if isinstance(kind, list):
        name, shape, device = kind
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
            raise ValueError(f"a leaf is of {name!r:.40}, which is not a dtype of this torch")
        if not all(0 <= size <= MAX_COUNT for size in shape):
            raise ValueError(f"a leaf is of shape {shape}")
        home = like.device if isinstance(like, Tensor) else _device(device)
        return torch.empty(shape, dtype=dtype, device=home)
    if isinstance(kind, dict):
        return _number(kind)
    return kind  # type: ignore[no-any-return]


def _device(name: str) -> torch.device:
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"a leaf is on {name!r:.40}, which is not a device: {error}") from error
    if name != found.type or name == "meta":
        raise ValueError(f"a leaf is on {name!r:.40}, which is not a type of device with memory")
    return found


def _number(kind: dict[str, str]) -> int | float:
    """The number that `_described` wrote. Only its canonical text is accepted."""
    ((of, text),) = kind.items()
    try:
        number = float.fromhex(text) if of == "float" else int(text, 16)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"a leaf is the {of} {text!r:.40}: {error}") from error
    if _described(number) != kind:
        raise ValueError(f"a leaf is the {of} {text!r:.40}, which is not its canonical text")
    return number


def _laid_out(leaf: Leaf, like: Leaf) -> Leaf:
    if not (isinstance(leaf, Tensor) and isinstance(like, Tensor)):
        return leaf
    if leaf.shape != like.shape or leaf.dtype != like.dtype or like.is_contiguous():
        return leaf
    return torch.empty_like(like).copy_(leaf)


def _digest(leaf: Leaf) -> str:
    if isinstance(leaf, Tensor):
        header = json.dumps(_described(leaf)[:2]).encode()  # not where it is
        return digest_of(leaf, header).hex()[:_DIGEST_CHARS]
    found = hashlib.sha256(json.dumps(_described(leaf)).encode())
    return found.hexdigest()[:_DIGEST_CHARS]
