"""Digests of tensors: 64 bits that stand for a tensor's bits and their places.

Equal tensors have equal digests, whatever their strides; that others have the same by chance has
the probability 2**-64. Bits are compared, not numbers: -0.0 differs from 0.0, and NaN equals NaN
where all its bits do. Digests are for comparing, not for keeping: those of tensors on the CPU and
on accelerators differ.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fddp.native import extension

_PIECE_WORDS = 1 << 22  # of an accelerator's memory that are looked at in one go
_FACTORS = (-7924235374474036453, 5497524462133107635)  # odd, of 64 bits
_MASK = (1 << 32) - 1


def digest_of(tensor: Tensor) -> int:
    """The digest of a dense tensor of any dtype and device, as an unsigned number of 64 bits.

    Args:
        tensor: read once; copied before if its elements do not lie in order.

    Returns:
        It depends on the elements' bits and order, not on shape and dtype.

    Example:
        >>> import torch
        >>> digest_of(torch.tensor([0.0, 1.0])) == digest_of(torch.tensor([[0.0], [1.0]]))
        True
        >>> digest_of(torch.tensor([0.0])) == digest_of(torch.tensor([-0.0]))
        False
    """
    flat = bytes_of(tensor)
    if flat.device.type == "cpu":
        return cast(int, extension.load().digest_bytes(flat.numpy()))
    return _on_device(flat)


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements in order as bytes, shape `(n,)`, `uint8`; the same memory where they lie so."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _on_device(flat: Tensor) -> int:
    """The same in a few operations of torch, where the bytes are; another number."""
    state = flat.numel()
    whole = flat.numel() // 8 * 8
    for start in range(0, whole, 8 * _PIECE_WORDS):
        words = flat[start : min(start + 8 * _PIECE_WORDS, whole)]
        if words.storage_offset() % 8:
            words = words.clone()
        state = _joined(state, _sum_of(words.view(torch.int64)))
    if whole < flat.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        rest[: flat.numel() - whole] = flat[whole:]
        state = _joined(state, _sum_of(rest.view(torch.int64)))
    return state


def _sum_of(words: Tensor) -> int:
    """Each word mixed with its place, and all added up; modulo 2**64."""
    places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
    mixed = (words ^ (places * _FACTORS[0])) * _FACTORS[1]
    mixed ^= (mixed >> 32) & _MASK
    mixed *= _FACTORS[0]
    mixed ^= (mixed >> 32) & _MASK
    return int(mixed.sum().item())


def _joined(state: int, part: int) -> int:
    joined = ((state ^ (part % 2**64)) * (_FACTORS[0] % 2**64)) % 2**64
    return joined ^ (joined >> 32)


def hash_words(words: list[int]) -> int:
    """One digest of several, in order."""
    return digest_of(torch.tensor(words, dtype=torch.uint64)) if words else 0


def element_at(tensor: Tensor, position: int) -> Any:
    """An element as Python's number, by its place in order."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)[position].item()
