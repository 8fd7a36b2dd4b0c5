"""Communicators over NCCL, on a double of its backend."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import fddp
from fddp.transport import open_transport
from fddp.transport.c10d import nccl
from fddp.transport.c10d.communicator import Communicator
from fddp.transport.operation import Operation
from tests import lag
from tests.lag.captures import capture
from tests.lag.rank import CAP, SMALL, Rank, mean_square, means, module, on_two_ranks
from tests.support.endings import ending
from tests.support.models import batch, mean_gradients, mlp, mlp_loss
from tests.support.ranks import run_fresh


def opened(rank: int, backend: str = "cpu:gloo,lag:nccl", **options: Any) -> Rank:
    lag.load()
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=60), **options)
    return Rank(rank, group, group, torch.device("lag", 0))


def gradients(own: Rank, number: int) -> Any:
    return torch.func.grad(mlp_loss)(own.put(mlp()), own.put(batch(own.number, number)))


def on_device(sync: fddp.GradSync) -> list[Communicator]:
    """Communicators of a sync that serve the device."""
    by_group = sync._engine.transport._communicators.values()
    return [each["lag"] for each in by_group if "lag" in each]


# Connections


def bind(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect a group as `init_process_group(device_id=)` does."""
    group.bound_device_id = device
    group._get_backend(device).eager_connect_single_device(device)


def connections_on_rank(rank: int, world_size: int, is_bound: bool) -> list[list[str]]:
    device = lag.load()
    theirs = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    theirs.config.min_ctas = 4
    own = opened(rank, pg_options=theirs)
    if is_bound:
        bind(own.group, own.device)
    device.take_connections()
    params, found = own.put(mlp()), []
    with fddp.GradSync(params, group=own.group, timeout_s=45, **SMALL) as sync:
        found.append(device.take_connections())
        for number in range(3):
            own.check(sync(gradients(own, number)), means(number))
    ddp = fddp.DistributedDataParallel(module(own.device), process_group=own.group)
    found.append(device.take_connections())
    ddp(own.put(batch(rank, 0))).sum().backward()
    found.append(device.take_connections())
    for src in range(2):
        fddp.broadcast(params, src, group=own.group)
    found.append(device.take_connections())
    return found


@pytest.mark.parametrize("is_bound", [False, True])
def test_communicators_are_connected_at_construction(lagging: str, is_bound: bool) -> None:
    made = f"{'split' if is_bound else 'new'} on 0, priority 1, min_ctas 4, timeout"
    at_sync, in_step = [f"{made} 45 s"], list[str]()
    at_wrapper = in_broadcasts = [f"{made} 60 s"]
    assert on_two_ranks(connections_on_rank, is_bound) == [
        [at_sync, at_wrapper, in_step, in_broadcasts] for _ in range(2)
    ]


def test_a_connection_that_a_capture_refuses_is_made_later() -> None:
    backends, place = nccl.NcclBackends(is_shared=False), torch.device("cpu")
    with (
        mock.patch.object(nccl, "is_capturing", return_value=True),
        pytest.raises(fddp.TransformError, match="call it once before the capture"),
    ):
        backends.connects((0, 1), place)
    assert [backends.connects((0, 1), place) for _ in range(2)] == [True, False]


def split_in_flight_on_rank(rank: int, world_size: int) -> None:
    own, there = opened(rank), torch.device("lag", 1)
    bind(own.group, there)
    begun, ones = lag.load().Moment(), torch.ones(3, device=there)
    lag.load().hold(1, begun)
    own.group.allreduce([ones])
    threading.Timer(2.0, begun.end).start()
    with fddp.GradSync(ones, group=own.group) as sync:
        own.check(sync(ones), torch.full((3,), 2.0))


def test_a_split_awaits_the_operations_of_its_parent(lagging: str) -> None:
    """On its device, which is not the current one."""
    on_two_ranks(split_in_flight_on_rank)


