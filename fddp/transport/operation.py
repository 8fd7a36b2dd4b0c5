"""Collectives as values: what a transport hands to its backend, and the checks before it.

Backends answer bad input by hanging or by ending the process, so none is handed to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

OperationKind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]

#: dtypes that `all_reduce` and `reduce_scatter` add up; the other operations move any dtype
SUMMABLE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)


class Operation(NamedTuple):
    """A collective as it is handed to a backend, its tensor checked."""

    kind: OperationKind
    tensor: Tensor  # contiguous, written in place
    ranks: tuple[int, ...]  # who takes part, ascending
    src: int = 0  # broadcast only: rank in the transport
    average: bool = False  # sums only: divide by the number of `ranks`
    record_time: bool = False
    wait_soon: bool = False  # the caller is about to wait for it
    # all_gather only: what is no caller's tensor and always of one size, so that it may meet none
    # of theirs, whose sizes differ, where ranks issue other operations than each other
    fixed_size: bool = False
    # reduce_scatter only: sizes of the axes along which `ranks` lie, outermost first, where the sum
    # has the one association that follows from them, see [Note: one association] in
    # `ordered_sum.py`; () leaves it to the backend
    association: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[Tensor, ...]:
        """The tensor's memory in equal parts, one for each of `ranks`; a multiple of their number.

        >>> Operation("all_gather", torch.arange(6), ranks=(1, 3)).chunks[1]
        tensor([3, 4, 5])
        """
        n = len(self.ranks)
        return self.tensor.view(n, self.tensor.numel() // n).unbind(0)

    def __str__(self) -> str:
        """What must be equal on all ranks, for error texts.

        >>> str(Operation("broadcast", torch.zeros(2, 3), ranks=(0, 1), src=1))
        'broadcast from rank 1 of torch.float32 (2, 3)'
        """
        source = f" from rank {self.src}" if self.kind == "broadcast" else ""
        averaging = "averaging " if self.average else ""
        association = (
            f" in order {' x '.join(map(str, self.association))}" if self.association else ""
        )
        what = f"{self.kind}{source}{association}"
        return f"{averaging}{what} of {self.tensor.dtype} {tuple(self.tensor.shape)}"


def check_operation(operation: Operation, rank: int) -> None:
    """Raise the error that names what is wrong with an operation that `rank` is about to start."""
    kind, tensor, n = operation.kind, operation.tensor, len(operation.ranks)
    check_tensor(kind, tensor, rank)
    if kind in ("all_reduce", "reduce_scatter"):
        if tensor.dtype not in SUMMABLE_DTYPES:
            raise TypeError(
                f"{kind} on rank {rank} cannot sum {tensor.dtype}; convert the tensor to "
                f"one of {', '.join(sorted(map(str, SUMMABLE_DTYPES)))}"
            )
        if operation.average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"{kind} on rank {rank} cannot average {tensor.dtype}; convert the tensor to a "
                "floating dtype, or sum it"
            )
    if kind in ("reduce_scatter", "all_gather") and (tensor.dim() != 1 or tensor.numel() % n):
        raise ValueError(
            f"{kind} on rank {rank}: a buffer of shape {tuple(tensor.shape)} can't be cut into {n} "
            f"equal chunks; pass one of one dimension, padded to a multiple of {n} elements"
        )


def check_tensor(kind: OperationKind, tensor: Tensor, rank: int) -> None:
    """Raise a ValueError if `tensor` can't be read and written as one flat run of memory."""
    problem = _problem(tensor)
    if problem is not None:
        raise ValueError(f"{kind} on rank {rank}: the tensor {problem}")


def _problem(tensor: Tensor) -> str | None:
    """What stops `tensor` from being read and written as one flat run of memory, and the cure."""
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; pass a dense one (tensor.to_dense())"
    if not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        return f"of shape {shape} has strides {stride}; pass tensor.contiguous()"
    if tensor.requires_grad:
        return "requires grad and collectives are not differentiable; pass tensor.detach()"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative view; pass tensor.resolve_conj().resolve_neg()"
    return None
