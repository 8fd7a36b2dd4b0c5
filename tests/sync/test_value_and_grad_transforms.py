"""`sync.value_and_grad` and `sync(grads)` with transforms inside them, and inside transforms.

On processes: forward-mode differentiation keeps its levels for the whole process, so that ranks
which are threads can't use it side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fddp
from fddp.tree.pytree import flatten
from tests.support.models import (
    Params,
    batch,
    largest_difference,
    mean_gradients,
    mlp,
    mlp_loss,
    same_bits,
)

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

# torch.func.jvp compiles decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0002}
WORLD_SIZE = 2


# Inside: what a loss function may be made of


def outputs(params: Params, x: Tensor) -> Tensor:
    for layer in params.values():
        x = torch.tanh(x @ layer["weight"] + layer["bias"])
    return x


def flat(tree: Any) -> list[Tensor]:
    leaves: list[Tensor] = flatten(tree)[0]
    return leaves


def a_vmap_over_noise(p: Params, x: Tensor) -> Tensor:
    def noisy(row: Tensor) -> Tensor:
        return outputs(p, row + 0.0 * torch.randn_like(row)).sum()

    return vmap(noisy, randomness="different")(x).square().mean()


def per_sample_gradients(p: Params, x: Tensor) -> Tensor:
    each = vmap(grad(lambda p, row: outputs(p, row).square().sum()), (None, 0))(p, x)
    return sum(leaf.square().mean() for leaf in flat(each))  # type: ignore[return-value]


def maml(p: Params, x: Tensor) -> Tensor:
    """Two inner steps on one half of the batch; their result is judged on the other."""
    adapted = p
    for _ in range(2):
        inner = grad(mlp_loss)(adapted, x[:2])
        adapted = fddp.tree_map(lambda q, g: q - 0.5 * g, adapted, inner)
    return mlp_loss(adapted, x[2:])


def maml_of_several_tasks(p: Params, x: Tensor) -> Tensor:
    return vmap(lambda task: maml(p, task.expand(4, -1) * torch.arange(1.0, 5.0)[:, None]))(
        x
    ).mean()


def maml_by_autograd(p: Params, x: Tensor) -> Tensor:
    inner = torch.autograd.grad(mlp_loss(p, x[:2]), flat(p), create_graph=True)
    leaves, treedef = flatten(p)
    adapted = [q - 0.5 * g for q, g in zip(leaves, inner, strict=True)]
    return mlp_loss(treedef.unflatten(adapted), x[2:])


def slopes_in_the_parameters(p: Params, x: Tensor) -> Tensor:
    value, slope = jvp(lambda q: mlp_loss(q, x), (p,), (fddp.tree_map(torch.ones_like, p),))
    return value + slope.square()


def a_hessian_vector_product(p: Params, x: Tensor) -> Tensor:
    _, product = jvp(grad(lambda q: mlp_loss(q, x)), (p,), (fddp.tree_map(torch.ones_like, p),))
    return sum(leaf.square().sum() for leaf in flat(product))  # type: ignore[return-value]


def a_jacobian_by_columns(p: Params, x: Tensor) -> Tensor:
    return vmap(jacfwd(lambda row: outputs(p, row)))(x).square().mean()


def a_laplacian(p: Params, x: Tensor) -> Tensor:
    each = vmap(hessian(lambda row: outputs(p, row).sum()))(x)
    return each.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean()


def a_functionalized_module(p: Params, x: Tensor) -> Tensor:
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 8, dtype=torch.float64), torch.nn.BatchNorm1d(8, dtype=torch.float64)
    )
    apply, own, buffers = fddp.functionalize(module)
    given = {**own, "0.weight": p["layer0"]["weight"], "0.bias": p["layer0"]["bias"]}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.tanh(apply(params, buffers, x)[0]).square().mean()

    inner = grad(loss)(given)
    return loss({name: given[name] - 0.1 * inner[name] for name in given})


INSIDE: dict[str, Callable[[Params, Tensor], Tensor]] = {
    fn.__name__: fn
    for fn in (
        a_vmap_over_noise,
        per_sample_gradients,
        maml,
        maml_of_several_tasks,
        maml_by_autograd,
        slopes_in_the_parameters,
        a_hessian_vector_product,
        a_jacobian_by_columns,
        a_laplacian,
        a_functionalized_module,
    )
}


def two_steps(rank: int, world_size: int, name: str) -> list[Any]:
    """By `value_and_grad`, and by `sync` of gradients that `torch.func.grad` made."""
    loss_fn = INSIDE[name]
    with fddp.GradSync(mlp(2), **SMALL) as sync:
        step = sync.value_and_grad(loss_fn)
        results = [step(mlp(2), batch(rank, number))[1] for number in range(2)]
        local = grad(loss_fn)(mlp(2), batch(rank, 1))
        return [*results, sync(local), local]


@pytest.mark.parametrize("name", INSIDE)
def test_a_loss_function_made_of_transforms(ranks: RankPool, name: str) -> None:
    runs = ranks.run(WORLD_SIZE, two_steps, name)
    locals_ = [run.pop() for run in runs]
    assert largest_difference(*locals_) > 1e-3, "what is local must not pass for the mean"
    assert same_bits(runs)
    expected = [
        mean_gradients(
            INSIDE[name],
            mlp(2),
            [(batch(rank, number),) for rank in range(WORLD_SIZE)],
            [1.0] * WORLD_SIZE,
        )
        for number in (0, 1, 1)
    ]
    # torch.func.grad has zeros where autograd has None.
    expected[2] = fddp.tree_map(lambda g, e: g if e is None else e, runs[0][2], expected[2])
    for result, mean in zip(runs[0], expected, strict=True):
        assert largest_difference(result, mean) < 1e-12


# Around: a step is called within a transform


class Around(NamedTuple):
    """A step within a transform, and what the error must name."""

    call: Callable[[fddp.GradSync], Any]
    texts: tuple[str, ...]


def point() -> dict[str, Tensor]:
    return {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}


def square(p: dict[str, Tensor]) -> Tensor:
    return p["w"].square().sum()


def loss_of(sync: fddp.GradSync) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: sync.value_and_grad(square)(p)[0]


def grads_of(sync: fddp.GradSync) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: sync.value_and_grad(square)(p)[1]["w"]


def mean_of(sync: fddp.GradSync) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: sync(p)["w"]


def updated_by(sync: fddp.GradSync) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: sync.update(p, ())[0]["w"]


def dual(call: Callable[[Any], Any]) -> Any:
    with forward_ad.dual_level():
        return call({"w": forward_ad.make_dual(point()["w"], torch.ones(2, dtype=torch.float64))})


def batched(call: Callable[[Any], Any]) -> Any:
    return vmap(call)({"w": torch.ones(3, 2, dtype=torch.float64)})


TRANSFORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "grad": (lambda f: grad(lambda p: f(p).sum())(point()), "torch.func.grad"),
    "vjp": (lambda f: vjp(f, point())[1], "torch.func.grad"),
    "jacrev": (lambda f: jacrev(f)(point()), "torch.func.grad"),
    "jvp": (lambda f: jvp(f, (point(),), (point(),)), "torch.func.jvp"),
    "jacfwd": (lambda f: jacfwd(f)(point()), "torch.func.jvp"),
    "hessian": (lambda f: hessian(lambda p: f(p).sum())(point()), "torch.func.grad"),
    "vmap": (batched, "torch.func.vmap"),
    "functionalize": (lambda f: torch.func.functionalize(f)(point()), "torch.func.functionalize"),
    "make_fx": (lambda f: make_fx(f)(point()), "tracer"),
    "fake make_fx": (lambda f: make_fx(f, tracing_mode="fake")(point()), "tracer"),
    "forward_ad": (dual, "a forward-mode tangent"),
}
CALLS = {
    "the loss of a step": (loss_of, "value_and_grad", "parameters"),
    "the gradients of a step": (grads_of, "value_and_grad", "parameters"),
    "sync(grads)": (mean_of, "sync(grads)", "gradients"),
    "update": (updated_by, "update(grads, state)", "gradients"),
}
AROUND = {
    f"{call} under {name}": Around(
        lambda sync, t=transform, m=make: t(m(sync)),
        (text, f"'w' of the {tree}" if text.endswith("tangent") else outcome, "fddp.pmean"),
    )
    for call, (make, outcome, tree) in CALLS.items()
    for name, (transform, text) in TRANSFORMS.items()
}


def transformed(rank: int, world_size: int, culprits: tuple[int, ...]) -> dict[str, Any]:
    """Every case on one `GradSync`, each followed by a step that must be right."""
    with fddp.GradSync(point(), timeout_s=20.0) as sync:
        return {
            name: ending(case.call if rank in culprits else a_step, sync)
            for name, case in AROUND.items()
        }


def linearized(rank: int, world_size: int) -> dict[str, Any]:
    """Apart from the others: it calls the function, which is a step, before it traces it."""
    with fddp.GradSync(point(), timeout_s=20.0) as sync:
        return {
            outcome: ending(lambda s, m=make: linearize(m(s), point()), sync)
            for make, outcome, _ in CALLS.values()
        }


def a_step(sync: fddp.GradSync) -> Any:
    return sync({"w": torch.full((2,), float(sync.rank), dtype=torch.float64)})["w"].tolist()


def ending(call: Callable[[fddp.GradSync], Any], sync: fddp.GradSync) -> tuple[str, str, Any]:
    """The kind of error, its text, and what the next step gave."""
    try:
        result = call(sync)
    except fddp.FddpError as error:
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = "no error", repr(result)
    return kind, text, a_step(sync)


@pytest.mark.parametrize("culprits", [(0, 1), (1,)], ids=["on all ranks", "on one rank"])
def test_a_step_within_a_transform_is_an_error_on_every_rank(
    ranks: RankPool, culprits: tuple[int, ...]
) -> None:
    for rank, seen in enumerate(ranks.run(WORLD_SIZE, transformed, culprits)):
        assert list(seen) == list(AROUND)
        for name, (kind, text, after) in seen.items():
            guilty = rank in culprits
            assert kind == ("TransformError" if guilty else "PeerError"), (name, text)
            for part in AROUND[name].texts:
                assert part in text, (name, text)
            assert guilty or "rank 1 failed" in text, (name, text)
            assert after == [0.5, 0.5], name


def test_a_step_is_not_linearized(ranks: RankPool) -> None:
    for seen in ranks.run(WORLD_SIZE, linearized):
        for outcome, (kind, text, after) in seen.items():
            assert (kind, after) == ("TransformError", [0.5, 0.5]), (outcome, text)
            assert outcome in text
            assert "torch.func.linearize" in text


def built_and_broadcast(rank: int, world_size: int) -> tuple[dict[str, Any], list[Any]]:
    """Broadcasts under each transform; and a `GradSync` built under one, which takes shapes."""

    def start(p: dict[str, Tensor]) -> Tensor:
        return fddp.broadcast(p)["w"]

    def built(p: dict[str, Tensor]) -> Tensor:
        with fddp.GradSync(p, timeout_s=20.0) as sync:
            paths.append(sync.plan.paths)
        return p["w"].sum()

    seen = {}
    with fddp.GradSync(point(), timeout_s=20.0) as sync:
        for name, (transform, _) in TRANSFORMS.items():
            if name != "forward_ad":
                seen[name] = ending(lambda _, t=transform: t(start), sync)
    paths: list[Any] = []
    return seen, [grad(built)(point())["w"].tolist(), batched(built).tolist(), *paths]


def test_steps_started_within_transforms(ranks: RankPool) -> None:
    for seen, built in ranks.run(WORLD_SIZE, built_and_broadcast):
        for name, (kind, text, after) in seen.items():
            assert (kind, after) == ("PlanMismatchError", [0.5, 0.5]), (name, text)
            assert "TransformError: broadcast(tree)" in text
            assert TRANSFORMS[name][1] in text
            assert "fddp.broadcast_from" in text
        assert built == [[1.0, 1.0], [2.0] * 3, ("w",), ("w",)]


def adapted_by_a_mean(
    rank: int, world_size: int, call: str, culprits: tuple[int, ...]
) -> list[tuple[str, str, Any]]:
    """The inner step of MAML by the mean of what has a graph (on culprits), or of values."""
    with fddp.GradSync(point(), timeout_s=20.0) as sync, fddp.GradSync(point()) as outer:

        def loss(p: dict[str, Tensor], detach: bool) -> Tensor:
            inner = grad(square)(p)["w"]
            given = {"w": inner.detach() if detach else inner}
            mean = sync.update(given, ())[0] if call == "update" else getattr(sync, call)(given)
            return square({"w": p["w"] - 0.25 * mean["w"]})

        step = outer.value_and_grad(loss)
        return [
            ending(lambda _, d=detach: step(point(), d)[1]["w"].tolist(), sync)
            for detach in (rank not in culprits, True)
        ]


@pytest.mark.parametrize("culprits", [(0, 1), (1,)], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("call", ["__call__", "update", "reduce_"])
def test_derivatives_do_not_end_at_a_mean_in_a_loss_function(
    ranks: RankPool, call: str, culprits: tuple[int, ...]
) -> None:
    runs = ranks.run(WORLD_SIZE, adapted_by_a_mean, call, culprits)
    for rank, ((kind, text, after), good) in enumerate(runs):
        assert kind == ("TransformError" if rank in culprits else "PeerError"), text
        for part in ("'w' of the gradients", "Backward0", "fddp.pmean(grads)", "grad.detach()"):
            assert part in text
        assert after == [0.5, 0.5]
        assert good == ("no error", "[1.0, 2.0]", [0.5, 0.5])


def values(rank: int, world_size: int) -> list[Any]:
    """Inputs that look alike but differ in meaning."""
    with fddp.GradSync(point()) as sync, fddp.GradSync(point()) as outer:
        w = point()["w"].requires_grad_()
        own = sync.value_and_grad(square)({"w": w * (1.0 + rank)})[1]  # of a loop that records
        given = sync({"w": w})  # a parameter, as modules have them
        with_graph = grad(square)({"w": w})  # torch.func.grad records for others
        assert with_graph["w"].grad_fn is not None
        slopes = sync(with_graph)

        def first_order(p: dict[str, Tensor]) -> Tensor:
            mean = sync({"w": grad(square)(p)["w"].detach()})
            return square({"w": p["w"] - 0.25 * (1 + rank) * mean["w"]})

        adapted = outer.value_and_grad(first_order)(point())[1]
        trees = [own, given, slopes, adapted]
        assert not any(tree["w"].requires_grad for tree in trees)
        return [tree["w"].tolist() for tree in trees]


def test_values_are_taken_as_values(ranks: RankPool) -> None:
    expected = [[3.0, 6.0], [1.0, 2.0], [2.0, 4.0], [0.5, 1.0]]
    assert ranks.run(WORLD_SIZE, values) == [expected] * WORLD_SIZE