def on_two_devices_on_rank(rank: int, world_size: int) -> list[int]:
    own, places = opened(rank), [torch.device("lag", index) for index in range(2)]
    params = [torch.ones(4, device=device) for device in places]
    with fddp.GradSync(params, group=own.group) as sync:
        before = len(lag.load().take_connections())
        own.check(sync(params), [torch.ones(4)] * 2)
    return [before, len(lag.load().take_connections())]


def test_both_devices_are_connected_at_construction(lagging: str) -> None:
    assert on_two_ranks(on_two_devices_on_rank) == [[2, 0]] * 2


def of_a_subgroup_on_rank(rank: int, world_size: int) -> list[int]:
    lag.load()
    group = dist.new_group([1, 2], backend="cpu:gloo,lag:nccl")
    if rank == 0:
        return []
    with fddp.GradSync(torch.ones(8, device="lag"), group=group) as sync:
        (communicator,) = on_device(sync)
        found: list[int] = communicator.backend.options.global_ranks_in_group
    return found


def test_a_communicator_of_a_subgroup_knows_the_global_ranks(lagging: str) -> None:
    """By which NCCL names ranks in what it reports."""
    outcomes = run_fresh(3, of_a_subgroup_on_rank, timeout_s=280)
    assert [outcome.result for outcome in outcomes] == [[], [1, 2], [1, 2]], outcomes


def left_on_rank(rank: int, world_size: int) -> Any:
    own = opened(rank)
    params = own.put(mlp())
    sync = fddp.GradSync(params, group=own.group, timeout_s=20, **SMALL)
    own.check(sync(params), mlp())
    if rank == 2:
        os._exit(0)
    found = ending(partial(sync, params))
    assert found.kinds[0] == "RankLostError", found
    sync = sync.rebuild()
    own.check(sync(params), mlp())
    group: Any = sync._engine._group()
    limits = [group._get_backend(torch.device(place)).options._timeout for place in ("cpu", "lag")]
    return sync.schedule.scaling, limits, lag.load().take_connections() != []


def test_ranks_that_are_left_go_on(lagging: str) -> None:
    """On communicators of their own, in a group with the time limits of the first one."""
    outcomes = run_fresh(3, left_on_rank, timeout_s=280)
    expected = ("average", [timedelta(seconds=60)] * 2, True)
    assert [each.result for each in outcomes] == [expected, expected, None], outcomes


def along_axes_on_rank(rank: int, world_size: int) -> int:
    own = opened(rank)
    mesh = fddp.Topology(host=2, local=1)
    options: dict[str, Any] = {"group": own.group, "mesh": mesh, "algorithm": "hierarchical"}
    with fddp.GradSync(own.put(mlp()), **options, **SMALL) as sync:
        before = len(lag.load().take_connections())
        for number in range(2):
            own.check(sync(gradients(own, number)), means(number))
    assert lag.load().take_connections() == []
    return before


def test_groups_along_axes_are_connected_at_construction(lagging: str) -> None:
    assert on_two_ranks(along_axes_on_rank) == [1, 1]  # the axis of all ranks


def along_two_axes_on_rank(rank: int, world_size: int, backend: str, is_bound: bool) -> list[int]:
    own = opened(rank, f"cpu:gloo,{backend}")
    if is_bound:
        bind(own.group, own.device)
        lag.load().take_connections()
    mesh = fddp.Topology(host=2, local=2)
    options: dict[str, Any] = {"group": own.group, "mesh": mesh, "algorithm": "hierarchical"}
    inputs = [(batch(each, 0),) for each in range(world_size)]
    with fddp.GradSync(own.put(mlp()), timeout_s=30, **options, **SMALL) as sync:
        at_construction = len(lag.load().take_connections())
        mean = mean_gradients(mlp_loss, mlp(), inputs, [1.0] * world_size)
        own.check(sync(gradients(own, 0)), mean)
    return [at_construction, len(lag.load().take_connections())]


