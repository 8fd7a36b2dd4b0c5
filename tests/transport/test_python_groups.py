"""Groups whose class is written in Python."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.transport import open_transport
from fddp.transport.torch_private import name_of, process_groups
from tests.support.polling import soon
from tests.support.ranks import run_fresh


class Done(dist.Work):
    """A work that has finished."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Unregistered(dist.ProcessGroup):
    """A group that torch did not create, with the collectives of one rank."""

    def __init__(self, size: int = 1) -> None:
        super().__init__(0, size)

    def getBackendName(self) -> str:  # noqa: N802
        return "alone"

    def allreduce(self, tensors: Any, options: Any = None) -> Done:
        return Done(tensors)


class Counted(dist.ProcessGroup):
    """gloo, with a count of its all-reduces."""

    calls = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "counted"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        Counted.calls += 1
        return self._gloo.allreduce(tensors, options or dist.AllreduceOptions())

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs, options or dist.AllgatherOptions())

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self._gloo.broadcast(tensors, options or dist.BroadcastOptions())

    def alltoall_base(self, *args: Any) -> Any:
        return self._gloo.alltoall_base(*args)

    def barrier(self, options: Any = None) -> Any:
        return self._gloo.barrier(options or dist.BarrierOptions())


def _gradient(group: Any, factor: float = 1.0) -> torch.Tensor:
    model = torch.nn.Linear(2, 1, bias=False)
    ddp = fddp.DistributedDataParallel(model, process_group=group)
    (ddp(torch.ones(1, 2)).sum() * factor).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def test_an_unregistered_group_of_one_rank_serves() -> None:
    group = Unregistered()
    assert _gradient(group).tolist() == [[1.0, 1.0]]
    assert fddp.pmean(torch.ones(2), group).tolist() == [1.0, 1.0]
    tree = {"w": torch.ones(2)}
    with fddp.GradSync(tree, group=group) as sync:
        assert sync(tree)["w"].tolist() == [1.0, 1.0]


def test_an_unregistered_group_of_several_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 ranks is not registered .*register_backend"):
        fddp.pmean(torch.ones(2), Unregistered(2))


def registered_on_rank(rank: int, world_size: int) -> None:
    errors: list[Any] = []  # of threads that free communicators
    threading.excepthook = sys.excepthook = lambda *args: errors.append(args)
    dist.Backend.register_backend("counted", Counted, devices=["cpu"])
    group = dist.new_group(backend="counted")
    assert _gradient(group, rank + 1.0).tolist() == [[1.5, 1.5]]
    mean = fddp.pmean(torch.tensor([float(rank)]), group)
    assert mean.item() == 0.5
    before = {*process_groups()}
    with (
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as made,
        open_transport(group, "c10d", timeout_s=45.0) as transport,  # the others share memory
    ):
        total = torch.tensor([rank + 1.0])
        transport.all_reduce(total).wait("the sum")
        own = {each: name_of(each) for each in process_groups() if each not in before}
    assert own
    assert (total.item(), Counted.calls) == (3.0, 1)
    assert {call.kwargs["timeout"] for call in made.call_args_list} == {timedelta(seconds=45)}
    assert soon(lambda: not own.keys() & {*process_groups()})
    for name in own.values():
        with pytest.raises(RuntimeError):
            dist.distributed_c10d._resolve_process_group(name)
    assert errors == []


def test_a_registered_group_serves_several_ranks() -> None:
    for rank in run_fresh(2, registered_on_rank):
        assert rank.error is None, rank.error
