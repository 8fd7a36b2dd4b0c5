"""Logging data: torch's keys and values, where torch has them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.timeline import BucketTimes, StepTimes
from fddp.ddp.arguments import Arguments, checked
from fddp.ddp.logging_data import Log, StaticLoggingData, Step, is_sampled, start_log
from fddp.tree.planner import plan_buckets
from tests.support.ranks import RankPool

NAN = float("nan")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(4, 4)
        self.a = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(self.a(self.z(x)))
        assert isinstance(y, Tensor)
        return y


def plan_of(module: nn.Module, **given: Any) -> BucketPlan:
    options = checked(module, Arguments(**given))
    plan = plan_buckets(dict(module.named_parameters()))
    caps_bytes = options.initial_caps_bytes
    return plan_leaves(plan.leaves, order=plan.order, caps_bytes=caps_bytes, from_back=True)


def facts_of(module: nn.Module, **given: Any) -> StaticLoggingData:
    return StaticLoggingData(
        module_name=type(module).__name__,
        rank=0,
        world_size=1,
        backend_name="gloo",
        backend_threads=2,
        options=checked(module, Arguments(**given)),
        plan=plan_of(module, **given),
        names=tuple(name for name, _ in module.named_parameters()),
        environment=os.environ,
    )


def step_of(plan: BucketPlan, iteration: int, **changes: Any) -> Step:
    """Gradients of the last registered parameters come first."""
    names = [name for name, _ in Net().named_parameters()]
    leaves_s = tuple(11.0 - names.index(path) / 10 for path in plan.paths)
    buckets = tuple(
        BucketTimes(number, bucket.nbytes, 11.0 + number, 11.0 + number, 13.0 + number)
        for number, bucket in enumerate(plan.buckets)
    )
    step = Step(
        iteration=iteration,
        plan=plan,
        has_rebuilt=iteration > 1,
        times=StepTimes(buckets, 10.0, 12.5, 15.0, leaves_s),
        forward_start_s=9.0,
        clock_ns=1_000_000_000_000,
        reduced=len(buckets),
    )
    return replace(step, **changes)


GIVEN: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True, "bucket_cap_mb": 1},
    {"static_graph": True, "gradient_as_bucket_view": True, "forward_sync_buffers": False},
    {"bucket_cap_mb": 1e-5, "find_unused_parameters": True},
    {"bucket_cap_mb_list": [1e-5, 1]},
]


@pytest.mark.parametrize("given", GIVEN)
def test_a_new_log_is_that_of_torch(ranks: RankPool, given: dict[str, Any]) -> None:
    (runs,) = ranks.run(1, torchs_data, given)
    log = start_log(facts_of(Net(), **given))
    # The ranks' processes have their own environment and threads.
    assert dict(log.data) == runs[0] | {"gloo_num_threads": 2}


def torchs_data(rank: int, world_size: int, given: dict[str, Any]) -> list[dict[str, Any]]:
    """After construction, and after each of three steps."""
    ddp = TorchDDP(Net(), **given)
    runs = [ddp._get_ddp_logging_data()]
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()
        runs.append(ddp._get_ddp_logging_data())
    return runs


@pytest.mark.parametrize("given", GIVEN)
def test_steps_add_the_keys_of_torch(ranks: RankPool, given: dict[str, Any]) -> None:
    (runs,) = ranks.run(1, torchs_data, given)
    # With a static graph torch does so one step later.
    rebuilds = not {"static_graph", "find_unused_parameters"} & given.keys()
    module = Net()
    log = start_log(facts_of(module, **given))
    options = checked(module, Arguments(**given))
    plan = plan_of(module, **given)
    assert runs[1] == dict(log.data) | {"gloo_num_threads": runs[1]["gloo_num_threads"]}
    log = log.recorded(step_of(plan, 1, has_rebuilt=False))
    check_keys(runs[2], log)
    if rebuilds:
        plan = plan_leaves(plan.leaves, order=plan.order, caps_bytes=options.rebuilt_caps_bytes)
    log = log.recorded(step_of(plan, 2, has_rebuilt=rebuilds))
    check_keys(runs[3], log)


def check_keys(torchs: dict[str, Any], log: Log) -> None:
    """All keys, and the values of those that do not depend on the clock."""
    ours = dict(log.data)
    if torchs["num_buckets_reduced"] == 0:  # torch does not look at a static graph's first step
        del ours["prev_iteration_grad_ready_order_indices"]
        torchs["num_buckets_reduced"] = ours["num_buckets_reduced"]
    assert ours.keys() == torchs.keys()
    assert {k: v for k, v in ours.items() if not is_timed(k)} == {
        k: v for k, v in torchs.items() if not is_timed(k)
    } | {"gloo_num_threads": 2}


DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def of_all_dtypes() -> nn.Module:
    module = nn.Module()
    for name in DTYPES:
        setattr(module, f"of_{name}", nn.Parameter(torch.zeros(1, dtype=getattr(torch, name))))
    return module


def test_dtypes_are_named_as_by_torch(ranks: RankPool) -> None:
    (torchs,) = ranks.run(1, torchs_dtypes)
    assert start_log(facts_of(of_all_dtypes())).data["dtypes"] == torchs


def torchs_dtypes(rank: int, world_size: int) -> str:
    names = TorchDDP(of_all_dtypes())._get_ddp_logging_data()["dtypes"]
    assert isinstance(names, str)
    return names


def is_timed(key: str) -> bool:
    return "_time" in key


def test_times_are_nanoseconds() -> None:
    facts = facts_of(Net())
    log = start_log(facts).recorded(step_of(facts.plan, 1))
    second = 1_000_000_000
    times = {key: value for key, value in log.data.items() if is_timed(key)}
    durations = {
        "forward_compute_time": second,
        "backward_compute_time": 2.5 * second,
        "backward_comm_time": 2 * second,
        "backward_compute_comm_overlap_time": 1.5 * second,
    }
    assert times == {
        **durations,
        **{f"avg_{key}": value for key, value in durations.items()},
        "forward_compute_time_start": 1009 * second,
        "backward_compute_time_start": 1010 * second,
        "backward_compute_time_end": 1012.5 * second,
        "backward_comm_time_start": 1011 * second,
        "backward_comm_time_end": 1013 * second,
    }


def test_communication_after_backward_overlaps_nothing() -> None:
    facts = facts_of(Net())
    step = step_of(facts.plan, 1)
    step = replace(step, times=replace(step.times, backward_end_s=10.5))
    log = start_log(facts).recorded(step)
    assert log.data["backward_compute_comm_overlap_time"] == 0
    assert log.data["backward_compute_time"] == 500_000_000


def test_averages_run_over_the_recorded_steps() -> None:
    facts = facts_of(Net())
    log = start_log(facts)
    for iteration, start_s in enumerate((9.0, 8.0, 4.0)):
        log = log.recorded(step_of(facts.plan, iteration, forward_start_s=start_s))
    assert log.samples == 3
    assert log.data["forward_compute_time"] == 6_000_000_000
    assert log.data["avg_forward_compute_time"] == 3_000_000_000
    assert log.data["avg_backward_compute_time"] == 2_500_000_000


def test_unused_parameters_have_a_size() -> None:
    facts = facts_of(Net())
    step = step_of(facts.plan, 1)
    leaves_s = tuple(
        NAN if path in ("a.weight", "wide.bias") else s
        for path, s in zip(facts.plan.paths, step.times.leaves_s, strict=True)
    )
    log = start_log(facts).recorded(replace(step, times=replace(step.times, leaves_s=leaves_s)))
    assert log.data["unused_parameter_size"] == 16 * 4 + 8 * 4
    assert log.data["prev_iteration_grad_ready_order_indices"] == "4, 3, 1, 0"
    # A step whose gradients were not timed says nothing of use or order.
    log = start_log(facts).recorded(replace(step, times=replace(step.times, leaves_s=())))
    assert log.data["unused_parameter_size"] == 0
    assert "prev_iteration_grad_ready_order_indices" not in log.data


def test_notes() -> None:
    log = start_log(facts_of(Net()))
    later = log.noting(comm_hook="fp16_compress", join_uneven_inputs=1)
    assert later.data["comm_hook"] == "fp16_compress"
    assert "comm_hook" not in log.data
    failed = later.noting_error("<class 'ValueError'>: no", 7)
    assert failed.data["join_uneven_inputs"] == 1
    assert (failed.data["has_error"], failed.data["iteration"]) == (1, 7)
    assert failed.data["error"] == "<class 'ValueError'>: no"


def test_environment_and_devices() -> None:
    facts = facts_of(nn.Linear(2, 2, device="meta"), device_ids=[3])
    environment = {"NCCL_DEBUG": "INFO", "NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    facts = replace(facts, backend_name="nccl", backend_threads=None, environment=environment)
    data = start_log(facts).data
    assert (data["nccl_debug"], data["nccl_nthreads"]) == ("INFO", "N/A")
    assert data["nccl_blocking_wait"] == "1"
    assert not any(key.startswith("gloo") for key in data)
    assert (data["device_ids"], data["output_device"]) == ("3", 3)


def test_the_sample_rate_is_that_of_torch(ranks: RankPool) -> None:
    (recorded,) = ranks.run(1, torchs_samples)
    sampled = [i for i in range(30) if is_sampled(i, 4)]
    assert recorded == [max((s for s in sampled if s <= i), default=0) for i in range(30)]


def torchs_samples(rank: int, world_size: int) -> list[int]:
    ddp = TorchDDP(nn.Linear(1, 1))
    ddp._set_ddp_runtime_logging_sample_rate(4)
    seen = []
    for _ in range(30):
        ddp(torch.ones(1, 1)).sum().backward()
        seen.append(ddp._get_ddp_logging_data()["iteration"])
    assert dist.get_world_size() == world_size
    return seen
