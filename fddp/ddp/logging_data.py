"""Logger of a wrapped module, with the data of `_get_ddp_logging_data` under torch's keys.

It starts with the data known at construction. Steps are recorded at torch's rate: the first ten,
then one in `sample_rate`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from math import isnan
from types import MappingProxyType, SimpleNamespace
from typing import TypeAlias

import torch.distributed as dist

from fddp.core.plan.plan import BucketPlan
from fddp.core.timeline import StepTimes
from fddp.ddp.arguments import Options
from fddp.ddp.debug_logs import log_initialised
from fddp.ddp.reducer_facade import refused
from fddp.runtime.step import Outcome
from fddp.runtime.step_info import make_info
from fddp.telemetry.step_info import SyncInfo
from fddp.transport import LoopbackGroup
from fddp.transport.torch_private import is_foreign

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


class Recorder:
    """Records steps, errors and settings. It is also `ddp.logger`.

    Attributes:
        data: logged entries; empty until a plan is known. Sizes are in bytes, durations and points
            in time in nanoseconds.
        sample_rate: period of recorded steps after the first ten.
        keeps_all: True if all other steps are measured, too, without logging them.
        iterations: number of forward passes that took part in synchronisation.
        forward_start_s: start of the last forward, on the clock of `time.perf_counter`.
        info: the last measured step.
    """

    def __init__(self) -> None:
        self.data: dict[str, Entry] = {}
        self.sample_rate = SAMPLE_RATE
        self.keeps_all = False
        self.iterations = 0
        self.forward_start_s = time.perf_counter()
        self.info: SyncInfo | None = None
        self._numbers: Mapping[str, int] = {}
        self._samples = 0  # steps over which averages run

    def start(
        self,
        options: Options,
        plan: BucketPlan,
        names: Sequence[str],
        backend_name: str,
        **own: Entry,
    ) -> None:
        """Begin the log of a group.

        Args:
            options: settings of the wrapper.
            plan: plan of the first step; its paths are parameter names.
            names: see `renumber`.
            backend_name: see the function.
            **own: other entries of the module and its group.
        """
        log_initialised(options.cap_bytes, options.first_cap_bytes)
        leaves = [plan.leaves[leaf] for leaf in plan.order]
        self._samples = 0
        self.renumber(names)
        self.data = {
            **own,
            "backend_name": backend_name,
            "iteration": 0,
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
            self.data["static_graph"] = 1
        if backend_name == "gloo":
            self.data["gloo_num_threads"] = 2
        for name in (*_VARIABLES, *_BACKEND_VARIABLES.get(backend_name, ())):
            # Some of NCCL's variables were renamed to begin with TORCH.
            older = os.environ.get(name, _ABSENT)
            self.data[name.lower()] = os.environ.get(f"TORCH_{name}", older)

    def renumber(self, names: Sequence[str]) -> None:
        """Refer to parameters by their numbers in this order from now on."""
        self._numbers = {name: number for number, name in enumerate(names)}

    def begin_forward(self) -> None:
        """Note the start of a forward pass."""
        self.forward_start_s = time.perf_counter()

    def count_forward(self) -> None:
        """Count a forward pass that takes part in synchronisation."""
        self.iterations += 1

    def keep_all(self) -> None:
        """Measure all steps from now on."""
        self.keeps_all = True

    def sample(self, rate: int) -> None:
        """Set `sample_rate`."""
        self.sample_rate = rate

    def wants(self, step: int) -> bool:
        """Return True if a step is measured. Steps count from 0."""
        return self.keeps_all or is_sampled(step, self.sample_rate)

    def record_step(self, outcome: Outcome, backward_s: tuple[float, float]) -> None:
        """Record a step that was measured, with the times at which its backward began and ended."""
        step, program = outcome.step, outcome.step.program
        assert outcome.report is not None  # was read for the record
        idle = step.idle - set(outcome.report.late)
        self.record(
            make_info(outcome, backward_s, begun_s=self.forward_start_s),
            program.plan,
            has_rebuilt=not program.control.with_order,
            reduced=len(program.plan.buckets) - len(idle),
        )

    def record(self, info: SyncInfo, plan: BucketPlan, *, has_rebuilt: bool, reduced: int) -> None:
        """Record a step that reduced `reduced` buckets of `plan`.

        Args:
            has_rebuilt: True if the plan follows the order of arrival.
        """
        self.info = info
        if not self.data or not is_sampled(info.step, self.sample_rate):
            return
        moments = _moments_ns(info.timeline, self.forward_start_s)
        durations = _durations_ns(moments)
        for key, duration in durations.items():
            total = int(self.data.get(f"avg_{key}", 0)) * self._samples + duration
            self.data[f"avg_{key}"] = total // (self._samples + 1)
        self._samples += 1
        entries = _plan_entries(plan, info.timeline, self._numbers, has_rebuilt)
        self.note(
            iteration=info.step,
            has_rebuilt_buckets=int(has_rebuilt),
            num_buckets_reduced=reduced,
            **entries,
            **durations,
            **moments,
        )

    def note(self, **entries: Entry) -> None:
        """Log entries, such as settings, if a plan is known."""
        if self.data:
            self.data |= entries

    # Names of torch's logger

    set_construction_data_and_log = set_runtime_stats_and_log = refused

    def set_error_and_log(self, text: str) -> None:
        """Log an error and the number of forward passes."""
        self.note(has_error=1, error=text, iteration=self.iterations)

    def _set_comm_hook_name(self, name: str) -> None:
        self.note(comm_hook=name)

    def _set_static_graph(self) -> None:
        self.note(static_graph=1)

    def _set_uneven_input_join(self) -> None:
        self.note(join_uneven_inputs=1)

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return the data as torch's logger does: texts in `strs_map`, numbers in `ints_map`."""
        texts = {key: value for key, value in self.data.items() if isinstance(value, str)}
        numbers = {key: value for key, value in self.data.items() if isinstance(value, int)}
        return SimpleNamespace(strs_map=texts, ints_map=numbers)


