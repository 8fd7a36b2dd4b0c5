"""Tensors whose own memory does not hold their values."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from fddp.native import extension
from fddp.native.torch_private import is_functional_tensor, is_functorch_wrapped_tensor

PLAIN_INSTEAD = (
    "pass plain tensors (of a DTensor, its to_local(); of a quantized tensor, its int_repr(), "
    "scales and zero points)"
)


def wrapper_kind(tensor: Tensor) -> str:
    """Kind of a tensor whose own memory does not hold its values, for errors; "" for any other.

    Such tensors are those of classes with a dispatch of their own (DTensor, fake tensors), of
    transforms and tracers, nested and quantized ones. Their address must not be read. Zero tensors,
    which torch makes in place of missing ones, are not among them.

    Example:
        >>> import torch
        >>> wrapper_kind(torch.ones(2)), wrapper_kind(torch.func.vmap(lambda x: x)(torch.ones(2)))
        ('', '')
        >>> kinds = []
        >>> _ = torch.func.vmap(lambda x: kinds.append(wrapper_kind(x)) or x)(torch.ones(2))
        >>> kinds
        ['tensor of a torch.func transform']
    """
    if extension.compiled.first_without_memory([tensor]) < 0:
        return ""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return type(tensor).__name__
    if tensor.is_nested:
        return "nested tensor"
    if tensor.is_quantized:
        return f"quantized tensor ({tensor.dtype})"
    if is_functional_tensor(tensor):
        return "tensor of a tracer"
    if is_functorch_wrapped_tensor(tensor):
        return "tensor of a torch.func transform"
    return "" if tensor._is_zerotensor() else type(tensor).__name__


def is_dtensor(value: object) -> bool:
    """Return True for a DTensor, of which each rank has a part. Does not import the class."""
    module = sys.modules.get("torch.distributed.tensor")  # takes a second to import
    return module is not None and isinstance(value, module.DTensor)


def shares_elements(tensor: Tensor) -> bool:
    """Return True if two indices of a dense tensor address the same element, as in expanded ones.

    Example:
        >>> import torch
        >>> shares_elements(torch.ones(1).expand(2)), shares_elements(torch.ones(2, 3).t())
        (True, False)
    """
    if tensor.is_contiguous():
        return False
    end = 0
    dims = [(s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    for stride, size in sorted(dims):
        if stride <= end:
            return tensor.numel() > 0
        end += stride * (size - 1)
    return False
