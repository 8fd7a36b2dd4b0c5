"""Operators within torch.compile: the numbers, the calls and their order are those of eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fddp
from fddp.collectives import execute
from tests.support.on_ranks import on_processes
from tests.support.ranks import RankPool

Fn = Callable[..., Any]

# Inductor generates C++, which takes seconds for each graph.
INDUCTOR = pytest.mark.nightly
BACKENDS = ["aot_eager", pytest.param("inductor", marks=INDUCTOR)]


def largest_difference(tree: Any, other: Any) -> float:
    """Of tensors of two trees, which must have as many leaves."""
    pairs = zip(tree_leaves(tree), tree_leaves(other), strict=True)
    return max(
        [float((a - b).abs().max()) for a, b in pairs if isinstance(a, Tensor) and a.numel()],
        default=0.0,
    )


def compiled(fn: Fn, backend: str = "aot_eager", *, fullgraph: bool = True) -> Fn:
    result: Fn = torch.compile(fn, backend=backend, fullgraph=fullgraph)
    return result


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the operators that run within the block, in order, with roles and number of leaves."""
    calls: list[str] = []

    class Noted(execute.RunningCall):
        def __init__(self, call: Any, **given: Any) -> None:
            calls.append(call.text.partition(" (")[0])
            super().__init__(call, **given)

    with mock.patch.object(execute, "RunningCall", Noted):
        yield calls


def compare(fn: Fn, *args: Any, backend: str = "aot_eager") -> tuple[float, list[str], list[str]]:
    """Return the difference between compiled and eager results, and the operators of each."""
    with recorded() as eager_calls:
        eager = fn(*args)
    with recorded() as calls:
        result = compiled(fn, backend)(*args)
    return largest_difference(result, eager), eager_calls, calls


# A training step


