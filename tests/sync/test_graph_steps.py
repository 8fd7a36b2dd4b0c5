"""Steps of a `GradSync` in graphs: the results of eager mode, and starts where gradients exist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import run_and_get_code
from torch.distributed._functional_collectives import all_reduce
from torch.func import functional_call
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.ranks import RankPool

RANKS = 2
ROUNDING = 1e-6, 1e-2  # what fused operations may do to float32, and to bfloat16
SMALL = {"bucket_cap_mb": 1e-4, "first_bucket_mb": 1e-4}  # about a bucket for each leaf
INDUCTOR = pytest.mark.nightly  # it generates C++, which takes seconds for each graph
BACKENDS = ["aot_eager", pytest.param("inductor", marks=INDUCTOR)]

Params = dict[str, Any]


def make_params(dtype: torch.dtype = torch.float32) -> Params:
    """Weights of layers, and what has no gradient."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(6, 6, generator=generator).to(dtype) for _ in range(4)]
    return {"layers": layers, "bias": torch.zeros(6, dtype=dtype), "count": torch.tensor(3)}


def batch(rank: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 + rank))


def loss_fn(params: Params, x: Tensor) -> Tensor:
    for weight in params["layers"]:
        x = torch.tanh(x.to(weight.dtype) @ weight + params["bias"])
    return x.float().square().mean() * params["count"]


def update(params: Params, grads: Params) -> Params:
    return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)


# How a step is written


def through_value_and_grad(sync: fddp.GradSync, x: Tensor, **given: Any) -> Callable[..., Any]:
    take = sync.value_and_grad(loss_fn, **given)

    def step(params: Params) -> tuple[Params, Tensor]:
        loss, grads, *_ = take(params, x)
        return update(params, grads), loss

    return step


def through_value_and_grad_inside(
    sync: fddp.GradSync, x: Tensor, **given: Any
) -> Callable[..., Any]:
    def step(params: Params) -> tuple[Params, Tensor]:
        loss, grads, *_ = sync.value_and_grad(loss_fn, **given)(params, x)
        return update(params, grads), loss

    return step


def through_call(sync: fddp.GradSync, x: Tensor, **given: Any) -> Callable[..., Any]:
    def step(params: Params) -> tuple[Params, Tensor]:
        count = params["count"]
        floating = {name: leaf for name, leaf in params.items() if name != "count"}
        whole = lambda own: loss_fn({**own, "count": count}, x)  # noqa: E731
        grads, loss = torch.func.grad_and_value(whole)(floating)
        result = sync({**grads, "count": None}, **given)
        return update(params, result[0] if given.get("with_info") else result), loss

    return step


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "value_and_grad": (through_value_and_grad, {}, {}),
    "value_and_grad made inside": (through_value_and_grad_inside, {}, {}),
    "call": (through_call, {}, {}),
    "weights": (through_value_and_grad, {}, {"weight_fn": lambda _, x: x.shape[0]}),
    "a weight": (through_call, {}, {"weight": 0.25}),
    "a weight of 0": (through_value_and_grad, {}, {"weight_fn": lambda _, x: x.shape[0] - 5}),
    "info": (through_value_and_grad, {}, {"with_info": True}),
    "info of a call": (through_call, {}, {"with_info": True}),
    "a wider sum": (through_value_and_grad, {"reduce_dtype": torch.float32}, {}),
    "a hook": (through_value_and_grad, {"hook": fddp.hooks.cast(torch.bfloat16)}, {}),
    "deterministic": (through_value_and_grad, {"deterministic": True}, {}),
    "a local leaf": (through_value_and_grad, {"select": lambda path: path != "layers.1"}, {}),
    "raise": (through_value_and_grad, {"nonfinite": "raise"}, {}),
    "next": (through_value_and_grad, {"report": "next"}, {}),
    "one bucket": (through_value_and_grad, {"bucket_cap_mb": 25.0}, {}),
    "gloo": (through_value_and_grad, {"transport": "c10d"}, {}),
}