def backend_name(group: dist.ProcessGroup | LoopbackGroup) -> str:
    """Return the backend of a group, as torch logs it: "gloo", "nccl"."""
    if isinstance(group, LoopbackGroup):
        return "loopback"
    return group.name() if is_foreign(group) else dist.get_backend(group)


def is_sampled(step: int, sample_rate: int = SAMPLE_RATE) -> bool:
    """Return True if a step is recorded.

    Args:
        step: number of the step, from 0.
        sample_rate: period of recorded steps after the first ten.

    >>> [step for step in range(20) if is_sampled(step, 4)]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16]
    """
    return step <= _FIRST_STEPS or step % sample_rate == 0


def _plan_entries(
    plan: BucketPlan, times: StepTimes, numbers: Mapping[str, int], has_rebuilt: bool
) -> dict[str, Entry]:
    arrivals_s = dict(enumerate(times.leaves_s))
    arrived = sorted((s, leaf) for leaf, s in arrivals_s.items() if not isnan(s))
    unused = [plan.leaves[leaf] for leaf in plan.order if isnan(arrivals_s.get(leaf, 0.0))]
    entries: dict[str, Entry] = {"unused_parameter_size": sum(leaf.nbytes for leaf in unused)}
    if arrived:
        order = (str(numbers[plan.paths[leaf]]) for _, leaf in arrived)
        entries["prev_iteration_grad_ready_order_indices"] = ", ".join(order)
    if has_rebuilt:
        entries["rebuilt_bucket_sizes"] = _bucket_sizes(plan)
        entries["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(numbers[plan.paths[leaf]]) for leaf in bucket.leaves)
            for bucket in plan.buckets
        )
    return entries


def _moments_ns(times: StepTimes, forward_start_s: float) -> dict[str, int]:
    """Return points in time. Communication lasts from the first launch to the last end."""
    clock_ns = time.time_ns() - time.perf_counter_ns()
    moments_s = {
        "forward_compute_time_start": forward_start_s,
        "backward_compute_time_start": times.backward_start_s,
        "backward_compute_time_end": times.backward_end_s,
        "backward_comm_time_start": min(bucket.launch_s for bucket in times.buckets),
        "backward_comm_time_end": max(bucket.done_s for bucket in times.buckets),
    }
    return {key: clock_ns + int(moment_s * 1e9) for key, moment_s in moments_s.items()}


def _durations_ns(moments: Mapping[str, int]) -> dict[str, int]:
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
