"""Sparse gradients: gathered as indices and values, and summed alike on every rank.

A sparse bucket holds one leaf. Ranks differ in how many rows they have, so counts travel first and
the shorter ones are padded. A gradient that turns out dense joins as its non-zero rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fddp.core.plan.plan import LeafSpec
from fddp.transport.base import Transport


def _sparse_dims(shape: Sequence[int]) -> int:
    """An embedding's gradient is sparse in its rows; a scalar has none."""
    return min(1, len(shape))


def gather_sparse(
    spec: LeafSpec,
    wire_dtype: str,
    device: torch.device,
    sources: Sequence[tuple[Tensor, float]],
    transport: Transport,
    what: str,
) -> Tensor:
    """The sum over ranks of `factor * gradient` over this rank's `sources`, as a coalesced tensor.

    Args:
        spec: the leaf; its shape and dtype are the result's.
        wire_dtype: dtype of values on the way and in the sum.
        device: where the result lives.
        sources: gradients of the leaf's shape, sparse or dense, each with its factor; may be empty.
        transport: carries three all-gathers.
        what: the operation in words, for errors.

    Returns:
        A sparse COO tensor of the leaf's shape with one sparse dimension, the same bits on all
        ranks.
    """
    dtype = getattr(torch, wire_dtype)
    dims = _sparse_dims(spec.shape)
    rows = [_rows(source, factor, dtype) for source, factor in sources]
    empty = torch.sparse_coo_tensor(
        torch.empty(dims, 0, dtype=torch.int64, device=device),
        torch.empty(0, *spec.shape[dims:], dtype=dtype, device=device),
        spec.shape,
        check_invariants=False,
        is_coalesced=True,
    )
    own = sum(rows[1:], rows[0]).coalesce() if rows else empty
    counts = _gather(
        transport,
        torch.tensor([own._nnz()], dtype=torch.int64, device=transport.control_device),
        what,
    )
    numbers = [int(count.item()) for count in counts]
    most = max(numbers)
    if most == 0:
        return empty.to(getattr(torch, spec.dtype))
    indices = _gather(transport, _padded(own.indices().T, most), what)
    values = _gather(transport, _padded(own.values(), most), what)
    joined = torch.sparse_coo_tensor(
        torch.cat([part[:n] for part, n in zip(indices, numbers, strict=True)]).T,
        torch.cat([part[:n] for part, n in zip(values, numbers, strict=True)]),
        spec.shape,
        check_invariants=False,
    )
    return joined.coalesce().to(getattr(torch, spec.dtype))


def _rows(source: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    source = source.detach()
    dims = _sparse_dims(source.shape)
    if source.layout is not torch.sparse_coo or source.sparse_dim() != dims:
        source = source.to_dense() if source.layout is not torch.strided else source
        source = source.resolve_conj().to_sparse(dims)
    source = source.coalesce()
    values = source.values().to(dtype) * factor
    return torch.sparse_coo_tensor(
        source.indices(), values, source.shape, check_invariants=False, is_coalesced=True
    )


def _padded(rows: Tensor, length: int) -> Tensor:
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def _gather(transport: Transport, tensor: Tensor, what: str) -> list[Tensor]:
    work = transport.all_gather(tensor.contiguous())
    work.wait(what)
    return work.results