def train(rank: int, world_size: int, name: str, backend: str) -> Any:
    """Differences between three compiled and three eager steps, and the number of graphs."""
    torch._dynamo.reset()
    make, options, given = CASES[name]
    params = make_params(torch.bfloat16 if "reduce_dtype" in options else torch.float32)
    counter = CompileCounterWithBackend(backend)
    with fddp.GradSync(params, **{**SMALL, **options}) as sync:
        step = make(sync, batch(rank, rows=5 + rank), **given)
        compiled = torch.compile(step, backend=counter, fullgraph=True)
        found = wanted = params
        losses = []
        for _ in range(3):
            found, loss = compiled(found)
            losses.append(loss)
        order = sync.plan.order
        if "with_info" in given:
            info = sync.graph_info
            assert info is not None
            assert info.step == 2
            end_s = info.timeline.backward_end_s  # when the graph finishes the step
            assert all(bucket.launch_s < end_s for bucket in info.timeline.buckets)
        for number in range(3):
            wanted, loss = step(wanted)
            losses[number] = losses[number] - loss
    leaves = zip(
        [*found["layers"], found["bias"]], [*wanted["layers"], wanted["bias"]], strict=True
    )
    difference = max(
        float((a - b).abs().max()) for a, b in [*leaves, (torch.stack(losses), 0 * loss)]
    )
    return difference, counter.frame_count, order


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_compiled_steps_have_the_bits_of_eager_ones(
    ranks: RankPool, name: str, backend: str
) -> None:
    for difference, graphs, order in ranks.run(RANKS, train, name, backend):
        assert difference <= (0.0 if backend == "aot_eager" else ROUNDING[name == "a wider sum"])
        assert graphs == 1  # also where the plan was rebuilt
        if name == "value_and_grad":  # in the order of the graph, from the last layer to the first
            assert order[-1] < order[1] < order[0]


# How gradients come about


def shared(params: Params, x: Tensor) -> Tensor:
    return loss_fn({**params, "layers": [*params["layers"], params["layers"][0]]}, x)


def unused(params: Params, x: Tensor) -> Tensor:
    return loss_fn({**params, "layers": params["layers"][1:]}, x)