@pytest.mark.parametrize(
    ("backend", "is_bound", "connections"),
    [("lag:nccl", False, 3), ("lag:nccl", True, 3), ("lag:lag", False, 0)],
)
def test_groups_along_each_of_two_axes_are_connected_at_construction(
    lagging: str, backend: str, is_bound: bool, connections: int
) -> None:
    outcomes = run_fresh(4, along_two_axes_on_rank, backend, is_bound, timeout_s=280)
    assert [outcome.result for outcome in outcomes] == [[connections, 0]] * 4, outcomes


def ends() -> list[str]:
    """How communicators have ended, from the first that does."""
    ended: list[str] = []
    for _ in range(400):
        if ended := lag.load().take_ends():
            break
        time.sleep(0.05)
    return ended


def ends_on_rank(rank: int, world_size: int) -> list[list[str]]:
    """Ends of communicators: of a `GradSync`, of one that fails, of a wrapper whose parameters
    change, and of a group with that of its broadcasts."""
    own, found = opened(rank), []
    with fddp.GradSync(own.put(mlp()), group=own.group, **SMALL) as sync:
        own.check(sync(gradients(own, 0)), means(0))
    found.append(ends())
    sync = fddp.GradSync(own.put(mlp()), group=own.group, **SMALL)
    sync._engine._break(0, KeyboardInterrupt())
    found.append(ends())
    net = module(own.device)
    frozen = next(net.parameters()).requires_grad_(False)
    ddp = fddp.DistributedDataParallel(net, process_group=own.group)
    for number in range(2):
        mean_square(ddp, own.put(batch(rank, number))).backward()
        frozen.requires_grad_(True)
    found.append(ends())
    fddp.broadcast(own.put(mlp()), group=own.group)
    dist.barrier()
    dist.destroy_process_group(own.group)
    del own, sync, ddp
    gc.collect()
    found.append(ends())
    return found


def test_communicators_are_aborted_only_after_a_failure(lagging: str) -> None:
    expected = [["shut down"], ["aborted"], ["shut down"], ["shut down"]]
    assert on_two_ranks(ends_on_rank) == [expected, expected]


# Collectives of steps


