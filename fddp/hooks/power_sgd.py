"""PowerSGD: low-rank compression of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.hooks.compression import Compressed, Compressor, ErrorFeedbackState, error_feedback
from fddp.hooks.flat import split_views, wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec, Hook


class _Matrix(NamedTuple):
    """A leaf that is compressed."""

    leaf: int  # position in the bucket
    rows: int  # size of the first dimension
    columns: int  # product of the other dimensions
    rank: int  # number of columns of the factors


@dataclass(frozen=True)
class PowerSgd(Compressor[list[Tensor]]):
    """Hook that approximates each matrix M by P Q^T, where P and Q have `rank` columns.

    The state is the last Q of each compressed matrix, shape `(columns, rank)`, the same on all
    ranks.
    """

    rank: int

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank must be an int of at least 1, got {self.rank!r}")

    @property
    def stages(self) -> int:
        return 2

    def init(self, spec: BucketSpec) -> list[Tensor]:
        generator = torch.Generator().manual_seed(spec.index)
        return [
            torch.randn(m.columns, m.rank, generator=generator, dtype=wide(spec.dtype)).to(
                spec.device
            )
            for m in self._matrices(spec)
        ]

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        matrices, dtype = self._matrices(spec), wide(spec.dtype)
        whole = sum(math.prod(spec.shapes[leaf]) for leaf in _others(spec, matrices))
        first = spec.flat(whole + sum(m.rows * m.rank for m in matrices), dtype)
        second = spec.flat(sum(m.columns * m.rank for m in matrices), dtype)
        return (first, second) if matrices else (first,)

    def compress(
        self, state: list[Tensor], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[list[Tensor]]]:
        matrices, dtype = self._matrices(bucket.spec), wide(bucket.spec.dtype)
        grads = bucket.gradients()
        whole = [grads[i].to(dtype) for i in _others(bucket.spec, matrices)]
        own = [grads[m.leaf].reshape(m.rows, m.columns).to(dtype) for m in matrices]
        # Orthonormalising the initial Q, too, keeps P in range for gradients of any magnitude, and
        # recovers from a step in which all gradients were zero.
        ps = [matrix @ _orthonormal(q) for matrix, q in zip(own, state, strict=True)]

        def project(total: Tensor) -> Future[Compressed[list[Tensor]]]:
            summed = split_views(total, [part.shape for part in (*whole, *ps)])
            sums, bases = summed[: len(whole)], [_orthonormal(p) for p in summed[len(whole) :]]
            qs = [matrix.mH @ basis for matrix, basis in zip(own, bases, strict=True)]

            def finish(total: Tensor) -> Compressed[list[Tensor]]:
                q_sums = split_views(total, [q.shape for q in qs])
                return Compressed(
                    _assembled(bucket, matrices, sums, bases, q_sums),
                    lambda: _assembled(bucket, matrices, whole, bases, qs),
                    [q.clone() for q in q_sums],
                )

            if not matrices:
                return Future.of(finish(total[:0]))
            return all_reduce(_joined(qs)).map(finish)

        return all_reduce(_joined([*whole, *ps])).then(project)

    def _matrices(self, spec: BucketSpec) -> list[_Matrix]:
        """Leaves that become smaller by compression."""
        found = []
        for leaf, shape in enumerate(spec.shapes):
            if len(shape) > 1 and 0 not in shape:
                rows, columns = shape[0], math.prod(shape[1:])
                rank = min(self.rank, rows, columns)
                if (rows + columns) * rank < rows * columns:
                    found.append(_Matrix(leaf, rows, columns, rank))
        return found


def _others(spec: BucketSpec, matrices: Sequence[_Matrix]) -> list[int]:
    """Positions of the leaves that are not compressed."""
    compressed = {m.leaf for m in matrices}
    return [leaf for leaf in range(len(spec.shapes)) if leaf not in compressed]


def _assembled(
    bucket: Bucket,
    matrices: Sequence[_Matrix],
    whole: Sequence[Tensor],
    ps: Sequence[Tensor],
    qs: Sequence[Tensor],
) -> Tensor:
    """A buffer with the uncompressed leaves and the products P Q^T."""
    spec = bucket.spec
    buffer = bucket.buffer.new_zeros(spec.numel, dtype=wide(spec.dtype))
    views = replace(bucket, buffer=buffer).gradients()
    for leaf, value in zip(_others(spec, matrices), whole, strict=True):
        views[leaf].copy_(value)
    for m, p, q in zip(matrices, ps, qs, strict=True):
        views[m.leaf].copy_((p @ q.mH).view(spec.shapes[m.leaf]))
    return buffer


def _orthonormal(matrix: Tensor) -> Tensor:
    return cast("Tensor", torch.linalg.qr(matrix).Q)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@entrance
def power_sgd(rank: int) -> Hook[ErrorFeedbackState[list[Tensor]]]:
    """Low-rank compression of gradients, with error feedback and warm start (Vogels et al. 2019,
    "PowerSGD: Practical Low-Rank Gradient Compression").

    A leaf of shape `(n, a, b, ...)` is treated as a matrix of n rows and m = a * b * ... columns.
    Instead of `n * m` numbers, `(n + m) * rank` are summed, in two stages. Leaves that would not
    become smaller, such as vectors, are summed uncompressed. Sums use at least 32 bits.

    Each rank computes the products itself. They have the same bits on all ranks if all use the same
    number of threads on the same kind of device.

    Args:
        rank: number of columns of the factors.

    Raises:
        ValueError: `rank` is below 1.

    Example:
        >>> import fddp, torch
        >>> def first_step(group):
        ...     grads = {"w": torch.ones(8, 8), "b": torch.ones(8)}
        ...     with fddp.GradSync(grads, group=group, hook=fddp.hooks.power_sgd(1)) as sync:
        ...         mean, state = sync.update(grads, sync.init_state())
        ...         return torch.allclose(mean["w"], grads["w"])
        >>> fddp.loopback(2, first_step)
        [True, True]
    """
    return error_feedback(PowerSgd(rank))
