"""Derivatives of the operators on real ranks: against differences, each other, closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fddp
from fddp.testing import check_adjoint, check_gradients, pulling_back
from tests.support.models import rand
from tests.support.on_ranks import on_processes
from tests.support.ranks import RankPool

Tree = Any
F64 = torch.float64


def tree(rank: int, n: int, seed: int = 0) -> dict[str, Tensor]:
    """Leaves that every operator takes, `reduce_scatter` too; no two elements of them alike."""
    return {
        "a": rand(n, 2, seed=10 * seed + rank, dtype=F64),
        "b": rand(n, seed=100 + 10 * seed + rank, dtype=F64),
    }


def curved(fn: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """An operator between functions that have second derivatives, other ones on each rank."""

    def composed(tree: Tree) -> Tree:
        bent = fddp.tree_map(lambda x: torch.sin(x) * x, tree)
        return fddp.tree_map(lambda y: y * torch.tanh(y), fn(bent))

    return composed


OPERATORS: dict[str, Callable[[Tree], Tree]] = {
    "psum": fddp.psum,
    "pmean": fddp.pmean,
    "pmax": fddp.pmax,
    "all_gather": fddp.all_gather,
    "all_gather tiled": lambda tree: fddp.all_gather(tree, tiled=True),
    "reduce_scatter": fddp.reduce_scatter,
    "reduce_scatter tiled": lambda tree: fddp.reduce_scatter({"a": tree["a"]}, tiled=True),
    "all_to_all": fddp.all_to_all,
    "all_to_all tiled": lambda tree: fddp.all_to_all(
        fddp.tree_map(torch.flatten, tree), tiled=True
    ),
    "broadcast_from": lambda tree: fddp.broadcast_from(tree, 1),
}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_first_and_second_derivatives(ranks: RankPool, world_size: int) -> None:
    ranks.run(world_size, differentiate_twice)


def differentiate_twice(rank: int, n: int) -> None:
    inputs = tree(rank, n)
    for operator in OPERATORS.values():
        fn = curved(operator)
        check_adjoint(fn, inputs)
        check_gradients(fn, inputs, forward=True)
        cotangents = fddp.tree_map(torch.cos, fn(inputs))
        check_adjoint(pulling_back(fn), (inputs, cotangents), seed=1)
    for operator in OPERATORS.values():
        fn = curved(operator)
        small = {"a": inputs["a"][:, :1]}  # trees of several leaves: the adjoint, above
        cotangents = fddp.tree_map(torch.cos, fn(small))
        # Forward mode of these: the adjoint, above.
        check_gradients(pulling_back(fn), (small, cotangents))


@on_processes(2)
def test_complex_numbers(rank: int, n: int) -> None:
    parts = tree(rank, n), tree(rank, n, seed=1)
    inputs = {name: torch.complex(parts[0][name], parts[1][name]) for name in parts[0]}
    for name, operator in OPERATORS.items():
        if name != "pmax":

            def fn(tree: Tree, operator: Callable[[Tree], Tree] = operator) -> Tree:
                bent = fddp.tree_map(lambda z: z * z.conj() * z, tree)
                return fddp.tree_map(lambda z: z * torch.sin(z), operator(bent))

            check_adjoint(fn, inputs)
            check_gradients(fn, inputs, forward=True)
            check_adjoint(pulling_back(fn), (inputs, fn(inputs)), seed=1)


@on_processes(4)
def test_along_axes_of_a_mesh(rank: int, n: int) -> None:
    mesh = fddp.Topology(row=2, column=2)
    inputs = tree(rank, 2)
    along: dict[str, Callable[[Tree], Tree]] = {
        "psum": lambda tree: fddp.psum(tree, mesh=mesh, axis="row"),
        "pmean": lambda tree: fddp.pmean(tree, mesh=mesh, axis="column"),
        "pmax": lambda tree: fddp.pmax(tree, mesh=mesh, axis="row"),
        "all_gather": lambda tree: fddp.all_gather(tree, mesh=mesh, axis="column"),
        "reduce_scatter": lambda tree: fddp.reduce_scatter(tree, mesh=mesh, axis="row"),
        "all_to_all": lambda tree: fddp.all_to_all(tree, mesh=mesh, axis="column"),
        "broadcast_from": lambda tree: fddp.broadcast_from(tree, 1, mesh=mesh, axis="column"),
        "one after the other": lambda tree: fddp.psum(
            curved(lambda t: fddp.pmean(t, mesh=mesh, axis="row"))(tree), mesh=mesh, axis="column"
        ),
    }
    for operator in along.values():
        check_adjoint(curved(operator), inputs)
    check_gradients(curved(along["one after the other"]), {"b": inputs["b"]}, mesh=mesh)


@on_processes(2)
def test_transforms_and_their_compositions(rank: int, n: int) -> None:
    """`pmean(sin)` of all ranks, whose derivatives are known in closed form."""
    xs = [rand(3, seed=seed, dtype=F64) for seed in range(n)]
    x, mean = xs[rank], sum(xs) / n

    def f(x: Tensor) -> Tensor:
        return (fddp.pmean(x) ** 3).sum()

    def close(found: Any, wanted: Any) -> None:
        torch.testing.assert_close(found, wanted)

    first, second = 3 * mean**2, torch.diag(6 * mean)
    close(grad(f)(x), first)
    close(vjp(f, x)[1](torch.tensor(2.0, dtype=F64))[0], 2 * first)
    close(jvp(f, (x,), (torch.ones_like(x),))[1], first.sum())
    output, linear = linearize(f, x)
    close((output, linear(torch.ones_like(x))), (f(x), first.sum()))
    close(linear(rank * torch.ones_like(x)), first.sum() / 2)
    close((jacrev(f)(x), jacfwd(f)(x)), (first, first))
    for twice in (hessian(f), jacrev(jacrev(f)), jacfwd(jacfwd(f)), jacrev(jacfwd(f))):
        close(twice(x), second)
    close(jvp(grad(f), (x,), (torch.ones_like(x),))[1], 6 * mean)
    close(grad(lambda x: jvp(f, (x,), (torch.ones_like(x),))[1])(x), 6 * mean)
    close(grad(lambda x: grad(f)(x).sum())(x), 6 * mean)
    third = grad(lambda x: grad(lambda x: grad(f)(x).sum())(x).sum())(x)
    close(third, torch.full_like(third, 6.0))

    many = torch.stack([x, 2 * x, x - 1])
    means = torch.stack([mean, 2 * mean, mean - 1])
    close(vmap(f)(many), (means**3).sum(1))
    close(vmap(grad(f))(many), 3 * means**2)
    close(vmap(hessian(f))(many), torch.stack([torch.diag(6 * m) for m in means]))
    close(grad(lambda x: vmap(f)(x).sum())(many), 3 * means**2)
    close(vmap(vmap(fddp.pmean))(many[:, :, None]), means[:, :, None])
    close(vmap(fddp.pmean, in_dims=1, out_dims=1)(many), means)
    close(jacrev(vmap(f))(many), jacfwd(vmap(f))(many))

    # A leaf that is batched on one rank only is expanded on the others.
    def some(y: Tensor) -> Tensor:
        pair = {"y": y, "x": x * y.sum() if rank else x}
        return fddp.psum(pair)["x"]  # type: ignore[no-any-return]

    wanted = torch.stack([xs[0] + xs[1] * row.sum() for row in (means * 0 + 2.0)])
    close(vmap(some)(torch.full_like(many, 2.0)), wanted)


@on_processes(2)
def test_every_operator_under_vmap(rank: int, n: int) -> None:
    batch = 3
    trees = [tree(rank, n, seed=seed) for seed in range(batch)]
    stacked = fddp.tree_map(lambda *x: torch.stack(x, 1), *trees)
    for operator in OPERATORS.values():
        fn = curved(operator)
        wanted = [fn(one) for one in trees]
        found = vmap(fn, in_dims=1)(stacked)
        torch.testing.assert_close(found, fddp.tree_map(lambda *x: torch.stack(x), *wanted))

        def loss(tree: Tree, fn: Callable[[Tree], Tree] = fn) -> Tensor:
            leaves = list(fn(tree).values())
            return sum((leaf.sin().sum() for leaf in leaves), torch.zeros((), dtype=F64))

        wanted = [grad(loss)(one) for one in trees]
        found = vmap(grad(loss), in_dims=1)(stacked)
        torch.testing.assert_close(found, fddp.tree_map(lambda *x: torch.stack(x), *wanted))
        found = grad(lambda stacked: vmap(loss, in_dims=1)(stacked).sum())(stacked)
        torch.testing.assert_close(found, fddp.tree_map(lambda *x: torch.stack(x, 1), *wanted))


@on_processes(2)
def test_forward_mode_twice(rank: int, n: int) -> None:
    """Forward over forward is forward over reverse, for all operators, and `sync_on_backward`."""
    at, one, two = (tree(rank, n, seed=seed) for seed in range(3))
    for operator in (*OPERATORS.values(), fddp.sync_on_backward):
        fn = curved(operator)

        def moved(x: Tree, fn: Callable[[Tree], Tree] = fn) -> Tree:
            return jvp(fn, (x,), (one,))[1]

        found = jvp(moved, (at,), (two,))[1]

        def forwards(step: float, fn: Callable[[Tree], Tree] = fn) -> Tree:
            return moved(fddp.tree_map(lambda x, t: x + step * t, at, two), fn)

        wanted = fddp.tree_map(lambda a, b: (a - b) / 2e-5, forwards(1e-5), forwards(-1e-5))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert max(float(leaf.abs().max()) for leaf in found.values()) > 0.1
    x = at["b"]

    def loss(x: Tensor) -> Tensor:
        return (fddp.pmax(torch.sin(x)) ** 3).sum()

    def gathered(x: Tensor) -> Tensor:
        return (fddp.all_gather(torch.sin(x)).amax(0) ** 3).sum()

    for twice in (lambda f: jacfwd(jacfwd(f)), lambda f: jacfwd(jacfwd(jacfwd(f))), hessian):
        torch.testing.assert_close(twice(loss)(x), twice(gathered)(x))
    many = torch.stack([x, 2 * x])
    found = vmap(jacfwd(jacfwd(loss)))(many)
    torch.testing.assert_close(found, vmap(jacfwd(jacfwd(gathered)))(many))


@on_processes(2)
def test_every_operator_linearized(rank: int, n: int) -> None:
    """Recorded once, run with several tangents."""
    inputs = tree(rank, n)
    for operator in OPERATORS.values():
        fn = curved(operator)
        _, linear = linearize(fn, inputs)
        for seed in (1, 2):
            tangents = tree(rank, n, seed=seed)
            torch.testing.assert_close(linear(tangents), jvp(fn, (inputs,), (tangents,))[1])


@on_processes(2)
def test_plain_autograd(rank: int, n: int) -> None:
    xs = [rand(3, seed=seed, dtype=F64) for seed in range(n)]
    x, mean = xs[rank].clone().requires_grad_(), sum(xs) / n
    tree = {"x": x, "count": torch.tensor([3, rank]), "none": None}

    def f() -> Tensor:
        means = fddp.psum(tree)
        assert means["none"] is None
        assert means["count"].tolist() == [6, 1]
        assert not means["count"].requires_grad
        return ((means["x"] / n) ** 3).sum()  # type: ignore[no-any-return]

    # As many times, as all ranks ask for the gradient of their own result.
    (first,) = torch.autograd.grad(f(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * mean**2)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    torch.testing.assert_close(second, 6 * mean)
    (third,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(third, torch.full_like(third, 6.0))
    f().backward()
    torch.testing.assert_close(x.grad, 3 * mean**2)
    with torch.no_grad():
        assert not f().requires_grad
    with torch.inference_mode():
        assert not fddp.pmean(xs[rank]).is_inference()

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(xs[rank], torch.full_like(mean, 1.0 + rank))
        tangent = torch.autograd.forward_ad.unpack_dual(fddp.psum(dual)).tangent
        torch.testing.assert_close(tangent, torch.full_like(mean, 3.0))

    checkpointed = torch.utils.checkpoint.checkpoint(
        lambda x: fddp.pmean(x.sin()).sum(), x, use_reentrant=False
    )
    (found,) = torch.autograd.grad(checkpointed, x)
    torch.testing.assert_close(found, torch.cos(x.detach()))


@on_processes(2)
def test_unused_results(rank: int, n: int) -> None:
    """Cotangents and tangents that are missing are zeros: the ranks meet all the same."""

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = fddp.psum(pair)
        return 5 * a if rank == 0 else 7 * b

    one = torch.ones((), dtype=F64)
    assert [float(x) for x in grad(loss)((one, one))] == [5.0, 7.0]
    # b is unused on rank 0, whose tangent is then None for all ranks' a.
    assert jvp(lambda b: fddp.psum((one, b * 0 + one))[0], (one,), (one,))[1] == 0.0


@on_processes(2)
def test_mean_of_losses(rank: int, n: int) -> None:
    """`sync_on_backward` of local losses is `pmean` of losses, and `sync(grads)`."""
    params = {"w": rand(3, seed=0, dtype=F64), "none": None, "step": torch.tensor(True)}
    data = rand(3, seed=1 + rank, dtype=F64)

    def local(params: Tree) -> Tensor:
        return torch.sin(params["w"] * data).sum()

    def of(params: Tree, w: Tensor) -> Tree:
        return {**params, "w": w}

    w = params["w"]
    assert w is not None
    with fddp.GradSync({"w": w}) as sync:
        wanted = sync({"w": grad(lambda w: local(of(params, w)))(w)})["w"]
    synced = grad(lambda w: local(fddp.sync_on_backward(of(params, w))))(w)
    torch.testing.assert_close(synced, wanted, rtol=1e-12, atol=0)
    both = grad(lambda w: fddp.pmean(local(fddp.sync_on_backward(of(params, w)))))(w)
    torch.testing.assert_close(both, wanted, rtol=1e-12, atol=0)
    assert fddp.sync_on_backward(params) is params  # nothing to differentiate
    passed = fddp.sync_on_backward(of(params, w.clone().requires_grad_()))
    assert passed["none"] is None
    assert passed["step"].item() is True

    # Tangents pass as they are, on each rank by itself.
    tangent = torch.full_like(w, 1.0 + rank)
    moved = jvp(lambda w: fddp.sync_on_backward({"w": w})["w"], (w,), (tangent,))[1]
    torch.testing.assert_close(moved, tangent)

    # Second derivatives: of the mean loss, whichever mode comes second.
    def first(w: Tensor) -> Tensor:
        return grad(lambda w: local(of(params, fddp.sync_on_backward(w))))(w)

    second = fddp.pmean(torch.diag(-(data**2) * torch.sin(w * data)))
    torch.testing.assert_close(jacfwd(first)(w), second)

    # For each of a batch, synced by itself.
    many = torch.stack([w, 2 * w])
    each = vmap(first)(many)
    torch.testing.assert_close(each, torch.stack([first(w), first(2 * w)]))
    shared = grad(
        lambda w: vmap(lambda x: local(of(params, x * fddp.sync_on_backward(w))))(many).sum()
    )
    torch.testing.assert_close(
        shared(w),
        fddp.pmean(
            torch.func.grad(lambda w: vmap(lambda x: local(of(params, x * w)))(many).sum())(w)
        ),
    )


@on_processes(3)
def test_the_largest(rank: int, n: int) -> None:
    """The derivative of `pmax` is shared equally among those that attain the maximum."""
    rows = torch.tensor([[1.0, 5.0, 2.0], [4.0, 5.0, 2.0], [3.0, 0.0, 2.0]], dtype=F64)
    shares = torch.tensor([[0.0, 1 / 2, 1 / 3], [1.0, 1 / 2, 1 / 3], [0.0, 0.0, 1 / 3]], dtype=F64)
    x = rows[rank]
    assert fddp.pmax(x).tolist() == [4.0, 5.0, 2.0]
    weights = torch.tensor([1.0, 10.0, 100.0], dtype=F64)
    found = grad(lambda x: (fddp.pmax(x) * weights * (1 + rank)).sum())(x)
    torch.testing.assert_close(found, shares[rank] * weights * 6)
    tangents = rows * 2 + 1
    found = jvp(fddp.pmax, (x,), (tangents[rank],))[1]
    torch.testing.assert_close(found, (shares * tangents).sum(0))
    # As a function of tangents it is linear, and its transpose is that of the maximum.
    found = grad(lambda t: jvp(fddp.pmax, (x,), (t,))[1] @ weights)(tangents[rank])
    torch.testing.assert_close(found, shares[rank] * weights * n)
    mine = torch.tensor([float("nan"), 1.0, -0.0]) if rank == 1 else torch.tensor([2.0, 1.0, -1.0])
    found = fddp.pmax(mine)
    torch.testing.assert_close(found, torch.tensor([float("nan"), 1.0, 0.0]), equal_nan=True)
    share = grad(lambda x: fddp.pmax(x)[0])(mine)[0]
    assert share.item() == (3.0 if rank == 1 else 0.0)


@on_processes(2)
def test_beside_torchs_functional_collectives(rank: int, n: int) -> None:
    """The column on torch in the guide's table."""
    from torch.distributed import _functional_collectives as funcol

    group = torch.distributed.group.WORLD
    x = rand(2, seed=rank, dtype=F64).requires_grad_()

    def pulled(fn: Callable[[Tensor], Tensor]) -> Tensor:
        y = fn(x)
        (found,) = torch.autograd.grad(y, x, rand(*y.shape, seed=5 + rank, dtype=F64))
        return found

    same: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (lambda x: funcol.all_reduce(x, "sum", group), fddp.psum),
        (
            lambda x: funcol.all_gather_single(x, 0, group),
            lambda x: fddp.all_gather(x, tiled=True),
        ),
        (
            lambda x: funcol.reduce_scatter_single(x, "sum", 0, group),
            lambda x: fddp.reduce_scatter(x, tiled=True),
        ),
        (
            lambda x: funcol.all_to_all_single_autograd(x, None, None, group),
            lambda x: fddp.all_to_all(x, tiled=True),
        ),
    ]
    for theirs, ours in same:
        torch.testing.assert_close(pulled(theirs), pulled(ours))
    for reduction in ("avg", "max"):
        with pytest.raises(RuntimeError, match="all_reduce backward only supports 'sum'"):
            pulled(lambda x, reduction=reduction: funcol.all_reduce(x, reduction, group))  # type: ignore[misc]
    # Not the adjoint: nothing reaches the root from the other rank.
    kept = pulled(lambda x: funcol.broadcast(x, 0, group))
    torch.testing.assert_close(kept, rand(2, seed=5 + rank, dtype=F64))
