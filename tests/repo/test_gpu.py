"""The same path on CUDA tensors: over gloo between processes, and over NCCL.

One device is enough: gloo takes several ranks on it; NCCL does not, so there it is one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fddp
from benchmarks import gpu as gpu_bench
from benchmarks.models import stack
from fddp.cli.progress import Stages
from fddp.native.layout import Layout
from fddp.native.pack import pack_, unpack_
from fddp.tree.pytree import flatten, map_leaves
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss, same_bits
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0001}


@pytest.fixture
def nccl() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _cuda(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cuda(), tree)


def _train(rank: int, world_size: int, steps: int) -> list[tuple[Any, fddp.SyncInfo]]:
    params, results = _cuda(mlp()), []
    with fddp.GradSync(params, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss, with_info=True)
        for number in range(steps):
            _, grads, info = step(params, batch(rank, number).cuda())
            results.append((map_leaves(lambda leaf: leaf.cpu(), grads), info))
    return results


def _check(runs: list[Any], steps: int) -> None:
    for number in range(steps):
        inputs = [(batch(rank, number),) for rank in range(len(runs))]
        expected = mean_gradients(mlp_loss, mlp(), inputs, [1.0] * len(runs))
        for run in runs:
            assert largest_difference(run[number][0], expected) < 1e-12
            assert run[number][1].all_finite
        assert same_bits([run[number][0] for run in runs])


def test_gloo_averages_cuda_gradients(ranks: RankPool) -> None:
    _check(ranks.run(2, _train, 3), 3)


def test_nccl_averages_cuda_gradients(nccl: None) -> None:
    _check([_train(0, 1, 3)], 3)


def test_gradients_made_on_several_streams(nccl: None) -> None:
    params = _cuda(mlp(width=512))
    side = torch.cuda.Stream()

    def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        first, *others = p.values()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = torch.tanh(x @ first["weight"] + first["bias"])
        b = x
        for layer in others:
            b = torch.tanh(b @ layer["weight"] + layer["bias"])
        torch.cuda.current_stream().wait_stream(side)
        return (a * b).square().mean()

    x = batch(0, 0, rows=64, width=512).cuda()
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn)
        for _ in range(5):
            _, grads = step(params, x)
            # `torch.func.grad` of torch 2.11 fails where backward runs on several streams.
            tree = map_leaves(lambda leaf: leaf.detach().requires_grad_(), params)
            loss_fn(tree, x).backward()
            expected = map_leaves(lambda leaf: leaf.grad, tree)
            assert largest_difference(grads, expected) < 1e-12


def test_bfloat16_reduced_in_float32_and_mixed_dtypes(nccl: None) -> None:
    grads = {
        "half": torch.full((300,), 3.0, dtype=torch.bfloat16, device="cuda"),
        "float": torch.arange(6.0, device="cuda").reshape(2, 3).T,
        "complex": torch.full((4,), 1 + 2j, device="cuda").conj(),
        "none": None,
    }
    params = {**grads, "none": torch.zeros(2, device="cuda")}
    with fddp.GradSync(params, reduce_dtype=torch.float32) as sync:
        result, info = sync(grads, with_info=True)
    assert result["none"] is None
    for name in ("half", "float", "complex"):
        assert result[name].dtype == grads[name].dtype
        assert torch.equal(result[name], grads[name].resolve_conj())
    assert info.grad_norm == pytest.approx((300 * 9 + 55 + 20) ** 0.5)


def test_non_finite_gradients_are_reported(nccl: None) -> None:
    grads = {"w": torch.tensor([1.0, float("nan")], device="cuda")}
    with fddp.GradSync(grads) as sync:
        assert not sync(grads, with_info=True)[1].all_finite


def test_sparse_gradients(nccl: None) -> None:
    weight = torch.randn(10, 3, device="cuda", dtype=torch.float64)

    def loss_fn(p: Any, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(index, p["table"], sparse=True).square().sum()

    with fddp.GradSync({"table": weight}, sparse=["table"]) as sync:
        _, grads = sync.value_and_grad(loss_fn)({"table": weight}, torch.tensor([1, 1, 4]).cuda())
    assert flatten(grads)[0][0].is_sparse
    expected = torch.zeros_like(weight)
    expected[1], expected[4] = 4 * weight[1], 2 * weight[4]
    assert torch.allclose(grads["table"].to_dense(), expected)


def test_packing_many_leaves_takes_few_launches(nccl: None) -> None:
    count, numel = 300, 1000
    leaves = [torch.randn(numel, device="cuda") for _ in range(count)]
    layout = Layout(
        tuple(range(0, count * numel, numel)), ((numel,),) * count, ((1,),) * count, count * numel
    )
    buffer = torch.empty(count * numel, device="cuda")
    device_only = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=device_only, acc_events=True) as profile:
        pack_(buffer, layout, leaves, 0.5)
        unpack_(leaves, layout, buffer, 2.0, stats=False)
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if event.device_type.name == "CUDA"]
    if not launches:
        pytest.skip("the profiler sees no kernels here")
    assert len(launches) < count / 4
    assert torch.equal(torch.cat(leaves), buffer * 2.0)


@pytest.fixture
def both_backends() -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    gpu_bench.open_group(device)
    yield device
    dist.destroy_process_group()


def test_the_benchmark_for_a_device(both_backends: torch.device) -> None:
    device = both_backends
    with Stages(shown=False) as stages:
        packed = gpu_bench.packing_times(device, 2, stages, leaves=30, numel=1 << 16)
        steps = gpu_bench.step_times(stack("tiny", layers=4, width=64, rows=8), device, 2, stages)
    figures = gpu_bench.figures(packed, {"tiny": steps})
    assert len(figures) == 4 + 3
    assert all(figure.low > 0.0 for figure in figures)
