"""What fddp does on a device: scenarios, and their runner.

A scenario is a function of one rank of two. A value that is read or written out of order is NaN, or
that of another tensor.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist

from tests import lag
from tests.lag import captures as c
from tests.lag import functional as f
from tests.lag import nonfinite as n
from tests.lag import places as p
from tests.lag import sparse_gradients as s
from tests.lag import streams as t
from tests.lag import wrapper as w
from tests.lag.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    Scenario = Callable[[Rank], None]


def without_cpu(rank: Rank) -> None:
    """Steps, operators, votes and exchanges over a group without a backend for the CPU."""
    bare = replace(rank, group=rank.bare)
    for scenario in (
        f.value_and_grad,
        s.sparse,
        f.not_finite,
        f.gathered_after_a_failure,
        f.failed_in_a_hook,
        f.compressed,
        f.operators,
        f.uneven,
        f.virtual_ranks,
        w.joined,
        t.reconciled,
    ):
        scenario(bare)


ON_ANY_DEVICE: tuple[Scenario, ...] = (
    f.value_and_grad,
    f.of_a_meta_plan,
    f.in_graphs,
    f.reported_later,
    f.mean_of_gradients,
    f.noise,
    f.several_streams,
    f.late_gradients,
    s.sparse,
    f.shards,
    f.reduced_in_another_dtype,
    f.several_dtypes,
    f.not_finite,
    f.gathered_after_a_failure,
    f.failed_in_a_hook,
    f.compressed,
    f.operators,
    f.closed_in_flight,
    f.closed_with_handles,
    f.awaited_on_another_stream,
    f.elsewhere,
    f.dropped_in_use,
    f.closed_with_work_in_flight,
    f.held,
    f.micro_batches,
    f.scaled_by_schedules,
    f.uneven,
    f.deterministic,
    f.virtual_ranks,
    f.virtual_ranks_with_times,
    f.own_stream,
    f.independent_streams,
    f.skipped,
    f.averaged_periodically,
    s.sparse_on_streams,
    s.sparse_taken,
    w.wrapped_with_views,
    w.accumulated,
    w.weighted,
    w.frozen,
    w.wrapped_with_a_table,
    w.hooked,
    w.mixed,
    w.joined,
    w.wrapped_on_streams,
    w.wrapped_within_a_stream,
    w.trained_within_a_stream,
    w.backward_within_a_stream,
    w.raised_on_home,
    w.wrapped_in_contexts,
    w.delayed,
    w.buffers_by_a_hook,
    w.moved_inputs,
    w.failed_in_flight,
    w.aborted,
    w.wrapped,
    without_cpu,
    t.used_on_independent_streams,
    t.taken_without_a_bucket,
    t.taken_again,
    t.repaired_with_slow_kernels,
    t.repaired_on_a_stream,
    t.reconciled,
    t.finalized,
    t.optimized_in_backward,
    n.skipped_later,
    n.failed_before_flags,
    n.raised_later,
    n.flagged,
    n.wrapped_skips_later,
    p.noise_of_parts,
    p.averaged_from_a_state,
    p.sparse_of_some_ranks,
    p.buffers_changed_on_one_rank,
    p.zeros_of_buckets,
    p.averaged_on_another_stream,
    p.hook_of_other_sizes,
    p.reconciled_from_the_device,
)
# Captures, which are of the current device, and scenarios with a second device of their own.
ON_THE_CURRENT_DEVICE: tuple[Scenario, ...] = (
    f.two_devices,
    w.virtual_on_two_devices,
    w.weighted_on_two_devices,
    w.backward_within_a_stream_of_a_second_device,
    t.two_devices_on_streams,
    t.taken_on_a_second_device,
    t.awaited_on_streams_of_two_devices,
    t.used_on_streams_of_a_second_device,
    t.failed_on_a_second_device,
    t.made_on_a_second_device,
    t.hooks_on_a_second_device,
    c.captured,
    c.captured_in_other_ways,
    c.captured_after_a_rebuild,
    c.captured_shards,
    c.captured_skips,
    c.captured_module,
    c.captured_operators,
    c.captured_on_one_rank,
    c.interrupted,
    c.refused,
    c.refused_module,
    n.decided_for_two_devices,
    p.operators_on_two_devices,
    p.operators_in_turns,
    p.graphs_on_another_device,
    p.hooks_that_choose,
    p.gradients_of_virtual_ranks,
    p.times_on_another_device,
    p.state_of_another_device,
    p.labels_of_devices,
    p.averaged_on_two_devices,
    p.joined_on_another_device,
    p.unused_in_graphs,
    p.buffers_moved_on_one_rank,
)
SCENARIOS = {each.__name__: each for each in (*ON_ANY_DEVICE, *ON_THE_CURRENT_DEVICE)}


def run(number: int, names: tuple[str, ...], backend: str, seeds: range) -> None:
    """Run scenarios on this rank, on "lag" with the delays of each seed.

    The ranks are processes with a default group.

    Args:
        backend: of the device, such as "lag:nccl".
    """
    device_type, _, _ = backend.partition(":")
    lags = device_type == "lag"
    if lags:
        lag.load()
    timeout = timedelta(seconds=60)
    group = dist.new_group(backend=f"cpu:gloo,{backend}", timeout=timeout)
    bare = dist.new_group(backend=backend, timeout=timeout)
    for name in names:
        for seed in seeds:
            # Where it can differ, leaves are on another device than the current one on one backend,
            # and on each with odd seeds.
            is_away = (
                lags and (backend == "lag:lag" or seed % 2) and SCENARIOS[name] in ON_ANY_DEVICE
            )
            index = torch.accelerator.device_count() - 1 if is_away else 0
            rank = Rank(number, group, bare, torch.device(device_type, index))
            if lags:
                lag.load().seed(seed)
            try:
                # Measured steps wait for the device, as the wrapper's first ones.
                with mock.patch("fddp.ddp.logging_data._FIRST_STEPS", 0):
                    SCENARIOS[name](rank)
            except Exception as error:
                raise AssertionError(f"{name} with the delays of seed {seed}") from error
