"""Data of `_get_ddp_logging_data`, with torch's keys and units.

A `Log` is an immutable value. It starts with the data known at construction. Steps are recorded
into it at torch's rate: the first ten, then one in `sample_rate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan
from types import MappingProxyType
from typing import TypeAlias

from fddp.core.plan.plan import BucketPlan
from fddp.core.timeline import StepTimes
from fddp.ddp.arguments import Options

SAMPLE_RATE = 100
"""Period of recorded steps after the first ten; torch's default."""

_FIRST_STEPS = 10
_ABSENT = "N/A"

# Names of dtypes in torch's C++.
_DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "float16": "c10::Half",
        "bfloat16": "c10::BFloat16",
        "float32": "float",
        "float64": "double",
        "complex64": "c10::complex<float>",
        "complex128": "c10::complex<double>",
    }
)

# Environment variables, logged in lower case: always, and for one backend.
_VARIABLES = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_BACKEND_VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
        "nccl": (
            *("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"),
            *("NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
        ),
    }
)

Entry: TypeAlias = str | int


@dataclass(frozen=True)
class StaticLoggingData:
    """Data known at construction.

    Attributes:
        module_name: the class name of the wrapped module.
        rank, world_size: rank in the group, and the group's size.
        backend_name: backend of the group: "gloo", "nccl".
        backend_threads: number of gloo's threads; None for other backends.
        options: settings of the wrapper.
        plan: plan of the first step; its paths are parameter names.
        names: names of the plan's parameters in the order of registration. The log refers to
            parameters by their numbers in this order.
        environment: environment variables.
    """

    module_name: str
    rank: int
    world_size: int
    backend_name: str
    backend_threads: int | None
    options: Options
    plan: BucketPlan
    names: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Step:
    """Measurements of one step.

    Attributes:
        iteration: number of the step, from 0.
        plan: plan of the step.
        has_rebuilt: True if the plan follows the order of arrival.
        times: times of the step on this rank.
        forward_start_s: start of the forward pass, on the clock of `times`.
        clock_ns: that clock's zero in nanoseconds since the Unix epoch:
            `time.time_ns() - time.perf_counter_ns()`.
        reduced: number of reduced buckets.
    """

    iteration: int
    plan: BucketPlan
    has_rebuilt: bool
    times: StepTimes
    forward_start_s: float
    clock_ns: int
    reduced: int


@dataclass(frozen=True)
class Log:
    """Logged data.

    Attributes:
        data: the entries; sizes in bytes, durations and points in time in nanoseconds.
        numbers: number of each parameter, by name.
        samples: number of recorded steps, over which averages run.
    """

    data: Mapping[str, Entry]
    numbers: Mapping[str, int]
    samples: int = 0

    def noting(self, **entries: Entry) -> Log:
        """Return a log with these entries, such as `comm_hook` or `static_graph`."""
        return replace(self, data={**self.data, **entries})

    def noting_error(self, error: str, iteration: int) -> Log:
        """Return a log with an error and the number of forward passes until then."""
        return self.noting(has_error=1, error=error, iteration=iteration)

    def recorded(self, step: Step) -> Log:
        """Return a log with the measurements of one more step."""
        samples = self.samples + 1
        durations = _durations_ns(step)
        averages = {
            f"avg_{key}": (int(self.data.get(f"avg_{key}", 0)) * self.samples + duration) // samples
            for key, duration in durations.items()
        }
        entries = {**_plan_entries(step, self.numbers), **durations, **_moments_ns(step)}
        return replace(self, data={**self.data, **entries, **averages}, samples=samples)


def is_sampled(iteration: int, sample_rate: int = SAMPLE_RATE) -> bool:
    """Return True if a step is recorded.

    Args:
        iteration: number of the step, from 0.
        sample_rate: period of recorded steps after the first ten.

    >>> [iteration for iteration in range(20) if is_sampled(iteration, 4)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16]
    """
    return 0 < iteration <= _FIRST_STEPS or (iteration > 0 and iteration % sample_rate == 0)


