"""Conversion between trees of JAX arrays and tensors over the same memory.

[Note: memory of JAX]
Arrays become tensors through DLPack, without a copy. Tensors become arrays without a copy if they
start at a multiple of 64 bytes, which XLA requires on the CPU; otherwise XLA copies. An array over
a result keeps its bucket's memory alive until JAX releases the array, which programs that have yet
to read it also hold. JAX never writes to such memory, even if it is donated.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import jax
import torch
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as is_within_traced_function
from torch import Tensor

from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.text import leaf_text
from fddp.errors import FddpError, TransformError, TreeMismatchError

# Dtypes that DLPack passes from JAX to torch: those that can be reduced, and others.
_DTYPES = frozenset(["bool", *ITEM_BYTES])
_DTYPES |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}

#: JAX device of a result; None for tensors that stay tensors
Home = Any


def to_tensors(leaves: Sequence[Any], paths: Sequence[str], what: str) -> list[Any]:
    """Return tensors over the memory of arrays, once the arrays are computed.

    Args:
        leaves: JAX arrays. Gradients of integers (dtype float0) become None; other leaves are
            unchanged.
        paths: paths of the leaves, for errors.
        what: name of the tree, for errors.

    Raises:
        TransformError: a leaf is a tracer, or JAX traces a function around the call.
        TreeMismatchError: torch lacks a leaf's dtype, or a leaf is on several devices or not in CPU
            memory.
    """
    # One isinstance per type: trees are large, have few types, and JAX's check is slow.
    by_kind = dict(zip(map(type, leaves), leaves, strict=True))
    kinds = {kind for kind, leaf in by_kind.items() if isinstance(leaf, jax.Array)}
    arrays = [leaf for leaf in leaves if type(leaf) in kinds]
    problem = _problem(arrays)
    if problem is not None:
        array, error, text = problem
        path = next(path for path, leaf in zip(paths, leaves, strict=True) if leaf is array)
        raise error(f"{leaf_text(path, what)} {text}")
    # DLPack would wait while holding the GIL, which callbacks of a running program need.
    jax.block_until_ready(arrays)
    tensors = map(torch.utils.dlpack.from_dlpack, map(_exporter(), arrays))
    if len(arrays) == len(leaves):
        return list(tensors)
    return [next(tensors) if type(leaf) in kinds else _other(leaf) for leaf in leaves]


def homes_of(leaves: Sequence[Any]) -> list[Home]:
    """Return the device for each leaf's result: that of its array, None for a tensor, and for other
    leaves that of the first array."""
    first = next((leaf.device for leaf in leaves if isinstance(leaf, jax.Array)), _cpu())
    if _has_one_device():
        return [None if isinstance(leaf, Tensor) else first for leaf in leaves]
    return [
        leaf.device if isinstance(leaf, jax.Array) else None if isinstance(leaf, Tensor) else first
        for leaf in leaves
    ]


def to_arrays(tensors: Sequence[Tensor | None], homes: Sequence[Home]) -> list[Any]:
    """Return arrays over the memory of results, each on its device. None stays None."""
    array_of, capsule_of = _importer(), torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]
    return [
        tensor if tensor is None or home is None else array_of(capsule_of(tensor), home, None)
        for tensor, home in zip(tensors, homes, strict=True)
    ]


def _problem(arrays: Sequence[jax.Array]) -> tuple[jax.Array, type[FddpError], str] | None:
    """Return the first unsupported array, with the error type and text."""
    kinds = zip(map(type, arrays), [array.dtype for array in arrays], strict=True)
    some = dict(zip(kinds, arrays, strict=True)).values()
    checks: list[tuple[Any, Iterable[jax.Array]]]
    checks = [(_tracer_problem, some), (_staging_problem, arrays[:1]), (_dtype_problem, some)]
    if not _has_one_device():
        checks.append((_place_problem, arrays))
    for problem_of, suspects in checks:
        if any(map(problem_of, suspects)):
            return next((array, *found) for array in arrays if (found := problem_of(array)))
    return None


def _tracer_problem(array: jax.Array) -> tuple[type[FddpError], str] | None:
    if not isinstance(array, jax.core.Tracer):
        return None
    return TransformError, (
        f"is traced by JAX ({type(array).__name__}) and has no values yet; call this outside of "
        f"jax.jit, jax.grad and jax.vmap, or use fddp.jax.pmean or grad_sync, which work inside"
    )


def _staging_problem(array: jax.Array) -> tuple[type[FddpError], str] | None:
    # Within jax.ensure_compile_time_eval, operations on known values are not traced.
    if not is_within_traced_function() or not isinstance(
        jax.lax.stop_gradient(array), jax.core.Tracer
    ):
        return None
    return TransformError, (
        "has a value, but JAX traces the function around this call (jax.jit, or a branch or body "
        "of jax.lax): it would run once, while tracing, and not where the program runs; call it "
        "outside, or use fddp.jax.pmean or grad_sync, which work inside"
    )


def _dtype_problem(array: jax.Array) -> tuple[type[FddpError], str] | None:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return TreeMismatchError, (
            f"is an array of {array.dtype}, which torch lacks; pass None there, or "
            f"jax.random.key_data(key)"
        )
    if array.dtype.name not in _DTYPES:
        return TreeMismatchError, (
            f"is of dtype {array.dtype.name}, which torch lacks or cannot import from JAX; cast "
            f"it, or pass None there"
        )
    return None


def _place_problem(array: jax.Array) -> tuple[type[FddpError], str] | None:
    devices = sorted(map(str, array.devices()))
    if len(devices) > 1:
        return TreeMismatchError, (
            f"is spread over {len(devices)} devices of this process ({', '.join(devices)}); reduce "
            f"over these within JAX, and pass an array on one device, such as "
            f"array.addressable_data(0) of a replicated one"
        )
    platform = next(iter(array.devices())).platform
    if platform != "cpu":
        return TreeMismatchError, (
            f"lies on {devices[0]} (platform {platform!r}), and fddp takes JAX arrays in CPU "
            f"memory; move it: jax.device_put(array, jax.local_devices(backend='cpu')[0])"
        )
    return None


@cache
def _has_one_device() -> bool:
    """Return True if all arrays of this process are in CPU memory of one device."""
    devices = jax.devices()
    return len(devices) == 1 and devices[0].platform == "cpu"


def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]


def _other(leaf: Any) -> Any:
    is_float0 = getattr(leaf, "dtype", None) == jax.dtypes.float0
    return None if is_float0 else leaf


def _exporter() -> Callable[[jax.Array], Any]:
    return getattr(_native(), "buffer_to_dlpack_managed_tensor", lambda array: array.__dlpack__())


def _importer() -> Callable[[Any, Any, None], Any]:
    """Return a function of a capsule, the array's device, and None for the stream."""
    return getattr(_native(), "dlpack_managed_tensor_to_buffer", _by_public_functions)


@cache
def _native() -> Any:
    """Return the private jaxlib module with the functions behind the public ones, or None. They
    take a tenth of the time; the checks they skip are done here once per tree."""
    try:
        return importlib.import_module("jaxlib._jax")
    except ImportError:
        return None


def _by_public_functions(capsule: Any, device: Any, stream: None) -> Any:
    # JAX no longer accepts capsules.
    tensor = torch.utils.dlpack.from_dlpack(capsule)
    return jax.device_put(jax.dlpack.from_dlpack(tensor), device)
