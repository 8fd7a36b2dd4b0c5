"""Logging data: torch's keys and values, where torch has them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fddp
from fddp.core.plan.plan import BucketPlan
from fddp.core.timeline import BucketTimes, StepTimes
from fddp.ddp.arguments import Arguments, checked
from fddp.ddp.logging_data import Recorder
from fddp.telemetry.step_info import SyncInfo, Trace
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


def plan_of(module: nn.Module) -> BucketPlan:
    return plan_buckets(dict(module.named_parameters()))


def recorder_of(module: nn.Module, backend_name: str = "gloo", **given: Any) -> Recorder:
    recorder = Recorder()
    recorder.start(
        checked(module, Arguments(**given)),
        plan_of(module),
        [name for name, _ in module.named_parameters()],
        backend_name,
        module_name=type(module).__name__,
        rank=0,
        world_size=1,
    )
    return recorder


def times_of(plan: BucketPlan) -> StepTimes:
    """Gradients of the last registered parameters come first."""
    names = [name for name, _ in Net().named_parameters()]
    leaves_s = tuple(11.0 - names.index(path) / 10 for path in plan.paths)
    buckets = tuple(
        BucketTimes(number, bucket.nbytes, 11.0 + number, 11.0 + number, 13.0 + number)
        for number, bucket in enumerate(plan.buckets)
    )
    return StepTimes(buckets, 10.0, 12.5, 15.0, leaves_s)


def record(
    recorder: Recorder,
    plan: BucketPlan,
    iteration: int,
    *,
    times: StepTimes | None = None,
    forward_start_s: float = 9.0,
) -> None:
    info = SyncInfo(
        step=iteration,
        world_size=1,
        active=1,
        total_weight=1.0,
        used=plan.paths,
        unused=(),
        grad_norm=1.0,
        all_finite=True,
        repaired=(),
        transport="loopback",
        transport_reason="",
        timeline=times or times_of(plan),
        trace=Trace((), (), (), ()),
    )
    recorder.forward_start_s = forward_start_s
    recorder.record(info, plan, has_rebuilt=False, reduced=len(plan.buckets))


GIVEN: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True, "bucket_cap_mb": 1},
    {"static_graph": True, "gradient_as_bucket_view": True, "forward_sync_buffers": False},
    {"bucket_cap_mb": 1e-5, "find_unused_parameters": True},
    {"bucket_cap_mb_list": [1e-5, 1]},
]


# What appears in fddp's log sooner, or always
SOONER = {"can_set_static_graph"}
REBUILT = {"rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "has_rebuilt_buckets"}


def both_logs(rank: int, world_size: int, given: dict[str, Any]) -> list[Any]:
    """Per class: logs after construction and after three steps, iterations of a sampled log, and
    the names of dtypes."""
    found = []
    for ddp in (TorchDDP, partial(fddp.DistributedDataParallel, transport="c10d")):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "find_unused_parameters=True")
            model = ddp(Net(), **given)
            logs = [model._get_ddp_logging_data()]
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
            logs.append(model._get_ddp_logging_data())
            model._set_ddp_runtime_logging_sample_rate(4)
            sampled = []
            for _ in range(30):
                model(torch.ones(2, 4)).sum().backward()
                sampled.append(model._get_ddp_logging_data()["iteration"])
        found.append([*logs, sampled, ddp(of_all_dtypes())._get_ddp_logging_data()["dtypes"]])
    return found


@pytest.mark.parametrize("given", GIVEN)
def test_logs_are_those_of_torch(ranks: RankPool, given: dict[str, Any]) -> None:
    """All keys, and the values of those that do not depend on the clock."""
    # With these, torch rebuilds its buckets later or never.
    late = {"static_graph", "find_unused_parameters"} & given.keys()
    for theirs, ours in ranks.run(1, both_logs, given):
        stock, own = theirs.pop(1), ours.pop(1)
        apart = SOONER | REBUILT if late else SOONER
        assert own.keys() - apart == stock.keys() - apart
        assert own.keys() >= apart
        for key in own.keys() - apart:
            assert is_timed(key) or own[key] == stock[key], key
        assert ours == theirs


DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def of_all_dtypes() -> nn.Module:
    module = nn.Module()
    for name in DTYPES:
        setattr(module, f"of_{name}", nn.Parameter(torch.zeros(1, dtype=getattr(torch, name))))
    return module


def is_timed(key: str) -> bool:
    return "_time" in key


def test_times_are_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = SimpleNamespace(
        time_ns=lambda: 1_000_000_000_007, perf_counter_ns=lambda: 7, perf_counter=lambda: 0.0
    )
    monkeypatch.setattr("fddp.ddp.logging_data.time", clocks)
    recorder, plan = recorder_of(Net()), plan_of(Net())
    record(recorder, plan, 1)
    second = 1_000_000_000
    times = {key: value for key, value in recorder.data.items() if is_timed(key)}
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
    # Communication after backward overlaps nothing.
    record(recorder, plan, 2, times=replace(times_of(plan), backward_end_s=10.5))
    assert recorder.data["backward_compute_comm_overlap_time"] == 0
    assert recorder.data["backward_compute_time"] == 500_000_000


def test_averages_run_over_the_recorded_steps() -> None:
    recorder, plan = recorder_of(Net()), plan_of(Net())
    for iteration, start_s in enumerate((9.0, 8.0, 4.0)):
        record(recorder, plan, iteration, forward_start_s=start_s)
    assert recorder.data["forward_compute_time"] == 6_000_000_000
    assert recorder.data["avg_forward_compute_time"] == 3_000_000_000
    assert recorder.data["avg_backward_compute_time"] == 2_500_000_000


def test_unused_parameters_have_a_size() -> None:
    recorder, plan = recorder_of(Net()), plan_of(Net())
    times = times_of(plan)
    leaves_s = tuple(
        NAN if path in ("a.weight", "wide.bias") else s
        for path, s in zip(plan.paths, times.leaves_s, strict=True)
    )
    record(recorder, plan, 1, times=replace(times, leaves_s=leaves_s))
    assert recorder.data["unused_parameter_size"] == 16 * 4 + 8 * 4
    assert recorder.data["prev_iteration_grad_ready_order_indices"] == "4, 3, 1, 0"
    # A step whose gradients were not timed says nothing of use or order.
    recorder = recorder_of(Net())
    record(recorder, plan, 1, times=replace(times, leaves_s=()))
    assert recorder.data["unused_parameter_size"] == 0
    assert "prev_iteration_grad_ready_order_indices" not in recorder.data


def test_notes() -> None:
    recorder, plan = recorder_of(Net()), plan_of(Net())
    assert "comm_hook" not in recorder.data
    recorder.note(comm_hook="fp16_compress", join_uneven_inputs=1)
    assert recorder.data["comm_hook"] == "fp16_compress"
    record(recorder, plan, 7)
    recorder.iterations = 9
    recorder.set_error_and_log("<class 'ValueError'>: no")
    assert recorder.data["join_uneven_inputs"] == 1
    assert (recorder.data["has_error"], recorder.data["iteration"]) == (1, 9)
    assert recorder.data["error"] == "<class 'ValueError'>: no"


def test_nothing_is_logged_before_a_plan_is_known() -> None:
    recorder = Recorder()
    recorder.note(comm_hook="fp16_compress")
    record(recorder, plan_of(Net()), 1)
    assert recorder.data == {}
    assert recorder.info is not None


def test_environment_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "0")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.delenv("NCCL_NTHREADS", raising=False)
    module = nn.Linear(2, 2, device="meta")
    data = recorder_of(module, backend_name="nccl", device_ids=[3]).data
    assert (data["nccl_debug"], data["nccl_nthreads"]) == ("INFO", "N/A")
    assert data["nccl_blocking_wait"] == "1"
    assert not any(key.startswith("gloo") for key in data)
    assert (data["device_ids"], data["output_device"]) == ("3", 3)
