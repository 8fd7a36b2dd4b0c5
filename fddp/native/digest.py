"""64-bit digests of the contents of tensors.

Equal tensors have equal digests, whatever their strides. Different tensors collide with
probability 2**-64. Bits are compared, not numbers: -0.0 differs from 0.0, and NaN equals NaN if all
bits agree. Digests must not be stored: CPU and accelerators compute different ones.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fddp.native import extension

_PIECE_WORDS = 1 << 22  # processed at a time on an accelerator
_FACTORS = (-7924235374474036453, 5497524462133107635)  # odd, of 64 bits
_MASK = (1 << 32) - 1


def digest_of(tensor: Tensor) -> int:
    """Return the digest of a dense tensor of any dtype and device, as an unsigned 64-bit integer.

    It depends on the bits and the order of the elements, not on shape and dtype. A tensor that is
    not contiguous is copied.

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
    """Return the elements in order as bytes, shape `(n,)`, `uint8`. Copies only if necessary."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _on_device(flat: Tensor) -> int:
    """Compute a digest with torch operations on the tensor's device. Differs from the CPU's."""
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
    """Mix each word with its position and sum the results modulo 2**64."""
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
    """Return one digest of several words, in order."""
    return digest_of(torch.tensor(words, dtype=torch.uint64)) if words else 0


def element_at(tensor: Tensor, position: int) -> Any:
    """Return an element, by its position in order, as a Python number."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)[position].item()
