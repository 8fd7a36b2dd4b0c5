"""Descriptions of arrays of any library by their attributes, without importing the library."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from fddp.core.plan.leaf import LeafSpec, dense_strides
from fddp.core.text import leaf_text
from fddp.native.memory import is_dtensor

_Device = tuple[str, Hashable]


def leaf_specs(
    paths: Sequence[str], leaves: Sequence[Any], sparse: Collection[str] = ()
) -> list[LeafSpec]:
    """Describe all leaves of one tree by their attributes.

    A leaf without a device is on `"meta"`. `None` has the dtype `"none"`. If the leaves are on
    several devices of one type, these are numbered by their first appearance in canonical order
    ("cuda#0", "cuda#1"), so that ranks with other device indices agree.

    Args:
        paths: paths in canonical order.
        leaves: torch tensors (also meta or sparse COO), NumPy arrays, JAX arrays or tracers,
            `jax.ShapeDtypeStruct`, or None.
        sparse: paths of the leaves whose gradients are declared sparse. Those of sparse tensors
            always are.

    Raises:
        TypeError: a leaf has no shape and dtype, or none yet, as parameters of lazy modules, or a
            torch layout that cannot be packed.

    >>> import numpy as np
    >>> leaf_specs(["a", "b"], [np.zeros((3,), dtype=np.float32), None])[0]
    LeafSpec(path='a', shape=(3,), dtype='float32', strides=None, device='cpu', sparse=False)
    >>> [leaf.sparse for leaf in leaf_specs(["a", "b"], [np.zeros(3), np.zeros(2)], {"b"})]
    [False, True]
    """
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    described = [
        _described(path, leaf, path in sparse, shapes)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    specs, devices = [spec for spec, _ in described], [device for _, device in described]
    distinct = list(dict.fromkeys(devices))  # in order of appearance
    kinds = [kind for kind, _ in distinct]
    if len(set(kinds)) == len(kinds):
        return specs
    names = {
        device: f"{device[0]}#{kinds[:position].count(device[0])}"
        for position, device in enumerate(distinct)
        if kinds.count(device[0]) > 1
    }
    return [
        spec._replace(device=names.get(device, spec.device))
        for spec, device in zip(specs, devices, strict=True)
    ]


def _no_array(path: str, leaf: Any) -> str:
    kind = type(leaf)
    if isinstance(leaf, (int, float, complex)):
        return (
            f"{leaf_text(path)} is the {kind.__name__} {leaf!r}, which has no dtype and device; "
            f"pass a tensor, such as torch.tensor({leaf!r})"
        )
    has_shape = isinstance(getattr(leaf, "shape", None), tuple)
    lacks = "is no array" if has_shape else "has no shape and dtype"
    return (
        f"{leaf_text(path)} is a {kind.__module__}.{kind.__qualname__}, which {lacks}; leaves "
        f"are arrays or None, and custom containers must be registered with "
        "optree.register_pytree_node (or, around arrays of JAX, with "
        "jax.tree_util.register_pytree_node)"
    )


def _described(
    path: str, leaf: Any, sparse: bool, shapes: dict[tuple[int, ...], tuple[int, ...]]
) -> tuple[LeafSpec, _Device]:
    """Return the spec of a leaf, the device type, and an identity of the device in its type.

    Equal shapes become one object of `shapes`, since long-lived objects slow garbage collection.
    """
    if leaf is None:
        return LeafSpec(path, (), "none", None, "none", sparse), ("none", None)
    try:
        shape, dtype = tuple(leaf.shape), leaf.dtype
        layout = leaf.layout if hasattr(leaf, "is_contiguous") else None
    except (AttributeError, TypeError):
        raise TypeError(_no_array(path, leaf)) from None
    except RuntimeError:  # torch's, for nested tensors and parameters of lazy modules
        if leaf.is_nested:
            raise TypeError(
                f"{leaf_text(path)} is a nested tensor, which has no shape; pass its "
                f"to_padded_tensor(0.0), or its parts"
            ) from None
        raise TypeError(
            f"{leaf_text(path)} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which has "
            f"no shape yet; run one forward pass through the lazy module first"
        ) from None
    shape = shapes.setdefault(shape, shape)
    if layout is None:
        device = _array_device(leaf)
        return LeafSpec(path, shape, dtype.name, None, device[0], sparse), device
    if is_dtensor(leaf):
        raise TypeError(
            f"{leaf_text(path)} is a DTensor, of which each rank has a part; pass its to_local(), "
            f"or wrap a tensor-parallel module with device_mesh="
        )
    traits = _torch_traits(leaf.dtype, leaf.device, layout)
    if traits.layout == "torch.sparse_coo":
        return LeafSpec(path, shape, traits.dtype, None, traits.device[0], True), traits.device
    if traits.layout != "torch.strided":
        raise TypeError(
            f"{leaf_text(path)} has the layout {traits.layout}; only strided and sparse COO "
            "tensors can be reduced: convert it (see Tensor.to_dense)"
        )
    strides = None if leaf.is_contiguous() else dense_strides(shape, leaf.stride())
    return LeafSpec(path, shape, traits.dtype, strides, traits.device[0], sparse), traits.device


class _TorchTraits(NamedTuple):
    dtype: str
    device: _Device
    layout: str


@lru_cache(maxsize=64)
def _torch_traits(dtype: Any, device: Any, layout: Any) -> _TorchTraits:
    # Cached: few combinations occur in a tree, and torch formats their names slowly.
    return _TorchTraits(str(dtype).removeprefix("torch."), (device.type, device.index), str(layout))


def _array_device(leaf: Any) -> _Device:
    """Return the device type and identity of an array that is not a torch tensor."""
    device = getattr(leaf, "device", None)
    if isinstance(device, str):
        return device, None
    if device is None:  # NumPy 1, or a JAX shape without a device
        return ("cpu" if hasattr(leaf, "__array_interface__") else "meta"), None
    devices = frozenset(leaf.devices())
    platform: str = next(iter(devices)).platform
    return ("cuda" if platform == "gpu" else platform), devices
