"""Digests of the contents of tensors, by which replicas are compared.

Bits are compared, not numbers: -0.0 differs from 0.0, and NaN equals NaN if all bits agree.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

_PIECE_BYTES = 16 * 1024 * 1024  # copied to the CPU at a time


def digest_of(tensor: Tensor, header: bytes = b"") -> bytes:
    """Return the SHA-256 of a header and the elements of a dense tensor, in order.

    It does not depend on strides and device, nor on shape and dtype if the header does not.

    Example:
        >>> import torch
        >>> digest_of(torch.tensor([0.0, 1.0])) == digest_of(torch.tensor([[0.0], [1.0]]))
        True
        >>> digest_of(torch.tensor([0.0])) == digest_of(torch.tensor([-0.0]))
        False
    """
    found = hashlib.sha256(header)
    for piece in torch.split(bytes_of(tensor), _PIECE_BYTES):
        found.update(piece.cpu().numpy().data)
    return found.digest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements in order as bytes, shape `(n,)`, `uint8`. Copies only if necessary."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain._is_zerotensor():  # without memory
        plain = plain.clone()
    return plain.reshape(-1).view(torch.uint8)


def element_at(tensor: Tensor, position: int) -> Any:
    """Return an element, by its position in order, as a Python number."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)[position].item()
