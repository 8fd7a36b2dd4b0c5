"""Tensors that no operator takes: subclasses, and those whose memory does not hold their values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Tagged(Tensor):
    """A subclass of Tensor with memory of its own."""


class Rounding(Tensor):
    """A subclass with memory of its own, whose `copy_` rounds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            args = (args[0], args[1].round(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


class Quantised(Tensor):
    """Integers and a scale, which are made anew when it is copied into."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Quantised:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, values.shape, dtype=torch.float32)  # type: ignore[no-any-return]

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale = values, scale

    def wide(self) -> Tensor:
        return self.values_.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            made = cls(args[0].values_, args[0].scale)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func is aten.copy_.default and isinstance(args[0], Quantised):
            source = args[1].wide() if isinstance(args[1], Quantised) else args[1]
            args[0].scale.copy_(source.abs().max() / 127)
            args[0].values_.copy_((source / args[0].scale).round())
            return args[0]
        wide = tree_map(lambda x: x.wide() if isinstance(x, Quantised) else x, (args, kwargs or {}))
        return func(*wide[0], **wide[1])


class Open(Quantised):
    """The same, and names the tensors that it holds."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: None, size: Any, stride: Any) -> Open:
        return cls(inner["values_"], inner["scale"])


def quantized() -> dict[str, Tensor]:
    """Return a tree with a quantized leaf."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}


def integers(kind: type[Quantised], first: int = 3) -> Quantised:
    """Four numbers that `copy_` does not keep."""
    return kind(torch.tensor([first, -7, 5, 1], dtype=torch.int8), torch.tensor(0.3))


def _distributed() -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)  # needs no group
    return DTensor.from_local(torch.arange(4.0), mesh, [Replicate()], run_check=False)


def _quiet(make: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        return make()


WRAPPERS: dict[str, Callable[[], Tensor]] = {
    "DTensor": _distributed,
    "TwoTensor": lambda: TwoTensor(torch.arange(4.0), torch.arange(4.0) + 1),
    "MaskedTensor": lambda: _quiet(
        lambda: torch.masked.masked_tensor(
            torch.arange(4.0), torch.tensor([True, False, True, True])
        )
    ),
    "Quantised": lambda: integers(Quantised),
    "Open": lambda: integers(Open),
    "FakeTensor": lambda: FakeTensorMode().from_tensor(torch.arange(4.0)),
    "quantized tensor": lambda: _quiet(
        lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8)
    ),
    "NestedTensor": lambda: _quiet(
        lambda: torch.nested.nested_tensor([torch.arange(4.0)], layout=torch.jagged)
    ),
    "nested tensor": lambda: _quiet(lambda: torch.nested.nested_tensor([torch.arange(4.0)])),
    "tensor of a tracer": lambda: torch._to_functional_tensor(torch.arange(4.0)),
    "tensor of a torch.func transform": lambda: torch._C._functorch._add_batch_dim(
        torch.arange(8.0).view(2, 4), 0, 1
    ),
}
"""Tensors of four numbers whose own memory does not hold their values, by the kind that errors
name."""
