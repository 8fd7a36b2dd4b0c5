"""Steps that call `torch.distributed` themselves, or by its wrappers and tensors."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.func import grad

import fddp
from fddp.extend import Operation, Rendezvous, mirrored, mirrored_process_group
from fddp.testing import check_replication

PARAMS, BATCH = {"w": torch.ones(4)}, torch.rand(8, 4)


def gradient(params, batch):
    return grad(lambda p: (batch @ p["w"]).square().mean())(params)["w"]


def descend(params, gradient):
    return {"w": params["w"] - 0.1 * gradient}


def check(step: Callable[..., Any], *replicated: Any) -> None:
    check_replication(step, replicated=replicated or (PARAMS,), varying=(BATCH,))


@pytest.fixture(params=["no group", "a world of one"], autouse=True)
def _world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs without a default group, and with one, which is the same afterwards."""
    if request.param == "no group":
        yield
        assert not dist.is_initialized()
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world, hook = dist.group.WORLD, sys.excepthook
    try:
        yield
        assert (dist.group.WORLD, sys.excepthook) == (world, hook)
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        assert functional.all_reduce(torch.ones(2), "sum", world).tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


# Correct steps


def _sum_divided(params, batch):
    g = gradient(params, batch)
    dist.all_reduce(g)
    return descend(params, g / dist.get_world_size())


def _mean_in_flight(params, batch):
    g = gradient(params, batch)
    work = dist.all_reduce(g, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    return descend(params, g)


def _gathered(params, batch):
    g = gradient(params, batch)
    parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, g)
    return descend(params, torch.stack(parts).mean(0))


def _scattered(params, batch):
    shard, g = torch.empty(2), gradient(params, batch)
    dist.reduce_scatter(shard, [g[:2], g[2:]], op=dist.ReduceOp.AVG)
    halves = [torch.empty(2), torch.empty(2)]
    dist.all_gather(halves, params["w"].view(2, 2)[dist.get_rank()] - 0.1 * shard)
    return {"w": torch.cat(halves)}


def _objects(params, batch):
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, float(batch.sum()))
    config = [0.1 if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(config, src=0)
    dist.barrier()
    mean = sum(losses) / len(losses)
    return {"w": params["w"] * (1 - config[0] * mean)}


def _functional(params, batch):
    g = functional.all_reduce(gradient(params, batch), "avg", dist.group.WORLD)
    return descend(params, functional.wait_tensor(g))


def _of_the_world(params, batch):
    return descend(params, fddp.pmean(gradient(params, batch), dist.group.WORLD))


def _in_pairs(params, batch):
    g = gradient(params, batch)
    dist.all_reduce(g, op=dist.ReduceOp.AVG, group=dist.new_group([0, 1]))
    return descend(params, g)


def _of_dtensors(params, batch):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    g = DTensor.from_local(gradient(params, batch), mesh, [Partial("avg")])
    return descend(params, g.redistribute(mesh, [Replicate()]).to_local())


@pytest.mark.parametrize(
    "step",
    [
        *(_sum_divided, _mean_in_flight, _gathered, _scattered, _objects, _functional),
        *(_of_the_world, _in_pairs, _of_dtensors),
    ],
)
def test_means_of_others_are_means(step: Callable[..., Any]) -> None:
    check(step)


# Faults


def _unsynced(params, batch):
    return descend(params, gradient(params, batch))


def _summed(params, batch):
    g = gradient(params, batch)
    dist.all_reduce(g)
    return descend(params, g)


def _averaged_twice(params, batch):
    g = gradient(params, batch)
    dist.all_reduce(g, op=dist.ReduceOp.AVG)
    dist.all_reduce(g, op=dist.ReduceOp.AVG)
    return descend(params, g)


def _alone(params, batch):
    g = gradient(params, batch)
    if dist.get_rank() == 0:
        dist.barrier()
    dist.all_reduce(g, op=dist.ReduceOp.AVG)
    return descend(params, g)


def _by_rank(params, batch):
    return {"w": params["w"] * (1 + dist.get_rank())}


def _by_environment(params, batch):
    return {"w": params["w"] * (1 + int(os.environ["LOCAL_RANK"]))}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (_unsynced, "it depends on `batch`"),
        (_summed, r"changes with the number of ranks.*all_reduce\(SUM\)"),
        (_averaged_twice, r"all_reduce\(AVG\).*equal on all ranks already"),
        (_alone, "calls torch.distributed.barrier.*another calls torch.distributed.all_reduce"),
        (_by_rank, "it depends on the rank"),
        (_by_environment, "it depends on the rank"),
    ],
)
def test_faults_with_collectives_of_others(step: Callable[..., Any], text: str) -> None:
    with pytest.raises(fddp.ReplicationError, match=f"(?s){text}") as raised:
        check(step)
    assert raised.value.line.startswith(f"{__file__}:")


