"""Collectives as values, and their validation.

Backends respond to invalid input by hanging or by ending the process, so operations are validated
before they are passed to a backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from fddp.native.memory import PLAIN_INSTEAD, wrapper_kind

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.core.schedule.sum_tree import SumTree

OperationKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]

#: dtypes that `all_reduce` and `reduce_scatter` sum; other operations accept any dtype
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
    """A collective with a validated tensor.

    Attributes:
        kind: the collective.
        tensor: contiguous tensor, written in place.
        ranks: participating ranks in ascending order.
        src: source of a broadcast, as a rank in the transport.
        average: divide a sum by the number of `ranks`.
        record_time: record the completion time.
        wait_soon: the caller waits for the operation next.
        fixed_size: an all-gather of a library tensor, whose size is the same on all ranks even if
            they issue different operations. It must not be matched with operations on the caller's
            tensors, whose sizes may differ.
        tree: association of a reduce-scatter; None leaves it to the backend. The buffer has
            `tree.width` rows in each chunk, of which each rank sends as many as it has summands.
            See [Note: one association] in `core/schedule/sum_tree.py`.
    """

    kind: OperationKind
    tensor: Tensor
    ranks: tuple[int, ...]
    src: int = 0
    average: bool = False
    record_time: bool = False
    wait_soon: bool = False
    fixed_size: bool = False
    tree: SumTree | None = None

    @property
    def chunks(self) -> tuple[Tensor, ...]:
        """Equal chunks of the tensor's memory, one for each of `ranks`.

        >>> Operation("all_gather", torch.arange(6), ranks=(1, 3)).chunks[1]
        tensor([3, 4, 5])
        """
        n = len(self.ranks)
        return self.tensor.view(n, self.tensor.numel() // n).unbind(0)

    def __str__(self) -> str:
        """Describe the parameters that must be equal on all ranks.

        >>> str(Operation("broadcast", torch.zeros(2, 3), ranks=(0, 1), src=1))
        'broadcast from rank 1 of torch.float32 (2, 3)'
        """
        src = self.src if self.kind == "broadcast" else None
        shape = tuple(self.tensor.shape)
        tree = 0 if self.tree is None else self.tree.digest
        return describe(self.kind, src, self.average, tree, self.tensor.dtype, shape)


def describe(
    kind: str,
    src: object,
    average: bool,
    tree: int,
    dtype: object,
    shape: tuple[int, ...],
) -> str:
    """Describe an operation.

    Args:
        kind, average, dtype, shape: as in `Operation`.
        src: None if it is no broadcast.
        tree: digest of the association; 0 if there is none.
    """
    source = "" if src is None else f" from rank {src}"
    averaging = "averaging " if average else ""
    order = f" along tree {tree:016x}" if tree else ""
    return f"{averaging}{kind}{source}{order} of {dtype} {shape}"


def check_operation(operation: Operation, rank: int) -> None:
    kind, tensor, n = operation.kind, operation.tensor, len(operation.ranks)
    check_tensor(kind, tensor, rank)
    if kind in ("all_reduce", "reduce_scatter"):
        if tensor.dtype not in SUMMABLE_DTYPES:
            raise TypeError(
                f"{kind} on rank {rank} cannot sum {tensor.dtype}; convert the tensor to "
                f"one of {', '.join(sorted(map(str, SUMMABLE_DTYPES)))}"
            )
        if operation.average and operation.tree is not None:
            raise ValueError(
                f"{kind} on rank {rank} cannot average along a tree; sum, and divide the result"
            )
        if operation.average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"{kind} on rank {rank} cannot average {tensor.dtype}; convert the tensor to a "
                "floating dtype, or sum it"
            )
    has_chunks = kind in ("reduce_scatter", "all_gather", "all_to_all")
    if has_chunks and (tensor.dim() != 1 or tensor.numel() % n):
        raise ValueError(
            f"{kind} on rank {rank}: a buffer of shape {tuple(tensor.shape)} can't be cut into {n} "
            f"equal chunks; pass one of one dimension, padded to a multiple of {n} elements"
        )
    if operation.tree is not None and tensor.numel() % (n * operation.tree.width):
        raise ValueError(
            f"{kind} on rank {rank}: a buffer of {tensor.numel()} elements can't hold "
            f"{operation.tree.width} rows in each of {n} chunks"
        )


def check_tensor(kind: OperationKind, tensor: Tensor, rank: int) -> None:
    """Raise ValueError if `tensor` can't be accessed as one flat block of memory."""
    problem = _problem(tensor)
    if problem is not None:
        raise ValueError(f"{kind} on rank {rank}: the tensor {problem}")


def _problem(tensor: Tensor) -> str | None:
    kind = wrapper_kind(tensor)
    if kind:
        return f"is a {kind}, whose memory does not hold its values; {PLAIN_INSTEAD}"
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
