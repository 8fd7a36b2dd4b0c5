"""Steps, operators and the wrapper on a device that lags, over two processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.transport.c10d.device_clock import DeviceClock
from tests import lag
from tests.lag import scenarios
from tests.lag.rank import SMALL, Rank, module, on_two_ranks
from tests.support.models import batch, mlp, mlp_loss


def run_on_rank(rank: int, world_size: int, *args: Any) -> None:
    scenarios.run(rank, *args)


def check(names: tuple[str, ...], backend: str, seeds: range = range(1)) -> None:
    on_two_ranks(run_on_rank, names, backend, seeds)


def test_all_results_are_those_of_the_cpu(lagging: str) -> None:
    check(tuple(scenarios.SCENARIOS), "lag:lag")


# Of each kind of collective, and of failures.
ON_NCCL = (
    *("value_and_grad", "noise", "shards", "operators", "compressed", "sparse", "deterministic"),
    *("virtual_ranks_with_times", "closed_in_flight", "closed_with_handles", "wrapped", "hooked"),
    *("trained_within_a_stream", "skipped_later", "raised_later", "wrapped_skips_later"),
    *("captured", "captured_shards", "captured_skips", "captured_module"),
    *("refused", "refused_module", "closed_with_work_in_flight"),
)


def test_results_over_a_double_of_nccl_are_those_of_the_cpu(lagging: str) -> None:
    check(ON_NCCL, "lag:nccl")


@pytest.mark.parametrize("backend", ["lag:basic", "lag:sums"])
def test_a_backend_needs_neither_averages_nor_a_reduce_scatter(lagging: str, backend: str) -> None:
    check(("value_and_grad", "mean_of_gradients", "shards", "operators"), backend)


@pytest.mark.nightly
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_with_other_delays(lagging: str, name: str) -> None:
    for backend in ("lag:lag", "lag:nccl"):
        check((name,), backend, range(1, 21))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_on_a_gpu(name: str) -> None:
    check((name,), "cuda:gloo")


def waits_on_rank(rank: int, world_size: int, *backends: str) -> list[dict[str, list[str]]]:
    return [waits_over(rank, backend) for backend in backends]


def waits_over(rank: int, backend: str) -> dict[str, list[str]]:
    waits, found = lag.load(), {}
    group = dist.new_group(backend=backend)
    device = torch.device("lag", 0)
    own = Rank(rank, group, group, device)
    params, x = own.put(mlp()), own.put(batch(rank, 0))

    def count(
        name: str,
        call: Callable[[], Any],
        before: int = 2,
        ready: Callable[[], Any] = lambda: None,
    ) -> None:
        for _ in range(before):
            call()
        ready()
        waits.take_waits()
        call()
        found[name] = waits.take_waits()

    with fddp.GradSync(params, group=group, **SMALL) as sync:
        assert len(sync.plan.buckets) > 2
        step, informed = (sync.value_and_grad(mlp_loss, with_info=flag) for flag in (False, True))
        count("value_and_grad", partial(step, params, x))
        count("value_and_grad, with_info", partial(informed, params, x))
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        count("value_and_grad in a graph", partial(compiled, params, x))
        grads = step(params, x)[1]
        count("sync", partial(sync, grads))
    with fddp.GradSync(params, group=group, algorithm="reduce_scatter", **SMALL) as sync:
        count("shards", lambda: sync.all_gather(sync.reduce_scatter(grads)))
    later: dict[str, Any] = {"group": group, "report": "next", **SMALL}
    for policy in ("skip", "raise"):
        with fddp.GradSync(params, nonfinite=policy, **later) as sync:
            step = sync.value_and_grad(mlp_loss)
            count(f"{policy} later", partial(step, params, x), ready=sync.check)
            sync.check()
            found[f"{policy} later, check"] = waits.take_waits()
        with fddp.GradSync(params, nonfinite=policy, algorithm="reduce_scatter", **later) as sync:
            count(f"{policy} later, shards", partial(sync.reduce_scatter, grads), ready=sync.check)
    net = fddp.DistributedDataParallel(
        module(device), process_group=group, report="next", nonfinite="skip"
    )
    y = batch(rank, 0).to(device)
    count("wrapper, skip later", lambda: net(y).sum().backward(), before=11)
    count("pmean", lambda: fddp.pmean(grads, group))
    net = fddp.DistributedDataParallel(module(device), process_group=group)
    x = batch(rank, 0).to(device)
    # The first steps are measured, which waits.
    count("wrapper", lambda: net(x).sum().backward(), before=11)

    def backward_outside() -> None:
        with net.no_sync():
            y = net(x)
        y.sum().backward()

    count("wrapper, no_sync", backward_outside)
    return found


def test_the_host_waits_for_the_device_only_for_norms_and_times(lagging: str) -> None:
    backends = "cpu:gloo,lag:lag", "lag:lag", "lag:nccl"
    for found in itertools.chain(*on_two_ranks(waits_on_rank, *backends)):
        to_read = {"copy to the host", "synchronize of an event"}  # norms, and when sums ended
        informed = found.pop("value_and_grad, with_info")
        assert {*informed} <= to_read
        assert informed.count("copy to the host") == 1, informed
        assert found.pop("raise later, check") == ["synchronize of an event"]
        assert not any(found.values()), found


def ahead_on_rank(rank: int, world_size: int) -> None:
    lag.load()
    group = dist.new_group(backend="cpu:gloo,lag:lag")
    device = torch.device("lag", 0)
    own = Rank(rank, group, group, device)
    params, x = own.put(mlp()), own.put(batch(rank, 0))
    net = fddp.DistributedDataParallel(module(device)[:1], process_group=group, report="next")
    y = batch(rank, 0).to(device)
    with fddp.GradSync(params, group=group, report="next", **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        for take in (lambda: step(params, x), lambda: net(y).sum().backward()):
            for _ in range(
                12
            ):  # the first of a wrapper are measured, and read their report at once
                take()
            if rank == 1:
                dist.barrier()  # until the step of rank 0 has returned
            take()
            if rank == 0:
                dist.barrier()


def test_with_later_reports_the_host_waits_for_no_other_rank(lagging: str) -> None:
    on_two_ranks(ahead_on_rank)


def clock_on_rank(rank: int, world_size: int) -> bool:
    issued = lag.load().Moment()
    lag.load().hold(0, issued)
    making = threading.Thread(target=DeviceClock, args=(torch.device("lag", 0),))
    making.start()
    making.join(20.0)
    is_made = not making.is_alive()
    issued.end()
    making.join()
    return is_made


def test_a_clock_does_not_wait_for_work_on_the_device(lagging: str) -> None:
    assert on_two_ranks(clock_on_rank) == [True, True]


def buffers_on_rank(rank: int, world_size: int) -> list[str]:
    waits = lag.load()
    group = dist.new_group(backend="cpu:gloo,lag:lag")
    device = torch.device("lag", 0)
    net = fddp.DistributedDataParallel(module(device), process_group=group)
    x = batch(rank, 0).to(device)
    for _ in range(3):
        waits.take_waits()
        net(x)
        found: list[str] = waits.take_waits()
    return found


def test_a_forward_that_broadcasts_buffers_does_not_wait_for_the_device(lagging: str) -> None:
    assert on_two_ranks(buffers_on_rank) == [[], []]


def clocks_on_rank(rank: int, world_size: int) -> tuple[bool, bool]:
    lag.load()
    group, device = dist.new_group(backend="cpu:gloo,lag:lag"), torch.device("lag", 0)
    own = Rank(rank, group, group, device)
    params, x = own.put(mlp()), own.put(batch(rank, 0))
    found = []
    with fddp.GradSync(params, group=group, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss, with_info=True)
        for lasts_s in (60.0, 60.0, -1.0):
            with mock.patch("fddp.transport.c10d.device_clock._LASTS_S", lasts_s):
                step(params, x)
            (communicator,) = [
                each for each in sync._engine.transport._opened if device in each._clocks
            ]
            found.append(communicator._clocks[device])
    return found[1] is found[0], found[2] is found[1]


def test_a_clock_is_replaced_before_its_numbers_are_coarse(lagging: str) -> None:
    assert on_two_ranks(clocks_on_rank) == [(True, False)] * 2