def train_in_graph(rank: int, world_size: int, backend: str, transport: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    params = {"in": {"w": torch.randn(3, 4), "b": torch.zeros(4)}, "out": torch.randn(4, 2)}
    torch.manual_seed(1 + rank)
    batches = [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(3)]

    def loss_fn(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"] - y).square().mean()

    with fddp.Communicator(transport=transport) as ranks:

        def step(p: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
            grads, loss = torch.func.grad_and_value(loss_fn)(p, x, y)
            grads = fddp.pmean(grads, ranks)
            return fddp.tree_map(lambda w, g: w - 0.1 * g, p, grads), fddp.pmean(loss, ranks)

        step_in_graph = compiled(step, backend)
        own, wanted = params, params
        for x, y in batches:
            own, loss = step_in_graph(own, x, y)
            wanted, wanted_loss = step(wanted, x, y)
        with recorded() as calls:
            step_in_graph(own, *batches[0])
    return largest_difference((own, loss), (wanted, wanted_loss)), own, calls


@pytest.mark.parametrize(
    ("backend", "transport"),
    [
        pytest.param("aot_eager", "c10d", marks=pytest.mark.nightly),
        ("aot_eager", "auto"),
        pytest.param("inductor", "auto", marks=INDUCTOR),
    ],
)
def test_a_step_is_one_graph(ranks: RankPool, backend: str, transport: str) -> None:
    results = ranks.run(2, train_in_graph, backend, transport)
    # Inductor fuses multiplications and additions, which rounds otherwise.
    assert max(off for off, _, _ in results) <= (1e-6 if backend == "inductor" else 0.0)
    assert largest_difference(results[0][1], results[1][1]) == 0.0
    assert results[0][2] == ["pmean of 3 leaves", "pmean of 1 leaf"]


@on_processes(2)
def test_plain_autograd(rank: int, world_size: int) -> None:
    """The gradient is taken by `.backward()` outside, and by `autograd.grad` inside of a graph."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    x = torch.randn(4, 3)

    def loss_fn(w: Tensor) -> Tensor:
        return fddp.pmean((x @ fddp.sync_on_backward(w)).square().mean())

    def grad_of(w: Tensor) -> Tensor:
        own = w.detach().requires_grad_()
        (grad,) = torch.autograd.grad((x @ own).square().mean(), own)
        return fddp.pmean(grad)

    weights = [torch.ones(3).requires_grad_() for _ in range(2)]
    loss_fn(weights[0]).backward()
    compiled(loss_fn)(weights[1]).backward()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        inside = compiled(grad_of)(torch.ones(3))
    assert torch.equal(weights[0].grad, weights[1].grad)
    torch.testing.assert_close(inside, weights[0].grad, rtol=1e-6, atol=0.0)


# All operators


@pytest.mark.parametrize(
    "names",
    [
        {"psum", "pmean"},
        {"all_to_all"},
        pytest.param({"pmax", "broadcast_from", "sync_on_backward"}, marks=pytest.mark.nightly),
        pytest.param({"all_gather", "reduce_scatter"}, marks=pytest.mark.nightly),
    ],
)
@on_processes(2)
def test_operators_and_their_derivatives(rank: int, world_size: int, names: set[str]) -> None:
    torch.manual_seed(rank)
    tree = {"b": torch.randn(4, 3, dtype=torch.float64), "a": [torch.randn(2).double()]}
    found = []
    with fddp.Communicator() as ranks:
        operators: dict[str, Fn] = {
            "psum": lambda t: fddp.psum(t, ranks),
            "pmean": lambda t: fddp.pmean(t, ranks),
            "pmax": lambda t: fddp.pmax(t, ranks),
            "all_gather": lambda t: fddp.all_gather(t, ranks),
            "all_gather, tiled": lambda t: fddp.all_gather(t, ranks, tiled=True),
            "reduce_scatter, tiled": lambda t: fddp.reduce_scatter(t, ranks, tiled=True),
            "all_to_all": lambda t: fddp.all_to_all(
                fddp.tree_map(lambda x: x.view(2, -1), t), ranks
            ),
            "all_to_all, tiled": lambda t: fddp.all_to_all(t, ranks, tiled=True),
            "broadcast_from": lambda t: fddp.broadcast_from(t, 1, ranks),
            "sync_on_backward": lambda t: fddp.sync_on_backward(t, ranks),
        }
        for name, operator in operators.items():
            if name.partition(",")[0] not in names:
                continue
            torch._dynamo.reset()

            def total(t: Any, operator: Fn = operator) -> Any:
                return sum(leaf.pow(3).sum() for leaf in tree_leaves(operator(t)))

            def derivatives(t: Any, operator: Fn = operator, total: Fn = total) -> Any:
                return operator(t), torch.func.jvp(torch.func.grad(total), (t,), (t,))

            off, eager_calls, calls = compare(derivatives, tree)
            found.append((name, off, calls == eager_calls))
    assert {name.partition(",")[0] for name, *_ in found} == names
    assert [row for row in found if row[1:] != (0.0, True)] == []


# Order


@pytest.mark.parametrize("backend", BACKENDS)
@on_processes(2)
def test_calls_are_neither_reordered_nor_dropped_nor_merged(
    rank: int, world_size: int, backend: str
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    weights, x = [torch.randn(3, 4), torch.randn(4, 2)], torch.randn(5, 3)
    with fddp.Communicator() as ranks, fddp.Communicator() as others:

        def calls(w: list[Tensor], x: Tensor) -> list[Tensor]:
            a, b = fddp.psum(w, ranks), fddp.psum(w, ranks)  # alike, but two
            fddp.pmax(x, ranks)  # which is unused
            (c,) = fddp.pmean([b[0]], others)
            if rank == 0:
                fddp.all_gather(x, ranks)
                return [a[0] + b[0], c]
            return [a[0] + b[0], c, fddp.all_gather(x, ranks)]  # used on this rank only

        def total(w: list[Tensor], x: Tensor) -> Tensor:
            (h,) = fddp.psum([x @ w[0]], ranks)
            fddp.pmean([x], others)
            return (fddp.all_gather(h @ w[1], ranks) ** 2).sum()

        def gradients(fn: Fn) -> list[Tensor]:
            own = [weight.clone().requires_grad_() for weight in weights]
            fn(own, x).backward()
            return [weight.grad for weight in own if weight.grad is not None]

        forward = compare(calls, weights, x, backend=backend)
        with recorded() as eager_calls:
            eager = gradients(total)
        with recorded() as in_graph:
            result = gradients(compiled(total, backend))
    trained = largest_difference(result, eager), eager_calls, in_graph
    assert forward[2] == [
        "psum of 2 leaves",
        "psum of 2 leaves",
        "pmax of 1 leaf",
        "pmean of 1 leaf",
        "all_gather of 1 leaf",
    ]
    for off, of_eager, of_graph in (forward, trained):
        assert off < 1e-5
        assert of_graph == of_eager
    assert in_graph[-1] == "backward of psum of 1 leaf"


# Other tracers, other arguments


@on_processes(2)
def test_make_fx_and_export_match_eager(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    tree = {"w": torch.randn(3)}
    off: dict[str, float] = {}

    def gradient(t: Any) -> Any:
        return torch.func.grad(lambda t: fddp.pmean(t)["w"].pow(3).sum())(t)

    class Largest(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fddp.pmax(fddp.pmean({"w": x.sin()}))["w"]

    with recorded():
        traced = make_fx(gradient)(tree)
    assert [n.name for n in traced.graph.nodes if "fddp" in str(n.target)] == ["pmean", "pmean_1"]
    off["make_fx"] = largest_difference(traced(tree), gradient(tree))
    for strict in (False, True):
        exported = torch.export.export(Largest(), (tree["w"],), strict=strict)
        values, grads = [], []
        for module in (Largest(), exported.module()):
            w = tree["w"].clone().requires_grad_()
            values.append(module(w))
            grads.append(torch.autograd.grad(values[-1].pow(2).sum(), w))
        off[f"export, {strict=}"] = largest_difference(*values)
        off[f"export, {strict=}, grad"] = largest_difference(*grads)
    assert len(off) == 5
    assert set(off.values()) == {0.0}


@on_processes(2)
def test_recorded_functions_have_derivatives(rank: int, world_size: int) -> None:
    """Derivatives of functions that were recorded without them, at several levels."""
    torch.manual_seed(rank)
    x, t = torch.randn(2, 3, dtype=torch.float64).unbind()
    off: dict[str, float] = {}

    def curvatures(fn: Fn) -> list[Any]:
        def total(x: Tensor) -> Tensor:
            return (fn(x) ** 3 * t).sum()

        def along(x: Tensor) -> Tensor:
            return (torch.func.grad(total)(x) * t).sum()

        own = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(total(own), own, create_graph=True)
        return [
            torch.func.jvp(torch.func.grad(total), (x,), (t,)),
            torch.func.grad(along)(x),
            torch.autograd.grad((grad * t).sum(), own),
        ]

    for operator in (
        fddp.psum,
        fddp.pmax,
        lambda x: fddp.all_gather(x).prod(0),
        lambda x: fddp.all_to_all(torch.stack([x, x**2])).prod(0),
    ):

        class Module(torch.nn.Module):
            def forward(self, x: Tensor, operator: Fn = operator) -> Tensor:
                return operator(x.sin())

        module, name = Module(), f"operator {len(off) // 2}"
        exported = torch.export.export(module, (x,)).module()
        off[f"{name}, exported"] = largest_difference(curvatures(exported), curvatures(module))
        with warnings.catch_warnings():  # torch's, whatever is linearized
            warnings.simplefilter("ignore")
            _, linear = torch.func.linearize(module, x)
        transposed = [torch.func.vjp(fn, x)[1](t) for fn in (linear, module)]
        off[f"{name}, linear"] = largest_difference(*transposed)
    assert len(off) == 8
    assert {name: value for name, value in off.items() if not value < 1e-12} == {}


@on_processes(2)
def test_groups_axes_and_plans(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    tree = {"b": torch.randn(4, 3), "a": (torch.randn(2), None), "n": torch.arange(3)}
    plan = fddp.plan_buckets({**tree, "n": None}, bucket_cap_mb=1e-5)
    axes = fddp.Topology(host=1, local=world_size)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("host", "local"))
    with fddp.Communicator(mesh=axes) as ranks:
        functions: dict[str, Fn] = {
            "default group": lambda t: fddp.psum(t),
            "group": lambda t: fddp.psum(t, dist.group.WORLD),
            "one-dimensional mesh": lambda t: fddp.psum(t, mesh["local"]),
            "mesh": lambda t: fddp.psum(t, mesh=mesh, axis="local"),
            "topology": lambda t: fddp.psum(t, mesh=axes, axis=("local",)),
            "axes": lambda t: fddp.psum(fddp.psum(t, ranks, axis="local"), ranks, axis="host"),
            "plan": lambda t: fddp.psum({**t, "n": None}, ranks, plan=plan),
            "conjugate": lambda t: fddp.psum((t["b"] * 1j).conj(), ranks),
            "no leaves": lambda t: (fddp.psum({"a": None}, ranks), t),
            "vmap": lambda t: torch.func.vmap(lambda r: fddp.psum(r, ranks))(t["b"]),
        }
        off = {name: compare(fn, tree)[0] for name, fn in functions.items()}
    assert {name: value for name, value in off.items() if value != 0.0} == {}


@pytest.mark.nightly
@on_processes(2)
def test_communicated_tensors_have_static_shapes(rank: int, world_size: int) -> None:
    graphs: list[Any] = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def gathered(x: Tensor) -> Tensor:
        return fddp.all_gather(x).sum(0)

    def step(w: Tensor, x: Tensor) -> Tensor:
        return w - fddp.pmean(torch.func.grad(lambda w: (x @ w).square().mean())(w))

    def off_and_graphs(fn: Fn, *fixed: Tensor) -> tuple[list[float], int]:
        torch._dynamo.reset()
        graphs.clear()
        in_graph = torch.compile(fn, backend=counting, fullgraph=True)
        inputs = [torch.randn(n, 2) for n in (3, 4, 5, 6)]
        off = [largest_difference(in_graph(*fixed, x), fn(*fixed, x)) for x in inputs]
        return off, len(graphs)

    assert off_and_graphs(gathered) == ([0.0] * 4, 4)
    # Batches of any size, once dynamo has seen a second one: gradients keep their shapes.
    assert off_and_graphs(step, torch.randn(2, 3)) == ([0.0] * 4, 2)


@on_processes(2)
def test_a_graph_break_within_a_step(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    x = torch.full((3,), 1.0 + rank)

    def broken(x: Tensor) -> Tensor:
        total = fddp.psum(x)
        torch._dynamo.graph_break()
        return fddp.pmax(total * x)

    assert largest_difference(compiled(broken, fullgraph=False)(x), broken(x)) == 0.0


# Errors


def test_threads_are_no_ranks_of_a_graph() -> None:
    def run(group: Any) -> None:
        torch._dynamo.reset()
        compiled(lambda x: fddp.psum(x, group))(torch.ones(2))

    with pytest.raises(Exception, match=r"a group of fddp\.loopback in a compiled function"):
        fddp.loopback(1, run)


def disagree(rank: int, world_size: int) -> dict[str, str]:
    torch._dynamo.reset()
    texts: dict[str, str] = {}

    def attempt(name: str, fn: Fn, *args: Any) -> None:
        try:
            compiled(fn)(*args)
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    with fddp.Communicator() as ranks:
        attempt("operators", lambda x: (fddp.psum if rank else fddp.pmax)(x, ranks), torch.ones(2))

        def one_of_two(w: Tensor) -> Tensor:
            means = fddp.pmean(w[:1], ranks), fddp.pmean(w[1:], ranks)
            return means[rank].sum()

        def one_of_two_marked(w: Tensor) -> Tensor:
            marked = fddp.sync_on_backward(w[:1], ranks), fddp.sync_on_backward(w[1:], ranks)
            return marked[rank].sum()

        attempt("derivatives", torch.func.grad(one_of_two), torch.ones(2))
        attempt("marked derivatives", torch.func.grad(one_of_two_marked), torch.ones(2))
        # An integer can't be averaged: found while rank 0 traces, reported to rank 1 as it runs.
        attempt("dtype", lambda x: fddp.pmean(x, ranks), torch.ones(2) if rank else torch.arange(2))
        attempt("working on", lambda x: fddp.pmean(x, ranks), torch.ones(2))
        closed = compiled(lambda x: fddp.psum(x, ranks))
        closed(torch.ones(2))
    attempt("closed", closed, torch.ones(2))
    return texts


def test_errors_name_operators_and_call_sites(ranks: RankPool) -> None:
    first, second = ranks.run(2, disagree)
    for texts in (first, second):
        assert "working on" not in texts
        assert "DesyncError" in texts["operators"]
        assert "rank 0: pmax of 1 leaf" in texts["operators"]
        assert "rank 1: psum of 1 leaf" in texts["operators"]
        assert "test_compile.py:" in texts["operators"]
        for name in ("derivatives", "marked derivatives"):
            assert "DesyncError" in texts[name]
            assert "rank 0: backward of p" in texts[name]
        assert "closed" in texts["closed"]
    assert "pmean: the tree itself is of torch.int64" in first["dtype"]
    assert "PeerError" in second["dtype"]
    assert (
        "rank 0 can't take part: TypeError: pmean: the tree itself is of torch.int64"
        in second["dtype"]
    )
