"""Sparse gradients: as the dense mean, in the layout that the leaf was declared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from fddp.tree.pytree import flatten
from tests.support.dtypes import DTYPES
from tests.support.means import ddp_mean, synced
from tests.support.models import largest_difference, mean_gradients, rand, same_bits
from tests.support.sparse_models import dense_loss, embedding_loss, embedding_params

INDICES = {
    "overlapping": [[1, 2, 2, 5], [2, 7]],
    "on one rank only": [[1, 1], None],
    "of no rows on one rank": [[], [3]],
    "of no rows": [[], []],
    "of one row": [[4], [4]],
}


@pytest.mark.parametrize("rows", INDICES)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("comes_sparse", [True, False])
def test_sparse_gradients(rows: str, declared: bool, comes_sparse: bool) -> None:
    index = [None if i is None else torch.tensor(i, dtype=torch.int64) for i in INDICES[rows]]
    loss_fn = embedding_loss if comes_sparse else dense_loss

    def run(group: Any) -> Any:
        sparse = ("emb",) if declared else ()
        with fddp.GradSync(embedding_params(), group=group, sparse=sparse) as sync:
            step = sync.value_and_grad(loss_fn, with_info=True)
            first = step(embedding_params(), index[group.rank])
            return first[1], *step(embedding_params(), index[group.rank])[1:]

    expected = mean_gradients(dense_loss, embedding_params(), [(i,) for i in index], [1.0, 1.0])
    norm = sum(float(leaf.square().sum()) for leaf in flatten(expected)[0]) ** 0.5
    runs = fddp.loopback(2, run)
    for *results, info in runs:
        for grads in results:
            assert grads["emb"].is_sparse is declared, "the declaration decides"
            emb = grads["emb"].to_dense()
            assert largest_difference({**grads, "emb": emb}, expected) < 1e-14
            if declared:
                assert grads["emb"].is_coalesced()
        assert info.grad_norm == pytest.approx(norm, rel=1e-12)
        assert info.all_finite
    assert same_bits([list(run[:2]) for run in runs])


def test_ranks_may_differ_in_whether_a_gradient_is_sparse() -> None:
    dense = [rand(6, 3, seed=rank) for rank in range(3)]

    def grads_of(rank: int) -> dict[str, Tensor]:
        return {"e": dense[rank].to_sparse(1) if rank == 1 else dense[rank]}

    for sparse in ((), ("e",)):
        params = {"e": torch.zeros(6, 3, dtype=torch.float64)}
        for result in synced(3, grads_of, params=params, sparse=sparse):
            assert torch.allclose(result["e"].to_dense(), ddp_mean(dense), rtol=1e-14)


def coo(index: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True)


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "c64"])
def test_sparse_dtypes(name: str) -> None:
    dtype = DTYPES[name]
    index = torch.tensor([[0, 3, 3]])
    # Small integers and 4 ranks: every format holds the sums exactly.
    values = torch.arange(1.0, 7.0).view(3, 2).to(dtype)

    def grads_of(rank: int) -> dict[str, Tensor]:
        return {"e": coo(index, values * (rank + 1), (5, 2))}

    for declared in ((), ("e",)):
        params = {"e": torch.zeros(5, 2, dtype=dtype)}
        for result in synced(4, grads_of, params=params, sparse=declared):
            assert result["e"].dtype == dtype
            expected = torch.zeros(5, 2, dtype=dtype)
            expected[0] = values[0] * 2.5
            expected[3] = (values[1] + values[2]) * 2.5
            assert torch.equal(result["e"].to_dense(), expected)


@pytest.mark.parametrize("sparse_dim", [1, 2, 3])
@pytest.mark.parametrize("declared", [True, False])
def test_sparse_gradients_of_any_sparse_dimension(sparse_dim: int, declared: bool) -> None:
    dense = [rand(3, 4, 2, seed=rank) * (rand(3, 4, 2, seed=9 + rank) > 0) for rank in range(2)]
    params = {"e": torch.zeros(3, 4, 2, dtype=torch.float64)}
    for result in synced(
        2,
        lambda rank: {"e": dense[rank].to_sparse(sparse_dim)},
        params=params,
        sparse=("e",) if declared else (),
    ):
        assert torch.allclose(result["e"].to_dense(), ddp_mean(dense), rtol=1e-14)


@pytest.mark.parametrize("view", ["conj", "neg", "expanded", "transposed"])
def test_lazy_and_strided_dense_gradients_of_a_sparse_leaf(view: str) -> None:
    def grads_of(rank: int) -> dict[str, Tensor]:
        z = rand(4, 4, seed=rank, dtype=torch.complex128)
        views = {
            "conj": z.conj(),
            "neg": z.conj().imag,
            "expanded": z[:1].expand(4, 4),
            "transposed": z.T,
        }
        return {"e": views[view]}

    params = {"e": torch.zeros_like(grads_of(0)["e"].clone())}
    mean = ddp_mean([grads_of(rank)["e"].clone() for rank in range(2)])
    for result in synced(2, grads_of, params=params, sparse=("e",)):
        assert torch.allclose(result["e"].to_dense(), mean, rtol=1e-14)


def test_a_sparse_leaf_that_no_rank_used_is_none() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(embedding_params(), group=group, sparse=("emb",)) as sync:
            return sync.value_and_grad(embedding_loss)(embedding_params(), None)[1]

    for grads in fddp.loopback(2, run):
        assert grads["emb"] is None
        assert torch.equal(grads["w"], 2 * embedding_params()["w"])


def test_sparse_gradients_in_reduce_dtype() -> None:
    def grads_of(rank: int) -> dict[str, Tensor]:
        dense = rand(4, 2, seed=rank, dtype=torch.bfloat16)
        return {"e": dense.to_sparse(1)}

    every = [rand(4, 2, seed=rank, dtype=torch.bfloat16).float() for rank in range(4)]
    params = {"e": torch.zeros(4, 2, dtype=torch.bfloat16)}
    options = {"params": params, "sparse": ("e",), "reduce_dtype": torch.float32}
    for result in synced(4, grads_of, **options):
        assert torch.equal(result["e"].to_dense(), ddp_mean(every).bfloat16())
