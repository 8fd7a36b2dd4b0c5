"""Reduction of sparse gradients: indices and values are gathered, and summed on every rank.

A sparse bucket has one leaf. Ranks may have different numbers of rows: counts are exchanged first,
and rows are padded to the largest. Of a dense gradient the non-zero rows are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fddp.core.plan.plan import LeafSpec
from fddp.core.schedule.sum_tree import SumTree, partial_sums, tree_additions
from fddp.runtime.program import Program
from fddp.transport.base import Transport


def _sparse_dims(shape: Sequence[int]) -> int:
    """Number of sparse dimensions: an embedding's gradient is sparse in its rows."""
    return min(1, len(shape))


class SparseForm(NamedTuple):
    """Form of sums of a sparse leaf.

    Attributes:
        spec: the leaf, with the shape and dtype of the result.
        wire_dtype: dtype of the gathered values and of the sum.
        device: device of the result.
    """

    spec: LeafSpec
    wire_dtype: str
    device: torch.device

    def summed(self, sources: Sequence[tuple[Tensor, float]]) -> Tensor:
        """Return the sum of `factor * gradient` over gradients of the leaf's shape, sparse or
        dense, as a coalesced tensor of the wire dtype; without sources, one without rows."""
        dtype = getattr(torch, self.wire_dtype)
        rows = [_rows(source, factor, dtype) for source, factor in sources]
        return sum(rows[1:], rows[0]).coalesce() if rows else self.empty()

    def empty(self) -> Tensor:
        """Return a sum without rows."""
        dims, dtype = _sparse_dims(self.spec.shape), getattr(torch, self.wire_dtype)
        return self.of(
            torch.empty(0, dims, dtype=torch.int64, device=self.device),
            torch.empty(0, *self.spec.shape[dims:], dtype=dtype, device=self.device),
        )

    def gathered(
        self,
        program: Program,
        parts: Sequence[tuple[Tensor | None, float]],
        transport: Transport,
        what: str,
    ) -> Tensor:
        """Return the sum over all ranks of gradients times factors, of which `parts` are this
        rank's; a collective call. Virtual ranks are summed along their tree."""
        virtual = program.schedule.virtual
        if virtual is None:
            there = [(source, factor) for source, factor in parts if source is not None]
            return gather_sparse(self, [self.summed(there)], transport, what)
        rows = [self.summed([] if part[0] is None else [(part[0], part[1])]) for part in parts]
        rows += [self.empty()] * (program.summands - len(rows))
        own = []
        for start, stop in virtual.spans[program.rank]:
            number = stop - start
            own.append(sum_sparse_along_tree(rows[:number], tree_additions(number)))
            rows = rows[number:]
        return gather_sparse(self, own, transport, what, virtual.tree)

    def of(self, indices: Tensor, values: Tensor, *, is_coalesced: bool = True) -> Tensor:
        """Return a sum of these rows."""
        return torch.sparse_coo_tensor(
            indices.T,
            values,
            self.spec.shape,
            check_invariants=False,
            is_coalesced=is_coalesced,
        )


def gather_sparse(
    form: SparseForm,
    own: Sequence[Tensor],
    transport: Transport,
    what: str,
    tree: SumTree | None = None,
) -> Tensor:
    """Sum coalesced tensors over all ranks.

    Args:
        form: form of the tensors and of the result.
        own: this rank's tensor; with a tree, one for each of its summands.
        transport: transport of the three all-gathers.
        what: description of the operation, for errors.
        tree: association of the sum; None for rank order.

    Returns:
        A coalesced COO tensor of the leaf's shape and dtype with one sparse dimension, the same
        bits on all ranks.
    """
    width = 1 if tree is None else max(tree.summands)
    rows = torch.tensor([tensor._nnz() for tensor in own], dtype=torch.int64)
    counts = _gather(transport, _padded(rows, width).to(transport.control_device), what)
    numbers = [count.tolist() for count in counts]
    most = max(map(sum, numbers))
    if most == 0:
        return form.empty().to(getattr(torch, form.spec.dtype))
    own_indices = torch.cat([tensor.indices().T for tensor in own])
    indices = _gather(transport, _padded(own_indices, most), what)
    values = _gather(transport, _padded(torch.cat([tensor.values() for tensor in own]), most), what)
    if tree is None:
        joined = form.of(
            torch.cat([part[:n] for part, (n,) in zip(indices, numbers, strict=True)]),
            torch.cat([part[:n] for part, (n,) in zip(values, numbers, strict=True)]),
            is_coalesced=False,
        ).coalesce()
    else:
        summands = []
        for rank, count in enumerate(tree.summands):
            sizes = [*numbers[rank][:count], most - sum(numbers[rank])]
            pairs = zip(
                torch.split(indices[rank], sizes), torch.split(values[rank], sizes), strict=True
            )
            summands += [form.of(*pair) for pair in pairs][:-1]
        joined = sum_sparse_along_tree(summands, tree.additions)
    return joined.to(getattr(torch, form.spec.dtype))


def sum_sparse_along_tree(summands: Sequence[Tensor], additions: Sequence[int]) -> Tensor:
    """Return the sum of coalesced tensors in an association that leaves one sum; see
    [Note: virtual ranks] in `virtual.py`. A row that one of two summands lacks is that of the
    other."""

    def add(left: Tensor, right: Tensor) -> Tensor:
        return (left + right).coalesce()

    (total,) = partial_sums(summands, additions, add)
    return total  # type: ignore[no-any-return]


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
