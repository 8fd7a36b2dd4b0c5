"""Sparse gradients: as the dense mean, in the layout that the leaf was declared with."""

from __future__ import annotations

from collections.abc import Callable
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


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda z: z,
    **{f"{n} sparse dimensions": lambda z, n=n: z.to_sparse(n) for n in (1, 2, 3)},
    "conj": lambda z: z.conj(),
    "neg": torch._neg_view,
    "expanded": lambda z: z[:1].expand(4, 4, 2),
    "transposed": lambda z: z.transpose(0, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("declared", [True, False])
def test_gradients_of_any_kind(kind: str, declared: bool) -> None:
    """On one rank; it is dense on the other."""

    def grads_of(rank: int) -> dict[str, Tensor]:
        z = rand(4, 4, 2, seed=rank, dtype=torch.complex128) * (rand(4, 4, 2, seed=9) > 0)
        return {"e": KINDS[kind](z) if rank else z}

    params = {"e": torch.zeros(4, 4, 2, dtype=torch.complex128)}
    mean = ddp_mean([grads_of(rank)["e"].to_dense().clone() for rank in range(2)])
    for result in synced(2, grads_of, params=params, sparse=("e",) if declared else ()):
        assert torch.allclose(result["e"].to_dense(), mean, rtol=1e-14)


def test_a_sparse_leaf_that_no_rank_used_is_none() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(embedding_params(), group=group, sparse=("emb",)) as sync:
            return sync.value_and_grad(embedding_loss)(embedding_params(), None)[1]

    for grads in fddp.loopback(2, run):
        assert grads["emb"] is None
        assert torch.equal(grads["w"], 2 * embedding_params()["w"])


def test_without_dense_leaves_the_control_word_waits_for_all_gradients() -> None:
    params = {name: torch.ones(10, 3) for name in "abc"}

    def loss_fn(params: dict[str, Tensor], index: Tensor) -> Tensor:
        rows = [torch.nn.functional.embedding(index, p, sparse=True) for p in params.values()]
        return torch.stack(rows).sum()

    def run(group: Any) -> Any:
        with fddp.GradSync(params, group=group, sparse=list(params)) as sync:
            step = sync.value_and_grad(loss_fn)
            return [step(params, torch.tensor([group.rank]))[1] for _ in range(2)]

    expected = torch.zeros(10, 3)
    expected[:2] = 0.5
    for steps in fddp.loopback(2, run):
        for grads in steps:
            assert all(torch.equal(leaf.to_dense(), expected) for leaf in grads.values())


def test_sparse_gradients_in_reduce_dtype() -> None:
    def grads_of(rank: int) -> dict[str, Tensor]:
        dense = rand(4, 2, seed=rank, dtype=torch.bfloat16)
        return {"e": dense.to_sparse(1)}

    every = [rand(4, 2, seed=rank, dtype=torch.bfloat16).float() for rank in range(4)]
    params = {"e": torch.zeros(4, 2, dtype=torch.bfloat16)}
    options = {"params": params, "sparse": ("e",), "reduce_dtype": torch.float32}
    for result in synced(4, grads_of, **options):
        assert torch.equal(result["e"].to_dense(), ddp_mean(every).bfloat16())