def start_log(facts: StaticLoggingData) -> Log:
    """Return the log before the first step."""
    options, plan = facts.options, facts.plan
    leaves = [plan.leaves[leaf] for leaf in plan.order]
    variables = (*_VARIABLES, *_BACKEND_VARIABLES.get(facts.backend_name, ()))
    data: dict[str, Entry] = {
        "module_name": facts.module_name,
        "rank": facts.rank,
        "world_size": facts.world_size,
        "iteration": 0,
        "backend_name": facts.backend_name,
        "is_multi_device_module": int(options.is_multi_device),
        "num_parameter_tensors": len(leaves),
        "total_parameter_size_bytes": sum(leaf.nbytes for leaf in leaves),
        "dtypes": ", ".join(sorted({_DTYPE_NAMES[leaf.dtype] for leaf in leaves})),
        "bucket_sizes": _bucket_sizes(plan),
        "device_ids": ", ".join(map(str, options.device_ids or ())),
        "output_device": -1 if options.output_device is None else options.output_device,
        "broadcast_buffers": int(options.forward_sync_buffers),
        "has_sync_bn": int(options.has_sync_batch_norm),
        "bucket_cap_bytes": options.cap_bytes,
        "find_unused_parameters": int(options.arguments.find_unused_parameters),
        "gradient_as_bucket_view": int(options.arguments.gradient_as_bucket_view),
    }
    if options.arguments.static_graph:
        data["static_graph"] = 1
    if facts.backend_threads is not None:
        data["gloo_num_threads"] = facts.backend_threads
    for name in variables:
        # Some of NCCL's variables were renamed to begin with TORCH.
        older = facts.environment.get(name, _ABSENT)
        data[name.lower()] = facts.environment.get(f"TORCH_{name}", older)
    return Log(data, {name: number for number, name in enumerate(facts.names)})


def _plan_entries(step: Step, numbers: Mapping[str, int]) -> dict[str, Entry]:
    plan = step.plan
    arrivals_s = dict(enumerate(step.times.leaves_s))
    arrived = sorted((s, leaf) for leaf, s in arrivals_s.items() if not isnan(s))
    unused = [plan.leaves[leaf] for leaf in plan.order if isnan(arrivals_s.get(leaf, 0.0))]
    entries: dict[str, Entry] = {
        "iteration": step.iteration,
        "unused_parameter_size": sum(leaf.nbytes for leaf in unused),
        "has_rebuilt_buckets": int(step.has_rebuilt),
        "num_buckets_reduced": step.reduced,
    }
    if arrived:
        order = (str(numbers[plan.paths[leaf]]) for _, leaf in arrived)
        entries["prev_iteration_grad_ready_order_indices"] = ", ".join(order)
    if step.has_rebuilt:
        entries["rebuilt_bucket_sizes"] = _bucket_sizes(plan)
        entries["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(numbers[plan.paths[leaf]]) for leaf in bucket.leaves)
            for bucket in plan.buckets
        )
    return entries


def _moments_ns(step: Step) -> dict[str, int]:
    """Return points in time. Communication lasts from the first launch to the last end."""
    times = step.times
    moments_s = {
        "forward_compute_time_start": step.forward_start_s,
        "backward_compute_time_start": times.backward_start_s,
        "backward_compute_time_end": times.backward_end_s,
        "backward_comm_time_start": min(bucket.launch_s for bucket in times.buckets),
        "backward_comm_time_end": max(bucket.done_s for bucket in times.buckets),
    }
    return {key: step.clock_ns + int(moment_s * 1e9) for key, moment_s in moments_s.items()}


def _durations_ns(step: Step) -> dict[str, int]:
    moments = _moments_ns(step)
    forward = moments["forward_compute_time_start"]
    start, end = moments["backward_compute_time_start"], moments["backward_compute_time_end"]
    launch, done = moments["backward_comm_time_start"], moments["backward_comm_time_end"]
    return {
        "forward_compute_time": start - forward,
        "backward_compute_time": end - start,
        "backward_comm_time": done - launch,
        "backward_compute_comm_overlap_time": max(0, min(end, done) - launch),
    }


def _bucket_sizes(plan: BucketPlan) -> str:
    return ", ".join(str(bucket.nbytes) for bucket in plan.buckets)