def through_python_on_rank(rank: int, world_size: int, backend: str) -> dict[str, list[str]]:
    """Collectives on the device that Python starts in a first step, after a rebuild of the plan, in
    a later step, and with info."""
    own, found = opened(rank, f"cpu:gloo,{backend}"), {}
    issue, issued = Communicator.issue, list[str]()

    def noted(self: Communicator, operation: Operation) -> Any:
        if operation.tensor.device == own.device:
            issued.append(operation.kind)
        return issue(self, operation)

    params = own.put(mlp())
    with fddp.GradSync(params, group=own.group, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        with_info = sync.value_and_grad(mlp_loss, with_info=True)
        steps = {"first": step, "rebuilt": step, "later": step, "with info": with_info}
        with mock.patch.object(Communicator, "issue", noted):
            for number, (what, each) in enumerate(steps.items()):
                (communicator,) = on_device(sync)
                before = communicator.issued
                _, grads, *_ = each(params, own.put(batch(rank, number)))
                own.check(grads, means(number))
                assert communicator.issued == before + len(sync.plan.buckets)
                found[what] = issued[:]
                issued.clear()
        assert found["with info"] == ["all_reduce"] * len(sync.plan.buckets)
    return found


@pytest.mark.parametrize("backend", ["lag:nccl", "lag:lag"])
def test_python_starts_only_what_connects_a_device_or_is_timed(lagging: str, backend: str) -> None:
    for found in on_two_ranks(through_python_on_rank, backend):
        assert found["first"] == ["all_reduce"]
        assert found["rebuilt"] == found["later"] == []


def on_devices(own: Rank) -> list[torch.Tensor]:
    """A leaf on each device."""
    return [torch.ones(4, device=device) for device in (own.device, own.other)]


def connected_in_turn_on_rank(rank: int, world_size: int, backend: str) -> list[list[str]]:
    """Devices of the collectives that Python starts in each of two steps."""
    own = opened(rank, f"cpu:gloo,{backend}")
    params, issue, found = on_devices(own), Communicator.issue, list[list[str]]()

    def noted(self: Communicator, operation: Operation) -> Any:
        found[-1].append(str(operation.tensor.device))
        return issue(self, operation)

    with (
        fddp.GradSync(params, group=own.group) as sync,
        mock.patch.object(Communicator, "issue", noted),
    ):
        for _ in range(2):
            found.append([])
            own.check(sync(params), [torch.ones(4)] * 2)
    return found


@pytest.mark.parametrize("backend", ["lag:nccl", "lag:lag"])
def test_python_connects_each_device(lagging: str, backend: str) -> None:
    for first, later in on_two_ranks(connected_in_turn_on_rank, backend):
        assert sorted(first) == ["lag:0", "lag:1"]
        assert later == []


def held_on_rank(rank: int, world_size: int, backend: str) -> None:
    own = opened(rank, f"cpu:gloo,{backend}")
    params = on_devices(own)
    with fddp.GradSync(params, group=own.group) as sync:
        for _ in range(2):
            own.check(sync(params), [torch.ones(4)] * 2)
        (communicator,) = on_device(sync)
        for index in range(2):
            begun = lag.load().Moment()
            lag.load().hold(index, begun)
            handle = sync.start(params)
            time.sleep(0.3)
            assert communicator.in_flight
            begun.end()
            own.check(handle.wait(), [torch.ones(4)] * 2)


@pytest.mark.parametrize("backend", ["lag:nccl", "lag:lag"])
def test_operations_of_either_device_are_in_flight(lagging: str, backend: str) -> None:
    """Though those of the other one have ended."""
    on_two_ranks(held_on_rank, backend)


def debugged_on_rank(rank: int, world_size: int) -> list[bool]:
    own, found = opened(rank), []
    for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
        dist.set_debug_level(level)
        with fddp.GradSync(own.put(mlp()), group=own.group, **SMALL) as sync:
            own.check(sync(gradients(own, 0)), means(0))
            (communicator,) = on_device(sync)
            found.append(communicator.stream_backend("lag") is not None)
    return found


def test_python_starts_all_that_torch_compares(lagging: str) -> None:
    """Under `TORCH_DISTRIBUTED_DEBUG=DETAIL`."""
    assert on_two_ranks(debugged_on_rank) == [[True, False]] * 2


def closed_in_flight_on_rank(rank: int, world_size: int, backend: str) -> None:
    own = opened(rank, f"cpu:gloo,{backend}")
    options: dict[str, Any] = {"group": own.group, "report": "next", **SMALL}
    with fddp.GradSync(own.put(mlp()), **options) as sync:
        own.check(sync(gradients(own, 0)), means(0))
        grads, begun = gradients(own, 1), lag.load().Moment()
        lag.load().hold(0, begun)
        handle = sync.start(grads)
        sync._engine.close("it was closed by another thread")
        sync._engine.closed_by = ""  # as if it had not been when the handle looked
        with pytest.raises(fddp.ClosedError, match="closed by another thread"):
            handle.wait()
        begun.end()
    dist.barrier()


@pytest.mark.parametrize("backend", ["lag:nccl", "lag:lag"])
def test_a_step_raises_if_it_is_closed_before_its_waits(lagging: str, backend: str) -> None:
    """Even though the host waits for nothing, and streams for what the backend has given up."""
    on_two_ranks(closed_in_flight_on_rank, backend)


def refused_on_rank(rank: int, world_size: int) -> None:
    own = opened(rank)
    with fddp.GradSync(own.put(mlp()), group=own.group, timeout_s=20, **SMALL) as sync:
        own.check(sync(gradients(own, 0)), means(0))
        (communicator,) = on_device(sync)
        communicator.backend.abort()
        with pytest.raises(fddp.FddpError, match=r"all_reduce of torch.float64 \(\d+,\) on rank"):
            sync(gradients(own, 1))


def test_an_operation_that_the_backend_refuses_ends_the_sync(lagging: str) -> None:
    on_two_ranks(refused_on_rank)


# Failures


def failed_on_rank(rank: int, world_size: int) -> None:
    own = opened(rank)
    params = own.put(mlp())
    other = fddp.GradSync(params, group=own.group, **SMALL)
    fails = fddp.GradSync(params, group=own.group, timeout_s=2, **SMALL)
    own.check(fails(gradients(own, 0)), means(0))
    if rank == 0:
        with pytest.raises(fddp.RankLostError):  # the other one closes
            fails(gradients(own, 1))
    fails.close()
    own.check(other(gradients(own, 1)), means(1))
    other.close()
    rank_of_first = fddp.broadcast(own.put(torch.full((3,), float(rank))), group=own.group)
    own.check(rank_of_first, torch.zeros(3))


def test_a_failure_ends_operations_in_flight(lagging: str) -> None:
    on_two_ranks(failed_on_rank)


def awaited_late_on_rank(rank: int, world_size: int) -> None:
    own = opened(rank, "cpu:gloo,lag:lag")
    options: dict[str, Any] = {"group": own.group, "report": "next", **SMALL}
    sync = fddp.GradSync(own.put(mlp()), timeout_s=2, **options)
    for number in range(2):
        own.check(sync(gradients(own, number)), means(number))
    if rank == 0:  # the other one does not take part
        handle = sync.start(gradients(own, 2))
        time.sleep(4.0)
        with pytest.raises(fddp.SyncTimeoutError):
            handle.wait()
    dist.barrier()
    sync.close()


def test_a_step_raises_if_it_is_awaited_after_its_time_limit(lagging: str) -> None:
    """Even though it would report in the next one."""
    on_two_ranks(awaited_late_on_rank)


def half_issued_on_rank(rank: int, world_size: int) -> None:
    own = opened(rank)
    ours = own.put(torch.full((3,), float(rank)))
    own.check(fddp.broadcast(ours, group=own.group), torch.zeros(3))
    with open_transport(own.group, title="broadcast", shares=True) as transport:
        if rank == 0:
            transport.broadcast(torch.full((3,), 7.0, device=own.device), 0)
    lag.load().take_connections()
    with mock.patch.object(dist, "PrefixStore", wraps=dist.PrefixStore) as stores:
        for number in range(3):
            own.check(fddp.broadcast(ours, 1, group=own.group), torch.ones(3))
            assert len(lag.load().take_connections()) == (number == 0)
    prefixes = {call.args[0] for call in stores.call_args_list}
    # Keys of the communicator before would connect ranks to what has ended.
    assert {each.split("/")[2] for each in prefixes if each.startswith("fddp/nccl/")} == {"1"}
    # Both have taken the same number of turns, in another order.
    titled = partial(open_transport, own.group, title="broadcast", shares=True)
    with titled() as first, titled() as second:
        for each in (first, second)[:: 1 - 2 * rank]:
            each.broadcast(torch.full((3,), 7.0, device=own.device), 0).wait("it")
    with capture(own):
        found = ending(lambda: fddp.broadcast(ours, group=own.group))
    assert "call it once before the capture" in found.text, found
    own.check(fddp.broadcast(ours, group=own.group), torch.zeros(3))


def test_a_shared_communicator_is_replaced_if_ranks_have_used_it_differently(lagging: str) -> None:
    on_two_ranks(half_issued_on_rank)


def test_a_communicator_that_was_replaced_is_not_made_again() -> None:
    backends = nccl.NcclBackends(is_shared=True)
    assert backends.get(0, (0, 1), lambda: "first") == "first"
    backends.replace(1)
    with pytest.raises(RuntimeError, match="has ended"):
        backends.get(0, (0, 1), lambda: "second")


def failed_on_one_rank(rank: int, world_size: int) -> list[str]:
    own = opened(rank)
    ours = own.put(torch.full((3,), float(rank)))
    own.check(fddp.broadcast(ours, group=own.group), torch.zeros(3))
    shared = open_transport(own.group, title="broadcast", shares=True, timeout_s=2)
    found: list[str] = []
    if rank == 0:  # the other one does not use it
        shared.broadcast(torch.full((3,), 7.0, device=own.device), 0)
        with pytest.raises(fddp.SyncTimeoutError):
            shared.exchange(b"", "nothing")
        found = ends()
    dist.barrier()
    shared.close()
    own.check(fddp.broadcast(ours, 1, group=own.group), torch.ones(3))
    return found


def test_a_shared_communicator_ends_with_a_failure_of_one_rank(lagging: str) -> None:
    """And is replaced on all."""
    assert on_two_ranks(failed_on_one_rank) == [["aborted"], []]


def overlapping_on_rank(rank: int, world_size: int) -> None:
    own = opened(rank)
    params = own.put(mlp())
    first = fddp.GradSync(params, group=own.group, **SMALL)
    second = fddp.GradSync(params, group=own.group, **SMALL)
    with first, second:
        for number in range(0, 6, 2):
            turns = [(first, gradients(own, number)), (second, gradients(own, number + 1))]
            handles = {sync: sync.start(grads) for sync, grads in turns[:: 1 - 2 * rank]}
            own.check(handles[first].wait(), means(number))
            own.check(handles[second].wait(), means(number + 1))


def test_steps_of_two_syncs_overlap_in_other_orders_on_ranks(lagging: str) -> None:
    """On one communicator the sums would be of gradients of both, without an error."""
    on_two_ranks(overlapping_on_rank)


def closed_in_backward_on_rank(rank: int, world_size: int, backend: str) -> None:
    own = opened(rank, f"cpu:gloo,{backend}")
    options: dict[str, Any] = {"process_group": own.group, "bucket_cap_mb": CAP}
    ddp = fddp.DistributedDataParallel(module(own.device), transport="c10d", **options)
    ddp._set_ddp_runtime_logging_sample_rate(1 << 30)

    def backward(number: int) -> None:
        mean_square(ddp, own.put(batch(rank, number))).backward()

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    for number in range(12):  # then Python starts no collective on the device
        backward(number)
    torch.accelerator.synchronize()
    begun = lag.load().Moment()
    lag.load().hold(0, begun)
    if rank == 0:
        next(iter(ddp.parameters())).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            backward(12)
        ddp._steps.close()
    else:
        # Not by its sockets, which it closes later.
        with pytest.raises(fddp.RankLostError, match="it closed its transport"):
            backward(12)
    begun.end()
    dist.barrier()


@pytest.mark.parametrize("backend", ["lag:nccl", "lag:lag"])
def test_a_rank_that_closes_with_buckets_in_flight_says_so(lagging: str, backend: str) -> None:
    on_two_ranks(closed_in_backward_on_rank, backend)


# Passes over the device's memory


def passes_on_rank(rank: int, world_size: int, backend: str) -> tuple[int, list[str]]:
    own = opened(rank, f"cpu:gloo,{backend}")
    with fddp.GradSync(own.put(mlp()), group=own.group, **SMALL) as sync:
        grads = gradients(own, 0)
        own.check(sync(grads), means(0))
        with torch.profiler.profile() as profile:
            sync(grads)
        kinds = ("copy_", "mul", "div", "zero_", "add_")
        events = [event for event in profile.events() if not event.name.startswith("fddp::")]
        names = [event.name for event in events if _is_of_a_step(event.cpu_parent)]
        passes = [name for name in names if any(kind in name for kind in kinds)]
        return len(sync.plan.buckets), passes


def _is_of_a_step(parent: Any) -> bool:
    """Return True for the parent of what a step calls itself."""
    return parent is None or parent.name.startswith("fddp::")


@pytest.mark.parametrize("backend", ["lag:nccl", "lag:lag"])
def test_a_bucket_takes_one_pass_where_the_backend_averages(lagging: str, backend: str) -> None:
    for buckets, passes in on_two_ranks(passes_on_rank, backend):
        assert passes == ["aten::_foreach_copy_"] * buckets