def autocast(params: Params, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_fn(params, x)


def with_aux(params: Params, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_fn(params, x), {"rows": x.sum(1)}


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "shared": (shared, {}),
    "unused": (unused, {}),
    "autocast": (autocast, {}),
    "with an auxiliary result": (with_aux, {"has_aux": True}),
}


def gradients(rank: int, world_size: int, name: str) -> Any:
    torch._dynamo.reset()
    loss, given = LOSSES[name]
    params, x = make_params(), batch(rank)
    with fddp.GradSync(params, **SMALL) as sync:
        step = sync.value_and_grad(loss, **given)
        found = torch.compile(step, backend="aot_eager", fullgraph=True)(params, x)
        wanted = step(params, x)
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    return [torch.equal(torch.zeros_like(a) if b is None else b, a) for a, b in pairs if a is not b]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_compiled_value_and_grad(ranks: RankPool, name: str) -> None:
    # Unused leaves have gradients of zeros in a graph, and none in eager mode.
    for equal in ranks.run(RANKS, gradients, name):
        assert equal
        assert all(equal)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer whose backward pass needs what a checkpoint does not keep."""
    return torch.sin(torch.tanh(linear(x, weight, bias)))


def _means(
    sync: fddp.GradSync, model: torch.nn.Module, params: Params, call: str, x: Tensor
) -> list[Tensor]:
    if call == "checkpoint":
        first, bias, second, bias_2 = params.values()
        out = checkpoint(_layer, x, first, bias, use_reentrant=False)
        out = checkpoint(_layer, out, second, bias_2, use_reentrant=False)
    else:
        out = functional_call(model, params, (x,))
    loss = out.square().mean()
    if call != "backward":
        own = torch.autograd.grad(loss, [*params.values()])
    else:
        loss.backward()
        own = tuple(p.grad for p in params.values())
    return [*sync(dict(zip(params, own, strict=True))).values()]


def by_backward(rank: int, world_size: int, call: str) -> Any:
    """Parameters of a module after three steps, compiled and eager."""
    torch._dynamo.reset()
    results = []
    for backend in ("aot_eager", None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
        params, x = dict(model.named_parameters()), batch(rank)
        with fddp.GradSync(model, **SMALL) as sync:
            run = partial(_means, sync, model, params, call)
            if backend:
                run = torch.compile(run, backend=backend, fullgraph=True)
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                for _ in range(3):
                    grads = run(x)
                    for p, grad in zip(params.values(), grads, strict=True):
                        p.grad = None
                        p.data.sub_(0.1 * grad)
        results.append([p.detach().clone() for p in params.values()])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("call", ["grad", "backward", "checkpoint"])
def test_gradients_of_autograd_within_a_graph(ranks: RankPool, call: str) -> None:
    for equal in ranks.run(RANKS, by_backward, call):
        assert all(equal)


# Contents of graphs


def recorded(rank: int, world_size: int) -> Any:
    """Operations of the graph of a step, and the buckets of its schedule."""
    torch._dynamo.reset()
    operations: list[tuple[str, Any, list[int]]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = list(graph.graph.nodes)
        place = {node: at for at, node in enumerate(nodes)}
        for node in nodes:
            target, args = node.target, node.args
            if str(target) == "with_effects":
                target, args = node.args[1], node.args[2:]
            inputs = [place[n] for n in node.all_input_nodes]
            operations.append((str(target), args[-1] if args else None, inputs))
        return graph.forward

    params, x = make_params(), batch(rank)
    with fddp.GradSync(params, **SMALL) as sync:
        total = fddp.Communicator()

        def step(params: Params) -> Any:
            loss, grads = sync.value_and_grad(loss_fn)(params, x)
            return update(params, grads), fddp.pmean(loss, total)

        torch.compile(step, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(params)
        total.close()
        buckets = [[*sync.plan.buckets[bucket].leaves] for bucket in sync.schedule.sequence]
    calls = [
        (at, str(name).removeprefix("fddp."), json.loads(text), inputs)
        for at, (name, text, inputs) in enumerate(operations)
        if str(name).startswith("fddp.")
    ]
    return calls, [name for name, _, _ in operations], buckets


def test_a_graph_has_the_schedule_with_each_start_behind_its_last_input(ranks: RankPool) -> None:
    for calls, operations, buckets in ranks.run(RANKS, recorded):
        names = [name for _, name, _, _ in calls]
        assert names == ["start_gradients.default"] * len(buckets) + [
            "finish_step.default",
            "pmean.default",
        ]
        assert [about["leaves"] for _, _, about, _ in calls[:-2]] == buckets
        assert len({at for at, *_ in calls[:-2]}) > 1
        for at, _, _, inputs in calls[:-2]:
            between = operations[max(inputs) + 1 : at]
            assert not between
        first, last = calls[0][0], calls[-3][0]
        assert any("mm" in name for name in operations[first:last])  # backward goes on meanwhile
        assert not any("mm" in name for name in operations[last:])


def with_biases(params: list[Params], x: Tensor) -> Tensor:
    for layer in params:
        x = x + torch.relu(linear(x, layer["w"], layer["b"]))
    return x.square().mean()


def generated(rank: int, world_size: int) -> list[str]:
    """Calls in the code that Inductor generates, in order."""
    torch._dynamo.reset()
    # Residual layers of a width at which Inductor, left alone, sums for several biases at once.
    params = [{"w": torch.full((96, 96), 0.01), "b": torch.ones(96)} for _ in range(8)]
    x = torch.ones(64, 96)
    with fddp.GradSync(params, bucket_cap_mb=0.03, first_bucket_mb=0.03) as sync:
        step = sync.value_and_grad(with_biases)
        with torch._inductor.config.patch(force_disable_caches=True):
            _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), params, x)
    wanted = re.compile(r"(start_gradients|finish_step)\.default\(|extern_kernels\.(\w*mm)\(")
    return ["".join(filter(None, found)) for found in wanted.findall(code)]


@INDUCTOR
def test_inductor_keeps_the_order(ranks: RankPool) -> None:
    for calls in ranks.run(RANKS, generated):
        backward = calls[calls.index("start_gradients") :]
        assert backward[-1] == "finish_step"
        starts = [k for k, name in enumerate(backward) if name == "start_gradients"]
        assert len(starts) == 8
        # Kernels that give biases' gradients are not fused: each layer goes on before the next one.
        assert all(b - a > 1 for a, b in pairwise(starts)), backward


class Reusing(torch.fx.Interpreter):
    """Runs a graph, and overwrites gradients that only a start has used, as Inductor may."""

    def run_node(self, node: torch.fx.Node) -> Any:
        result = super().run_node(node)
        if "start_gradients" in str(node.args[1:2]):
            for source in node.all_input_nodes:
                value = self.env.get(source)
                if isinstance(value, Tensor) and value.numel() and len(source.users) == 1:
                    value.fill_(float("nan"))
        return result


def reused(rank: int, world_size: int, options: dict[str, Any]) -> list[bool]:
    torch._dynamo.reset()
    params, x = make_params(), batch(rank)

    def run(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(Reusing(graph, garbage_collect_values=False).run)

    with fddp.GradSync(params, **SMALL, **options) as sync:
        step = sync.value_and_grad(loss_fn)
        found = torch.compile(step, backend=aot_autograd(fw_compiler=run), fullgraph=True)
        _, grads = found(params, x)
        _, wanted = step(params, x)
    pairs = zip(tree_leaves(grads), tree_leaves(wanted), strict=True)
    return [torch.equal(a, b) for a, b in pairs if a is not b]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_gradients_are_not_read_after_their_start(ranks: RankPool, options: Any) -> None:
    for equal in ranks.run(RANKS, reused, options):
        assert all(equal)


def beside_others(rank: int, world_size: int) -> list[str]:
    """Collectives of a graph in which another library's comes between backward and the mean."""
    torch._dynamo.reset()
    names: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [
            str(part) for node in graph.graph.nodes for part in (node.target, node.args[1:2])
        ]
        wanted = re.compile("c10d_functional.all_reduce|start_gradients|finish_step")
        names.extend(found.group() for text in targets if (found := wanted.search(text)))
        return make_boxed_func(graph.forward)

    params, x = make_params(), batch(rank)
    group: Any = dist.group.WORLD
    with fddp.GradSync(params, **SMALL) as sync:
        del params["count"]
        whole = lambda own: loss_fn({**own, "count": torch.tensor(3)}, x)  # noqa: E731

        def step(params: Params) -> Any:
            grads, loss = torch.func.grad_and_value(whole)(params)
            loss = all_reduce(loss, "sum", group)
            return sync({**grads, "count": None}), loss

        torch.compile(step, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(params)
    return names


def test_starts_do_not_pass_other_collectives(ranks: RankPool) -> None:
    for names in ranks.run(RANKS, beside_others):
        assert names[0] == "c10d_functional.all_reduce"
        assert {*names[1:-1]} == {"start_gradients"}
        assert names[-1] == "finish_step"


# Number of graphs


def many_steps(rank: int, world_size: int) -> Any:
    torch._dynamo.reset()
    params = make_params()
    counter = CompileCounterWithBackend("aot_eager")
    with fddp.GradSync(params, **SMALL) as sync:
        take = sync.value_and_grad(loss_fn, weight_fn=lambda _, x: x.shape[0])

        def step(params: Params, x: Tensor) -> Params:
            return update(params, take(params, x)[1])

        compiled = torch.compile(step, backend=counter, fullgraph=True)
        found, sizes = params, []
        for number in range(100):
            found = compiled(found, batch(rank, rows=5 + (number + rank) % 7))
            sizes.append(counter.frame_count)
        wanted = params
        for number in range(100):
            wanted = step(wanted, batch(rank, rows=5 + (number + rank) % 7))
        kept = sizes[-1]
        sync._engine.set_plan(fddp.plan_buckets(params))  # as a tuned plan
        compiled(found, batch(rank))
        replanned = counter.frame_count
    return torch.equal(found["bias"], wanted["bias"]), kept, replanned


def test_steps_of_all_batch_sizes_run_one_graph_until_the_plan_changes(ranks: RankPool) -> None:
    for equal, kept, replanned in ranks.run(RANKS, many_steps):
        assert equal
        assert kept == 2  # for the first size, and for any
        assert replanned == 3


# Ranks that differ


def one_in_a_graph(rank: int, world_size: int) -> Any:
    torch._dynamo.reset()
    params = make_params()
    plan = fddp.plan_buckets(params, bucket_cap_mb=1e-4)
    with fddp.GradSync(plan) as sync:
        step = through_value_and_grad(sync, batch(rank))
        mixed = step if rank == 0 else torch.compile(step, backend="aot_eager", fullgraph=True)
        found = [mixed(params)[0]["bias"] for _ in range(2)]
        return [torch.equal(bias, step(params)[0]["bias"]) for bias in found]


def test_ranks_that_run_a_graph_meet_those_that_do_not(ranks: RankPool) -> None:
    assert ranks.run(RANKS, one_in_a_graph) == [[True, True]] * RANKS


def failures(rank: int, world_size: int) -> Any:
    """Error texts of steps in which rank 1 makes a mistake, and whether the next step succeeds."""
    found = {}
    params, x = make_params(), batch(rank)
    with fddp.GradSync(params, **SMALL) as sync:

        def attempt(name: str, step: Callable[..., Any], *args: Any) -> None:
            torch._dynamo.reset()
            try:
                torch.compile(step, backend="aot_eager", fullgraph=True)(*args)
                found[name] = ""
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"

        def weighted(params: Params, weight: float) -> Params:
            return sync.value_and_grad(loss_fn, weight_fn=lambda *_: weight)(params, x)[1]

        wrong = {**params, "bias": torch.zeros(7)} if rank == 1 else params
        attempt("shape", lambda p: sync({**p, "count": None}), wrong)
        attempt("weight", weighted, params, -1.0 if rank == 1 else 1.0)
        attempt("after", weighted, params, 1.0)
        attempt("shape after", lambda p: sync({**p, "count": None}), wrong)
        attempt("after that", weighted, params, 1.0)
        attempt("paths", lambda p: sync(p["layers"] if rank == 1 else {**p, "count": None}), params)
        attempt("at last", weighted, params, 1.0)
    attempt("closed", weighted, params, 1.0)
    return found


def test_mistakes_of_one_rank_are_raised_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(RANKS, failures)
    for name in ("after", "after that", "at last"):
        assert first[name] == second[name] == "", name
    assert second["weight"].startswith("WeightError")
    assert "PeerError" in first["weight"]
    for name in ("shape", "shape after"):
        assert second[name].startswith("TreeMismatchError")
        assert "leaf 'bias'" in second[name]
        assert "float32 of shape (7,)" in second[name]
        assert "float32 of shape (6,)" in second[name]
        assert "leaf 'bias'" in first[name]
    assert "does not have the expected leaves" in second["paths"]
    assert "PeerError" in first["paths"]
    assert "is closed" in first["closed"]


def turned(params: Params, x: Tensor) -> Tensor:
    """A loss whose layers run in the opposite order."""
    return loss_fn({**params, "layers": params["layers"][::-1]}, x)


def first_steps(rank: int, world_size: int, name: str) -> Any:
    """Two steps of ranks that trace different graphs, before the plan is rebuilt."""
    params, x = make_params(), batch(rank)
    results = []
    for compiles in (True, False):
        torch._dynamo.reset()
        with fddp.GradSync(params, **SMALL) as sync:
            step = partial(sync.value_and_grad(turned if rank else loss_fn), x=x)
            given = params
            if name == "a missing leaf":
                step = sync
                given = {**params, "bias": None if rank else x[0], "count": None}
            runs = compiles and not (name == "one graph" and rank == 0)
            run = torch.compile(step, backend="aot_eager", fullgraph=True) if runs else step
            results.append([run(given) for _ in range(3)])
            results.append([*sync.plan.order])
    pairs = zip(*map(tree_leaves, results[::2]), strict=True)
    return [torch.equal(a, b) for a, b in pairs if a is not b], results[1]


@pytest.mark.parametrize("name", ["another order", "one graph", "a missing leaf"])
def test_ranks_with_other_graphs_take_the_first_step_and_then_rank_0s_plan(
    ranks: RankPool, name: str
) -> None:
    (equal, order), (other, same) = ranks.run(RANKS, first_steps, name)
    assert order == same
    assert all(equal)
    assert all(other)


class Interrupted(torch.fx.Interpreter):
    """Runs a graph, and stops behind its second start if it is to."""

    stops = False

    def run_node(self, node: torch.fx.Node) -> Any:
        result = super().run_node(node)
        if "start_gradients" in str(node.args[1:2]):
            self.starts = getattr(self, "starts", 0) + 1
            if Interrupted.stops and self.starts == 2:
                raise KeyboardInterrupt
        return result


def interrupted(rank: int, world_size: int, then: str) -> list[str]:
    """Errors of a step that rank 1 leaves between buckets, and of what follows."""
    torch._dynamo.reset()
    params, found = make_params(), []

    def run(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(lambda *args: Interrupted(graph).run(*args))

    sync = fddp.GradSync(params, **SMALL)
    step = sync.value_and_grad(loss_fn)
    compiled = torch.compile(step, backend=aot_autograd(fw_compiler=run), fullgraph=True)
    compiled(params, batch(rank))
    Interrupted.stops = rank == 1
    calls: dict[str, Callable[..., Any]] = {"graph": compiled, "eager": step}
    for call in (compiled, calls.get(then, lambda *_: sync.close())):
        try:
            call(params, batch(rank))
            found.append("")
        except (KeyboardInterrupt, fddp.errors.FddpError) as error:
            found.append(f"{type(error).__name__}: {error}")
        Interrupted.stops = False
    with sync.rebuild() as again:
        again({**params, "count": None})
    return found


@pytest.mark.parametrize("then", ["graph", "eager", "close"])
def test_a_step_that_is_interrupted_between_buckets_is_an_error_on_all_ranks(
    ranks: RankPool, then: str
) -> None:
    (lost, _), (own, later) = ranks.run(RANKS, interrupted, then)
    assert "lost rank 1" in lost
    assert own.startswith("KeyboardInterrupt")
    if then != "close":
        assert later.startswith("ClosedError")
        assert "a graph was interrupted between the buckets of a step" in later


def broken_by_the_loss(rank: int, world_size: int) -> list[str]:
    torch._dynamo.reset()
    params, found = make_params(), []

    def fails(params: Params, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if rank == 1:
            raise ValueError("a bad batch")
        return loss_fn(params, x)

    with fddp.GradSync(params, **SMALL) as sync:
        for loss in (fails, loss_fn):
            try:
                step = torch.compile(sync.value_and_grad(loss), backend="aot_eager")
                step(params, batch(rank))
                found.append("")
            except (ValueError, fddp.errors.PeerError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_an_error_of_a_loss_that_breaks_the_graph_is_raised_on_all_ranks(ranks: RankPool) -> None:
    (peer, after), (own, also_after) = ranks.run(RANKS, broken_by_the_loss)
    assert own == "ValueError: a bad batch"
    assert peer.startswith("PeerError")
    assert "a bad batch" in peer
    assert after == also_after == ""


def unused_on_all(rank: int, world_size: int) -> Any:
    torch._dynamo.reset()
    grads: Params = {"a": torch.ones(2), "b": torch.ones(3, 4).mT if rank == 0 else None}
    with fddp.GradSync({"a": torch.ones(2), "b": torch.ones(3, 4).mT}) as sync:
        step = torch.compile(
            lambda grads: sync(grads, weight=float(rank), with_info=True),
            backend="aot_eager",
            fullgraph=True,
        )
        mean, _ = step(grads)
        assert sync.graph_info is not None
        return sync.graph_info.unused, mean["b"]


def test_a_leaf_without_weight_is_unused(ranks: RankPool) -> None:
    (unused, zeros), (other, missing) = ranks.run(RANKS, unused_on_all)
    assert unused == other == ("b",)
    assert torch.equal(zeros, torch.zeros(4, 3))
    assert torch.equal(missing, zeros)


UNFIT: dict[str, dict[str, Any]] = {
    "virtual ranks": {"virtual_ranks": 4},
    "shards": {"algorithm": "reduce_scatter"},
    "states": {"hook": fddp.hooks.top_k(0.5)},
    "skip": {"nonfinite": "skip"},
    "sparse": {"sparse": ["bias"]},
}


def broken(rank: int, world_size: int) -> list[str]:
    texts = []
    params = {"bias": torch.zeros(6), "w": torch.ones(6)}
    for options in UNFIT.values():
        torch._dynamo.reset()
        with fddp.GradSync(params, **options) as sync:
            try:
                torch.compile(lambda p: sync(p), backend="aot_eager", fullgraph=True)(params)
                texts.append("")
            except torch._dynamo.exc.Unsupported as error:
                texts.append(str(error))
    torch._dynamo.reset()
    with fddp.GradSync(params, nonfinite="skip") as sync:
        mean = torch.compile(lambda p: sync(p), backend="aot_eager")(params)
    assert torch.equal(mean["w"], params["w"])
    return texts


def test_other_steps_break_the_graph(ranks: RankPool) -> None:
    for texts in ranks.run(RANKS, broken):
        for text in texts:
            assert "take other steps outside of the compiled function" in text


def transformed(rank: int, world_size: int) -> list[str]:
    """Errors of steps within transforms, in graphs and in eager mode."""
    params, found = {"w": torch.ones(2)}, []
    with fddp.GradSync(fddp.plan_buckets(params)) as sync:
        steps = {
            "grad": torch.func.grad(lambda p: sync(p)["w"].square().sum()),
            "vmap": torch.vmap(sync),
        }
        for step in steps.values():
            for fullgraph in (True, False):
                torch._dynamo.reset()
                try:
                    compiled = torch.compile(step, backend="aot_eager", fullgraph=fullgraph)
                    compiled({"w": torch.ones(2, 2)} if step is steps["vmap"] else params)
                    found.append("")
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")
    return found


def test_steps_within_transforms_are_errors(ranks: RankPool) -> None:
    for unfit, eager, *more in ranks.run(RANKS, transformed):
        assert more[0].startswith("Unsupported")
        assert unfit.startswith("Unsupported")
        assert "a transform of torch.func" in unfit
        for text in (eager, more[1]):
            assert text.startswith("TransformError")
            assert "inside torch.func" in text


def in_a_loopback(group: Any) -> None:
    torch._dynamo.reset()
    params = {"w": torch.ones(2)}
    with fddp.GradSync(params, group=group) as sync:
        step = torch.compile(lambda p: sync(p), backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="ranks that are threads"):
            step(params)


def test_steps_of_threads_break_the_graph() -> None:
    fddp.loopback(1, in_a_loopback)
