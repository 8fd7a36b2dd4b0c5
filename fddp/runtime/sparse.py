"""Reduction of sparse gradients: indices and values are gathered, and summed on every rank.

A sparse bucket has one leaf. Ranks may have different numbers of rows: counts are exchanged first,
and rows are padded to the largest. Of a dense gradient the non-zero rows are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fddp.core.plan.plan import LeafSpec
from fddp.transport.base import Transport


def _sparse_dims(shape: Sequence[int]) -> int:
    """Number of sparse dimensions: an embedding's gradient is sparse in its rows."""
    return min(1, len(shape))


def gather_sparse(
    spec: LeafSpec,
    wire_dtype: str,
    device: torch.device,
    sources: Sequence[tuple[Tensor, float]],
    transport: Transport,
    what: str,
) -> Tensor:
    """Sum `factor * gradient` over the sources of all ranks, as a coalesced tensor.

    Args:
        spec: the leaf, with the shape and dtype of the result.
        wire_dtype: dtype of the gathered values and of the sum.
        device: device of the result.
        sources: gradients of the leaf's shape, sparse or dense, each with its factor; may be empty.
        transport: transport of the three all-gathers.
        what: description of the operation, for errors.

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
