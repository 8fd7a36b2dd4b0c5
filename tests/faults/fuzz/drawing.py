"""Arguments out of bytes: what a fuzzer mutates becomes trees, tensors and numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.bool,
    torch.uint8,
)
_NUMBERS = (0, 1, 2, 3, 7, -1, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30)
_REALS = (0.0, 1.0, -1.0, 0.5, 1e38, 1e300, math.inf, -math.inf, math.nan, 5e-324)


class Draw:
    """Takes an input apart from its front; zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, bound: int) -> int:
        return self.byte() % bound

    def likely(self) -> bool:
        """Seven times out of eight."""
        return self.byte() % 8 != 7

    def one_of(self, choices: Any) -> Any:
        return choices[self.below(len(choices))]

    def number(self) -> Any:
        return self.below(6) if self.likely() else self.one_of(_NUMBERS)

    def real(self) -> Any:
        return self.one_of(_REALS) if self.likely() else self.anything()

    def shape(self) -> tuple[int, ...]:
        return tuple(self.below(5) for _ in range(self.below(4)))

    def tensor(self, *, sound: bool = False) -> Tensor:
        """A tensor of any form, of few elements; a sound one can be used by torch."""
        shape, dtype = self.shape(), self.one_of(DTYPES)
        form = self.one_of(_FORMS[:-1] if sound else _FORMS)
        return form(torch.ones(shape, dtype=dtype), self)

    def leaf(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """A tensor of this shape, or nearly so."""
        if not self.likely():
            return self.anything()
        tensor = torch.ones(shape, dtype=dtype if self.likely() else self.one_of(DTYPES))
        return tensor if self.likely() else self.one_of(_FORMS)(tensor, self)

    def anything(self) -> Any:
        """Draw an argument of a wrong type."""
        makers: tuple[Callable[[], Any], ...] = (
            lambda: None,
            self.tensor,
            lambda: self.one_of(_NUMBERS),
            lambda: self.one_of(_REALS),
            lambda: "text",
            lambda: b"\x00\xff",
            lambda: [self.anything() for _ in range(self.below(3))],
            lambda: {self.below(3): self.anything()},
            object,
            lambda: torch.float32,
        )
        return self.one_of(makers)()


def _emptied(tensor: Tensor, _: Draw) -> Tensor:
    """As sharded training frees parameters: the shape stays, the memory goes."""
    tensor.untyped_storage().resize_(0)
    return tensor


def _sparse(tensor: Tensor, draw: Draw) -> Tensor:
    return tensor.to_sparse(draw.below(tensor.dim()) + 1) if tensor.dim() else tensor


_FORMS: tuple[Callable[[Tensor, Draw], Tensor], ...] = (
    lambda t, _: t,
    lambda t, _: t.t() if t.dim() == 2 else t,
    lambda t, _: t[..., ::2] if t.dim() else t,
    lambda t, _: t.expand(2, *t.shape),
    lambda t, _: t.conj() if t.is_complex() else t,
    lambda t, _: t.conj().imag if t.is_complex() else t,
    lambda t, _: t.to("meta"),
    _sparse,
    lambda t, _: t.requires_grad_() if t.is_floating_point() else t,
    lambda t, _: torch.nn.Parameter(t, requires_grad=False),
    lambda t, _: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    lambda t, _: torch.nested.nested_tensor([t]) if t.dim() else t,
    lambda t, d: torch.as_strided(t, t.shape, [0] * t.dim()),
    _emptied,
)
