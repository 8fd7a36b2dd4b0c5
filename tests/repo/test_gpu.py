"""NCCL, kernel launches and the benchmark on a CUDA device.

NCCL does not take several ranks on one device, so there is one rank. `tests/lag` has what runs on
any accelerator.
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
from fddp.tree.pytree import map_leaves
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss, same_bits

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


def _cpu(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cpu(), tree)


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


def test_nccl_averages_cuda_gradients(nccl: None) -> None:
    _check([_train(0, 1, 3)], 3)


def test_replays_of_a_captured_step_are_steps(nccl: None) -> None:
    params, x = _cuda(mlp()), batch(0, 0).cuda()
    with fddp.GradSync(params, report="next", **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        for _ in range(3):
            step(params, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, grads = step(params, x)
        sync.check()
        for number in range(3):
            x.copy_(batch(0, number))
            graph.replay()
            assert same_bits([_cpu(grads), _cpu(step(params, x)[1])])


def test_a_step_that_can_not_be_captured_is_an_error(nccl: None) -> None:
    params, x = _cuda(mlp()), batch(0, 0).cuda()
    with fddp.GradSync(params, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        _, expected = step(params, x)
        found: list[str] = []
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x * 2  # torch warns of empty graphs
            try:
                step(params, x)
            except fddp.TransformError as error:
                found.append(str(error))
        assert "pass report='next'" in found[0]
        assert same_bits([_cpu(expected), _cpu(step(params, x)[1])])


def _iterate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_replays_of_a_captured_iteration_are_iterations(nccl: None) -> None:
    stream, x = torch.cuda.Stream(), torch.randn(4, 8, device="cuda")
    torch.manual_seed(0)
    nets = [torch.nn.Linear(8, 8).cuda() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ddps = [fddp.DistributedDataParallel(net, report="next") for net in nets]
        optimizers = [torch.optim.Adam(net.parameters(), capturable=True) for net in nets]
        for each in zip(ddps, optimizers, strict=True):
            for _ in range(3):
                _iterate(*each, x)
        optimizers[0].zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            _iterate(ddps[0], optimizers[0], x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            _iterate(ddps[1], optimizers[1], x)
        assert same_bits([_cpu(net.state_dict()) for net in nets])


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