# Wrappers of modules


def _of_torch(module, optimizer, batch):
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    wrapped(batch).square().mean().backward()
    optimizer.step()


def _around_it(module, optimizer, batch):
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    with wrapped.no_sync():
        wrapped(batch).square().mean().backward()
    optimizer.step()


def test_distributed_data_parallel_of_torch() -> None:
    module = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    check(_of_torch, module, optimizer)
    with pytest.raises(fddp.ReplicationError, match="it depends on `batch`"):
        check(_around_it, module, optimizer)


def test_parts_of_fsdp_may_differ_by_the_rank_alone() -> None:
    def step(module, batch):
        fully_shard(module)
        module(batch).square().mean().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()

    def drifting(module, batch):
        step(module, batch)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.to_local().add_(batch.mean())

    check(step, torch.nn.Linear(4, 3))
    with pytest.raises(fddp.ReplicationError, match=r"module\['bias'\], this rank's part of a"):
        check(drifting, torch.nn.Linear(4, 3))


# What is refused


def test_messages_from_rank_to_rank_are_refused() -> None:
    def step(params, batch):
        dist.send(batch, 1)
        return params

    with pytest.raises(NotImplementedError, match=r"torch.distributed.send can't be simulated"):
        check(step)


@pytest.mark.parametrize("_world", ["a world of one"], indirect=True)
def test_groups_made_before_are_refused() -> None:
    earlier, mesh = dist.group.WORLD, init_device_mesh("cpu", (1,))

    def step(params, batch):
        g = gradient(params, batch)
        dist.all_reduce(g, group=earlier)
        return descend(params, g)

    with pytest.raises(fddp.FddpError, match=r"made before the check.*leave group= out"):
        check(step)
    with pytest.raises(ValueError, match=r"params\['w'\] is a DTensor .* within the step"):
        check(step, {"w": DTensor.from_local(torch.ones(4), mesh, [Shard(0)])})
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"wrapped.* wrap that within the step"):
        check(lambda wrapped, batch: None, torch.nn.Sequential(wrapped))


# The process group itself


def test_results_are_those_of_ranks_that_send_the_same() -> None:
    def unchanged(rendezvous: Rendezvous, operation: Operation, result: Any) -> Any:
        return result

    x = torch.tensor([1.0, 2.0, 4.0])
    with mirrored(0, 3, unchanged) as group, mirrored_process_group(group):
        names = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
        done = {name: x.clone() for name in names}
        for name, tensor in done.items():
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        total, part, parts = x.clone(), torch.empty(1), torch.empty(3)
        dist.reduce(total, 1)
        dist.scatter(part, [*x.split(1)], 0)
        dist.all_to_all_single(parts, x)
        gathered = [torch.empty(3) for _ in range(3)]
        dist.gather(x, gathered, 0)
    assert [t.tolist() for t in done.values()] == [
        *([3.0, 6.0, 12.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 8.0, 64.0])
    ]
    assert total.tolist() == x.tolist()  # rank 1 has the sum
    assert part.tolist() == [1.0]
    assert parts.tolist() == [1.0, 1.0, 1.0]
    assert all(torch.equal(other, x) for other in gathered)
