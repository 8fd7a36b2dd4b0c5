"""`GradSync` and torch.compile: compiled losses in it, and it in compiled functions."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._dynamo.utils import counters

import fddp
from examples.compiled import Size, example
from fddp.native.untraced import untraced
from fddp.tree import pytree as fddp_tree
from tests.support.models import largest_difference
from tests.support.pages import run_script
from tests.support.random_trees import trees
from tests.support.ranks import RankPool

OPTIONAL = ["torch._dynamo", "torch._inductor", "jax", "optax", "flax", "equinox", "torchopt"]


def test_importing_and_stepping_loads_neither_tracers_nor_other_frameworks() -> None:
    program = f"""
import sys, torch, fddp

def train(group):
    params = {{"w": torch.ones(2)}}
    with fddp.GradSync(params, group=group) as sync:
        sync.value_and_grad(lambda p: p["w"].sum())(params)
        sync(params)
    fddp.pmean(params, group)

fddp.loopback(1, train)
print([name for name in {OPTIONAL} if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr


# Functions that dynamo leaves alone


def test_an_untraced_function_breaks_the_graph_and_nothing_in_it_is_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def helper(x: Tensor) -> Tensor:
        return x * 3

    @untraced("write g instead")
    def f(x: Tensor) -> Tensor:
        return helper(x) + 1

    def whole(x: Tensor) -> Tensor:
        return f(x + 1) * 2

    torch._dynamo.reset()
    counters.clear()
    in_graph = torch.compile(whole, backend=backend)
    assert torch.equal(in_graph(torch.ones(2)), whole(torch.ones(2)))
    # One before the call and one after it; the frames of f and of helper are no graphs.
    assert len(graphs) == counters["frames"]["ok"] == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match="write g instead"):
        torch.compile(whole, backend="eager", fullgraph=True)(torch.ones(2))


# Trees


@given(trees)
def test_trees_have_the_same_paths_in_graphs(tree: Any) -> None:
    try:
        leaves, treedef = fddp_tree.flatten(tree)
    except ValueError as error:
        assert "rename keys" in str(error)  # noqa: PT017  # clashes that cannot be distinguished
        return
    traced_leaves, traced = fddp_tree._traced(tree)
    assert (traced.paths, traced_leaves) == (treedef.paths, leaves)
    named = [f"leaf {k}" for k in range(len(leaves))]
    assert traced.unflatten(named) == treedef.unflatten(named)


def test_tree_map_within_a_graph() -> None:
    def f(p: Any, g: Any) -> Any:
        return fddp.tree_map(lambda a, b: a - b, p, g)

    counts = defaultdict(int, z=torch.ones(1))
    p = {"b": torch.ones(2), "a": [torch.ones(3), (torch.ones(1), None)], "c": counts}
    g = {"a": [torch.ones(3), (None, None)], "b": torch.ones(2), "c": {"z": torch.ones(1)}}
    torch._dynamo.reset()
    result = torch.compile(f, backend="eager", fullgraph=True)(p, g)
    assert list(result) == ["b", "a", "c"]
    assert largest_difference(result, f(p, g)) == 0.0
    assert result["a"][1][1] is None
    assert result["c"].default_factory is int


# GradSync


def synchronise(rank: int, world_size: int) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    params = {"w": torch.randn(3, 4), "v": torch.randn(4)}
    torch.manual_seed(1 + rank)
    x = torch.randn(5, 3)

    def loss_fn(p: Any) -> Tensor:
        return (torch.tanh(x @ p["w"]) @ p["v"]).square().mean()

    with fddp.GradSync(params, bucket_cap_mb=1e-5, first_bucket_mb=1e-5) as sync:
        wanted = sync.value_and_grad(loss_fn)(params)
        step = sync.value_and_grad(torch.compile(loss_fn, backend="aot_eager", fullgraph=True))
        compiled_loss = step(params)

        text = ""
        torch._dynamo.reset()
        try:
            in_place = lambda p: sync.reduce_(p)  # noqa: E731
            torch.compile(in_place, backend="aot_eager", fullgraph=True)(params)
        except torch._dynamo.exc.Unsupported as error:
            text = str(error)
        sync(params)  # that error left all ranks in step
    return largest_difference(compiled_loss, wanted), text


def test_compiled_losses_and_graph_breaks(ranks: RankPool) -> None:
    for compiled_loss, text in ranks.run(2, synchronise):
        assert compiled_loss == 0.0
        assert "a graph can have sync(grads) and steps of sync.value_and_grad" in text


def run_example(rank: int, world_size: int) -> Any:
    torch._dynamo.reset()
    report = example("aot_eager", Size(layers=3, width=16, batch=4, rounds=1))
    return report.passed, [row[0] for row in report.rows], list(report.checks)


def test_the_example(ranks: RankPool) -> None:
    for passed, rows, checks in ranks.run(2, run_example):
        assert passed
        assert [row for row in rows if not row.startswith(" ")] == [
            "eager",
            "one graph",
            "layer by layer",
            "the whole step",
            "with pmean",
        ]
        assert rows.count("  buckets") == 4
        assert len(checks) == 5


@pytest.mark.nightly
def test_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    run_script("docs/compile.md", tmp_path)


def count_graphs(rank: int, world_size: int) -> tuple[int, list[int]]:
    """Return when each bucket was ready, among the ends of graphs."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    in_graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    params = [torch.eye(8) for _ in range(4)]

    def loss_fn(p: list[Tensor]) -> Tensor:
        x = torch.ones(2, 8)
        for k, w in enumerate(p):
            x = in_graph(x, w)
            x.register_hook(lambda _, k=k: graphs.append(k))
        return x.sum()

    with fddp.GradSync(params, bucket_cap_mb=1e-5, first_bucket_mb=1e-5) as sync:
        step = sync.value_and_grad(loss_fn, with_info=True)
        for _ in range(2):
            graphs.clear()
            _, _, info = step(params)
        times = info.timeline.buckets
        ready = sorted(range(len(times)), key=lambda b: times[b].ready_s)
        early = sum(t.launch_s < info.timeline.backward_end_s for t in times)
    return early, ready


def test_buckets_are_launched_between_graphs(ranks: RankPool) -> None:
    for early, ready in ranks.run(2, count_graphs):
        assert ready == sorted(ready)
        assert early >= 3  # of 4; the last one waits for the end of backward
